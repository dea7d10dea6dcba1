"""Calls of the library in strictly typed code. `make lint` checks them with mypy --strict; nothing runs."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import assert_type

from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearPreferenceBase,
    Pairs,
    TokenStats,
    apply_liger_kernel,
    estimate_memory,
    liger_rms_norm,
    linear_token_stats,
    shifted,
)
from liger_chunked.functional import cross_entropy_loss, dpo_loss
from liger_chunked.integrations.transformers import Applied
from liger_chunked.types import DistillationMetrics, MemoryEstimate, PolicyMetrics, PreferenceMetrics


class Hinge(LigerFusedLinearPreferenceBase):
    def preference_loss(self, pairs: Pairs) -> Tensor:
        return torch.relu(1 - self.beta * (pairs.logps[:, 0] - pairs.logps[:, 1]))


def losses(weight: Tensor, x: Tensor, target: Tensor, labels: Tensor) -> list[Tensor]:
    dpo = LigerFusedLinearDPOLoss(beta=0.1, loss_type="ipo", logits_budget="256MiB")
    loss, metrics = dpo(weight, x, target, ref_logps=None)
    assert_type(loss, Tensor)
    assert_type(metrics, PreferenceMetrics)
    of_policy, rollouts = LigerFusedLinearGRPOLoss.from_loss_type("dapo")(weight, x, target, torch.ones(4))
    assert_type(rollouts, PolicyMetrics)
    of_teacher, distilled = LigerFusedLinearJSDLoss(temperature=2.0)(weight, x, weight, x, target)
    assert_type(distilled, DistillationMetrics)
    unpaired, _ = LigerFusedLinearKTOLoss()(weight, x, target, labels)
    hinge, _ = Hinge(beta=1.0)(weight, x, target)
    functional, _ = dpo_loss(weight, x, target, beta=0.2)
    cross_entropy = LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1)(weight, *shifted(x, target))
    return [
        loss,
        of_policy,
        of_teacher,
        unpaired,
        hinge,
        functional,
        *([cross_entropy] if isinstance(cross_entropy, Tensor) else []),
    ]


def statistics(weight: Tensor, x: Tensor, target: Tensor) -> Tensor:
    stats = linear_token_stats(weight, x, target, outputs=("logps", "entropy"))
    assert_type(stats, TokenStats)
    assert stats.logps is not None and stats.entropy is not None
    return stats.logps.sum() + stats.entropy.sum() + liger_rms_norm(x, weight[0], 1e-6).sum()


def others(model: torch.nn.Module) -> Applied:
    estimate = estimate_memory(LigerFusedLinearDPOLoss(), vocab_size=100, hidden_size=8, shape=(2, 4))
    assert_type(estimate, MemoryEstimate)
    assert_type(estimate.peak, int)
    assert callable(cross_entropy_loss)
    return apply_liger_kernel(model)
