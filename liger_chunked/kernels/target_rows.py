"""The target's part of the head's gradients, beside products with the exponentials of `project_exp`.

With `E` zero at the target, and cotangents of `logps` and `lse` alone,

    dL/dz[n, v] = s[n] E[n, v] + a[n] 1[v = y[n]]
    s = scale (g_lse - g_logps) / sum,   a = scale (g_logps rest + g_lse exp(z_y - c)) / sum
    dX = s (E W) + a W[y],               dW = E^T (s x) + sum over n of a[n] x[n] at row y[n]

Bytes, all small beside the products: `scale_rows` reads x and writes s x, 4 N H; `add_target_rows_of_weight` reads E W
and W[y] and writes dX, 8 N H; `add_target_rows_` reads x, and reads and writes the rows of dW that are targets, at most
10 N H.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.kernels.backend import grid_of_rows, grid_row, tl, triton
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.projection import Exponentials

_SCAN = 1024  # tokens that are searched at a time
_RUN = 16  # tokens that are added at a time


class RowScales(NamedTuple):
    """The gradient of a row of logits, as its exponentials know it; (N,) float32."""

    others: Tensor  # s, times E
    target: Tensor  # a, at the target


@Kernel
def _scale_rows_kernel(
    x_ptr, x_stride, scaled_ptr, logps_ptr, lse_ptr, rest_ptr, target_exp_ptr, sum_exp_ptr, others_ptr, target_ptr,
    hidden, scale, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program per row; a null pointer stands for a cotangent that is absent, or a frozen head.
    row = tl.program_id(0).to(tl.int64)
    unit = scale / tl.load(sum_exp_ptr + row)
    others = 0.0
    target = 0.0
    if logps_ptr is not None:
        g = tl.load(logps_ptr + row) * unit
        others -= g
        target += g * tl.load(rest_ptr + row)
    if lse_ptr is not None:
        g = tl.load(lse_ptr + row) * unit
        others += g
        target += g * tl.load(target_exp_ptr + row)
    tl.store(others_ptr + row, others)
    tl.store(target_ptr + row, target)
    if scaled_ptr is not None:
        for start in range(0, hidden, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * x_stride + cols, mask=cols < hidden).to(tl.float32)
            tl.store(scaled_ptr + row * hidden + cols, (x * others).to(scaled_ptr.dtype.element_ty), mask=cols < hidden)


def scale_rows(
    x: Tensor, exponentials: Exponentials, logps: Tensor | None, lse: Tensor | None, scale: float, scaled: Tensor | None
) -> RowScales:
    """The scales of each row's gradient, and `s x`, rounded once, in `scaled` if it is given.

    Args:
        x: (N, H), rows contiguous.
        exponentials: of the same rows.
        logps, lse: (N,) float32 gradients of the loss with respect to these statistics, None for zeros.
        scale: of the logits.
        scaled: (N, H), contiguous; None where no gradient of the weight is asked for.
    """
    n, hidden = x.shape
    scales = RowScales(*(torch.empty(n, dtype=torch.float32, device=x.device) for _ in RowScales._fields))
    if x.is_meta:
        return scales
    _scale_rows_kernel[(n,)](
        x_ptr=x,
        x_stride=x.stride(0),
        scaled_ptr=scaled,
        logps_ptr=logps,
        lse_ptr=lse,
        rest_ptr=exponentials.rest,
        target_exp_ptr=exponentials.target_exp,
        sum_exp_ptr=exponentials.stats.sum_exp,
        others_ptr=scales.others,
        target_ptr=scales.target,
        hidden=hidden,
        scale=scale,
        BLOCK=min(1024, triton.next_power_of_2(hidden)),
    )
    return scales


@Kernel
def _input_kernel(
    product_ptr, w_ptr, w_stride, target_ptr, others_scale_ptr, target_scale_ptr, out_ptr, out_stride, hidden,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # One program per row.
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    others_scale = tl.load(others_scale_ptr + row)
    target_scale = tl.load(target_scale_ptr + row)
    for start in range(0, hidden, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < hidden
        product = tl.load(product_ptr + row * hidden + cols, mask=inside)
        w = tl.load(w_ptr + target * w_stride + cols, mask=inside).to(tl.float32)
        dx = others_scale * product + target_scale * w
        tl.store(out_ptr + row * out_stride + cols, dx.to(out_ptr.dtype.element_ty), mask=inside)


def add_target_rows_of_weight(product: Tensor, weight: Tensor, target: Tensor, scales: RowScales, out: Tensor) -> None:
    """`out = s * product + a * weight[target]`, rounded once.

    Args:
        product: (N, H) float32, E W, contiguous.
        weight: (V, H), rows contiguous.
        target: (N,) int64.
        scales: of the rows.
        out: (N, H), rows contiguous.
    """
    if product.is_meta:
        return
    n, hidden = product.shape
    _input_kernel[(n,)](
        product_ptr=product,
        w_ptr=weight,
        w_stride=weight.stride(0),
        target_ptr=target,
        others_scale_ptr=scales.others,
        target_scale_ptr=scales.target,
        out_ptr=out,
        out_stride=out.stride(0),
        hidden=hidden,
        BLOCK=min(1024, triton.next_power_of_2(hidden)),
    )


@Kernel
def _target_rows_kernel(
    grad_ptr, grad_stride, x_ptr, x_stride, scale_ptr, target_ptr, n_rows, hidden,
    SCAN: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program per token and block of columns: that of the first token of a target adds up all of them. It looks
    # for them among all: a pack has so few tokens that they stay in the first-level cache.
    row = grid_row()
    if row >= n_rows:
        return
    target = tl.load(target_ptr + row)
    first = row
    last = row
    for start in range(0, n_rows, SCAN):
        position = start + tl.arange(0, SCAN)
        mine = tl.load(target_ptr + position, mask=position < n_rows, other=-1) == target
        first = tl.minimum(first, tl.min(tl.where(mine, position, n_rows), axis=0))
        last = tl.maximum(last, tl.max(tl.where(mine, position, 0), axis=0))
    if first < row:
        return
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < hidden
    total = tl.zeros([RUN, BLOCK], tl.float32)
    for start in range(row, last + 1, RUN):
        position = start + tl.arange(0, RUN)
        mine = tl.load(target_ptr + position, mask=position < n_rows, other=-1) == target
        scale = tl.load(scale_ptr + position, mask=mine, other=0.0)
        ptrs = x_ptr + position.to(tl.int64)[:, None] * x_stride + cols[None, :]
        total += scale[:, None] * tl.load(ptrs, mask=mine[:, None] & inside[None, :], other=0.0).to(tl.float32)
    place = grad_ptr + target * grad_stride + cols
    grad = tl.load(place, mask=inside).to(tl.float32) + tl.sum(total, axis=0)
    tl.store(place, grad.to(grad_ptr.dtype.element_ty), mask=inside)


def add_target_rows_(grad: Tensor, target: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """`grad[target[n]] += scale[n] * x[n]` for every n, in a fixed order; returns `grad`.

    Args:
        grad: (V, H), rows contiguous; float32, or each row that is a target is rounded once more.
        target: (N,) int64.
        scale: (N,) float32.
        x: (N, H), rows contiguous.
    """
    n, hidden = x.shape
    if x.is_meta:
        return grad
    block = min(128, triton.next_power_of_2(hidden))
    _target_rows_kernel[grid_of_rows(n, triton.cdiv(hidden, block))](
        grad_ptr=grad,
        grad_stride=grad.stride(0),
        x_ptr=x,
        x_stride=x.stride(0),
        scale_ptr=scale,
        target_ptr=target,
        n_rows=n,
        hidden=hidden,
        SCAN=_SCAN,
        RUN=_RUN,
        BLOCK=block,
        num_warps=2,
    )
    return grad
