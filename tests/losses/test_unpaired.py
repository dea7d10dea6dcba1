"""Unpaired preferences: labels of one kind, the reference point, metrics."""

from __future__ import annotations

from functools import partial

import eager
import pytest
import torch
from table import SMALL, Batch, assert_same, evaluate, examples
from torch import Tensor

from liger_chunked import LigerFusedLinearKTOLoss

EXACT = 1e-12


def kto(batch: Batch, **settings) -> Tensor:
    given = {"kl": settings.pop("kl")} if "kl" in settings else {}
    return LigerFusedLinearKTOLoss(**settings)(**batch, **given)[0]


def kto_exact(batch: Batch, **settings) -> Tensor:
    return eager.kto(**batch, **settings)


# The batch


@pytest.mark.parametrize("labels", ["desirable", "undesirable"])
def test_metrics_of_the_missing_side_are_zero(labels):
    _, metrics = LigerFusedLinearKTOLoss()(**examples(SMALL, seed=1, labels=labels), kl=0.5)
    missing = "rejected" if labels == "desirable" else "chosen"
    for name, value in metrics._asdict().items():
        assert (value == 0) == name.startswith(missing), name


# The reference point


def mean_logratio(batch: Batch) -> Tensor:
    """Return the mean log-ratio of the mismatched completions, from full logits."""
    names = ("weight", "input", "target", "bias")
    policy = eager.token_stats(**{name: batch[f"kl_{name}" if name in names[1:3] else name] for name in names})
    ref = eager.token_stats(batch["ref_weight"], batch["ref_kl_input"], batch["kl_target"], batch["ref_bias"])
    return (policy["logps"] - ref["logps"]).sum(1).mean()


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", [None, 8 * 5 * SMALL.vocab], ids=["one-pack", "tiles"])
def test_estimated_kl_is_as_good_as_given(budget):
    """It has no gradient, and the metrics report it."""
    batch = examples(SMALL, seed=0, mismatched="states")
    given = {name: x for name, x in batch.items() if "kl_" not in name}
    expected = mean_logratio(batch)
    assert expected > 1
    _, metrics = LigerFusedLinearKTOLoss(logits_budget=budget)(**batch)
    torch.testing.assert_close(metrics.reference_point, expected, rtol=EXACT, atol=0)
    estimated = evaluate(partial(kto, logits_budget=budget), batch)
    for kl in (expected.item(), expected, expected[None]):
        assert_same(estimated, evaluate(partial(kto, logits_budget=budget, kl=kl), given))


def test_negative_estimate_counts_as_zero():
    batch = examples(SMALL, seed=0, mismatched="states")
    batch["kl_input"] = 10 * batch["kl_input"] / 0.1
    assert mean_logratio(batch) < -1
    given = {name: x for name, x in batch.items() if "kl_" not in name}
    loss, metrics = LigerFusedLinearKTOLoss()(**batch)
    assert metrics.reference_point == 0
    for kl in (0.0, -2.0, torch.tensor(-2.0)):
        assert torch.equal(loss, kto(given, kl=kl))


def test_mismatched_completions_of_another_number_and_length():
    batch = examples(SMALL, seed=0)
    others = examples(SMALL._replace(sequences=4, length=11), seed=5, mismatched="states")
    batch |= {name: others[name] for name in ("kl_input", "kl_target", "ref_kl_input")}
    assert_same(evaluate(kto, batch), evaluate(kto_exact, batch))


def test_mismatched_completions_without_tokens():
    batch = examples(SMALL, seed=0, mismatched="states")
    batch["kl_target"][2:] = -100
    assert_same(evaluate(kto, batch), evaluate(kto_exact, batch))
    batch["kl_target"].fill_(-100)
    _, metrics = LigerFusedLinearKTOLoss()(**batch)
    assert metrics.reference_point == 0


# Metrics


@pytest.mark.few(2)
@pytest.mark.parametrize("average_log_prob", [False, True])
@pytest.mark.parametrize("budget", [None, 8 * 7 * SMALL.vocab], ids=["one-pack", "several"])
def test_metrics(average_log_prob, budget):
    batch = examples(SMALL, seed=3)
    batch["target"][4] = -100
    _, metrics = LigerFusedLinearKTOLoss(average_log_prob=average_log_prob, beta=0.3, logits_budget=budget)(
        **batch, kl=torch.tensor(0.25)
    )
    policy = {name: batch[name] for name in ("weight", "input", "target", "bias")}
    stats = eager.token_stats(**policy, outputs=("logps", "mean_logits"))
    ref = eager.token_stats(batch["ref_weight"], batch["ref_input"], batch["target"], batch["ref_bias"])["logps"]
    lengths = (batch["target"] != -100).sum(1)
    units = lengths.clamp(min=1) if average_log_prob else 1
    logps, ref_logps = stats["logps"].sum(1) / units, ref.sum(1) / units
    expected = {"reference_point": torch.tensor(0.25, dtype=torch.float64)}
    for side, chosen in (("chosen", batch["preference_labels"]), ("rejected", ~batch["preference_labels"])):
        expected |= {
            f"{side}_logps": logps[chosen].mean(),
            f"{side}_logits_mean": stats["mean_logits"][chosen].sum() / lengths[chosen].sum(),
            f"{side}_rewards": 0.3 * (logps - ref_logps)[chosen].mean(),
            f"{side}_count": chosen.sum(),
            f"{side}_tokens": lengths[chosen].sum(),
        }
    assert expected.keys() == metrics._asdict().keys()
    for name, value in metrics._asdict().items():
        assert value.shape == () and not value.requires_grad
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=0, msg=name)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_labels_of_integers(dtype):
    batch = examples(SMALL, seed=0)
    loss = LigerFusedLinearKTOLoss(loss_type="apo_zero_unpaired")
    plain = evaluate(lambda batch: loss(**batch)[0], batch)
    spelt = {**batch, "preference_labels": batch["preference_labels"].to(dtype)}
    ours = evaluate(lambda batch: loss(**batch)[0], spelt)
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
