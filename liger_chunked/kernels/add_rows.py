"""Add scaled rows of one matrix to rows of another that ids name, in a fixed order: where torch's `index_add_` on a GPU
adds in any order, results here are the same from run to run.

    grad[ids[m]] += scale[m] x[tokens[m]]         sums are float32, rounded once to the dtype of `grad`

So the dW of kept ids is summed, and the target's term of the dW of the fused epilogue. In float64 torch sums, on a GPU
in any order unless `torch.use_deterministic_algorithms` is on.

Bytes for M entries of H values: 2 M H, but for the caches, and the rows of `grad` that have entries, read and written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.kernels.backend import block_size, grid_of_rows, grid_row, jit, tl, use_triton
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.kernels.tuning.generic import UPCAST_BLOCK
from liger_chunked.types import accumulation_dtype


def parts(n_entries: int, hidden: int) -> list[slice]:
    """Cut entries so that their rows fit the cache of a CPU."""
    size = max(1, UPCAST_BLOCK // max(1, hidden))
    return [slice(start, min(start + size, n_entries)) for start in range(0, n_entries, size)]


def owned(ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether this rank has each id, and its row, or row 0."""
    own = (ids >= 0) & (ids < weight.shape[0])
    return own, ids.where(own, 0)


class SortedRows(NamedTuple):
    """Entries in the order of their ids, (M,) each; equal ids in the order of the entries.

    Attributes:
        ids: int64 rows of `grad`; negative, or beyond the last: not added.
        tokens: int64 rows of `x`, which is not read where `scale` is 0.
        scale: in the dtype of sums.
    """

    ids: Tensor
    tokens: Tensor
    scale: Tensor


def sorted_rows(ids: Tensor, scale: Tensor) -> SortedRows:
    """Return the entries of rows (N,), one of each."""
    ids, order = torch.sort(ids, stable=True)
    return SortedRows(ids, order, scale.index_select(0, order))


@jit
def _add_row(grad_ptr, row, grad_stride, n_written, cols, hidden, total):
    """Add a sum to a row of this rank's dW: one program has all of a row, or `_joined_kernel` has."""
    own = cols < tl.where((row >= 0) & (row < n_written), hidden, 0)
    place = grad_ptr + tl.where(row >= 0, row, 0) * grad_stride + cols
    total += tl.load(place, mask=own, other=0.0).to(tl.float32)
    tl.store(place, total.to(grad_ptr.dtype.element_ty), mask=own)


@Kernel
def _add_kernel(
    grad_ptr, grad_stride, head_ptr, tail_ptr, x_ptr, x_stride, ids_ptr, tokens_ptr, scale_ptr,
    n_tokens, hidden, n_written, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A program sums RUN sorted entries. Where an id's entries reach over its ends, the sums go to `head` and `tail`, so
    # that an id of many entries, such as a newline, keeps many programs busy.
    run = grid_row()
    first = run * RUN
    if first >= n_tokens:
        return
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < hidden
    end = tl.minimum(first + RUN, n_tokens)
    row = tl.load(ids_ptr + first)
    before = tl.load(ids_ptr + first - 1, mask=first > 0, other=-1)
    in_head = (first > 0) & (before == row)
    total = tl.zeros([BLOCK], tl.float32)
    for entry in range(first, end):
        next_row = tl.load(ids_ptr + entry)
        if next_row != row:
            if in_head:
                tl.store(head_ptr + run * hidden + cols, total, mask=inside)
            else:
                _add_row(grad_ptr, row, grad_stride, n_written, cols, hidden, total)
            total = tl.zeros([BLOCK], tl.float32)
            in_head = first < 0  # False
            row = next_row
        scale = tl.load(scale_ptr + entry)
        # Hidden states of ignored tokens, which may be NaN, and of others without a gradient are not read.
        there = cols < tl.where(scale == 0.0, 0, hidden)
        x = tl.load(x_ptr + tl.load(tokens_ptr + entry) * x_stride + cols, mask=there, other=0.0)
        total += scale * x.to(tl.float32)
    after = tl.load(ids_ptr + end, mask=end < n_tokens, other=-1)
    if in_head:
        tl.store(head_ptr + run * hidden + cols, total, mask=inside)
    elif (end < n_tokens) & (after == row):
        tl.store(tail_ptr + run * hidden + cols, total, mask=inside)
    else:
        _add_row(grad_ptr, row, grad_stride, n_written, cols, hidden, total)


@Kernel
def _joined_kernel(
    grad_ptr, grad_stride, head_ptr, tail_ptr, ids_ptr, n_tokens, hidden, n_written,
    RUN: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The program of the run in which such an id begins adds its sums, in order.
    run = grid_row()
    first, end = run * RUN, (run + 1) * RUN
    if end >= n_tokens:
        return
    row = tl.load(ids_ptr + end - 1)
    if tl.load(ids_ptr + end) != row:
        return
    before = tl.load(ids_ptr + first - 1, mask=first > 0, other=-1)
    if (first > 0) & (before == row) & (tl.load(ids_ptr + first) == row):
        return
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < hidden
    total = tl.zeros([TOGETHER, BLOCK], tl.float32)
    following = run + 1
    more = True
    while more:
        others = following + tl.arange(0, TOGETHER)
        there = others * RUN < n_tokens
        same = there & (tl.load(ids_ptr + others * RUN, mask=there, other=-1) == row)
        total += tl.load(
            head_ptr + others[:, None] * hidden + cols[None, :], mask=same[:, None] & inside[None, :], other=0.0
        )
        more = tl.sum(same.to(tl.int32), axis=0) == TOGETHER
        following += TOGETHER
    sums = tl.load(tail_ptr + run * hidden + cols, mask=inside, other=0.0) + tl.sum(total, axis=0)
    _add_row(grad_ptr, row, grad_stride, n_written, cols, hidden, sums)


def add_rows_(grad: Tensor, x: Tensor, rows: SortedRows, run: int | None = None) -> None:
    """Add `scale[m] x[tokens[m]]` to `grad[ids[m]]`.

    Args:
        grad: (V, H). In 16 bits, the sum of its row and all terms is rounded once.
        x: (N, H). With ones (N, 1), and `grad` (V, 1), the entries' scales are summed.
        run: entries that a program adds; None: for tens of thousands of entries, of which many name one id.
    """
    n_entries, hidden = rows.ids.shape[0], x.shape[1]
    if not grad.shape[0] or not n_entries:
        return
    if use_triton(x):
        of_many, together, most, num_warps = TUNING[x.device].added_rows
        run = run or of_many
        n_runs, block = -(-n_entries // run), block_size(hidden, most)
        head, tail = (torch.empty(n_runs, hidden, dtype=torch.float32, device=x.device) for _ in range(2))
        grid = grid_of_rows(n_runs, -(-hidden // block))
        _add_kernel[grid](
            grad_ptr=grad,
            grad_stride=grad.stride(0),
            head_ptr=head,
            tail_ptr=tail,
            x_ptr=x,
            x_stride=x.stride(0),
            ids_ptr=rows.ids,
            tokens_ptr=rows.tokens,
            scale_ptr=rows.scale,
            n_tokens=n_entries,
            hidden=hidden,
            n_written=grad.shape[0],
            RUN=run,
            BLOCK=block,
            num_warps=num_warps,
        )
        _joined_kernel[grid](
            grad_ptr=grad,
            grad_stride=grad.stride(0),
            head_ptr=head,
            tail_ptr=tail,
            ids_ptr=rows.ids,
            n_tokens=n_entries,
            hidden=hidden,
            n_written=grad.shape[0],
            RUN=run,
            TOGETHER=together,
            BLOCK=block,
            num_warps=num_warps,
        )
        return
    dtype = accumulation_dtype(x.dtype)
    total, named, places = grad, grad.new_empty(0, dtype=torch.int64), rows.ids
    if grad.dtype != dtype:
        # One sum a row, rounded once.
        named, places = torch.unique_consecutive(rows.ids, return_inverse=True)
        total = torch.zeros(named.shape[0], hidden, dtype=dtype, device=x.device)
    for part in parts(n_entries, hidden):
        scale, (own, place) = rows.scale[part, None], owned(places[part], total)
        terms = scale * x[rows.tokens[part]].to(dtype)
        total.index_add_(0, place, torch.where(own[:, None] & (scale != 0), terms, 0.0))
    if grad.dtype != dtype:
        own = (named >= 0) & (named < grad.shape[0])
        grad[named[own]] = (total[own] + grad[named[own]]).to(grad.dtype)
