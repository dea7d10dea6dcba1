"""Test log-ratios far from 0, where an exponential overflows: limits of the formulas, and gradients of exactly zero.

Stale rollouts, and a sampler that gives a token the probability 0, have such log-ratios. A finite loss hides a gradient
of NaN there, because `exp` multiplies a gradient of zero by infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import eager
import mpmath
import pytest
import torch
from table import (
    DISTILLATION,
    DPO,
    DPO_VARIANTS,
    ON_POLICY,
    POLICY,
    REFERENCE_FREE,
    SMALL,
    UNPAIRED,
    Batch,
    Row,
    evaluate,
    moved,
    rollouts,
)
from torch import Tensor

from liger_chunked import LigerFusedLinearGRPOLoss
from liger_chunked.losses.dpo import LOSS_TYPES, DPOSettings
from liger_chunked.losses.policy import KL_ESTIMATORS
from liger_chunked.losses.rollouts import IMPORTANCE_LEVELS
from liger_chunked.losses.surrogates import SURROGATES
from liger_chunked.types import LARGEST

# Log-ratios far from 0 in both directions need references that are no log-probabilities.
pytestmark = pytest.mark.filterwarnings("ignore:ref_logps is above 0 on average:UserWarning")

# What a call gives beside heads and hidden states.
SIDES = ("advantages", "old_logps", "ref_logps", "importance_weights", "teacher_logps", "candidate_logps")
# Formulas that do not read a side.
UNREAD_SIDES = {("a2po", "old_logps")}
HAS_NAN_SIDES = [
    pytest.param(row, name, id=f"{row.id}-{name}")
    for row in [*POLICY, *ON_POLICY, *DPO, *DPO_VARIANTS, *REFERENCE_FREE, *UNPAIRED, *DISTILLATION]
    for name in SIDES
    if name in row.sample(SMALL, 3) and (row.id, name) not in UNREAD_SIDES
]


def with_nan(batch: Batch, name: str, place: tuple[int, ...]) -> Batch:
    x = batch[name].clone()
    x[place[: x.ndim]] = math.nan
    return {**batch, name: x}


@pytest.mark.parametrize(("row", "name"), HAS_NAN_SIDES)
def test_nan_shows_where_it_counts_and_nowhere_else(row: Row, name: str) -> None:
    """A NaN among advantages, weights or log-probabilities is a fault of the caller that the loss must not hide."""
    batch = row.sample(SMALL, 3)
    valid = batch["target"] != -100
    live, ignored = (tuple(mask.nonzero()[2].tolist()) for mask in (valid, ~valid))
    try:
        loss = row.ours(with_nan(batch, name, live))
    except ValueError as error:
        assert "NaN" in str(error)
        return
    assert loss.sum().isnan()
    if batch[name].shape[:2] == valid.shape:
        found, clean = (evaluate(row.ours, x) for x in (with_nan(batch, name, ignored), batch))
        assert all(torch.equal(found[x], clean[x]) for x in clean)


FAR = [89.0, -89.0, 1e4, -1e4, math.inf]
by_distance = pytest.mark.parametrize("far", FAR, ids=lambda far: f"{far:g}")
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def logps_of(batch: Batch) -> Tensor:
    return eager.token_stats(batch["weight"], batch["input"], batch["target"], batch.get("bias"))["logps"]


def stale_at(batch: Batch, far: float, name: str = "old_logps") -> tuple[Batch, tuple[int, int]]:
    """Return the batch with a log-ratio `far` at one token, and the token."""
    row, column = map(int, (batch["target"] != -100).nonzero()[2])
    moved_logps = batch[name].clone()
    moved_logps[row, column] = -math.inf if far == math.inf else logps_of(batch)[row, column] - far
    return {**batch, name: moved_logps}, (row, column)


def assert_finite_and_same(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    assert ours.keys() == exact.keys()
    for name, value in exact.items():
        assert value.isfinite().all(), f"eager {name}"
        assert ours[name].isfinite().all(), name
        # Gradients of saturated losses cancel down to 1e-15.
        assert float((ours[name] - value).norm()) < 1e-10 * max(float(value.norm()), 1e-4), name


# Every loss: finite, and as in eager code


@pytest.mark.few(2, "89-dppo_kl")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("row", [*POLICY, *ON_POLICY], ids=repr)
@by_distance
def test_stale_tokens_of_policy_losses(row, far):
    batch = row.sample(SMALL, seed=11)
    names = [name for name in ("old_logps", "ref_logps", "teacher_logps") if name in batch]
    for name in names:
        stale, _ = stale_at(batch, far, name)
        assert_finite_and_same(evaluate(row.ours, stale), evaluate(row.oracle, stale))
        in_float32 = evaluate(row.ours, moved(stale, torch.float32))
        for parameter in ("input", "weight"):
            assert not in_float32[parameter].isnan().any(), (name, parameter)


@pytest.mark.few(2)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("row", [*DPO, *DPO_VARIANTS, *REFERENCE_FREE, *UNPAIRED], ids=repr)
@by_distance
def test_far_sequences_of_preference_losses(row, far):
    batch = row.sample(SMALL, seed=12)
    if "ref_logps" in batch:
        batch["ref_logps"].view(-1)[batch["ref_logps"].numel() // 3] = -far
    else:  # log-probabilities of thousands of nats
        batch["input"] = batch["input"] * (1e4 if far == math.inf else abs(far))
    assert_finite_and_same(evaluate(row.ours, batch), evaluate(row.oracle, batch))
    for name, value in evaluate(row.ours, moved(batch, torch.float32)).items():
        assert name == "loss" or not value.isnan().any(), name


# A gradient of exactly zero


def policy(batch: Batch, **settings) -> Tensor:
    return LigerFusedLinearGRPOLoss(**settings)(**batch)[0]


def ignored_how(how: str, batch: Batch, token: tuple[int, int]) -> Batch:
    """Return a batch whose loss does not count the token's ratio."""
    sequence = token[0]
    if how == "advantage-0":
        return {**batch, "advantages": batch["advantages"].index_fill(0, torch.tensor([sequence]), 0.0)}
    weights = torch.ones(batch["target"].shape, dtype=torch.float64)
    weights[sequence] = 0.0
    return {**batch, "importance_weights": weights}


def takes(surrogate: str, level: str) -> bool:
    """The loss refuses other levels than "token" for a surrogate that needs tokens, or reads no ratio of the level."""
    definition = SURROGATES[surrogate]
    return level == "token" or (definition.reads_ratio and not definition.needs_tokens)


IGNORED = [
    (how, surrogate, level)
    for how in ("advantage-0", "weight-0")
    for surrogate in SURROGATES
    for level in IMPORTANCE_LEVELS
    if takes(surrogate, level)
    # REAL classifies whole sequences, and A*-PO fits their rewards: each token counts, whatever its advantage.
    and surrogate not in ("real", "a2po")
    # The weight is a factor of VESPO's ratio, so a weight of 0 is another ratio, and does not ignore a token.
    and (how, surrogate) != ("weight-0", "vespo")
]


@pytest.mark.few(3)
@pytest.mark.sampled(4)  # of 10 distances and dtypes
@by_dtype
@by_distance
@pytest.mark.parametrize(("how", "surrogate", "level"), IGNORED)
def test_tokens_that_do_not_count_have_no_gradient(how, surrogate, level, far, dtype):
    """The others have the bits that they have beside a token with a moderate ratio."""
    batch = rollouts(SMALL, seed=13)
    moderate, token = stale_at(batch, math.copysign(0.5, far))
    stale, _ = stale_at(batch, far)
    settings = {"surrogate": surrogate, "importance_level": level}
    results = []
    for given in (stale, moderate):
        results.append(evaluate(partial(policy, **settings), moved(ignored_how(how, given, token), dtype)))
    ours, expected = results
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name
    if surrogate != "kl_cov" or how != "advantage-0":  # its penalty does not depend on the advantage
        assert (ours["input"][token[0]] == 0).all()
    assert (ours["input"] != 0).any()


# The formulas' limits, in 60 digits


def in_60_digits(function: Callable, *x: float) -> tuple[mpmath.mpf, list[mpmath.mpf]]:
    """Return the value and its partial derivatives."""
    with mpmath.workdps(60):
        points = tuple(mpmath.mpf(value) for value in x)
        orders = [tuple(int(i == j) for j in range(len(x))) for i in range(len(x))]
        return function(*points), [mpmath.diff(function, points, order) for order in orders]


def log_sigmoid(x: mpmath.mpf) -> mpmath.mpf:
    return -mpmath.log1p(mpmath.exp(-x)) if x > 0 else x - mpmath.log1p(mpmath.exp(x))


def sigmoid(x: mpmath.mpf) -> mpmath.mpf:
    return mpmath.exp(log_sigmoid(x))


@pytest.mark.few(4)
@pytest.mark.parametrize("tau", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("x", [-1e4, -1e3, -89.0, -5.0, 0.0, 5.0, 89.0, 1e4])
def test_discopop_at_every_tau(tau, x):
    logratios = torch.tensor([[x, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = LOSS_TYPES["discopop"].loss(SimpleNamespace(logratios=logratios), 1.0, DPOSettings(discopop_tau=tau))
    loss.sum().backward()

    def formula(x: mpmath.mpf) -> mpmath.mpf:
        return sigmoid(-x / tau) * -log_sigmoid(x) + sigmoid(x / tau) * mpmath.exp(-x)

    value, (slope,) = in_60_digits(formula, x)
    if value > LARGEST:  # tau above 1 and a very negative margin
        assert float(loss.detach()) == pytest.approx(LARGEST, rel=1e-12)
        assert logratios.grad.isfinite().all()
    else:
        found = [float(loss.detach()), float(logratios.grad[0, 0])]
        assert found == pytest.approx([float(value), float(slope)], rel=1e-12, abs=1e-16)


KL_FORMULAS: dict[str, Callable] = {
    "k1": lambda d: -d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: mpmath.expm1(d) - d,
    "abs": abs,
    "low_var_kl": lambda d: min(mpmath.mpf(10), mpmath.expm1(max(-20, min(20, d))) - max(-20, min(20, d))),
}


@pytest.mark.few(4)
@by_dtype
@pytest.mark.parametrize("name", KL_FORMULAS)
@pytest.mark.parametrize("d", [-1e4, -89.0, -15.0, -3.0, 0.5, 2.0, 15.0, 89.0, 1e4])
def test_kl_estimators_have_their_limits(name, d, dtype):
    x = torch.tensor(d, dtype=dtype, requires_grad=True)
    estimate = KL_ESTIMATORS[name](x)
    estimate.backward()
    value, (slope,) = in_60_digits(KL_FORMULAS[name], d)
    if value > LARGEST:
        assert float(estimate.detach()) == pytest.approx(LARGEST, rel=1e-5)
        assert x.grad == 0
    else:
        found = [float(estimate.detach()), float(x.grad)]
        assert found == pytest.approx([float(value), float(slope)], rel=1e-5 if dtype == torch.float32 else 1e-13)
