"""Cut a batch to the budget of logits. Integers only: no tensors, heads or options.

    chunk   consecutive tokens, in whole groups, whose loss is computed at once; dW takes one product a chunk
    tile    rows of a chunk and columns of the vocabulary, whose logits are in memory at once

A training run cuts the same sizes again and again, so the answers are cached.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from liger_chunked.kernels.tuning.generic import (
    CHUNK_TOKENS,
    FEWEST_TEACHER_TOKENS,
    MIN_TILE_COLUMNS,
    ONE_CHUNK,
    ROUND,
    TEACHER_TOKENS,
    TEACHER_VOCAB,
)

# Few: a small budget cuts a batch into thousands of pieces, and batches of other lengths are cut anew.
REMEMBERED = 32


class Chunk(NamedTuple):
    """Consecutive groups (tokens, sequences or pairs), and the rows of their tokens in the order of `Rows`."""

    row_slice: slice
    group_slice: slice

    @property
    def length(self) -> int:
        return self.row_slice.stop - self.row_slice.start


class Tile(NamedTuple):
    """Rows of a chunk, and columns of its logits."""

    row_slice: slice
    vocab_slice: slice

    @property
    def size(self) -> int:
        """Its number of logits."""
        rows, columns = self
        return (rows.stop - rows.start) * (columns.stop - columns.start)


Tiles = tuple[Tile, ...]


def row_blocks(tiles: Tiles) -> int:
    """Return how many times a chunk adds to each element of dW: once for each block of rows among its tiles."""
    return sum([tile.vocab_slice.start == 0 for tile in tiles])


def largest(tiles: Tiles) -> int:
    """Return the most logits of a tile. The first is the largest, because only last ones are cut short."""
    if not tiles:
        return 0
    rows, columns = tiles[0]
    return (rows.stop - rows.start) * (columns.stop - columns.start)


class Budget(NamedTuple):
    """What bounds the logits that are in memory at once.

    Attributes:
        given: bytes, or None to choose them automatically (docs/memory.md).
        vocab_size: columns of the head, or of the rank with most, so that all ranks cut the same chunks.
        hidden_size: of the head.
        itemsize: bytes of an element of the matrix products.
    """

    given: int | None
    vocab_size: int
    hidden_size: int
    itemsize: int

    def logits(self, n_tokens: int, bytes_per_logit: int) -> int:
        """Return how many logits may be in memory at once.

        Args:
            n_tokens: tokens of the batch, which the automatic budget takes as one chunk if their logits are small
                enough; 0 if one chunk is not wanted.
            bytes_per_logit: bytes of a logit with what lives beside it, such as its gradient in another dtype, or a
                teacher's logit.
        """
        if self.given is not None:
            return max(1, self.given // bytes_per_logit)
        # A chunk's logits as large as the float32 accumulator of dW, so that neither decides the peak alone.
        accumulator = 2 * self.hidden_size * self.itemsize // bytes_per_logit
        pair = 2 * self.itemsize
        tokens = max(accumulator, CHUNK_TOKENS * pair // max(bytes_per_logit, pair))
        if n_tokens * self.vocab_size * bytes_per_logit <= ONE_CHUNK:
            tokens = max(tokens, n_tokens)
        return tokens * self.vocab_size


def evenly(n: int, limit: int) -> int:
    """Return the size of the fewest nearly equal pieces of `n`, of at most `limit`, rounded up if `limit` allows."""
    # Pieces of whole cuBLAS tiles: in measured steps that mattered more than how many there are
    # (docs/tuning.md, "Products and chunks").
    size = -(-n // -(-n // limit))
    return min(limit, -(-size // ROUND) * ROUND)


def pieces(n: int, limit: int) -> list[slice]:
    """Cut `n` rows into nearly equal pieces of at most `limit`. Short pieces take as long as long ones."""
    size = evenly(n, limit) if n else 1
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


@functools.lru_cache(maxsize=REMEMBERED)
def chunks_of_tokens(n_tokens: int, limit: int) -> tuple[Chunk, ...]:
    """Cut tokens, each a group of its own, into chunks of at most `limit`; no tokens are one empty chunk."""
    if n_tokens <= limit:
        return (Chunk(slice(0, n_tokens), slice(0, n_tokens)),)
    return tuple(Chunk(rows, rows) for rows in pieces(n_tokens, limit))


def chunks_of_groups(host_counts: Sequence[int], cut_counts: Iterable[int], limit: int) -> tuple[Chunk, ...]:
    """Cut groups into chunks of whole groups of at most `limit` tokens, or of one group that is larger.

    Args:
        host_counts: tokens of each group.
        cut_counts: tokens of each group on the rank that has most of them, if ranks split sequences, else
            `host_counts`. All ranks must cut after the same groups.
    """
    cut = []
    first_row = first_group = row = held = 0
    for group, (n_tokens, longest) in enumerate(zip(host_counts, cut_counts, strict=True)):
        if held and held + longest > limit:
            cut.append(Chunk(slice(first_row, row), slice(first_group, group)))
            first_row, first_group, held = row, group, 0
        row += n_tokens
        held += longest
    cut.append(Chunk(slice(first_row, row), slice(first_group, len(host_counts))))
    return tuple(cut)


@functools.lru_cache(maxsize=REMEMBERED)
def tiles(n_rows: int, columns: int, limit: int, square: bool = False) -> Tiles:
    """Cut a chunk into tiles of at most `limit` logits: along the vocabulary, and along rows if slices get narrow.

    Slices of the vocabulary write each element of dW once, however many there are; blocks of rows add to it. Tiles come
    slice by slice, in each from the first rows to the last.

    Args:
        square: prefer tiles about as wide as they are high, whose products read least: 28 GB for 65536 tokens and 256
            MiB, where slices of 2048 columns read 80. For callers whose dW sums the blocks of a slice before it is
            rounded.
    """
    if n_rows == 0:
        return ()
    if columns == 0:  # a rank that holds only padding of the vocabulary
        return (Tile(slice(0, n_rows), slice(0, 0)),)
    width, height = limit // n_rows, n_rows
    side = math.isqrt(limit)
    if width >= columns:
        width = columns
    elif square and MIN_TILE_COLUMNS <= side < n_rows // 2:
        width = evenly(columns, side // ROUND * ROUND)
        height = evenly(n_rows, limit // width // ROUND * ROUND)
    elif width < min(MIN_TILE_COLUMNS, columns):
        width = min(MIN_TILE_COLUMNS, columns, limit)
        height = min(n_rows, max(1, limit // width))
    else:
        # Even slices: only the last one stays in memory for the backward, and a short one would save little.
        width = evenly(columns, width // ROUND * ROUND or width)
    return tuple(
        Tile(slice(row, min(row + height, n_rows)), slice(column, min(column + width, columns)))
        for column in range(0, columns, width)
        for row in range(0, n_rows, height)
    )


@functools.lru_cache(maxsize=REMEMBERED)
def whole_rows(n_rows: int, columns: int, limit: int) -> Tiles:
    """Cut a chunk into tiles of all columns and at most `limit` rows."""
    return tuple(Tile(rows, slice(0, columns)) for rows in pieces(n_rows, max(1, limit)))


def single_rows(n_rows: int, columns: int) -> Tiles:
    """Cut a chunk into tiles of one row and all columns. Not cached, because there are as many as tokens."""
    return tuple(Tile(slice(row, row + 1), slice(0, columns)) for row in range(n_rows))


def chunk_and_tile(budget: Budget, n_tokens: int, bytes_per_logit: int, wants_weight: bool) -> tuple[int, int]:
    """Return the most tokens of a distillation chunk, and of a tile of teacher logits.

    The student's logits of a chunk are alive until its dW, which takes one product a chunk; the teacher's only for a
    tile. So long chunks are better than long tiles.

    Args:
        n_tokens: of the batch.
        bytes_per_logit: of a student's logit with all that lives beside it for a tile.
        wants_weight: whether dW is computed.
    """
    vocab_size, itemsize = budget.vocab_size, budget.itemsize
    tokens = max(1, budget.logits(n_tokens, bytes_per_logit) // vocab_size)
    beside = max(0, bytes_per_logit - itemsize)
    if not (beside and wants_weight):
        return tokens, tokens
    # Tiles of a small vocabulary have more tokens, because a product needs a least size.
    more = max(1, TEACHER_VOCAB // vocab_size)
    if budget.given is None and n_tokens * vocab_size * itemsize <= ONE_CHUNK:
        tile = max(1, min(n_tokens, more * TEACHER_TOKENS))
        if 2 * tile * beside <= n_tokens * itemsize:
            return max(tokens, n_tokens), tile
    tile = max(min(tokens, more * FEWEST_TEACHER_TOKENS), min(tokens // 2, more * TEACHER_TOKENS))
    return (tokens * bytes_per_logit - tile * beside) // itemsize, tile
