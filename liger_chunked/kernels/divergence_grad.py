"""Gradients of divergences and target log-probabilities by student logits.

    dL/dz_v = g_divergence dD/dz_v + g_logps (1[v = y] - p1_v)        p1 = softmax(z), at T = 1

then back through the transform. Bytes: both tiles read, the student's written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_chunked.kernels.backend import exp, grid_of_rows, grid_row, reciprocal, row_blocks, tl
from liger_chunked.kernels.divergence import (
    LOG_ZERO,
    DivergenceStats,
    log_probs_torch,
    log_ratios,
    log_ratios_torch,
    mixture_arguments,
    normaliser_arguments,
    softmax_block,
)
from liger_chunked.kernels.divergence_sums import Sums, both_on_triton, columns_of, pair_arguments, widened
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.transform import (
    load_block,
    transform_and_slope,
    transform_and_tanh,
    transform_block,
    transform_gradient,
)
from liger_chunked.types import Divergence, LogitOptions, accumulation_dtype


@Kernel
def _divergence_grad_kernel(
    z_ptr, z_stride, t_ptr, t_stride, target_ptr, g_divergence_ptr, g_logps_ptr,
    centre_ptr, sum_exp_ptr, log_sum_ptr, hard_sum_exp_ptr, teacher_centre_ptr, teacher_sum_exp_ptr,
    teacher_log_sum_ptr, first_ptr, second_ptr,
    n_tokens, n_cols, scale, softcap, inv_temperature, teacher_scale, teacher_softcap, teacher_inv_temperature,
    beta, one_minus_beta, even, on_student, on_ratio,
    KIND: tl.constexpr, BLOCK: tl.constexpr, PRECISE: tl.constexpr, CENTRAL: tl.constexpr,
):  # fmt: skip
    row = grid_row()
    if row >= n_tokens:
        return
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < n_cols
    z_ptrs = z_ptr + row * z_stride + cols
    g_divergence = tl.load(g_divergence_ptr + row)
    if g_logps_ptr is None:
        if g_divergence == 0.0:
            tl.store(z_ptrs, tl.zeros([BLOCK], z_ptr.dtype.element_ty), mask=inside)  # it may hold NaN
            return
    raw = load_block(z_ptr + row * z_stride, cols, n_cols, False)
    z, tanh_z = transform_and_tanh(raw, scale, softcap, None)
    if centre_ptr is not None:
        centre = tl.load(centre_ptr + row)
        sum_exp = tl.load(sum_exp_ptr + row)
        p, log_p = softmax_block(z, centre, sum_exp, tl.load(log_sum_ptr + row), inv_temperature, PRECISE)
    if KIND == "tail":
        p = tl.where(raw == -float("inf"), 0.0, p)
    else:
        t = load_block(t_ptr + row * t_stride, cols, n_cols, False)
        t = transform_block(t, teacher_scale, teacher_softcap, None)
        if KIND != "cosine":
            q, log_q = softmax_block(
                t, tl.load(teacher_centre_ptr + row), tl.load(teacher_sum_exp_ptr + row),
                tl.load(teacher_log_sum_ptr + row), teacher_inv_temperature, PRECISE,
            )  # fmt: skip

    if KIND == "tail":
        grad = p
    elif KIND == "forward_kl":
        grad = p - q
    elif KIND == "reverse_kl":
        grad = tl.where(p == 0.0, 0.0, p * (log_p - log_q - tl.load(first_ptr + row)))
    elif KIND == "mixture":
        log_p_over_m, log_q_over_m = log_ratios(log_p, log_q, beta, one_minus_beta, even, CENTRAL)
        a = -tl.load(first_ptr + row)
        if on_student is not None:
            a += on_student * log_p_over_m
        if on_ratio is not None:
            a += on_ratio * exp(log_q_over_m, PRECISE)
        grad = p * a
    elif KIND == "tvd":
        below = tl.load(first_ptr + row)
        above = tl.load(second_ptr + row)
        grad = p * tl.where(p > q, below, tl.where(p < q, -above, 0.5 * (below - above)))
    else:
        grad = tl.load(first_ptr + row) * z - tl.load(second_ptr + row) * t
    if inv_temperature is not None and KIND != "cosine":
        grad = grad * inv_temperature
    grad = grad * g_divergence
    if g_logps_ptr is not None:
        if hard_sum_exp_ptr is not None:
            p = exp(z - centre, PRECISE) * reciprocal(tl.load(hard_sum_exp_ptr + row))
            if KIND == "tail":
                p = tl.where(raw == -float("inf"), 0.0, p)
        if target_ptr is not None:
            p = p - tl.where(cols == tl.load(target_ptr + row), 1.0, 0.0)
        grad -= tl.load(g_logps_ptr + row) * p
    grad = transform_gradient(grad, tanh_z, scale, softcap, None)
    tl.store(z_ptrs, grad.to(z_ptr.dtype.element_ty), mask=inside)


def _divergence_grad_triton_(
    student: Tensor, teacher: Tensor | None, target: Tensor | None, stats: DivergenceStats, g_divergence: Tensor,
    g_logps: Tensor | None, divergence: Divergence | None, options: LogitOptions, teacher_options: LogitOptions,
) -> Tensor:  # fmt: skip
    n, n_cols = student.shape
    kind, normalisers = "tail" if divergence is None else divergence.kind, stats.normalisers
    first, second = stats.of_gradient(kind)
    both = pair_arguments(student, teacher, options, teacher_options)
    if n:
        _divergence_grad_kernel[grid_of_rows(n, -(-n_cols // both["BLOCK"]))](
            **both,
            **normaliser_arguments(normalisers),
            hard_sum_exp_ptr=None if normalisers is None else normalisers.hard_sum_exp,
            first_ptr=first,
            second_ptr=second,
            target_ptr=target,
            g_divergence_ptr=g_divergence.contiguous(),
            g_logps_ptr=None if g_logps is None else g_logps.contiguous(),
            n_tokens=n,
            **mixture_arguments(divergence or Divergence("tvd"), student.dtype),
            KIND=kind,
        )
    return student


def _soft_gradient_torch(
    student: Tensor, teacher: Tensor, stats: DivergenceStats, rows: slice, divergence: Divergence,
    options: LogitOptions, teacher_options: LogitOptions,
) -> Tensor:  # fmt: skip
    first, second = (None if x is None else x[rows, None] for x in stats.of_gradient(divergence.kind))
    if divergence.kind == "cosine":
        assert first is not None and second is not None
        dtype = accumulation_dtype(student.dtype)
        z, t = widened(student[rows], options, dtype), widened(teacher[rows], teacher_options, dtype)
        return (first * z - second * t).mul_(options.temperature)
    assert stats.normalisers is not None
    log_p, log_q = log_probs_torch(student, teacher, stats.normalisers, rows, options, teacher_options)
    p = log_p.exp()
    if divergence.kind == "forward_kl":
        return p.sub_(log_q.exp_())
    assert first is not None
    if divergence.kind == "reverse_kl":
        return (p * (log_p - log_q - first)).masked_fill_(p == 0, 0.0)
    if divergence.kind == "tvd":
        assert second is not None
        q, below, above = log_q.exp_(), first, second
        return p * torch.where(p > q, below, torch.where(p < q, -above, 0.5 * (below - above)))
    log_p, log_q = log_p.clamp_(min=LOG_ZERO), log_q.clamp_(min=LOG_ZERO)
    log_p_over_m, log_q_over_m = log_ratios_torch(log_p, log_q, divergence.beta)
    return p * (divergence.on_student * log_p_over_m + divergence.on_ratio * log_q_over_m.exp_() - first)


def _divergence_grad_torch_(
    student: Tensor, teacher: Tensor | None, target: Tensor | None, stats: DivergenceStats, g_divergence: Tensor,
    g_logps: Tensor | None, divergence: Divergence | None, options: LogitOptions, teacher_options: LogitOptions,
) -> Tensor:  # fmt: skip
    dtype, normalisers = accumulation_dtype(student.dtype), stats.normalisers
    for rows in row_blocks(student):
        holes = None
        z = student[rows].to(dtype, copy=True)
        z, cap_slope = transform_and_slope(z, options.logit_scale, options.softcap, 1.0)
        centred = z if normalisers is None else z.sub_(normalisers.centre[rows, None])
        if divergence is None:
            assert normalisers is not None
            holes = student[rows] == -torch.inf
            p = (centred / options.temperature).exp_().div_(normalisers.sum_exp[rows, None])
            grad = p.masked_fill_(holes, 0.0)
        else:
            assert teacher is not None
            grad = _soft_gradient_torch(student, teacher, stats, rows, divergence, options, teacher_options)
        g = g_divergence[rows, None]
        grad.mul_(1.0 / options.temperature).mul_(g).masked_fill_(g == 0, 0.0)
        if g_logps is not None:
            assert normalisers is not None
            sum_exp = normalisers.sum_exp if normalisers.hard_sum_exp is None else normalisers.hard_sum_exp
            p = centred.exp_().div_(sum_exp[rows, None])
            if holes is not None:
                p.masked_fill_(holes, 0.0)
            if target is not None:
                column, inside = columns_of(target[rows], p.shape[1])
                p.scatter_add_(1, column, -inside[:, None].to(p.dtype))
            grad.addcmul_(p, g_logps[rows, None], value=-1.0)
        grad.mul_(options.logit_scale)
        if cap_slope is not None:
            grad.mul_(cap_slope)
        student[rows].copy_(grad)
    return student


def divergence_grad_(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None,
    stats: DivergenceStats,
    g_divergence: Tensor,
    g_logps: Tensor | None,
    divergence: Divergence,
    options: LogitOptions,
    teacher_options: LogitOptions,
) -> Tensor:
    """Overwrite the student's logits with their gradient; return it.

    `g_divergence` and `g_logps` are (N,), of any stride.
    """
    compute = _divergence_grad_triton_ if both_on_triton(student, teacher) else _divergence_grad_torch_
    if student.shape[1] == 0:
        return student
    return compute(student, teacher, target, stats, g_divergence, g_logps, divergence, options, teacher_options)


def tail_grad_(
    logits: Tensor, normalisers: Sums, g_log_sum: Tensor, g_hard_log_sum: Tensor | None, options: LogitOptions
) -> Tensor:
    """Overwrite logits with their gradient, 0 at -inf; return it. `normalisers` are from `tail_stats`."""
    compute = _divergence_grad_triton_ if both_on_triton(logits, None) else _divergence_grad_torch_
    if logits.shape[1] == 0:
        return logits
    stats = DivergenceStats(normalisers.log_sum, normalisers)
    # d(hard_log_sum)/dz = p1
    g_logps = None if g_hard_log_sum is None else -g_hard_log_sum
    return compute(logits, None, None, stats, g_log_sum, g_logps, None, options, options)
