"""Divergences of student and teacher logits, with sums for their gradients.

    p = softmax(z/T), q = softmax(t/T)            z, t: logits transformed except for the temperature T
    T dD/dz_v = p_v (a_v - slope)                 a_v = dD/dp_v, slope = sum_u p_u a_u

For TVD, a_v - slope would cancel: it is `below` where p > q and `-above` where p < q. `below` is the mass of p where
p < q, plus half where p = q; `above` the rest.

Bytes: both tiles once for KL and cosine, twice for JSD, skewed KL and TVD.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from liger_chunked.kernels.backend import exp, jit, log, log2, reciprocal, row_blocks, tl
from liger_chunked.kernels.divergence_sums import (
    Sums,
    both_on_triton,
    merge_sums,
    pair_arguments,
    products,
    sums,
    widened,
)
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.operands import Values
from liger_chunked.kernels.transform import load_block, transform_block
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.types import Divergence, LogitOptions, accumulation_dtype

# Floor of log p: mixtures stay finite.
LOG_ZERO = -1e4
# As in F.cosine_similarity.
_MIN_NORM = 1e-8
_TWO_SWEEPS = ("mixture", "tvd")


class Gather(Protocol):
    """Collects the ranks' NamedTuples of values (N,), in rank order."""

    def __call__(self, values: Values, /) -> list[Values]: ...


class _Mixture(NamedTuple):
    divergence: Tensor
    slope: Tensor


class _TotalVariation(NamedTuple):
    divergence: Tensor
    below: Tensor
    above: Tensor


def _added(values: Values, gather: Gather | None) -> Values:
    if gather is None:
        return values
    columns = zip(*gather(values), strict=True)
    return type(values)(*(torch.stack(column).sum(0) for column in columns))


class DivergenceStats(NamedTuple):
    """Divergences of pairs of rows, and what their gradients read, (N,) each; None where nothing reads it."""

    divergence: Tensor
    normalisers: Sums | None  # None: a cosine without a target
    logps: Tensor | None = None  # log p(target) at T = 1
    slope: Tensor | None = None  # of reverse KL and mixtures
    below: Tensor | None = None  # of TVD
    above: Tensor | None = None
    of_student: Tensor | None = None  # of the cosine: factor of z in the gradient
    of_teacher: Tensor | None = None  # factor of t

    def of_gradient(self, kind: str) -> tuple[Tensor | None, Tensor | None]:
        """Return the two values of a row that the gradient of this kind of divergence reads."""
        if kind == "tvd":
            return self.below, self.above
        if kind == "cosine":
            return self.of_student, self.of_teacher
        return self.slope, None


@jit
def softmax_block(z, centre, sum_exp, log_sum, inv_temperature, PRECISE: tl.constexpr):
    z = z - centre
    if inv_temperature is not None:
        z = z * inv_temperature
    # exp(z - log_sum) would round its argument.
    return exp(z, PRECISE) * reciprocal(sum_exp), z - log_sum


@jit
def log_ratios(log_p, log_q, beta, one_minus_beta, even, CENTRAL: tl.constexpr):
    """Return `log(p/m)` and `log(q/m)`, `m = (1 - beta) p + beta q`; exactly 0 where p = q.

    CENTRAL is for 16-bit logits and beta far from 0 and 1, with an error of `2**-22 max(1, |log(q/p)|)`. The other path
    factors out the larger part of m, the teacher's if `log(q/p) > even`.
    """
    # LOG_ZERO. The hardware's maximum drops NaN.
    log_p = tl.maximum(log_p, -1e4, propagate_nan=tl.PropagateNan.ALL)
    gap = tl.maximum(log_q, -1e4, propagate_nan=tl.PropagateNan.ALL) - log_p
    if CENTRAL:
        # exp(87) fits in float32.
        gap = tl.minimum(gap, 87.0, propagate_nan=tl.PropagateNan.ALL)
        log_p_over_m = -log(one_minus_beta + beta * exp(gap, False))
        return log_p_over_m, gap + log_p_over_m
    else:
        mostly_teacher = gap > even
        share = tl.where(mostly_teacher, one_minus_beta, beta)
        ratio = exp(tl.where(mostly_teacher, -gap, gap), True)
        x = share * ratio - share
        mixed = tl.where(mostly_teacher, beta, one_minus_beta) + share * ratio
        # 1 + x loses low bits of x.
        series = x * (1.0 + x * (-0.5 + x * (0.333333333 + x * (-0.25 + x * 0.2))))
        log_mixed = tl.where(tl.abs(x) < 0.03125, series, tl.log(mixed))
        return tl.where(mostly_teacher, -gap, 0.0) - log_mixed, tl.where(mostly_teacher, 0.0, gap) - log_mixed


@jit
def _log2_prob(z, centre, log_sum, inv_temperature):
    """Return `log2 p`, at least -120, for 16-bit logits."""
    z = z - centre
    if inv_temperature is not None:
        z = z * inv_temperature
    log_p = z * 1.4426950408889634 - log_sum * 1.4426950408889634
    return tl.maximum(log_p, -120.0, propagate_nan=tl.PropagateNan.ALL)


@jit
def _compare_block(
    z_ptr, t_ptr, cols, n_cols,
    centre, sum_exp, log_sum, teacher_centre, teacher_sum_exp, teacher_log_sum, on_p, on_q, on_ratio_sum,
    scale, softcap, inv_temperature, teacher_scale, teacher_softcap, teacher_inv_temperature,
    beta, one_minus_beta, even,
    KIND: tl.constexpr, RATIO: tl.constexpr, WHOLE: tl.constexpr, PRECISE: tl.constexpr, CENTRAL: tl.constexpr,
):  # fmt: skip
    """Add a block of both rows; -inf adds 0."""
    z = transform_block(load_block(z_ptr, cols, n_cols, WHOLE), scale, softcap, None)
    t = transform_block(load_block(t_ptr, cols, n_cols, WHOLE), teacher_scale, teacher_softcap, None)
    if not WHOLE:
        z = tl.where(cols < n_cols, z, -float("inf"))
        t = tl.where(cols < n_cols, t, -float("inf"))
    if KIND == "mixture" and CENTRAL:
        # In base 2; q = p (q/p) saves an exponential.
        log_p = _log2_prob(z, centre, log_sum, inv_temperature)
        gap = _log2_prob(t, teacher_centre, teacher_log_sum, teacher_inv_temperature) - log_p
        p, ratio = tl.exp2(log_p), tl.exp2(gap)
        m_over_p = log2(one_minus_beta + beta * ratio)
        on_p -= p * m_over_p
        on_q += p * ratio * (gap - m_over_p)
        if RATIO:
            on_ratio_sum += p * tl.exp2(gap - m_over_p)
        return on_p, on_q, on_ratio_sum
    p, log_p = softmax_block(z, centre, sum_exp, log_sum, inv_temperature, PRECISE)
    q, log_q = softmax_block(t, teacher_centre, teacher_sum_exp, teacher_log_sum, teacher_inv_temperature, PRECISE)
    if KIND == "mixture":
        log_p_over_m, log_q_over_m = log_ratios(log_p, log_q, beta, one_minus_beta, even, False)
        on_p += p * log_p_over_m
        on_q += q * log_q_over_m
        if RATIO:
            on_ratio_sum += p * exp(log_q_over_m, PRECISE)
    else:
        below = tl.where(p < q, p, tl.where(p > q, 0.0, 0.5 * p))
        on_q += tl.abs(p - q)
        on_p += below
        on_ratio_sum += p - below
    return on_p, on_q, on_ratio_sum


@Kernel
def _second_sweep_kernel(
    z_ptr, z_stride, t_ptr, t_stride,
    centre_ptr, sum_exp_ptr, log_sum_ptr, teacher_centre_ptr, teacher_sum_exp_ptr, teacher_log_sum_ptr,
    divergence_ptr, first_ptr, second_ptr,
    n_cols, scale, softcap, inv_temperature, teacher_scale, teacher_softcap, teacher_inv_temperature,
    beta, one_minus_beta, even, on_student, on_teacher, on_ratio,
    KIND: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISE: tl.constexpr, CENTRAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    t_ptr += row * t_stride
    lanes = tl.arange(0, BLOCK)
    whole_blocks = n_cols // BLOCK * BLOCK
    centre = tl.load(centre_ptr + row)
    sum_exp = tl.load(sum_exp_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    teacher_centre = tl.load(teacher_centre_ptr + row)
    teacher_sum_exp = tl.load(teacher_sum_exp_ptr + row)
    teacher_log_sum = tl.load(teacher_log_sum_ptr + row)
    on_p = tl.zeros([BLOCK], tl.float32)
    on_q = tl.zeros([BLOCK], tl.float32)
    ratio_sum = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, whole_blocks, BLOCK, num_stages=STAGES):
        on_p, on_q, ratio_sum = _compare_block(
            z_ptr + start, t_ptr + start, lanes, n_cols,
            centre, sum_exp, log_sum, teacher_centre, teacher_sum_exp, teacher_log_sum, on_p, on_q, ratio_sum,
            scale, softcap, inv_temperature, teacher_scale, teacher_softcap, teacher_inv_temperature,
            beta, one_minus_beta, even, KIND, on_ratio is not None, True, PRECISE, CENTRAL,
        )  # fmt: skip
    if whole_blocks < n_cols:
        on_p, on_q, ratio_sum = _compare_block(
            z_ptr, t_ptr, whole_blocks + lanes, n_cols,
            centre, sum_exp, log_sum, teacher_centre, teacher_sum_exp, teacher_log_sum, on_p, on_q, ratio_sum,
            scale, softcap, inv_temperature, teacher_scale, teacher_softcap, teacher_inv_temperature,
            beta, one_minus_beta, even, KIND, on_ratio is not None, False, PRECISE, CENTRAL,
        )  # fmt: skip
    divergence = 0.0
    slope = 0.0
    if KIND == "tvd":
        divergence += 0.5 * tl.sum(on_q, axis=0)
        slope += tl.sum(on_p, axis=0)  # `below`
        tl.store(second_ptr + row, tl.sum(ratio_sum, axis=0))
    else:
        unit = 0.6931471805599453 if CENTRAL else 1.0  # bits or nats
        if on_teacher is not None:
            divergence += on_teacher * unit * tl.sum(on_q, axis=0)
        if on_student is not None:
            on_p_sum = on_student * unit * tl.sum(on_p, axis=0)
            divergence += on_p_sum
            slope += on_p_sum
        if on_ratio is not None:
            slope += on_ratio * tl.sum(ratio_sum, axis=0)
    tl.store(divergence_ptr + row, divergence)
    tl.store(first_ptr + row, slope)


def _even(beta: float) -> float:
    """Return `log(q/p)` where `(1 - beta) p = beta q`."""
    return math.log1p(-beta) - math.log(beta) if 0.0 < beta < 1.0 else 0.0


def mixture_arguments(divergence: Divergence, dtype: torch.dtype) -> dict[str, float | bool | None]:
    return {
        "beta": float(divergence.beta),
        "one_minus_beta": 1.0 - divergence.beta,
        "even": _even(divergence.beta),
        "CENTRAL": dtype != torch.float32 and abs(divergence.beta - 0.5) <= 0.45,
        "on_student": divergence.on_student or None,
        "on_ratio": divergence.on_ratio or None,
    }


NORMALISERS = ("centre", "sum_exp", "log_sum", "teacher_centre", "teacher_sum_exp", "teacher_log_sum")


def normaliser_arguments(normalisers: Sums | None) -> dict[str, Tensor | None]:
    return {f"{name}_ptr": None if normalisers is None else getattr(normalisers, name) for name in NORMALISERS}


def _second_sweep_triton(
    student: Tensor, teacher: Tensor, normalisers: Sums, divergence: Divergence, options: LogitOptions,
    teacher_options: LogitOptions,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n = student.shape[0]
    value, first, second = (torch.empty_like(normalisers.centre) for _ in range(3))
    if n:
        _second_sweep_kernel[(n,)](
            **pair_arguments(student, teacher, options, teacher_options),
            **normaliser_arguments(normalisers),
            divergence_ptr=value,
            first_ptr=first,
            second_ptr=second,
            **mixture_arguments(divergence, student.dtype),
            on_teacher=divergence.on_teacher or None,
            KIND=divergence.kind,
            STAGES=TUNING[student.device].loads_in_flight,
        )
    return value, first, second


def log_ratios_torch(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    gap = log_q - log_p
    mostly_teacher = gap > _even(beta)
    of_student, of_teacher = gap.new_full((), 1.0 - beta), gap.new_full((), beta)
    share = torch.where(mostly_teacher, of_student, of_teacher)
    smaller = torch.where(mostly_teacher, -gap, gap)
    x = smaller.expm1().mul_(share)
    mixed = torch.where(mostly_teacher, of_teacher, of_student).addcmul_(share, smaller.exp_())
    log_mixed = torch.where(x.abs() < 0.5, x.log1p(), mixed.log_())
    log_p_over_m = torch.where(mostly_teacher, -gap, 0.0).sub_(log_mixed)
    return log_p_over_m, torch.where(mostly_teacher, 0.0, gap).sub_(log_mixed)


def _second_sweep_torch(
    student: Tensor, teacher: Tensor, normalisers: Sums, divergence: Divergence, options: LogitOptions,
    teacher_options: LogitOptions,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    value, first, second = (torch.empty_like(normalisers.centre) for _ in range(3))
    for rows in row_blocks(student):
        log_p, log_q = log_probs_torch(student, teacher, normalisers, rows, options, teacher_options)
        if divergence.kind == "tvd":
            p, q = log_p.exp(), log_q.exp()
            below = p * (0.5 - 0.5 * (p - q).sign())
            value[rows] = 0.5 * (p - q).abs().sum(1)
            first[rows], second[rows] = below.sum(1), (p - below).sum(1)
            continue
        log_p, log_q = log_p.clamp_(min=LOG_ZERO), log_q.clamp_(min=LOG_ZERO)
        p = log_p.exp()
        log_p_over_m, log_q_over_m = log_ratios_torch(log_p, log_q, divergence.beta)
        student_term = divergence.on_student * (p * log_p_over_m).sum(1)
        value[rows] = student_term + divergence.on_teacher * (log_q.exp() * log_q_over_m).sum(1)
        first[rows] = student_term + divergence.on_ratio * (p * log_q_over_m.exp()).sum(1)
    return value, first, second


def log_probs_torch(
    student: Tensor, teacher: Tensor, normalisers: Sums, rows: slice, options: LogitOptions,
    teacher_options: LogitOptions,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert normalisers.teacher_centre is not None and normalisers.teacher_log_sum is not None
    dtype = accumulation_dtype(student.dtype)
    z = widened(student[rows], options, dtype)
    t = widened(teacher[rows], teacher_options, dtype)
    z = z.sub_(normalisers.centre[rows, None]).div_(options.temperature)
    t = t.sub_(normalisers.teacher_centre[rows, None]).div_(teacher_options.temperature)
    return z.sub_(normalisers.log_sum[rows, None]), t.sub_(normalisers.teacher_log_sum[rows, None])


def _log_prob(sums: Sums) -> Tensor | None:
    """Return the target's log-probability at T = 1."""
    if sums.target_logit is None:
        return None
    hard_log_sum = sums.log_sum if sums.hard_sum_exp is None else sums.hard_sum_exp.log()
    return (sums.target_logit - sums.centre) - hard_log_sum  # in this order, exact for large logits


def _cosine_stats(
    student: Tensor, teacher: Tensor, target: Tensor | None, options: LogitOptions, teacher_options: LogitOptions,
    gather: Gather | None,
) -> DivergenceStats:  # fmt: skip
    found = _added(products(student, teacher, options, teacher_options), gather)
    norm = found.square.sqrt().clamp(min=_MIN_NORM)
    inv_norms = 1.0 / (norm * found.teacher_square.sqrt().clamp(min=_MIN_NORM))
    cosine = found.dot * inv_norms
    normalisers = logps = None
    if target is not None:
        hard = options.temperature != 1.0
        normalisers = _sums(student, None, target, "student", options, options, hard, gather)
        logps = _log_prob(normalisers)
    # d(1 - cos)/dz = cos z/|z|**2 - t/(|z| |t|)
    of_student = cosine / norm.square()
    return DivergenceStats(1.0 - cosine, normalisers, logps, of_student=of_student, of_teacher=inv_norms)


def _sums(
    student: Tensor, teacher: Tensor | None, target: Tensor | None, kind: str, options: LogitOptions,
    teacher_options: LogitOptions, hard: bool, gather: Gather | None,
) -> Sums:  # fmt: skip
    found = sums(student, teacher, target, kind, options, teacher_options, hard)
    if gather is None:
        return found
    return merge_sums(gather(found), kind, options.temperature, teacher_options.temperature)


def divergence_stats(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None,
    divergence: Divergence,
    options: LogitOptions,
    teacher_options: LogitOptions,
    gather: Gather | None = None,
) -> DivergenceStats:
    """Return divergences of pairs of rows, with sums for gradients.

    Args:
        student, teacher: (N, V) logits before the transform, rows contiguous.
        target: (N,) int64. With `gather`, for a split vocabulary, columns of this rank, or out of range.
    """
    if divergence.kind == "cosine":
        return _cosine_stats(student, teacher, target, options, teacher_options, gather)
    hard = target is not None and options.temperature != 1.0
    normalisers = _sums(student, teacher, target, divergence.kind, options, teacher_options, hard, gather)
    logps = _log_prob(normalisers)
    if divergence.kind in _TWO_SWEEPS:
        on_triton = both_on_triton(student, teacher) and student.shape[1]
        compute = _second_sweep_triton if on_triton else _second_sweep_torch
        value, first, second = compute(student, teacher, normalisers, divergence, options, teacher_options)
        if divergence.kind == "tvd":
            distance, below, above = _added(_TotalVariation(value, first, second), gather)
            return DivergenceStats(distance, normalisers, logps, below=below, above=above)
        mixture = _added(_Mixture(value, first), gather)
        return DivergenceStats(mixture.divergence, normalisers, logps, slope=mixture.slope)
    assert normalisers.divergence is not None
    # The slope of reverse KL is the divergence, that of forward KL -1.
    slope = normalisers.divergence if divergence.kind == "reverse_kl" else None
    return DivergenceStats(normalisers.divergence, normalisers, logps, slope=slope)


def tail_stats(logits: Tensor, options: LogitOptions, hard: bool, gather: Gather | None = None) -> Sums:
    """Return normalisers without inputs of -inf."""
    hard = hard and options.temperature != 1.0
    return _sums(logits, None, None, "tail", options, options, hard, gather)
