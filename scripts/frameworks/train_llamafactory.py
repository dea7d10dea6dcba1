# /// script
# requires-python = "==3.11.*"
# dependencies = [
#     "torch==2.13.0", "transformers==5.6.0", "accelerate==1.11.0", "datasets==4.0.0", "peft==0.18.1", "trl==0.24.0",
#     "av<=16", "einops", "fire", "matplotlib", "modelscope", "omegaconf", "pandas", "pillow", "protobuf", "psutil",
#     "pydantic", "scipy", "sentencepiece", "setuptools", "tiktoken", "tyro<0.9",
# ]
# [tool.frameworks]
# no-deps = ["llamafactory==0.9.5"]
# ///
"""LLaMA-Factory 0.9.5: the launcher of docs/frameworks.md, through `run_exp`, on a CPU.

Environment: the packages of the header, which are the newest that LLaMA-Factory accepts, without its web interface.
`torchaudio` is a stub.

Trains the stages pt, sft, dpo, kto and rm, with LoRA, packing, and the losses that LLaMA-Factory has itself. See
hf_common.py for what is compared. `use_asft_loss` and `use_eaft_loss` need real logits.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import stub
from hf_common import Case, main, sums, write_rows


def run(folder: Path, fused: bool, **options: Any) -> None:
    """Do what `python train.py config.yaml` of docs/frameworks.md does."""
    from llamafactory.train.tuner import run_exp

    if fused:
        from liger_chunked import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    arguments = {
        "model_name_or_path": str(folder / "llama"),
        "do_train": True,
        "finetuning_type": "full",
        "dataset_dir": str(folder),
        "template": "default",
        "cutoff_len": 128,
        "output_dir": tempfile.mkdtemp(dir=folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "preprocessing_num_workers": 1,
        **options,
    }
    run_exp(arguments)


def case(name: str, real_logits: tuple[str, ...] = (), **options: Any) -> Case:
    return Case(name, lambda folder, fused: run(folder, fused, **options), real_logits)


PACKAGES = ("llamafactory", "torch", "transformers", "trl", "peft")
CASES = [
    case("pt", stage="pt", dataset="text"),
    case("sft", stage="sft", dataset="answers"),
    case("sft-lora", stage="sft", dataset="answers", finetuning_type="lora", lora_target="all"),
    case("sft-packing", stage="sft", dataset="answers", packing=True),
    case("dft", stage="sft", dataset="answers", use_dft_loss=True),
    case("asft", ("kl_div at",), stage="sft", dataset="answers", use_asft_loss=True),
    case("eaft", ("topk at",), stage="sft", dataset="answers", use_eaft_loss=True),
    case("dpo", stage="dpo", dataset="pairs"),
    case("orpo", stage="dpo", dataset="pairs", pref_loss="orpo"),
    case("simpo", stage="dpo", dataset="pairs", pref_loss="simpo"),
    case("kto", stage="kto", dataset="ratings"),
    case("rm", stage="rm", dataset="pairs"),
]


def prepare(folder: Path) -> None:
    rows = sums()
    write_rows(folder / "text.json", [{"text": f"{row['prompt']} {row['chosen']}"} for row in rows])
    write_rows(
        folder / "answers.json", [{"instruction": r["prompt"], "input": "", "output": r["chosen"]} for r in rows]
    )
    pairs = [{"instruction": row["prompt"], "input": "", **row} for row in rows]
    write_rows(folder / "pairs.json", pairs)
    ratings = [
        {
            "instruction": row["prompt"],
            "input": "",
            "output": row["chosen" if i % 2 else "rejected"],
            "tag": bool(i % 2),
        }
        for i, row in enumerate(rows)
    ]
    write_rows(folder / "ratings.json", ratings)
    columns = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
    answers = {"prompt": "instruction", "query": "input", "response": "output"}
    info = {
        "text": {"file_name": "text.json", "columns": {"prompt": "text"}},
        "answers": {"file_name": "answers.json", "columns": answers},
        "pairs": {"file_name": "pairs.json", "ranking": True, "columns": columns},
        "ratings": {"file_name": "ratings.json", "columns": {**answers, "kto_tag": "tag"}},
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))


if __name__ == "__main__":
    stub("torchaudio")
    sys.exit(main(CASES, PACKAGES, ["llamafactory.train.tuner"], prepare))
