"""Log-probabilities of the ids that a sampler would have kept."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from eager.token_stats import filtered
from table import relative_error
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_chunked import LigerFusedLinearGRPOLoss, linear_token_stats

warpers = pytest.importorskip("transformers.generation.logits_process")

V, H, N, TEMPERATURE = 53, 16, 40, 0.7
FILTERS = [
    (5, None, None), (None, 0.9, None), (10, 0.7, None), (1, None, None), (None, 0.01, None), (99, 1.0, None),
    (None, None, 0.1), (None, None, 1.0), (None, 0.9, 0.05), (5, None, 0.02), (12, 0.95, 0.03),
]  # fmt: skip


def batch(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return a head, hidden states, and targets: the likeliest id, at every third token the third likeliest."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64)
    input = 2 * torch.randn(N, H, generator=generator, dtype=torch.float64)
    ranked = (input @ weight.T).sort(-1, descending=True).indices
    target = ranked[:, 0].clone()
    target[::3], target[5] = ranked[::3, 2], -100
    return weight.to(dtype), input.to(dtype), target


def oracle(
    weight: Tensor,
    input: Tensor,
    target: Tensor,
    top_k: int | None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies after transformers' processors, in the inputs' dtype and float32."""
    z = input @ weight.T
    z = warpers.TemperatureLogitsWarper(TEMPERATURE)(None, z if z.dtype == torch.float64 else z.float())
    if top_k is not None:
        z = warpers.TopKLogitsWarper(top_k)(None, z)
    if top_p is not None:
        z = warpers.TopPLogitsWarper(top_p)(None, z)
    if min_p is not None:
        z = warpers.MinPLogitsWarper(min_p)(None, z)
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1)
    valid = target != -100
    logps = log_p.gather(-1, target.where(valid, 0)[:, None])[:, 0]
    return logps.where(valid, 0), entropy.where(valid, 0)


def ours(weight: Tensor, input: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    stats = linear_token_stats(weight, input, target, outputs=("logps", "entropy"), temperature=TEMPERATURE, **options)
    assert stats.logps is not None and stats.entropy is not None
    return stats.logps, stats.entropy


def evaluate(function: Any, weight: Tensor, input: Tensor, target: Tensor, *args: Any, **options: Any) -> list[Tensor]:
    """Return values and gradients, of different upstream gradients for each token."""
    weight, input = weight.clone().requires_grad_(), input.clone().requires_grad_()
    logps, entropy = function(weight, input, target, *args, **options)
    finite = logps.masked_fill(logps == -torch.inf, 0)
    upstream = torch.linspace(-1, 1, N, dtype=logps.dtype)
    (finite * upstream + entropy * upstream.flip(0)).sum().backward()
    assert weight.grad is not None and input.grad is not None
    return [logps.detach(), entropy.detach(), weight.grad, input.grad]


@pytest.mark.triton
@pytest.mark.parametrize("budget", [None, 8 * V * 7], ids=["one-tile", "tiles"])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_equals_the_samplers_processors(
    top_k: int | None, top_p: float | None, min_p: float | None, budget: int | None
) -> None:
    given = batch()
    expected = evaluate(oracle, *given, top_k, top_p, min_p)
    found = evaluate(ours, *given, top_k=top_k, top_p=top_p, min_p=min_p, logits_budget=budget)
    dropped = expected[0] == -torch.inf
    assert bool(dropped.any()) == (top_k not in (5, 99) or min_p is not None)
    assert torch.equal(found[0] == -torch.inf, dropped)
    expected[0], found[0] = expected[0][~dropped], found[0][~dropped]
    for value, exact in zip(found, expected, strict=True):
        assert relative_error(value, exact) < 1e-9  # the order of sums differs


def test_a_dropped_target_has_the_gradient_of_eager_code() -> None:
    """Its own logit gets none; those that were kept get that of their normalisation."""
    weight, input, target = batch()
    values = []
    for function in (oracle, lambda *a: ours(*a[:3], top_k=a[3], top_p=a[4])):
        x = input.clone().requires_grad_()
        logps, _ = function(weight, x, target, 1, None, None)
        assert logps[0] == -torch.inf
        (gradient,) = torch.autograd.grad(logps, x, torch.ones_like(logps))
        values.append(gradient)
    assert relative_error(values[1], values[0]) < 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding(dtype: torch.dtype) -> None:
    """Errors over 20 batches are at most 1.1 times those of eager code."""
    ours_squared, eager_squared = torch.zeros(2, 4)
    for seed in range(20):
        given = batch(dtype, seed)
        exact = evaluate(oracle, *(x.double() if x.is_floating_point() else x for x in given), 10, None)
        eager = evaluate(oracle, *given, 10, None)
        found = evaluate(ours, *given, top_k=10, logits_budget=given[0].itemsize * V * 7)
        for i in range(4):
            ours_squared[i] += relative_error(found[i], exact[i]) ** 2
            eager_squared[i] += relative_error(eager[i].double(), exact[i]) ** 2
    assert (ours_squared.sqrt() <= 1.1 * eager_squared.sqrt()).all()


def test_recomputed_in_a_checkpoint() -> None:
    given = batch()
    plain = evaluate(ours, *given, top_k=5, top_p=0.9)
    again = evaluate(
        lambda w, x, t: checkpoint(lambda w, x: ours(w, x, t, top_k=5, top_p=0.9), w, x, use_reentrant=False), *given
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_equal_logits_stay() -> None:
    weight = torch.tensor([[3.0], [1.0], [1.0], [0.0]])
    stats = linear_token_stats(weight, torch.ones(1, 1), torch.tensor([2]), outputs=("lse", "logps"), top_k=2)
    assert stats.lse is not None and stats.lse.item() == pytest.approx(
        torch.tensor([3.0, 1.0, 1.0]).logsumexp(0).item()
    )
    stats = linear_token_stats(weight, torch.ones(1, 1), torch.tensor([2]), outputs=("lse", "logps"), top_p=0.9)
    assert stats.lse is not None and stats.lse.item() == pytest.approx(
        torch.tensor([3.0, 1.0, 1.0]).logsumexp(0).item()
    )


TIES = torch.tensor([3.0, 1.0, 1.0, 0.0, 1.0, -1.0, 0.0])  # exact in every dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [
    {"top_k": 2}, {"top_k": 2, "top_p": 0.8}, {"top_k": 2, "top_p": 0.9}, {"top_k": 5, "top_p": 0.95},
    {"top_p": 0.8}, {"top_p": 0.97}, {"min_p": 0.13}, {"min_p": 0.14}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1},
])  # fmt: skip
def test_equal_logits_stay_or_go_together(options: dict[str, Any], dtype: torch.dtype) -> None:
    """As in transformers for `top_k`, whose ties count in the sum of `top_p`; a sampler may keep some of `top_p`'s."""
    every = torch.arange(TIES.numel())[None]
    stats = linear_token_stats(
        TIES[:, None].to(dtype), torch.ones(1, 1, dtype=dtype), torch.tensor([0]), candidates=every, **options
    )
    assert stats.candidate_logps is not None
    expected = filtered(TIES.double()[None], **options).log_softmax(-1)
    assert torch.equal(stats.candidate_logps == -torch.inf, expected == -torch.inf)
    # Probabilities of float32 sums: a few roundings of 6e-8.
    assert torch.allclose(stats.candidate_logps.exp().double(), expected.exp(), atol=1e-6)


def test_min_p_depends_on_the_temperature_of_each_token() -> None:
    weight, input, target = batch()
    temperature = torch.linspace(0.3, 2.0, N)
    stats = linear_token_stats(weight, input, target, outputs=("entropy",), temperature=temperature, min_p=0.1)
    z = (input @ weight.T) / temperature[:, None].double()
    log_p = warpers.MinPLogitsWarper(0.1)(None, z).log_softmax(-1)
    expected = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1)
    valid = target != -100
    assert stats.entropy is not None
    assert relative_error(stats.entropy[valid], expected[valid]) < 1e-12
    kept = (log_p > -torch.inf).sum(-1)
    assert kept[:5].sum() < kept[-5:].sum()


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.8}, {"min_p": 0.3, "top_k": 9}])
def test_batch_invariant(options: dict[str, Any]) -> None:
    """With a filter too, a token's bits do not depend on the batch."""
    weight, input, target = batch(torch.float32)

    def values(rows: Tensor) -> Tensor:
        stats = linear_token_stats(weight, input[rows], target[rows], deterministic="batch", **options)
        assert stats.logps is not None
        return stats.logps

    every = values(torch.arange(N))
    assert (every == -torch.inf).any()
    for part in (torch.tensor([7]), torch.arange(3, 21), torch.arange(N - 1, -1, -1)):
        assert torch.equal(values(part), every[part])
    exact = oracle(weight.double(), input.double() / 1, target, **{"top_k": None} | options)[0]
    plain = linear_token_stats(
        weight.double(), input.double(), target, temperature=TEMPERATURE, deterministic="batch", **options
    ).logps
    kept = exact > -torch.inf
    assert plain is not None and relative_error(plain[kept], exact[kept]) < 1e-9


def test_a_policy_counts_a_dropped_token_and_does_not_read_it() -> None:
    """A token that the filter drops now costs 0, has a ratio of 1, and stays in the denominator."""
    weight, input, target = batch()
    target = target.where(target != -100, 0)
    logps = linear_token_stats(weight, input, target, top_k=1).logps
    assert logps is not None
    dropped = logps == -torch.inf
    assert 0 < dropped.sum() < N
    loss = LigerFusedLinearGRPOLoss(top_k=1, reduction="dapo")
    old = torch.zeros(1, N, dtype=torch.float64).masked_fill(dropped, -torch.inf)
    advantages = torch.linspace(-1, 2, N, dtype=torch.float64)[None]
    for old_logps in (None, old, torch.full_like(old, -0.1)):
        x = input.clone().requires_grad_()
        value, metrics = loss(weight, x[None], target[None], advantages, old_logps=old_logps)
        ratio = 1.0 if old_logps is None or old_logps is old else math.exp(0.1)
        assert value.item() == pytest.approx(-ratio * advantages[0][~dropped].sum().item() / N, abs=1e-12)
        value.backward()
        assert x.grad is not None and x.grad.isfinite().all() and not x.grad[dropped].any()
        assert metrics.clip_ratio == 0 and metrics.entropy.isfinite()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k must be 1 or more, or None, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], or None, got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\]"),
        ({"top_k": 3, "softcap": 30.0}, "a filter needs no softcap and a positive logit_scale, got top_k=3"),
        ({"top_p": 0.5, "logit_scale": -1.0}, "positive logit_scale, got top_p=0.5"),
        ({"top_k": 3, "outputs": ("logps", "mean_logits")}, r"outputs \['mean_logits'\] are infinite"),
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\], or None, got 1.5"),
        ({"min_p": 0.1, "softcap": 30.0}, "a filter needs no softcap and a positive logit_scale, got min_p=0.1"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_token_stats(*batch(), **options)
    with pytest.raises(TypeError, match=r"top_k must be an int or None"):
        linear_token_stats(*batch(), top_k=2.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_of_the_mass(dtype: torch.dtype) -> None:
    """A float32 sum of many probabilities reaches 1 before the last."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32000, 16, generator=generator).to(dtype)
    input = torch.randn(4, 16, generator=generator).to(dtype)
    target = (input @ weight.T).argmin(-1)
    plain, kept = (linear_token_stats(weight, input, target, **options) for options in ({}, {"top_p": 1.0}))
    assert plain.logps is not None and kept.logps is not None and torch.equal(plain.logps, kept.logps)
    # As transformers keeps, in float64: the smallest ids that matter.
    z = (input @ weight.T).double()
    expected = warpers.TopPLogitsWarper(0.99999)(None, z) > -torch.inf
    ids = z.argsort(-1)[:, 8000:20000:500]
    stats = linear_token_stats(weight, input, target, top_p=0.99999, candidates=ids)
    assert stats.candidate_logps is not None
    assert torch.equal(stats.candidate_logps > -torch.inf, expected.gather(1, ids))
