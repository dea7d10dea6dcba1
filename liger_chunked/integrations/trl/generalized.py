"""Code shared by GKD and GOLD: a generalized Jensen-Shannon divergence without the logits of either model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from liger_chunked.integrations.trl.mixin import LigerTrainerMixin
from liger_chunked.integrations.trl.teacher import distillation_step, log_terms
from liger_chunked.losses import LigerFusedLinearDistillationBase, LigerFusedLinearJSDLoss


class GeneralizedMixin(LigerTrainerMixin):
    """For a trainer with a `teacher_model` and a `beta`. TRL uses its fused head for metrics only."""

    # Set by TRL's trainer.
    beta: float
    teacher_model: nn.Module

    loss_kind = LigerFusedLinearDistillationBase
    models_without_head = ("teacher_model",)

    def _distil(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        labels: Tensor,
        temperature: float,
        return_outputs: bool,
        num_items: int | Tensor | None,
    ) -> Any:
        loss = self.loss_override
        if loss is None:
            loss = LigerFusedLinearJSDLoss(
                beta=self.beta,
                temperature=temperature,
                weight_hard_loss=0.0,
                weight_soft_loss=1.0,
                logits_budget=self.logits_budget,
            )
        step = distillation_step(model, self.teacher_model, loss, inputs, labels, num_items=num_items)
        if self.loss_override is not None:
            log_terms(self, loss, step.metrics)
        return self._with_outputs(step.loss, model, inputs, return_outputs)
