"""The DPO losses against TRL's code, for every loss type."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import eager
import pytest
import torch
from eager.dpo import LOSS_TYPES
from table import SMALL, Batch, evaluate, pairs, relative_error
from torch import Tensor

from liger_chunked import LigerFusedLinearDPOLoss

pytest.importorskip("trl")


class Model(torch.nn.Module):
    """The interface that TRL's loss needs from a model: statistics of given hidden states."""

    is_gradient_checkpointing = False

    def __init__(self, weight: Tensor, input: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.arguments = (weight, input, bias)

    def forward(self, labels: Tensor, **_: Any) -> SimpleNamespace:
        weight, input, bias = self.arguments
        outputs = ("logps", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
        stats = eager.token_stats(weight, input, labels[:, 1:], bias, outputs=outputs)
        return SimpleNamespace(log_probs=stats.pop("logps"), **stats)


def trl_loss(batch: Batch, loss_types: list[str], loss_weights: list[float], **settings: Any) -> Tensor:
    """Run `DPOTrainer._compute_loss` on a trainer with only the attributes that it reads."""
    from trl.trainer.dpo_trainer import DPOTrainer

    policy = Model(batch["weight"], batch["input"], batch["bias"])
    trainer = SimpleNamespace(
        model=policy,
        ref_model=Model(batch["ref_weight"], batch["ref_input"], batch["ref_bias"]),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=0.05),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        loss_types=loss_types,
        loss_weights=loss_weights,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    vars(trainer).update(settings)
    # TRL shifts: the hidden state at t - 1 predicts the token at t.
    before = torch.full_like(batch["target"][:, :1], -100)
    labels = torch.cat([before, batch["target"]], dim=1)
    inputs = {
        "input_ids": labels.clamp(min=0),
        "attention_mask": torch.ones_like(labels),
        "completion_mask": (labels != -100).long(),
    }
    return DPOTrainer._compute_loss(trainer, policy, inputs, False)


# TRL uses label_smoothing in these; in "sigmoid" it ignores it.
SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")


@pytest.mark.parametrize("budget", [None, 8 * 9 * SMALL.vocab], ids=["auto", "packs"])
@pytest.mark.parametrize("loss_type", [*LOSS_TYPES, ["sigmoid", "bco_pair", "sft"]], ids=str)
def test_equal_to_trl(loss_type, budget):
    beta, smoothing = 0.1, 0.1 if loss_type in SMOOTHED else 0.0
    batch = pairs(SMALL, seed=11)
    loss_types = [loss_type] if isinstance(loss_type, str) else loss_type
    weights = [0.8, 0.2, 1.0][: len(loss_types)]

    def ours(batch: Batch) -> Tensor:
        loss = LigerFusedLinearDPOLoss(
            beta=beta,
            loss_type=loss_type,
            loss_weights=weights,
            label_smoothing=smoothing,
            logits_budget=budget,
        )
        return loss(**batch)[0]

    def theirs(batch: Batch) -> Tensor:
        return trl_loss(batch, loss_types, weights, beta=beta, label_smoothing=smoothing)

    result, exact = evaluate(ours, batch), evaluate(theirs, batch)
    # TRL converts its label smoothing to float32, so its logarithm has an error of 1e-8.
    tolerance = 1e-6 if loss_type == "exo_pair" else 1e-12
    for name in exact:
        assert relative_error(result[name], exact[name]) < tolerance, name
