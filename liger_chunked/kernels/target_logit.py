"""Correct the target's log-probability for its logit's rounding.

    z  = transform(x . W[y] + u . up[y] + b[y])           float32
    log(p'/(1 - p')) = log(p/(1 - p)) + z - z[y]          p: from rounded logits, p': corrected
    d log p'/dz_v = (1 - p')/(1 - p) d log p/dz_v

Only the target's rounding errors add up: those of the others average out over a vocabulary. Bytes: 4 N H.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_chunked.kernels.backend import (
    block_size,
    jit,
    log1p,
    reciprocal,
    row_blocks,
    tl,
    use_triton,
)
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.transform import load_block, transform, transform_arguments, transform_block
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.types import HeadTensors, LogitOptions, accumulation_dtype

# Errors of a row that large are correlated: to correct one logit makes a sum of log-probabilities worse.
FARTHEST = 2.0


@jit
def _one_minus_exp(x):
    # Relative error 1e-8.
    series = -x * (1.0 + x * (0.5 + x * (0.16666667 + x * 0.041666667)))
    return tl.where(x > -0.03, series, 1.0 - tl.exp(x))


@jit
def moved_logp(
    logp, top, sum_exp, row, target, x_ptr, w_ptr, bias_ptr, low_rank_ptr, x_stride, w_stride, hidden,
    scale, softcap, inv_temperature, FARTHEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return a row's corrected log-probability, and the factor of its gradient."""
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = load_block(x_ptr + row * x_stride, cols, hidden, False)
        dot += x * load_block(w_ptr + target * w_stride, cols, hidden, False)
    z = tl.sum(dot, axis=0)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + target).to(tl.float32)
    if low_rank_ptr is not None:
        z += tl.load(low_rank_ptr + row)
    z = transform_block(z, scale, softcap, inv_temperature)
    moved = (z - top) - tl.log(sum_exp) - logp
    left = _one_minus_exp(logp)
    # Log-odds are the target's logit minus the log-sum of the others' exponentials, so they move by as much as the
    # logit.
    odds = logp - tl.log(left) + moved
    # exact = log sigmoid(odds), exactly_left = sigmoid(-odds)
    small = tl.exp(-tl.abs(odds))
    exact = tl.minimum(odds, 0.0) - log1p(small)
    exactly_left = tl.where(odds > 0.0, small, 1.0) / (1.0 + small)
    # Not infinities, NaN, and p = 1.
    moves = (tl.abs(moved) <= FARTHEST) & (left > 0.0)
    return tl.where(moves, exact, logp), tl.where(moves, exactly_left / left, 1.0)


@Kernel
def _move_kernel(
    logps_ptr, grad_scale_ptr, x_ptr, w_ptr, bias_ptr, low_rank_ptr, target_ptr, max_ptr, sum_exp_ptr, temperature_ptr,
    x_stride, w_stride, hidden, scale, softcap, inv_temperature, FARTHEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if temperature_ptr is not None:
        inv_temperature = reciprocal(tl.load(temperature_ptr + row))
    logp, grad_scale = moved_logp(
        tl.load(logps_ptr + row), tl.load(max_ptr + row), tl.load(sum_exp_ptr + row), row, tl.load(target_ptr + row),
        x_ptr, w_ptr, bias_ptr, low_rank_ptr, x_stride, w_stride, hidden, scale, softcap, inv_temperature,
        FARTHEST, BLOCK,
    )  # fmt: skip
    tl.store(logps_ptr + row, logp)
    tl.store(grad_scale_ptr + row, grad_scale)


def _move_triton(
    logps: Tensor, x: Tensor, head: HeadTensors, target: Tensor, maximum: Tensor, sum_exp: Tensor,
    options: LogitOptions, low_rank: Tensor | None, temperature: Tensor | None,
) -> Tensor:  # fmt: skip
    n, hidden = x.shape
    grad_scale = torch.empty_like(logps)
    if n == 0:
        return grad_scale
    bias = None if head.bias is None else head.bias.contiguous()
    most, num_warps = TUNING[x.device].hidden
    sizes = x.stride(0), head.weight.stride(0), hidden
    _move_kernel(
        (n, 1, 1),
        (logps, grad_scale, x, head.weight, bias, low_rank, target, maximum, sum_exp, temperature),
        (*sizes, *transform_arguments(options), FARTHEST, block_size(hidden, most)),
        num_warps,
    )
    return grad_scale


def _move_torch(
    logps: Tensor, x: Tensor, head: HeadTensors, target: Tensor, maximum: Tensor, sum_exp: Tensor,
    options: LogitOptions, low_rank: Tensor | None, temperature: Tensor | None,
) -> Tensor:  # fmt: skip
    wide = accumulation_dtype(x.dtype)
    grad_scale = torch.empty_like(logps)
    for rows in row_blocks(x):
        of_target = head.weight[target[rows]].to(wide)
        z = of_target.mul_(x[rows]).sum(1)
        if head.bias is not None:
            z = z + head.bias[target[rows]]
        if low_rank is not None:
            z = z + low_rank[rows]
        of_rows = options.temperature if temperature is None else temperature[rows]
        z = transform(z, options.logit_scale, options.softcap, of_rows)
        logp = logps[rows]
        moved = (z - maximum[rows]) - sum_exp[rows].log() - logp
        left = -torch.expm1(logp)
        odds = logp - left.log() + moved
        moves = (moved.abs() <= FARTHEST) & (left > 0)
        grad_scale[rows] = torch.where(moves, torch.sigmoid(-odds) / left, 1.0)
        logps[rows] = torch.where(moves, F.logsigmoid(odds), logp)
    return grad_scale


def _has_dense_rows(x: Tensor) -> bool:
    return x.stride(-1) == 1 or x.shape[-1] == 1


def unround_logps_(
    logps: Tensor,
    x: Tensor,
    head: HeadTensors,
    target: Tensor,
    maximum: Tensor,
    sum_exp: Tensor,
    options: LogitOptions,
    u: Tensor | None = None,
    temperature: Tensor | None = None,
) -> Tensor:
    """Correct `logps` (N,), in the accumulation dtype, in place. Return `(1 - p')/(1 - p)`, a factor of its gradient.

    `x` is (N, H), `u` (N, r); `maximum` and `sum_exp` are of the rounded logits; `temperature` as in `logits_stats`.
    """
    dense = x.stride(-1) == head.weight.stride(-1) == 1 or (_has_dense_rows(x) and _has_dense_rows(head.weight))
    by_kernel = dense and use_triton(logps)
    compute = _move_triton if by_kernel else _move_torch
    low_rank = None
    if u is not None:
        assert head.up is not None
        low_rank = head.up[target].to(logps.dtype).mul_(u).sum(1)
    return compute(logps, x, head, target, maximum, sum_exp, options, low_rank, temperature)
