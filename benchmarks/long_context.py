"""Long sequences on one GPU: MLPs whole and in tiles, checkpoints on the device and on the host, and the estimates.

python -m benchmarks.long_context                            Llama-3.2-1B, and 8 layers of Llama-3-8B
python -m benchmarks.long_context --quick                    one shape of each, under 5 minutes on an H100
python -m benchmarks.long_context llama-3-8b:4:65536         model:layers:tokens; 0 layers: all

A step is the forward and backward of one sequence with a fused loss, all layers checkpointed (not reentrant), and an
optimizer without states that changes nothing. Contenders have the same kernels except in the MLP:

    whole              gated MLPs on all tokens
    auto, tiles        `tiled_mlp="auto"`, and True
    host               checkpoints on the host, by TRL's `OffloadActivations`, or torch's `save_on_cpu` without TRL
    Liger-Kernel       its `LigerTiledSwiGLUMLP`, in its own number of parts

For each, the time and the peak of a step, with the peak that `estimate_step` gives; then the longest sequence that fits
the card, by bisection, with what `longest_sequence` gives. A contender that runs out of memory is a row that says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import models
from benchmarks.harness import DEVICE, DTYPE, OURS, Skipped, Table, check_triton
from benchmarks.steps import HEADROOM_MIB, LongestRow, StepRow, TrainingStep, allocated_mib, steps_parser
from liger_chunked import apply_liger_kernel, estimate_step, longest_sequence

SHAPES = ["llama-3.2-1b:0:32768", "llama-3.2-1b:0:131072", "llama-3-8b:8:32768", "llama-3-8b:8:131072"]
QUICK = ["llama-3.2-1b:0:65536", "llama-3-8b:4:65536"]
SMALL = ["tiny-llama:2:256"]
GRID = 4096 if DEVICE == "cuda" else 64
LIGER = "Liger-Kernel tiled MLP"


@dataclass(frozen=True)
class Contender:
    """What a model does; `tiles` and `checkpoints` are arguments of the estimates."""

    tiles: bool | str | None = None
    checkpoints: str = "device"
    is_liger: bool = False


CONTENDERS = {
    f"{OURS}, whole": Contender(),
    f"{OURS}, auto": Contender("auto"),
    f"{OURS}, tiles": Contender(True),
    f"{OURS}, whole, host": Contender(None, "host"),
    f"{OURS}, auto, host": Contender("auto", "host"),
    LIGER: Contender(is_liger=True),
}


def config_of(name: str, layers: int) -> Any:
    family, sizes = models.SHAPES[name]
    config = AutoConfig.for_model(family, **copy.deepcopy(sizes))
    config.max_position_embeddings = 1 << 24
    if layers:
        config.num_hidden_layers = layers
    return config


def build(config: Any, contender: Contender) -> Any:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    apply_liger_kernel(model, tiled_mlp=contender.tiles)
    if contender.is_liger:
        for layer in model.model.layers:
            layer.mlp = tiled_by_liger(layer.mlp, config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def tiled_by_liger(mlp: Any, config: Any) -> Any:
    check_triton()
    if find_spec("liger_kernel") is None:
        raise Skipped("Liger-Kernel is not installed")
    from liger_kernel.transformers.tiled_mlp import LigerTiledSwiGLUMLP

    with torch.device("meta"):
        theirs: Any = LigerTiledSwiGLUMLP(config)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(theirs, name).weight = getattr(mlp, name).weight
    return theirs


def offloading(model: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context that holds saved tensors, and so the checkpoints, on the host."""
    if DEVICE == "cuda" and find_spec("trl") is not None:
        from trl.models.activation_offloading import get_act_offloading_ctx_manager

        context = get_act_offloading_ctx_manager(model=model)
        return lambda: context
    return lambda: save_on_cpu(pin_memory=DEVICE == "cuda")


def step_of(model: Any, contender: Contender, context: Callable[[], Any], n: int) -> TrainingStep:
    ids = torch.randint(3, model.config.vocab_size, (1, n), device=DEVICE, generator=generator())

    def backward() -> Tensor:
        with context():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return TrainingStep(backward, torch.optim.SGD(model.parameters(), lr=0.0))


def generator() -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(1)


@dataclass
class LongStepRow(StepRow):
    """A step and its estimated peak."""

    estimated_mib: float | None = None

    def measured(self, first: StepRow) -> str:
        estimate = "" if self.estimated_mib is None else f"  estimated {self.estimated_mib / 1024:.1f} GiB"
        return super().measured(first) + estimate


@dataclass
class LongRow(LongestRow):
    """The longest sequence, and the estimated one."""

    estimated: int | None = None

    def measured(self, first: LongestRow) -> str:
        return super().measured(first) + ("" if self.estimated is None else f"; estimated {self.estimated}")


def estimates(contender: Contender) -> dict[str, Any] | None:
    if contender.is_liger:
        return None
    return {"tiled_mlp": contender.tiles, "checkpoints": contender.checkpoints, "dtype": DTYPE, "optimizer_bytes": 0.0}


def fill_step(config: Any, contender: Contender, n: int, repeats: int, row: LongStepRow) -> None:
    before = allocated_mib()
    if (settings := estimates(contender)) is not None:
        row.estimated_mib = round(estimate_step(config, shape=(1, n), **settings).peak / 2**20, 1)
    model = build(config, contender)
    context = offloading(model) if contender.checkpoints == "host" else nullcontext
    row.fill(step_of(model, contender, context, n), n, repeats, before)


def fill_longest(config: Any, contender: Contender, start: int, seconds: float, row: LongRow) -> None:
    if DEVICE == "cuda" and (settings := estimates(contender)) is not None:
        free = torch.cuda.mem_get_info()[1] - HEADROOM_MIB * 2**20
        row.estimated = longest_sequence(config, free=free, **settings)
    model = build(config, contender)
    context = offloading(model) if contender.checkpoints == "host" else nullcontext
    row.fill(partial(step_of, model, contender, context), start, GRID, seconds)


def shapes_of(given: Sequence[str], quick: bool) -> Iterator[tuple[str, int, int]]:
    for shape in given or ((QUICK if quick else SHAPES) if DEVICE == "cuda" else SMALL):
        name, layers, n = shape.split(":")
        yield name, int(layers), int(n)


def main(arguments: Sequence[str] | None = None) -> Path:
    parse = steps_parser(__doc__ or "", "model:layers:tokens", repeats=3, seconds=120.0)
    parse.add_argument("--quick", action="store_true", help="fewer shapes, steps and searches")
    args = parse.parse_args(arguments)
    if args.quick:
        args.repeats, args.seconds = 2, min(args.seconds, 20.0)
    table = Table("long_context", args, whole=not args.shapes)
    searched = set()
    for name, layers, n in shapes_of(args.shapes, args.quick):
        config = config_of(name, layers)
        facts = {"model": name, "layers": config.num_hidden_layers, "length": n}
        if not args.longest:
            fills = {what: partial(fill_step, config, c, n, args.repeats) for what, c in CONTENDERS.items()}
            table.compare(f"{name} {config.num_hidden_layers} layers 1x{n}", facts, fills, LongStepRow)
        if (name, layers) not in searched:
            searched.add((name, layers))
            of_search = [c for c in CONTENDERS if not args.quick or c in (f"{OURS}, whole", f"{OURS}, auto, host")]
            longest = {c: partial(fill_longest, config, CONTENDERS[c], n // 2, args.seconds) for c in of_search}
            table.compare(f"{name} {config.num_hidden_layers} layers, longest", facts, longest, LongRow)
    return table.finish()


if __name__ == "__main__":
    main()
