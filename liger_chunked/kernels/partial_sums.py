"""The last step of a weight's gradient: the sums over a backward's programs, in the dtype of the weight.

    dw = cast(sum over programs of partial[program])

A program of a norm's backward goes through many rows and leaves the sum of their contributions, (D,) in float32. They
add up here, always in the same order, in one launch: the bytes are few, and in the cache, so that latency is all.
"""

from __future__ import annotations

from torch import Tensor

from liger_chunked.kernels.backend import tl
from liger_chunked.kernels.launch import Kernel

# Of a tile. Short rows of it, so that many programs share the work; many of them, so that all loads are in flight. The
# sum over 256 to 512 programs of 896 to 4096 columns takes 2.6 to 3.1 us, by 32 columns 3.0 to 3.6 (H200).
_PARTIALS, _COLS = 256, 16


@Kernel
def _sum_kernel(
    partial_ptr, first_ptr, second_ptr,
    n_partials, n_cols,
    PARTIALS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # A null pointer stands for what is absent.
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
    """Write the sums over P of `partial` (1 or 2, P, D), float32 without gaps, into one (D,) each."""
    _, n_partials, n_cols = partial.shape
    first, second = sums if len(sums) == 2 else (*sums, None)
    _sum_kernel(
        (-(-n_cols // _COLS), len(sums), 1), (partial, first, second), (n_partials, n_cols, _PARTIALS, _COLS), 8
    )
