"""The base of losses that compare the logits of a student and a teacher, token by token, beside a hard cross entropy.

They have a loop of their own in the engine, because a divergence needs whole rows of both heads' logits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from liger_chunked.calls import check_constants, entry_point, typed_like
from liger_chunked.engine import (
    ByAutograd,
    ClosedForm,
    Distillation,
    Group,
    LossWeights,
    Rows,
    SequenceSplit,
    Teacher,
    TopK,
    all_rows,
    along,
    check_projection,
    check_target,
    check_top_k,
    compute_dtype,
    distillation_loss,
    divergences_of_tokens,
    host_may_sync,
    on_this_rank,
    refuse_capture,
    run_step,
    select_rows,
    whole,
)
from liger_chunked.engine.checks import swapped
from liger_chunked.losses.base import FusedLoss
from liger_chunked.losses.settings import check_finite, checked_items, options_of_teacher
from liger_chunked.teachers import TopK as TeacherTopK
from liger_chunked.teachers import warn_without_tail
from liger_chunked.types import (
    DistillationMetrics,
    Divergence,
    LogitOptions,
    LogitOptionsDict,
    LossHead,
    ProcessGroup,
    VocabShard,
    Weight,
    accumulation_dtype,
    shown,
)

_REDUCTIONS = ("mean", "none")


class DistillationOptionsDict(LogitOptionsDict, total=False):
    weight_hard_loss: float
    weight_soft_loss: float
    reduction: str
    teacher_options: LogitOptions | None


class _Given(NamedTuple):
    teacher_weight: Weight | None
    teacher_input: Tensor | None
    teacher_bias: Tensor | None
    teacher_logps: Tensor | None
    teacher_ids: Tensor | None
    renormalizes: bool = False  # the softmaxes over the top k, `TopK.tail`


def _check_unread(loss: Any, name: str) -> None:
    for attribute in ("token_outputs", "scope"):
        if hasattr(loss, attribute):
            raise ValueError(
                f"{name}.{attribute} is not read, got {getattr(loss, attribute)!r}: `divergence` gets the logits of "
                "tokens, each for itself"
            )


class LigerFusedLinearDistillationBase(FusedLoss, ABC):
    """The base of distillation losses; see `docs/writing-a-loss.md`.

    Equal, for `n` tokens that count, to

        z, t = transform(input @ weight.T + bias), transform(teacher_input @ teacher_weight.T + teacher_bias)
        soft_loss = divergence(z.float(), t.float()[:, :V]).sum() / n
        hard_loss = F.cross_entropy(z.float() * temperature, target, reduction="sum") / n
        loss = weight_soft_loss * soft_loss + weight_hard_loss * hard_loss

    The factor `temperature ** 2` of Hinton et al. 2015 (https://arxiv.org/abs/1503.02531) is the caller's.

    Args:
        weight_hard_loss: factor of the targets' NLL at temperature 1, not negative.
        weight_soft_loss: factor of the divergence, not negative.
        reduction: "mean" over the tokens that count, or "none": loss and metrics have a value for each token, in the
            shape of the target, 0 where it is ignored, and the backward projects both models once more.
        teacher_options: `LogitOptions` with the teacher's `softcap`, `logit_scale` and `temperature`. None: the
            student's.
        **options: fields of `LogitOptions`: `ignore_index` (-100) marks targets to skip; `softcap`, `logit_scale` and
            `temperature` transform the logits; `logits_budget` is the most bytes of both models' logits in memory, such
            as "512MiB" (None: automatic). A `logits_dtype` is refused.
    """

    of_distributions: ClassVar[bool] = False
    _group: ClassVar[Group] = "token"

    def __init__(
        self,
        *,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        reduction: str = "mean",
        teacher_options: LogitOptions | None = None,
        **options: Unpack[LogitOptionsDict],
    ) -> None:
        super().__init__()
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction must be one of {_REDUCTIONS}, got {shown(reduction)}")
        check_finite("weight_hard_loss", weight_hard_loss, minimum=0)
        check_finite("weight_soft_loss", weight_soft_loss, minimum=0)
        self.weight_hard_loss = weight_hard_loss
        self.weight_soft_loss = weight_soft_loss
        self.reduction = reduction
        self.options = LogitOptions.of(type(self), options)
        if (wide := self.options.logits_dtype) is not None:
            raise ValueError(f"distillation rounds logits to the products' dtype, got logits_dtype={wide}")
        self.teacher_options = options_of_teacher(teacher_options, self.options)
        self._transforms_teacher = teacher_options is not None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_unread(cls, cls.__name__)

    def _check_after_init(self) -> None:
        super()._check_after_init()
        _check_unread(self, type(self).__name__)

    @abstractmethod
    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return divergences (n,) of transformed logits (n, V), or of log-probabilities (n, k + 1), -inf if missing."""

    def closed_form(self) -> Divergence | None:
        """Return the kernels' equivalent, or None for autograd."""
        return None

    @entry_point
    def forward(
        self,
        weight: Weight,
        input: Tensor,
        teacher_weight: Weight | None = None,
        teacher_input: Tensor | None = None,
        target: Tensor | None = None,
        bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        *,
        teacher_logps: Tensor | None = None,
        teacher_ids: Tensor | None = None,
        teacher: TeacherTopK | None = None,
        mask: Tensor | None = None,
        num_items: float | Tensor | None = None,
        vocab_shard: VocabShard | None = None,
        sequence_group: ProcessGroup | None = None,
    ) -> tuple[Tensor, DistillationMetrics]:
        """Return loss and metrics.

        Args:
            weight: (V, H), the student's head, such as `lm_head.weight`, or an `AdaptedWeight`.
            input: (B, T, H) or (N, H), the student's hidden states in the dtype of `weight`, or in any under autocast.
            teacher_weight, teacher_input, teacher_bias: (V_teacher, H_teacher) or an `AdaptedWeight`, (B, T, H_teacher)
                or (N, H_teacher), and (V_teacher,). The softmax ignores rows beyond V. Without gradient. None: no bias,
                or `teacher_logps` and `teacher_ids` are given.
            target: (B, T) or (N,), integer ids of the tokens that `input` predicts (shift labels, see `shifted`), or
                `ignore_index`. None: all tokens count, and there is no hard loss.
            bias: (V,) or None.
            teacher_logps: instead of hidden states, (B, T, k) or (N, k) log-probabilities of k tokens in nats, at the
                loss's temperature; -inf if missing. The divergence has k + 1 bins: these tokens, and all others. None:
                computed from `teacher_input`.
            teacher_ids: their ids, integers (B, T, k) or (N, k), distinct in each row. None: there are no
                `teacher_logps`.
            teacher: a `TopK` in place of `teacher_logps` and `teacher_ids`, which states their temperature and what
                becomes of all other tokens. A loss at another temperature refuses it. None: the teacher is given
                otherwise.
            mask: (B, T) or (N,) bool, False at more ignored tokens. None: none.
            num_items: divisor of both terms, a number or (): the tokens that count in all steps that accumulate
                gradients. None: those of this call. Refused with `reduction="none"`.
            vocab_shard: this rank's rows of both models' heads, if ranks split the vocabulary (`docs/distributed.md`).
                None: this rank has the whole vocabulary.
            sequence_group: the ranks that split the sequences (`docs/distributed.md`); each passes its positions. Loss
                and metrics are those of whole sequences; with `reduction="none"`, of this rank's positions. None: this
                rank has whole sequences.

        Returns:
            (loss, metrics): the loss (), float32, or float64 for float64 inputs, and `DistillationMetrics`. With
            `reduction="none"`, all are (B, T) or (N,).

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: shapes, devices, target ids or options do not fit. The message says what was expected and found.
        """
        head = check_projection(LossHead(weight, bias, vocab_shard), input)
        given = _Given(teacher_weight, teacher_input, teacher_bias, teacher_logps, teacher_ids)
        if teacher is not None:
            given = self._given_top_k(given, teacher)
        if vocab_shard is not None and given.teacher_ids is not None:
            refuse_capture(input, "teacher_ids with vocab_shard")  # ranks find their own ids
        by_token = self.reduction == "none"
        if by_token and num_items is not None:
            raise ValueError("num_items divides a mean, but reduction is 'none'")
        split = None if by_token else SequenceSplit.of(sequence_group, head, input)
        rows = self._rows(head, input, target, mask, split)
        teacher_head = self._teacher(head, input, given)
        route = (
            self._route_of_top_k(head, on_this_rank(rows), given)
            if teacher_head is None
            else self._route_of_logits(vocab_shard)
        )
        wide = accumulation_dtype(weight.dtype)
        n_items = rows.divisor(wide) if num_items is None else checked_items(num_items, input, wide)
        hard = self.weight_hard_loss if target is not None else 0.0
        if not by_token:  # else autograd differentiates by them
            check_constants(
                type(self).__name__, [("weight_soft_loss", self.weight_soft_loss), ("weight_hard_loss", hard)]
            )
        weights = LossWeights(self.weight_soft_loss / n_items, -hard / n_items if hard else None)
        dtype, has_target = compute_dtype(head, input), target is not None
        fused = distillation_loss(head, dtype, teacher_head, rows, weights, route, self.options, has_target)
        if by_token:
            return self._per_token(fused, head, input, hard)
        loss, values = run_step(fused.step, head, input)
        divergence, logps = values.divergence, values.logps
        soft_loss = divergence.sum() / n_items
        hard_loss = torch.zeros_like(soft_loss) if logps is None else -logps.sum() / n_items
        return loss, DistillationMetrics(soft_loss, hard_loss)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def _per_token(
        self, fused: Distillation, head: LossHead, input: Tensor, hard: float
    ) -> tuple[Tensor, DistillationMetrics]:
        divergence, logps = divergences_of_tokens(fused, head, input)
        shape, wide = head.token_shape(input), accumulation_dtype(fused.plan.dtype)
        soft_loss = divergence.to(wide).view(shape)
        hard_loss = torch.zeros_like(soft_loss) if logps is None else -logps.view(shape)
        loss = self.weight_soft_loss * soft_loss
        if hard:
            loss = loss + hard * hard_loss
        return loss, DistillationMetrics(soft_loss.detach(), hard_loss.detach())

    def _rows(
        self,
        head: LossHead,
        input: Tensor,
        target: Tensor | None,
        mask: Tensor | None,
        split: SequenceSplit | None,
    ) -> Rows:
        shape = head.token_shape(input)
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
                raise TypeError(f"mask must be a bool tensor, got {got}")
            if mask.shape != shape or mask.device != input.device:
                raise ValueError(
                    f"mask must be {shape} on {input.device}, one value for each row of input, "
                    f"got {tuple(mask.shape)} on {mask.device}"
                )
        if target is None:
            if mask is None:
                return all_rows(shape, split)
            kept = whole(mask.long() - 1, split)
            return select_rows(kept, self._group, -1, head.vocab_size, sequences=split)
        check_target(target, input, head=head)
        target = target.long()
        if mask is not None:
            target = target.where(mask, self.options.ignore_index)
        ignore_index = self.options.ignore_index
        return select_rows(whole(target, split), self._group, ignore_index, head.vocab_size, sequences=split)

    def _teacher(self, head: LossHead, input: Tensor, given: _Given) -> Teacher | None:
        """Return the teacher's V rows, or None for a top-k."""
        weight, teacher_input, bias, *_ = given
        given_states = [name for name, value in zip(given._fields[:3], given[:3], strict=True) if value is not None]
        given_top_k = [name for name, value in zip(given._fields[3:5], given[3:5], strict=True) if value is not None]
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
                f"teacher_ids, or teacher=TopK(...), {got}"
            )
        check_projection(LossHead(weight, bias, head.shard), teacher_input, "teacher_")
        if teacher_input.shape[:-1] != input.shape[:-1] or teacher_input.device != input.device:
            raise ValueError(
                f"teacher_input must be {(*input.shape[:-1], 'H_teacher')} on {input.device}, as input "
                f"{tuple(input.shape)} is, got {tuple(teacher_input.shape)} on {teacher_input.device}"
                f"{swapped('teacher_') if weight.shape[:1] == input.shape[:-1] else ''}"
            )
        vocab_size = head.columns
        if weight.shape[0] < vocab_size:
            raise ValueError(
                f"teacher_weight must have at least the {vocab_size} rows of weight {tuple(head.weight.shape)}, "
                f"got {tuple(weight.shape)}"
            )
        weight, shared = weight.detach(), slice(0, vocab_size)
        if weight.shape[0] > vocab_size:
            weight = weight[shared]
        cut = LossHead(weight, None if bias is None else along(bias.detach(), shared), head.shard)
        return Teacher.of(cut, teacher_input.detach(), self.teacher_options)

    def _given_top_k(self, given: _Given, teacher: TeacherTopK) -> _Given:
        """Return the arguments with those of `teacher`."""
        if not isinstance(teacher, TeacherTopK):
            raise TypeError(f"teacher must be a TopK(ids, logps, temperature=...) or None, got {shown(teacher)}")
        if names := [name for name, value in zip(given._fields[:5], given[:5], strict=True) if value is not None]:
            raise ValueError(f"the teacher is given twice: as teacher=TopK(...) and as {', '.join(names)}")
        if teacher.temperature != self.options.temperature:
            raise ValueError(
                f"teacher has log-probabilities at temperature {teacher.temperature}, the loss has "
                f"temperature={self.options.temperature}: compute the top k at the loss's temperature, because a top k "
                "does not determine the softmax at another one"
            )
        return given._replace(
            teacher_logps=teacher.logps, teacher_ids=teacher.ids, renormalizes=teacher.tail == "renormalize"
        )

    def _without_tail(self, student_logps: Tensor, teacher_logps: Tensor) -> Tensor:
        """Return the divergence of the k tokens alone. It takes softmaxes, so this renormalizes them."""
        return self.divergence(student_logps[:, :-1], teacher_logps[:, :-1])

    def _route_of_logits(self, shard: VocabShard | None = None) -> ClosedForm | ByAutograd:
        closed_form = self.closed_form()
        if closed_form is not None:
            return ClosedForm(closed_form, self.options, self.teacher_options, shard)
        if shard is not None:
            raise ValueError(
                f"{type(self).__name__}.divergence needs whole rows of logits, got vocab_shard: gather the weights, or "
                "return a Divergence from closed_form"
            )
        return ByAutograd(self.divergence, self.options, self.teacher_options)

    def _route_of_top_k(self, head: LossHead, rows: Rows, given: _Given) -> TopK:
        if not self.of_distributions:
            raise ValueError(
                f"{type(self).__name__} needs the teacher's logits, got teacher_logps: set of_distributions = True "
                "if the divergence depends only on the softmax of its arguments"
            )
        if self._transforms_teacher:
            raise ValueError("teacher_options are for teacher_input, got teacher_logps, which have no transform")
        logps, ids = _top_k(head, rows, given)
        divergence = self._without_tail if given.renormalizes else self.divergence
        return TopK(divergence, self.options, logps, ids, head.shard)

    def extra_repr(self) -> str:
        weights = f"weight_hard_loss={self.weight_hard_loss}, weight_soft_loss={self.weight_soft_loss}"
        weights += f", reduction={self.reduction!r}"
        own = f", teacher_options={self.teacher_options}" if self._transforms_teacher else ""
        return f"{weights}, {self.options}{own}"


def _top_k(head: LossHead, rows: Rows, given: _Given) -> tuple[Tensor, Tensor]:
    """Return the valid tokens' checked top-k, (n_valid, k) each."""
    logps, ids = given.teacher_logps, given.teacher_ids
    device, vocab_size = head.weight.device, head.vocab_size
    if not isinstance(logps, Tensor) or not logps.is_floating_point():
        got = logps.dtype if isinstance(logps, Tensor) else type(logps).__name__
        raise TypeError(f"teacher_logps must be a floating-point tensor, got {got}")
    if not isinstance(ids, Tensor) or ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"teacher_ids must be a tensor of token ids (int64), got {got}")
    if logps.ndim < 2 or logps.shape[:-1].numel() != rows.n_positions or logps.shape[-1] == 0:
        raise ValueError(
            f"teacher_logps must be (B, T, k) or (N, k), k values for each of {rows.n_positions} rows of input, "
            f"got {tuple(logps.shape)}"
        )
    if ids.shape != logps.shape:
        raise ValueError(f"teacher_ids must be {tuple(logps.shape)}, as teacher_logps is, got {tuple(ids.shape)}")
    for name, x in (("teacher_logps", logps), ("teacher_ids", ids)):
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, weight on {device}: expected one device")
    k, every = logps.shape[-1], slice(0, rows.n_valid)
    logps = rows.take(rows.fill_ignored(logps.detach().reshape(-1, k), -math.log(2 * k)), every)
    ids = rows.take(rows.fill_ignored(ids.reshape(-1, k)), every).long()
    if ids.numel():
        check_top_k(logps, ids, vocab_size)
        if not given.renormalizes and host_may_sync(logps):
            warn_without_tail(logps, vocab_size)
    return logps, ids
