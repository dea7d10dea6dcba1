"""Benchmark steps in which only a fraction of the rows has a gradient, against 1 + 2 f products.

python -m benchmarks.live_rows 8192:4096:151936 8192:2048:128256        tokens:hidden size:vocabulary

`all_rows_ms` is the same step with all rows in the products. At a fraction of 1, the difference of the two is what
looking for rows costs. `step_gpu_ms` are the kernels of the step alone, which a busy host does not change. Rows with a
gradient are drawn at random, the worst case for moving them.

These steps start on an idle GPU, which then waits for the first product. In training the host runs ahead. So
`back_to_back` has steps that are issued without a wait between them: `step_ms` and `all_rows_ms`; `products_ms` are the
1 + 2 f products, `three_products_ms` all three, timed in the same way.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import (
    DEVICE,
    DTYPE,
    RESULTS,
    RowsFile,
    gemm_floor,
    head_weight,
    hidden_states,
    kernels_of,
    median_ms,
    synchronize,
)
from liger_chunked import LigerFusedLinearGRPOLoss, linear_token_stats
from liger_chunked.engine import choose

SHAPES = ["8192:4096:151936", "8192:2048:128256"]
FRACTIONS = [1.0, 0.5, 0.2]
SEQUENCES = 8

SECONDS = 0.4  # of steps that follow each other without a wait
MOST_ROWS = 8192  # of the products alone, whose logits are in memory

Step = Callable[[], Tensor]


def steps(x: Tensor, weight: Tensor, fraction: float) -> dict[str, Step]:
    """Return losses on hidden states (B, T, H) of which a fraction of the rows has a gradient."""
    target = torch.randint(weight.shape[0], x.shape[:2], device=DEVICE)
    live = (torch.rand(x.shape[:2], device=DEVICE).argsort(1) < fraction * x.shape[1]).float()
    grpo = LigerFusedLinearGRPOLoss()
    found: dict[str, Step] = {"GRPO": lambda: grpo(weight, x, target, live)[0]}
    if fraction < 1:
        of_entropy = LigerFusedLinearGRPOLoss(top_entropy_quantile=fraction)
        advantages = torch.ones(x.shape[0], device=DEVICE)
        found["GRPO, top entropy"] = lambda: of_entropy(weight, x, target, advantages)[0]
    for outputs in (("logps",), ("logps", "entropy")):

        def statistics(outputs: tuple[str, ...] = outputs) -> Tensor:
            stats = linear_token_stats(weight, x, target, outputs=outputs)
            values = [value for value in (stats.logps, stats.entropy) if value is not None]
            return sum(((value * live).sum() for value in values), torch.zeros((), device=DEVICE))

        found[f"linear_token_stats, {' and '.join(outputs)}"] = statistics
    return found


def back_to_back_ms(run: Callable[[], object]) -> float:
    """Return the milliseconds of a step among steps that are issued without a wait; the median of three turns."""
    run()
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    n = max(3, int(SECONDS / 3 / (time.perf_counter() - start)))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(n):
            run()
        synchronize()
        times.append((time.perf_counter() - start) / n * 1e3)
    return sorted(times)[1]


def products_back_to_back_ms(n: int, h: int, v: int, fraction: float) -> float:
    """Return the milliseconds of the product of the logits, and of those of dX and dW of a fraction of the rows."""
    rows = min(n, MOST_ROWS)
    live = round(fraction * rows)
    x, w = (torch.randn(size, h, device=DEVICE, dtype=DTYPE) for size in (rows, v))
    z = torch.randn(rows, v, device=DEVICE, dtype=DTYPE)
    out, dx, dw = torch.empty_like(z), torch.empty_like(x[:live]), torch.empty_like(w)

    def run() -> None:
        torch.mm(x, w.t(), out=out)
        torch.mm(z[:live], w, out=dx)
        torch.mm(z[:live].t(), x[:live], out=dw)

    return back_to_back_ms(run) * n / rows


def timed(loss: Step, leaves: tuple[Tensor, ...], smallest: int, timer: Callable[[Callable[[], None]], float]) -> float:
    """Return the time, by `timer`, of a step that looks for rows above `smallest` multiplications of a product."""

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss().backward()

    before, choose.SMALLEST_OF_LIVE_ROWS = choose.SMALLEST_OF_LIVE_ROWS, smallest
    try:
        return timer(run)
    finally:
        choose.SMALLEST_OF_LIVE_ROWS = before


def rounded(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: rounded(x) for name, x in found.items()}
    return round(found, 3) if isinstance(found, float) else found


def main(arguments: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--fractions", type=float, nargs="+", default=FRACTIONS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    args = parser.parse_args(arguments)
    rows = RowsFile(args.out, "live_rows")
    for shape in args.shapes:
        n, h, v = map(int, shape.split(":"))
        x, weight = hidden_states(SEQUENCES, n // SEQUENCES, h).requires_grad_(), head_weight(v, h).requires_grad_()
        floor, three = gemm_floor(n, h, v), products_back_to_back_ms(n, h, v, 1.0)
        for fraction in args.fractions:
            products = floor.logits + fraction * (floor.all - floor.logits)
            issued = products_back_to_back_ms(n, h, v, fraction)
            for name, loss in steps(x, weight, fraction).items():
                live, every = (timed(loss, (x, weight), smallest, median_ms) for smallest in (0, 1 << 62))
                of_gpu = timed(loss, (x, weight), 0, lambda run: kernels_of(run)[0])
                ran_ahead = {
                    "step_ms": timed(loss, (x, weight), 0, back_to_back_ms),
                    "all_rows_ms": timed(loss, (x, weight), 1 << 62, back_to_back_ms),
                    "products_ms": issued,
                    "three_products_ms": three,
                }
                found = {
                    "shape": shape,
                    "step": name,
                    "fraction": fraction,
                    "step_ms": live,
                    "step_gpu_ms": of_gpu,
                    "all_rows_ms": every,
                    "products_ms": products,
                    "over_products": live / products,
                    "gpu_over_products": of_gpu / products,
                    "back_to_back": ran_ahead,
                    "back_to_back_over_products": ran_ahead["step_ms"] / issued,
                }
                rows.add(found)
                print(rounded(found), flush=True)
    return rows.path


if __name__ == "__main__":
    main()
