"""Move rows of a matrix in place. Bytes: a row that moves is read and written once."""

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
