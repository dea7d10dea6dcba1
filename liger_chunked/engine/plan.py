"""Cut a batch to the logits budget: into chunks of whole groups, and each chunk into tiles.

A chunk within the budget is one tile. A larger group is cut along the vocabulary first: each slice of dW is then
written once.
"""

from __future__ import annotations

import functools
import warnings
from typing import NamedTuple

import torch

from liger_chunked.engine.batch import Chunk, Layout
from liger_chunked.kernels.tuning.generic import (
    CHUNK_TOKENS,
    FEWEST_TEACHER_TOKENS,
    MIN_TILE_COLUMNS,
    ONE_CHUNK,
    ROUND,
    TEACHER_TOKENS,
    TEACHER_VOCAB,
)
from liger_chunked.types import LogitOptions


class Tile(NamedTuple):
    """The logits in memory at once: `rows` of the chunk, columns `vocab`."""

    rows: slice
    vocab: slice


def budget_elements(
    options: LogitOptions, head_shape: torch.Size, dtype: torch.dtype, n_valid: int = 0, bytes_per_logit: int = 0
) -> int:
    """Return how many logits may be in memory at once.

    The automatic budget holds all logits of a step of at most `ONE_CHUNK` bytes, so that dW needs no accumulator.
    Otherwise it holds 2 H tokens: their bfloat16 logits are as large as the float32 accumulator (V, H). With fewer than
    `CHUNK_TOKENS`, products of dW would be bound by reading and writing dW.

    `n_valid` is 0 for a step that cannot be one chunk. `bytes_per_logit` counts what else is in memory per logit.
    """
    vocab_size, hidden_size = head_shape
    bytes_per_logit = max(bytes_per_logit, dtype.itemsize)
    if options.logits_budget is not None:
        assert isinstance(options.logits_budget, int)
        return max(1, options.logits_budget // bytes_per_logit)
    accumulator = 2 * hidden_size * dtype.itemsize // bytes_per_logit
    # Fewer if more than a teacher's logit is in memory per logit.
    tokens = max(accumulator, CHUNK_TOKENS * 2 * dtype.itemsize // max(bytes_per_logit, 2 * dtype.itemsize))
    if n_valid * vocab_size * bytes_per_logit <= ONE_CHUNK:
        tokens = max(tokens, n_valid)
    return tokens * vocab_size


# A budget of so few rows is probably a mistake: a product of few rows takes about as long as one of many.
_FEW_ROWS, _LARGE_VOCAB, _MANY_CHUNKS = 16, 8192, 16


def warn_of_few_rows(options: LogitOptions, vocab_size: int, bytes_per_logit: int, n_valid: int) -> None:
    """Warn once per budget and vocabulary if the caller's budget cuts a step into many chunks."""
    budget = options.logits_budget
    if budget is None or vocab_size < _LARGE_VOCAB:
        return
    assert isinstance(budget, int)
    row = vocab_size * bytes_per_logit
    rows = budget // row
    if rows < _FEW_ROWS and n_valid > _MANY_CHUNKS * max(1, rows):
        _warn_of_few_rows(budget, vocab_size, row, rows)


@functools.cache
def _warn_of_few_rows(budget: int, vocab_size: int, row: int, rows: int) -> None:
    holds = "less than one row" if rows == 0 else f"only {rows} row{'s' if rows > 1 else ''}"
    warnings.warn(
        f"logits_budget={budget} bytes holds {holds} of logits: a row takes {row} bytes for a vocabulary of "
        f"{vocab_size}, and so many small chunks are slow. Pass a larger budget, such as '256MiB', or None to choose "
        "it automatically",
        UserWarning,
        stacklevel=2,
    )


class ChunkSize(NamedTuple):
    """Tokens of a chunk, and of a block, whose teacher logits are in memory too."""

    tokens: int
    block: int


def budget_chunk_size(
    options: LogitOptions,
    head_shape: torch.Size,
    dtype: torch.dtype,
    n_valid: int,
    bytes_per_logit: int,
    wants_weight: bool,
) -> ChunkSize:
    """Return sizes of chunk and block within `budget_elements`.

    dW takes one product per chunk, so memory is better spent on long chunks than on long blocks. The automatic budget
    uses one chunk if its block takes at most half the bytes of its logits.
    """
    vocab_size, logit = head_shape[0], dtype.itemsize
    elements = budget_elements(options, head_shape, dtype, n_valid, bytes_per_logit)
    tokens = max(1, elements // vocab_size)
    beside = max(0, bytes_per_logit - logit)
    if not (beside and wants_weight):
        return ChunkSize(tokens, tokens)
    more = max(1, TEACHER_VOCAB // vocab_size)
    if options.logits_budget is None and n_valid * vocab_size * logit <= ONE_CHUNK:
        block = max(1, min(n_valid, more * TEACHER_TOKENS))
        if 2 * block * beside <= n_valid * logit:
            return ChunkSize(max(tokens, n_valid), block)
    block = max(min(tokens, more * FEWEST_TEACHER_TOKENS), min(tokens // 2, more * TEACHER_TOKENS))
    return ChunkSize((tokens * bytes_per_logit - block * beside) // logit, block)


def _even(n: int, limit: int) -> int:
    """Return the size of nearly equal pieces, no more than with `limit`."""
    size = -(-n // -(-n // limit))
    return min(limit, -(-size // ROUND) * ROUND)


def pieces(start: int, stop: int, limit: int) -> list[slice]:
    """Cut `start` to `stop` into nearly equal pieces, if any."""
    if start == stop:
        return []
    size = _even(stop - start, limit)
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]


def chunks(layout: Layout, vocab_size: int, elements: int, whole_batch: bool = False) -> list[Chunk]:
    """Cut the batch into chunks of whole groups within `elements` logits, or of one larger group."""
    limit = max(1, elements // vocab_size)
    n_valid = layout.n_valid
    if layout.group_lengths is None:
        if whole_batch or n_valid <= limit:
            return [Chunk(slice(0, n_valid), slice(0, n_valid))]
        # A short last chunk costs dW as much as a long one.
        return [Chunk(rows, rows) for rows in pieces(0, n_valid, limit)]

    n_groups = len(layout.group_lengths)
    if whole_batch or n_valid <= limit:
        return [Chunk(slice(0, n_valid), slice(0, n_groups))]
    result = []
    first_row = first_group = row = 0
    for group, length in enumerate(layout.group_lengths):
        if row > first_row and row + length - first_row > limit:
            result.append(Chunk(slice(first_row, row), slice(first_group, group)))
            first_row, first_group = row, group
        row += length
    result.append(Chunk(slice(first_row, n_valid), slice(first_group, n_groups)))
    return result


def tiles(n_rows: int, vocab_size: int, elements: int) -> list[Tile]:
    """Cut a chunk into tiles within `elements` logits: along the vocabulary, and along rows if slices get narrow."""
    if n_rows == 0:
        return []
    columns = elements // n_rows
    rows = n_rows
    if columns >= vocab_size:
        columns = vocab_size
    elif columns < min(MIN_TILE_COLUMNS, vocab_size):
        columns = min(MIN_TILE_COLUMNS, vocab_size, elements)
        rows = min(n_rows, max(1, elements // columns))
    else:
        # Only the last slice is kept, so a short one would save little.
        columns = _even(vocab_size, columns // ROUND * ROUND or columns)
    return [
        Tile(slice(r, min(r + rows, n_rows)), slice(v, min(v + columns, vocab_size)))
        for v in range(0, vocab_size, columns)
        for r in range(0, n_rows, rows)
    ]


def row_blocks(tiles: list[Tile]) -> int:
    """Count how often a chunk adds to each element of dW."""
    return sum(tile.vocab.start == 0 for tile in tiles)


def largest(tiles: list[Tile]) -> int:
    """Return the logits of the largest tile, the first."""
    if not tiles:
        return 0
    rows, vocab = tiles[0]
    return (rows.stop - rows.start) * (vocab.stop - vocab.start)
