"""Set logits below their row's bound to -inf, in place: z_v becomes -inf where z_v < bound. NaN stays."""

from __future__ import annotations

import math

from torch import Tensor

from liger_chunked.kernels.backend import block_size, grid_of_rows, grid_row, tl, use_triton
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.tuning import TUNING


@Kernel
def _drop_below_kernel(
    logits_ptr, bound_ptr, logits_stride, n_tokens, n_cols, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = grid_row()
    if row < n_tokens:
        bound = tl.load(bound_ptr + row).to(tl.float32)  # Triton's interpreter compares the bits of bfloat16
        cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        ptrs = logits_ptr + row * logits_stride + cols
        if WHOLE:  # a mask would make loads narrow
            z = tl.load(ptrs).to(tl.float32)
            tl.store(ptrs, tl.where(z < bound, -float("inf"), z).to(logits_ptr.dtype.element_ty))
        else:
            inside = cols < n_cols
            z = tl.load(ptrs, mask=inside).to(tl.float32)
            tl.store(ptrs, tl.where(z < bound, -float("inf"), z).to(logits_ptr.dtype.element_ty), mask=inside)


def drop_below_(logits: Tensor, bound: Tensor) -> Tensor:
    """Set `logits` (N, V) below `bound` (N,), of the same dtype, to -inf, and return them.

    On a GPU without the mask of torch's formula, whose bytes are half of those of logits of 16 bits.
    """
    if not use_triton(logits):
        return logits.masked_fill_(logits < bound[:, None], -math.inf)
    n, n_cols = logits.shape
    if logits.numel():
        most, num_warps = TUNING[logits.device].drop_below
        block = block_size(n_cols, most)
        _drop_below_kernel(
            grid_of_rows(n, -(-n_cols // block)),
            (logits, bound),
            (logits.stride(0), n, n_cols, n_cols % block == 0, block),
            num_warps,
        )
    return logits
