"""Code shared by the TRL examples, in addition to the toy model: settings for their configs, and data sets.

python examples/trl_dpo.py                       a tiny random model, built here, on the CPU
python examples/trl_dpo.py --model PATH          your model, on a GPU if there is one
"""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any, NamedTuple

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # ORPO, CPO and GKD: their interface may change

import torch
from datasets import Dataset, disable_progress_bars
from toy import load_model, load_tokenizer, on_gpu, parser, sums

# TRL calls transformers in a deprecated way.
warnings.filterwarnings("ignore", r".*gradient_checkpointing.* is deprecated and will be removed in v6", FutureWarning)
disable_progress_bars()


class Setup(NamedTuple):
    """`model`, `tokenizer` and `teacher` to pass to a trainer, `settings` for its config."""

    model: Any
    tokenizer: Any
    settings: dict[str, Any]
    teacher: Any


def setup() -> Setup:
    """Read `--model`, `--teacher` and `--steps` from the command line."""
    arguments = parser()
    arguments.add_argument("--teacher", help="a path to a teacher for distillation; none: another tiny one")
    options = arguments.parse_args()
    gpu = on_gpu(options)
    dtype = torch.bfloat16 if gpu else torch.float32
    settings = {
        "output_dir": tempfile.mkdtemp(prefix="liger-trl-"),
        "max_steps": options.steps,
        "logging_steps": max(1, options.steps // 5),
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-6 if options.model else 3e-3,
        "use_cpu": not gpu,
        "bf16": gpu,
        "gradient_checkpointing": gpu,
        "dataloader_pin_memory": gpu,
        "save_strategy": "no",
        "report_to": "none",
    }
    model, teacher = load_model(options.model, dtype), load_model(options.teacher, dtype, seed=1)
    return Setup(model, load_tokenizer(options.model), settings, teacher)


def preference_data() -> Dataset:
    return Dataset.from_list(sums())


def prompt_data() -> Dataset:
    return Dataset.from_list([{"prompt": row["prompt"]} for row in sums()])
