"""Policy losses: ratios, empty completions, denominators, metrics, user-defined surrogates."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import eager
import pytest
import torch
from spies import flop_counter
from table import POLICY, SMALL, Batch, Sizes, assert_same, evaluate, moved, n_valid, relative_error, rollouts
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import liger_chunked as lc
from liger_chunked.losses.grpo import LOSS_TYPES
from liger_chunked.losses.policy import KL_ESTIMATORS
from liger_chunked.losses.surrogates import SURROGATES, SurrogateOptions
from liger_chunked.testing import check_loss
from liger_chunked.types import LogitOptionsDict

EXACT = 1e-12
PACKS = 8 * 9 * SMALL.vocab  # a budget of nine tokens in float64

by_row = pytest.mark.parametrize("row", POLICY, ids=repr)
by_level = pytest.mark.parametrize("level", ["token", "sequence", "sequence_token", "trajectory"])
by_surrogate = pytest.mark.parametrize("surrogate", SURROGATES)


def grpo(
    batch: Batch, num_items: float | Tensor | None = None, accumulation_steps: int | None = None, **settings
) -> Tensor:
    loss = lc.LigerFusedLinearGRPOLoss(**settings)
    return loss(**batch, num_items=num_items, accumulation_steps=accumulation_steps)[0]


class Spy(lc.LigerFusedLinearPolicyBase):
    """Keeps the batches that it gets."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.seen: list[lc.Rollouts] = []

    def policy_loss(self, rollouts):
        self.seen.append(rollouts)
        return -rollouts.ratio * rollouts.advantages


# Ratios


@pytest.mark.few(2)
@by_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_ratio_is_exactly_1_on_policy(level, dtype, device):
    batch = moved(rollouts(SMALL, seed=0, old=False), dtype, device)
    spy = Spy(importance_level=level, logits_budget=9 * SMALL.vocab * dtype.itemsize)
    _, metrics = lc.LigerFusedLinearGRPOLoss(importance_level=level)(**batch)
    spy(**batch)
    assert len(spy.seen) > 1
    for rollouts_ in spy.seen:
        assert (rollouts_.ratio == 1).all()
    assert metrics.clip_ratio == 0


@pytest.mark.few(3, "ipo")
@pytest.mark.parametrize("surrogate", [name for name in SURROGATES if name not in ("real", "a2po")])
def test_on_policy_gradient_is_reinforce(surrogate):
    """At a ratio of 1, every surrogate has the gradient of `-A log pi`, summed with the reduction's weights."""
    batch = rollouts(SMALL, seed=1, old=False)
    settings = {"cispo": {"epsilon_high": 5.0}, "clip_cov": {"clip_cov_lb": 90.0, "clip_cov_ub": 99.0}}
    ours = evaluate(partial(grpo, surrogate=surrogate, reduction="bnpo", **settings.get(surrogate, {})), batch)

    def expected(batch: Batch) -> Tensor:
        logps = eager.token_stats(batch["weight"], batch["input"], batch["target"], batch["bias"])["logps"]
        return -(batch["advantages"][:, None] * logps).sum() / n_valid(batch)

    exact = evaluate(expected, batch)
    for name in ("weight", "input", "bias"):
        assert relative_error(ours[name], exact[name]) < EXACT, name


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({}, 3, id="tokens-never-outgrow-the-budget"),
        pytest.param({"importance_level": "sequence"}, 4, id="a-sequence-does"),
        pytest.param({"surrogate": "vespo"}, 4, id="vespo-looks-at-sequences"),
        pytest.param({"surrogate": "gmpo"}, 4, id="gmpo-too"),
        pytest.param({"off_policy_mask_threshold": 0.1}, 4, id="masks-look-at-sequences"),
        pytest.param({"surrogate": "clip_cov"}, 4, id="clip_cov-looks-at-the-batch"),
        pytest.param({"top_entropy_quantile": 0.5}, 4, id="the-batch-does"),
    ],
)
def test_gemms_of_sequences_over_the_budget(settings, expected):
    sizes = Sizes(sequences=2, length=40, hidden=16, vocab=97, ignored=False)
    batch = rollouts(sizes, seed=0)
    leaves = {name: batch[name].requires_grad_() for name in ("weight", "input")}
    with flop_counter() as counter:
        grpo({**batch, **leaves}, logits_budget=8 * 97 * 4, **settings).backward()
    count = counter.get_total_flops() / (2 * n_valid(batch) * sizes.hidden * sizes.vocab)
    exact = evaluate(lambda batch: eager.grpo(**batch, **settings)[0], batch, ("input",))
    live = int((exact["input"] != 0).any(-1).sum()) / n_valid(batch)
    expected = 1 + (expected - 1) * live  # rows without a gradient take no product in the backward
    # The last tile, of 4 of 40 or 80 tokens, is still in memory when backward begins.
    assert expected - 0.11 <= count <= expected + 1e-9


# Ignored tokens


@pytest.mark.few(2, "dapo-num_items-entropy", "vespo")
@by_row
def test_empty_completions_count_in_the_batch_and_add_nothing(row):
    """This holds even if they fill a whole chunk."""
    batch = row.sample(SMALL, seed=7)
    batch["target"][[0, 1, 4]] = -100
    exact = evaluate(row.oracle, batch)
    for budget in (None, PACKS, 8 * SMALL.vocab):
        ours = evaluate(partial(row.ours, logits_budget=budget), batch)
        assert_same(ours, exact)
        assert (ours["input"][[0, 1, 4]] == 0).all()


# Denominators


@pytest.mark.few(3)
@pytest.mark.parametrize(("quantile", "steps"), [(1.0, 1), (0.35, 3)])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_types_are_compositions(loss_type, quantile, steps):
    """The entropy bonus is a mean over acting tokens whatever the loss type, divided by the accumulated steps alone."""
    options = {"entropy_coef": 0.3, "top_entropy_quantile": quantile}
    options |= {"dr_grpo": {"max_completion_length": 9}, "cispo": {"epsilon_high": 1.1}}.get(loss_type, {})
    loss = lc.LigerFusedLinearGRPOLoss.from_loss_type(loss_type, **options)
    composition = {name: getattr(loss, name) for name in LOSS_TYPES[loss_type]}
    assert composition["surrogate"] == SURROGATES[LOSS_TYPES[loss_type]["surrogate"]](
        **({"epsilon_high": 1.1} if loss_type == "cispo" else {})
    )
    items = {"num_items": 50, "accumulation_steps": steps} if loss.reduction == "dapo" else {}
    batch, settings = rollouts(SMALL, seed=31), {**LOSS_TYPES[loss_type], **options, **items}
    exact = evaluate(lambda batch: eager.grpo(**batch, **settings)[0], batch)
    assert_same(evaluate(lambda batch: loss(**batch, **items)[0], batch), exact)


def test_temperature_divides_the_logits_of_a_reference_too():
    batch = rollouts(SMALL, seed=4, ref="states", transform={"temperature": 0.7})
    ours = evaluate(partial(grpo, temperature=0.7, beta=0.1), batch)
    assert_same(ours, evaluate(lambda batch: eager.grpo(**batch, temperature=0.7, beta=0.1)[0], batch))


# Estimates of the KL


@pytest.mark.few(4)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("corrected", [True, False])
def test_kl_estimators(estimator, corrected):
    batch = rollouts(SMALL, seed=27, ref="tokens")
    settings = {"beta": 0.3, "kl_estimator": estimator, "use_bias_correction_kl": corrected}
    ours = evaluate(partial(grpo, **settings), batch)
    assert_same(ours, evaluate(lambda batch: eager.grpo(**batch, **settings)[0], batch))


# Trust regions


@pytest.mark.few(2)
@pytest.mark.parametrize("surrogate", ["dppo_tv", "dppo_kl", "ipo"])
def test_the_edge_of_a_trust_region_is_inside(surrogate):
    """On policy, no token has moved: none is dropped, even from a region of no width."""
    batch = rollouts(SMALL, seed=12)
    del batch["old_logps"]
    settings = {"ipo_threshold": 0.0} if surrogate == "ipo" else {"epsilon_low": 0.0, "epsilon_high": 0.0}
    assert (batch["advantages"] > 0).any() and (batch["advantages"] < 0).any()
    found = evaluate(partial(grpo, surrogate=surrogate, **settings), batch)
    assert (found["input"][batch["target"] != -100] != 0).any(-1).all()


def test_real_takes_whole_groups():
    batch = {name: x[:5] if x.shape[0] == 6 else x for name, x in rollouts(SMALL, seed=12).items()}
    with pytest.raises(ValueError, match="needs whole groups of group_size=2 sequences in a call, got 5"):
        grpo(batch, surrogate="real", group_size=2)


# Metrics


METRICS = {
    "clip": {"epsilon_low": 0.05, "epsilon_high": 0.1},
    "clip-delta": {"epsilon_low": 0.05, "epsilon_high": 0.1, "delta": 1.2},
    "gspo": {"epsilon_low": 0.02, "epsilon_high": 0.02, "importance_level": "sequence"},
    "cispo-lower-bound": {"surrogate": "cispo", "cispo_epsilon_low": 0.9, "epsilon_high": 1.1},
    "gmpo": {"surrogate": "gmpo", "epsilon_low": 0.1, "epsilon_high": 0.2},
    "clip_cov": {"surrogate": "clip_cov", "clip_cov_lb": 0.1},
    "sapo": {"surrogate": "sapo"},
    "dppo_tv": {"surrogate": "dppo_tv", "epsilon_low": 0.01, "epsilon_high": 0.02},
    "ipo": {"surrogate": "ipo", "ipo_threshold": 0.02},
    "fipo": {"surrogate": "fipo", "epsilon_low": 0.05, "epsilon_high": 0.1},
    "vespo": {"surrogate": "vespo"},
    "uncorrected": {"beta": 0.1, "use_bias_correction_kl": False},
}


REFERENCES_AND_METRICS = [
    pytest.param(ref, settings, id=f"{ref}-{name}")
    for ref in (None, "tokens", "states")
    for name, settings in METRICS.items()
    if ref is not None or "beta" not in settings  # the loss refuses a KL term without a reference
]


@pytest.mark.few(5, "cpu-sequences-None-cispo-lower-bound")
@pytest.mark.parametrize(("ref", "settings"), REFERENCES_AND_METRICS)
@pytest.mark.parametrize("advantages", ["sequences", "tokens"])
def test_metrics(settings, ref, advantages, device):
    """Without a KL term the reference affects only the metrics. An empty completion counts in no mean."""
    batch = moved(rollouts(SMALL, seed=13, ref=ref, advantages=advantages), device=device)
    batch["target"][2] = -100
    _, ours = lc.LigerFusedLinearGRPOLoss(**settings, logits_budget=PACKS)(**batch)
    _, exact = eager.grpo(**batch, **settings)
    assert ours._fields == tuple(exact)
    assert (ours.kl is None) == (ref is None)
    for name, value in ours._asdict().items():
        if value is None or exact[name] is None:
            assert value is exact[name], name
        else:
            assert not value.requires_grad
            torch.testing.assert_close(value, exact[name], rtol=1e-10, atol=1e-14, msg=name)


@pytest.mark.parametrize(("level", "most"), [("token", 50), ("sequence", 65)])
def test_metrics_take_few_launches(level, most):
    """Each operator is a launch on a GPU, which takes the host longer than the GPU."""

    class Operators(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.n = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.n += not function.is_view
            return function(*args, **(kwargs or {}))

    class Counted(lc.LigerFusedLinearGRPOLoss):
        def _metrics(self, *args: Any) -> Any:
            with Operators() as operators:
                metrics = super()._metrics(*args)
            found.append(operators.n)
            return metrics

    found: list[int] = []
    Counted(importance_level=level)(**rollouts(SMALL, seed=13, ref="tokens"))
    assert 0 < found[0] <= most


def test_metrics_of_nothing():
    batch = rollouts(SMALL, seed=14, ref="tokens")
    batch["target"].fill_(-100)
    _, metrics = lc.LigerFusedLinearGRPOLoss()(**batch)
    extremes = ("clip_ratio_low_min", "clip_ratio_high_max")  # of the sequences with tokens, of which there is none
    of_none = {"ratio_min": math.inf, "ratio_max": -math.inf}
    for name, value in metrics._asdict().items():
        assert value.isnan() if name in extremes else value == of_none.get(name, 0), name


# Surrogates as objects


@by_surrogate
def test_a_surrogate_as_an_object(surrogate):
    batch = rollouts(SMALL, seed=16, ref="tokens", weights="tokens")
    settings = {"group_size": 2} if surrogate == "real" else {}
    by_name = lc.LigerFusedLinearGRPOLoss(surrogate=surrogate, **settings)
    loss = lc.LigerFusedLinearGRPOLoss(surrogate=SURROGATES[surrogate](**settings))
    expected, metrics = evaluate(lambda batch: by_name(**batch)[0], batch), by_name(**batch)[1]
    for ours in (loss, pickle.loads(pickle.dumps(loss))):
        found = evaluate(lambda batch, ours=ours: ours(**batch)[0], batch)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        for value, other in zip(ours(**batch)[1], metrics, strict=True):
            assert value is other is None or torch.equal(value, other)
        assert repr(ours) == repr(by_name) and ours.surrogate == by_name.surrogate


def test_keywords_are_the_settings_of_the_surrogates():
    """Type checkers read `SurrogateOptions`. Surrogates that share a name share its type and its default."""
    found: dict[str, Any] = {}
    for kind in SURROGATES.values():
        for field in fields(kind):  # type: ignore[arg-type]
            assert found.setdefault(field.name, (field.type, field.default)) == (field.type, field.default), field.name
    keywords = {name: x.__forward_arg__ for name, x in SurrogateOptions.__annotations__.items()}
    of_logits = LogitOptionsDict.__annotations__
    assert {k: x for k, x in keywords.items() if k not in of_logits} == {k: kind for k, (kind, _) in found.items()}


@dataclass(frozen=True)
class Own(lc.Surrogate):
    """A user's, with a setting: PPO's clip."""

    epsilon: float = 0.2
    scope = "token"

    def cost(self, rollouts):
        bounded = rollouts.ratio.clamp(1 - self.epsilon, 1 + self.epsilon)
        return -torch.min(rollouts.ratio * rollouts.advantages, bounded * rollouts.advantages)

    def clipped(self, rollouts):
        good, bad = rollouts.advantages > 0, rollouts.advantages < 0
        return lc.Clipped((rollouts.ratio < 1 - self.epsilon) & bad, (rollouts.ratio > 1 + self.epsilon) & good)


@by_level
@pytest.mark.parametrize("budget", [None, PACKS], ids=["auto", "packs"])
def test_a_surrogate_of_a_user(level, budget):
    batch = rollouts(SMALL, seed=15, ref="tokens", weights="tokens")
    settings = {"importance_level": level, "beta": 0.1, "entropy_coef": 0.2}
    loss = lc.LigerFusedLinearGRPOLoss(surrogate=Own(epsilon=0.1), logits_budget=budget, **settings)
    exact = partial(eager.grpo, epsilon_low=0.1, epsilon_high=0.1, **settings)
    assert_same(evaluate(lambda b: loss(**b)[0], batch), evaluate(lambda b: exact(**b)[0], batch))
    ours, expected = loss(**batch)[1], exact(**batch)[1]
    for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio"):
        torch.testing.assert_close(getattr(ours, name), expected[name], rtol=EXACT, atol=0)
    check_loss(loss)


def test_a_surrogate_of_a_user_as_a_function():
    """Losses of functions are cached: another setting, or another object without a comparison, is another loss."""

    class Scaled(lc.Surrogate):
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def cost(self, rollouts):
            return -self.factor * rollouts.ratio * rollouts.advantages

    batch = rollouts(SMALL, seed=15)
    once, twice = (lc.LigerFusedLinearGRPOLoss(**batch, surrogate=Scaled(factor))[0] for factor in (1, 2))
    torch.testing.assert_close(twice, 2 * once, rtol=EXACT, atol=0)
    assert (
        lc.LigerFusedLinearGRPOLoss(**batch, surrogate=Own(0.01))[0]
        != lc.LigerFusedLinearGRPOLoss(**batch, surrogate=Own(0.3))[0]
    )
    assert lc.LigerFusedLinearGRPOLoss(**batch, surrogate=Scaled(1))[1].clip_ratio is None


class OfTheBatch(lc.Surrogate):
    """What the loss must know: the whole batch, weights, a reference, and a gradient by the entropy."""

    scope, weighs, needs_reference, token_outputs = "batch", True, True, ("entropy",)

    def cost(self, rollouts):
        assert rollouts.mask.sum() == rollouts.batch_tokens
        distance = rollouts.ref_logps - rollouts.logps
        return distance * rollouts.importance_weights.sqrt() - 0.1 * rollouts.entropy


@pytest.mark.parametrize("budget", [None, PACKS], ids=["auto", "packs"])
def test_what_a_surrogate_declares(budget):
    batch = rollouts(SMALL, seed=15, ref="tokens", weights="tokens")
    loss = lc.LigerFusedLinearGRPOLoss(surrogate=OfTheBatch(), logits_budget=budget, reduction="bnpo")

    def oracle(batch: Batch) -> Tensor:
        head = {name: batch[name] for name in ("weight", "input", "target", "bias")}
        stats, valid = eager.token_stats(**head, outputs=("logps", "entropy")), batch["target"] != -100
        cost = (batch["ref_logps"] - stats["logps"]) * batch["importance_weights"].sqrt() - 0.1 * stats["entropy"]
        return torch.where(valid, cost, 0.0).sum() / valid.sum()

    batch["importance_weights"] = batch["importance_weights"].detach()
    assert_same(evaluate(lambda b: loss(**b)[0], batch), evaluate(oracle, batch))
    with pytest.raises(ValueError, match="needs a reference: pass ref_input and ref_weight, or ref_logps"):
        loss(**{name: x for name, x in batch.items() if name != "ref_logps"})


# What a loss is shown


@pytest.mark.few(2)
@pytest.mark.parametrize("scope", ["token", "sequence"])
@pytest.mark.parametrize("sides", ["tokens", "sequences"])
def test_what_a_loss_is_shown(scope, sides):
    """Single tokens are rows of length 1 and have the length of their sequence; both scopes get the same values."""
    batch = rollouts(SMALL, seed=17, ref="tokens", advantages=sides, weights=sides)
    spy = Spy(logits_budget=PACKS)
    spy.scope = scope
    spy(**batch)
    valid = batch["target"] != -100
    logps = lc.linear_token_stats(batch["weight"], batch["input"], batch["target"], batch["bias"]).logps
    expected = {
        "logps": logps,
        "old_logps": batch["old_logps"],
        "ref_logps": batch["ref_logps"],
        "log_ratio": logps - batch["old_logps"],
        "advantages": batch["advantages"].view(SMALL.sequences, -1),
        "importance_weights": batch["importance_weights"].view(SMALL.sequences, -1),
        "lengths": valid.sum(1, keepdim=True).double(),
    }
    for name, whole in expected.items():
        shown = [
            getattr(rollouts_, name).detach().expand(rollouts_.mask.shape)[rollouts_.mask] for rollouts_ in spy.seen
        ]
        torch.testing.assert_close(torch.cat(shown), whole.expand(valid.shape)[valid], rtol=EXACT, atol=EXACT, msg=name)
    for rollouts_ in spy.seen:
        assert rollouts_.mask.shape[1] == (1 if scope == "token" else SMALL.length)
        assert (rollouts_.batch_size, rollouts_.batch_tokens) == (SMALL.sequences, n_valid(batch))
