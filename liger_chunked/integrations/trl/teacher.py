"""A student and its teacher: the divergence of two heads, each inside the forward of its own model."""

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
    """The loss with its gradient, its metrics, and, where asked for, the sum of the student's entropies in nats."""

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
        loss: takes either model's logit transform.
        inputs: keywords of both models, of sequences of T tokens.
        labels: (B, T) token ids, not shifted, -100 where the models need not agree.
        num_items: see the loss.
        with_entropy: the student's entropy, at the temperature of the loss, at one GEMM more.
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
            # Not returned: the teacher's hooks would take a loss with a gradient for the teacher's own.
            steps.append(model(**inputs, labels=labels, head_fn=in_student))

    teacher.eval()
    with torch.no_grad():
        teacher(**inputs, labels=labels, head_fn=in_teacher)
    return steps[0]


def fitted_pair(
    loss: LigerFusedLinearDistillationBase, student: LogitOptions, teacher: LogitOptions
) -> LigerFusedLinearDistillationBase:
    """A copy of `loss` with the transforms of both models it is applied to, see `with_transform`."""
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
    """Log the terms of a loss that took the place of a trainer's."""
    trainer.mode_metrics["soft_loss"].append(metrics.soft_loss.item())
    if loss.weight_hard_loss:
        trainer.mode_metrics["hard_loss"].append(metrics.hard_loss.item())
