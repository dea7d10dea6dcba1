"""What the TRL examples share: a model, its tokenizer, sums to learn, and settings.

python examples/trl_dpo.py                       a tiny random model, built here, on the CPU
python examples/trl_dpo.py --model PATH          a model of yours, on a GPU where there is one
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import warnings
from typing import Any, NamedTuple

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # ORPO, CPO and GKD: their interface may change

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# Of TRL's own calls of transformers.
warnings.filterwarnings("ignore", r".*gradient_checkpointing.* is deprecated and will be removed in v6", FutureWarning)
disable_progress_bars()

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


class Setup(NamedTuple):
    """`model`, `tokenizer` and `teacher` to pass to a trainer, `settings` for its config."""

    model: Any
    tokenizer: Any
    settings: dict[str, Any]
    teacher: Any


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte."""
    vocabulary = [*SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=259, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def setup() -> Setup:
    """Read `--model`, `--teacher` and `--steps` from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a path to a model; none: a tiny one, built in code")
    parser.add_argument("--teacher", help="a path to a teacher for distillation; none: another tiny one")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    on_gpu = options.model is not None and torch.cuda.is_available()

    def model(path: str | None, seed: int) -> Any:
        if path is None:
            return tiny_model(seed)
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if on_gpu else torch.float32)

    settings = {
        "output_dir": tempfile.mkdtemp(prefix="liger-trl-"),
        "max_steps": options.steps,
        "logging_steps": max(1, options.steps // 5),
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-6 if options.model else 3e-3,
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "gradient_checkpointing": on_gpu,
        "dataloader_pin_memory": on_gpu,
        "save_strategy": "no",
        "report_to": "none",
    }
    tokenizer = byte_tokenizer() if options.model is None else AutoTokenizer.from_pretrained(options.model)
    return Setup(model(options.model, 0), tokenizer, settings, model(options.teacher, 1))


def sums(n: int = 64) -> list[dict[str, str]]:
    """Sums, each with a right and a wrong answer."""
    numbers = random.Random(0)
    pairs = [(numbers.randrange(10), numbers.randrange(10)) for _ in range(n)]
    return [{"prompt": f"{a} + {b} =", "chosen": f" {a + b}", "rejected": f" {a + b + 1}"} for a, b in pairs]


def preference_data() -> Dataset:
    return Dataset.from_list(sums())


def prompt_data() -> Dataset:
    return Dataset.from_list([{"prompt": row["prompt"]} for row in sums()])
