"""Heads with a low-rank adapter equal heads whose weight contains the adapter, in every loss and in PEFT's models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from table import ROWS, SMALL, Batch, Row, Sizes, evaluate, moved, n_valid, relative_error, rows
from test_cost import Memory
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from liger_chunked import (
    AdaptedWeight,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearJSDLoss,
    estimate_memory,
    functional,
    linear_token_stats,
)
from liger_chunked.engine import gradients
from liger_chunked.kernels import backend
from liger_chunked.testing import check_loss

by_row = pytest.mark.parametrize("row", ROWS, ids=repr)
RANK, SCALE = 3, 0.5
HEADS = ("", "ref_", "teacher_")  # prefixes of the weights that get an adapter
TRAINABLE = ("weight", "input", "bias", "down", "up")


def with_factors(batch: Batch, seed: int = 0) -> Batch:
    """Add `{prefix}down` (r, H) and `{prefix}up` (V, r) for each weight; an adapter adds a third to the logits."""
    generator = torch.Generator().manual_seed(seed + 7)
    batch = dict(batch)
    for prefix in HEADS:
        if f"{prefix}weight" in batch:
            vocab, hidden = batch[f"{prefix}weight"].shape
            batch[f"{prefix}down"] = torch.randn(RANK, hidden, generator=generator, dtype=torch.float64) / hidden**0.5
            batch[f"{prefix}up"] = torch.randn(vocab, RANK, generator=generator, dtype=torch.float64)
    return batch


def with_weights(batch: Batch, make: Callable[[Tensor, Tensor, Tensor], Any]) -> dict[str, Any]:
    """Replace the factors of each head by `make(weight, down, up)`."""
    batch = dict(batch)
    for prefix in HEADS:
        if f"{prefix}down" in batch:
            factors = (batch.pop(f"{prefix}{name}") for name in ("weight", "down", "up"))
            batch[f"{prefix}weight"] = make(*factors)
    return batch


def adapted(weight: Tensor, down: Tensor, up: Tensor) -> AdaptedWeight:
    # As PEFT does: `down` may be in another dtype than the hidden states.
    return AdaptedWeight(weight, up, lambda x: SCALE * F.linear(x.to(down.dtype), down))


def dense(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return weight + SCALE * up @ down


def compare(
    row: Row, batch: Batch, bound: float, trainable: Iterable[str] = TRAINABLE, upstream: float = 1.0, **options: Any
) -> None:
    expected = evaluate(lambda b: row.oracle(with_weights(b, dense)), batch, trainable, upstream)
    found = evaluate(lambda b: row.ours(with_weights(b, adapted), **options), batch, trainable, upstream)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert relative_error(found[name], value) < bound, f"{row.id}: {name}"


SETTINGS = {
    "automatic": (SMALL, None),
    "chunks": (SMALL, 5),
    "one token": (SMALL, 1),
    "slices": (SMALL._replace(vocab=2503), 1.5),
    "no ignored tokens": (SMALL._replace(ignored=False), 9),
}


@pytest.mark.sampled(2)
@by_row
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), ("weight", "input"), ("down", "up")], ids=str)
def test_equal_to_the_dense_head(row, setting, frozen):
    sizes, tokens = SETTINGS[setting]
    batch = with_factors(row.sample(sizes, 3))
    budget = None if tokens is None else int(tokens * sizes.vocab * 8)
    compare(row, batch, 1e-9, [x for x in TRAINABLE if x not in frozen], upstream=-1.7, logits_budget=budget)
