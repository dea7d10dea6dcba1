"""Write rows to their places in a matrix, and zeros between them. Bytes: each row is read or written once."""

from __future__ import annotations

from torch import Tensor

from liger_chunked.kernels.backend import block_size, grid_of_rows, grid_row, tl, use_triton
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.tuning import TUNING


@Kernel
def _place_rows_kernel(out_ptr, x_ptr, token_at_ptr, n_tokens, n_cols, BLOCK: tl.constexpr):
    place = grid_row()
    if place >= n_tokens:
        return
    row = tl.load(token_at_ptr + place).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < tl.where(row >= 0, n_cols, 0), other=0.0)
    tl.store(out_ptr + place * n_cols + cols, x, mask=cols < n_cols)


def place_rows(x: Tensor, index: Tensor, token_at: Tensor | None, out: Tensor) -> None:
    """Compute `out[index] = x`, and zero the other rows of `out`.

    Args:
        x: (n, C) contiguous.
        index: (n,) int64, without repetitions.
        token_at: (N,) int32, the row of `x` at each row of `out`, or -1. With it, one launch writes all rows.
        out: (N, C) contiguous, maybe uninitialised, in any floating-point dtype.
    """
    x = x.to(out.dtype)
    if token_at is None or not out.numel() or not use_triton(out):
        out.zero_().index_copy_(0, index, x)
        return
    n_rows, n_cols = out.shape
    most, num_warps = TUNING[x.device].logits_grad
    block = block_size(n_cols, most)
    _place_rows_kernel(
        grid_of_rows(n_rows, -(-n_cols // block)), (out, x, token_at), (n_rows, n_cols, block), num_warps
    )
