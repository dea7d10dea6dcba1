"""Measure the parts of a step with the fused epilogue on a busy GPU, whose power limit lowers the clocks.

python -m benchmarks.parts 4096:1536:151936 4096:2048:151936        tokens of a chunk:hidden:vocabulary

The first task is a cross entropy of two chunks, in which the parts replace cuBLAS's products one by one. The second is
the fused projection alone. Contenders alternate, so that none has a cooler card. `x floor` is relative to cuBLAS's
time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import DEVICE, LossRow, Table, benchmark, head_weight, hidden_states, median_ms, synchronize
from liger_chunked.engine.side_stream import SideStream
from liger_chunked.engine.sink import accumulate
from liger_chunked.kernels import project_exp
from liger_chunked.kernels.backend import has_wide_tiles

SHAPES = ["4096:896:151936", "4096:1536:151936", "4096:2048:151936"]
SMALL = ["64:32:1024"]
FLOOR = "cuBLAS's products"

_STEPS, _ROUNDS = (10, 7) if DEVICE == "cuda" else (1, 1)
_BUSY = 1.0 if DEVICE == "cuda" else 0.0  # seconds before the first block
# Clock cycles: 0.7 to 1 ms, about the host's time before the first product.
_IDLE = 1_400_000

Step = Sequence[Callable[[], object]]


def in_turns(steps: Mapping[str, Step]) -> dict[str, float]:
    """Return milliseconds per step of each contender, the median over alternating blocks."""

    def block(step: Step) -> Callable[[], object]:
        return lambda: [part() for _ in range(_STEPS) for part in step]

    begin = time.perf_counter()
    while time.perf_counter() - begin < _BUSY:
        block(steps[FLOOR])()
        synchronize()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_ROUNDS):
        for name in random.sample(list(steps), len(steps)):
            times[name].append(median_ms(block(steps[name]), repeats=1, warmup=0) / _STEPS)
    return {name: sorted(each)[len(each) // 2] for name, each in times.items()}


def compare(table: Table, task: str, shape: Mapping[str, float], steps: Mapping[str, Step]) -> None:
    if table.args.task not in task:
        return
    times = in_turns(steps)

    def fill(row: LossRow) -> None:
        row.ms, row.times_floor = round(times[row.name], 4), round(times[row.name] / times[FLOOR], 4)

    table.compare(task, {"floor_ms": times[FLOOR], **shape}, dict.fromkeys(steps, fill), LossRow)


def measure(table: Table, n: int, h: int, v: int) -> None:
    x, w, t = hidden_states(n, h), head_weight(v, h), torch.randint(v, (n,), device=DEVICE)
    random_logits = torch.randn(n, v, device=DEVICE).to(x.dtype)
    exponentials, logits = (torch.empty_like(random_logits) for _ in range(2))
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    wide_dx, wide_dw = (torch.empty_like(g, dtype=torch.float32) for g in (dx, dw))

    def project() -> object:
        return project_exp(x, w, t, None, logits, 1.0, ("logps",))

    def cublas() -> object:
        return torch.mm(x, w.t(), out=logits)

    def input_product(z: Tensor) -> Callable[[], object]:
        return lambda: torch.mm(z, w, out=dx)

    def weight_product(z: Tensor) -> Callable[[], object]:
        return lambda: torch.mm(z.t(), x, out=dw)

    def wide_input_product() -> None:
        accumulate(wide_dx, exponentials, w, first=True)

    def wide_weight_product(first: bool) -> Callable[[], None]:
        return lambda: accumulate(wide_dw, exponentials.t(), x, first)

    def beside(first: bool) -> Callable[[], None]:
        def both() -> None:
            with SideStream(x.device) as aside:
                with aside.stream():
                    wide_weight_product(first)()
                wide_input_product()

        return both

    def round_weight() -> object:
        return dw.copy_(wide_dw)

    def idle() -> None:
        if DEVICE == "cuda":
            torch.cuda._sleep(_IDLE)

    plain = input_product(exponentials), weight_product(exponentials)
    summed = [(cublas, plain[0], wide_weight_product(first)) for first in (True, False)]
    steps: dict[str, Step] = {
        FLOOR: 2 * (cublas, input_product(random_logits), weight_product(random_logits)),
        "of exponentials": 2 * (cublas, *plain),
        "dX in float32": 2 * (cublas, wide_input_product, plain[1]),
        "dW in float32": (*summed[0], *summed[1]),
        "dW in float32, rounded": (*summed[0], *summed[1], round_weight),
    }
    of_projection: dict[str, Step] = {FLOOR: (cublas,)}
    if has_wide_tiles(x.device):
        project_exp(x, w, t, None, exponentials, 1.0, ("logps",))
        whole = (project, beside(first=True), project, beside(first=False), round_weight)
        steps |= {
            "projection by the epilogue": 2 * (project, *plain),
            "all of them, dX beside dW": whole,
            "all of them, and idle": (*whole, idle),
        }
        of_projection["by the epilogue"] = (project,)
    else:
        exponentials.copy_(random_logits.exp())
    shape = {"tokens": n, "hidden": h, "vocabulary": v}
    compare(table, f"two chunks {n}x{h}x{v}", shape, steps)
    compare(table, f"projection {n}x{h}x{v}", shape, of_projection)


def main(arguments: Sequence[str] | None = None) -> Path:
    return benchmark("parts", __doc__, "tokens:hidden:vocabulary", SHAPES, SMALL, measure, 3600, arguments)


if __name__ == "__main__":
    main()
