# /// script
# requires-python = "==3.12.*"
# dependencies = ["torch==2.14.1", "transformers==5.24.0", "accelerate==1.15.0", "peft==0.21.2"]
# ///
"""HF Trainer of transformers 5.24.0: a patched model, on a CPU.

Environment: the packages of the header. The oldest ones that were run are Python 3.10, torch 2.9.1 and transformers
5.5.4: make such an environment and name it with `--keep`.

Trains Llama and Qwen 3, with gradient checkpointing, with LoRA on the head, with a `compute_loss_func`, and with
`label_smoothing_factor`. See hf_common.py for what is compared.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hf_common import Case, main, sums


def rows(tokenizer: Any) -> list[dict[str, list[int]]]:
    encoded = []
    for row in sums():
        start, end = tokenizer(row["prompt"])["input_ids"], tokenizer(row["chosen"])["input_ids"]
        encoded.append({"input_ids": start + end, "labels": [-100] * len(start) + end})
    return encoded


def own_loss(output: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A `compute_loss_func` as a user would write it: a cross entropy of the output's logits."""
    import torch.nn.functional as F

    logits = output.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def run(folder: Path, fused: bool, family: str, *, own: bool = False, lora: bool = False, **options: Any) -> None:
    """Do what docs/frameworks.md says: patch the model, and pass it to Trainer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    from liger_chunked import apply_liger_kernel

    model = AutoModelForCausalLM.from_pretrained(folder / family)
    tokenizer = AutoTokenizer.from_pretrained(folder / family)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=True))
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
        "remove_unused_columns": False,
        **options,
    }
    data = rows(tokenizer)
    trainer = Trainer(
        model,
        args=TrainingArguments(**settings),
        train_dataset=data,
        eval_dataset=data[:8],
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        compute_loss_func=own_loss if own else None,
    )
    trainer.train()
    print(trainer.evaluate())


def case(name: str, family: str = "llama", **options: Any) -> Case:
    return Case(name, lambda folder, fused: run(folder, fused, family, **options), model=family)


CASES = [
    case("llama"),
    case("qwen3", "qwen3"),
    case("checkpointing", gradient_checkpointing=True),
    case("lora", lora=True),
    case("own-loss", own=True),
    case("label-smoothing", label_smoothing_factor=0.1),
]

if __name__ == "__main__":
    sys.exit(main(CASES, ("transformers", "torch", "accelerate", "peft"), []))
