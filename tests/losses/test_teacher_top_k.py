"""A teacher's top k as one argument: its temperature is checked, and all other tokens are a bin, or left out."""

from __future__ import annotations

import warnings
from typing import Any

import eager
import pytest
import torch
from eager.distillation import divergence
from table import Batch, assert_same, evaluate
from torch import Tensor

import liger_chunked as lc

V, K, N, H = 23, 4, 6, 5
SOFT = {"weight_soft_loss": 1.0, "weight_hard_loss": 0.0}


def tensors(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weight, hidden states, targets, and the teacher's logits."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return random(V, H), random(N, H), torch.randint(V, (N,), generator=generator), random(N, V)


# By the oracle's name of their divergence.
LOSSES: dict[str, Any] = {
    "kl": lc.LigerFusedLinearKLDivLoss(**SOFT, temperature=2.0),
    "reverse_kl": lc.LigerFusedLinearKLDivLoss(**SOFT, reverse=True, temperature=2.0),
    "jsd": lc.LigerFusedLinearJSDLoss(**SOFT, temperature=2.0),
    "tvd": lc.LigerFusedLinearTVDLoss(**SOFT, temperature=2.0),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tail", ["bin", "renormalize"])
def test_value_and_gradient_are_those_of_the_formula(name: str, tail: Any) -> None:
    weight, hidden, target, teacher_logits = tensors()
    logps, ids = (teacher_logits / 2.0).log_softmax(-1).topk(K)

    def exact(b: Batch) -> Tensor:
        if tail == "renormalize":
            z = eager.logits(b["weight"], b["input"], temperature=2.0)
            return divergence(name, z.gather(-1, ids), logps).mean()
        return eager.distillation(**b, teacher_logps=logps, teacher_ids=ids, name=name, temperature=2.0, **SOFT)[0]

    batch = {"weight": weight, "input": hidden, "target": target}
    ours = evaluate(lambda b: LOSSES[name](**b, teacher=lc.TopK(ids, logps, 2.0, tail))[0], batch)
    assert_same(ours, evaluate(exact, batch), 1e-9)


def test_a_loss_at_another_temperature_is_refused() -> None:
    weight, hidden, target, teacher_logits = tensors()
    logps, ids = teacher_logits.log_softmax(-1).topk(K)
    with pytest.raises(ValueError, match=r"at temperature 1.0, the loss has temperature=2.0"):
        LOSSES["kl"](weight, hidden, target=target, teacher=lc.TopK(ids, logps))


def test_renormalized_log_probabilities_warn_where_a_tail_is_expected() -> None:
    """They would push all other tokens to probability 0, without a word: the tail's bin is 1e-7 for the teacher."""
    weight, hidden, target, teacher_logits = tensors()
    logps, ids = teacher_logits.log_softmax(-1).topk(K)
    loss = lc.LigerFusedLinearKLDivLoss(**SOFT)
    renormalized = logps.log_softmax(-1)
    with pytest.warns(UserWarning, match="sum to 1 over k=4 of 23 tokens"):
        wrong = loss(weight, hidden, target=target, teacher=lc.TopK(ids, renormalized))[0]
    with pytest.warns(UserWarning, match="sum to 1 over k=4 of 23 tokens"):
        loss(weight, hidden, target=target, teacher_logps=renormalized.half(), teacher_ids=ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_bin = loss(weight, hidden, target=target, teacher=lc.TopK(ids, logps))[0]
        loss(weight, hidden, target=target, teacher=lc.TopK(ids, renormalized, tail="renormalize"))
        sure = logps.clone()
        sure[0] = torch.tensor([0.0, -50.0, -50.0, -50.0])  # one teacher that is sure is no reason to warn
        loss(weight, hidden, target=target, teacher=lc.TopK(ids, sure))
        whole, every = teacher_logits.log_softmax(-1).topk(V)
        loss(weight, hidden, target=target, teacher=lc.TopK(every, whole))
    assert wrong > 1.2 * by_bin


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"temperature": 0.0}, ValueError, "temperature must be positive"),
        ({"tail": "drop"}, ValueError, "tail must be one of"),
        ({"ids": torch.zeros(2, 3)}, TypeError, "ids must be a tensor of integers"),
        ({"logps": torch.zeros(2, 4)}, ValueError, r"must be \(B, T, k\) or \(N, k\)"),
        ({"logps": [0.0]}, TypeError, "logps must be a tensor of floating-point"),
    ],
)
def test_a_wrong_top_k_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"ids": torch.zeros(2, 3, dtype=torch.int64), "logps": torch.zeros(2, 3)} | arguments
    with pytest.raises(error, match=message):
        lc.TopK(**given)
