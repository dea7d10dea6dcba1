"""The divisor `num_items`: 0 counts as 1, as a number and as a tensor, in every loss that takes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import eager
import pytest
import torch
from table import SMALL, Batch, evaluate, relative_error, rollouts, students, tokens
from torch import Tensor

from liger_chunked import losses


def sampled(sizes: Any, seed: int) -> Batch:
    return {**students(sizes, seed), "advantages": torch.ones(sizes.sequences, dtype=torch.float64)}


CE, GRPO = losses.LigerFusedLinearCrossEntropyLoss, losses.LigerFusedLinearGRPOLoss
# A loss, its batch, and its oracle on full logits, if it has one of this signature.
LOSSES: dict[str, tuple[Any, Callable[..., Batch], Callable[..., Any] | None]] = {
    "ce": (CE(), tokens, eager.cross_entropy),
    "ce-z": (CE(lse_square_scale=0.1), tokens, lambda **b: eager.cross_entropy(**b, lse_square_scale=0.1)),
    "ce-entropy": (CE(entropy_weight=0.1), tokens, lambda **b: eager.cross_entropy(**b, entropy_weight=0.1)),
    "dapo": (GRPO(reduction="dapo"), rollouts, lambda **b: eager.grpo(**b, reduction="dapo")),
    "token-mean": (
        GRPO(reduction="token-mean", sampler_kl_coef=0.3),  # `num_items` does not divide an entropy bonus
        rollouts,
        lambda **b: eager.grpo(**b, reduction="dapo", sampler_kl_coef=0.3),
    ),
    "cispo": (
        GRPO.from_loss_type("cispo"),
        rollouts,
        lambda **b: eager.grpo(**b, surrogate="cispo", reduction="dapo"),
    ),
    "kl": (losses.LigerFusedLinearKLDivLoss(), students, None),
    "jsd": (losses.LigerFusedLinearJSDLoss(), students, eager.distillation),
    "tvd": (losses.LigerFusedLinearTVDLoss(), students, None),
    "cosine": (losses.LigerFusedLinearCosineSimilarityLoss(), students, None),
    "top-k": (losses.LigerFusedLinearJSDLoss(), lambda *a: students(*a, top_k=3), None),
    "on-policy": (losses.LigerFusedLinearOnPolicyDistillationLoss(), sampled, None),
}
NOTHING = {
    "int": 0,
    "float": 0.0,
    "tensor-int": torch.tensor(0),
    "tensor-float": torch.tensor(0.0),
    "tensor-1": torch.tensor([0]),
}


def value(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.few(2)
@pytest.mark.parametrize("zero", NOTHING)
@pytest.mark.parametrize("case", LOSSES)
def test_no_items_count_as_one(case, zero):
    """With tokens all the same, as on one of several ranks, the loss is their sum; without, it is a connected zero."""
    loss, sample, oracle = LOSSES[case]
    batch = sample(SMALL, 0)
    ours = evaluate(lambda b: value(loss(**b, num_items=NOTHING[zero])), batch)
    same = evaluate(lambda b: value(loss(**b, num_items=1)), batch)
    assert all(torch.equal(ours[name], same[name]) for name in ours)
    if oracle is not None:
        exact = evaluate(lambda b: value(oracle(**b, num_items=NOTHING[zero])), batch)
        assert all(relative_error(ours[name], exact[name]) < 1e-12 for name in exact)
    batch["target"] = torch.full_like(batch["target"], -100)
    nothing = evaluate(lambda b: value(loss(**b, num_items=NOTHING[zero])), batch)
    assert all((x == 0).all() for x in nothing.values())


@pytest.mark.few(2)
@pytest.mark.parametrize("items", [0.25, 3, 37])
@pytest.mark.parametrize("case", LOSSES)
def test_a_number_and_a_tensor_agree(case, items):
    """Also below 1: few tokens over many ranks."""
    loss, sample, _ = LOSSES[case]
    batch = sample(SMALL, 0)
    ours = evaluate(lambda b: value(loss(**b, num_items=items)), batch)
    same = evaluate(lambda b: value(loss(**b, num_items=torch.tensor(items))), batch)
    whole = evaluate(lambda b: value(loss(**b, num_items=1)), batch)
    for name in ours:
        assert relative_error(ours[name], same[name]) < 1e-12, name
        assert relative_error(ours[name] * items, whole[name]) < 1e-12, name


@pytest.mark.few(5)
@pytest.mark.parametrize("items", [-1, -0.5, math.nan, math.inf])
@pytest.mark.parametrize("case", LOSSES)
def test_a_number_that_counts_nothing_is_refused(case, items):
    loss, sample, _ = LOSSES[case]
    with pytest.raises(ValueError, match=f"num_items must be finite and not negative, got {items}"):
        loss(**sample(SMALL, 0), num_items=items)
