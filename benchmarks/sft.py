"""SFT steps of Hugging Face models: forward, backward and AdamW, in bfloat16 throughout, on random tokens.

python -m benchmarks.sft                            Llama-3-8B, Llama-3.2-1B, Qwen2.5-0.5B
python -m benchmarks.sft llama-3-8b:2:8192          model:sequences:length
python -m benchmarks.sft --longest llama-3-8b:4:4096      the longest sequences that fit, four at a time

Weights are random, drawn anew for each contender from one seed. A contender is transformers' model as it is, ours after
`apply_liger_kernel(model)`, or Liger-Kernel's after its function for the model's family, each with all that is on by
default. Checkpointing of every layer, attention through SDPA, every token a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import models
from benchmarks.harness import DEVICE, OURS, STOCK, Table
from benchmarks.steps import TrainingStep, allocated_mib, compare, parts, steps_parser

SHAPES = [
    "llama-3-8b:4:4096",
    "llama-3-8b:4:8192",
    "llama-3-8b:4:16384",
    "qwen2.5-0.5b:16:4096",
    "llama-3.2-1b:16:4096",
]
LONGEST = ["llama-3-8b:4:4096", "llama-3.2-1b:1:4096", "qwen2.5-0.5b:1:4096"]
SMALL = ["tiny-llama:2:32", "tiny-qwen2:2:32"]
GRID = 4096  # tokens, of the longest sequences
CONTENDERS = {STOCK: models.nobody, OURS: models.ours, "liger-kernel": models.liger_kernel}


def random_tokens(name: str, batch: int, length: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(models.vocabulary(name), (batch, length), device=DEVICE)


def fill(row: Any, table: Table, name: str, batch: int, length: int) -> None:
    """Measure one contender."""
    before = allocated_mib()
    model = models.build(name, checkpointing=not table.args.no_checkpointing)
    with CONTENDERS[row.name](model, fused=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

        def step_on(length: int) -> TrainingStep:
            ids = random_tokens(name, batch, length)

            def backward() -> Tensor:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                return loss.detach()

            return TrainingStep(backward, optimizer)

        if table.args.longest:
            row.fill(step_on, length, GRID, table.args.seconds)
        else:
            row.fill(step_on(length), batch * length, table.args.repeats, before)


def measure(table: Table, name: str, batch: int, length: int) -> None:
    fills = {contender: partial(fill, table=table, name=name, batch=batch, length=length) for contender in CONTENDERS}
    compare(table, {"model": name}, batch, length, fills)


def main(arguments: Sequence[str] | None = None) -> Path:
    args = steps_parser(__doc__ or "", "model:sequences:length", repeats=3, seconds=100).parse_args(arguments)
    default = SMALL if DEVICE == "cpu" else LONGEST if args.longest else SHAPES
    table = Table("sft_longest" if args.longest else "sft", args, whole=not args.shapes)
    for shape in args.shapes or default:
        measure(table, *parts(shape))
    return table.finish()


if __name__ == "__main__":
    main()
