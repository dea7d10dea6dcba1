# /// script
# requires-python = "==3.12.*"
# dependencies = [
#     "torch==2.14.1", "transformers==5.20.1", "accelerate==1.15.0", "datasets==5.0.1", "peft==0.21.2", "trl==1.14.1",
#     "addict", "art", "colorama", "einops", "evaluate", "fire", "kernels==0.17.2", "mistral-common", "numba",
#     "posthog", "pydantic", "python-dotenv", "pyyaml", "requests", "schedulefree", "scipy", "sentencepiece",
#     "setuptools", "tensorboard", "trackio", "typer", "wandb", "zstandard", "axolotl-contribs-lgpl==0.0.7",
#     "axolotl-contribs-mit==0.0.6",
# ]
# [tool.frameworks]
# no-deps = ["axolotl==0.21.0", "bitsandbytes==0.50.2", "fastcore"]
# ///
"""Axolotl 0.21.0: the plugin of docs/frameworks.md, through the function behind `axolotl train`, on a CPU.

Environment: the packages of the header, which Axolotl pins, without those that need a GPU (xformers, torchao,
liger-kernel, flash-linear-attention) and without cloud storage. No module is a stub.

Trains sft (plain, packed, LoRA), and dpo, kto, orpo, simpo and grpo, which are trainers of TRL. See hf_common.py for
what is compared.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hf_common import Case, main, sums, write_rows

PLUGIN = """
from axolotl.integrations.base import BasePlugin
from liger_chunked import apply_liger_kernel


class LigerChunkedPlugin(BasePlugin):
    def post_model_build(self, cfg, model):
        print(apply_liger_kernel(model))
"""

REWARDS = """
def length(completions, **kwargs):
    return [float(len(completion) % 7) for completion in completions]


def transform(cfg, *args, **kwargs):
    return lambda example, tokenizer=None: example
"""


def run(folder: Path, fused: bool, **options: Any) -> None:
    """Do what `axolotl train config.yaml` does."""
    import yaml
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.cli.train import do_train

    config = {
        "base_model": str(folder / "llama"),
        "output_dir": tempfile.mkdtemp(dir=folder),
        "dataset_prepared_path": tempfile.mkdtemp(dir=folder),
        "sequence_len": 256,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "num_epochs": 1,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "learning_rate": 1e-3,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "attn_implementation": "sdpa",
        "logging_steps": 1,
        "save_strategy": "no",
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,
        "val_set_size": 0,
        "seed": 1,
        **({"plugins": ["liger_chunked_plugin.LigerChunkedPlugin"]} if fused else {}),
        **options,
    }
    config["datasets"] = [{**dataset, "path": str(folder / dataset["path"])} for dataset in config["datasets"]]
    path = Path(config["output_dir"]) / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    sys.path.insert(0, str(folder))
    do_train(load_cfg(str(path)), TrainerCliArgs())


def case(name: str, real_logits: tuple[str, ...] = (), **options: Any) -> Case:
    return Case(name, lambda folder, fused: run(folder, fused, **options), real_logits)


PACKAGES = ("axolotl", "torch", "transformers", "trl", "peft")
ANSWERS = [{"path": "answers.jsonl", "ds_type": "json", "type": "alpaca"}]
PAIRS = [{"path": "pairs.jsonl", "ds_type": "json", "split": "train", "type": "chatml.intel"}]
TALKS = [{"path": "talks.jsonl", "ds_type": "json", "type": "chat_template.argilla"}]
RATINGS = [{"path": "ratings.jsonl", "ds_type": "json", "split": "train", "type": "chatml.argilla"}]
QUESTIONS = [{"path": "questions.jsonl", "ds_type": "json", "split": "train", "type": "axolotl_rewards.transform"}]
LORA = {
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_target_linear": True,
    # Axolotl's kernels for LoRA need a GPU.
    "lora_mlp_kernel": False,
    "lora_qkv_kernel": False,
    "lora_o_kernel": False,
}
GRPO = {
    "reward_funcs": ["axolotl_rewards.length"],
    "num_generations": 4,
    "max_completion_length": 8,
    "use_vllm": False,
}
ENTROPY = ("exp at",)  # of `entropy_from_logits` of TRL, a metric
CASES = [
    case("sft", datasets=ANSWERS),
    case("sft-packed", datasets=ANSWERS, sequence_len=512, sample_packing=True, pad_to_sequence_len=True),
    case("sft-lora", datasets=ANSWERS, **LORA),
    case("dpo", ENTROPY, rl="dpo", datasets=PAIRS),
    case("kto", ENTROPY, rl="kto", datasets=RATINGS, remove_unused_columns=False),
    case("orpo", rl="orpo", datasets=TALKS, chat_template="chatml", remove_unused_columns=False),
    case("simpo", rl="simpo", simpo_gamma=0.5, datasets=PAIRS),
    case("grpo", (*ENTROPY, "softmax at"), rl="grpo", datasets=QUESTIONS, trl=GRPO),
]


def prepare(folder: Path) -> None:
    (folder / "liger_chunked_plugin.py").write_text(PLUGIN)
    (folder / "axolotl_rewards.py").write_text(REWARDS)
    rows = sums()
    write_rows(
        folder / "answers.jsonl", [{"instruction": r["prompt"], "input": "", "output": r["chosen"]} for r in rows]
    )
    write_rows(folder / "pairs.jsonl", [{"question": r["prompt"], **r} for r in rows])

    def talk(row: dict[str, str], answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[answer]}]

    write_rows(folder / "talks.jsonl", [{key: talk(r, key) for key in ("chosen", "rejected")} for r in rows])
    ratings = [
        {"instruction": r["prompt"], "completion": r[("rejected", "chosen")[i % 2]], "label": bool(i % 2)}
        for i, r in enumerate(rows)
    ]
    write_rows(folder / "ratings.jsonl", ratings)
    write_rows(folder / "questions.jsonl", [{"prompt": row["prompt"]} for row in rows])


if __name__ == "__main__":
    sys.exit(main(CASES, PACKAGES, ["axolotl.cli.train", "axolotl.train"], prepare))
