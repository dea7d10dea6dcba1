"""Divergences of materialized logits, without a softmax in memory.

Bytes: forward 2 (JSD and TVD 4), backward 3 times one model's logits.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from liger_chunked.kernels.backend import contiguous_like, first_derivative, matrix, may_overwrite, operator
from liger_chunked.kernels.divergence import NORMALISERS, DivergenceStats, divergence_stats
from liger_chunked.kernels.divergence_grad import divergence_grad_
from liger_chunked.kernels.divergence_sums import Sums
from liger_chunked.kernels.operands import check_floating, check_labels, described, plain
from liger_chunked.kernels.pointwise_divergence import REDUCTIONS, reduced_rows
from liger_chunked.types import Divergence, LogitOptions, accumulation_dtype, shown

# What the backward reads beside the normalisers. The slope of reverse KL is the divergence.
_OF_GRADIENT = {"mixture": ("slope",), "tvd": ("below", "above")}


def _stats_fake(student: Tensor, teacher: Tensor, kind: str, *_: float) -> list[Tensor]:
    n, dtype = student.numel() // student.shape[-1], accumulation_dtype(student.dtype)
    return [student.new_empty(n, dtype=dtype) for _ in ("divergence", *NORMALISERS, *_OF_GRADIENT.get(kind, ()))]


@operator("logits_divergence", fake=_stats_fake)
def _stats(
    student: Tensor, teacher: Tensor, kind: str, beta: float, on_student: float, on_teacher: float, temperature: float
) -> list[Tensor]:
    divergence = Divergence(kind, beta, on_student, on_teacher)  # type: ignore[arg-type]
    options = LogitOptions(temperature=temperature)
    stats = divergence_stats(matrix(student), matrix(teacher), None, divergence, options, options)
    normalisers = (getattr(stats.normalisers, name) for name in NORMALISERS)
    return [stats.divergence, *normalisers, *(getattr(stats, name) for name in _OF_GRADIENT.get(kind, ()))]


def _grad_fake(student: Tensor, *_: Any) -> Tensor:
    return contiguous_like(student)


@operator("logits_divergence_backward", fake=_grad_fake)
def _grad(
    student: Tensor, teacher: Tensor, stats: list[Tensor], g: Tensor, kind: str, beta: float, on_student: float,
    on_teacher: float, temperature: float, inplace: bool,
) -> Tensor:  # fmt: skip
    value, saved = stats[0], stats[1:]
    normalisers = Sums(**dict(zip(NORMALISERS, saved, strict=False)))
    of_gradient = {"slope": value} | dict(zip(_OF_GRADIENT.get(kind, ()), saved[len(NORMALISERS) :], strict=True))
    divergence = Divergence(kind, beta, on_student, on_teacher)  # type: ignore[arg-type]
    options = LogitOptions(temperature=temperature)
    rows = matrix(student)
    out = rows if inplace else contiguous_like(rows)
    of_rows = DivergenceStats(value, normalisers, **of_gradient)
    divergence_grad_(rows, matrix(teacher), None, of_rows, g.contiguous(), None, divergence, options, options, out)
    return out.view(student.shape)


class _LogitsDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, inplace: bool, *how: Any) -> Tensor:
        stats = _stats(student, teacher, *how)
        ctx.save_for_backward(student, teacher, *stats)
        ctx.how = how
        ctx.inplace = inplace and may_overwrite(student)
        return stats[0]

    @staticmethod
    @first_derivative
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        student, teacher, *stats = ctx.saved_tensors
        dstudent = _grad(student, teacher, stats, g, *ctx.how, ctx.inplace)
        if ctx.inplace:
            torch.autograd.graph.increment_version(student)  # a second backward raises
        return dstudent, None, None, *(None for _ in ctx.how)


def _check(student: Tensor, teacher: Tensor, labels: Tensor | None, reduction: str) -> None:
    check_floating(student, "student_logits", 2)
    check_floating(teacher, "teacher_logits", 2)
    if teacher.shape != student.shape or teacher.device != student.device:
        raise ValueError(
            f"teacher_logits must have the shape and device of student_logits {described(student)}, got "
            f"{described(teacher)}"
        )
    if teacher.requires_grad:
        raise ValueError("teacher_logits get no gradient: detach them")
    check_labels(labels, student, "student_logits")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {shown(reduction)}")


def _divergence(
    student: Tensor, teacher: Tensor, labels: Tensor | None, divergence: Divergence, reduction: str,
    temperature: float, ignore_index: int, inplace: bool,
) -> Tensor:  # fmt: skip
    names = ("student_logits", "teacher_logits", "shift_labels")
    student, teacher, labels = plain(names, (student, teacher, labels))
    _check(student, teacher, labels, reduction)
    d = divergence
    how = d.kind, d.beta, d.on_student, d.on_teacher, LogitOptions(temperature=temperature).temperature
    rows = _LogitsDivergence.apply(student, teacher, inplace, *how).view(student.shape[:-1])
    valid = None if labels is None else labels != ignore_index
    if reduction == "none":
        return rows if valid is None else rows.where(valid, 0.0)
    return reduced_rows(rows, valid, student.shape[-1], reduction)


def liger_kl_div_with_logits(
    student_logits: Tensor,
    teacher_logits: Tensor,
    shift_labels: Tensor | None = None,
    *,
    reverse: bool = False,
    reduction: Literal["none", "sum", "mean", "batchmean"] = "batchmean",
    temperature: float = 1.0,
    ignore_index: int = -100,
    inplace: bool = False,
) -> Tensor:
    """Return `KL(q || p)` of student `p` and teacher `q` (Hinton et al. 2015), in nats per row.

    Args:
        student_logits: (..., V), floating-point, at least two dimensions. Rows without a uniform stride, such as
            `logits[:, :-1]`, are copied.
        teacher_logits: (..., V), floating-point of any dtype, with the shape and device of `student_logits`, without
            gradient.
        shift_labels: (...), one label a row; rows labelled `ignore_index` are ignored. None: all rows count.
        reverse: return `KL(p || q)` instead.
        reduction: "batchmean" divides the sum by the valid rows, "mean" by that times V, "sum" by nothing. "none"
            returns one value a row, 0 in ignored rows.
        temperature: positive divisor of all logits. There is no factor `temperature ** 2`.
        ignore_index: the label of rows to ignore.
        inplace: let the backward write its gradient over `student_logits`, unless they are expanded or the call is
            compiled. A second backward raises.

    Returns:
        (), or (...) with "none"; float32, or float64 for float64 student logits. It is differentiable by
        `student_logits`.

    Raises:
        TypeError: the logits are no plain floating-point tensors, or `temperature` is no number.
        ValueError: shapes or devices do not fit, `teacher_logits` requires a gradient, or `reduction` or `temperature`
            is invalid.
        NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode autograd.

    >>> z, t = torch.randn(4, 7), torch.randn(4, 7)
    >>> expected = torch.nn.functional.kl_div(
    ...     z.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="batchmean"
    ... )
    >>> torch.allclose(liger_kl_div_with_logits(z, t), expected)
    True
    """
    divergence = Divergence("reverse_kl" if reverse else "forward_kl")
    return _divergence(
        student_logits, teacher_logits, shift_labels, divergence, reduction, temperature, ignore_index, inplace
    )


def liger_jsd_with_logits(
    student_logits: Tensor,
    teacher_logits: Tensor,
    shift_labels: Tensor | None = None,
    *,
    beta: float = 0.5,
    reduction: Literal["none", "sum", "mean", "batchmean"] = "batchmean",
    temperature: float = 1.0,
    ignore_index: int = -100,
    inplace: bool = False,
) -> Tensor:
    """Return the Jensen-Shannon divergence of student `p` and teacher `q` (Agarwal et al. 2024), in nats per row.

        beta KL(q || m) + (1 - beta) KL(p || m),    m = (1 - beta) p + beta q

    Args:
        student_logits: (..., V), floating-point, at least two dimensions. Rows without a uniform stride, such as
            `logits[:, :-1]`, are copied.
        teacher_logits: (..., V), floating-point of any dtype, with the shape and device of `student_logits`, without
            gradient.
        shift_labels: (...), one label a row; rows labelled `ignore_index` are ignored. None: all rows count.
        beta: weight of the teacher, in [0, 1]. 0 gives `KL(q || p)`, and 1 `KL(p || q)`.
        reduction: "batchmean" divides the sum by the valid rows, "mean" by that times V, "sum" by nothing. "none"
            returns one value a row, 0 in ignored rows.
        temperature: positive divisor of all logits. There is no factor `temperature ** 2`.
        ignore_index: the label of rows to ignore.
        inplace: let the backward write its gradient over `student_logits`, unless they are expanded or the call is
            compiled. A second backward raises.

    Returns:
        (), or (...) with "none"; float32, or float64 for float64 student logits. It is differentiable by
        `student_logits`.

    Raises:
        TypeError: the logits are no plain floating-point tensors, or `beta` or `temperature` is no number.
        ValueError: shapes or devices do not fit, `teacher_logits` requires a gradient, or `beta`, `reduction` or
            `temperature` is invalid.
        NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode autograd.

    >>> from liger_chunked import liger_jsd
    >>> z, t = torch.randn(4, 7), torch.randn(4, 7)
    >>> torch.allclose(liger_jsd_with_logits(z, t), liger_jsd(z.log_softmax(-1), t.log_softmax(-1)), atol=1e-6)
    True
    """
    divergence = Divergence.jensen_shannon(beta)
    return _divergence(
        student_logits, teacher_logits, shift_labels, divergence, reduction, temperature, ignore_index, inplace
    )


def liger_tvd_with_logits(
    student_logits: Tensor,
    teacher_logits: Tensor,
    shift_labels: Tensor | None = None,
    *,
    reduction: Literal["none", "sum", "mean", "batchmean"] = "batchmean",
    temperature: float = 1.0,
    ignore_index: int = -100,
    inplace: bool = False,
) -> Tensor:
    """Return the total variation distance `sum_v |p_v - q_v|/2` of student `p` and teacher `q` per row, in [0, 1].

    Args:
        student_logits: (..., V), floating-point, at least two dimensions. Rows without a uniform stride, such as
            `logits[:, :-1]`, are copied.
        teacher_logits: (..., V), floating-point of any dtype, with the shape and device of `student_logits`, without
            gradient.
        shift_labels: (...), one label a row; rows labelled `ignore_index` are ignored. None: all rows count.
        reduction: "batchmean" divides the sum by the valid rows, "mean" by that times V, "sum" by nothing. "none"
            returns one value a row, 0 in ignored rows.
        temperature: positive divisor of all logits. There is no factor `temperature ** 2`.
        ignore_index: the label of rows to ignore.
        inplace: let the backward write its gradient over `student_logits`, unless they are expanded or the call is
            compiled. A second backward raises.

    Returns:
        (), or (...) with "none"; float32, or float64 for float64 student logits. It is differentiable by
        `student_logits`.

    Raises:
        TypeError: the logits are no plain floating-point tensors, or `temperature` is no number.
        ValueError: shapes or devices do not fit, `teacher_logits` requires a gradient, or `reduction` or `temperature`
            is invalid.
        NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode autograd.

    >>> from liger_chunked import liger_tvd
    >>> z, t = torch.randn(4, 7), torch.randn(4, 7)
    >>> torch.allclose(liger_tvd_with_logits(z, t), liger_tvd(z.softmax(-1), t.softmax(-1)), atol=1e-6)
    True
    """
    return _divergence(
        student_logits, teacher_logits, shift_labels, Divergence("tvd"), reduction, temperature, ignore_index, inplace
    )
