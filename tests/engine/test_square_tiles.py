"""Tiles of `linear_token_stats` for many tokens: as wide as high, with dW summed in float32 a slice at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import eager
import pytest
import torch
from table import Batch, Sizes, assert_same, evaluate, moved, relative_error, rows
from torch import Tensor

from liger_chunked import linear_token_stats
from liger_chunked.engine import cutting

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
