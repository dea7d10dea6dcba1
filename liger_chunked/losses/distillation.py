"""The base of every loss that draws a student's `lm_head` distribution to a teacher's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from liger_chunked.engine import (
    ByAutograd,
    ClosedForm,
    FusedLoss,
    Group,
    Layout,
    Like,
    LossWeights,
    Returns,
    Teacher,
    TopK,
    along,
    check_projection,
    check_target,
    check_top_k,
    distillation_loss,
    lay_out,
    lay_out_every,
    loss_and,
    one_operation,
)
from liger_chunked.losses.checks import check_finite, checked_items
from liger_chunked.types import (
    DistillationMetrics,
    Divergence,
    Head,
    LogitOptions,
    LogitOptionsDict,
    accumulation_dtype,
)


class DistillationOptionsDict(LogitOptionsDict, total=False):
    """The keywords that every distillation loss takes; see `LigerFusedLinearDistillationBase`."""

    weight_hard_loss: float
    weight_soft_loss: float
    teacher_options: LogitOptions | None


class LigerFusedLinearDistillationBase(FusedLoss, ABC):
    """`weight_soft_loss` times the divergence of teacher and student, plus `weight_hard_loss` times the NLL.

    Equal, with both transforms applied and `n` the tokens that count, to

        z, t = transform(input @ weight.T + bias), transform(teacher_input @ teacher_weight.T + teacher_bias)
        soft_loss = divergence(z.float(), t.float()[:, :V]).sum() / n
        hard_loss = F.cross_entropy(z.float() * temperature, target, reduction="sum") / n

    A subclass says what the divergence of a token is, and nothing else; autograd differentiates it, chunk by chunk:

        class Logits(LigerFusedLinearDistillationBase):     # https://arxiv.org/abs/1312.6184
            def divergence(self, student_logits, teacher_logits):
                return (student_logits - teacher_logits).square().mean(-1)

    The temperature belongs to the divergence: both distributions are taken at it, and the hard loss at temperature 1.
    The soft loss is not multiplied by `temperature ** 2`, as Hinton et al. 2015 (https://arxiv.org/abs/1503.02531)
    propose, and neither TRL nor Liger-Kernel do; give that factor to `weight_soft_loss` where it is wanted. In 16 bits
    both losses are of logits that are rounded to these, as in eager code.

    Args:
        weight_hard_loss: of the NLL of the targets; without a target there is no hard loss.
        weight_soft_loss: of the divergence.
        teacher_options: the teacher's own transform, where it is not the student's; only its `softcap`, `logit_scale`
            and `temperature` may be set.
        **options: `ignore_index`, `softcap`, `logit_scale`, `temperature`, `logits_budget`, see `LogitOptions`. The
            budget is for the logits of both models, at least one token of each. By autograd it covers the float32
            copies too, and two more for what `divergence` keeps.

    Raises:
        ValueError: a bad option, a negative weight.

    Class attributes of a subclass:
        of_distributions: the divergence depends on the softmax of its arguments alone, so that it may be taken over the
            bins of a teacher's top-k.
    """

    of_distributions: ClassVar[bool] = False
    _group: ClassVar[Group] = "token"

    def __init__(
        self,
        *,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        teacher_options: LogitOptions | None = None,
        **options: Unpack[LogitOptionsDict],
    ) -> None:
        super().__init__()
        check_finite("weight_hard_loss", weight_hard_loss, minimum=0)
        check_finite("weight_soft_loss", weight_soft_loss, minimum=0)
        self.weight_hard_loss = weight_hard_loss
        self.weight_soft_loss = weight_soft_loss
        self.options = LogitOptions.of(type(self), options)
        self.teacher_options = self.options if teacher_options is None else teacher_options
        if teacher_options is not None:
            plain = LogitOptions()
            for name in ("ignore_index", "logits_budget"):
                if getattr(teacher_options, name) != getattr(plain, name):
                    raise ValueError(f"{name} belongs to the loss, not to teacher_options, got {teacher_options}")

    @abstractmethod
    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """The divergence of each token, (n,), from logits (n, V) after the transform, in float32 (float64 for float64).

        Called on a block of the batch's tokens at a time. Of a teacher's top-k, V is k + 1: log-probabilities of the k
        tokens and of all others together, -inf at entries that are not there.
        """

    def closed_form(self) -> Divergence | None:
        """The same divergence where the kernels know it; None: by autograd."""
        return None

    def _returns(self, given: Mapping[str, Any]) -> Returns:
        return loss_and(DistillationMetrics, dict.fromkeys(DistillationMetrics._fields, Like()), Like())

    @one_operation(_returns)
    def forward(
        self,
        weight: Tensor,
        input: Tensor,
        teacher_weight: Tensor | None = None,
        teacher_input: Tensor | None = None,
        target: Tensor | None = None,
        bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        *,
        teacher_logps: Tensor | None = None,
        teacher_ids: Tensor | None = None,
        mask: Tensor | None = None,
        num_items: float | Tensor | None = None,
    ) -> tuple[Tensor, DistillationMetrics]:
        """The loss and its metrics.

        The teacher comes as hidden states and a head, at one GEMM, or as its largest log-probabilities, at none. Of a
        head whose vocabulary is padded beyond the student's, the padding is left out, of its softmax too.

        Args:
            weight: (V, H), `lm_head.weight` of the student.
            input: (B, T, H) or (N, H) hidden states of the student.
            teacher_weight: (V or more, H_teacher).
            teacher_input: (B, T, H_teacher) or (N, H_teacher).
            target: (B, T) or (N,) token ids, `target[t]` is what `input[t]` predicts; tokens with `ignore_index` do not
                count, in either loss. None: no hard loss. Labels that are not shifted train silently to a hard loss
                near 0, see `shifted`.
            bias, teacher_bias: (V,), (V or more,), or None.
            teacher_logps: (B, T, k) or (N, k) log-probabilities of k tokens in nats, at the temperature of the loss,
                -inf for an entry that is not there. The divergence is one of k + 1 bins: these, and all other tokens.
            teacher_ids: (B, T, k) or (N, k) these tokens, distinct.
            mask: (B, T) or (N,) bool, True at the tokens that count; with a target, those of them that have one.
            num_items: the sums over this batch are divided by this instead of by its own count of tokens: under
                gradient accumulation, the tokens of all its steps. In a tensor, less than 1 counts as 1.

        Raises:
            ValueError: a teacher that is missing, incomplete or given twice, a teacher vocabulary smaller than the
                student's, shapes or devices that do not fit, a token id out of range or twice among the teacher's.
            TypeError: dtypes that do not fit.
        """
        head = Head(weight, bias)
        check_projection(head, input)
        layout = self._layout(weight, input, target, mask)
        teacher = self._teacher(head, input, teacher_weight, teacher_input, teacher_bias, teacher_logps, teacher_ids)
        route = self._route(head, layout, teacher, teacher_logps, teacher_ids)
        n_items: float | Tensor = max(1, layout.n_valid)
        if num_items is not None:
            n_items = checked_items(num_items, input, accumulation_dtype(weight.dtype))
        hard = self.weight_hard_loss if target is not None else 0.0
        weights = LossWeights(self.weight_soft_loss / n_items, -hard / n_items if hard else None)
        loss, divergence, logps = distillation_loss(
            head, input, teacher, layout, weights, route, self.options, has_target=target is not None
        )
        soft_loss = divergence.sum() / n_items
        hard_loss = torch.zeros_like(soft_loss) if logps is None else -logps.sum() / n_items
        return loss, DistillationMetrics(soft_loss, hard_loss)

    def _layout(self, weight: Tensor, input: Tensor, target: Tensor | None, mask: Tensor | None) -> Layout:
        """The tokens that count; without a target they have targets that nobody reads."""
        shape = input.shape[:-1]
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
                raise TypeError(f"mask must be a bool tensor, got {got}")
            if mask.shape != shape or mask.device != input.device:
                raise ValueError(
                    f"mask must be {tuple(shape)} on {input.device}, one value for each row of input, "
                    f"got {tuple(mask.shape)} on {mask.device}"
                )
        if target is None:
            if mask is None:
                return lay_out_every(shape.numel())
            return lay_out(mask.long() - 1, self._group, -1, weight.shape[0])
        check_target(target, input, weight=weight)
        target = target.long()
        if mask is not None:
            target = target.where(mask, self.options.ignore_index)
        return lay_out(target, self._group, self.options.ignore_index, weight.shape[0])

    def _teacher(
        self,
        head: Head,
        input: Tensor,
        weight: Tensor | None,
        teacher_input: Tensor | None,
        bias: Tensor | None,
        teacher_logps: Tensor | None,
        teacher_ids: Tensor | None,
    ) -> Teacher | None:
        """The teacher over the student's vocabulary, or None where its top-k is given."""
        states = {"teacher_weight": weight, "teacher_input": teacher_input, "teacher_bias": bias}
        top_k = {"teacher_logps": teacher_logps, "teacher_ids": teacher_ids}
        given_states = [name for name, value in states.items() if value is not None]
        given_top_k = [name for name, value in top_k.items() if value is not None]
        if given_states and given_top_k:
            raise ValueError(
                f"the teacher is given twice: as {', '.join(given_states)} and as {', '.join(given_top_k)}"
            )
        if len(given_top_k) == 2:
            return None
        if weight is None or teacher_input is None:
            got = f"got only {', '.join(given_states + given_top_k)}" if given_states + given_top_k else "got none"
            raise ValueError(
                f"{type(self).__name__} needs a teacher: pass teacher_weight and teacher_input, or teacher_logps and "
                f"teacher_ids, {got}"
            )
        check_projection(Head(weight, bias), teacher_input, "teacher_")
        if teacher_input.shape[:-1] != input.shape[:-1] or teacher_input.device != input.device:
            raise ValueError(
                f"teacher_input must be {(*input.shape[:-1], 'H_teacher')} on {input.device}, as input "
                f"{tuple(input.shape)} is, got {tuple(teacher_input.shape)} on {teacher_input.device}"
            )
        vocab_size = head.weight.shape[0]
        if weight.shape[0] < vocab_size:
            raise ValueError(
                f"teacher_weight must have at least the {vocab_size} rows of weight {tuple(head.weight.shape)}, "
                f"got {tuple(weight.shape)}"
            )
        shared = slice(0, vocab_size)
        cut = Head(along(weight.detach(), shared), None if bias is None else along(bias.detach(), shared))
        return Teacher(cut, teacher_input.detach(), self.teacher_options)

    def _route(
        self,
        head: Head,
        layout: Layout,
        teacher: Teacher | None,
        teacher_logps: Tensor | None,
        teacher_ids: Tensor | None,
    ) -> ClosedForm | ByAutograd | TopK:
        if teacher is None:
            assert teacher_logps is not None and teacher_ids is not None
            if not self.of_distributions:
                raise ValueError(
                    f"{type(self).__name__} needs the teacher's logits, got teacher_logps; a divergence that depends "
                    "on the softmax of its arguments alone says so by of_distributions = True"
                )
            if self.teacher_options is not self.options:
                raise ValueError("teacher_options are for teacher_input, got teacher_logps, which have no transform")
            logps, ids = _top_k(head, layout, teacher_logps, teacher_ids)
            return TopK(self.divergence, self.options, logps, ids)
        closed_form = self.closed_form()
        if closed_form is not None:
            return ClosedForm(closed_form, self.options, self.teacher_options)
        return ByAutograd(self.divergence, self.options, self.teacher_options)

    def extra_repr(self) -> str:
        weights = f"weight_hard_loss={self.weight_hard_loss}, weight_soft_loss={self.weight_soft_loss}"
        own = "" if self.teacher_options is self.options else f", teacher_options={self.teacher_options}"
        return f"{weights}, {self.options}{own}"


def _top_k(head: Head, layout: Layout, logps: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The teacher's top-k of the tokens that count, (n_valid, k) each, checked."""
    device, vocab_size = head.weight.device, head.weight.shape[0]
    if not isinstance(logps, Tensor) or not logps.is_floating_point():
        got = logps.dtype if isinstance(logps, Tensor) else type(logps).__name__
        raise TypeError(f"teacher_logps must be a floating-point tensor, got {got}")
    if not isinstance(ids, Tensor) or ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"teacher_ids must be a tensor of token ids (int64), got {got}")
    if logps.ndim < 2 or logps.shape[:-1].numel() != layout.mask.numel() or logps.shape[-1] == 0:
        raise ValueError(
            f"teacher_logps must be (B, T, k) or (N, k), k values for each of {layout.mask.numel()} rows of input, "
            f"got {tuple(logps.shape)}"
        )
    if ids.shape != logps.shape:
        raise ValueError(f"teacher_ids must be {tuple(logps.shape)}, as teacher_logps is, got {tuple(ids.shape)}")
    for name, x in (("teacher_logps", logps), ("teacher_ids", ids)):
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, weight on {device}: expected one device")
    k, every = logps.shape[-1], slice(0, layout.n_valid)
    logps = layout.input_rows(logps.detach().reshape(-1, k), every)
    ids = layout.input_rows(ids.reshape(-1, k), every).long()
    if ids.numel() == 0:
        return logps, ids

    check_top_k(logps, ids, vocab_size)
    return logps, ids
