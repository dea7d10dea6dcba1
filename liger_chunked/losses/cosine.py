"""Cosine distance of student and teacher logits. It ignores their scale, but not a constant added to all of them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from liger_chunked.losses.distillation import LigerFusedLinearDistillationBase
from liger_chunked.types import Divergence


class LigerFusedLinearCosineSimilarityLoss(LigerFusedLinearDistillationBase):
    """`1 - cos(z, t)` of the student's logits `z` and the teacher's `t`, fused.

    It depends on a constant offset of the logits, not on a temperature, which is refused, as is a teacher's top-k.
    Liger-Kernel's `beta` is `weight_soft_loss`.

    Args:
        weight_hard_loss: factor of the targets' NLL at temperature 1, not negative.
        weight_soft_loss: factor of the divergence, not negative.
        reduction: "mean" over the tokens that count, or "none", a value for each token.
        teacher_options: `LogitOptions` with the teacher's `softcap`, `logit_scale` and `temperature`. None: the
            student's.
        **options: fields of `LogitOptions`: `ignore_index` (-100) marks targets to skip; `softcap`, `logit_scale` and
            `temperature` transform the logits; `logits_budget` is the most bytes of both models' logits in memory, such
            as "512MiB" (None: automatic). A `logits_dtype` is refused.

    >>> import torch
    >>> weight, input = torch.randn(11, 4), torch.randn(2, 3, 4)
    >>> teacher_weight, teacher_input = torch.randn(11, 6), torch.randn(2, 3, 6)
    >>> loss, metrics = LigerFusedLinearCosineSimilarityLoss()(weight, input, teacher_weight, teacher_input)
    >>> cosine = torch.nn.functional.cosine_similarity(input @ weight.T, teacher_input @ teacher_weight.T, dim=-1)
    >>> bool(torch.isclose(metrics.soft_loss, 1 - cosine.mean()))
    True
    """

    def _check_after_init(self) -> None:
        super()._check_after_init()
        for name, own in (("temperature", self.options), ("teacher_options.temperature", self.teacher_options)):
            if own.temperature != 1:
                raise ValueError(
                    f"{name}={own.temperature} has no effect: a cosine does not depend on the scale of the logits, and "
                    "the hard loss has temperature 1"
                )

    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        return 1.0 - F.cosine_similarity(student_logits, teacher_logits, dim=-1)

    def closed_form(self) -> Divergence:
        return Divergence("cosine")
