"""Tiles of a norm's rows, and sums of weight gradients that backward programs write."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.device import processors
from liger_chunked.kernels.backend import jit, power_of_two, tl
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.kernels.tuning.generic import REMEMBERED


class RowTile(NamedTuple):
    """Whole rows in registers: `rows` of up to `block` columns."""

    rows: int
    block: int
    num_warps: int


@functools.cache
def row_tile(n_cols: int, device: torch.device) -> RowTile:
    tuned = TUNING[device]
    block = power_of_two(n_cols)
    rows = max(1, tuned.norm_forward_elements // block)
    num_warps = min(tuned.norm_most_warps, max(4, rows * block // tuned.norm_elements_per_warp))
    return RowTile(rows, block, num_warps)


class RowSweep(NamedTuple):
    """A `RowTile`, programs that take turns at all tiles, and tiles loaded ahead."""

    rows: int
    block: int
    num_warps: int
    programs: int
    stages: int


@functools.lru_cache(maxsize=REMEMBERED)
def row_sweep(n_rows: int, n_cols: int, groups: int, element_size: int, device: torch.device) -> RowSweep:
    """Return a backward's sweep of each group of columns; the programs of all groups run at once."""
    tuned = TUNING[device]
    block = power_of_two(n_cols)
    rows = max(1, tuned.norm_backward_elements // block)
    elements = rows * block
    narrow = block <= tuned.norm_narrow
    num_warps = 4 if narrow else min(tuned.norm_most_warps, elements // tuned.norm_elements_per_warp)
    tiles = -(-n_rows // rows)
    turns = -(-tiles * groups // (max(1, tuned.norm_resident_elements // elements) * processors(device)))
    stages = 3 if elements * element_size <= tuned.norm_pipelined_bytes else 1
    return RowSweep(rows, block, num_warps, -(-tiles // max(1, turns)), stages)


@jit
def square(x):
    """Return x², rounded alike in all threads: a fused multiply-add does not round its own."""
    return tl.fma(x, x, 0.0)


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


def sum_partials(partial: Tensor, first: Tensor, second: Tensor | None = None) -> None:
    """Sum `partial`, (1 or 2, P, D) float32 contiguous, over P into `first` and `second`, (D,) each."""
    n_sums, n_partials, n_cols = partial.shape
    rows, cols, num_warps = TUNING[partial.device].norm_sums
    grid = -(-n_cols // cols), n_sums, 1
    _sum_kernel(grid, (partial, first, second), (n_partials, n_cols, rows, cols), num_warps)
