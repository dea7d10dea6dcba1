"""Time the first step of a loss in a fresh process: with an empty Triton cache, with a filled one, and after `warmup`.

python -m benchmarks.first_step                        on a GPU, about a minute
python -m benchmarks.first_step --task DPO

CUDA and cuBLAS have started, and the inputs exist, before the clock starts. `warmup` starts with an empty cache.
`second_ms` is the next step, in which nothing is compiled.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import DEVICE, DTYPE, OURS, Row, Table, head_weight, hidden_states, parser, synchronize
from liger_chunked import LigerFusedLinearCrossEntropyLoss, LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss, warmup

COLD, CACHED, WARMED = f"{OURS}, empty cache", f"{OURS}, filled cache", f"{OURS}, after warmup"


@dataclass
class FirstStepRow(Row):
    """`ms` is the first step.

    - `second_ms`: the second step
    - `warmup_ms`: the call of `warmup`
    """

    second_ms: float | None = None
    warmup_ms: float | None = None

    def measured(self, first: FirstStepRow) -> str:
        warmed = "" if self.warmup_ms is None else f"  warmup {self.warmup_ms:.1f} ms"
        return f"first {self.ms:9.1f} ms  second {self.second_ms:9.1f} ms{warmed}"


@dataclass(frozen=True)
class Task:
    """A loss, and the (B, T), H and V of its batch."""

    loss: Callable[[], Any]
    shape: tuple[int, int]
    hidden: int
    vocab: int
    ref: bool = False

    @property
    def sizes(self) -> dict[str, Any]:
        sizes = {"vocab_size": self.vocab, "hidden_size": self.hidden, "shape": self.shape, "dtype": DTYPE}
        return sizes | ({"ref_hidden_size": self.hidden} if self.ref else {})

    def batch(self) -> dict[str, Tensor]:
        """Return a batch whose sequences have different lengths."""
        n, length = self.shape
        batch = {"weight": head_weight(self.vocab, self.hidden), "input": hidden_states(n, length, self.hidden)}
        target = torch.randint(self.vocab, self.shape, device=DEVICE)
        lengths = length - 7 * torch.arange(n, device=DEVICE)
        batch["target"] = target.masked_fill(torch.arange(length, device=DEVICE) >= lengths[:, None], -100)
        if self.ref:
            batch |= {"ref_weight": batch["weight"].clone(), "ref_input": batch["input"].clone()}
        elif self.loss is LigerFusedLinearGRPOLoss:
            batch["advantages"] = torch.randn(n, device=DEVICE)
            batch["old_logps"] = -torch.rand(self.shape, device=DEVICE)
        return batch


def tasks() -> dict[str, Task]:
    if DEVICE == "cpu":
        return {
            "cross entropy": Task(LigerFusedLinearCrossEntropyLoss, (2, 64), 32, 512),
            "DPO": Task(LigerFusedLinearDPOLoss, (2, 64), 32, 512, ref=True),
            "GRPO": Task(LigerFusedLinearGRPOLoss, (2, 64), 32, 512),
        }
    return {
        "cross entropy": Task(LigerFusedLinearCrossEntropyLoss, (4, 2048), 4096, 128256),
        "DPO": Task(LigerFusedLinearDPOLoss, (8, 2048), 4096, 128256, ref=True),
        "GRPO": Task(LigerFusedLinearGRPOLoss, (8, 2048), 2048, 151936),
    }


def steps(name: str, cache: str, warm: bool) -> dict[str, float]:
    """Return the milliseconds of two steps, and of the warmup before them. Runs in a fresh process."""
    os.environ["TRITON_CACHE_DIR"] = cache
    task = tasks()[name]
    loss = task.loss()
    square = torch.zeros(256, 256, device=DEVICE, dtype=DTYPE)
    (square @ square).sum().item()
    found = {}
    if warm:
        found["warmup_ms"] = _ms(lambda: warmup(loss, **task.sizes, device=DEVICE))
    batch = task.batch()
    leaves = [batch[key].requires_grad_() for key in ("weight", "input")]

    def step() -> None:
        result = loss(**batch)
        value = result[0] if isinstance(result, tuple) else result
        torch.autograd.grad(value, leaves)

    return found | {"ms": _ms(step), "second_ms": _ms(step)}


def _ms(run: Callable[[], object]) -> float:
    synchronize()
    begin = time.perf_counter()
    run()
    synchronize()
    return round((time.perf_counter() - begin) * 1e3, 2)


def _fill(row: FirstStepRow, name: str, cache: str, warm: bool) -> None:
    # A fork cannot use CUDA if its parent has asked for the device.
    context = get_context("forkserver" if DEVICE == "cpu" else "spawn")
    # Imports are not part of a step, and take seconds.
    context.set_forkserver_preload(["torch", "triton", "liger_chunked.losses", "benchmarks.harness"])
    with ProcessPoolExecutor(1, context) as pool:
        for key, value in pool.submit(steps, name, cache, warm).result().items():
            setattr(row, key, value)


def main(arguments: Sequence[str] | None = None) -> Path:
    args = parser(__doc__ or "", peer_seconds=0).parse_args(arguments)
    table = Table("first_step", args)
    for name, task in tasks().items():
        with tempfile.TemporaryDirectory() as shared, tempfile.TemporaryDirectory() as own:
            fills: Mapping[str, Callable[[Any], None]] = {
                COLD: partial(_fill, name=name, cache=shared, warm=False),
                CACHED: partial(_fill, name=name, cache=shared, warm=False),  # which the first has filled
                WARMED: partial(_fill, name=name, cache=own, warm=True),
            }
            b, length = task.shape
            facts = {"sequences": b, "length": length, "hidden": task.hidden, "vocabulary": task.vocab}
            table.compare(f"{name} {b}x{length}x{task.hidden}x{task.vocab}", facts, fills, FirstStepRow)
    return table.finish()


if __name__ == "__main__":
    main()
