"""Sizes of chunks and tiles, from the definition.

The logits of a tile fit the budget. So do the logits of a chunk, unless it is one token or one group.
"""

from __future__ import annotations

import pytest

from liger_chunked import LogitOptions
from liger_chunked.engine.choose import Counts, layout_of_loss
from liger_chunked.engine.cutting import Budget

VOCAB = 1003


def layout(counts: Counts, budget: int, bytes_per_logit: int):
    of_head = Budget(budget, VOCAB, hidden_size=64, itemsize=2)
    outputs = ("logps",)
    return layout_of_loss(
        counts, of_head, VOCAB, bytes_per_logit, LogitOptions(), outputs, outputs, False, False, may_use_epilogue=False
    )


def assert_consecutive(slices, end: int) -> None:
    bounds = [0, *(part.stop for part in slices)]
    assert [part.start for part in slices] == bounds[:-1] and bounds[-1] == end


# In rows of 1003 logits: one logit, part of a row, one row, just below and above seven rows, more rows than `ROUND`.
BUDGETS = (0.0001, 0.3, 1, 6.999, 7, 7.001, 299.5, 300)


@pytest.mark.parametrize("bytes_per_logit", [2, 6])
@pytest.mark.parametrize("rows", BUDGETS)
def test_tokens(rows: float, bytes_per_logit: int) -> None:
    row_bytes = VOCAB * bytes_per_logit
    budget = max(bytes_per_logit, int(rows * row_bytes))
    for n_tokens in (1, 7, 8, 769):
        cut = layout(Counts(n_tokens), budget, bytes_per_logit)
        assert_consecutive([chunk.row_slice for chunk in cut.chunks], n_tokens)
        assert all(chunk.length == 1 or chunk.length * row_bytes <= budget for chunk in cut.chunks)
        fitting = max(1, budget // row_bytes)
        assert len(cut.chunks) == -(-n_tokens // fitting)
        assert all(tile.size * bytes_per_logit <= budget for tiles in cut.tiles for tile in tiles)
        for chunk, tiles in zip(cut.chunks, cut.tiles, strict=True):
            assert sum(tile.size for tile in tiles) == chunk.length * VOCAB


@pytest.mark.parametrize("rows", BUDGETS)
def test_groups(rows: float) -> None:
    """Groups are whole. A chunk ends where the next group would exceed the budget."""
    lengths = (3, 4, 1, 9, 0, 7, 2, 2, 2, 2, 300)
    budget = max(2, int(rows * 2 * VOCAB))
    chunks = layout(Counts(sum(lengths), lengths, lengths), budget, 2).chunks
    assert_consecutive([chunk.row_slice for chunk in chunks], sum(lengths))
    assert_consecutive([chunk.group_slice for chunk in chunks], len(lengths))
    for chunk in chunks:
        of_groups = lengths[chunk.group_slice]
        assert chunk.length == sum(of_groups)
        assert chunk.length * 2 * VOCAB <= budget or sum(n > 0 for n in of_groups) == 1
        following = lengths[chunk.group_slice.stop : chunk.group_slice.stop + 1]
        assert all((chunk.length + n) * 2 * VOCAB > budget for n in following)
