"""Corner cases of preference losses: extreme probabilities, unequal pairs, two targets."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import eager
import pytest
import torch
import torch.nn.functional as F
from table import SMALL, Sizes, assert_same, evaluate, pairs, relative_error
from torch import Tensor

import liger_chunked as lc
from liger_chunked.losses.formulas import complement, log_odds

SEVERAL_CHUNKS = 8 * 9 * SMALL.vocab


def one_pair_of(probability: float, rejected: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """Make a pair of one token each with these probabilities, in a vocabulary of two."""
    logits = torch.tensor([[math.log(p) - math.log1p(-p)] for p in (probability, rejected)], dtype=torch.float64)
    weight = torch.tensor([[1.0], [0.0]], dtype=dtype)
    return {"weight": weight, "input": logits[:, None].to(dtype), "target": torch.zeros(2, 1, dtype=torch.int64)}


# Hard case 12


def test_hard_case_12_dpo_by_settings():
    """One long pair, unequal lengths, smoothing, and three forms of the reference give the same loss."""
    batch = pairs(Sizes(sequences=2, length=400), seed=0)
    settings = {"label_smoothing": 0.1, "beta": 0.3}
    exact = evaluate(lambda batch: eager.dpo(**batch, **settings)[0], batch)
    loss = lc.LigerFusedLinearDPOLoss(**settings, logits_budget=8 * 7 * SMALL.vocab)
    states = {name: batch.pop(name) for name in ("ref_weight", "ref_input", "ref_bias")}
    per_token = eager.token_stats(states["ref_weight"], states["ref_input"], batch["target"], states["ref_bias"])
    forms = {"states": states, "tokens": {"ref_logps": per_token["logps"]}}
    forms["sequences"] = {"ref_logps": per_token["logps"].sum(1)}
    for form in forms.values():
        assert_same(evaluate(lambda batch, form=form: loss(**batch, **form)[0], batch), exact)


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"])
def test_hard_case_12_dpo_with_the_policy_as_reference(divergence):
    """If policy and reference agree, every score is 0. Its derivative by the log-ratio is 1, or 1/2 for JS."""
    batch = pairs(SMALL, seed=0, ref=None)
    same = {f"ref_{name}": batch[name] for name in ("weight", "input", "bias")}
    loss = lc.LigerFusedLinearDPOLoss(f_divergence_type=divergence)
    value, metrics = loss(**batch, **same)
    assert float(value) == pytest.approx(math.log(2))
    assert (metrics.chosen_rewards == 0).all()
    ours = evaluate(lambda batch: loss(**batch, **same)[0], batch)
    plain = evaluate(lambda batch: lc.LigerFusedLinearDPOLoss()(**batch, **same)[0], batch)
    assert relative_error(ours["weight"], (0.5 if divergence == "js_divergence" else 1.0) * plain["weight"]) < 1e-12


def test_reference_sums_in_float64_keep_their_digits():
    """Near 40,000 nats, float32 has steps of 0.004."""
    batch = {name: x.float() if x.is_floating_point() else x for name, x in pairs(SMALL, seed=0).items()}
    batch = {name: batch[name] for name in ("weight", "input", "target")}
    n = batch["target"].shape[0]
    ref_logps = -4e4 + torch.arange(n, dtype=torch.float64) / 1000
    seen = []

    class Watched(lc.LigerFusedLinearPreferenceBase):
        def preference_loss(self, pairs: lc.Pairs) -> Tensor:
            seen.append(pairs.ref_logps)
            return pairs.logratios[:, 0]

    Watched()(**batch, ref_logps=ref_logps)
    assert torch.equal(seen[0], ref_logps.view(2, -1).t())


# Hard case 14


def test_hard_case_14_orpo_nll_over_prompt_and_response():
    batch = pairs(SMALL, seed=0, ref=None)
    target = batch["target"]
    prompt = ((target != -100).cumsum(1) == 0) & (torch.arange(SMALL.length) > 0)
    nll_target = torch.where(prompt, 5, target)
    assert int(prompt[: SMALL.sequences // 2].sum()) > 0
    loss = partial(lc.LigerFusedLinearORPOLoss(logits_budget=SEVERAL_CHUNKS), nll_target=nll_target)
    exact = evaluate(lambda batch: eager.orpo(**batch, nll_target=nll_target), batch)
    assert_same(evaluate(lambda batch: loss(**batch)[0], batch), exact)

    metrics, of_response = loss(**batch)[1], lc.LigerFusedLinearORPOLoss()(**batch)[1]
    chosen = nll_target[: SMALL.sequences // 2]
    logits = eager.logits(batch["weight"], batch["input"], batch["bias"])[: len(chosen)]
    assert torch.isclose(metrics.nll_loss, F.cross_entropy(logits.flatten(0, 1), chosen.flatten()))
    assert metrics.nll_loss != of_response.nll_loss
    # The prompt only affects the NLL.
    for name in ("chosen_logps", "rejected_logps", "chosen_logits_mean", "chosen_rewards"):
        assert torch.allclose(getattr(metrics, name), getattr(of_response, name), rtol=1e-12), name


@pytest.mark.parametrize("loss_type", ["aot", "aot_unpaired"])
def test_a_pair_with_tokens_of_the_nll_alone_is_sorted_nowhere(loss_type):
    batch = pairs(SMALL, seed=0, ref="sequences")
    n = SMALL.sequences // 2
    nll_target = batch["target"].clone()
    of_first = torch.tensor([0, n])
    batch["target"][of_first] = -100
    nll_target[0, :2] = 3
    settings = {"loss_type": loss_type, "beta": 0.3, "logits_budget": SEVERAL_CHUNKS}

    def apart(batch: dict[str, Tensor]) -> Tensor:
        others = [i for i in range(2 * n) if i not in of_first]
        of_sequences = {name: batch[name][others] for name in ("input", "target", "ref_logps")}
        preference = lc.LigerFusedLinearDPOLoss(**settings)(**{**batch, **of_sequences})[0] * (n - 1) / n
        logits = eager.logits(batch["weight"], batch["input"], batch["bias"])[:n]
        return preference + 0.5 * F.cross_entropy(logits.flatten(0, 1), nll_target[:n].flatten())

    loss = lc.LigerFusedLinearDPOLoss(**settings, compute_nll_loss=True, alpha=0.5)
    assert_same(evaluate(lambda batch: loss(**batch, nll_target=nll_target)[0], batch), evaluate(apart, batch))


@pytest.mark.few(2)
@pytest.mark.parametrize("certain", ["chosen", "rejected", "both"])
def test_hard_case_14_orpo_at_certainty(certain):
    """Log-probabilities of exactly 0 have infinite odds, but loss and gradients are finite."""
    batch = one_pair_of(0.5, 0.5, torch.float32)
    batch["input"][0 if certain == "chosen" else 1] = 200.0
    if certain == "both":
        batch["input"][:] = 200.0
    for name, value in evaluate(lambda batch: lc.LigerFusedLinearORPOLoss()(**batch)[0], batch).items():
        assert value.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_log_odds_and_their_gradient_over_all_probabilities(dtype):
    logps = -torch.logspace(-11, 2.5, 200, dtype=torch.float64)
    exact = logps - torch.log(-torch.expm1(logps))
    slope = -1 / torch.expm1(logps)  # d log(p / (1 - p)) / d log p = 1 / (1 - p)
    leaf = logps.to(dtype).requires_grad_()
    value = log_odds(leaf)
    value.sum().backward()
    epsilon = torch.finfo(dtype).eps
    assert torch.allclose(value.double(), exact, rtol=4 * epsilon, atol=4 * epsilon)
    assert torch.allclose(leaf.grad.double(), slope, rtol=8 * epsilon)
    assert complement(torch.zeros(1, dtype=dtype)) > 0


@pytest.mark.few(3)
@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo", "simpo"])
def test_hard_case_14_cpo_sums_and_simpo_averages(loss_type):
    batch = pairs(SMALL, seed=0, ref=None)
    lengths = (batch["target"] != -100).sum(1)
    sums = eager.token_stats(batch["weight"], batch["input"], batch["target"], batch["bias"])["logps"].sum(1)
    expected = sums / lengths if loss_type in ("ipo", "simpo") else sums
    metrics = lc.LigerFusedLinearCPOLoss(loss_type=loss_type, beta=0.2)(**batch)[1]
    assert torch.allclose(torch.cat([metrics.chosen_logps, metrics.rejected_logps]), expected)
    assert torch.allclose(torch.cat([metrics.chosen_rewards, metrics.rejected_rewards]), 0.2 * expected)


# Variants of the cross entropy


@pytest.mark.few(3)
@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 2.0])
def test_focal_loss_at_certainty(gamma):
    """A probability of exactly 1 costs nothing, and its gradient is 0, not NaN."""
    batch = {"weight": torch.eye(3), "input": torch.tensor([[300.0, 0.0, 0.0]]), "target": torch.tensor([0])}
    loss = lc.LigerFusedLinearCrossEntropyLoss(focal_gamma=gamma)
    result = evaluate(lambda batch: loss(**batch), batch)
    assert result["loss"] == 0
    assert (result["weight"] == 0).all()
    assert (result["input"] == 0).all()


# A pair with one empty sequence


def dpo_without_reference(*, use_ref_model: bool, **given: Any) -> Tensor:
    return eager.dpo(**given)[0]


# Whose log-probabilities are sums, and whose are means over tokens.
SIDES = {
    "cpo": (lc.LigerFusedLinearCPOLoss, {}, eager.cpo),
    "cpo-ipo": (lc.LigerFusedLinearCPOLoss, {"loss_type": "ipo"}, eager.cpo),
    "alphapo-mean": (lc.LigerFusedLinearCPOLoss, {"alphapo_alpha": -0.3, "loss_type": "simpo"}, eager.cpo),
    "orpo": (lc.LigerFusedLinearORPOLoss, {}, eager.orpo),
    "simpo": (lc.LigerFusedLinearSimPOLoss, {}, eager.simpo),
    "dpo": (lc.LigerFusedLinearDPOLoss, {"use_ref_model": False}, dpo_without_reference),
    "ipo": (lc.LigerFusedLinearDPOLoss, {"use_ref_model": False, "loss_type": "ipo"}, dpo_without_reference),
}
HALF = SMALL.sequences // 2
EMPTY = {
    "chosen": [0],
    "one-of-each": [0, HALF + 1],
    "all-chosen": range(HALF),
    "all": range(2 * HALF),
}


@pytest.mark.few(3, "orpo-all-responses-fp64")
@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("prompts", [False, True], ids=["responses", "nll-of-prompts"])
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("case", SIDES)
def test_empty_sides_are_certain_in_every_loss(case, empty, prompts, dtype):
    """The probability of nothing is 1: its logarithm is 0 as a sum and as a mean. NaN at ignored tokens is not read.

    `nll_target` may give an empty response's prompt to the NLL.
    """
    kind, settings, exact = SIDES[case]
    loss = kind(**settings, logits_budget=dtype.itemsize * 9 * SMALL.vocab)
    if prompts and not loss.compute_nll_loss:
        pytest.skip("no NLL")
    batch = pairs(SMALL, seed=3, ref=None)
    batch["target"][list(EMPTY[empty])] = -100
    extra = {}
    if prompts:
        extra["nll_target"] = batch["target"].clone()
        extra["nll_target"][0, :2] = extra["nll_target"][0, :2].where(batch["target"][0, :2] != -100, 3)
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
    ignored = (batch["target"] == -100) & (extra.get("nll_target", batch["target"]) == -100)
    clean, batch["input"] = batch["input"], batch["input"].masked_fill(ignored[..., None], math.nan)

    result = evaluate(lambda b: loss(**b, **extra)[0], batch)
    assert all(x.isfinite().all() for x in result.values())
    assert not result["input"][ignored].any()
    metrics = loss(**batch, **extra)[1]
    for name in ("logps", "rewards"):
        of_all = torch.cat([getattr(metrics, f"{side}_{name}") for side in ("chosen", "rejected")])
        assert of_all.isfinite().all() and not of_all[list(EMPTY[empty])].any(), name
    if dtype == torch.float64:

        def connected(b: dict[str, Tensor]) -> Tensor:  # the oracle's loss of no token is a constant
            return exact(**b, **extra, **settings) + 0 * sum(b[name].sum() for name in ("weight", "input", "bias"))

        expected = evaluate(connected, {**batch, "input": clean})
        assert_same(result, expected)


def test_positive_reference_log_probabilities_warn():
    """They are likely losses. At ignored tokens they may be anything, and rounding may exceed 0 a little."""
    torch.manual_seed(0)
    weight, hidden, target = torch.randn(11, 4), torch.randn(4, 3, 4), torch.randint(11, (4, 3))
    target[:, 0] = -100
    logps = lc.linear_token_stats(weight, hidden, target).logps
    loss = lc.LigerFusedLinearDPOLoss()
    for losses in (-logps, -logps.sum(-1)):
        with pytest.warns(UserWarning, match=r"ref_logps is above 0 on average, up to [\d.]+, .* not losses"):
            loss(weight, hidden, target, ref_logps=losses)
    logps[:, 0] = 3.0
    loss(weight, hidden, target, ref_logps=logps.clamp(max=1e-3))
    loss(weight, hidden, target, ref_logps=logps)
