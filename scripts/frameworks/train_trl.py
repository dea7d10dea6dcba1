# /// script
# requires-python = "==3.10.*"
# dependencies = [
#     "torch==2.9.1", "transformers==5.5.4", "accelerate==1.15.0", "datasets==5.2.0", "trl==1.13.0", "peft==0.21.2",
# ]
# ///
"""TRL 1.13.0: its own trainers on a patched model, on a CPU.

Environment: the packages of the header. This release is older than the `Liger*Trainer` classes need.

Trains SFT with `loss_type="nll"`, DPO, KTO, ORPO, SimPO and GRPO. SFT's default, "chunked_nll", is TRL's own fused
loss, which does not call the head. The entropy that trainers log is fused too.
See hf_common.py for what is compared.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from hf_common import Case, main, sums


def run(folder: Path, fused: bool, trainer: str, rows: list[dict[str, Any]], **options: Any) -> None:
    """Train with a trainer of TRL, given by its name."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from liger_chunked import apply_liger_kernel

    name = trainer.removesuffix("Trainer")
    place = trl if hasattr(trl, trainer) else importlib.import_module(f"trl.experimental.{name.lower()}")
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    if fused:
        print(apply_liger_kernel(model))
    settings = {
        "output_dir": tempfile.mkdtemp(dir=folder),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        **options,
    }
    extra: dict[str, Any] = {}
    if name == "GRPO":
        extra["reward_funcs"] = lambda completions, **kwargs: [float(len(x) % 7) for x in completions]
    if name in ("DPO", "KTO"):
        extra["ref_model"] = AutoModelForCausalLM.from_pretrained(folder / "llama")
    getattr(place, trainer)(
        model=model,
        args=getattr(place, f"{name}Config")(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "llama"),
        **extra,
    ).train()


def case(name: str, trainer: str, rows: list[dict[str, Any]], **options: Any) -> Case:
    return Case(name, lambda folder, fused: run(folder, fused, trainer, rows, **options))


SFT = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in sums()]
RATED = [
    {"prompt": r["prompt"], "completion": r[("rejected", "chosen")[i % 2]], "label": bool(i % 2)}
    for i, r in enumerate(sums())
]
GRPO = {"num_generations": 4, "max_completion_length": 8, "beta": 0.0, "num_iterations": 2}
CASES = [
    case("sft", "SFTTrainer", SFT, loss_type="nll"),
    case("dpo", "DPOTrainer", sums()),
    case("kto", "KTOTrainer", RATED),
    case("orpo", "ORPOTrainer", sums()),
    case("simpo", "CPOTrainer", sums(), loss_type="simpo", cpo_alpha=0.0),
    case("grpo", "GRPOTrainer", [{"prompt": row["prompt"]} for row in sums()], **GRPO),
]

if __name__ == "__main__":
    sys.exit(main(CASES, ("trl", "torch", "transformers", "accelerate"), ["trl"]))
