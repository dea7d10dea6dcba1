"""`LigerDistillationTrainer`: TRL's on-policy distillation, with one product with the teacher's head for each token."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from trl import DistillationTrainer

from liger_chunked.integrations.trl.mixin import HEAD_BUDGET, LigerTrainerMixin
from liger_chunked.integrations.trl.rollouts import model_inputs_and_labels
from liger_chunked.integrations.trl.teacher import distillation_step, log_terms
from liger_chunked.losses import LigerFusedLinearDistillationBase, LigerFusedLinearJSDLoss


class LigerDistillationTrainer(LigerTrainerMixin, DistillationTrainer):
    """TRL's `DistillationTrainer`, with the gradient computed in forward.

    Args:
        *args, **kwargs: see TRL.
        loss: a `LigerFusedLinearDistillationBase`. The logged entropy uses its temperature too.
        logits_budget: the most bytes of logits in memory at once, student and teacher together; None for 1 GiB.

    Raises:
        ValueError: a config field contradicts the loss (`replaced_fields`).
    """

    replaced_fields = MappingProxyType({"beta": "beta", "temperature": "options.temperature"})

    loss_kind = LigerFusedLinearDistillationBase
    models_without_head = ("model", "teacher_model")

    def _compute_loss(
        self, unwrapped_student: nn.Module, inputs: dict[str, Any], num_items_in_batch: int | Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        model_inputs, labels = model_inputs_and_labels(inputs)
        loss = self.loss_override
        if loss is None:
            loss = LigerFusedLinearJSDLoss(
                beta=self.beta,
                temperature=self.temperature,
                weight_hard_loss=0.0,
                weight_soft_loss=1.0,
                logits_budget=2 * HEAD_BUDGET if self.logits_budget is None else self.logits_budget,
            )
        step = distillation_step(
            unwrapped_student,
            self.teacher_model,
            loss,
            model_inputs,
            labels,
            num_items=num_items_in_batch,
            with_entropy=True,
        )
        assert step.entropy_sum is not None
        if self.loss_override is not None:
            log_terms(self, loss, step.metrics)
        return step.loss, step.entropy_sum, (labels != -100).sum()
