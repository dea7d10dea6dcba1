"""Cross entropy of materialized logits.

Bytes: forward 1, backward 2 times the logits.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from liger_chunked.kernels.backend import first_derivative, matrix, may_overwrite, operator
from liger_chunked.kernels.logits_grad import LogitsCotangents, logits_grad_
from liger_chunked.kernels.logits_stats import row_stats
from liger_chunked.kernels.operands import check_class_ids, check_floating, check_row, described, plain
from liger_chunked.types import LogitOptions, accumulation_dtype, check_number, shown

_REDUCTIONS = ("mean", "sum", "none")
_REGULARIZED = ("logps", "lse", "mean_logits")


def _stats_fake(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, regularized: bool, softcap: float | None,
    logit_scale: float, ignore_index: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    def rows() -> Tensor:
        return logits.new_empty(target.numel(), dtype=accumulation_dtype(logits.dtype))

    return rows(), rows() if regularized else None, rows() if regularized else None, rows(), rows()


@operator("logits_stats", fake=_stats_fake)
def _stats(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, regularized: bool, softcap: float | None,
    logit_scale: float, ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    target = target.reshape(-1)
    vocab_size = logits.shape[-1]
    if target.device.type == "cpu":
        _check_range(target, vocab_size, ignore_index)
    outputs = _REGULARIZED if regularized else ("logps",)
    options = LogitOptions(softcap=softcap, logit_scale=logit_scale)
    partial, stats = row_stats(matrix(logits), target, options, outputs, class_weight)
    return stats.logps, stats.lse, stats.mean_logits, partial.max, partial.sum_exp  # type: ignore[return-value]


def _grad_fake(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@operator("logits_grad", fake=_grad_fake)
def _grad(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, max: Tensor, sum_exp: Tensor, g_logps: Tensor,
    g_lse: Tensor | None, g_mean_logits: Tensor | None, softcap: float | None, logit_scale: float, inplace: bool,
) -> Tensor:  # fmt: skip
    cotangents = LogitsCotangents(
        max=max,
        sum_exp=sum_exp,
        logps=g_logps.contiguous(),
        lse=None if g_lse is None else g_lse.contiguous(),
        mean_logits=None if g_mean_logits is None else g_mean_logits.contiguous(),
    )
    rows = matrix(logits)
    out = rows if inplace else torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    options = LogitOptions(softcap=softcap, logit_scale=logit_scale)
    logits_grad_(rows, target.reshape(-1), cotangents, options, logits.shape[-1], class_weight=class_weight, out=out)
    return out.view(logits.shape)


class _LogitsStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, class_weight: Tensor | None, regularized: bool,
        softcap: float | None, logit_scale: float, ignore_index: int, inplace: bool,
    ) -> Any:  # fmt: skip
        *stats, maximum, sum_exp = _stats(logits, target, class_weight, regularized, softcap, logit_scale, ignore_index)
        ctx.save_for_backward(logits, target, class_weight, maximum, sum_exp)
        ctx.softcap, ctx.logit_scale = softcap, logit_scale
        ctx.inplace = inplace and may_overwrite(logits)
        return tuple(stats) if regularized else stats[0]

    @staticmethod
    @first_derivative
    def backward(
        ctx: Any, g_logps: Tensor, g_lse: Tensor | None = None, g_mean_logits: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        dlogits = _grad(*saved, g_logps, g_lse, g_mean_logits, ctx.softcap, ctx.logit_scale, ctx.inplace)
        if ctx.inplace:
            torch.autograd.graph.increment_version(saved[0])  # a second backward raises
        return dlogits, None, None, None, None, None, None, None


def _check_range(target: Tensor, vocab_size: int, ignore_index: int) -> None:
    outside = ((target < 0) | (target >= vocab_size)) & (target != ignore_index)
    if outside.any():
        first = target[outside][0].item()
        hint = f". If {first} marks rows to skip, set ignore_index={first}" if first < 0 else ""
        raise ValueError(f"target must be in [0, {vocab_size}) or ignore_index {ignore_index}, got {first}{hint}")


def _check(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
    lse_square_scale: float,
) -> None:
    check_floating(logits, "logits", 2)
    check_class_ids(target, "target", "class indices")
    if target.shape != logits.shape[:-1] or target.device != logits.device:
        raise ValueError(
            f"target must be {tuple(logits.shape[:-1])}, one class for each row of logits {described(logits)}, got "
            f"{described(target)}"
        )
    if weight is not None:
        check_row(weight, "weight", logits)
        if weight.requires_grad:
            raise ValueError("weight gets no gradient: detach it")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {_REDUCTIONS}, got {shown(reduction)}")
    check_number("label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    check_number("lse_square_scale", lse_square_scale)
    if not 0.0 <= lse_square_scale < math.inf:
        raise ValueError(f"lse_square_scale must be finite and not negative, got {lse_square_scale}")


def liger_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    inplace: bool = False,
) -> Tensor:
    """Return `F.cross_entropy` in nats, in float32 without a float32 copy of the logits.

    With target `y`, transformed logits `z`, `lse = logsumexp(z)` and `s = label_smoothing`, a token's loss is

        (1 - s) w_y (lse - z_y) + s/V sum_v w_v (lse - z_v) + lse_square_scale lse**2

    Args:
        logits: (..., V), floating-point, at least two dimensions. Rows without a uniform stride, such as
            `logits[:, :-1]`, are copied; pad labels instead.
        target: (...), integer class indices in [0, V), or `ignore_index`. On a CPU others raise. On a GPU nothing
            checks them: the loss is infinite, or with `weight` the device may assert.
        weight: (V,), floating-point class weights `w`, without gradient. None: 1.
        ignore_index: the target of rows that add nothing to the loss and have no gradient.
        reduction: "mean" divides the cross entropy by the sum of `w_y`, the last term (z-loss) by the valid tokens; 0
            without any. "sum" divides by nothing. "none" returns one loss a token, 0 at ignored ones.
        label_smoothing: `s`, the share of the target that is spread over all classes, in [0, 1].
        lse_square_scale: weight of the z-loss (PaLM, https://arxiv.org/abs/2204.02311, section 5), finite and not
            negative; 0: none.
        softcap: positive `c` of the transform `z = c tanh(logit_scale x / c)` of logits `x`, Gemma's
            `final_logit_softcapping`. None: `z = logit_scale x`.
        logit_scale: finite factor of the logits, before the softcap.
        inplace: let the backward write its gradient over `logits`, unless they are expanded or the call is compiled. A
            second backward raises.

    Returns:
        The loss, (), or (...) with "none"; float32, or float64 for float64 logits. It is differentiable by `logits`.

    Raises:
        TypeError: `logits` or `weight` is no plain floating-point tensor, `target` holds no integers, or
            `label_smoothing`, `lse_square_scale`, `softcap` or `logit_scale` is no number.
        ValueError: shapes or devices do not fit, `weight` requires a gradient, an option is out of range, or on a CPU a
            target is.
        NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode autograd.

    >>> logits, target = torch.randn(4, 7), torch.tensor([1, 6, -100, 0])
    >>> torch.allclose(liger_cross_entropy(logits, target), torch.nn.functional.cross_entropy(logits, target))
    True
    """
    logits, target, weight = plain(("logits", "target", "weight"), (logits, target, weight))
    _check(logits, target, weight, reduction, label_smoothing, lse_square_scale)
    dtype = accumulation_dtype(logits.dtype)
    target = target.long().contiguous()
    class_weight = None if weight is None else weight.to(dtype).contiguous()
    regularized = bool(label_smoothing or lse_square_scale)
    stats = _LogitsStats.apply(
        logits, target, class_weight if label_smoothing else None, regularized, softcap, logit_scale, ignore_index,
        inplace,
    )  # fmt: skip
    labels = target.reshape(-1)
    valid = labels != ignore_index
    logps, lse, mean_logits = stats if regularized else (stats, stats, stats)
    token_weight = None if class_weight is None else class_weight[labels.where(valid, 0)]
    loss = -logps if token_weight is None else -logps * token_weight
    if label_smoothing:
        smooth = (lse if class_weight is None else lse * class_weight.mean()) - mean_logits
        loss = (1.0 - label_smoothing) * loss + label_smoothing * smooth
    loss = loss.where(valid, 0.0)
    z_loss = (lse_square_scale * lse.square()).where(valid, 0.0) if lse_square_scale else None
    if reduction == "none":
        return (loss if z_loss is None else loss + z_loss).view(target.shape)
    per_token = per_class = torch.ones((), dtype=dtype, device=logits.device)
    if reduction == "mean":
        per_token = per_class = valid.sum().clamp(min=1)
        if token_weight is not None:
            total = token_weight.where(valid, 0.0).sum()
            per_class = total.where(total != 0, 1.0)
    loss = loss.sum() / per_class
    return loss if z_loss is None else loss + z_loss.sum() / per_token
