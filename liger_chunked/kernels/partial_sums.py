"""Last step of a weight gradient: sum over the programs of a backward, in the dtype of the weight.

    dw = cast(sum over programs of partial[program])

Each program of a norm's backward writes the sum over its rows, (D,) float32. This kernel adds them in one launch,
always in the same order. The data is small and cached, so only latency matters.
"""

from __future__ import annotations

from torch import Tensor

from liger_chunked.kernels.backend import tl
from liger_chunked.kernels.launch import Kernel

# Tile size: narrow, so that many programs share the work; tall, so that all loads are in flight. See docs/tuning.md.
_PARTIALS, _COLS = 256, 16


@Kernel
def _sum_kernel(
    partial_ptr, first_ptr, second_ptr,
    n_partials, n_cols,
    PARTIALS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([PARTIALS, COLS], tl.float32)
    for start in range(0, n_partials, PARTIALS):
        partials = start + tl.arange(0, PARTIALS)
        inside = (partials < n_partials)[:, None] & (cols < n_cols)[None, :]
        offsets = (which * n_partials + partials).to(tl.int64)[:, None] * n_cols + cols[None, :]
        total += tl.load(partial_ptr + offsets, mask=inside, other=0.0)
    total = tl.sum(total, axis=0)
    if which == 0:
        tl.store(first_ptr + cols, total.to(first_ptr.dtype.element_ty), mask=cols < n_cols)
    if second_ptr is not None:
        if which == 1:
            tl.store(second_ptr + cols, total.to(second_ptr.dtype.element_ty), mask=cols < n_cols)


def sum_partials(partial: Tensor, *sums: Tensor) -> None:
    """Write the sums over P of `partial`, (1 or 2, P, D) float32 contiguous, into one (D,) tensor each."""
    _, n_partials, n_cols = partial.shape
    first, second = sums if len(sums) == 2 else (*sums, None)
    _sum_kernel(
        (-(-n_cols // _COLS), len(sums), 1), (partial, first, second), (n_partials, n_cols, _PARTIALS, _COLS), 8
    )
