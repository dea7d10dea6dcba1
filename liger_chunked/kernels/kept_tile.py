"""Move logits of kept ids, and their gradients, between tiles of logits and lists of entries.

    z[m] = logits[row, ids[m] - column]           for the entries m of the token of each row, with ids among the columns
    dlogits[row, ids[m] - column] = dz[m]         and 0 elsewhere

Bytes: 12 to 16 for each entry, and a tile of zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_chunked.kernels.backend import tl, use_triton
from liger_chunked.kernels.kept import Entries
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.tuning import TUNING


@Kernel
def _gather_kernel(
    z_ptr, logits_ptr, positions_ptr, ids_ptr, offsets_ptr, logits_stride, vocab_start, n_cols, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(positions_ptr + row)
    first = tl.load(offsets_ptr + token)
    end = tl.load(offsets_ptr + token + 1)
    for start in range(first, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        place = tl.load(ids_ptr + entry, mask=entry < end, other=-1) - vocab_start
        here = (place >= 0) & (place < n_cols) & (entry < end)
        z = tl.load(logits_ptr + row * logits_stride + tl.where(here, place, 0), mask=here, other=0.0)
        tl.store(z_ptr + entry, z.to(z_ptr.dtype.element_ty), mask=here)


@Kernel
def _scatter_kernel(
    dz_ptr, grad_ptr, positions_ptr, ids_ptr, offsets_ptr, grad_stride, vocab_start, n_cols, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(positions_ptr + row)
    first = tl.load(offsets_ptr + token)
    end = tl.load(offsets_ptr + token + 1)
    for start in range(first, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        place = tl.load(ids_ptr + entry, mask=entry < end, other=-1) - vocab_start
        here = (place >= 0) & (place < n_cols) & (entry < end)
        dz = tl.load(dz_ptr + entry, mask=here, other=0.0)
        tl.store(grad_ptr + row * grad_stride + tl.where(here, place, 0), dz.to(grad_ptr.dtype.element_ty), mask=here)


def read_kept_(z: Tensor, logits: Tensor, entries: Entries, positions: Tensor, column: int) -> None:
    """Write the logits of a tile's entries to `z` (M,), and leave the others.

    Args:
        logits: (rows, columns), contiguous.
        positions: (rows,) int64, the token of each row, none of them twice.
        column: the id of the first column.
    """
    n, n_cols = logits.shape
    if not n or not n_cols or not z.shape[0]:
        return
    if use_triton(logits):
        block, num_warps = TUNING[logits.device].kept_tile
        _gather_kernel(
            (n, 1, 1),
            (z, logits, positions, entries.ids, entries.offsets),
            (logits.stride(0), column, n_cols, block),
            num_warps,
        )
        return
    here, places = _places(logits, entries, positions, column)
    z.copy_(torch.where(here, logits.reshape(-1)[places].to(z.dtype), z))


def spread_kept_(grad: Tensor, dz: Tensor, entries: Entries, positions: Tensor, column: int) -> None:
    """Write a tile of gradients: those of its entries (M,), rounded, and 0 elsewhere. Arguments as in `read_kept_`."""
    n, n_cols = grad.shape
    grad.zero_()
    if not n or not n_cols or not dz.shape[0]:
        return
    if use_triton(grad):
        block, num_warps = TUNING[grad.device].kept_tile
        _scatter_kernel(
            (n, 1, 1),
            (dz, grad, positions, entries.ids, entries.offsets),
            (grad.stride(0), column, n_cols, block),
            num_warps,
        )
        return
    here, places = _places(grad, entries, positions, column)
    # Entries of other tiles add 0 to the first logit.
    grad.view(-1).index_add_(0, places, torch.where(here, dz, 0.0).to(grad.dtype))


def _places(tile: Tensor, entries: Entries, positions: Tensor, column: int) -> tuple[Tensor, Tensor]:
    """Return whether each entry is in a tile, and its place in the flattened tile, or 0."""
    n, n_cols = tile.shape
    row_of = torch.full((entries.offsets.shape[0] - 1,), -1, device=tile.device)
    row_of[positions] = torch.arange(n, device=tile.device)
    rows, columns = row_of[entries.tokens], entries.ids - column
    here = (rows >= 0) & (columns >= 0) & (columns < n_cols)
    return here, torch.where(here, rows * n_cols + columns, 0)
