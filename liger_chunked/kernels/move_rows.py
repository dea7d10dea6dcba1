"""Move rows of a matrix. Bytes: a row that moves is read and written once, and `place_rows` writes the other rows."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_chunked.kernels.backend import block_size, grid_of_rows, grid_row, tl, use_triton
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.kernels.tuning.generic import MOST_MOVED


@Kernel
def _move_rows_kernel(x_ptr, rows_ptr, x_stride, n_tokens, n_cols, BLOCK: tl.constexpr):
    place = grid_row()
    if place >= n_tokens:
        return
    row = tl.load(rows_ptr + place)
    if row == place:
        return
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < n_cols
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside)
    tl.store(x_ptr + place * x_stride + cols, x, mask=inside)


def move_rows_(x: Tensor, rows: Tensor) -> None:
    """Compute `x[: n] = x[rows]`.

    Args:
        x: (N, C) with contiguous rows.
        rows: (n,) int64. A row that moves is not the place of another: places before n get rows from n on.
    """
    n, n_cols = rows.shape[0], x.shape[1]
    if not n or not n_cols:
        return
    if use_triton(x):
        most, num_warps = TUNING[x.device].logits_grad
        block = block_size(n_cols, most)
        numbers = x.stride(0), n, n_cols, block
        _move_rows_kernel(grid_of_rows(n, -(-n_cols // block)), (x, rows), numbers, num_warps)
        return
    places = (rows != torch.arange(n, device=rows.device)).nonzero().view(-1)
    for part in places.split(max(1, MOST_MOVED // n_cols)):
        x.index_copy_(0, part, x.index_select(0, rows[part]))


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
