"""Weights against the sampler, and the coefficient of the entropy, as TRL 1.16 computes them."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from table import SMALL
from torch import Tensor

from liger_chunked import (
    adaptive_entropy_coef,
    rollout_importance_weights,
    rollout_metrics,
    rollout_rejection_mask,
)
from liger_chunked.losses.rollout_control import REJECTIONS

BOUNDS = [(None, 1.3), (0.8, 1.3), (0.8, None)]


def samples(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(SMALL.sequences, SMALL.length, generator=generator, dtype=torch.float64)
    sampled = old + 0.2 * torch.randn(old.shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(old.shape, generator=generator) < 0.7
    mask[1] = False
    return old.to(dtype), sampled.to(dtype), mask


def trl(old: Tensor, sampled: Tensor, mask: Tensor, mode: str, low: float | None, high: float | None) -> Tensor:
    level, kind = mode.split("_")
    difference = torch.nan_to_num((old - sampled) * mask, nan=0.0)
    if level != "token":
        difference = difference.sum(-1, keepdim=True)
    if level == "geometric":
        difference = difference / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = difference.exp()
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if kind == "truncate":
        return ratio.clamp(low, high)
    return ratio * ((ratio >= low) & (ratio <= high))


@pytest.mark.few(5)
@pytest.mark.parametrize("mode", [f"{a}_{b}" for a in ("token", "sequence", "geometric") for b in ("truncate", "mask")])
@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_weights(mode, low, high):
    old, sampled, mask = samples()
    sampled[0, 2] = math.nan
    expected = trl(old, sampled, mask, mode, low, high)
    weights = rollout_importance_weights(old, sampled, mask, mode=mode, clip_min=low, clip_max=high)
    assert weights.shape == ((SMALL.sequences, SMALL.length) if mode.startswith("token") else (SMALL.sequences, 1))
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)
    assert 0 < (weights != 1).sum() < weights.numel()


CHAINS: list[dict[str, Any]] = [
    *({name: (0.8, 1.15) if name.endswith("k1") else 0.1 if "seq_sum" in name else 0.03} for name in REJECTIONS),
    {"seq_mean_k1": 1.04},
    {"token_k1": 1.25, "seq_mean_k1": 1.06},
    {"token_k3": 0.05, "seq_sum_k2": 0.2, "seq_max_k2": 0.1},
]


def verl(old: Tensor, sampled: Tensor, mask: Tensor, chain: dict[str, Any]) -> Tensor:
    """Return the tokens that stay, one sequence, token and criterion at a time."""
    kept = mask.clone()
    for name, bound in chain.items():
        for row in range(len(mask)):
            x = [float(d) for d in (old - sampled)[row][mask[row]]]
            of_tokens = [{"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[name[-2:]] for d in x]
            low, high = -math.inf, bound
            if name.endswith("k1"):
                low, high = (math.log(b) for b in (bound if isinstance(bound, tuple) else (1 / bound, bound)))
            if name.startswith("token"):
                kept[row][mask[row]] &= torch.tensor([low <= k <= high for k in of_tokens], dtype=torch.bool)
            else:
                n = max(1, len(of_tokens))
                of_sequence = {"sum": sum(of_tokens), "mean": sum(of_tokens) / n, "max": max(of_tokens, default=0.0)}
                kept[row] &= low <= of_sequence[name.split("_")[1]] <= high
    return kept


@pytest.mark.few(4)
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "+".join(chain))
def test_rejections(chain):
    old, sampled, mask = samples()
    expected = verl(old, sampled, mask, chain)
    assert torch.equal(rollout_rejection_mask(old, sampled, mask, chain), expected)
    assert 0 < expected.sum() < mask.sum() or chain == {"seq_mean_k1": (0.8, 1.15)}
    lengths = torch.tensor([4, 7, 0, 2, 6, 1])
    keep = torch.arange(SMALL.length) < lengths[:, None]
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    packed = rollout_rejection_mask(old[keep], sampled[keep], mask[keep], chain, cu_seqlens=cu_seqlens)
    assert torch.equal(packed, verl(old, sampled, mask & keep, chain)[keep])


def test_rejections_without_a_value():
    """NaN of the sampler counts as no distance; an infinite distance is rejected, and is not NaN."""
    old, sampled, mask = samples()
    mask[0] = True
    sampled[0, 2], sampled[0, 3] = math.nan, -1e6
    kept = rollout_rejection_mask(old, sampled, mask, {"token_k3": 5.0})
    assert kept[0, 2] and not kept[0, 3]
    assert not rollout_rejection_mask(old, sampled, mask, {"seq_sum_k3": 5.0})[0].any()


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"seq_max_k1": 2.0}, "unknown criterion 'seq_max_k1', expected one of "),
        ({"token_k2": (0.1, 0.2)}, "criterion 'token_k2' takes one bound, got a tuple of 2"),
        ({"token_k1": (2.0, 0.5)}, "the bounds of token_k1 must rise, got 2 and 0.5"),
        ({"token_k3": 0.0}, "the bound of token_k3 must be positive, got 0.0"),
    ],
)
def test_bounds_of_rejections(bounds, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        rollout_rejection_mask(*samples(), bounds)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_metrics_before_bounds(level):
    old, sampled, mask = samples()
    w = rollout_importance_weights(old, sampled, mask, mode=f"{level}_mask", clip_max=None)
    w = w[mask] if level == "token" else w[mask.any(-1)]
    log_w = (old - sampled)[mask]
    found = rollout_metrics(old, sampled, mask, level=level)
    expected = (
        w.mean(), w.min(), w.max(), w.sum() ** 2 / w.numel() / (w**2).sum(),
        -log_w.mean(), (log_w.exp() - 1 - log_w).mean(),
    )  # fmt: skip
    for name, value, exact in zip(found._fields, found, expected, strict=True):
        torch.testing.assert_close(value, exact, rtol=1e-12, atol=0, msg=name)
    flat = torch.tensor([0, *range(SMALL.length, old.numel() + 1, SMALL.length)])
    packed = rollout_metrics(old.flatten(), sampled.flatten(), mask.flatten(), level=level, cu_seqlens=flat)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(packed, found, strict=True))
    nothing = rollout_metrics(old[:0], sampled[:0], mask[:0], level=level)
    assert nothing.ratio_mean == 0 and nothing.ratio_min == math.inf and nothing.effective_sample_size == 0


def test_padding_may_hold_anything():
    old, sampled, mask = samples()
    expected = rollout_importance_weights(old, sampled, mask, mode="token_mask")
    old, sampled = old.masked_fill(~mask, math.nan), sampled.masked_fill(~mask, math.inf)
    weights = rollout_importance_weights(old, sampled, mask.long(), mode="token_mask")
    assert torch.equal(weights, expected)
    assert (weights[~mask] == 1).all()


def test_a_nan_of_the_training_engine_is_not_hidden():
    old, sampled, mask = samples()
    place = tuple(mask.nonzero()[0].tolist())
    old[place] = math.nan
    assert rollout_importance_weights(old, sampled, mask, mode="token_truncate")[place].isnan()


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask", "geometric_truncate"])
def test_sequences_without_padding(mode):
    old, sampled, mask = samples()
    lengths = torch.tensor([7, 0, 3, 5, 1, 6])
    keep = torch.arange(SMALL.length) < lengths[:, None]
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    padded = rollout_importance_weights(old, sampled, mask & keep, mode=mode, clip_max=1.3)
    packed = rollout_importance_weights(old[keep], sampled[keep], mask[keep], mode=mode, clip_max=1.3, cu_seqlens=ends)
    torch.testing.assert_close(packed, padded[keep] if mode.startswith("token") else padded, rtol=1e-12, atol=0)


def test_entropy_coefficient_follows_trl():
    """TRL keeps a coefficient and the last entropy, and applies the one where the other is at most the target."""
    entropies = [0.5, 0.19, 0.2, 0.1, 0.05, 0.21, 0.3, 0.3, 0.3, 0.1] + 5 * [0.01]
    settings = {"entropy_target": 0.2, "entropy_coef_delta": 0.3, "entropy_coef_min": 0.1, "entropy_coef_max": 1.0}
    theirs, last, expected, steps = 0.4, math.inf, [], []
    coef, applied = 0.4, 0.0
    for entropy in entropies:
        expected.append(theirs if last <= 0.2 else 0.0)
        theirs = min(theirs + 0.3, 1.0) if entropy <= 0.2 else max(theirs - 0.3, 0.1)
        last = entropy
        steps.append(applied)
        coef, applied = adaptive_entropy_coef(coef, torch.tensor(entropy, dtype=torch.float64), **settings)
    assert steps == expected
    assert len({*steps}) > 3
