"""A user-defined loss of a few lines supports everything that its base does."""

from __future__ import annotations

import eager
import pytest
import torch
import torch.nn.functional as F
from table import SMALL, Batch, assert_same, evaluate, moved, pairs, students
from torch import Tensor

from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearPreferenceBase,
)


class SimPO(LigerFusedLinearPreferenceBase):
    def preference_loss(self, pairs):
        chosen, rejected = (pairs.logps / pairs.lengths).unbind(-1)
        return -F.logsigmoid(self.beta * (chosen - rejected) - 0.5)


class Confident(LigerFusedLinearPreferenceBase):
    """Reads tokens, not sequences."""

    token_outputs = ("entropy",)

    def preference_loss(self, pairs):
        return (pairs.token_stats.entropy + pairs.token_logps.square()).sum((1, 2)) / pairs.lengths.sum(-1)


class Ranked(LigerFusedLinearPreferenceBase):
    """Compares each pair with the best pair of the batch."""

    scope = "batch"

    def preference_loss(self, pairs):
        margin = pairs.logratios[:, 0] - pairs.logratios[:, 1]
        return F.softplus(self.beta * (margin.max() - margin))


def sequence_logps(batch: Batch) -> tuple[Tensor, Tensor]:
    logps = eager.token_stats(batch["weight"], batch["input"], batch["target"], batch["bias"])["logps"]
    return logps.sum(1), (batch["target"] != -100).sum(1)


def eager_simpo(batch: Batch) -> Tensor:
    logps, lengths = sequence_logps(batch)
    chosen, rejected = (logps / lengths).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected) - 0.5).mean()


def eager_confident(batch: Batch) -> Tensor:
    stats = eager.token_stats(
        batch["weight"], batch["input"], batch["target"], batch["bias"], outputs=("logps", "entropy")
    )
    lengths = (batch["target"] != -100).sum(1).view(2, -1).sum(0)
    return ((stats["entropy"] + stats["logps"].square()).sum(1).view(2, -1).sum(0) / lengths).mean()


def eager_ranked(batch: Batch) -> Tensor:
    chosen, rejected = sequence_logps(batch)[0].chunk(2)
    margin = chosen - rejected
    return F.softplus(0.1 * (margin.max() - margin)).mean()


@pytest.mark.few(3)
@pytest.mark.parametrize("budget", [None, 8 * 9 * SMALL.vocab, 8 * 3 * SMALL.vocab], ids=["auto", "packs", "slices"])
@pytest.mark.parametrize(
    ("loss", "oracle"),
    [(SimPO, eager_simpo), (Confident, eager_confident), (Ranked, eager_ranked)],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_subclass(loss, oracle, budget, device):
    batch = moved(pairs(SMALL, seed=0, ref=None), device=device)
    ours = evaluate(lambda batch: loss(use_ref_model=False, logits_budget=budget)(**batch)[0], batch)
    exact = evaluate(oracle, batch)
    assert_same(ours, exact)


def test_a_parameter_of_a_divergence_is_refused():
    class Learned(LigerFusedLinearDistillationBase):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(2))

        def divergence(self, student_logits, teacher_logits):
            return self.scale.sum() * (student_logits - teacher_logits).square().sum(-1)

    batch, loss = students(SMALL, seed=0), Learned()
    batch["weight"].requires_grad_()
    with pytest.raises(ValueError, match=r"^divergence depends on another tensor .*, scale \(2,\) float32"):
        loss(**batch)
    loss(**batch | {"weight": batch["weight"].detach()})
    loss.requires_grad_(False)
    loss(**batch)[0].backward()


def test_a_loss_may_own_the_head_it_is_given():
    """The head is a low-rank product, passed as an argument, so gradients reach its factors."""

    class Adapted(LigerFusedLinearCrossEntropyLoss):
        def __init__(self, hidden: int, vocab: int):
            super().__init__()
            self.base = torch.nn.Linear(hidden, vocab, bias=False).requires_grad_(False)
            self.down = torch.nn.Parameter(torch.randn(2, hidden))
            self.up = torch.nn.Parameter(torch.randn(vocab, 2))

        def forward(self, input, target):
            return super().forward(self.base.weight + self.up @ self.down, input, target)

    torch.manual_seed(0)
    loss = Adapted(8, 50)
    x, target = torch.randn(5, 8), torch.arange(5)
    logits = x @ (loss.base.weight + loss.up @ loss.down).t()
    wanted = (loss.up, loss.down)
    expected = torch.autograd.grad(F.cross_entropy(logits, target), wanted)
    for g, same in zip(torch.autograd.grad(loss(x, target), wanted), expected, strict=True):
        torch.testing.assert_close(g, same)


class Detached(LigerFusedLinearPreferenceBase):
    def preference_loss(self, pairs):
        return (pairs.logps[:, 1] - pairs.logps[:, 0]).detach()


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", [None, 2 * 8 * SMALL.vocab], ids=["one pack", "several"])
def test_a_loss_without_gradient_is_refused(budget):
    batch = pairs(SMALL, seed=0, ref=None)
    loss = Detached(use_ref_model=False, logits_budget=budget)
    assert loss(**batch)[0].isfinite()  # without a gradient
    batch["weight"].requires_grad_()
    with pytest.raises(ValueError, match=r"the loss has no gradient: .* detached"):
        loss(**batch)
    with torch.no_grad():
        assert loss(**batch)[0].isfinite()
    # A loss of no tokens depends on no input.
    empty, _ = loss(**batch | {"target": torch.full_like(batch["target"], -100)})
    empty.backward()
    assert not batch["weight"].grad.any()


@pytest.mark.parametrize("budget", [None, 2 * 8 * SMALL.vocab], ids=["one chunk", "several"])
def test_statistics_for_metrics_are_detached(budget, monkeypatch):
    batch, kept = pairs(SMALL, seed=0, ref=None), []
    metrics = SimPO._metrics
    monkeypatch.setattr(SimPO, "_metrics", lambda self, b, stats: kept.append(stats) or metrics(self, b, stats))
    loss, _ = SimPO(use_ref_model=False, logits_budget=budget)(**batch | {"weight": batch["weight"].requires_grad_()})
    assert loss.requires_grad
    assert not any(x.requires_grad for x in kept[0] if x is not None)


def test_what_a_class_misspells_is_named():
    misspelt = SimPO()
    misspelt.scope = "bach"
    with pytest.raises(ValueError, match=r"SimPO.scope must be one of \('pair', 'batch'\), got 'bach'"):
        misspelt(**pairs(SMALL, seed=0))
    misspelt = Confident()
    misspelt.token_outputs = ("entorpy",)
    with pytest.raises(ValueError, match=r"token_outputs must name fields of TokenStats .*, got \['entorpy'\]"):
        misspelt(**pairs(SMALL, seed=0))
