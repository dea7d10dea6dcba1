"""Gradients of the statistics by the logits.

    dL/dz_v = g_logps (1[v = y] - p_v) + g_lse p_v - g_entropy p_v (log p_v + entropy) + g_mean w_v / V

then back through the transform. Bytes: the tile read and written once; of some rows, these alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.kernels.backend import (
    block_size,
    exp,
    grid_of_rows,
    grid_row,
    reciprocal,
    row_blocks,
    tl,
    use_triton,
)
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.operands import mapped
from liger_chunked.kernels.transform import (
    load_block,
    transform_and_slope,
    transform_and_tanh,
    transform_arguments,
    transform_gradient,
)
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.types import LogitOptions, accumulation_dtype


class LogitsCotangents(NamedTuple):
    """Statistics and upstream gradients of rows, (N,) each or None."""

    max: Tensor  # exp(z - lse) would round large logits
    sum_exp: Tensor
    logps_scale: Tensor | None = None  # of dL/dlogps, from `unround_logps_`
    logps: Tensor | None = None  # dL/dlogps and so on
    lse: Tensor | None = None
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    entropy_value: Tensor | None = None
    temperature: Tensor | None = None  # as in `logits_stats`

    def at(self, rows: slice | Tensor | tuple[slice | Tensor, None]) -> LogitsCotangents:
        return mapped(lambda x: x[rows], self)


def slopes_of_stats(
    options: LogitOptions, vocab_size: int, class_weight: Tensor | None = None
) -> dict[str, float | Tensor]:
    """Return upper bounds on |dL/dz| for upstream gradients of 1, by the statistic's name."""
    steepness = abs(options.logit_scale) / options.temperature  # a softcap's slope is at most 1
    # p (log p + entropy) is largest where the other ids are equally likely: p (1 - p) log V, and less than 1 more.
    of_entropy = 1.0 + 0.25 * math.log(vocab_size)
    of_mean = 1.0 if class_weight is None else class_weight.abs().max().float()
    bounds = {"logps": 1.0, "lse": 1.0, "entropy": of_entropy}
    return {**{name: steepness * x for name, x in bounds.items()}, "mean_logits": steepness / vocab_size * of_mean}


@Kernel
def _logits_grad_kernel(
    logits_ptr, grad_ptr, rows_ptr, target_ptr, class_weight_ptr,
    max_ptr, sum_exp_ptr, logps_scale_ptr, logps_ptr, lse_ptr, entropy_ptr, mean_logits_ptr, entropy_value_ptr,
    temperature_ptr,
    logits_stride, grad_stride, vocab_start, n_tokens, n_cols, inv_vocab, scale, softcap, inv_temperature,
    BLOCK: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    place = grid_row()
    if place >= n_tokens:
        return
    row = place
    if rows_ptr is not None:
        row = tl.load(rows_ptr + place)
        if row < 0:
            return
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < n_cols
    if temperature_ptr is not None:
        inv_temperature = reciprocal(tl.load(temperature_ptr + row))
    z = load_block(logits_ptr + row * logits_stride, cols, n_cols, False)
    z, tanh_z = transform_and_tanh(z, scale, softcap, inv_temperature)
    centred = z - tl.load(max_ptr + row)
    sum_exp = tl.load(sum_exp_ptr + row)
    p = exp(centred, PRECISE) * reciprocal(sum_exp)

    if lse_ptr is not None:
        grad = tl.load(lse_ptr + row) * p
    else:
        grad = tl.zeros_like(p)
    if logps_ptr is not None:
        g = tl.load(logps_ptr + row)
        if logps_scale_ptr is not None:
            g *= tl.load(logps_scale_ptr + row)
        is_target = cols == tl.load(target_ptr + row) - vocab_start
        # p - 1 before rounding, without adding 0, which the compiler would not drop.
        onehot_minus_p = tl.where(is_target, 1.0 - p, -p)
        if lse_ptr is not None:
            grad += g * onehot_minus_p
        else:
            grad = g * onehot_minus_p
    if entropy_ptr is not None:
        g = tl.load(entropy_ptr + row)
        log_p = centred - tl.log(sum_exp)
        grad -= tl.where(p == 0.0, 0.0, g * p * (log_p + tl.load(entropy_value_ptr + row)))
    if mean_logits_ptr is not None:
        g = tl.load(mean_logits_ptr + row) * inv_vocab
        if class_weight_ptr is not None:
            grad += g * tl.load(class_weight_ptr + cols, mask=inside, other=0.0)
        else:
            grad += g
    grad = transform_gradient(grad, tanh_z, scale, softcap, inv_temperature)
    tl.store(grad_ptr + place * grad_stride + cols, grad.to(grad_ptr.dtype.element_ty), mask=inside)


def _logits_grad_triton_(
    logits: Tensor, target: Tensor, cotangents: LogitsCotangents, options: LogitOptions, vocab_size: int,
    vocab_start: int, class_weight: Tensor | None, out: Tensor, live: Tensor | None,
) -> Tensor:  # fmt: skip
    n, n_cols = logits.shape
    if n:
        most, num_warps = TUNING[logits.device].logits_grad
        block = block_size(n_cols, most)
        strides, factors = (logits.stride(0), out.stride(0)), transform_arguments(options)
        _logits_grad_kernel(
            grid_of_rows(n, -(-n_cols // block)),
            (logits, out, live, target, class_weight, *cotangents),
            (*strides, vocab_start, n, n_cols, 1.0 / vocab_size, *factors, block, logits.dtype == torch.float32),
            num_warps,
        )
    return out


def _logits_grad_torch_(
    logits: Tensor, target: Tensor, cotangents: LogitsCotangents, options: LogitOptions, vocab_size: int,
    vocab_start: int, class_weight: Tensor | None, out: Tensor, live: Tensor | None,
) -> Tensor:  # fmt: skip
    n_rows, n_cols = logits.shape
    if live is not None:
        n_rows = int((live >= 0).sum())
    for places in row_blocks(logits[:n_rows]):
        rows = places if live is None else live[places]
        z = logits[rows].to(accumulation_dtype(logits.dtype), copy=True)
        row = cotangents.at((rows, None))
        temperature = options.temperature if row.temperature is None else row.temperature.to(z.dtype)
        z, slope = transform_and_slope(z, options.logit_scale, options.softcap, temperature)
        centred = z.sub_(row.max)
        p = centred.exp().div_(row.sum_exp)

        grad = torch.zeros_like(p)
        if row.lse is not None:
            grad.addcmul_(p, row.lse)
        if row.entropy is not None:
            assert row.entropy_value is not None
            log_p = centred.sub_(row.sum_exp.log())
            grad.sub_((row.entropy * p * (log_p + row.entropy_value)).masked_fill_(p == 0, 0.0))
        if row.logps is not None:
            local = target[rows] - vocab_start
            here = ((local >= 0) & (local < n_cols)).to(p.dtype)
            onehot_minus_p = p.neg_().scatter_add_(1, local.clamp(0, n_cols - 1)[:, None], here[:, None])
            grad.addcmul_(onehot_minus_p, row.logps if row.logps_scale is None else row.logps * row.logps_scale)
        if row.mean_logits is not None:
            per_class = row.mean_logits / vocab_size
            grad.add_(per_class if class_weight is None else per_class * class_weight)
        grad.mul_(options.logit_scale / temperature)
        if slope is not None:
            grad.mul_(slope)
        out[places].copy_(grad)
    return out


def logits_grad_(
    logits: Tensor,
    target: Tensor,
    cotangents: LogitsCotangents,
    options: LogitOptions,
    vocab_size: int,
    vocab_start: int = 0,
    class_weight: Tensor | None = None,
    out: Tensor | None = None,
    live: Tensor | None = None,
) -> Tensor:
    """Write a tile's gradient to `out` or `logits`. Arguments are as in `logits_stats`.

    Args:
        live: (N,) int64, the row whose gradient goes to each place, -1 from some place on. Only these rows are read,
            and what the last places hold is arbitrary. A row that moves is not the place of another. None: all stay.
    """
    compute = _logits_grad_triton_ if use_triton(logits) else _logits_grad_torch_
    out = logits if out is None else out
    if logits.shape[1] == 0:
        return out
    return compute(logits, target, cotangents, options, vocab_size, vocab_start, class_weight, out, live)
