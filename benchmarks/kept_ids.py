"""Benchmark the softmax over kept ids against the three products of the whole vocabulary.

python -m benchmarks.kept_ids 8192:4096:151936 --mean 8 64 1024        tokens:hidden size:vocabulary

Of the tokens, 46% kept one id, and the others an exponential number from two on, as in a measured run of top-p
sampling. Ids are drawn by Zipf's law, and those that a token draws twice count once: more are drawn until the mean of
the distinct ones is within 2% of `--mean`.

`kernels` are those of `kernels/kept.py` and `add_rows.py` alone, without the checks of a call; `step` is a forward and
backward of `linear_token_stats(kept=)` in training, which chose to read rows of the head for each token, or products of
whole rows; `rows` or `whole_rows` is the other way. `first` is a step with a `KeptIds` that no call had yet, whose ids
are sorted and checked. `gpu_ms` are the kernels of a step alone.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import (
    DEVICE,
    RESULTS,
    RowsFile,
    gemm_floor,
    head_weight,
    hidden_states,
    kernels_of,
    median_ms,
)
from liger_chunked import KeptIds, linear_token_stats
from liger_chunked.engine import choose
from liger_chunked.kernels import SortedRows, add_rows_, kept
from liger_chunked.kernels.logits_grad import LogitsCotangents
from liger_chunked.types import LogitOptions, LossHead

SINGLE = 0.46  # share of tokens with one id


def drawn(n: int, v: int, mean: float) -> tuple[KeptIds, Tensor]:
    """Return kept ids, `mean` distinct ones a token, and a target among them."""
    of_draws = mean
    for _ in range(12):
        kept = _drawn(n, v, of_draws)
        found = kept.ids.shape[0] / n
        if abs(found / mean - 1) < 0.02:
            break
        # Not by the ratio of the means alone: singletons stay as many.
        of_draws = SINGLE + (of_draws - SINGLE) * (mean - SINGLE) / (found - SINGLE)
    return kept, kept.ids[kept.offsets[:-1]]


def sorted_by_id(entries: kept.Entries, dz: Tensor) -> SortedRows:
    ids, order = torch.sort(entries.ids, stable=True)
    return SortedRows(ids, entries.tokens[order], dz[order])


def _drawn(n: int, v: int, mean: float) -> KeptIds:
    """Return the distinct ones of `mean` drawn ids a token."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    of_others = max((mean - SINGLE) / (1 - SINGLE) - 2, 0.1)
    lengths = 2 + torch.empty(n, device=DEVICE).exponential_(1 / of_others, generator=generator).long().clamp(
        max=v // 8
    )
    lengths[torch.rand(n, device=DEVICE, generator=generator) < SINGLE] = 1
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    m = int(offsets[-1])
    ranks = torch.rand(m, device=DEVICE, dtype=torch.float64, generator=generator).mul_(math.log(v)).exp_().long() - 1
    ids = torch.randperm(v, device=DEVICE, generator=generator)[ranks.clamp(0, v - 1)]
    tokens = torch.repeat_interleave(lengths, output_size=m)
    pairs = torch.unique(tokens * v + ids)  # distinct within a token
    tokens, ids = pairs // v, pairs % v
    return KeptIds(ids, torch.searchsorted(tokens, torch.arange(n + 1, device=DEVICE)))


def kernels_alone(x: Tensor, weight: Tensor, given: KeptIds) -> float:
    lengths = given.offsets.diff()
    tokens = torch.repeat_interleave(lengths, output_size=given.ids.shape[0])
    entries = kept.Entries(given.ids, given.offsets, tokens, given.offsets[:-1])
    g, options, dw = torch.randn(x.shape[0], device=x.device), LogitOptions(), torch.zeros_like(weight)

    def run() -> None:
        z = kept.kept_logits(x, weight, None, entries)
        stats = kept.kept_stats(z, entries, options)
        dz = kept.kept_logits_grad(z, entries, LogitsCotangents(stats.max, stats.sum_exp, logps=g), options)
        kept.kept_input_grad(dz, weight, entries, torch.empty_like(x))
        add_rows_(dw.zero_(), x, sorted_by_id(entries, dz))

    return median_ms(run)


@contextmanager
def always(takes_products: bool) -> Iterator[None]:
    """Within it, kept ids take products of whole rows, or never do."""
    before, choose.kept_ids_take_products = choose.kept_ids_take_products, lambda *args: takes_products
    try:
        yield
    finally:
        choose.kept_ids_take_products = before


def main(arguments: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["8192:4096:151936", "32768:2048:151936", "8192:896:151936"])
    parser.add_argument("--mean", type=float, nargs="+", default=[8, 34, 64, 590, 1024], help="distinct ids a token")
    parser.add_argument("--ways", action="store_true", help="only the step, and the way that it did not choose")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    args = parser.parse_args(arguments)
    rows = RowsFile(args.out, "kept_ids")
    for shape in args.shapes:
        n, h, v = map(int, shape.split(":"))
        x, weight = hidden_states(n, h).requires_grad_(), head_weight(v, h).requires_grad_()
        products = gemm_floor(n, h, v).all
        for mean in args.mean:
            given, target = drawn(n, v, mean)

            def step(kept: KeptIds, of: tuple[Tensor, ...] = (weight, x, target)) -> None:
                for leaf in of[:2]:
                    leaf.grad = None
                logps = linear_token_stats(*of, kept=kept).logps
                assert logps is not None
                logps.sum().backward()

            takes_products = choose.kept_ids_take_products(given.ids.shape[0], n, LossHead(weight), x.dtype)
            steps = {
                "step": partial(step, given),
                "first": lambda given=given, step=step: step(KeptIds(given.ids, given.offsets)),
            }
            found = {
                "shape": shape,
                "ids": given.ids.shape[0],
                "mean": given.ids.shape[0] / n,
                "singletons": float((given.offsets.diff() == 1).float().mean()),
                "most_repeated": int(given.ids.bincount().max()),
                "products_ms": products,
                "kernels_ms": kernels_alone(x.detach(), weight.detach(), given),
                "chose": "whole_rows" if takes_products else "rows",
            }
            for name in ("step",) if args.ways else steps:
                run = steps[name]
                found[f"{name}_ms"] = median_ms(run)
                found[f"{name}_gpu_ms"], found[f"{name}_launches"] = kernels_of(run)
            with always(not takes_products):
                found["whole_rows_ms" if not takes_products else "rows_ms"] = median_ms(steps["step"])
            found["over_products"] = found["step_ms"] / products
            rows.add(found)
            print({k: round(f, 3) if isinstance(f, float) else f for k, f in found.items()}, flush=True)
    return rows.path


if __name__ == "__main__":
    main()
