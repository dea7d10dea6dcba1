"""`LigerDistillationTrainer`: TRL's on-policy distillation, one product with the teacher's head a token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from trl import DistillationTrainer

from liger_chunked.integrations.trl.mixin import LigerTrainerMixin
from liger_chunked.integrations.trl.teacher import distillation_step, log_terms
from liger_chunked.losses import LigerFusedLinearDistillationBase, LigerFusedLinearJSDLoss

_OF_THE_MODEL = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


class LigerDistillationTrainer(LigerTrainerMixin, DistillationTrainer):
    """TRL's `DistillationTrainer`, the gradient computed in forward.

    Args:
        *args, **kwargs: TRL's.
        loss: a `LigerFusedLinearDistillationBase`, at whose temperature the entropy is logged too.
        logits_budget: see `LigerTrainerMixin`.
    """

    loss_kind = LigerFusedLinearDistillationBase
    models_without_head = ("model", "teacher_model")

    def __init__(self, *args: Any, logits_budget: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, logits_budget=logits_budget, **kwargs)
        self.logits_budget = logits_budget

    def _compute_loss(
        self, unwrapped_student: nn.Module, inputs: dict[str, Any], num_items_in_batch: int | Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        completion_mask = inputs["completion_mask"]
        scored = completion_mask * inputs.get("tool_mask", 1)
        model_inputs = {
            "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            "attention_mask": torch.cat([inputs["prompt_mask"], completion_mask], dim=1),
            **{name: inputs[name] for name in _OF_THE_MODEL if name in inputs},
        }
        not_scored = torch.cat([torch.zeros_like(inputs["prompt_mask"]), scored], dim=1) == 0
        loss = self.loss_override
        if loss is None:
            loss = LigerFusedLinearJSDLoss(
                beta=self.beta,
                temperature=self.temperature,
                weight_hard_loss=0.0,
                weight_soft_loss=1.0,
                logits_budget=self.logits_budget,
            )
        step = distillation_step(
            unwrapped_student,
            self.teacher_model,
            loss,
            model_inputs,
            model_inputs["input_ids"].masked_fill(not_scored, -100),
            num_items=num_items_in_batch,
            with_entropy=True,
        )
        assert step.entropy_sum is not None
        if self.loss_override is not None:
            log_terms(self, loss, step.metrics)
        return step.loss, step.entropy_sum, scored.sum()
