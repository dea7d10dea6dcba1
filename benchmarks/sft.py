"""Benchmark SFT steps of Hugging Face models: forward, backward and AdamW, all in bfloat16, on random tokens.

python -m benchmarks.sft                            Llama-3-8B, Llama-3.2-1B, Qwen2.5-0.5B
python -m benchmarks.sft llama-3-8b:2:8192          model:sequences:length
python -m benchmarks.sft --longest llama-3-8b:4:4096      the longest sequences that fit, four at a time
python -m benchmarks.sft --compile-layers llama-3.2-1b:8:2048      compile each decoder layer
python -m benchmarks.sft --families                 few layers of newer families, in their sizes

Contenders: transformers' model unchanged, after our `apply_liger_kernel(model)`, and after Liger-Kernel's function for
the family, each with its defaults and the same random weights. All layers are checkpointed, attention is SDPA (GPT-OSS:
eager), and every token is a target. Models of images and text get text alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import models
from benchmarks.harness import DEVICE, OURS, STOCK, Table
from benchmarks.steps import CompiledStepRow, StepRow, TrainingStep, allocated_mib, compare, parts, steps_parser
from liger_chunked import apply_liger_kernel

SHAPES = [
    "llama-3-8b:4:4096",
    "llama-3-8b:4:8192",
    "llama-3-8b:4:16384",
    "qwen2.5-0.5b:16:4096",
    "llama-3.2-1b:16:4096",
]
LONGEST = ["llama-3-8b:4:4096", "llama-3.2-1b:1:4096", "qwen2.5-0.5b:1:4096"]
FAMILIES = [
    "qwen3-30b-a3b-4l:4:2048",
    "gpt-oss-20b-4l:8:1024",
    "qwen3-next-80b-a3b-2l:4:2048",
    "qwen3-next-80b-a3b-2l-hybrid:4:512",
    "gemma-3n-e4b-6l:4:2048",
    "glm-4.5-air-2l:4:2048",
    "qwen3-vl-8b-6l:4:2048",
]
SMALL_FAMILIES = [
    "tiny-qwen3-moe:1:16",
    "tiny-gpt-oss:1:16",
    "tiny-qwen3-next:1:16",
    "tiny-gemma-3n:1:16",
    "tiny-glm-4-moe:1:16",
    "tiny-qwen3-vl:1:16",
]
SMALL = ["tiny-llama:2:32", "tiny-qwen2:2:32"]
GRID = 4096  # tokens: step of the search for the longest sequences
CONTENDERS = {STOCK: models.nobody, OURS: models.ours, "liger-kernel": models.liger_kernel}
COMPILED = "compiled layers"


@contextmanager
def head_only(model: PreTrainedModel, *, fused: bool) -> Iterator[None]:
    """Apply our fused loss only; the layers stay transformers' own."""
    apply_liger_kernel(model, rope=False, rms_norm=False, swiglu=False)
    yield


# Contenders with `--compile-layers`. A name that ends in `COMPILED` means that each decoder layer is compiled.
WITH_COMPILED_LAYERS = {
    OURS: models.ours,
    f"{OURS}, {COMPILED}": models.ours,
    f"{OURS} head on stock, {COMPILED}": head_only,
    f"{STOCK}, {COMPILED}": models.nobody,
}


def random_tokens(name: str, batch: int, length: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(models.vocabulary(name), (batch, length), device=DEVICE)


def fill(row: Any, table: Table, name: str, batch: int, length: int) -> None:
    before = allocated_mib()
    model = models.build(name, checkpointing=not table.args.no_checkpointing)
    contenders = WITH_COMPILED_LAYERS if table.args.compile_layers else CONTENDERS
    with contenders[row.name](model, fused=True) as reports:
        row.kernels = None if reports is None else str(reports[0]).splitlines()
        compiled = row.name.endswith(COMPILED)
        if compiled:
            torch._dynamo.utils.counters.clear()
            for layer in model.model.layers:
                layer.compile()
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
        if compiled:
            row.graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]


def measure(table: Table, name: str, batch: int, length: int) -> None:
    contenders = WITH_COMPILED_LAYERS if table.args.compile_layers else CONTENDERS
    fills = {contender: partial(fill, table=table, name=name, batch=batch, length=length) for contender in contenders}
    kind = CompiledStepRow if table.args.compile_layers else StepRow
    compare(table, {"model": name}, batch, length, fills, kind)


def main(arguments: Sequence[str] | None = None) -> Path:
    parse = steps_parser(__doc__ or "", "model:sequences:length", repeats=3, seconds=100)
    parse.add_argument("--compile-layers", action="store_true", help="compare with each decoder layer compiled")
    parse.add_argument("--families", action="store_true", help="few layers of newer families, in their sizes")
    args = parse.parse_args(arguments)
    default = SMALL if DEVICE == "cpu" else LONGEST if args.longest else SHAPES
    if args.families:
        default = SMALL_FAMILIES if DEVICE == "cpu" else FAMILIES
    kinds = {"longest": args.longest, "compiled": args.compile_layers, "families": args.families}
    family = "_".join(["sft", *(kind for kind, on in kinds.items() if on)])
    table = Table(family, args, whole=not args.shapes)
    for shape in args.shapes or default:
        measure(table, *parts(shape))
    return table.finish()


if __name__ == "__main__":
    main()
