"""Losses on logits and probabilities, and the fused cross entropy and JSD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from liger_chunked import losses, modules
from liger_chunked.calls import typed_like
from liger_chunked.compat.settings import Loss
from liger_chunked.compat.unsupported import refuse
from liger_chunked.kernels.logits_stats import row_stats
from liger_chunked.kernels.operands import check_floating, check_labels, check_like
from liger_chunked.losses.formulas import kl, log_mixture
from liger_chunked.types import LogitOptions, accumulation_dtype


@dataclass(frozen=True)
class CrossEntropyOutput:
    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class LigerCrossEntropyLoss(Loss):
    """`liger_chunked.LigerCrossEntropyLoss`, in the dtype of the logits, which are not overwritten."""

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Literal["mean", "sum", "none"] = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.loss = modules.LigerCrossEntropyLoss(
            weight,
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
        )

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        loss = self.loss(_input, target).to(_input.dtype)
        if not (self.return_z_loss or self.return_token_accuracy or self.return_predicted_tokens):
            return loss
        z_loss, accuracy, predicted = self._metrics(_input.detach(), target)
        return CrossEntropyOutput(
            loss,
            z_loss.to(_input.dtype) if self.return_z_loss else None,
            accuracy if self.return_token_accuracy else None,
            predicted if self.return_predicted_tokens else None,
        )

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def _metrics(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        options, valid = LogitOptions(softcap=self.softcap), target != self.ignore_index
        stats = row_stats(logits, target.where(valid, 0).long(), options, ("lse", "argmax"))[1]
        assert stats.lse is not None and stats.argmax is not None
        z_loss = (self.lse_square_scale * stats.lse.square()).where(valid, 0.0)
        predicted = stats.argmax.where(valid, -1)
        correct = (predicted == target).where(valid, False).to(stats.lse.dtype)
        if self.reduction == "none":
            return z_loss, correct, predicted
        n = valid.sum().clamp(min=1)
        return z_loss.sum() / (n if self.reduction == "mean" else 1), correct.sum() / n, predicted


class LigerFusedLinearCrossEntropyLoss(Loss):
    """`losses.LigerFusedLinearCrossEntropyLoss`; `use_token_scaling` is `dft`."""

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        if use_token_scaling:
            refuse("label_smoothing", label_smoothing, "use_token_scaling scales the cross entropy alone")
            refuse("lse_square_scale", lse_square_scale, "use_token_scaling scales the cross entropy alone")
        self.returns_output = return_z_loss or return_token_accuracy or return_predicted_tokens
        # "none" has an accuracy for each token, from the predictions.
        self.accuracy_by_token = return_token_accuracy and reduction == "none"
        self.loss: Any = losses.LigerFusedLinearCrossEntropyLoss(
            ce_weight=ce_weight,
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            dft=use_token_scaling,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy and not self.accuracy_by_token,
            return_predicted_tokens=return_predicted_tokens or self.accuracy_by_token,
        )

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        result = self.loss(lin_weight, _input, target, bias)
        if not self.returns_output:
            return result
        loss, (z_loss, accuracy, predicted) = result
        if self.accuracy_by_token:
            accuracy = ((predicted == target) & (target != self.ignore_index)).to(loss.dtype)
        z_loss = None if z_loss is None else z_loss.to(_input.dtype)
        return CrossEntropyOutput(loss, z_loss, accuracy, predicted if self.return_predicted_tokens else None)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerFusedLinearJSD(Loss):
    """`losses.LigerFusedLinearJSDLoss` without a hard loss."""

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.loss = losses.LigerFusedLinearJSDLoss(
            beta=jsd_beta, temperature=temperature, weight_hard_loss=0.0, weight_soft_loss=1.0
        )

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the mean over tokens not labelled `ignore_index`."""
        if teacher_weight.shape[0] > student_weight.shape[0]:
            raise NotImplementedError(
                f"teacher_weight {tuple(teacher_weight.shape)} with more rows than student_weight "
                f"{tuple(student_weight.shape)} is not supported: cut teacher_weight, or use LigerFusedLinearJSDLoss"
            )
        mask = None if shift_labels is None else shift_labels != self.ignore_index
        loss, _ = self.loss(student_weight, student_input, teacher_weight, teacher_input, mask=mask)
        return loss

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


Reduction: TypeAlias = Literal["none", "sum", "mean", "batchmean"]


def _pair(
    student: Tensor, teacher: Tensor, labels: Tensor | None, ignore_index: int, nothing: float
) -> tuple[Tensor, Tensor, Any]:
    """Return both (N, V) in float32 or float64, `nothing` in ignored rows, and how many rows count."""
    check_floating(student, "the student", 2)
    check_labels(labels, student, "the student")
    dtype = accumulation_dtype(torch.promote_types(student.dtype, teacher.dtype))
    student, teacher = student.to(dtype), teacher.detach().to(dtype)
    check_like(teacher, "the teacher", student, "the student")
    if labels is None:
        return student, teacher, max(1, student.shape[0])
    ignored = labels == ignore_index
    student, teacher = (x.masked_fill(ignored[:, None], nothing) for x in (student, teacher))
    return student, teacher, (~ignored).sum().clamp(min=1)


def _reduced(terms: Tensor, rows: Any, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return terms
    divisors = {"sum": 1, "batchmean": rows, "mean": rows * terms.shape[1]}
    return terms.sum() / divisors[reduction]


class LigerJSD(Loss):
    """Mean over rows of `beta KL(p || m) + (1 - beta) KL(q || m)`, with `m = beta p + (1 - beta) q`, in PyTorch."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        q, p, rows = _pair(log_q, log_p, shift_labels, self.ignore_index, nothing=-torch.inf)
        if self.beta in (0.0, 1.0):
            of_rows = kl(p, q) if self.beta == 0.0 else kl(q, p)
        else:
            m = log_mixture(q, p, self.beta)
            of_rows = self.beta * kl(p, m) + (1.0 - self.beta) * kl(q, m)
        return (of_rows.sum() / rows).to(log_q.dtype)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerTVDLoss(Loss):
    """Total variation distance `sum_v |p_v - q_v|/2` of each row, in PyTorch."""

    def __init__(self, reduction: Reduction = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        p, q, rows = _pair(p, q, shift_labels, self.ignore_index, nothing=0.0)
        return _reduced(0.5 * (p - q).abs(), rows, self.reduction)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerKLDIVLoss(Loss):
    """`F.kl_div` with `eps` as the least target in `log`, where `0 log 0` is 0, in PyTorch."""

    def __init__(
        self,
        eps: float = 1e-10,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: Reduction = "mean",
        log_target: bool = False,
    ) -> None:
        super().__init__()
        # The deprecated pair, if given, chooses the reduction.
        self.chosen: Any = nn.KLDivLoss(size_average, reduce, reduction).reduction

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        log_q, target, rows = _pair(y_pred, y_true, None, 0, nothing=0.0)
        p = target.exp() if self.log_target else target
        log_p = target if self.log_target else target.clamp(min=self.eps).log()
        return _reduced(p * (log_p - log_q).masked_fill(p == 0, 0.0), rows, self.chosen)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
