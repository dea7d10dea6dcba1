"""What the host has to know of a target before it can cut a batch: one launch, and one copy to wait for.

Bytes: the target once, int64, and a byte for each token of the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_chunked.kernels.backend import tl, use_triton
from liger_chunked.kernels.launch import Kernel

_BLOCK = 4096


@Kernel
def _survey_kernel(target_ptr, mask_ptr, summary_ptr, n_cols, ignore_index, BLOCK: tl.constexpr):
    # One program per block of a row.
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    inside = cols < n_cols
    target = tl.load(target_ptr + row * n_cols + cols, mask=inside, other=ignore_index)
    valid = target != ignore_index
    tl.store(mask_ptr + row * n_cols + cols, valid, mask=inside)
    target = tl.where(valid, target, 0)
    # Lanes beyond the row count as tokens without a target.
    n_blocks = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    summary_ptr += row * tl.num_programs(1) + part
    tl.store(summary_ptr, tl.sum(valid.to(tl.int64), axis=0))
    tl.store(summary_ptr + n_blocks, tl.min(target, axis=0))
    tl.store(summary_ptr + 2 * n_blocks, tl.max(target, axis=0))


def _survey_triton(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    n_rows, n_cols = target.shape
    mask = torch.empty_like(target, dtype=torch.bool)
    block = min(_BLOCK, 1 << (n_cols - 1).bit_length())
    summary = torch.empty(3, n_rows, -(-n_cols // block), dtype=torch.int64, device=target.device)
    _survey_kernel((n_rows, summary.shape[2], 1), (target, mask, summary), (n_cols, ignore_index, block), num_warps=4)
    return mask, summary


def _survey_torch(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    mask = target != ignore_index
    low, high = torch.where(mask, target, 0).aminmax(dim=1)
    return mask, torch.stack([mask.sum(1), low, high])[..., None]


def survey(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Which tokens have a target, and of each block of a row how many do, and the lowest and highest.

    Args:
        target: (R, C) int64, contiguous.
        ignore_index: marks the tokens that have none; in the search for the lowest and highest, they count as 0.

    Returns:
        (R, C) bool, and (3, R, P) int64 of P blocks a row: how many, lowest, highest.
    """
    if not target.numel():
        return torch.empty_like(target, dtype=torch.bool), target.new_zeros(3, target.shape[0], 1)
    return (_survey_triton if use_triton(target) else _survey_torch)(target, ignore_index)
