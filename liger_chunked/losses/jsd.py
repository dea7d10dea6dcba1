"""Generalised Jensen-Shannon divergence of student and teacher (GKD, https://arxiv.org/abs/2306.13649, equation 1)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import Unpack

from liger_chunked.losses.distillation import DistillationOptionsDict, LigerFusedLinearDistillationBase
from liger_chunked.losses.formulas import kl, log_mixture
from liger_chunked.losses.settings import check_finite
from liger_chunked.types import Divergence


class LigerFusedLinearJSDLoss(LigerFusedLinearDistillationBase):
    """Generalised Jensen-Shannon divergence (GKD, https://arxiv.org/abs/2306.13649, equation 1), fused.

    With student `p` and teacher `q`, in nats per token:

        m = (1 - beta) * p + beta * q
        divergence = beta * KL(q || m) + (1 - beta) * KL(p || m)

    As in TRL, beta 0 gives `KL(q || p)` and beta 1 `KL(p || q)`, the limits of `divergence / (beta * (1 - beta))`.

    Args:
        beta: weight of the teacher in the mixture, in [0, 1].
        **options: `weight_hard_loss` and `weight_soft_loss` (0.5), factors of the targets' NLL at temperature 1 and of
            the divergence; `reduction`, "mean" or "none", a value for each token; `teacher_options`, a `LogitOptions`
            with the teacher's `softcap`, `logit_scale` and `temperature` (None: the student's); and fields of
            `LogitOptions`: `ignore_index` (-100) marks targets to skip; `softcap`, `logit_scale` and `temperature`
            transform the logits; `logits_budget` is the most bytes of both models' logits in memory, such as "512MiB"
            (None: automatic). A `logits_dtype` is refused.

    >>> import torch
    >>> weight, input, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, -100], [3, 4, 5]])
    >>> teacher_weight, teacher_input = torch.randn(13, 6), torch.randn(2, 3, 6)  # padded beyond 11
    >>> loss, metrics = LigerFusedLinearJSDLoss()(weight, input, teacher_weight, teacher_input, target)
    >>> bool(torch.isclose(loss, 0.5 * metrics.soft_loss + 0.5 * metrics.hard_loss))
    True
    >>> logps, ids = (teacher_input @ teacher_weight[:11].T).log_softmax(-1).topk(3)  # as a server returns them
    >>> loss, metrics = LigerFusedLinearJSDLoss()(weight, input, target=target, teacher_logps=logps, teacher_ids=ids)
    """

    of_distributions: ClassVar[bool] = True

    def __init__(self, *, beta: float = 0.5, **options: Unpack[DistillationOptionsDict]) -> None:
        super().__init__(**options)
        check_finite("beta", beta, minimum=0, maximum=1)
        self.beta = beta

    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        log_p, log_q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        if self.beta == 0.0:
            return kl(log_q, log_p)
        if self.beta == 1.0:
            return kl(log_p, log_q)
        log_m = log_mixture(log_p, log_q, self.beta)
        return self.beta * kl(log_q, log_m) + (1.0 - self.beta) * kl(log_p, log_m)

    def closed_form(self) -> Divergence:
        return Divergence.jensen_shannon(self.beta)

    def extra_repr(self) -> str:
        return f"beta={self.beta}, {super().extra_repr()}"
