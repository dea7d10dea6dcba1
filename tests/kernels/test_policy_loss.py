"""Losses of rollouts whose gradient a kernel knows: values, gradients and metrics of autograd, and of the oracle."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from table import SMALL, Batch, evaluate, moved, relative_error, rollouts, with_attributes
from test_pair_loss import needs_kernels
from torch import Tensor

from benchmarks.host_time import count_calls
from liger_chunked import LigerFusedLinearGRPOLoss, LigerFusedLinearPolicyBase, eager
from liger_chunked.calls import altered
from liger_chunked.engine import Chunk, PolicyKernel, objective, policies, select_rows
from liger_chunked.engine.cutting import chunks_of_groups
from liger_chunked.engine.rows import Rows
from liger_chunked.kernels import policy_loss
from liger_chunked.losses.grpo import SURROGATES, SurrogateSettings
from liger_chunked.losses.policy import _BatchArguments, _ByAutograd
from liger_chunked.losses.rollouts import RolloutSides
from liger_chunked.types import Clipped, PolicyMetrics, Rollouts, TokenStats

pytestmark = pytest.mark.triton

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"beta": 0.1},
    "bnpo": {"reduction": "bnpo"},
    "dapo": {"reduction": "dapo", "epsilon_high": 0.28, "beta": 0.1},
    "dr_grpo": {"reduction": "dr_grpo", "max_completion_length": 9, "delta": 1.5},
    "luspo": {"reduction": "luspo", "importance_level": "sequence"},
    "gspo": {"importance_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03, "beta": 0.1},
    "gspo-token": {"importance_level": "sequence_token", "epsilon_low": 0.02, "epsilon_high": 0.03, "beta": 0.1},
    "trajectory": {"importance_level": "trajectory", "beta": 0.1},
    "low-delta": {"delta": 0.7},
    "k1": {"beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False},
    "k2": {"beta": 0.1, "kl_estimator": "mse"},
    "k3-uncorrected": {"beta": 0.1, "use_bias_correction_kl": False, "importance_level": "sequence"},
    "cispo": {"surrogate": "cispo", "reduction": "dapo", "epsilon_high": 1.1},
    "cispo-of-sequences": {
        "surrogate": "cispo", "cispo_epsilon_low": 0.3, "epsilon_high": 0.9, "importance_level": "sequence",
    },
    "reinforce": {"surrogate": "reinforce", "importance_level": "trajectory"},
}  # fmt: skip


class Sides(NamedTuple):
    old: bool = True
    ref: bool = True
    advantages: str = "sequences"
    weights: str | None = None


SIDES = {
    "all": Sides(),
    "on-policy": Sides(old=False, advantages="tokens", weights="sequences"),
    "of-tokens": Sides(ref=False, advantages="tokens", weights="tokens"),
    "bare": Sides(old=False, ref=False, weights="tokens"),
}


class Case(NamedTuple):
    """Tokens of a batch. Values are float32; at ignored tokens they are NaN, which nothing may read."""

    target: Tensor  # (B, T)
    logps: Tensor  # (B, T)
    entropy: Tensor
    sides: RolloutSides

    def to(self, device: str) -> Case:
        sides = RolloutSides(*(None if x is None else x.to(device) for x in self.sides))
        return Case(self.target.to(device), self.logps.to(device), self.entropy.to(device), sides)


def case(given: Sides, length: int = 9, seed: int = 0, scale: float = 0.3) -> Case:
    """Return sequences with ignored tokens anywhere: an empty one, whole ones, and others."""
    generator, n = torch.Generator().manual_seed(seed), 6
    mask = torch.rand(n, length, generator=generator) < 0.7
    mask[1], mask[2], mask[5] = False, True, False
    ignored = torch.where(mask, 0.0, torch.nan)

    def of_tokens(scale: float, center: Tensor | float = 0.0) -> Tensor:
        return center + scale * torch.randn(n, length, generator=generator) + ignored

    logps = -of_tokens(1.5).abs() - 0.1
    shapes: dict[str, Callable[[], Tensor]] = {
        "sequences": lambda: torch.randn(n, generator=generator),
        "tokens": lambda: of_tokens(1.0),
    }
    sides = RolloutSides(
        advantages=shapes[given.advantages](),
        old_logps=of_tokens(scale, logps) if given.old else None,
        ref_logps=of_tokens(scale, logps).nan_to_num(0.0) if given.ref else None,  # as `reference_logps` returns them
        importance_weights=None if given.weights is None else shapes[given.weights]().abs(),
    )
    return Case(torch.where(mask, 0, -100), logps, of_tokens(1.0).abs(), sides)


class Result(NamedTuple):
    loss: Tensor
    gradient: Tensor  # compact
    metrics: PolicyMetrics


def rows_of(loss: LigerFusedLinearPolicyBase, given: Case) -> Rows:
    return select_rows(given.target, loss._group, -100, 4, counts_sequences=True)


def by_kernel(loss: LigerFusedLinearGRPOLoss, given: Case, num_items: Any = None, n_chunks: int = 1) -> Result:
    rows, term = rows_of(loss, given), loss._term_of_step()
    assert term is not None
    divisor = loss._divisor(num_items, rows, given.target, torch.float32)
    kernel = loss._policy_kernel(term, given.sides, divisor, given.target.shape[0], ref_is_compact=False)
    size, mask = max(1, -(-rows.n_valid // n_chunks)), given.target >= 0
    if rows.groups is None:
        cuts = [slice(i, min(i + size, rows.n_valid)) for i in range(0, rows.n_valid, size)] or [slice(0, 0)]
        chunks = tuple(Chunk(cut, cut) for cut in cuts)
    else:
        chunks = chunks_of_groups(rows.groups.host_counts, rows.groups.host_counts, size)
    assert len(chunks) > 1 or n_chunks == 1
    logps, entropy = given.logps[mask], given.entropy[mask]
    shares = [
        kernel.evaluate(TokenStats(logps=logps[c.row_slice], entropy=entropy[c.row_slice]), rows, c, True)
        for c in chunks
    ]
    for share in shares:
        assert share.rounded is not None
        torch.testing.assert_close(share.rounded, share.loss.float(), rtol=0, atol=0, equal_nan=True)
    total = torch.stack([share.loss for share in shares]).sum()
    return Result(total, torch.cat([share.gradients["logps"] for share in shares]), kernel.metrics())


def by_autograd(loss: LigerFusedLinearGRPOLoss, given: Case, num_items: Any = None) -> Result:
    """Return what the loss's own formula gives in float64."""
    rows, mask, shape = rows_of(loss, given), given.target >= 0, given.target.shape
    sides = RolloutSides(*(None if x is None else x.double() for x in given.sides))
    if sides.ref_logps is not None:
        sides = sides._replace(ref_logps=rows.arrange(sides.ref_logps.clamp(min=-1e18)))
    divisor = loss._divisor(num_items, rows, given.target, torch.float64)
    objective = _ByAutograd(loss, _BatchArguments(sides, rows, shape, torch.float64, divisor), 1)
    chunk = Chunk(slice(0, rows.n_valid), slice(0, rows.dense_shape[0]))
    compact = TokenStats(logps=given.logps[mask].double(), entropy=given.entropy[mask].double())
    share = objective.evaluate(compact, rows, chunk, True)
    assert share.values is not None
    batch = objective.batch
    metrics = loss._metrics(batch, batch.rollouts(rows.join([share.values]), slice(None)), shape)
    return Result(share.loss, share.gradients["logps"], metrics)


def by_oracle(settings: dict[str, Any], given: Case, monkeypatch: pytest.MonkeyPatch, num_items: Any) -> Result:
    """Return what eager code gives, whose statistics are those of the case."""
    mask = given.target >= 0
    leaf = given.logps.double().nan_to_num(0.0).requires_grad_()
    stats = {"logps": leaf, "entropy": given.entropy.double().nan_to_num(0.0)}
    monkeypatch.setattr(sys.modules["liger_chunked.eager.grpo"], "token_stats", lambda *_, **__: stats)
    sides = {name: None if x is None else x.double() for name, x in given.sides._asdict().items()}
    loss, metrics = eager.grpo(leaf, leaf, given.target, **sides, num_items=num_items, **settings)
    return Result(loss.detach(), torch.autograd.grad(loss, leaf)[0][mask], PolicyMetrics(**metrics))


def check(found: Result, expected: Result, equal_nan: bool = False) -> None:
    close = partial(torch.testing.assert_close, equal_nan=equal_nan)
    # Both are sums in float64, in other orders, of some dozens of terms near 1.
    close(found.loss, expected.loss, rtol=1e-12, atol=1e-12)
    # The kernel computes the gradient in float64 too, and rounds it once. The atol is float64's rounding of terms of 1.
    close(found.gradient.double(), expected.gradient, rtol=2**-23, atol=1e-16)
    for name, ours, theirs in zip(PolicyMetrics._fields, found.metrics, expected.metrics, strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None and theirs is not None:
            assert ours.dtype == torch.float32 and ours.shape == ()
            torch.testing.assert_close(
                ours.double(), theirs.double(), rtol=2**-23, atol=1e-15, equal_nan=True, msg=name
            )


@pytest.mark.parametrize("given", SIDES.values(), ids=SIDES)
@pytest.mark.parametrize("name", SETTINGS)
def test_random_rollouts(name: str, given: Sides, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one chunk and in several, of which some end within a sequence if its tokens have ratios of their own."""
    needs_kernels(device)
    if SETTINGS[name].get("beta") and not given.ref:
        given = given._replace(ref=True)
    loss, drawn = LigerFusedLinearGRPOLoss(**SETTINGS[name]), case(given).to(device)
    items = None
    if name == "dapo":
        items = torch.tensor(40.0, device=device) if given.old else 40
    expected = by_autograd(loss, drawn, items)
    check(by_kernel(loss, drawn, items), expected)
    check(by_kernel(loss, drawn, items, n_chunks=4), expected)
    check(by_kernel(loss, drawn, items), by_oracle(SETTINGS[name], drawn, monkeypatch, items))


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_long_sequences(name: str, device: str) -> None:
    """Longer than the kernel's block."""
    needs_kernels(device)
    loss, drawn = LigerFusedLinearGRPOLoss(**SETTINGS[name]), case(Sides(), length=1100).to(device)
    check(by_kernel(loss, drawn, n_chunks=3), by_autograd(loss, drawn))


def test_many_sequences(device: str) -> None:
    """More than the kernel of a batch takes at a time."""
    needs_kernels(device)
    loss, drawn = LigerFusedLinearGRPOLoss(), case(Sides(), length=3)
    repeated = [None if x is None else x.repeat(100, *[1] * (x.ndim - 1)) for x in drawn.sides]
    target, logps, entropy = (x.repeat(100, 1) for x in drawn[:3])
    drawn = Case(target, logps, entropy, RolloutSides(*repeated)).to(device)  # type: ignore[arg-type]
    check(by_kernel(loss, drawn, n_chunks=2), by_autograd(loss, drawn))


def test_no_tokens(device: str) -> None:
    needs_kernels(device)
    for name in ("grpo", "gspo"):
        loss, drawn = LigerFusedLinearGRPOLoss(**SETTINGS[name]), case(Sides()).to(device)
        drawn = drawn._replace(target=torch.full_like(drawn.target, -100))
        found = by_kernel(loss, drawn)
        assert found.loss == 0 and not found.gradient.numel()
        for ours, theirs in zip(found.metrics, by_autograd_of_none(loss, drawn), strict=True):
            assert ours is not None and theirs is not None
            torch.testing.assert_close(ours.double(), theirs, equal_nan=True)


def by_autograd_of_none(loss: LigerFusedLinearGRPOLoss, given: Case) -> PolicyMetrics:
    """Return metrics; the loss has no gradient."""
    batch_sides = RolloutSides(*(None if x is None else x.double() for x in given.sides))
    rows = rows_of(loss, given)
    assert batch_sides.ref_logps is not None
    batch_sides = batch_sides._replace(ref_logps=rows.arrange(batch_sides.ref_logps))
    batch = loss._batch(_BatchArguments(batch_sides, rows, given.target.shape, torch.float64, 1.0))
    zeros = torch.zeros(rows.dense_shape, dtype=torch.float64, device=given.target.device)
    stats = TokenStats(logps=zeros, entropy=zeros)
    return loss._metrics(batch, batch.rollouts(stats, slice(None)), given.target.shape)


FAR = (79.0, 81.0, 750.0, -1e4, math.inf, math.nan)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token", "trajectory"])
@pytest.mark.parametrize("name", ["old_logps", "ref_logps"])
def test_far_ends(name: str, level: str, device: str) -> None:
    """Log-ratios whose exponentials overflow, log-probabilities of -inf, and NaN."""
    needs_kernels(device)
    for far in FAR:
        for sign in (1.0, -1.0):
            loss, drawn = LigerFusedLinearGRPOLoss(beta=0.1, importance_level=level), case(Sides())
            side = getattr(drawn.sides, name)
            side[2, 3] = -math.inf if far == math.inf else drawn.logps[2, 3] + (-far if name == "old_logps" else far)
            drawn.sides.advantages[2] = sign
            found, expected = by_kernel(loss, drawn.to(device)), by_autograd(loss, drawn.to(device))
            # The products of a ratio near e^80 are far above float32's other rounding.
            close = partial(torch.testing.assert_close, equal_nan=True)
            close(found.loss, expected.loss, rtol=1e-9, atol=1e-12)
            close(found.gradient.double(), expected.gradient.float().double(), rtol=1e-6, atol=1e-12)
            for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
                close(ours, theirs.float(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token", "trajectory"])
def test_nan_on_policy(level: str, device: str) -> None:
    """Without old log-probabilities the ratio is 1, but a loss that hides NaN would let a trainer go on."""
    needs_kernels(device)
    loss, drawn = LigerFusedLinearGRPOLoss(importance_level=level), case(Sides(old=False, ref=False))
    drawn.logps[2, 3] = math.nan
    found = by_kernel(loss, drawn.to(device))
    assert found.loss.isnan() and by_autograd(loss, drawn.to(device)).loss.isnan()
    drawn.logps[2, 3] = -1.0
    assert by_kernel(loss, drawn.to(device)).loss.isfinite()


@pytest.mark.parametrize("far", [89.0, 1e4, -1e4, math.inf])
@pytest.mark.parametrize("level", ["token", "sequence", "trajectory"])
@pytest.mark.parametrize("how", ["advantages", "importance_weights"])
def test_tokens_that_do_not_count_have_no_gradient(how: str, level: str, far: float, device: str) -> None:
    needs_kernels(device)
    loss, drawn = LigerFusedLinearGRPOLoss(importance_level=level), case(Sides(ref=False, weights="sequences"))
    assert drawn.sides.old_logps is not None
    drawn.sides.old_logps[2, 3] = -math.inf if far == math.inf else drawn.logps[2, 3] - far
    getattr(drawn.sides, how)[2] = 0.0
    found = by_kernel(loss, drawn.to(device))
    of_sequence = torch.nonzero(drawn.target >= 0)[:, 0] == 2
    assert (found.gradient.cpu()[of_sequence] == 0).all()
    assert found.loss.isfinite() and (found.gradient != 0).any()


def test_losses_of_no_kernel() -> None:
    """A formula of a class's own, and options that the kernel does not know, are differentiated by autograd."""

    class Own(LigerFusedLinearGRPOLoss):
        def policy_loss(self, rollouts: Rollouts) -> Tensor:
            return rollouts.logps

    class OwnKL(LigerFusedLinearGRPOLoss):
        def kl(self, rollouts: Rollouts) -> Tensor:
            return rollouts.logps

    class Named(LigerFusedLinearGRPOLoss):
        pass

    class Base(LigerFusedLinearPolicyBase):
        def policy_loss(self, rollouts: Rollouts) -> Tensor:
            return rollouts.logps

    class PatchedLater(LigerFusedLinearGRPOLoss):
        pass

    assert PatchedLater()._term_of_step() is not None
    PatchedLater.policy_loss = Own.policy_loss  # type: ignore[method-assign]

    patched, stock = LigerFusedLinearGRPOLoss(), LigerFusedLinearGRPOLoss()
    elsewhere = altered(stock, clipped=partial(SURROGATES["clip"].clipped, s=SurrogateSettings(epsilon_low=0.1)))
    length = torch.nn.Parameter(torch.tensor(9.0))
    of_length = altered(LigerFusedLinearGRPOLoss(**SETTINGS["dr_grpo"]), max_completion_length=length)
    patched.policy_loss = lambda rollouts: rollouts.logps  # type: ignore[method-assign]
    counted = altered(stock, clipped=lambda rollouts: Clipped(None, rollouts.mask))
    trained = with_attributes(LigerFusedLinearGRPOLoss, beta=torch.nn.Parameter(torch.tensor(0.1)))()
    given: list[dict[str, Any]] = [
        {"surrogate": "sapo"},
        {"surrogate": "gmpo"},
        {"entropy_coef": 0.1},
        {"top_entropy_quantile": 0.5},
        {"top_p": 0.9},
        {"off_policy_mask_threshold": 0.1},
        {"sampler_kl_coef": 0.1},
        {"beta": 0.1, "kl_estimator": "low_var_kl"},
    ]
    options = [LigerFusedLinearGRPOLoss(**settings) for settings in given]
    of_classes = (Own(), OwnKL(), Base(), PatchedLater())
    for loss in (*of_classes, patched, counted, trained, elsewhere, of_length, *options):
        assert loss._term_of_step() is None
    plain = LigerFusedLinearGRPOLoss()
    for same in (Named(), copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert same._term_of_step() == plain._term_of_step() is not None


@pytest.mark.parametrize("name", ["policy_loss", "kl"])
def test_a_class_with_another_formula_takes_no_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a test or a trainer replaces a method of the class itself."""
    loss = LigerFusedLinearGRPOLoss()
    assert loss._term_of_step() is not None
    owner = LigerFusedLinearPolicyBase if name == "kl" else LigerFusedLinearGRPOLoss
    monkeypatch.setattr(owner, name, lambda self, rollouts: rollouts.logps)
    assert loss._term_of_step() is None
    monkeypatch.undo()
    assert loss._term_of_step() is not None


# Whole steps


STEPS: dict[str, dict[str, Any]] = {
    "grpo": {"beta": 0.1},
    "chunks": {"beta": 0.1, "logits_budget": 4 * 7 * SMALL.vocab},
    "gspo-chunks": {**SETTINGS["gspo"], "logits_budget": 4 * 12 * SMALL.vocab},
    "dapo": {"reduction": "dapo"},
}


def grpo(batch: Batch, **settings: Any) -> Tensor:
    return LigerFusedLinearGRPOLoss(**settings)(**batch)[0]


@pytest.mark.parametrize("ref", ["tokens", "states"])
@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str, ref: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with the kernel are as close to the oracle as steps without it, in one chunk and in several."""
    needs_kernels(device)
    settings, batch = STEPS[name], moved(rollouts(SMALL, seed=5, ref=ref, weights="tokens"), torch.float32, device)
    exact = evaluate(
        lambda b: eager.grpo(**b, **{k: x for k, x in settings.items() if k != "logits_budget"})[0],
        moved(batch, torch.float64),
    )
    first_tokens = set()

    def watched(*given: Any, **options: Any) -> Any:
        first_tokens.add(options["tokens"].start)
        return policy_loss(*given, **options)

    monkeypatch.setattr(policies, "policy_loss", watched)
    found = evaluate(partial(grpo, **settings), batch)
    assert len(first_tokens) > 1 if "logits_budget" in settings else first_tokens == {0}
    first_tokens.clear()
    monkeypatch.setattr(objective, "use_triton", lambda x: False)
    without = evaluate(partial(grpo, **settings), batch)
    assert not first_tokens
    for key, value in exact.items():
        error, other = (relative_error(x[key].double(), value) for x in (found, without))
        assert error < max(2 * other, 2e-6), (key, error, other)


def test_options_of_a_step_take_no_kernel(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_kernels(device)
    monkeypatch.setattr(PolicyKernel, "evaluate", None)  # a call would raise
    batch = moved(rollouts(SMALL, seed=5), torch.float32, device)
    assert grpo(batch, entropy_coef=0.1).isfinite()
    with pytest.raises(TypeError, match="not callable"):
        grpo(batch)


@pytest.mark.parametrize("known", [True, False], ids=["n_valid", "counted"])
def test_a_step_takes_few_launches(known: bool, device: str) -> None:
    """Forward and backward, on one chunk without ignored tokens."""
    needs_kernels(device)
    n, length, generator = 4, 8, torch.Generator().manual_seed(0)
    weight = torch.randn(64, 16, generator=generator).to(device).requires_grad_()
    input = torch.randn(n, length, 16, generator=generator).to(device).requires_grad_()
    target = torch.randint(64, (n, length), generator=generator).to(device)
    sides = {"old_logps": -torch.rand(n, length, generator=generator).to(device)}
    loss, advantages = LigerFusedLinearGRPOLoss(), torch.randn(n, generator=generator).to(device)
    counts = {"n_valid": [length] * n} if known else {}

    def step() -> None:
        loss(weight, input, target, advantages, **sides, **counts)[0].backward()

    assert count_calls(step).launches <= 16


class Call(NamedTuple):
    """What a step with ignored tokens passes beside weight, input, target, advantages and `old_logps`."""

    settings: dict[str, Any] | None = None
    ref: bool = False
    by_mask: bool = False
    known: bool = False


CALLS = {
    "grpo": Call(),
    "grpo-n_valid": Call(known=True),
    "grpo-reference-mask-n_valid": Call(SETTINGS["grpo"], ref=True, by_mask=True, known=True),
    "gspo-reference": Call(SETTINGS["gspo"], ref=True),
    "trajectory-mask": Call({"importance_level": "trajectory"}, by_mask=True),
    "cispo-reference-n_valid": Call(SETTINGS["cispo"], ref=True, known=True),
    "reinforce": Call(SETTINGS["reinforce"]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_ignored_tokens_take_few_launches(call: Call, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, on one chunk."""
    needs_kernels(device)
    if device == "cpu" and call.known:  # on a GPU the host does not read, and the kernel asserts what it compares
        monkeypatch.setattr("liger_chunked.engine.known.on_host", lambda x: False)
        monkeypatch.setattr("liger_chunked.kernels.scale.on_host", lambda x: False)
        monkeypatch.setattr(sys.modules["liger_chunked.kernels.survey"], "is_on_gpu", lambda x: True)
    n, length, generator = 4, 8, torch.Generator().manual_seed(0)
    weight = torch.randn(64, 16, generator=generator).to(device).requires_grad_()
    input = torch.randn(n, length, 16, generator=generator).to(device).requires_grad_()
    mask = torch.rand(n, length, generator=generator) < 0.7
    target = torch.randint(64, (n, length), generator=generator)
    given: dict[str, Any] = {"advantages": torch.randn(n, generator=generator).to(device)}
    for name in ("old_logps", *(("ref_logps",) if call.ref else ())):
        given[name] = -torch.rand(n, length, generator=generator).to(device)
    if call.by_mask:
        given["attention_mask"] = mask.long().to(device)
    else:
        target = target.masked_fill(~mask, -100)
    if call.known:
        given["n_valid"] = mask.sum(1).tolist()
    loss, target = LigerFusedLinearGRPOLoss(**(call.settings or {})), target.to(device)

    def step() -> None:
        weight.grad = input.grad = None  # to add to an earlier gradient is a launch of autograd
        loss(weight, input, target, **given)[0].backward()

    assert count_calls(step).launches <= 16
