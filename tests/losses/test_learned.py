"""Losses with a parameter of their own: a temperature, a margin, a weight, differentiated with the rest."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import eager
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import join, same_on_all_ranks
from table import (
    SMALL,
    Batch,
    assert_same,
    examples,
    leaves_of,
    pairs,
    relative_error,
    rollouts,
    with_attributes,
)
from torch import Tensor, nn

import liger_chunked as lc

BUDGETS = {"one-chunk": None, "chunks": 8 * 9 * SMALL.vocab, "slices": 8 * 7}
by_budget = pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)


def margin_loss(logps: Tensor, log_beta: Tensor, margin: Tensor) -> Tensor:
    return F.softplus(margin.sum() - log_beta.exp() * (logps[:, 0] - logps[:, 1]))


class LearnedMargin(lc.LigerFusedLinearPreferenceBase):
    """Two parameters, of which one has several elements."""

    def __init__(self, **options):
        super().__init__(use_ref_model=False, **options)
        self.log_beta = nn.Parameter(torch.tensor(-1.0, dtype=torch.float64))
        self.margin = nn.Parameter(torch.tensor([0.2, 0.1], dtype=torch.float64))

    def preference_loss(self, pairs: lc.Pairs) -> Tensor:
        return margin_loss(pairs.logps, self.log_beta, self.margin)


class LearnedWeight(lc.LigerFusedLinearUnpairedPreferenceBase):
    def __init__(self, **options):
        super().__init__(use_ref_model=False, **options)
        self.weight_of = nn.Parameter(torch.tensor([0.7, 1.3], dtype=torch.float64))

    def preference_loss(self, examples: lc.Examples) -> Tensor:
        weights = self.weight_of[examples.desirable.long()]
        return weights * torch.sigmoid(-self.beta * examples.signs * examples.logps)


class LearnedTemperature(lc.LigerFusedLinearPolicyBase):
    scope = "token"

    def __init__(self, **options):
        super().__init__(**options)
        self.tau = nn.Parameter(torch.tensor(1.1, dtype=torch.float64))

    def policy_loss(self, rollouts: lc.Rollouts) -> Tensor:
        return -torch.sigmoid(self.tau * (rollouts.ratio - 1)) / self.tau * rollouts.advantages


def logps_of(batch: Batch) -> Tensor:
    return eager.token_stats(batch["weight"], batch["input"], batch["target"], batch["bias"])["logps"]


def eager_margin(loss: LearnedMargin, batch: Batch) -> Tensor:
    logps = logps_of(batch).sum(1).view(2, -1).t()
    return margin_loss(logps, loss.log_beta, loss.margin).mean()


def eager_weight(loss: LearnedWeight, batch: Batch) -> Tensor:
    logps, desirable = logps_of(batch).sum(1), batch["preference_labels"]
    signs = 2 * desirable.double() - 1
    return (loss.weight_of[desirable.long()] * torch.sigmoid(-loss.beta * signs * logps)).mean()


def eager_temperature(loss: LearnedTemperature, batch: Batch) -> Tensor:
    ratio = (logps_of(batch) - batch["old_logps"]).exp()
    cost = -torch.sigmoid(loss.tau * (ratio - 1)) / loss.tau * batch["advantages"][:, None]
    valid = batch["target"] != -100
    return (torch.where(valid, cost, 0).sum(1) / valid.sum(1)).mean()


Case = tuple[Callable[..., nn.Module], Callable[[nn.Module, Batch], Tensor], Batch]


def case(kind: str) -> Case:
    if kind == "pairs":
        return LearnedMargin, eager_margin, pairs(SMALL, seed=0, ref=None)
    if kind == "examples":
        return LearnedWeight, eager_weight, examples(SMALL, seed=0, ref=None)
    return LearnedTemperature, eager_temperature, rollouts(SMALL, seed=0)


by_kind = pytest.mark.parametrize("kind", ["pairs", "examples", "rollouts"])


def gradients(loss: nn.Module, value: Tensor, leaves: Batch) -> dict[str, Tensor | None]:
    value.backward()
    return {name: x.grad for name, x in (*loss.named_parameters(), *leaves.items())}


@pytest.mark.few(3)
@by_kind
@by_budget
@pytest.mark.parametrize("trainable", [("weight", "input", "bias"), ("input",), ()], ids=["all", "input", "nothing"])
def test_every_gradient_matches_eager_code(kind, budget, trainable):
    """Also if the parameters alone are trained."""
    make, oracle, batch = case(kind)
    ours, theirs = make(logits_budget=budget), make()
    leaves, others = leaves_of(batch, trainable), leaves_of(batch, trainable)
    value, exact = ours(**{**batch, **leaves})[0], oracle(theirs, {**batch, **others})
    assert relative_error(value.detach(), exact.detach()) < 1e-12
    found, expected = gradients(ours, value, leaves), gradients(theirs, exact, others)
    assert found.keys() == expected.keys()
    assert_same(found, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("make", "name", "start"),
    [
        (lc.LigerFusedLinearDPOLoss, "beta", 0.3),
        (lc.LigerFusedLinearSimPOLoss, "beta", 1.0),
        (lc.LigerFusedLinearSimPOLoss, "gamma", 0.0),
    ],
)
def test_a_setting_of_a_built_in_loss_is_trained(make, name, start):
    """Each step reads the parameter's present value, and differentiates by it, also at a neutral one."""
    batch, simpo = pairs(SMALL, seed=0, ref=None), make is lc.LigerFusedLinearSimPOLoss
    parameter = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    own = with_attributes(make, **{name: parameter})
    loss: Any = own(beta=2.0, logits_budget=8 * 9 * SMALL.vocab, **({} if simpo else {"use_ref_model": False}))
    lengths = (batch["target"] != -100).sum(1) if simpo else 1
    chosen, rejected = (logps_of(batch).sum(1) / lengths).chunk(2)
    for _ in range(3):
        parameter.grad = None
        value = loss(**batch)[0]
        value.backward()
        settings = {"beta": 2.0, "gamma": 0.5 if simpo else 0.0, name: parameter.detach().clone().requires_grad_()}
        exact = F.softplus(settings["gamma"] - settings["beta"] * (chosen - rejected)).mean()
        (expected,) = torch.autograd.grad(exact, settings[name])
        assert relative_error(value.detach(), exact.detach()) < 1e-12
        assert relative_error(parameter.grad, expected) < 1e-12
        with torch.no_grad():
            parameter += 0.25


@pytest.mark.few(1)
@by_budget
@pytest.mark.parametrize(
    ("make", "oracle", "name"),
    [
        *[
            (lc.LigerFusedLinearCrossEntropyLoss, eager.cross_entropy, name)
            for name in ("label_smoothing", "lse_square_scale", "entropy_weight")
        ],
        *[(partial(lc.LigerFusedLinearGRPOLoss, beta=0.0), eager.grpo, name) for name in ("beta", "entropy_coef")],
    ],
)
def test_a_setting_that_starts_at_zero_is_trained(make, oracle, name, budget):
    """0 says "not set" only as a number. The losses are linear in these settings, so two values give the slope."""
    if oracle is eager.grpo:
        batch = rollouts(SMALL, seed=0, ref="tokens")
    else:
        batch = pairs(SMALL, seed=0, ref=None)
    parameter = nn.Parameter(torch.tensor(0.0, dtype=torch.float64))
    loss: Any = with_attributes(make, **{name: parameter})(logits_budget=budget)
    value = loss(**batch)
    value = value[0] if isinstance(value, tuple) else value
    value.backward()
    found = {x: oracle(**batch, **{name: x}) for x in (0.0, 0.5)}
    at = {x: y[0] if isinstance(y, tuple) else y for x, y in found.items()}
    assert relative_error(value.detach(), at[0.0].detach()) < 1e-12
    assert parameter.grad is not None
    assert relative_error(parameter.grad, (at[0.5] - at[0.0]).detach() / 0.5) < 1e-12


@pytest.mark.few(2)
@by_budget
@pytest.mark.parametrize("inside", [True, False])
def test_a_tensor_that_a_function_holds(inside, budget):
    """Also one computed from a parameter before the call, whose graph each chunk needs."""
    batch = pairs(SMALL, seed=0, ref=None)
    log_beta = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    margin = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    before = log_beta.exp()

    def learned(pairs: lc.Pairs) -> Tensor:
        beta = log_beta.exp() if inside else before
        return F.softplus(margin.exp().sum() - beta * (pairs.logps[:, 0] - pairs.logps[:, 1]))

    loss = lc.LigerFusedLinearDPOLoss(loss_type=learned, use_ref_model=False, logits_budget=budget)
    loss(**batch)[0].backward()
    found = log_beta.grad, margin.grad
    log_beta.grad = margin.grad = None
    logps = logps_of(batch).sum(1).view(2, -1).t()
    F.softplus(margin.exp().sum() - log_beta.exp() * (logps[:, 0] - logps[:, 1])).mean().backward()
    for ours, exact in zip(found, (log_beta.grad, margin.grad), strict=True):
        assert relative_error(ours, exact) < 1e-12


# Ranks


def trained(rank: int, folder: str) -> None:
    """DDP averages the parameter's gradient; ranks of a vocabulary have the same; split sequences are refused."""
    join(rank, 2, folder)
    make, _, batch = case("pairs")
    in_data_parallel(rank, make, batch)
    gc.collect()  # DDP: a process group that it holds last can wait for the interpreter's lock while it holds it

    whole, shard = make(), make()
    whole(**batch)[0].backward()
    start = 11 * rank
    own = {**batch, **{name: batch[name][start : start + 11 + rank] for name in ("weight", "bias")}}
    shard(**own, vocab_shard=lc.VocabShard(None, start, SMALL.vocab))[0].backward()
    for a, b in zip(shard.parameters(), whole.parameters(), strict=True):
        assert relative_error(a.grad, b.grad) < 1e-12
        assert same_on_all_ranks(a.grad)

    half = slice(0, 4) if rank == 0 else slice(4, 7)
    split = {**batch, "input": batch["input"][:, half], "target": batch["target"][:, half]}
    with pytest.raises(ValueError, match=r"requires a gradient, (log_beta|margin) .*sequence_group"):
        make()(**split, sequence_group=dist.group.WORLD)
    make().requires_grad_(False)(**split, sequence_group=dist.group.WORLD)
    dist.destroy_process_group()


def in_data_parallel(rank: int, make: Callable[..., nn.Module], batch: Batch) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(SMALL.hidden, SMALL.vocab, dtype=torch.float64)
            self.loss = make()

        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return self.loss(self.head.weight, input, target, self.head.bias)[0]

    torch.manual_seed(0)
    model = Head()
    expected = {}
    for i in range(2):
        for name, g in zip(
            dict(model.named_parameters()),
            torch.autograd.grad(model(batch["input"] + i, batch["target"]), list(model.parameters())),
            strict=True,
        ):
            expected[name] = expected.get(name, 0) + g / 2
    model.requires_grad_(True)
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel(batch["input"] + rank, batch["target"]).backward()
    for name, x in model.named_parameters():
        assert relative_error(x.grad, expected[name]) < 1e-12, name
        assert same_on_all_ranks(x.grad)
