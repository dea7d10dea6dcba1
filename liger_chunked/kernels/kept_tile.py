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
def _move_kernel(
    entries_ptr, tile_ptr, positions_ptr, ids_ptr, offsets_ptr,
    tile_stride, vocab_start, n_cols, READS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read the entries of a row from the tile, or write them to it."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(positions_ptr + row)
    first = tl.load(offsets_ptr + token)
    end = tl.load(offsets_ptr + token + 1)
    for start in range(first, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        column = tl.load(ids_ptr + entry, mask=entry < end, other=-1) - vocab_start
        here = (column >= 0) & (column < n_cols) & (entry < end)
        in_tile = tile_ptr + row * tile_stride + tl.where(here, column, 0)
        if READS:
            x = tl.load(in_tile, mask=here, other=0.0)
            tl.store(entries_ptr + entry, x.to(entries_ptr.dtype.element_ty), mask=here)
        else:
            x = tl.load(entries_ptr + entry, mask=here, other=0.0)
            tl.store(in_tile, x.to(tile_ptr.dtype.element_ty), mask=here)


def _move(of_entries: Tensor, tile: Tensor, entries: Entries, positions: Tensor, column: int, reads: bool) -> None:
    block, num_warps = TUNING[tile.device].kept_tile
    _move_kernel(
        (tile.shape[0], 1, 1),
        (of_entries, tile, positions, entries.ids, entries.offsets),
        (tile.stride(0), column, tile.shape[1], reads, block),
        num_warps,
    )


def read_kept_(z: Tensor, logits: Tensor, entries: Entries, positions: Tensor, column: int) -> None:
    """Write the logits of a tile's entries to `z` (M,), and leave the others.

    Args:
        logits: (rows, columns), contiguous.
        positions: (rows,) int64, the token of each row, none of them twice.
        column: the id of the first column.
    """
    if not logits.numel() or not z.shape[0]:
        return
    if use_triton(logits):
        _move(z, logits, entries, positions, column, reads=True)
        return
    here, places = _places(logits, entries, positions, column)
    z.copy_(torch.where(here, logits.reshape(-1)[places].to(z.dtype), z))


def spread_kept_(grad: Tensor, dz: Tensor, entries: Entries, positions: Tensor, column: int) -> None:
    """Write a tile of gradients: those of its entries (M,), rounded, and 0 elsewhere. Arguments as in `read_kept_`."""
    grad.zero_()
    if not grad.numel() or not dz.shape[0]:
        return
    if use_triton(grad):
        _move(dz, grad, entries, positions, column, reads=False)
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
