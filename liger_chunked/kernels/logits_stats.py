"""Reduce logits to statistics. Bytes: the tile read once.

`logits_stats` reduces a tile, `merge` joins neighbours, `finish` returns `TokenStats`; `row_stats` does all in one
launch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
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
from liger_chunked.kernels.operands import joined
from liger_chunked.kernels.target_logit import FARTHEST, moved_logp
from liger_chunked.kernels.transform import load_block, transform, transform_arguments, transform_block
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.types import LogitOptions, TokenStats, accumulation_dtype


class PartialStats(NamedTuple):
    """Statistics of a tile's rows `z`, (N,) each; None unless requested."""

    max: Tensor
    sum_exp: Tensor  # sum exp(z - max)
    target_logit: Tensor | None = None  # -inf outside the tile
    sum_exp_z: Tensor | None = None  # sum exp(z - max) (z - max)
    sum_z: Tensor | None = None  # or sum class_weight z
    sum_exp_sq: Tensor | None = None  # sum exp(z - max)**2
    argmax: Tensor | None = None  # first index, int64


@jit
def _add_block(
    row_ptr, class_weight_ptr, cols, n_cols, centre, top, argmax, sum_exp, sum_exp_z, sum_exp_sq, sum_z,
    scale, softcap, inv_temperature,
    WHOLE: tl.constexpr, PRECISE: tl.constexpr, ARGMAX: tl.constexpr, MOMENT: tl.constexpr, SQUARES: tl.constexpr,
    MEAN: tl.constexpr,
):  # fmt: skip
    """Add a block; -inf adds 0."""
    z = transform_block(load_block(row_ptr, cols, n_cols, WHOLE), scale, softcap, inv_temperature)
    if MEAN:
        if class_weight_ptr is not None:
            sum_z += z * load_block(class_weight_ptr, cols, n_cols, WHOLE)
        else:
            sum_z += z
    if not WHOLE:
        z = tl.where(cols < n_cols, z, -float("inf"))
    if ARGMAX:
        argmax = tl.where(z > top, cols, argmax)
    top = tl.maximum(top, z)
    centred = z - centre
    e = exp(centred, PRECISE)
    sum_exp += e
    if MOMENT:
        # 0 * -inf would be NaN.
        sum_exp_z += tl.where(e == 0.0, 0.0, e * centred)
    if SQUARES:
        sum_exp_sq += e * e
    return top, argmax, sum_exp, sum_exp_z, sum_exp_sq, sum_z


@Kernel
def _logits_stats_kernel(
    logits_ptr, target_ptr, class_weight_ptr, temperature_ptr,
    max_ptr, sum_exp_ptr, of_target_ptr, moment_ptr, mean_ptr, squares_ptr, argmax_ptr, lse_ptr,
    x_ptr, w_ptr, bias_ptr, grad_scale_ptr,
    logits_stride, vocab_start, n_cols, x_stride, w_stride, hidden, scale, softcap, inv_temperature,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISE: tl.constexpr, FINISH: tl.constexpr, FARTHEST: tl.constexpr,
    HIDDEN_BLOCK: tl.constexpr,
):  # fmt: skip
    # The centre is the first block's maximum: a running one takes a reduction per block. A row far above it is swept
    # again.
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    if temperature_ptr is not None:
        inv_temperature = reciprocal(tl.load(temperature_ptr + row))
    lanes = tl.arange(0, BLOCK)
    whole_blocks = n_cols // BLOCK * BLOCK
    z = transform_block(load_block(row_ptr, lanes, n_cols, False), scale, softcap, inv_temperature)
    centre = tl.max(tl.where(lanes < n_cols, z, -float("inf")), axis=0)
    centre = tl.where(centre == -float("inf"), 0.0, centre)

    row_max = centre
    row_sum_exp = 0.0
    row_sum_exp_z = 0.0
    row_sum_exp_sq = 0.0
    row_argmax = 0
    sum_z = tl.zeros([BLOCK], tl.float32)
    sweep = True
    while sweep:
        top = tl.full([BLOCK], -float("inf"), tl.float32)
        argmax = tl.zeros([BLOCK], tl.int32)
        sum_exp = tl.zeros([BLOCK], tl.float32)
        sum_exp_z = tl.zeros([BLOCK], tl.float32)
        sum_exp_sq = tl.zeros([BLOCK], tl.float32)
        sum_z = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, whole_blocks, BLOCK, num_stages=STAGES):
            top, argmax, sum_exp, sum_exp_z, sum_exp_sq, sum_z = _add_block(
                row_ptr, class_weight_ptr, start + lanes, n_cols, centre,
                top, argmax, sum_exp, sum_exp_z, sum_exp_sq, sum_z, scale, softcap, inv_temperature, True, PRECISE,
                argmax_ptr is not None, moment_ptr is not None, squares_ptr is not None, mean_ptr is not None,
            )  # fmt: skip
        if whole_blocks < n_cols:
            top, argmax, sum_exp, sum_exp_z, sum_exp_sq, sum_z = _add_block(
                row_ptr, class_weight_ptr, whole_blocks + lanes, n_cols, centre,
                top, argmax, sum_exp, sum_exp_z, sum_exp_sq, sum_z, scale, softcap, inv_temperature, False, PRECISE,
                argmax_ptr is not None, moment_ptr is not None, squares_ptr is not None, mean_ptr is not None,
            )  # fmt: skip
        row_max = tl.max(top, axis=0)
        row_sum_exp = tl.sum(sum_exp, axis=0)
        if moment_ptr is not None:
            row_sum_exp_z = tl.sum(sum_exp_z, axis=0)
        if squares_ptr is not None:
            row_sum_exp_sq = tl.sum(sum_exp_sq, axis=0)
        if argmax_ptr is not None:
            row_argmax = tl.min(tl.where(top == row_max, argmax, n_cols), axis=0)
        # After a block of -inf, the centre is 0.
        sweep = (row_max > -float("inf")) & (tl.abs(row_max - centre) > REACH)
        centre = tl.where(sweep, row_max, centre)

    distance = tl.where(row_max == -float("inf"), 0.0, row_max - centre)
    if PRECISE:
        # float64: errors of a row's factor do not average out.
        rescale = tl.exp(-distance.to(tl.float64))
    else:
        rescale = exp(-distance, False)
    target = tl.load(target_ptr + row) - vocab_start
    has_target = (target >= 0) & (target < n_cols)
    z = tl.load(row_ptr + target, mask=has_target, other=0.0).to(tl.float32)
    z = transform_block(z, scale, softcap, inv_temperature)
    of_target = tl.where(has_target, z, -float("inf"))
    moment = (rescale * (row_sum_exp_z - distance * row_sum_exp)).to(tl.float32)
    squares = (rescale * rescale * row_sum_exp_sq).to(tl.float32)
    normaliser = (rescale * row_sum_exp).to(tl.float32)
    mean = tl.sum(sum_z, axis=0)
    if FINISH:
        log_sum = tl.log(normaliser)
        of_target = (of_target - row_max) - log_sum
        moment = log_sum - moment / normaliser
        squares = tl.log(squares) - 2 * log_sum
        mean = mean / n_cols
        if x_ptr is not None:
            of_target, grad_scale = moved_logp(
                of_target, row_max, normaliser, row, target, x_ptr, w_ptr, bias_ptr, None, x_stride, w_stride, hidden,
                scale, softcap, inv_temperature, FARTHEST, HIDDEN_BLOCK,
            )  # fmt: skip
            tl.store(grad_scale_ptr + row, grad_scale)
        if lse_ptr is not None:
            lse = tl.where(row_max == float("inf"), row_max, row_max + log_sum)
            tl.store(lse_ptr + row, lse)
    tl.store(max_ptr + row, row_max)
    tl.store(sum_exp_ptr + row, normaliser)
    if of_target_ptr is not None:
        tl.store(of_target_ptr + row, of_target)
    if moment_ptr is not None:
        tl.store(moment_ptr + row, moment)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean)
    if squares_ptr is not None:
        tl.store(squares_ptr + row, squares)
    if argmax_ptr is not None:
        tl.store(argmax_ptr + row, row_argmax + vocab_start)


def _wanted(outputs: tuple[str, ...]) -> dict[str, bool]:
    return {
        "sum_exp_z": "entropy" in outputs,
        "sum_z": "mean_logits" in outputs,
        "sum_exp_sq": "log_sum_sq_probs" in outputs,
        "argmax": "argmax" in outputs or "is_top1" in outputs,
    }


class ExactTarget(NamedTuple):
    """What corrects rows' log-probabilities, as `unround_logps_` does."""

    x: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    grad_scale: Tensor  # (N,) float32, for what `unround_logps_` returns


class _Stored(NamedTuple):
    """What the kernel stores of each row: sums of a tile, or statistics of a whole row."""

    max: Tensor
    sum_exp: Tensor
    of_target: Tensor | None  # logit, or its log-probability
    moment: Tensor | None  # `sum_exp_z`, or the entropy
    mean: Tensor | None  # `sum_z`, or the mean logit
    squares: Tensor | None  # `sum_exp_sq`, or `log_sum_sq_probs`
    argmax: Tensor | None
    lse: Tensor | None  # only of whole rows


@functools.lru_cache
def _stored_dtypes(outputs: tuple[str, ...], whole: bool) -> tuple[torch.dtype | None, ...]:
    """Return the dtypes of what the kernel stores for `outputs`, in the order of `_Stored`."""
    wanted = _wanted(outputs)
    is_stored = {
        "max": True,
        "sum_exp": True,
        "of_target": "logps" in outputs or not whole,
        "moment": wanted["sum_exp_z"],
        "mean": wanted["sum_z"],
        "squares": wanted["sum_exp_sq"],
        "argmax": wanted["argmax"],
        "lse": whole and "lse" in outputs,
    }
    dtype_of = {"argmax": torch.int64}
    return tuple(dtype_of.get(name, torch.float32) if is_stored[name] else None for name in _Stored._fields)


def _logits_stats_triton(
    logits: Tensor, target: Tensor, options: LogitOptions, outputs: tuple[str, ...], vocab_start: int,
    class_weight: Tensor | None, temperature: Tensor | None, whole: bool, exact: ExactTarget | None = None,
) -> _Stored:  # fmt: skip
    (n, n_cols), device = logits.shape, logits.device
    dtypes = _stored_dtypes(outputs, whole)
    buffers: list[Any] = [None if dtype is None else torch.empty(n, dtype=dtype, device=device) for dtype in dtypes]
    stored = _Stored(*buffers)
    if n:
        tuned = TUNING[device]
        most, num_warps = tuned.logits_stats
        block = block_size(n_cols, most if stored.argmax is None else tuned.logits_stats_argmax_block)
        factors = transform_arguments(options)
        flags = block, tuned.loads_in_flight, logits.dtype == torch.float32, whole
        of_exact: Sequence[Tensor | None] = (None, None, None, None)
        strides, hidden_block = (0, 0, 0), 1
        if exact is not None:
            of_exact, hidden = exact, exact.x.shape[1]
            strides = exact.x.stride(0), exact.weight.stride(0), hidden
            hidden_block = block_size(hidden, tuned.hidden.block)
        _logits_stats_kernel(
            (n, 1, 1),
            (logits, target, class_weight, temperature, *stored, *of_exact),
            (logits.stride(0), vocab_start, n_cols, *strides, *factors, *flags, FARTHEST, hidden_block),
            num_warps,
        )
    return stored


def _logits_stats_torch(
    logits: Tensor, target: Tensor, options: LogitOptions, outputs: tuple[str, ...], vocab_start: int,
    class_weight: Tensor | None, temperature: Tensor | None,
) -> PartialStats:  # fmt: skip
    n_cols = logits.shape[1]
    wanted = _wanted(outputs)
    parts = []
    for rows in row_blocks(logits):
        z = logits[rows].to(accumulation_dtype(logits.dtype), copy=True)
        of_rows = options.temperature if temperature is None else temperature[rows, None]
        z = transform(z, options.logit_scale, options.softcap, of_rows)
        local = target[rows] - vocab_start
        target_logit = z.gather(1, local.clamp(0, n_cols - 1)[:, None])[:, 0]
        target_logit = target_logit.masked_fill((local < 0) | (local >= n_cols), -math.inf)
        sum_z = None
        if wanted["sum_z"]:
            # Autocast rounds matrix products.
            sum_z = z.sum(1) if class_weight is None else (z * class_weight).sum(1)
        if wanted["argmax"]:
            maximum, argmax = z.max(1)
        else:
            maximum, argmax = z.amax(1), None
        centred = z.sub_(torch.where(maximum == -math.inf, 0.0, maximum)[:, None])
        e = centred.exp()
        parts.append(
            PartialStats(
                max=maximum,
                sum_exp=e.sum(1),
                target_logit=target_logit,
                sum_exp_z=(e * centred).masked_fill_(e == 0, 0.0).sum(1) if wanted["sum_exp_z"] else None,
                sum_z=sum_z,
                sum_exp_sq=e.square().sum(1) if wanted["sum_exp_sq"] else None,
                argmax=None if argmax is None else argmax + vocab_start,
            )
        )
    if not parts:
        empty = logits.new_empty(0, dtype=accumulation_dtype(logits.dtype))
        optional = {name: empty if is_wanted else None for name, is_wanted in wanted.items()}
        if wanted["argmax"]:
            optional["argmax"] = torch.empty_like(target)
        return PartialStats(max=empty, sum_exp=empty, target_logit=empty, **optional)
    return joined(parts)


def logits_stats(
    logits: Tensor,
    target: Tensor,
    options: LogitOptions,
    outputs: tuple[str, ...],
    vocab_start: int = 0,
    class_weight: Tensor | None = None,
    temperature: Tensor | None = None,
) -> PartialStats:
    """Return a tile's statistics for `outputs`, fields of `TokenStats`.

    Args:
        logits: (N, C), columns `vocab_start : vocab_start + C` before the transform; rows contiguous.
        target: (N,) int64, in the whole vocabulary.
        class_weight: (C,) weights for `mean_logits`, in the accumulation dtype.
        temperature: (N,) float32, instead of that of `options`, which is then 1.
    """
    if logits.shape[1] == 0:
        return _of_no_columns(logits, outputs)
    if use_triton(logits):
        stored = _logits_stats_triton(
            logits, target, options, outputs, vocab_start, class_weight, temperature, whole=False
        )
        return PartialStats(*stored[:-1])
    return _logits_stats_torch(logits, target, options, outputs, vocab_start, class_weight, temperature)


def row_stats_are_exact(logits: Tensor, outputs: tuple[str, ...], x: Tensor, weight: Tensor) -> bool:
    """Whether `row_stats` can correct the rounding of the targets' logits, in 16 bits, in the same launch."""
    is_rounded = logits.dtype == torch.bfloat16 or logits.dtype == torch.float16
    return is_rounded and "logps" in outputs and x.stride(-1) == weight.stride(-1) == 1 and use_triton(logits)


def row_stats(
    logits: Tensor,
    target: Tensor,
    options: LogitOptions,
    outputs: tuple[str, ...],
    class_weight: Tensor | None = None,
    temperature: Tensor | None = None,
    exact: ExactTarget | None = None,
) -> tuple[PartialStats, TokenStats]:
    """Return whole rows' sums and statistics, in one launch.

    Args:
        exact: correct the log-probabilities, if `row_stats_are_exact`.
    """
    if not use_triton(logits):
        partial = _logits_stats_torch(logits, target, options, outputs, 0, class_weight, temperature)
        return partial, finish(partial, target, logits.shape[1], outputs)
    stored = _logits_stats_triton(logits, target, options, outputs, 0, class_weight, temperature, True, exact)
    stats = TokenStats(
        logps=stored.of_target,
        lse=stored.lse,
        entropy=stored.moment,
        mean_logits=stored.mean,
        argmax=stored.argmax if "argmax" in outputs else None,
        is_top1=torch.eq(stored.argmax, target) if "is_top1" in outputs else None,  # type: ignore[arg-type]
        log_sum_sq_probs=stored.squares,
    )
    return PartialStats(stored.max, stored.sum_exp), stats


def _of_no_columns(logits: Tensor, outputs: tuple[str, ...]) -> PartialStats:
    nothing = torch.zeros(logits.shape[0], dtype=accumulation_dtype(logits.dtype), device=logits.device)
    lowest = nothing - math.inf
    sums: dict[str, Tensor | None] = {name: nothing if wanted else None for name, wanted in _wanted(outputs).items()}
    argmax = sums.pop("argmax")
    return PartialStats(lowest, nothing, lowest, argmax=None if argmax is None else argmax.long(), **sums)


def merge(a: PartialStats, b: PartialStats) -> PartialStats:
    """Join two tiles, `a` before `b`; associative."""
    maximum = torch.maximum(a.max, b.max)
    shift = torch.where(maximum == -math.inf, 0.0, maximum)
    scale_a, scale_b = torch.exp(a.max - shift), torch.exp(b.max - shift)

    def moved(part: PartialStats, scale: Tensor) -> Tensor:
        assert part.sum_exp_z is not None
        # A tile of -inf has no moment.
        return scale * (part.sum_exp_z + torch.where(part.sum_exp == 0, 0.0, part.sum_exp * (part.max - shift)))

    def both(x: Tensor | None, y: Tensor | None) -> bool:
        return x is not None and y is not None

    return PartialStats(
        max=maximum,
        sum_exp=a.sum_exp * scale_a + b.sum_exp * scale_b,
        target_logit=torch.maximum(a.target_logit, b.target_logit),  # type: ignore[arg-type]
        sum_exp_z=moved(a, scale_a) + moved(b, scale_b) if both(a.sum_exp_z, b.sum_exp_z) else None,
        sum_z=a.sum_z + b.sum_z if both(a.sum_z, b.sum_z) else None,  # type: ignore[operator]
        sum_exp_sq=(
            a.sum_exp_sq * scale_a**2 + b.sum_exp_sq * scale_b**2  # type: ignore[operator]
            if both(a.sum_exp_sq, b.sum_exp_sq)
            else None
        ),
        argmax=torch.where(b.max > a.max, b.argmax, a.argmax) if both(a.argmax, b.argmax) else None,  # type: ignore[arg-type]
    )


def finish(stats: PartialStats, target: Tensor, vocab_size: int, outputs: tuple[str, ...]) -> TokenStats:
    log_sum = stats.sum_exp.log()
    fields: dict[str, Tensor] = {}
    if "logps" in outputs:
        # This order is exact for large logits.
        fields["logps"] = (stats.target_logit - stats.max) - log_sum  # type: ignore[operator]
    if "lse" in outputs:
        # Beside an infinite logit, differences to it are no numbers.
        fields["lse"] = torch.where(stats.max == math.inf, stats.max, stats.max + log_sum)
    if stats.sum_exp_z is not None:
        fields["entropy"] = log_sum - stats.sum_exp_z / stats.sum_exp
    if stats.sum_z is not None:
        fields["mean_logits"] = stats.sum_z / vocab_size
    if stats.sum_exp_sq is not None:
        fields["log_sum_sq_probs"] = stats.sum_exp_sq.log() - 2 * log_sum
    if "argmax" in outputs:
        fields["argmax"] = stats.argmax  # type: ignore[assignment]
    if "is_top1" in outputs:
        fields["is_top1"] = torch.eq(stats.argmax, target)  # type: ignore[arg-type]
    return TokenStats(**fields)
