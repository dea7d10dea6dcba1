"""Universal logit distillation (https://arxiv.org/abs/2402.12030): sorted probabilities, so vocabularies may differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from liger_chunked.calls import entry_point, typed_like
from liger_chunked.engine import (
    LossWeights,
    Ranked,
    Teacher,
    all_rows,
    check_projection,
    compute_dtype,
    distillation_loss,
    run_step,
    select_rows,
)
from liger_chunked.losses.base import FusedLoss
from liger_chunked.losses.settings import checked_items, options_of_teacher
from liger_chunked.types import (
    DistillationMetrics,
    LogitOptions,
    LogitOptionsDict,
    LossHead,
    VocabShard,
    Weight,
    accumulation_dtype,
    described,
)


class LigerFusedLinearULDLoss(FusedLoss):
    """Universal logit distillation (Boizard et al. 2024, https://arxiv.org/abs/2402.12030, equation 3), fused.

    The Wasserstein-1 distance of sorted probabilities of student and teacher, whose vocabularies may differ. With `p`
    and `q`, sorted in descending order and padded with zeros, a token costs

        sum(|scale * p - teacher_scale * q|)

    The loss is the mean over rows. docs/reference/distillation.md says how to align rows, and what the scales are for.

    Args:
        teacher_options: `LogitOptions` with the teacher's `softcap`, `logit_scale` and `temperature`. None: the
            student's.
        **options: fields of `LogitOptions`: `softcap`, `logit_scale` and `temperature` transform the logits;
            `logits_budget` is the most bytes of both models' logits in memory, such as "512MiB" (None: automatic).
            `ignore_index` is refused, and by a call a `logits_dtype`.

    >>> import torch
    >>> weight, input = torch.randn(11, 4), torch.randn(3, 4)
    >>> teacher_weight, teacher_input = torch.randn(17, 6), torch.randn(3, 6)
    >>> loss, metrics = LigerFusedLinearULDLoss()(weight, input, teacher_weight, teacher_input)
    >>> p = (input @ weight.T).softmax(-1).sort(descending=True).values
    >>> q = (teacher_input @ teacher_weight.T).softmax(-1).sort(descending=True).values
    >>> expected = (torch.nn.functional.pad(p, (0, 6)) - q).abs().sum(-1).mean()
    >>> bool(torch.isclose(loss, expected))
    True
    """

    _sorts_rows: ClassVar[bool] = True

    def __init__(self, *, teacher_options: LogitOptions | None = None, **options: Unpack[LogitOptionsDict]) -> None:
        super().__init__()
        self.options = LogitOptions.of(type(self), options)
        if self.options.ignore_index != LogitOptions().ignore_index:
            raise ValueError(
                f"ignore_index={self.options.ignore_index} is not read: this loss has no target, pass mask to leave "
                "positions out"
            )
        self.teacher_options = options_of_teacher(teacher_options, self.options)

    @entry_point
    def forward(
        self,
        weight: Weight,
        input: Tensor,
        teacher_weight: Weight,
        teacher_input: Tensor,
        bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        *,
        scale: Tensor | None = None,
        teacher_scale: Tensor | None = None,
        mask: Tensor | None = None,
        num_items: float | Tensor | None = None,
        vocab_shard: VocabShard | None = None,
    ) -> tuple[Tensor, DistillationMetrics]:
        """Return loss and metrics.

        Args:
            weight: (V, H), the student's head, such as `lm_head.weight`, or an `AdaptedWeight`.
            input: (B, T, H) or (N, H), the student's hidden states in the dtype of `weight`, or in any under autocast.
            teacher_weight, teacher_input, teacher_bias: (V_teacher, H_teacher) or an `AdaptedWeight`, (B, T, H_teacher)
                or (N, H_teacher), and (V_teacher,): rows aligned with those of `input`. Without gradient. None: no
                bias.
            bias: (V,) or None.
            scale, teacher_scale: (B, T) or (N,), factors of the probabilities, at least 0; None: 1. `scale` may have a
                gradient.
            mask: (B, T) or (N,) bool, False at rows to ignore. None: all rows count.
            num_items: divisor of the sum, a number or (). None: the rows that count.
            vocab_shard: must be None, because ranks cannot sort one vocabulary together.

        Returns:
            (loss, metrics): the loss (), float32, or float64 for float64 inputs, and `DistillationMetrics`.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: shapes, devices, target ids or options do not fit. The message says what was expected and found.
        """
        if vocab_shard is not None:
            raise ValueError(f"{type(self).__name__} sorts whole rows of logits, got vocab_shard: gather the weights")
        head = check_projection(LossHead(weight, bias), input)
        check_projection(LossHead(teacher_weight, teacher_bias), teacher_input, "teacher_")
        shape = tuple(input.shape[:-1])
        if tuple(teacher_input.shape[:-1]) != shape or teacher_input.device != input.device:
            raise ValueError(
                f"teacher_input must be {(*shape, 'H_teacher')} on {input.device}, a row for each of input, got "
                f"{described(teacher_input)}"
            )
        if mask is None:
            rows = all_rows(shape)
        else:
            _check_rows("mask", mask, shape, input, mask.dtype == torch.bool if isinstance(mask, Tensor) else False)
            rows = select_rows(mask.long() - 1, "token", -1, head.vocab_size)
        every = slice(0, rows.n_valid)
        dtype = compute_dtype(head, input)

        def side(name: str, x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            _check_rows(name, x, shape, input, isinstance(x, Tensor) and x.is_floating_point())
            return rows.take(rows.fill_ignored(x.reshape(-1), 1.0)[:, None], every)[:, 0]

        own, of_teacher = side("scale", scale), side("teacher_scale", teacher_scale)
        route = Ranked(
            self.options,
            self.teacher_options,
            teacher_weight.shape[0] / weight.shape[0],
            None if own is None else own.detach(),
            None if of_teacher is None else of_teacher.detach(),
        )
        wide = accumulation_dtype(weight.dtype)
        n_items = rows.divisor(wide) if num_items is None else checked_items(num_items, input, wide)
        teacher = Teacher.of(
            LossHead(teacher_weight.detach(), None if teacher_bias is None else teacher_bias.detach()),
            teacher_input.detach(),
            self.teacher_options,
        )
        weights = LossWeights(1.0 / n_items, None)
        fused = distillation_loss(head, dtype, teacher, rows, weights, route, self.options, has_target=False)
        loss, values = run_step(fused.step, head, input)
        distance, by_scale = values.divergence, values.by_scale
        if own is not None and own.requires_grad and by_scale is not None:
            # Zero, with the gradient by the scale.
            loss = loss + (by_scale * (own - own.detach())).sum().to(loss.dtype) / n_items
        soft_loss = distance.sum() / n_items
        return loss, DistillationMetrics(soft_loss, torch.zeros_like(soft_loss))

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def extra_repr(self) -> str:
        own = "" if self.teacher_options is self.options else f", teacher_options={self.teacher_options}"
        return f"{self.options}{own}"


def _check_rows(name: str, x: Any, rows: tuple[int, ...], input: Tensor, right_dtype: bool) -> None:
    expected = "bool" if name == "mask" else "floating-point"
    if not right_dtype:
        raise TypeError(f"{name} must be a {expected} tensor, got {described(x)}")
    if tuple(x.shape) != rows or x.device != input.device:
        raise ValueError(
            f"{name} must be {rows} on {input.device}, one value for each row of input, got {described(x)}"
        )
