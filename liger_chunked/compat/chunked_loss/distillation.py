"""JSD and cosine similarity."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from liger_chunked import losses
from liger_chunked.calls import typed_like
from liger_chunked.compat.settings import Loss


class _Distillation(Loss):
    """`_scale` multiplies the reported soft loss.

    Tokens that only the teacher has get student logits of 0 in the soft loss.
    """

    _scale = 1.0
    ignore_index: int
    weight_hard_loss: float
    return_soft_hard_loss: bool

    def _build(self, kind: Callable[..., nn.Module], weight_hard_loss: float, **settings: Any) -> None:
        self.loss = kind(weight_hard_loss=weight_hard_loss, **settings)
        self.soft = kind(weight_hard_loss=0.0, **settings)
        self.hard: Any = losses.LigerFusedLinearCrossEntropyLoss(ignore_index=settings["ignore_index"])

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return the loss, or `(loss, soft_loss, hard_loss)` with unweighted terms."""
        teacher = (teacher_weight, teacher_input, true_labels)
        added = teacher_weight.shape[0] - student_weight.shape[0]
        if added <= 0:
            loss, metrics = self.loss(student_weight, student_input, *teacher, student_bias, teacher_bias)
            hard = metrics.hard_loss
        else:
            hard = self.hard(student_weight, student_input, true_labels, student_bias)
            weight = F.pad(student_weight, (0, 0, 0, added))
            bias = None if student_bias is None else F.pad(student_bias, (0, added))
            soft, metrics = self.soft(weight, student_input, *teacher, bias, teacher_bias)
            loss = soft + self.weight_hard_loss * hard
        return (loss, self._scale * metrics.soft_loss, hard.detach()) if self.return_soft_hard_loss else loss

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerFusedLinearJSDLoss(_Distillation):
    """`losses.LigerFusedLinearJSDLoss`."""

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:
        super().__init__()
        self._build(
            losses.LigerFusedLinearJSDLoss,
            weight_hard_loss,
            weight_soft_loss=weight_soft_loss,
            beta=beta,
            ignore_index=ignore_index,
            temperature=temperature,
        )


class LigerFusedLinearCosineSimilarityLoss(_Distillation):
    """`losses.LigerFusedLinearCosineSimilarityLoss` with the soft loss `beta (1 - cos)`."""

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:
        super().__init__()
        self._scale = beta
        self._build(
            losses.LigerFusedLinearCosineSimilarityLoss,
            weight_hard_loss,
            weight_soft_loss=weight_soft_loss * beta,
            ignore_index=ignore_index,
        )
