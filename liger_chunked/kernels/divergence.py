"""Divergences of a teacher's rows of logits from a student's: the value, and what the gradient needs beside it.

With `z`, `t` the rows after their transforms but for the temperature `T`, `p = softmax(z / T)` and `q = softmax(t / T)`
over the same columns, a divergence `D(p, q)` has the gradient

    T dD/dz_v = p_v (a_v - sum_u p_u a_u)        a_v = dD/dp_v

so that beside its value it takes one more sum, the `slope`. The Kullback-Leibler divergences and the cosine are found
while the normalisers are, in the first sweep; a mixture of `p` and `q`, or their distance, needs both normalisers first
and takes a second sweep. Bytes, in tiles read: 2, or 4 with the second sweep. The gradient (divergence_grad.py) reads 2
and writes 1. 8192 x 151936 in bfloat16 is 2.49 GB, 0.58 ms at 4.29 TB/s.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.kernels.backend import (
    exp,
    jit,
    row_blocks,
    tl,
    transform,
    transform_arguments,
    transform_block,
    use_triton,
)
from liger_chunked.types import Divergence, LogitOptions, accumulation_dtype

# Below this a log-probability is that of an event without any probability, in float64 too; the mixture of two such
# events is then a number, where logarithms of zero would make none.
LOG_ZERO = -1e4
# As F.cosine_similarity has it: a row of zeros has no direction.
_MIN_NORM = 1e-8
# Divergences whose second sweep starts from the normalisers of the first.
_TWO_SWEEPS = ("mixture", "tvd")


class DivergenceStats(NamedTuple):
    """What is known of each row when its sweeps are done; each field (N,)."""

    divergence: Tensor  # log_sum without a teacher
    max: Tensor  # of the student's z: p = exp((z - max) / T - log_sum)
    log_sum: Tensor
    hard_log_sum: Tensor | None  # at temperature 1: exp((z - max) - hard_log_sum); None where that is log_sum
    logps: Tensor | None  # log-probability of the target under the student at temperature 1; None without target
    teacher_max: Tensor | None = None
    teacher_log_sum: Tensor | None = None
    slope: Tensor | None = None  # sum p a; of the cosine, the gradient's coefficient of z
    teacher_slope: Tensor | None = None  # of the cosine, the gradient's coefficient of t


class _Sums(NamedTuple):
    """The first sweep."""

    max: Tensor
    sum_exp: Tensor  # sum exp((z - max) / T)
    hard_sum_exp: Tensor | None = None  # sum exp(z - max)
    target_logit: Tensor | None = None
    teacher_max: Tensor | None = None
    teacher_sum_exp: Tensor | None = None
    # With z and t relative to their maxima, so that large logits do not cancel, and at the temperature: of the forward
    # KL sum exp(t) (t - z), of the reverse sum exp(z) (z - t). Of the cosine sum z t.
    moment: Tensor | None = None
    square: Tensor | None = None  # sum z ** 2
    teacher_square: Tensor | None = None


@jit
def _sums_kernel(
    z_ptr, z_stride, t_ptr, t_stride, target_ptr,
    max_ptr, sum_exp_ptr, hard_sum_exp_ptr, target_logit_ptr,
    teacher_max_ptr, teacher_sum_exp_ptr, moment_ptr, square_ptr, teacher_square_ptr,
    n_cols, scale, softcap, inv_temperature, teacher_scale, teacher_softcap, teacher_inv_temperature,
    KIND: tl.constexpr, BLOCK: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    # One program per row. A null pointer stands for what nobody asked for.
    row = tl.program_id(0).to(tl.int64)
    z_row_ptr = z_ptr + row * z_stride
    running_max = -float("inf")
    sum_exp = 0.0
    hard_sum_exp = 0.0
    teacher_max = -float("inf")
    teacher_sum_exp = 0.0
    moment = 0.0
    dot = tl.zeros([BLOCK], tl.float32)  # per lane until the row ends, as nothing rescales them
    square = tl.zeros([BLOCK], tl.float32)
    teacher_square = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < n_cols
        raw = tl.load(z_row_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        z = transform_block(raw, scale, softcap, None)
        if t_ptr is not None:
            t = tl.load(t_ptr + row * t_stride + cols, mask=inside, other=0.0).to(tl.float32)
            t = transform_block(t, teacher_scale, teacher_softcap, None)
        if KIND == "cosine":
            # The transform maps the zeros beyond the row to zeros.
            dot += z * t
            square += z * z
            teacher_square += t * t
        if KIND == "tail":
            z = tl.where(inside & (raw != -float("inf")), z, -float("inf"))
        else:
            z = tl.where(inside, z, -float("inf"))

        new_max = tl.maximum(running_max, tl.max(z, axis=0))
        # While every logit so far is -inf there is nothing to rescale, and -inf - -inf is not a number.
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        moved = running_max - shift
        z = z - shift
        if hard_sum_exp_ptr is not None:
            hard_sum_exp = hard_sum_exp * exp(moved, PRECISE) + tl.sum(exp(z, PRECISE), axis=0)
        if inv_temperature is not None:
            moved = moved * inv_temperature
            z = z * inv_temperature
        rescale = exp(moved, PRECISE)
        e = exp(z, PRECISE)
        if teacher_sum_exp_ptr is not None:
            t = tl.where(inside, t, -float("inf"))
            teacher_new_max = tl.maximum(teacher_max, tl.max(t, axis=0))
            teacher_shift = tl.where(teacher_new_max == -float("inf"), 0.0, teacher_new_max)
            teacher_moved = teacher_max - teacher_shift
            t = t - teacher_shift
            if teacher_inv_temperature is not None:
                teacher_moved = teacher_moved * teacher_inv_temperature
                t = t * teacher_inv_temperature
            teacher_rescale = exp(teacher_moved, PRECISE)
            teacher_e = exp(t, PRECISE)
            if KIND == "forward_kl":
                # New centres move the sum of the earlier terms by teacher_sum_exp times how far they part.
                carried = moment + tl.where(teacher_sum_exp == 0.0, 0.0, teacher_sum_exp * (teacher_moved - moved))
                moment = tl.where(teacher_rescale == 0.0, 0.0, teacher_rescale * carried)
                moment += tl.sum(tl.where(teacher_e == 0.0, 0.0, teacher_e * (t - z)), axis=0)
            if KIND == "reverse_kl":
                carried = moment + tl.where(sum_exp == 0.0, 0.0, sum_exp * (moved - teacher_moved))
                moment = tl.where(rescale == 0.0, 0.0, rescale * carried)
                moment += tl.sum(tl.where(e == 0.0, 0.0, e * (z - t)), axis=0)
            teacher_sum_exp = teacher_sum_exp * teacher_rescale + tl.sum(teacher_e, axis=0)
            teacher_max = teacher_new_max
        sum_exp = sum_exp * rescale + tl.sum(e, axis=0)
        running_max = new_max

    tl.store(max_ptr + row, running_max)
    tl.store(sum_exp_ptr + row, sum_exp)
    if hard_sum_exp_ptr is not None:
        tl.store(hard_sum_exp_ptr + row, hard_sum_exp)
    if teacher_sum_exp_ptr is not None:
        tl.store(teacher_max_ptr + row, teacher_max)
        tl.store(teacher_sum_exp_ptr + row, teacher_sum_exp)
    if KIND == "cosine":
        tl.store(moment_ptr + row, tl.sum(dot, axis=0))
        tl.store(square_ptr + row, tl.sum(square, axis=0))
        tl.store(teacher_square_ptr + row, tl.sum(teacher_square, axis=0))
    elif moment_ptr is not None:
        tl.store(moment_ptr + row, moment)
    if target_logit_ptr is not None:
        z = tl.load(z_row_ptr + tl.load(target_ptr + row)).to(tl.float32)
        tl.store(target_logit_ptr + row, transform_block(z, scale, softcap, None))


@jit
def log_softmax_block(z, row_max, log_sum, inv_temperature):
    z = z - row_max
    if inv_temperature is not None:
        z = z * inv_temperature
    return z - log_sum


@jit
def log_ratios(log_p, log_q, beta, one_minus_beta, even, PRECISE: tl.constexpr, CENTRAL: tl.constexpr):
    """`log(p / m)` and `log(q / m)` of the mixture `m = one_minus_beta * p + beta * q`.

    Relative to whichever of the two makes up more of m: exact both near p = q and for a beta near 0 or 1. `even` is the
    `log(q / p)` where they make up the same. CENTRAL, for a beta next to a half, takes a quarter fewer instructions.
    """
    gap = log_q - log_p
    mostly_teacher = gap > even
    share = tl.where(mostly_teacher, one_minus_beta, beta)  # of the other one
    ratio = exp(tl.where(mostly_teacher, -gap, gap), PRECISE)  # of the other one to the larger part
    x = share * ratio - share
    if CENTRAL:
        # log(1 + x) = 2 atanh(s), with |s| of at most 0.38: the next term is below 1e-7 of the first.
        s = x / (2.0 + x)
        s2 = s * s
        series = 0.111111111 + s2 * (0.0909090909 + s2 * 0.0769230769)
        series = s2 * (0.333333333 + s2 * (0.2 + s2 * (0.142857143 + s2 * series)))
        log_mixed = 2.0 * s * (1.0 + series)
    else:
        mixed = tl.where(mostly_teacher, beta, one_minus_beta) + share * ratio
        # Near 0, where 1 + x has lost what matters; the next term is below 1e-7 of the first.
        series = x * (1.0 + x * (-0.5 + x * (0.333333333 + x * (-0.25 + x * 0.2))))
        log_mixed = tl.where(tl.abs(x) < 0.03125, series, tl.log(mixed))
    return tl.where(mostly_teacher, -gap, 0.0) - log_mixed, tl.where(mostly_teacher, 0.0, gap) - log_mixed


@jit
def _second_sweep_kernel(
    z_ptr, z_stride, t_ptr, t_stride, max_ptr, log_sum_ptr, teacher_max_ptr, teacher_log_sum_ptr,
    divergence_ptr, slope_ptr,
    n_cols, scale, softcap, inv_temperature, teacher_scale, teacher_softcap, teacher_inv_temperature,
    beta, one_minus_beta, even, on_student, on_teacher, on_ratio,
    KIND: tl.constexpr, BLOCK: tl.constexpr, PRECISE: tl.constexpr, CENTRAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_max = tl.load(max_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    teacher_max = tl.load(teacher_max_ptr + row)
    teacher_log_sum = tl.load(teacher_log_sum_ptr + row)
    student_sum = tl.zeros([BLOCK], tl.float32)  # per lane until the row ends
    teacher_sum = tl.zeros([BLOCK], tl.float32)
    ratio_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < n_cols
        z = tl.load(z_ptr + row * z_stride + cols, mask=inside, other=0.0).to(tl.float32)
        t = tl.load(t_ptr + row * t_stride + cols, mask=inside, other=0.0).to(tl.float32)
        z = transform_block(z, scale, softcap, None)
        t = transform_block(t, teacher_scale, teacher_softcap, None)
        log_p = tl.where(inside, log_softmax_block(z, row_max, log_sum, inv_temperature), -1e4)
        log_q = tl.where(inside, log_softmax_block(t, teacher_max, teacher_log_sum, teacher_inv_temperature), -1e4)
        if KIND == "mixture":
            log_p = tl.maximum(log_p, -1e4)  # LOG_ZERO
            log_q = tl.maximum(log_q, -1e4)
            p = exp(log_p, PRECISE)
            log_p_over_m, log_q_over_m = log_ratios(log_p, log_q, beta, one_minus_beta, even, PRECISE, CENTRAL)
            if on_teacher is not None:
                teacher_sum += exp(log_q, PRECISE) * log_q_over_m
            if on_student is not None:
                student_sum += p * log_p_over_m
            if on_ratio is not None:
                ratio_sum += p * tl.exp(log_q_over_m)
        else:
            p = exp(log_p, PRECISE)
            q = exp(log_q, PRECISE)
            teacher_sum += tl.abs(p - q)
            student_sum += tl.where(p > q, p, tl.where(p < q, -p, 0.0))
    divergence = 0.0
    slope = 0.0
    if KIND == "tvd":
        divergence += 0.5 * tl.sum(teacher_sum, axis=0)
        slope += 0.5 * tl.sum(student_sum, axis=0)
    else:
        if on_teacher is not None:
            divergence += on_teacher * tl.sum(teacher_sum, axis=0)
        if on_student is not None:
            divergence += on_student * tl.sum(student_sum, axis=0)
            slope += on_student * tl.sum(student_sum, axis=0)
        if on_ratio is not None:
            slope += on_ratio * tl.sum(ratio_sum, axis=0)
    tl.store(divergence_ptr + row, divergence)
    tl.store(slope_ptr + row, slope)


def pair_transform(options: LogitOptions, teacher_options: LogitOptions) -> dict[str, float | None]:
    """Both transforms, as the kernels of a pair of rows take them: the temperature apart from the rest."""

    def arguments(options: LogitOptions) -> dict[str, float | None]:
        inv_temperature = None if options.temperature == 1.0 else 1.0 / options.temperature
        return transform_arguments(replace(options, temperature=1.0)) | {"inv_temperature": inv_temperature}

    teacher = {f"teacher_{name}": value for name, value in arguments(teacher_options).items()}
    return arguments(options) | teacher


def _even(beta: float) -> float:
    """`log(q / p)` where `(1 - beta) * p = beta * q`."""
    return math.log1p(-beta) - math.log(beta) if 0.0 < beta < 1.0 else 0.0


def mixture_arguments(divergence: Divergence) -> dict[str, float | bool | None]:
    """The mixture as the kernels take it: what does nothing is None and compiles to nothing."""
    return {
        "beta": float(divergence.beta),
        "one_minus_beta": 1.0 - divergence.beta,
        "even": _even(divergence.beta),
        "CENTRAL": abs(divergence.beta - 0.5) <= 0.05,
        "on_student": divergence.on_student or None,
        "on_ratio": divergence.on_ratio or None,
    }


def _sums_triton(
    student: Tensor, teacher: Tensor | None, target: Tensor | None, kind: str, options: LogitOptions,
    teacher_options: LogitOptions, hard: bool,
) -> _Sums:  # fmt: skip
    n, n_cols = student.shape

    def buffer(wanted: bool = True) -> Tensor | None:
        return torch.empty(n, dtype=torch.float32, device=student.device) if wanted else None

    normalised = teacher is not None and kind != "cosine"
    sums = _Sums(
        max=buffer(),  # type: ignore[arg-type]
        sum_exp=buffer(),  # type: ignore[arg-type]
        hard_sum_exp=buffer(hard),
        target_logit=buffer(target is not None),
        teacher_max=buffer(normalised),
        teacher_sum_exp=buffer(normalised),
        moment=buffer(kind in ("forward_kl", "reverse_kl", "cosine")),
        square=buffer(kind == "cosine"),
        teacher_square=buffer(kind == "cosine"),
    )
    if n:
        _sums_kernel[(n,)](
            z_ptr=student,
            z_stride=student.stride(0),
            t_ptr=teacher,
            t_stride=0 if teacher is None else teacher.stride(0),
            target_ptr=target,
            **{f"{name}_ptr": value for name, value in sums._asdict().items()},
            n_cols=n_cols,
            **pair_transform(options, teacher_options),
            KIND=kind,
            BLOCK=min(4096 if teacher is None else 2048, 1 << (n_cols - 1).bit_length()),
            PRECISE=student.dtype == torch.float32,
            num_warps=4,
        )
    return sums


def centred_(z: Tensor) -> tuple[Tensor, Tensor]:
    """`max` and, in place, `z - max`; rows of -inf alone are not moved."""
    maximum = z.amax(1)
    return maximum, z.sub_(torch.where(maximum == -torch.inf, 0.0, maximum)[:, None])


def widened(logits: Tensor, options: LogitOptions, dtype: torch.dtype, holes: bool = False) -> Tensor:
    """A copy in `dtype` after the transform but for the temperature; with `holes`, -inf before it is -inf after it."""
    z = transform(logits.to(dtype, copy=True), options.logit_scale, options.softcap, 1.0)
    return z.masked_fill_(logits == -torch.inf, -torch.inf) if holes else z


def weighted(weight: Tensor, x: Tensor) -> Tensor:
    """Row sums of `weight * x`, of terms that are 0 where `weight` is, whatever `x` may be there."""
    return (weight * x).masked_fill_(weight == 0, 0.0).sum(1)


def _sums_torch(
    student: Tensor, teacher: Tensor | None, target: Tensor | None, kind: str, options: LogitOptions,
    teacher_options: LogitOptions, hard: bool,
) -> _Sums:  # fmt: skip
    dtype = accumulation_dtype(student.dtype)
    parts: list[dict[str, Tensor]] = []
    for rows in row_blocks(student) if student.shape[0] else [slice(0, 0)]:
        z = widened(student[rows], options, dtype, holes=kind == "tail")
        part = {}
        if target is not None:
            part["target_logit"] = z.gather(1, target[rows][:, None])[:, 0]
        if kind == "cosine":
            assert teacher is not None
            t = widened(teacher[rows], teacher_options, dtype)
            part |= {"moment": (z * t).sum(1), "square": z.square().sum(1), "teacher_square": t.square().sum(1)}
        part["max"], z = centred_(z)
        if hard:
            part["hard_sum_exp"] = z.exp().sum(1)
        e = z.div_(options.temperature).exp()
        part["sum_exp"] = e.sum(1)
        if teacher is not None and kind != "cosine":
            part["teacher_max"], t = centred_(widened(teacher[rows], teacher_options, dtype))
            teacher_e = t.div_(teacher_options.temperature).exp()
            part["teacher_sum_exp"] = teacher_e.sum(1)
            if kind == "forward_kl":
                part["moment"] = weighted(teacher_e, t - z)
            elif kind == "reverse_kl":
                part["moment"] = weighted(e, z - t)
        parts.append(part)
    return _Sums(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def _second_sweep_triton(
    student: Tensor, teacher: Tensor, stats: DivergenceStats, divergence: Divergence, options: LogitOptions,
    teacher_options: LogitOptions,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    n, n_cols = student.shape
    value, slope = torch.empty_like(stats.max), torch.empty_like(stats.max)
    if n:
        _second_sweep_kernel[(n,)](
            z_ptr=student,
            z_stride=student.stride(0),
            t_ptr=teacher,
            t_stride=teacher.stride(0),
            max_ptr=stats.max,
            log_sum_ptr=stats.log_sum,
            teacher_max_ptr=stats.teacher_max,
            teacher_log_sum_ptr=stats.teacher_log_sum,
            divergence_ptr=value,
            slope_ptr=slope,
            n_cols=n_cols,
            **pair_transform(options, teacher_options),
            **mixture_arguments(divergence),
            on_teacher=divergence.on_teacher or None,
            KIND=divergence.kind,
            BLOCK=min(2048, 1 << (n_cols - 1).bit_length()),
            PRECISE=student.dtype == torch.float32,
            num_warps=4,
        )
    return value, slope


def log_ratios_torch(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """`log_ratios` in torch."""
    gap = log_q - log_p
    mostly_teacher = gap > _even(beta)
    of_student, of_teacher = gap.new_tensor(1.0 - beta), gap.new_tensor(beta)
    share = torch.where(mostly_teacher, of_student, of_teacher)
    smaller = torch.where(mostly_teacher, -gap, gap)
    x = smaller.expm1().mul_(share)
    mixed = torch.where(mostly_teacher, of_teacher, of_student).addcmul_(share, smaller.exp_())
    log_mixed = torch.where(x.abs() < 0.5, x.log1p(), mixed.log_())
    log_p_over_m = torch.where(mostly_teacher, -gap, 0.0).sub_(log_mixed)
    return log_p_over_m, torch.where(mostly_teacher, 0.0, gap).sub_(log_mixed)


def _second_sweep_torch(
    student: Tensor, teacher: Tensor, stats: DivergenceStats, divergence: Divergence, options: LogitOptions,
    teacher_options: LogitOptions,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    value, slope = torch.empty_like(stats.max), torch.empty_like(stats.max)
    for rows in row_blocks(student):
        log_p, log_q = log_probs_torch(student, teacher, stats, rows, options, teacher_options)
        if divergence.kind == "tvd":
            p, q = log_p.exp(), log_q.exp()
            value[rows] = 0.5 * (p - q).abs().sum(1)
            slope[rows] = 0.5 * (p * (p - q).sign()).sum(1)
            continue
        log_p, log_q = log_p.clamp_(min=LOG_ZERO), log_q.clamp_(min=LOG_ZERO)
        p = log_p.exp()
        log_p_over_m, log_q_over_m = log_ratios_torch(log_p, log_q, divergence.beta)
        student_term = divergence.on_student * (p * log_p_over_m).sum(1)
        value[rows] = student_term + divergence.on_teacher * (log_q.exp() * log_q_over_m).sum(1)
        slope[rows] = student_term + divergence.on_ratio * (p * log_q_over_m.exp()).sum(1)
    return value, slope


def log_probs_torch(
    student: Tensor, teacher: Tensor, stats: DivergenceStats, rows: slice, options: LogitOptions,
    teacher_options: LogitOptions,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`log p` and `log q` of some rows, from their normalisers."""
    assert stats.teacher_max is not None and stats.teacher_log_sum is not None
    dtype = accumulation_dtype(student.dtype)
    z = widened(student[rows], options, dtype)
    t = widened(teacher[rows], teacher_options, dtype)
    z = z.sub_(stats.max[rows, None]).div_(options.temperature)
    t = t.sub_(stats.teacher_max[rows, None]).div_(teacher_options.temperature)
    return z.sub_(stats.log_sum[rows, None]), t.sub_(stats.teacher_log_sum[rows, None])


def both_on_triton(student: Tensor, teacher: Tensor | None) -> bool:
    """Whether the Triton kernels serve a pair of rows."""
    return use_triton(student) and (teacher is None or use_triton(teacher))


def _first_sweep(
    student: Tensor, teacher: Tensor | None, target: Tensor | None, kind: str, options: LogitOptions,
    teacher_options: LogitOptions, hard: bool,
) -> tuple[_Sums, DivergenceStats]:  # fmt: skip
    compute = _sums_triton if both_on_triton(student, teacher) else _sums_torch
    sums = compute(student, teacher, target, kind, options, teacher_options, hard)
    log_sum = sums.sum_exp.log()
    hard_log_sum = None if sums.hard_sum_exp is None else sums.hard_sum_exp.log()
    logps = None
    if sums.target_logit is not None:
        # In this order: the difference is exact for large logits.
        logps = (sums.target_logit - sums.max) - (log_sum if hard_log_sum is None else hard_log_sum)
    return sums, DivergenceStats(log_sum, sums.max, log_sum, hard_log_sum, logps)


def divergence_stats(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None,
    divergence: Divergence,
    options: LogitOptions,
    teacher_options: LogitOptions,
) -> DivergenceStats:
    """Sweep pairs of rows of logits: the divergence of each, and what its gradient needs.

    Args:
        student: (N, V) before the transform; rows contiguous.
        teacher: (N, V) likewise, of any floating dtype.
        target: (N,) int64, for the log-probability of a token at temperature 1; None without.
        divergence: which.
        options, teacher_options: the transform of each.
    """
    hard = target is not None and options.temperature != 1.0
    sums, stats = _first_sweep(student, teacher, target, divergence.kind, options, teacher_options, hard)
    if divergence.kind == "cosine":
        assert sums.moment is not None and sums.square is not None and sums.teacher_square is not None
        norm = sums.square.sqrt().clamp(min=_MIN_NORM)
        inv_norms = 1.0 / (norm * sums.teacher_square.sqrt().clamp(min=_MIN_NORM))
        cosine = sums.moment * inv_norms
        # d(1 - cos)/dz = cos z / |z|^2 - t / (|z| |t|)
        return stats._replace(divergence=1.0 - cosine, slope=cosine / norm.square(), teacher_slope=inv_norms)
    assert sums.teacher_sum_exp is not None
    teacher_log_sum = sums.teacher_sum_exp.log()
    stats = stats._replace(teacher_max=sums.teacher_max, teacher_log_sum=teacher_log_sum)
    if divergence.kind in _TWO_SWEEPS:
        compute = _second_sweep_triton if both_on_triton(student, teacher) else _second_sweep_torch
        value, slope = compute(student, teacher, stats, divergence, options, teacher_options)
        return stats._replace(divergence=value, slope=slope)
    assert sums.moment is not None
    if divergence.kind == "forward_kl":
        # a = -q / p: the slope is -1 for every p.
        return stats._replace(divergence=sums.moment / sums.teacher_sum_exp - teacher_log_sum + stats.log_sum)
    value = sums.moment / sums.sum_exp - stats.log_sum + teacher_log_sum
    return stats._replace(divergence=value, slope=value)


def tail_stats(logits: Tensor, options: LogitOptions, hard: bool) -> DivergenceStats:
    """The normalisers of rows of logits with holes: entries of -inf, before the transform, are not there.

    Args:
        logits: (N, V) before the transform; rows contiguous.
        options: the transform.
        hard: ask for the normaliser at temperature 1, where that is another.
    """
    _, stats = _first_sweep(logits, None, None, "tail", options, options, hard and options.temperature != 1.0)
    return stats
