# /// script
# requires-python = "==3.10.*"
# dependencies = [
#     "torch==2.9.1", "transformers==5.16.1", "accelerate==1.15.0", "datasets==4.8.5", "peft==0.19.1", "trl==1.6.0",
#     "aiofiles", "aiohttp", "backoff", "httpx", "jsonlines", "jsonschema", "mlflow-skinny", "numpy<2.4",
#     "omegaconf==2.4.0.dev4", "packaging", "pandas<3", "pexpect", "pillow", "posthog<8", "protobuf", "pydantic<2.14",
#     "requests", "rich", "safetensors", "setuptools", "tensorboard", "tqdm", "typer<0.25.2", "wandb<0.26",
# ]
# [tool.frameworks]
# no-deps = ["oumi==0.9", "torchvision==0.24.1"]
# ///
"""oumi 0.9: the file of docs/frameworks.md, through the function behind `oumi train`, on a CPU.

Environment: the packages of the header, which oumi accepts, without its launcher and its evaluation. No module is a
stub.

Trains with the trainer types `HF`, `OUMI` and `TRL_SFT`. See hf_common.py for what is compared.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hf_common import Case, main, sums, write_rows

KERNELS = """
from liger_chunked import apply_liger_kernel_to_llama

apply_liger_kernel_to_llama({options})
"""

# Only the answers count. The template is the beginning of a turn in the tokenizer's chat template.
COLLATOR = {
    "collator_name": "text_completions_only_with_padding",
    "collator_kwargs": {"response_template": "assistant: ", "train_target": "final_assistant_turn"},
}


def run(folder: Path, fused: bool, trainer_type: str, data: dict[str, Any], kernels: str = "", **options: Any) -> None:
    """Do what `OUMI_EXTRA_DEPS_FILE=deps.txt oumi train -c config.yaml` does."""
    import yaml

    output = Path(tempfile.mkdtemp(dir=folder))
    if fused:
        (output / "oumi_kernels.py").write_text(KERNELS.format(options=kernels))
        (output / "deps.txt").write_text(f"{output / 'oumi_kernels.py'}\n")
        os.environ["OUMI_EXTRA_DEPS_FILE"] = str(output / "deps.txt")
    path = str(folder / data.pop("dataset_path"))
    config = {
        "model": {
            "model_name": str(folder / "llama"),
            "model_max_length": 128,
            "torch_dtype_str": "float32",
            "attn_implementation": "sdpa",
            "device_map": "cpu",
        },
        "data": {"train": {**COLLATOR, "datasets": [{"dataset_path": path, **data}]}},
        "training": {
            "trainer_type": trainer_type,
            "output_dir": str(output),
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_steps": 0,
            "save_final_model": False,
            "enable_wandb": False,
            "enable_tensorboard": False,
            "dataloader_num_workers": 0,
            "include_performance_metrics": False,
            **options,
        },
    }
    (output / "config.yaml").write_text(yaml.safe_dump(config))
    from oumi.core.configs import TrainingConfig
    from oumi.train import train

    configuration = TrainingConfig.from_yaml(output / "config.yaml")
    configuration.finalize_and_validate()
    train(configuration)


def case(name: str, trainer_type: str, data: dict[str, Any], real_logits: tuple[str, ...] = (), **options: Any) -> Case:
    return Case(name, lambda folder, fused: run(folder, fused, trainer_type, dict(data), **options), real_logits)


SFT = {"dataset_name": "text_sft_jsonl", "dataset_path": "answers.jsonl"}
CASES = [
    case("hf", "HF", SFT),
    case("oumi", "OUMI", SFT),
    case("trl-sft", "TRL_SFT", SFT, ("exp at",)),
]


def prepare(folder: Path) -> None:
    def talk(row: dict[str, str], answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[answer]}]

    rows = sums()
    write_rows(folder / "answers.jsonl", [{"messages": talk(row, "chosen")} for row in rows])


if __name__ == "__main__":
    # oumi is imported in each run, because it reads OUMI_EXTRA_DEPS_FILE once.
    sys.exit(main(CASES, ("oumi", "torch", "transformers", "trl"), ["trl", "datasets"], prepare))
