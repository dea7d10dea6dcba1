"""A user-defined loss of a few lines supports everything that its base does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import eager
import pytest
import torch
import torch.nn.functional as F
from table import SMALL, Batch, assert_same, evaluate, examples, moved, pairs, rollouts, students
from torch import Tensor

from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearPolicyBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
)
from liger_chunked.testing import check_loss


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


class Balanced(LigerFusedLinearUnpairedPreferenceBase):
    """Hinges whose two sides have equal weight, minus entropy: uses counts, signs, tokens and another statistic."""

    token_outputs = ("entropy",)

    def preference_loss(self, examples):
        counts = torch.where(examples.desirable, examples.batch_counts[0], examples.batch_counts[1])
        hinge = torch.relu(1 - self.beta * examples.signs * examples.logratios)
        entropy = torch.where(examples.mask, examples.token_stats.entropy, 0).sum(-1) / examples.lengths
        squares = (examples.token_logps**2).sum(-1) / examples.lengths
        return examples.batch_size / counts * hinge - 0.1 * entropy + 0.01 * squares + examples.reference_point


class Centred(LigerFusedLinearPolicyBase):
    """Subtracts the batch's mean advantage."""

    scope = "batch"

    def policy_loss(self, rollouts):
        advantages = rollouts.advantages.expand(rollouts.mask.shape)
        return -rollouts.ratio * (advantages - advantages[rollouts.mask].mean())


class SymmetricKL(LigerFusedLinearDistillationBase):
    of_distributions = True

    def divergence(self, student_logits, teacher_logits):
        log_p, log_q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1)


def stats_of(batch: Batch) -> dict[str, Tensor]:
    tensors = (batch[name] for name in ("weight", "input", "target", "bias"))
    return eager.token_stats(*tensors, outputs=("logps", "entropy"))


def sequence_logps(batch: Batch) -> tuple[Tensor, Tensor]:
    return stats_of(batch)["logps"].sum(1), (batch["target"] != -100).sum(1)


def eager_simpo(batch: Batch) -> Tensor:
    logps, lengths = sequence_logps(batch)
    chosen, rejected = (logps / lengths).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected) - 0.5).mean()


def eager_confident(batch: Batch) -> Tensor:
    stats = stats_of(batch)
    lengths = (batch["target"] != -100).sum(1).view(2, -1).sum(0)
    return ((stats["entropy"] + stats["logps"].square()).sum(1).view(2, -1).sum(0) / lengths).mean()


def eager_ranked(batch: Batch) -> Tensor:
    chosen, rejected = sequence_logps(batch)[0].chunk(2)
    margin = chosen - rejected
    return F.softplus(0.1 * (margin.max() - margin)).mean()


def eager_balanced(batch: Batch) -> Tensor:
    stats = stats_of(batch)
    lengths = (batch["target"] != -100).sum(1)
    logps, chosen = stats["logps"].sum(1), batch["preference_labels"]
    sides = torch.relu(1 - 0.1 * logps[chosen]).mean() + torch.relu(1 + 0.1 * logps[~chosen]).mean()
    return sides + ((0.01 * stats["logps"] ** 2 - 0.1 * stats["entropy"]).sum(1) / lengths).mean()


def eager_centred(batch: Batch) -> Tensor:
    mask = batch["target"] != -100
    advantages = batch["advantages"][:, None].expand(mask.shape)
    return eager.grpo(**batch | {"advantages": advantages - advantages[mask].mean()}, surrogate="reinforce")[0]


def eager_symmetric(batch: Batch) -> Tensor:
    both = (eager.distillation(**batch, name=name, weight_hard_loss=0.25)[0] for name in ("kl", "reverse_kl"))
    return sum(both, torch.zeros(()))


# By name: a loss, its formula on full logits, and a batch.
OWN: dict[str, tuple[Any, Callable[[Batch], Tensor], Callable[[], Batch]]] = {
    "SimPO": (partial(SimPO, use_ref_model=False), eager_simpo, lambda: pairs(SMALL, seed=0, ref=None)),
    "Confident": (partial(Confident, use_ref_model=False), eager_confident, lambda: pairs(SMALL, seed=0, ref=None)),
    "Ranked": (partial(Ranked, use_ref_model=False), eager_ranked, lambda: pairs(SMALL, seed=0, ref=None)),
    "Balanced": (partial(Balanced, use_ref_model=False), eager_balanced, lambda: examples(SMALL, seed=3, ref=None)),
    "Centred": (Centred, eager_centred, lambda: rollouts(SMALL, seed=30)),
    "SymmetricKL": (SymmetricKL, eager_symmetric, lambda: students(SMALL, seed=0)),
}
BUDGETS = {"auto": None, "packs": 8 * 9 * SMALL.vocab, "slices": 8 * 3 * SMALL.vocab, "1-logit": 1}


@pytest.mark.few(6)
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("name", OWN)
def test_subclass(name, budget, device):
    make, oracle, sample = OWN[name]
    batch, loss = moved(sample(), device=device), make(logits_budget=budget)
    assert_same(evaluate(lambda batch: loss(**batch)[0], batch), evaluate(oracle, batch))
    if budget is None:
        check_loss(loss)


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
