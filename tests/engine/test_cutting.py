"""Sizes of chunks and tiles, from the definition.

The logits of a tile fit the budget. So do the logits of a chunk, unless it is one token or one group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import eager
import pytest
import torch
from table import Batch, Sizes, assert_same, evaluate, moved, relative_error, rows
from torch import Tensor

from liger_chunked import LogitOptions, linear_token_stats
from liger_chunked.engine import cutting
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
@pytest.mark.parametrize("n_rows", BUDGETS)
def test_tokens(n_rows: float, bytes_per_logit: int) -> None:
    row_bytes = VOCAB * bytes_per_logit
    budget = max(bytes_per_logit, int(n_rows * row_bytes))
    for n_tokens in (1, 7, 8, 769):
        cut = layout(Counts(n_tokens), budget, bytes_per_logit)
        assert_consecutive([chunk.row_slice for chunk in cut.chunks], n_tokens)
        assert all(chunk.length == 1 or chunk.length * row_bytes <= budget for chunk in cut.chunks)
        fitting = max(1, budget // row_bytes)
        assert len(cut.chunks) == -(-n_tokens // fitting)
        assert all(tile.size * bytes_per_logit <= budget for tiles in cut.tiles for tile in tiles)
        for chunk, tiles in zip(cut.chunks, cut.tiles, strict=True):
            assert sum(tile.size for tile in tiles) == chunk.length * VOCAB


@pytest.mark.parametrize("n_rows", BUDGETS)
def test_groups(n_rows: float) -> None:
    """Groups are whole. A chunk ends where the next group would exceed the budget."""
    lengths = (3, 4, 1, 9, 0, 7, 2, 2, 2, 2, 300)
    budget = max(2, int(n_rows * 2 * VOCAB))
    chunks = layout(Counts(sum(lengths), lengths, lengths), budget, 2).chunks
    assert_consecutive([chunk.row_slice for chunk in chunks], sum(lengths))
    assert_consecutive([chunk.group_slice for chunk in chunks], len(lengths))
    for chunk in chunks:
        of_groups = lengths[chunk.group_slice]
        assert chunk.length == sum(of_groups)
        assert chunk.length * 2 * VOCAB <= budget or sum(n > 0 for n in of_groups) == 1
        following = lengths[chunk.group_slice.stop : chunk.group_slice.stop + 1]
        assert all((chunk.length + n) * 2 * VOCAB > budget for n in following)


# Tiles of `linear_token_stats` for many tokens: as wide as high, with dW summed in float32 a slice at a time


SIZES = Sizes(sequences=4, length=16, hidden=8, vocab=203, ref_hidden=3)
ELEMENTS = 150


@pytest.fixture
def small(cut_with: Callable[..., None]) -> None:
    cut_with(MIN_TILE_COLUMNS=4, ROUND=4)


def test_tiles_cover_the_logits(small):
    found = cutting.tiles(61, 203, ELEMENTS, square=True)
    times = torch.zeros(61, 203)
    for block, vocab in found:
        times[block, vocab] += 1
        n, columns = block.stop - block.start, vocab.stop - vocab.start
        assert n * columns <= ELEMENTS and (vocab.stop == 203 or columns in (8, 12))
    assert (times == 1).all()
    # A slice is finished before the next.
    assert [tile.vocab_slice.start for tile in found] == sorted(tile.vocab_slice.start for tile in found)


@pytest.mark.few(1)
@pytest.mark.parametrize("row", rows("stats-logps", "stats-all", "stats-any-order-transformed"), ids=repr)
def test_values(row, small):
    batch = row.sample(SIZES, 1)
    ours = evaluate(partial(row.ours, logits_budget=8 * ELEMENTS), batch)
    assert_same(ours, evaluate(row.oracle, batch), 1e-12)


def test_a_rounded_weight_gradient_is_rounded_once(small, monkeypatch):
    batch: Batch = {
        "weight": torch.randn(203, 8, dtype=torch.float64) / 3,
        "input": torch.randn(64, 8, dtype=torch.float64),
        "target": torch.randint(203, (64,)),
    }
    near = moved(batch, torch.bfloat16)

    def gradient(loss, batch: Batch) -> Tensor:
        weight = batch["weight"].clone().requires_grad_()
        (found,) = torch.autograd.grad(loss(**{**batch, "weight": weight}), weight)
        return found

    def ours(**batch: Tensor) -> Tensor:
        return linear_token_stats(**batch, logits_budget=2 * ELEMENTS).logps.sum()

    def oracle(**batch: Tensor) -> Tensor:
        return eager.token_stats(**batch, outputs=("logps",))["logps"].sum()

    exact = gradient(oracle, moved(near, torch.float64))
    error, of_eager = (relative_error(gradient(f, near), exact) for f in (ours, oracle))
    assert error <= 1.1 * of_eager  # as in test_values.py
    # In the gradient's own dtype, each of the blocks would round the sum again.
    assert gradient(ours, near).dtype == torch.bfloat16
