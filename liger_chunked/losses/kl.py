"""Forward and reverse KL divergence of student and teacher, maybe of a mixture of both, which bounds their ratio."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import Unpack

from liger_chunked.losses.distillation import DistillationOptionsDict, LigerFusedLinearDistillationBase
from liger_chunked.losses.formulas import kl, log_mixture
from liger_chunked.types import Divergence, check_number


class LigerFusedLinearKLDivLoss(LigerFusedLinearDistillationBase):
    """Kullback-Leibler divergence of teacher and student, fused.

    With student `p` and teacher `q`, in nats per token:

        forward    KL(q || skew * q + (1 - skew) * p)    covers all modes of the teacher
        reverse    KL(p || skew * p + (1 - skew) * q)    seeks modes of the teacher

    Forward is Hinton et al. 2015 (https://arxiv.org/abs/1503.02531) minus the teacher's entropy, reverse MiniLLM
    (https://arxiv.org/abs/2306.08543) on given tokens.

    Args:
        reverse: the second divergence instead of the first.
        skew: in [0, 1), bounds the ratio (DistiLLM, https://arxiv.org/abs/2402.03898, section 3.1, proposes 0.1). 0: no
            mixture.
        **options: `weight_hard_loss` and `weight_soft_loss` (0.5), factors of the targets' NLL at temperature 1 and of
            the divergence; `reduction`, "mean" or "none", a value for each token; `teacher_options`, a `LogitOptions`
            with the teacher's `softcap`, `logit_scale` and `temperature` (None: the student's); and fields of
            `LogitOptions`: `ignore_index` (-100) marks targets to skip; `softcap`, `logit_scale` and `temperature`
            transform the logits; `logits_budget` is the most bytes of both models' logits in memory, such as "512MiB"
            (None: automatic). A `logits_dtype` is refused.

    >>> import torch
    >>> weight, input = torch.randn(11, 4, requires_grad=True), torch.randn(2, 3, 4)
    >>> teacher_weight, teacher_input = torch.randn(11, 6), torch.randn(2, 3, 6)
    >>> loss, metrics = LigerFusedLinearKLDivLoss(weight_soft_loss=1.0)(weight, input, teacher_weight, teacher_input)
    >>> log_p, log_q = (input @ weight.T).log_softmax(-1), (teacher_input @ teacher_weight.T).log_softmax(-1)
    >>> expected = torch.nn.functional.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1).mean()
    >>> bool(torch.isclose(loss, expected))
    True
    """

    of_distributions: ClassVar[bool] = True

    def __init__(self, *, reverse: bool = False, skew: float = 0.0, **options: Unpack[DistillationOptionsDict]) -> None:
        super().__init__(**options)
        check_number("skew", skew)
        if not 0.0 <= skew < 1.0:
            raise ValueError(f"skew must be in [0, 1), got {skew}")
        self.reverse = reverse
        self.skew = skew

    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        log_p, log_q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        first, second = (log_p, log_q) if self.reverse else (log_q, log_p)
        return kl(first, log_mixture(second, first, self.skew) if self.skew else second)

    def closed_form(self) -> Divergence:
        if not self.skew:
            return Divergence("reverse_kl" if self.reverse else "forward_kl")
        if self.reverse:
            return Divergence("mixture", beta=1.0 - self.skew, on_student=1.0)
        return Divergence("mixture", beta=self.skew, on_teacher=1.0)

    def extra_repr(self) -> str:
        return f"reverse={self.reverse}, skew={self.skew}, {super().extra_repr()}"
