"""Divergences of (log-)probabilities: row sums of the `f(x, t)` of `_terms_torch`.

Bytes: forward 2, backward 3 times the input.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from liger_chunked.kernels.backend import block_size, exp, first_derivative, jit, operator, row_blocks, strided_rows, tl
from liger_chunked.kernels.divergence import LOG_ZERO, log_ratios, log_ratios_torch, mixture_arguments
from liger_chunked.kernels.divergence_sums import both_on_triton, weighted
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.operands import check_floating, check_labels, check_like, described, plain
from liger_chunked.kernels.transform import load_block
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.types import Divergence, accumulation_dtype, check_number, shown

REDUCTIONS = ("none", "sum", "mean", "batchmean")


@jit
def _term(
    x, t, beta, one_minus_beta, even, GRADIENT: tl.constexpr, KIND: tl.constexpr, PRECISE: tl.constexpr,
    CENTRAL: tl.constexpr,
):  # fmt: skip
    """Return `f(x, t)` or `df/dx`, 0 for zero probabilities."""
    if KIND == "kl":
        term = -t if GRADIENT else tl.where(t > 0.0, t * (tl.log(t) - x), 0.0)
    elif KIND == "kl_log":
        p = exp(t, PRECISE)
        term = -p if GRADIENT else tl.where(p == 0.0, 0.0, p * (t - x))
    elif KIND == "reverse_kl":
        q = exp(x, PRECISE)
        term = tl.where(q == 0.0, 0.0, q * (x - t + 1.0 if GRADIENT else x - t))
    elif KIND == "jsd":
        q_over_m, p_over_m = log_ratios(x, t, beta, one_minus_beta, even, CENTRAL)
        term = one_minus_beta * exp(x, PRECISE) * q_over_m
        if not GRADIENT:
            term += beta * exp(t, PRECISE) * p_over_m
    else:
        if GRADIENT:
            term = tl.where(x > t, 0.5, tl.where(x < t, -0.5, 0.0))
        else:
            term = 0.5 * tl.abs(x - t)
    return term


@Kernel
def _sum_kernel(
    x_ptr, x_stride, t_ptr, t_stride, sum_ptr, n_cols, beta, one_minus_beta, even,
    KIND: tl.constexpr, BLOCK: tl.constexpr, PRECISE: tl.constexpr, CENTRAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        # Zeros add 0.
        x = load_block(x_ptr + row * x_stride, cols, n_cols, False)
        t = load_block(t_ptr + row * t_stride, cols, n_cols, False)
        total += _term(x, t, beta, one_minus_beta, even, False, KIND, PRECISE, CENTRAL)
    tl.store(sum_ptr + row, tl.sum(total, axis=0))


@Kernel
def _grad_kernel(
    x_ptr, x_stride, t_ptr, t_stride, g_ptr, dx_ptr, n_cols, beta, one_minus_beta, even,
    KIND: tl.constexpr, BLOCK: tl.constexpr, PRECISE: tl.constexpr, CENTRAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = load_block(x_ptr + row * x_stride, cols, n_cols, False)
    t = load_block(t_ptr + row * t_stride, cols, n_cols, False)
    dx = tl.load(g_ptr + row) * _term(x, t, beta, one_minus_beta, even, True, KIND, PRECISE, CENTRAL)
    tl.store(dx_ptr + row * n_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < n_cols)


def _arguments(x: Tensor, t: Tensor, kind: str, beta: float) -> dict[str, Any]:
    mixture = mixture_arguments(Divergence("mixture", beta), x.dtype)
    most, num_warps = TUNING[x.device].pointwise_divergence
    return {
        "x_ptr": x,
        "x_stride": x.stride(0),
        "t_ptr": t,
        "t_stride": t.stride(0),
        "n_cols": x.shape[1],
        **{name: mixture[name] for name in ("beta", "one_minus_beta", "even", "CENTRAL")},
        "KIND": kind,
        "BLOCK": block_size(x.shape[1], most),
        "PRECISE": x.dtype == torch.float32,
        "num_warps": num_warps,
    }


def _sum_triton(x: Tensor, t: Tensor, kind: str, beta: float) -> Tensor:
    total = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if len(x):
        _sum_kernel[(len(x),)](sum_ptr=total, **_arguments(x, t, kind, beta))
    return total


def _grad_triton(x: Tensor, t: Tensor, g: Tensor, kind: str, beta: float) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        arguments = _arguments(x, t, kind, beta)
        _grad_kernel[(len(x), -(-x.shape[1] // arguments["BLOCK"]))](g_ptr=g, dx_ptr=dx, **arguments)
    return dx


def _terms_torch(x: Tensor, t: Tensor, kind: str, beta: float) -> Tensor:
    if kind == "kl":
        return weighted(t, t.log() - x)
    if kind == "kl_log":
        return weighted(t.exp(), t - x)
    if kind == "reverse_kl":
        return weighted(x.exp(), x - t)
    if kind == "tvd":
        return 0.5 * (x - t).abs()
    x, t = x.clamp(min=LOG_ZERO), t.clamp(min=LOG_ZERO)
    q_over_m, p_over_m = log_ratios_torch(x, t, beta)
    return beta * t.exp() * p_over_m + (1.0 - beta) * x.exp() * q_over_m


def _slopes_torch(x: Tensor, t: Tensor, kind: str, beta: float) -> Tensor:
    if kind == "kl":
        return -t
    if kind == "kl_log":
        return -t.exp()
    if kind == "reverse_kl":
        return weighted(x.exp(), x - t + 1.0)
    if kind == "tvd":
        return 0.5 * (x - t).sign()
    x, t = x.clamp(min=LOG_ZERO), t.clamp(min=LOG_ZERO)
    return (1.0 - beta) * x.exp() * log_ratios_torch(x, t, beta)[0]


def _sum_torch(x: Tensor, t: Tensor, kind: str, beta: float) -> Tensor:
    dtype = accumulation_dtype(x.dtype)
    total = torch.empty(x.shape[0], dtype=dtype, device=x.device)
    for rows in row_blocks(x):
        total[rows] = _terms_torch(x[rows].to(dtype), t[rows].to(dtype), kind, beta).sum(1)
    return total


def _grad_torch(x: Tensor, t: Tensor, g: Tensor, kind: str, beta: float) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for rows in row_blocks(x):
        dx[rows] = g[rows, None] * _slopes_torch(x[rows].to(g.dtype), t[rows].to(g.dtype), kind, beta)
    return dx


@operator("pointwise_divergence", fake=lambda x, *_: x.new_empty(x.shape[0], dtype=accumulation_dtype(x.dtype)))
def _sum(x: Tensor, t: Tensor, kind: str, beta: float) -> Tensor:
    x, t = strided_rows(x)[0], strided_rows(t)[0]
    return (_sum_triton if both_on_triton(x, t) else _sum_torch)(x, t, kind, beta)


@operator("pointwise_divergence_backward", fake=lambda x, *_: x.new_empty(x.shape))
def _grad(x: Tensor, t: Tensor, g: Tensor, kind: str, beta: float) -> Tensor:
    x, t = strided_rows(x)[0], strided_rows(t)[0]
    return (_grad_triton if both_on_triton(x, t) else _grad_torch)(x, t, g.contiguous(), kind, beta)


class _PointwiseDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, t: Tensor, kind: str, beta: float) -> Tensor:
        ctx.kind, ctx.beta = kind, beta
        ctx.save_for_backward(x, t)
        return _sum(x, t, kind, beta)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _grad(*ctx.saved_tensors, g, ctx.kind, ctx.beta), None, None, None


def _check(x: Tensor, x_name: str, t: Tensor, t_name: str, labels: Tensor | None, reduction: str) -> None:
    check_floating(x, x_name, 2)
    if x.ndim != 2:
        raise ValueError(f"{x_name} must be (N, V), got {described(x)}")
    check_like(t, t_name, x, x_name)
    if t.requires_grad:
        raise ValueError(f"{t_name} gets no gradient: detach it")
    check_labels(labels, x, x_name)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {shown(reduction)}")


def _reduced(
    x: Tensor, t: Tensor, kind: str, beta: float, reduction: str, labels: Tensor | None, ignore_index: int
) -> Tensor:
    valid = None if labels is None else labels != ignore_index
    if reduction == "none":
        dtype = accumulation_dtype(x.dtype)
        terms = _terms_torch(x.to(dtype), t.to(dtype), kind, beta)
        return terms if valid is None else terms.where(valid[:, None], 0.0)
    return reduced_rows(_PointwiseDivergence.apply(x, t, kind, beta), valid, x.shape[1], reduction)


def reduced_rows(rows: Tensor, valid: Tensor | None, n_cols: int, reduction: str) -> Tensor:
    if valid is not None:
        rows = rows.where(valid, 0.0)
    total = rows.sum()
    if reduction == "sum":
        return total
    count = max(1, rows.numel()) if valid is None else valid.sum().clamp(min=1)
    return total / (count * n_cols if reduction == "mean" else count)


def liger_kl_div(
    input: Tensor,
    target: Tensor,
    *,
    reduction: Literal["none", "sum", "mean", "batchmean"] = "mean",
    log_target: bool = False,
) -> Tensor:
    """Return `F.kl_div`: `KL(target || exp(input))`, in nats, summed in float32.

        sum_v t_v (log t_v - x_v)        t: target, x: input

    Args:
        input: (N, V), log-probabilities, floating-point.
        target: (N, V), probabilities, with the dtype and device of `input`, without gradient.
        reduction: "batchmean" divides the sum by N, "mean" by N V, "sum" by nothing; "none" returns the (N, V) terms.
        log_target: `target` holds log-probabilities.

    Returns:
        (), or (N, V) with "none"; float32, or float64 for float64 inputs. It is differentiable by `input`.

    Raises:
        TypeError: `input` is no plain floating-point tensor, or `target` has another dtype.
        ValueError: `input` is not (N, V), `target` has another shape or device or requires a gradient, or `reduction`
            is unknown.
        NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode autograd.

    >>> x, t = torch.randn(4, 7).log_softmax(-1), torch.randn(4, 7).softmax(-1)
    >>> torch.allclose(liger_kl_div(x, t, reduction="sum"), torch.nn.functional.kl_div(x, t, reduction="sum"))
    True
    """
    input, target = plain(("input", "target"), (input, target))
    _check(input, "input", target, "target", None, reduction)
    return _reduced(input, target, "kl_log" if log_target else "kl", 0.0, reduction, None, 0)


def liger_jsd(
    log_q: Tensor,
    log_p: Tensor,
    shift_labels: Tensor | None = None,
    *,
    beta: float = 0.5,
    ignore_index: int = -100,
) -> Tensor:
    """Return the mean Jensen-Shannon divergence of teacher `p` and student `q` over valid rows, in nats.

        beta KL(p || m) + (1 - beta) KL(q || m),    m = beta p + (1 - beta) q        (Agarwal et al. 2024)

    Args:
        log_q: (N, V), the student's log-probabilities, floating-point.
        log_p: (N, V), the teacher's, with the dtype and device of `log_q`, without gradient.
        shift_labels: (N,), one label a row; rows labelled `ignore_index` are ignored. None: all rows count.
        beta: weight of the teacher, in [0, 1]. 0 gives `KL(p || q)`, and 1 `KL(q || p)`.
        ignore_index: the label of rows to ignore.

    Returns:
        (), 0 without valid rows; float32, or float64 for float64 inputs. It is differentiable by `log_q`.

    Raises:
        TypeError: `log_q` is no plain floating-point tensor, `log_p` has another dtype, or `beta` is no number.
        ValueError: `log_q` is not (N, V), `log_p` has another shape or device or requires a gradient, `shift_labels` is
            not (N,), or `beta` is outside [0, 1].
        NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode autograd.
    """
    log_q, log_p, shift_labels = plain(("log_q", "log_p", "shift_labels"), (log_q, log_p, shift_labels))
    _check(log_q, "log_q", log_p, "log_p", shift_labels, "batchmean")
    check_number("beta", beta)
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must be in [0, 1], got {beta}")
    kind = {0.0: "kl_log", 1.0: "reverse_kl"}.get(beta, "jsd")
    return _reduced(log_q, log_p, kind, beta, "batchmean", shift_labels, ignore_index)


def liger_tvd(
    p: Tensor,
    q: Tensor,
    shift_labels: Tensor | None = None,
    *,
    reduction: Literal["none", "sum", "mean", "batchmean"] = "batchmean",
    ignore_index: int = -100,
) -> Tensor:
    """Return the total variation distance `sum_v |p_v - q_v|/2` of student `p` and teacher `q`, per row in [0, 1].

    Args:
        p: (N, V), the student's probabilities, floating-point.
        q: (N, V), the teacher's, with the dtype and device of `p`, without gradient.
        shift_labels: (N,), one label a row; rows labelled `ignore_index` are ignored. None: all rows count.
        reduction: "batchmean" divides the sum by the valid rows, "mean" by that times V, "sum" by nothing; "none"
            returns the (N, V) terms, 0 in ignored rows.
        ignore_index: the label of rows to ignore.

    Returns:
        (), or (N, V) with "none"; float32, or float64 for float64 inputs. It is differentiable by `p`.

    Raises:
        TypeError: `p` is no plain floating-point tensor, or `q` has another dtype.
        ValueError: `p` is not (N, V), `q` has another shape or device or requires a gradient, `shift_labels` is not
            (N,), or `reduction` is unknown.
        NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode autograd.
    """
    p, q, shift_labels = plain(("p", "q", "shift_labels"), (p, q, shift_labels))
    _check(p, "p", q, "q", shift_labels, reduction)
    return _reduced(p, q, "tvd", 0.0, reduction, shift_labels, ignore_index)
