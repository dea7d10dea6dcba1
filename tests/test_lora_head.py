"""Heads with a low-rank adapter equal heads whose weight contains the adapter, in every loss and in PEFT's models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from table import ROWS, SMALL, Batch, Row, evaluate, moved, relative_error
from test_values import ERROR_SIZES, FACTOR, rms
from torch import Tensor

from liger_chunked import (
    AdaptedWeight,
)

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


class PeftHead:
    """A weight whose product is that of PEFT's `lora.Linear`: the adapter in float32, added to the rounded output."""

    def __init__(self, weight: Tensor, down: Tensor, up: Tensor) -> None:
        self.weight, self.down, self.up = weight, down, up
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device

    def __getitem__(self, rows: slice) -> PeftHead:
        return PeftHead(self.weight[rows], self.down, self.up[rows])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        assert function is F.linear
        x, head, bias = args
        result = F.linear(x, head.weight, bias)
        return (result + SCALE * F.linear(F.linear(x.to(head.down.dtype), head.down), head.up)).to(result.dtype)


@pytest.mark.sampled
@by_row
@pytest.mark.parametrize("chunks", [False, True], ids=["one-chunk", "chunks"])
def test_bfloat16_error_is_that_of_peft(row, chunks):
    """With adapters in float32 beside a bfloat16 head, as PEFT keeps them."""
    budget = 61 * ERROR_SIZES.vocab * 2 if chunks else None
    errors: dict[str, list[tuple[float, float, float]]] = {}
    for seed in range(3 * row.batches):
        batch = with_factors(row.sample(ERROR_SIZES, seed), seed)
        factors = {name: x.float() for name, x in batch.items() if name.endswith(("down", "up"))}
        batch = moved(batch, torch.bfloat16) | factors
        exact = evaluate(lambda b: row.oracle(with_weights(b, dense)), moved(batch, torch.float64), TRAINABLE)
        eager = evaluate(lambda b: row.oracle(with_weights(b, PeftHead)), batch, TRAINABLE)
        ours = evaluate(lambda b: row.ours(with_weights(b, adapted), logits_budget=budget), batch, TRAINABLE)
        for name in exact.keys() - {"loss"}:
            assert ours[name].dtype == batch[name].dtype
            off = [float((result[name].double() - exact[name]).norm()) for result in (ours, eager)]
            errors.setdefault(name, []).append((off[0], off[1], float(exact[name].norm())))
    for name, found in errors.items():
        of_ours, of_eager, norms = map(list, zip(*found, strict=True))
        error, bound = rms(of_ours, norms), FACTOR * rms(of_eager, norms)
        assert error <= bound, f"{name}: {error:.3e} against {bound:.3e}"
