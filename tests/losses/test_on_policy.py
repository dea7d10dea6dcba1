"""On-policy distillation: what its estimates estimate, metrics, refusals. The table has the values and gradients."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from table import SMALL, relative_error, rollouts, students
from torch import Tensor

import liger_chunked as lc
from liger_chunked import with_sampled_token
from liger_chunked.calls import altered

BOUND = 1e-9  # float64: a few thousand additions round to less


def sample(seed: int = 0) -> dict[str, Tensor]:
    return students(SMALL, seed, padding=4)


def test_a_teacher_in_either_form() -> None:
    given = sample()
    options: dict[str, Any] = {"softcap": 3.0, "logit_scale": 0.7, "temperature": 1.3}
    own = lc.LogitOptions(**options)
    from_states = lc.LigerFusedLinearOnPolicyDistillationLoss(temperature=1.3, teacher_options=own)(**given)
    teacher = {name: given.pop(f"teacher_{name}") for name in ("weight", "input", "bias")}
    v = SMALL.vocab
    teacher = {"weight": teacher["weight"][:v], "input": teacher["input"], "bias": teacher["bias"][:v]}
    logps = lc.linear_token_stats(**teacher, target=given["target"], **options).logps
    assert logps is not None
    for loss in (lc.LigerFusedLinearOnPolicyDistillationLoss(temperature=1.3, logits_budget=8 * v * 5),):
        found = loss(**given, teacher_logps=logps)
        for x, e in zip(found, from_states, strict=True):
            if isinstance(e, Tensor):
                assert relative_error(x, e) < BOUND


def sampled() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    shapes = {"weight": (19, 8), "input": (2, 6, 8), "teacher_weight": (21, 5), "teacher_input": (2, 6, 5)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


@pytest.mark.parametrize("surrogate", ["clip", "truncate", "log_prob"])
def test_the_samplers_distribution(surrogate: str) -> None:
    """In float64, by the formulas: the student's softmax is of the ids that the sampler keeps, the teacher's of all."""
    given = sampled()
    weight, input = given["weight"].requires_grad_(), given["input"].requires_grad_()
    z = input @ weight.T
    keep = lc.KeptIds.from_top_p(z, 0.7, temperature=0.9)
    z = z / 0.9
    mask = torch.zeros(12, 19, dtype=torch.bool)
    mask[torch.repeat_interleave(torch.arange(12), keep.offsets.diff()), keep.ids] = True
    log_p = z.masked_fill(~mask.view(z.shape), -torch.inf).log_softmax(-1)
    log_q = (given["teacher_input"] @ given["teacher_weight"][:19].T / 0.9).log_softmax(-1)
    target = log_p.detach().argmax(-1)
    target[1, 4:] = -100
    y = target.clamp(min=0)[..., None]
    logps, teacher = log_p.gather(-1, y)[..., 0], log_q.gather(-1, y)[..., 0]
    acts = target >= 0
    logps = torch.where(acts, logps, 0.0)
    old = logps.detach() + 0.3 * torch.randn(2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    settings: dict[str, Any] = {
        "clip": {"epsilon_low": 0.2, "epsilon_high": 0.2},
        "truncate": {"student": "current", "ratio_max": 1.1},
        "log_prob": {"prefix_weight": 0.5},
    }[surrogate]
    distance = torch.where(acts, teacher - (logps.detach() if surrogate == "truncate" else old), 0.0)
    ratio = (logps - old).exp()
    if surrogate == "clip":
        cost = -torch.minimum(ratio * distance, ratio.clamp(0.8, 1.2) * distance)
    elif surrogate == "truncate":
        cost = -ratio.detach().clamp(max=1.1) * distance * logps
    else:
        before = distance.abs().cumsum(-1) - distance.abs()
        share = before / distance.abs().sum(-1, keepdim=True)
        cost = -(1 + 0.5 * (1 - share)) * distance * logps
    expected = torch.where(acts, cost, 0.0).sum() / 10
    exact = torch.autograd.grad(expected, (weight, input))
    loss = lc.LigerFusedLinearOnPolicyDistillationLoss(surrogate=surrogate, temperature=0.9, **settings)
    found, metrics = loss(
        weight, input, given["teacher_weight"], given["teacher_input"], target, old_logps=old, kept=keep
    )
    assert relative_error(found.detach(), expected.detach()) < BOUND
    for a, b in zip(torch.autograd.grad(found, (weight, input)), exact, strict=True):
        assert relative_error(a, b) < BOUND
    kl = torch.where(acts, logps - teacher, 0.0).sum() / 10
    assert relative_error(metrics.kl, kl.detach()) < BOUND


def test_metrics() -> None:
    given = rollouts(SMALL, 0, ref="tokens")
    given["teacher_logps"] = given.pop("ref_logps")
    counts = given["target"] != -100
    tensors = {name: given[name] for name in ("weight", "input", "target", "bias")}
    logps = lc.linear_token_stats(**tensors).logps
    assert logps is not None
    bounded = lc.LigerFusedLinearOnPolicyDistillationLoss(epsilon_low=0.1, epsilon_high=0.2, kl_coef=0.5)
    _, metrics = bounded(**given)
    a = given["advantages"][:, None] + 0.5 * (given["teacher_logps"] - given["old_logps"])
    ratio = (logps - given["old_logps"]).exp()
    low, high = ((ratio < 0.9) & (a < 0))[counts].double().mean(), ((ratio > 1.2) & (a > 0))[counts].double().mean()
    assert low > 0 and high > 0  # or the next lines would compare zeros
    assert metrics.clip_ratio_low == pytest.approx(low) and metrics.clip_ratio_high == pytest.approx(high)
    assert metrics.kl == pytest.approx((logps - given["teacher_logps"])[counts].mean())
    _, metrics = lc.LigerFusedLinearOnPolicyDistillationLoss()(**given)
    assert metrics.clip_ratio is None


def test_copies() -> None:
    """A copy with other options, as `HeadInput.loss` makes, uses them, and leaves the original alone."""
    given = sample()
    loss = lc.LigerFusedLinearOnPolicyDistillationLoss(epsilon_low=0.2)
    before = loss(**given)[0]
    other = altered(loss, options=replace(loss.options, softcap=3.0))
    exact = lc.LigerFusedLinearOnPolicyDistillationLoss(softcap=3.0, teacher_options=lc.LogitOptions())(**given)[0]
    assert torch.equal(other(**given)[0], exact) and not torch.equal(exact, before)
    for same in (loss, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(same(**given)[0], before)


def test_prefix_weights_without_a_distance() -> None:
    """A teacher whose log-probabilities are the student's, and an empty completion: no prefix has a share."""
    given = sample()
    leaves = {name: given[name].requires_grad_() for name in ("weight", "input")}
    target, logps = given["target"].clone(), torch.full(given["target"].shape, -2.0, dtype=torch.float64)
    target[0] = -100
    loss = lc.LigerFusedLinearOnPolicyDistillationLoss(surrogate="log_prob", student="old", prefix_weight=0.5)
    found, _ = loss(**leaves, target=target, teacher_logps=logps, old_logps=logps)
    gradients = torch.autograd.grad(found, [*leaves.values()])
    assert found.detach() == 0 and not any(g.any() for g in gradients)


def test_refusals() -> None:
    given = sample()
    target, logps = given["target"], torch.zeros(given["target"].shape)
    none = {"teacher_weight": None, "teacher_input": None, "teacher_bias": None}
    make = lc.LigerFusedLinearOnPolicyDistillationLoss
    refused: list[tuple[dict[str, Any], str]] = [
        ({"target": None}, "target must be the sampled tokens, got None"),
        (none, "needs a teacher: pass teacher_weight and teacher_input, or teacher_logps, got none"),
        ({"teacher_logps": logps}, "given twice: as teacher_logps and as teacher_weight, teacher_input, teacher_bias"),
        (none | {"teacher_logps": logps[0]}, r"teacher_logps must be \(6, 7\), one value a token, got \(7,\)"),
    ]
    for changes, message in refused:
        with pytest.raises(ValueError, match=message):
            make()(**given | changes)
    with pytest.raises(ValueError, match="teacher_options are for teacher_input, got teacher_logps"):
        make(teacher_options=lc.LogitOptions())(**given | none | {"teacher_logps": logps, "target": target})


# Top-k and sampled token


class WithoutTail(lc.LigerFusedLinearKLDivLoss):
    """Distributions over the support alone, as TRL's `loss_add_tail=False`."""

    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        return super().divergence(student_logits[:, :-1], teacher_logits[:, :-1])


def over_the_support(
    z: Tensor, log_q: Tensor, ids: Tensor, target: Tensor, tail: bool, reverse: bool = True
) -> tuple[Tensor, int]:
    """The mean divergence over sets of ids and all others, token by token; and how many sampled tokens were added."""
    losses, added = [], 0
    for row, q, top, y in zip(z, log_q, ids.tolist(), target.tolist(), strict=True):
        if y == -100:
            continue
        support = sorted({*top, y})
        added += y not in top
        p, q = row.softmax(-1)[support], q.exp()[support]
        if tail:
            p, q = (torch.cat([x, 1 - x.sum()[None]]) for x in (p, q))
        p, q = p / p.sum(), q / q.sum()
        losses.append((p * (p / q).log()).sum() if reverse else (q * (q / p).log()).sum())
    return torch.stack(losses).mean(), added


@pytest.mark.few(2)
@pytest.mark.parametrize("tail", [True, False], ids=["tail", "without-tail"])
@pytest.mark.parametrize("whose", ["teacher", "student"])
@pytest.mark.parametrize("reverse", [True, False], ids=["reverse", "forward"])
def test_top_k_and_sampled_token(whose: str, tail: bool, reverse: bool) -> None:
    """The teacher's log-probabilities come from one pass without logits, for the ids of either model."""
    given = students(SMALL, 0)
    v, target, options = SMALL.vocab, given["target"], {"temperature": 1.3}
    teacher = {name: given.pop(f"teacher_{name}") for name in ("weight", "input", "bias")}
    log_q = ((teacher["input"] @ teacher["weight"].T + teacher["bias"]) / 1.3).log_softmax(-1)
    weight = given["weight"].requires_grad_()
    z = (given["input"] @ weight.T + given["bias"]) / 1.3
    ids = (log_q if whose == "teacher" else z.detach()).topk(5, -1).indices

    stats = lc.linear_token_stats(**teacher, target=target, candidates=ids, **options)
    assert stats.logps is not None and stats.candidate_logps is not None
    logps, support = with_sampled_token(stats.candidate_logps, ids, target, stats.logps)
    assert logps.shape == support.shape == (*target.shape, 6)
    loss_fn = (lc.LigerFusedLinearKLDivLoss if tail else WithoutTail)(
        reverse=reverse, weight_hard_loss=0.0, weight_soft_loss=1.0, logits_budget=8 * v * 5, **options
    )
    loss, _ = loss_fn(**given, teacher_logps=logps, teacher_ids=support)
    flat = [x.flatten(0, 1) for x in (z, log_q, ids)]
    exact, added = over_the_support(*flat, target.flatten(), tail, reverse)
    assert 0 < added < int((target != -100).sum())  # both cases occur
    assert relative_error(loss.detach(), exact.detach()) < BOUND
    found, expected = (torch.autograd.grad(x, weight)[0] for x in (loss, exact))
    assert relative_error(found, expected) < BOUND
