"""The KTO losses against TRL's code, for every loss type."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import eager
import pytest
import torch
from table import LABELS, SMALL, Batch, evaluate, examples, relative_error
from torch import Tensor

from liger_chunked import LigerFusedLinearKTOLoss

pytest.importorskip("trl")


class Model(torch.nn.Module):
    """The interface that TRL's loss needs from a model: statistics of given hidden states.

    Mismatched completions are recognized by their length.
    """

    is_gradient_checkpointing = False

    def __init__(self, batch: Batch, prefix: str = "") -> None:
        super().__init__()
        self.head = batch[f"{prefix}weight"], batch[f"{prefix}bias"]
        self.states = {batch[name].shape[1]: batch[name] for name in (f"{prefix}input", f"{prefix}kl_input")}

    def forward(self, labels: Tensor, **_: Any) -> SimpleNamespace:
        weight, bias = self.head
        target = labels[:, 1:]
        outputs = ("logps", "entropy", "mean_logits")
        stats = eager.token_stats(weight, self.states[target.shape[1]], target, bias, outputs=outputs)
        return SimpleNamespace(log_probs=stats.pop("logps"), **stats)


def trl_loss(batch: Batch, precomputed: bool, **settings: Any) -> tuple[Tensor, dict[str, list[float]]]:
    """Run `KTOTrainer._compute_loss` on a trainer with only the attributes that it reads, and return its logs too."""
    from trl.trainer.kto_trainer import KTOTrainer

    policy = Model(batch)
    metrics: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    trainer = SimpleNamespace(
        model=policy,
        ref_model=Model(batch, "ref_"),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        precompute_ref_logps=precomputed,
        calculate_KL=settings["loss_type"] == "kto",
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )
    trainer._compute_kl_logps = partial(KTOTrainer._compute_kl_logps, trainer)

    # TRL shifts: the hidden state at t - 1 predicts the token at t.
    def shifted(target: Tensor, prefix: str = "") -> Batch:
        labels = torch.cat([torch.full_like(target[:, :1], -100), target], dim=1)
        return {
            f"{prefix}input_ids": labels.clamp(min=0),
            f"{prefix}attention_mask": torch.ones_like(labels),
            f"{prefix}completion_mask": (labels != -100).long(),
        }

    inputs = {"label": batch["preference_labels"], **shifted(batch["target"]), **shifted(batch["kl_target"], "KL_")}
    if precomputed:
        ref = Model(batch, "ref_")
        for name, prefix in (("ref_logps", ""), ("ref_KL_logps", "KL_")):
            labels = inputs[f"{prefix}input_ids"].masked_fill(inputs[f"{prefix}completion_mask"] == 0, -100)
            inputs[name] = ref(labels).log_probs.sum(1)
    return KTOTrainer._compute_loss(trainer, policy, inputs, False), metrics["train"]


def sample(labels: str, sign: str) -> Batch:
    """Make mismatched completions that are longer, and likelier or less likely under the policy than the reference."""
    batch = examples(SMALL, seed=11, labels=labels)
    others = examples(SMALL._replace(length=SMALL.length + 2), seed=12, mismatched="states")
    batch |= {name: others[name] for name in ("kl_input", "kl_target", "ref_kl_input")}
    if sign == "negative":
        batch["kl_input"] = 100 * batch["kl_input"]
    return batch


SETTINGS = {"beta": 0.07, "desirable_weight": 1.3, "undesirable_weight": 0.6}


@pytest.mark.parametrize("budget", [None, 8 * 9 * SMALL.vocab], ids=["auto", "packs"])
@pytest.mark.parametrize("sign", ["positive", "negative"])
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("precomputed", [False, True], ids=["ref-states", "ref-logps"])
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_equal_to_trl(loss_type, precomputed, labels, sign, budget):
    batch = sample(labels, sign)
    settings = {**SETTINGS, "loss_type": loss_type}
    module = LigerFusedLinearKTOLoss(logits_budget=budget, **settings)
    read = [name for name in batch if loss_type == "kto" or "kl_" not in name]

    def ours(batch: Batch) -> Tensor:
        return module(**{name: batch[name] for name in read})[0]

    result = evaluate(ours, batch)
    exact = evaluate(lambda batch: trl_loss(batch, precomputed, **settings)[0], batch)
    for name in exact:
        assert relative_error(result[name], exact[name]) < 1e-12, name

    _, metrics = module(**{name: batch[name] for name in read})
    _, logged = trl_loss(batch, precomputed, **settings)
    assert (metrics.reference_point > 0) == (loss_type == "kto" and sign == "positive")
    assert metrics.reference_point.item() == pytest.approx(logged["kl"][0], rel=1e-12)
    for side, present in (("chosen", metrics.chosen_count), ("rejected", metrics.rejected_count)):
        for ours_, theirs in (("rewards", "rewards"), ("logps", "logps"), ("logits_mean", "logits")):
            expected = logged[f"{theirs}/{side}"]
            assert len(expected) == (present > 0)
            if expected:
                assert getattr(metrics, f"{side}_{ours_}").item() == pytest.approx(expected[0], rel=1e-12)
