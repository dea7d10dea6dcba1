"""Total variation distance of student and teacher: its gradient is bounded (https://arxiv.org/abs/2307.15190)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from liger_chunked.losses.distillation import LigerFusedLinearDistillationBase
from liger_chunked.types import Divergence


class LigerFusedLinearTVDLoss(LigerFusedLinearDistillationBase):
    """`sum(|p - q|) / 2` of student `p` and teacher `q`, in [0, 1], fused.

    The gradient is bounded (Wen et al. 2023, https://arxiv.org/abs/2307.15190), and 0 where `p` equals `q`.

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
    >>> loss, metrics = LigerFusedLinearTVDLoss()(weight, input, teacher_weight, teacher_input)
    >>> p, q = (input @ weight.T).softmax(-1), (teacher_input @ teacher_weight.T).softmax(-1)
    >>> bool(torch.isclose(metrics.soft_loss, (p - q).abs().sum(-1).mean() / 2))
    True
    """

    of_distributions: ClassVar[bool] = True

    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        log_p, log_q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)

    def closed_form(self) -> Divergence:
        return Divergence("tvd")
