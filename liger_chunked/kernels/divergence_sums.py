"""Normalisers, KL and dot products of pairs of rows. Bytes: both tiles read once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_chunked.kernels.backend import (
    REACH,
    block_size,
    exp,
    jit,
    reciprocal,
    row_blocks,
    tl,
    use_triton,
)
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.transform import load_block, transform, transform_arguments, transform_block
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.types import LogitOptions, accumulation_dtype


class Sums(NamedTuple):
    """Sums of rows, (N,) each; None unless requested."""

    centre: Tensor  # near the maximum; -inf for a row of -inf
    sum_exp: Tensor  # sum exp((z - centre)/T)
    log_sum: Tensor
    hard_sum_exp: Tensor | None = None  # sum exp(z - centre)
    target_logit: Tensor | None = None
    teacher_centre: Tensor | None = None
    teacher_sum_exp: Tensor | None = None
    teacher_log_sum: Tensor | None = None
    divergence: Tensor | None = None


class Products(NamedTuple):
    """`sum z t`, `sum z**2` and `sum t**2` of each pair of rows, (N,)."""

    dot: Tensor
    square: Tensor
    teacher_square: Tensor


@jit
def _load(ptr, cols, n_cols, scale, softcap, WHOLE: tl.constexpr, HOLES: tl.constexpr):
    """Load transformed logits, -inf past the row. HOLES keeps inputs of -inf."""
    raw = load_block(ptr, cols, n_cols, WHOLE)
    z = transform_block(raw, scale, softcap, None)
    if HOLES:
        z = tl.where(raw == -float("inf"), raw, z)
    if not WHOLE:
        z = tl.where(cols < n_cols, z, -float("inf"))
    return z


@jit
def _first_centre(ptr, n_cols, scale, softcap, BLOCK: tl.constexpr, HOLES: tl.constexpr):
    centre = tl.max(_load(ptr, tl.arange(0, BLOCK), n_cols, scale, softcap, False, HOLES), axis=0)
    return tl.where(centre == -float("inf"), 0.0, centre)


@jit
def _add_block(
    z_ptr, t_ptr, cols, n_cols, centre, teacher_centre,
    top, sum_exp, hard_sum_exp, teacher_top, teacher_sum_exp, moment,
    scale, softcap, inv_temperature, teacher_scale, teacher_softcap, teacher_inv_temperature,
    KIND: tl.constexpr, TEACHER: tl.constexpr, HARD: tl.constexpr, WHOLE: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    z = _load(z_ptr, cols, n_cols, scale, softcap, WHOLE, KIND == "tail")
    top = tl.maximum(top, z)
    z = z - centre
    if HARD:
        hard_sum_exp += exp(z, PRECISE)
    if inv_temperature is not None:
        z = z * inv_temperature
    e = exp(z, PRECISE)
    sum_exp += e
    if TEACHER:
        t = _load(t_ptr, cols, n_cols, teacher_scale, teacher_softcap, WHOLE, False)
        teacher_top = tl.maximum(teacher_top, t)
        t = t - teacher_centre
        if teacher_inv_temperature is not None:
            t = t * teacher_inv_temperature
        teacher_e = exp(t, PRECISE)
        teacher_sum_exp += teacher_e
        # Large logits would cancel. 0 * -inf would be NaN.
        if KIND == "forward_kl":
            moment += tl.where(teacher_e == 0.0, 0.0, teacher_e * (t - z))
        if KIND == "reverse_kl":
            moment += tl.where(e == 0.0, 0.0, e * (z - t))
    return top, sum_exp, hard_sum_exp, teacher_top, teacher_sum_exp, moment


@jit
def _out_of_reach(top, centre, inv_temperature):
    distance = tl.abs(top - centre)
    if inv_temperature is not None:
        distance = distance * tl.maximum(inv_temperature, 1.0)
    return (top > -float("inf")) & (distance > REACH)


@Kernel
def _sums_kernel(
    z_ptr, z_stride, t_ptr, t_stride, target_ptr,
    centre_ptr, sum_exp_ptr, log_sum_ptr, hard_sum_exp_ptr, target_logit_ptr,
    teacher_centre_ptr, teacher_sum_exp_ptr, teacher_log_sum_ptr, divergence_ptr,
    n_cols, scale, softcap, inv_temperature, teacher_scale, teacher_softcap, teacher_inv_temperature,
    KIND: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    if t_ptr is not None:
        t_ptr += row * t_stride
    lanes = tl.arange(0, BLOCK)
    whole_blocks = n_cols // BLOCK * BLOCK
    centre = _first_centre(z_ptr, n_cols, scale, softcap, BLOCK, KIND == "tail")
    teacher_centre = 0.0
    if t_ptr is not None:
        teacher_centre = _first_centre(t_ptr, n_cols, teacher_scale, teacher_softcap, BLOCK, False)
    row_max = centre
    row_sum_exp = 0.0
    row_hard_sum_exp = 0.0
    row_teacher_max = teacher_centre
    row_teacher_sum_exp = 0.0
    row_moment = 0.0
    sweep = True
    while sweep:
        top = tl.full([BLOCK], -float("inf"), tl.float32)
        sum_exp = tl.zeros([BLOCK], tl.float32)
        hard_sum_exp = tl.zeros([BLOCK], tl.float32)
        teacher_top = tl.full([BLOCK], -float("inf"), tl.float32)
        teacher_sum_exp = tl.zeros([BLOCK], tl.float32)
        moment = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, whole_blocks, BLOCK, num_stages=STAGES):
            top, sum_exp, hard_sum_exp, teacher_top, teacher_sum_exp, moment = _add_block(
                z_ptr, t_ptr, start + lanes, n_cols, centre, teacher_centre,
                top, sum_exp, hard_sum_exp, teacher_top, teacher_sum_exp, moment,
                scale, softcap, inv_temperature, teacher_scale, teacher_softcap, teacher_inv_temperature,
                KIND, t_ptr is not None, hard_sum_exp_ptr is not None, True, PRECISE,
            )  # fmt: skip
        if whole_blocks < n_cols:
            top, sum_exp, hard_sum_exp, teacher_top, teacher_sum_exp, moment = _add_block(
                z_ptr, t_ptr, whole_blocks + lanes, n_cols, centre, teacher_centre,
                top, sum_exp, hard_sum_exp, teacher_top, teacher_sum_exp, moment,
                scale, softcap, inv_temperature, teacher_scale, teacher_softcap, teacher_inv_temperature,
                KIND, t_ptr is not None, hard_sum_exp_ptr is not None, False, PRECISE,
            )  # fmt: skip
        row_max = tl.max(top, axis=0)
        row_sum_exp = tl.sum(sum_exp, axis=0)
        sweep = _out_of_reach(row_max, centre, inv_temperature)
        if hard_sum_exp_ptr is not None:
            row_hard_sum_exp = tl.sum(hard_sum_exp, axis=0)
        if t_ptr is not None:
            row_teacher_max = tl.max(teacher_top, axis=0)
            row_teacher_sum_exp = tl.sum(teacher_sum_exp, axis=0)
            sweep = sweep | _out_of_reach(row_teacher_max, teacher_centre, teacher_inv_temperature)
        if divergence_ptr is not None:
            row_moment = tl.sum(moment, axis=0)
        if sweep:
            centre = tl.where(row_max == -float("inf"), centre, row_max)
            teacher_centre = tl.where(row_teacher_max == -float("inf"), teacher_centre, row_teacher_max)

    tl.store(centre_ptr + row, tl.where(row_max == -float("inf"), row_max, centre))
    tl.store(sum_exp_ptr + row, row_sum_exp)
    log_sum = tl.log(row_sum_exp)
    tl.store(log_sum_ptr + row, log_sum)
    if hard_sum_exp_ptr is not None:
        tl.store(hard_sum_exp_ptr + row, row_hard_sum_exp)
    if teacher_sum_exp_ptr is not None:
        # The whole vocabulary's centre is not -inf.
        empty = row_teacher_max == -float("inf")
        tl.store(teacher_centre_ptr + row, tl.where(empty, row_teacher_max, teacher_centre))
        tl.store(teacher_sum_exp_ptr + row, row_teacher_sum_exp)
        teacher_log_sum = tl.log(row_teacher_sum_exp)
        tl.store(teacher_log_sum_ptr + row, teacher_log_sum)
        if KIND == "forward_kl":
            tl.store(divergence_ptr + row, row_moment * reciprocal(row_teacher_sum_exp) - teacher_log_sum + log_sum)
        if KIND == "reverse_kl":
            tl.store(divergence_ptr + row, row_moment * reciprocal(row_sum_exp) - log_sum + teacher_log_sum)
    if target_logit_ptr is not None:
        target = tl.load(target_ptr + row)
        inside = (target >= 0) & (target < n_cols)
        z = transform_block(tl.load(z_ptr + target, mask=inside, other=0.0).to(tl.float32), scale, softcap, None)
        tl.store(target_logit_ptr + row, tl.where(inside, z, -float("inf")))


@Kernel
def _products_kernel(
    z_ptr, z_stride, t_ptr, t_stride, dot_ptr, square_ptr, teacher_square_ptr,
    n_cols, scale, softcap, teacher_scale, teacher_softcap, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    t_ptr += row * t_stride
    dot = tl.zeros([BLOCK], tl.float32)
    square = tl.zeros([BLOCK], tl.float32)
    teacher_square = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, n_cols, BLOCK, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK)
        # The transform keeps zeros.
        z = transform_block(load_block(z_ptr, cols, n_cols, False), scale, softcap, None)
        t = transform_block(load_block(t_ptr, cols, n_cols, False), teacher_scale, teacher_softcap, None)
        dot += z * t
        square += z * z
        teacher_square += t * t
    tl.store(dot_ptr + row, tl.sum(dot, axis=0))
    tl.store(square_ptr + row, tl.sum(square, axis=0))
    tl.store(teacher_square_ptr + row, tl.sum(teacher_square, axis=0))


def pair_arguments(
    student: Tensor, teacher: Tensor | None, options: LogitOptions, teacher_options: LogitOptions
) -> dict[str, Any]:

    def factors(options: LogitOptions) -> dict[str, float | None]:
        inv_temperature = None if options.temperature == 1.0 else 1.0 / options.temperature
        return transform_arguments(replace(options, temperature=1.0))._asdict() | {"inv_temperature": inv_temperature}

    most, num_warps = TUNING[student.device].divergence
    return {
        "z_ptr": student,
        "z_stride": student.stride(0),
        "t_ptr": teacher,
        "t_stride": 0 if teacher is None else teacher.stride(0),
        "n_cols": student.shape[1],
        **factors(options),
        **{f"teacher_{name}": value for name, value in factors(teacher_options).items()},
        "BLOCK": block_size(student.shape[1], most),
        "PRECISE": student.dtype == torch.float32,
        "num_warps": num_warps,
    }


def _sums_triton(
    student: Tensor, teacher: Tensor | None, target: Tensor | None, kind: str, options: LogitOptions,
    teacher_options: LogitOptions, hard: bool,
) -> Sums:  # fmt: skip
    n = student.shape[0]

    def buffer(wanted: bool = True) -> Tensor | None:
        return torch.empty(n, dtype=torch.float32, device=student.device) if wanted else None

    sums = Sums(
        centre=buffer(),  # type: ignore[arg-type]
        sum_exp=buffer(),  # type: ignore[arg-type]
        log_sum=buffer(),  # type: ignore[arg-type]
        hard_sum_exp=buffer(hard),
        target_logit=buffer(target is not None),
        teacher_centre=buffer(teacher is not None),
        teacher_sum_exp=buffer(teacher is not None),
        teacher_log_sum=buffer(teacher is not None),
        divergence=buffer(kind in ("forward_kl", "reverse_kl")),
    )
    if n:
        _sums_kernel[(n,)](
            target_ptr=target,
            **{f"{name}_ptr": value for name, value in sums._asdict().items()},
            KIND=kind,
            STAGES=TUNING[student.device].loads_in_flight,
            **pair_arguments(student, teacher, options, teacher_options),
        )
    return sums


def centred_(z: Tensor) -> tuple[Tensor, Tensor]:
    maximum = z.amax(1)
    return maximum, z.sub_(torch.where(maximum == -torch.inf, 0.0, maximum)[:, None])


def widened(logits: Tensor, options: LogitOptions, dtype: torch.dtype, holes: bool = False) -> Tensor:
    """Return a copy, transformed except for the temperature; `holes` keeps -inf."""
    z = transform(logits.to(dtype, copy=True), options.logit_scale, options.softcap, 1.0)
    return z.masked_fill_(logits == -torch.inf, -torch.inf) if holes else z


def weighted(p: Tensor, x: Tensor) -> Tensor:
    return torch.where(p == 0, 0.0, p * x)


def _sums_torch(
    student: Tensor, teacher: Tensor | None, target: Tensor | None, kind: str, options: LogitOptions,
    teacher_options: LogitOptions, hard: bool,
) -> Sums:  # fmt: skip
    dtype = accumulation_dtype(student.dtype)
    parts: list[dict[str, Tensor]] = []
    for rows in row_blocks(student) if student.shape[0] else [slice(0, 0)]:
        z = widened(student[rows], options, dtype, holes=kind == "tail")
        part = {}
        if target is not None:
            column, inside = columns_of(target[rows], z.shape[1])
            part["target_logit"] = z.gather(1, column)[:, 0].masked_fill_(~inside, -torch.inf)
        part["centre"], z = centred_(z)
        if hard:
            part["hard_sum_exp"] = z.exp().sum(1)
        e = z.div_(options.temperature).exp()
        part["sum_exp"] = e.sum(1)
        part["log_sum"] = log_sum = part["sum_exp"].log()
        if teacher is not None:
            part["teacher_centre"], t = centred_(widened(teacher[rows], teacher_options, dtype))
            teacher_e = t.div_(teacher_options.temperature).exp()
            part["teacher_sum_exp"] = teacher_sum_exp = teacher_e.sum(1)
            part["teacher_log_sum"] = teacher_log_sum = teacher_sum_exp.log()
            if kind == "forward_kl":
                part["divergence"] = weighted(teacher_e, t - z).sum(1) / teacher_sum_exp - teacher_log_sum + log_sum
            elif kind == "reverse_kl":
                part["divergence"] = weighted(e, z - t).sum(1) / part["sum_exp"] - log_sum + teacher_log_sum
        parts.append(part)
    return Sums(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def columns_of(target: Tensor, n_cols: int) -> tuple[Tensor, Tensor]:
    return target.clamp(0, n_cols - 1)[:, None], (target >= 0) & (target < n_cols)


def both_on_triton(student: Tensor, teacher: Tensor | None) -> bool:
    return use_triton(student) and (teacher is None or use_triton(teacher))


def sums(
    student: Tensor, teacher: Tensor | None, target: Tensor | None, kind: str, options: LogitOptions,
    teacher_options: LogitOptions, hard: bool = False,
) -> Sums:  # fmt: skip
    """Return the sums of rows; arguments as in `divergence_stats`.

    Kinds "forward_kl" and "reverse_kl" add a divergence; "tail" excludes inputs of -inf. `hard` adds `hard_sum_exp`.
    """
    if student.shape[1] == 0:
        return _of_no_columns(student, teacher is not None, target is not None, kind, hard)
    compute = _sums_triton if both_on_triton(student, teacher) else _sums_torch
    return compute(student, teacher, target, kind, options, teacher_options, hard)


def _of_no_columns(student: Tensor, has_teacher: bool, has_target: bool, kind: str, hard: bool) -> Sums:
    nothing = torch.zeros(student.shape[0], dtype=accumulation_dtype(student.dtype), device=student.device)
    lowest = nothing - torch.inf
    return Sums(
        centre=lowest,
        sum_exp=nothing,
        log_sum=lowest,
        hard_sum_exp=nothing if hard else None,
        target_logit=lowest if has_target else None,
        teacher_centre=lowest if has_teacher else None,
        teacher_sum_exp=nothing if has_teacher else None,
        teacher_log_sum=lowest if has_teacher else None,
        divergence=nothing if kind in ("forward_kl", "reverse_kl") else None,
    )


def merge_sums(parts: list[Sums], kind: str, temperature: float, teacher_temperature: float) -> Sums:
    """Join the sums of slices of the vocabulary.

    With slices' shares P_r of p and Q_r of q, and divergences K_r within,

        KL(q || p) = sum_r Q_r (K_r + log(Q_r / P_r))
    """
    centre, sum_exp, log_shares = _joint([s.centre for s in parts], [s.sum_exp for s in parts], temperature)
    merged: dict[str, Tensor | None] = {}
    if parts[0].hard_sum_exp is not None:
        merged["hard_sum_exp"] = _joint([s.centre for s in parts], [s.hard_sum_exp for s in parts], 1.0)[1]
    if parts[0].target_logit is not None:
        merged["target_logit"] = torch.stack([s.target_logit for s in parts]).amax(0)  # type: ignore[misc]
    if parts[0].teacher_centre is not None:
        centres, sums = [s.teacher_centre for s in parts], [s.teacher_sum_exp for s in parts]
        teacher_centre, teacher_sum_exp, of_teacher = _joint(centres, sums, teacher_temperature)
        merged |= {"teacher_centre": teacher_centre, "teacher_sum_exp": teacher_sum_exp}
        merged["teacher_log_sum"] = teacher_sum_exp.log()
        if parts[0].divergence is not None:
            weights, others = (of_teacher, log_shares) if kind == "forward_kl" else (log_shares, of_teacher)
            within = torch.stack([s.divergence for s in parts])  # type: ignore[misc]
            merged["divergence"] = weighted(weights.exp(), within + weights - others).sum(0)
    return Sums(centre, sum_exp, sum_exp.log(), **merged)


def _joint(centres: Any, sums: Any, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest centre, the sum relative to it, and the slices' log shares (slices, N)."""
    stacked = torch.stack(centres)
    centre = stacked.amax(0)
    scaled = torch.stack(sums) * torch.exp((stacked - torch.where(centre == -torch.inf, 0.0, centre)) / temperature)
    total = scaled.sum(0)
    return centre, total, (scaled / total).log()


def products(student: Tensor, teacher: Tensor, options: LogitOptions, teacher_options: LogitOptions) -> Products:
    n = student.shape[0]
    dtype = accumulation_dtype(student.dtype)
    found = Products(*(torch.empty(n, dtype=dtype, device=student.device) for _ in Products._fields))
    if student.shape[1] == 0:
        return Products(*(x.zero_() for x in found))
    if not both_on_triton(student, teacher):
        for rows in row_blocks(student):
            z, t = widened(student[rows], options, dtype), widened(teacher[rows], teacher_options, dtype)
            found.dot[rows] = (z * t).sum(1)
            found.square[rows] = z.square_().sum(1)
            found.teacher_square[rows] = t.square_().sum(1)
    elif n:
        both = pair_arguments(student, teacher, options, teacher_options)
        for name in ("inv_temperature", "teacher_inv_temperature", "PRECISE"):
            del both[name]
        pointers = {f"{name}_ptr": value for name, value in found._asdict().items()}
        _products_kernel[(n,)](**both, **pointers, STAGES=TUNING[student.device].loads_in_flight)
    return found
