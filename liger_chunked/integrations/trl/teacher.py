"""The divergence between student and teacher, with each head inside the forward of its model."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_chunked.integrations.transformers import HeadInput
from liger_chunked.integrations.trl.fused_output import head_stats
from liger_chunked.integrations.trl.mixin import LigerTrainerMixin, with_transform
from liger_chunked.losses import LigerFusedLinearDistillationBase
from liger_chunked.types import DistillationMetrics, Head, LogitOptions


class DistillationStep(NamedTuple):
    """The loss with its gradient, its metrics and, if requested, the sum of the student's entropies in nats."""

    loss: Tensor
    metrics: DistillationMetrics
    entropy_sum: Tensor | None


def distillation_step(
    model: nn.Module,
    teacher: nn.Module,
    loss: LigerFusedLinearDistillationBase,
    inputs: dict[str, Any],
    labels: Tensor,
    *,
    num_items: int | Tensor | None = None,
    with_entropy: bool = False,
) -> DistillationStep:
    """Apply `loss` inside the forward of `model`, inside the forward of `teacher`.

    The student's forward runs inside the teacher's, because each head is complete only inside its own forward.

    Args:
        model: the student, wrapped or not.
        teacher: scores the same tokens.
        loss: a loss; it gets the logits transforms of both models.
        inputs: keyword arguments of both models, for sequences of T tokens.
        labels: (B, T) token ids, not shifted, -100 at positions without a loss.
        num_items: see the loss.
        with_entropy: also compute the student's entropy at the temperature of the loss, for one more GEMM.
    """
    with_gradient = torch.is_grad_enabled()
    steps: list[DistillationStep] = []

    def in_teacher(teacher_head: Head, teacher_input: HeadInput) -> None:
        def in_student(head: Head, input: HeadInput) -> DistillationStep:
            own = fitted_pair(loss, input.options, teacher_input.options)
            value, metrics = own(
                head.weight,
                input.hidden_states,
                teacher_head.weight,
                teacher_input.hidden_states,
                input.target,
                head.bias,
                teacher_head.bias,
                num_items=num_items,
            )
            entropy_sum = _entropy_sum(head, input, own.options) if with_entropy else None
            return DistillationStep(value, metrics, entropy_sum)

        with torch.set_grad_enabled(with_gradient):
            # Not returned: the teacher's hooks would treat the loss as an output of the teacher.
            steps.append(model(**inputs, labels=labels, head_fn=in_student))

    teacher.eval()
    with torch.no_grad():
        teacher(**inputs, labels=labels, head_fn=in_teacher)
    return steps[0]


def fitted_pair(
    loss: LigerFusedLinearDistillationBase, student: LogitOptions, teacher: LogitOptions
) -> LigerFusedLinearDistillationBase:
    """Return a copy of `loss` with the logits transforms of both models; see `with_transform`."""
    own = copy.copy(loss)
    own.options = with_transform(loss.options, student)
    of_teacher = loss.teacher_options
    if of_teacher is loss.options:
        of_teacher = LogitOptions(temperature=loss.options.temperature)
    own.teacher_options = with_transform(of_teacher, teacher)
    return own


@torch.no_grad()
def _entropy_sum(head: Head, input: HeadInput, options: LogitOptions) -> Tensor:
    stats = head_stats(head, input, ("entropy",), temperature=options.temperature, logits_budget=options.logits_budget)
    assert stats.entropy is not None
    return stats.entropy.sum()


def log_terms(trainer: LigerTrainerMixin, loss: LigerFusedLinearDistillationBase, metrics: DistillationMetrics) -> None:
    """Log the terms of a loss that replaces the trainer's."""
    trainer.mode_metrics["soft_loss"].append(metrics.soft_loss.item())
    if loss.weight_hard_loss:
        trainer.mode_metrics["hard_loss"].append(metrics.hard_loss.item())
