"""TRL's own trainers, of a release before those that this library's trainers need, on a patched model, on a CPU."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hf_common import Case, main, sums


def run(folder: Path, fused: bool, trainer: str, rows: list[dict[str, Any]], **options: Any) -> None:
    """Train with a trainer of TRL, given by its name."""
    import importlib

    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from liger_chunked import apply_liger_kernel

    name = trainer.removesuffix("Trainer")
    places = [trl, *(importlib.import_module(f"trl.experimental.{x}") for x in (name.lower(),) if not hasattr(trl, trainer))]
    (place,) = (place for place in places if hasattr(place, trainer))
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
    extra = {"reward_funcs": lambda completions, **kwargs: [float(len(x) % 7) for x in completions]} if name == "GRPO" else {}
    if name in ("DPO", "KTO"):
        extra["ref_model"] = AutoModelForCausalLM.from_pretrained(folder / "llama")
    getattr(place, trainer)(
        model=model,
        args=getattr(place, f"{name}Config")(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "llama"),
        **extra,
    ).train()


def case(name: str, trainer: str, rows: list[dict[str, Any]], real_logits: tuple[str, ...] = (), **options: Any) -> Case:
    return Case(name, lambda folder, fused: run(folder, fused, trainer, rows, **options), real_logits)


SFT = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in sums()]
RATED = [
    {"prompt": r["prompt"], "completion": r[("rejected", "chosen")[i % 2]], "label": bool(i % 2)}
    for i, r in enumerate(sums())
]
GRPO = {"num_generations": 4, "max_completion_length": 8, "beta": 0.0, "num_iterations": 2}
CASES = [
    case("sft", "SFTTrainer", SFT, ("x",)),
    case("dpo", "DPOTrainer", sums(), ("x",)),
    case("kto", "KTOTrainer", RATED, ("x",)),
    case("orpo", "ORPOTrainer", sums(), ("x",)),
    case("cpo", "CPOTrainer", sums(), ("x",), loss_type="simpo", cpo_alpha=0.0),
    case("grpo", "GRPOTrainer", [{"prompt": row["prompt"]} for row in sums()], ("x",), **GRPO),
]

if __name__ == "__main__":
    sys.exit(main(CASES, ("trl", "torch", "transformers", "accelerate"), ["trl"]))
