"""Distil a draft for speculative decoding from its teacher's hidden states (EAGLE-3, https://arxiv.org/abs/2503.01840).

Of the logits, only those of a tile are in memory: the draft's over its tokens, the teacher's over all of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from liger_chunked.calls import entry_point, typed_like
from liger_chunked.engine import (
    DraftDivergence,
    LossWeights,
    Rows,
    SharedRows,
    Teacher,
    all_rows,
    check_projection,
    compute_dtype,
    distillation_loss,
    host_may_sync,
    refuse_capture,
    run_step,
    select_rows,
)
from liger_chunked.losses.base import FusedLoss
from liger_chunked.losses.settings import check_finite, checked_items, options_of_teacher
from liger_chunked.shapes import shapes_only
from liger_chunked.types import (
    Divergence,
    DraftMetrics,
    LogitOptions,
    LogitOptionsDict,
    LossHead,
    Weight,
    accumulation_dtype,
    check_number,
    described,
    shown,
)

DraftDivergenceName = Literal["kl", "reverse_kl", "jsd", "tvd", "log_acceptance"]


class LigerFusedLinearDraftLoss(FusedLoss):
    """The divergence of a draft from the model that it drafts for, its teacher, fused.

    With `p = softmax(t)` of the teacher's logits over all its tokens, and `q = softmax(z)` of the draft's over
    `draft_ids`, 0 elsewhere, a row costs

        "kl"               sum over draft_ids of p log(p / q)          its gradient is that of KL(p || q)
        "reverse_kl"       sum(q log(q / p))
        "jsd"              beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q
        "tvd"              sum(|p - q|) / 2 = 1 - accepted mass
        "log_acceptance"   -log(accepted mass)

    The accepted mass `sum(min(p, q))` is the probability that speculative sampling accepts a token of the draft
    (Leviathan et al. 2022, https://arxiv.org/abs/2211.17192). The loss of K steps is, with `n_k` rows of step `k`,

        sum over k of step_decay ** k * sum(position_weight * cost) / n_k

    Args:
        draft_ids: (V_draft,) distinct integers, the teacher's token of each of the draft's: `d2t + arange(V_draft)`, or
            `t2d.nonzero()`, of EAGLE-3's tables. None: the first V_draft tokens of the teacher, and `p` is over these.
        divergence: "kl", "reverse_kl", "jsd", "tvd" or "log_acceptance".
        beta: of "jsd", the weight of the teacher in the mixture, in (0, 1). None: 0.5.
        renormalize: whether `p` is renormalised over `draft_ids`, as EAGLE-3's target is.
        skip_outside: whether rows whose most likely token of the teacher is not in `draft_ids` cost 0, as EAGLE-3's
            position mask has it. They still count in `n_k` and in metrics.
        step_decay: weight of each step relative to the step before, positive.
        teacher_options: `LogitOptions` with the teacher's `softcap`, `logit_scale` and `temperature`. None: the
            draft's.
        **options: fields of `LogitOptions`: `softcap`, `logit_scale` and `temperature` transform the logits;
            `logits_budget` is the most bytes of both models' logits in memory, such as "512MiB" (None: automatic).
            `ignore_index` and `logits_dtype` are refused.

    >>> import torch
    >>> weight, input = torch.randn(5, 4), torch.randn(1, 3, 4)  # one step
    >>> teacher_weight, teacher_input = torch.randn(11, 6), torch.randn(3, 6)
    >>> ids = torch.tensor([0, 2, 3, 7, 8])
    >>> loss, metrics = LigerFusedLinearDraftLoss(draft_ids=ids, divergence="tvd")(
    ...     weight, input, teacher_weight, teacher_input
    ... )
    >>> p, q = (teacher_input @ teacher_weight.T).softmax(-1), (input[0] @ weight.T).softmax(-1)
    >>> bool(torch.isclose(loss, 1 - torch.minimum(p[:, ids], q).sum(-1).mean()))
    True
    """

    draft_ids: Tensor | None

    def __init__(
        self,
        *,
        draft_ids: Tensor | None = None,
        divergence: DraftDivergenceName = "kl",
        beta: float | None = None,
        renormalize: bool = False,
        skip_outside: bool = False,
        step_decay: float = 1.0,
        teacher_options: LogitOptions | None = None,
        **options: Unpack[LogitOptionsDict],
    ) -> None:
        super().__init__()
        self.divergence: DraftDivergenceName = divergence
        self.beta = _checked_beta(divergence, beta)
        if draft_ids is None and (renormalize or skip_outside):
            given = "renormalize" if renormalize else "skip_outside"
            raise ValueError(f"{given}=True needs draft_ids: without them the draft has the tokens of the teacher")
        self.renormalize = renormalize
        self.skip_outside = skip_outside
        check_finite("step_decay", step_decay)
        if step_decay <= 0:
            raise ValueError(f"step_decay must be positive, got {step_decay}")
        self.step_decay = step_decay
        self.options = LogitOptions.of(type(self), options)
        for name in ("ignore_index", "logits_dtype"):
            if (value := getattr(self.options, name)) != getattr(LogitOptions(), name):
                raise ValueError(f"{name}={value} is not read by {type(self).__name__}: leave it out")
        self.teacher_options = options_of_teacher(teacher_options, self.options)
        ids, self._largest_id = _checked_ids(draft_ids)
        if ids is None:
            self.draft_ids = None
        else:  # a buffer, so that `loss.to(device)` moves it; of no checkpoint
            self.register_buffer("draft_ids", ids, persistent=False)

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
        teacher_rows: Tensor | None = None,
        mask: Tensor | None = None,
        position_weight: Tensor | None = None,
        num_items: float | Tensor | None = None,
    ) -> tuple[Tensor, DraftMetrics]:
        """Return loss and metrics.

        Args:
            weight: (V_draft, H), the draft's head, or an `AdaptedWeight`, whose low-rank term may be a bias that
                depends on the previous token: `AdaptedWeight(weight, up=w2, down=lambda _: w1[previous_ids])`.
            input: (K, B, T, H) or (K, N, H), the draft's hidden states of K steps, in the dtype of `weight`, or in any
                under autocast.
            teacher_weight, teacher_input, teacher_bias: (V_teacher, H_teacher) or an `AdaptedWeight`, (B, T, H_teacher)
                or (N, H_teacher), and (V_teacher,) or None. Without gradient. A row is projected once for all steps.
            bias: (V_draft,) or None.
            teacher_rows: (K, B, T) or (K, N) integers, the row of `teacher_input`, flattened, that each row of the
                draft is compared with; below 0: none, the row does not count. `teacher_input` may then have any number
                of rows. None: row `t` of step `k` is compared with row `t + k` of the same sequence, if there is one.
            mask: bool, False at rows that do not count: (K, B, T) or (K, N) like the draft's rows, or (B, T) or (N,)
                like the teacher's. None: all count.
            position_weight: (K, B, T) or (K, N), or (B, T) or (N,), as `mask`: factors of rows. None: 1.
            num_items: divisor of each step's sum, a number or (). None: `n_k`.

        Returns:
            (loss, metrics): the loss (), float32, or float64 for float64 inputs, and `DraftMetrics`.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: shapes, devices, ids or options do not fit. The message says what was expected and found.
        """
        if not isinstance(input, Tensor) or input.ndim not in (3, 4) or not input.shape[0]:
            raise ValueError(
                "input must be (K, B, T, H) or (K, N, H), the hidden states of K steps of the draft, such as "
                f"input[None] of one step, got {described(input)}"
            )
        head = check_projection(LossHead(weight, bias), input[0])
        teacher_head = self._teacher_head(head, input, LossHead(teacher_weight, teacher_bias), teacher_input)
        index = _teacher_index(input, teacher_input, teacher_rows)
        if mask is not None:
            mask = _by_row("mask", mask, input, teacher_input, index)
        if position_weight is not None:
            position_weight = _by_row("position_weight", position_weight, input, teacher_input, index)
        rows, shared = _select(input, index, mask)
        teacher = Teacher.of(teacher_head, teacher_input.detach(), self.teacher_options, shared)

        steps, dtype = input.shape[0], compute_dtype(head, input)
        wide = accumulation_dtype(dtype)

        def by_step(x: Tensor) -> Tensor:
            """Return (K, rows of a step) from compact values (n_valid,), 0 at rows that do not count."""
            return rows.fill_ignored(rows.to_dense(x.to(wide))).view(steps, -1)

        factors = counted = by_step(torch.ones(rows.n_valid, device=input.device))
        if position_weight is not None:
            factors = counted * position_weight.to(wide).view(steps, -1)
        n_rows = counted.sum(1).clamp(min=1)  # (K,)
        n_items = n_rows if num_items is None else checked_items(num_items, input, wide)
        decay = self.step_decay ** torch.arange(steps, dtype=wide, device=input.device)
        weights = LossWeights(rows.to_compact(((decay / n_items)[:, None] * factors).view(-1)), None)
        route = self._route(head, teacher_head, shared)
        fused = distillation_loss(head, dtype, teacher, rows, weights, route, self.options, has_target=False)
        loss, values = run_step(fused.step, head, input)

        accepted, agrees = by_step(values.accepted), by_step(values.agrees)
        return loss, DraftMetrics(
            step_losses=(factors * by_step(values.divergence)).sum(1) / n_items,
            acceptance=accepted.sum(1) / n_rows,
            top1_agreement=agrees.sum(1) / n_rows,
            acceptance_length=1 + accepted.cumprod(0).sum() / n_rows[0],
            greedy_acceptance_length=1 + agrees.cumprod(0).sum() / n_rows[0],
        )

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def _teacher_head(self, head: LossHead, input: Tensor, given: LossHead, teacher_input: Tensor) -> LossHead:
        """Return the teacher's head after checks, with the draft's tokens alone if there are no `draft_ids`."""
        check_projection(given, teacher_input, "teacher_")
        if teacher_input.device != input.device:
            raise ValueError(
                f"teacher_input is on {teacher_input.device}, input on {input.device}: expected one device"
            )
        n_draft, n_teacher, ids = head.weight.shape[0], given.weight.shape[0], self.draft_ids
        weight, bias = given.weight.detach(), None if given.bias is None else given.bias.detach()
        if ids is None:
            if n_teacher < n_draft:
                raise ValueError(
                    f"teacher_weight must have at least the {n_draft} rows of weight {tuple(head.weight.shape)}, got "
                    f"{tuple(weight.shape)}: pass draft_ids if the draft's tokens are not the teacher's first ones"
                )
            return LossHead(weight[:n_draft], None if bias is None else bias[:n_draft])
        if ids.shape[0] != n_draft:
            raise ValueError(f"draft_ids must have an id for each of the {n_draft} rows of weight, got {ids.shape[0]}")
        if self._largest_id >= n_teacher:
            raise ValueError(
                f"draft_ids holds {self._largest_id}, expected rows of teacher_weight, 0 to {n_teacher - 1}"
            )
        if ids.device != input.device:
            raise ValueError(
                f"draft_ids is on {ids.device}, input on {input.device}: move the loss, as in loss.to(input.device)"
            )
        return LossHead(weight, bias)

    def _route(self, head: LossHead, teacher_head: LossHead, shared: SharedRows | None) -> DraftDivergence:
        n_teacher, in_draft = teacher_head.weight.shape[0], None
        if self.skip_outside:
            assert self.draft_ids is not None
            in_draft = torch.zeros(n_teacher, dtype=torch.bool, device=self.draft_ids.device)
            in_draft.index_fill_(0, self.draft_ids, True)
        return DraftDivergence(
            divergence=_CLOSED_FORMS.get(self.divergence) or Divergence.jensen_shannon(self.beta),
            takes_log=self.divergence == "log_acceptance",
            options=self.options,
            teacher_options=self.teacher_options,
            draft_ids=self.draft_ids,
            in_draft=in_draft,
            renormalizes=self.renormalize,
            draft_columns=head.weight.shape[0],
            teacher_columns=n_teacher,
            shared=shared,
        )

    def extra_repr(self) -> str:
        ids = "" if self.draft_ids is None else f"draft_ids=({self.draft_ids.shape[0]},), "
        own = "" if self.teacher_options is self.options else f", teacher_options={self.teacher_options}"
        return (
            f"{ids}divergence={self.divergence!r}, renormalize={self.renormalize}, skip_outside={self.skip_outside}, "
            f"step_decay={self.step_decay}, {self.options}{own}"
        )


_CLOSED_FORMS = {
    "kl": Divergence("forward_kl"),
    "reverse_kl": Divergence("reverse_kl"),
    "tvd": Divergence("tvd"),
    "log_acceptance": Divergence("tvd"),
}


def _checked_beta(divergence: Any, beta: float | None) -> float:
    if divergence not in get_args(DraftDivergenceName):
        raise ValueError(f"divergence must be one of {get_args(DraftDivergenceName)}, got {shown(divergence)}")
    if beta is None:
        return 0.5
    if divergence != "jsd":
        raise ValueError(f"beta={shown(beta)} is not read by divergence={divergence!r}, only by 'jsd'")
    check_number("beta", beta)
    if not 0.0 < beta < 1.0:
        raise ValueError(f"beta must be between 0 and 1, got {beta}: 'reverse_kl' and 'kl' are the limits")
    return beta


def _checked_ids(ids: Any) -> tuple[Tensor | None, int]:
    """Return the ids as int64, and the largest. Waits for the device once, when a loss is built."""
    if ids is None:
        return None, -1
    if not isinstance(ids, Tensor) or ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        hint = ", as t2d.nonzero().view(-1)" if isinstance(ids, Tensor) and ids.dtype == torch.bool else ""
        raise TypeError(f"draft_ids must be a tensor of token ids (int64){hint}, got {described(ids)}")
    if ids.ndim != 1 or not ids.shape[0]:
        raise ValueError(f"draft_ids must be (V_draft,), an id for each row of weight, got {described(ids)}")
    ids = ids.detach().long()
    in_order = ids.sort().values
    smallest, largest = in_order[0].item(), in_order[-1].item()
    if smallest < 0:
        raise ValueError(f"draft_ids holds {smallest}, expected rows of teacher_weight, from 0 on")
    if bool((in_order[1:] == in_order[:-1]).any()):
        raise ValueError("draft_ids holds an id twice, expected distinct ids: of d2t, pass d2t + arange(len(d2t))")
    return ids, int(largest)


def _teacher_index(input: Tensor, teacher_input: Tensor, teacher_rows: Tensor | None) -> Tensor | None:
    """Return (K * rows of a step,) int64, the teacher's row of each of the draft's, below 0 if there is none.

    None: row for row.
    """
    shape, of_teacher = tuple(input.shape[:-1]), tuple(teacher_input.shape[:-1])
    if teacher_rows is not None:
        x = teacher_rows
        if not isinstance(x, Tensor) or x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
            raise TypeError(f"teacher_rows must be a tensor of integers, got {described(x)}")
        if tuple(x.shape) != shape or x.device != input.device:
            raise ValueError(
                f"teacher_rows must be {shape} on {input.device}, one for each row of input, got {described(x)}"
            )
        n = math.prod(of_teacher)
        if host_may_sync(x) and x.numel() and (largest := int(x.max())) >= n:
            raise ValueError(f"teacher_rows holds {largest}, expected a row of teacher_input, 0 to {n - 1}")
        return x.reshape(-1).long()
    if of_teacher != shape[1:]:
        raise ValueError(
            f"teacher_input must be {(*shape[1:], 'H_teacher')}, a row for each of a step of input "
            f"{tuple(input.shape)}, got {tuple(teacher_input.shape)}: pass teacher_rows if its rows are others"
        )
    if shape[0] == 1:
        return None
    length, n = shape[-1], math.prod(of_teacher)
    step = torch.arange(shape[0], device=input.device)[:, None]
    row = torch.arange(n, device=input.device)
    return torch.where(row % length + step < length, row + step, -1).view(-1)


def _by_row(name: str, x: Any, input: Tensor, teacher_input: Tensor, index: Tensor | None) -> Tensor:
    """Return (K * rows of a step,) from a mask or factors like the draft's rows, or like the teacher's."""
    is_right = isinstance(x, Tensor) and (x.dtype == torch.bool if name == "mask" else x.is_floating_point())
    if not is_right:
        raise TypeError(f"{name} must be a {'bool' if name == 'mask' else 'floating-point'} tensor, got {described(x)}")
    shape, of_teacher = tuple(input.shape[:-1]), tuple(teacher_input.shape[:-1])
    if x.device != input.device or tuple(x.shape) not in (shape, of_teacher):
        raise ValueError(
            f"{name} must be {shape}, one value for each row of input, or {of_teacher}, one for each of teacher_input, "
            f"on {input.device}, got {described(x)}"
        )
    flat = x.detach().reshape(-1)
    # Without an index there is one step, whose rows are the teacher's.
    return flat if index is None or tuple(x.shape) == shape else flat[index.clamp(min=0)]


def _select(input: Tensor, index: Tensor | None, mask: Tensor | None) -> tuple[Rows, SharedRows | None]:
    """Return the draft's rows that count, and which of them share a teacher's row. None: row for row."""
    n = input.shape[:-1].numel()
    if index is None:
        return all_rows((n,)) if mask is None else select_rows(mask.long() - 1, "token", -1, 1, "mask"), None
    refuse_capture(input, "several steps of a draft, or teacher_rows,")
    counts = index >= 0 if mask is None else mask & (index >= 0)
    rows = select_rows(counts.long() - 1, "token", -1, 1, "mask")
    if shapes_only():
        return rows, None
    shared, order = SharedRows.of(rows.to_compact(index))
    return rows.reordered(order), shared
