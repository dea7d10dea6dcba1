"""Add the target's terms to gradients: `E` of `project_exp` is 0 at target `y`.

    dL/dz[n, v] = s[n] E[n, v] + a[n] 1[v = y[n]]
    s = scale/sum (g_lse - g_logps),     a = scale/sum (g_logps rest + g_lse exp(z_y - c))
    dX = s (E W) + a W[y],               dW = E^T (s x), plus a[n] x[n] at row y[n]

A negative target is another rank's: no row has its terms.

Bytes: `scale_rows` 4 N H, `add_target_rows_of_weight` 8 N H, `add_target_rows_` at most 10 N H. Rows are contiguous.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.kernels.backend import block_size, grid_of_rows, grid_row, tl
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.projection import Exponentials
from liger_chunked.kernels.tuning import TUNING, hopper


class RowScales(NamedTuple):
    """Factors of rows, (N,) float32 each."""

    others: Tensor  # `s`
    target: Tensor  # `a`


@Kernel
def _scale_rows_kernel(
    x_ptr, scaled_ptr, logps_ptr, lse_ptr, rest_ptr, target_exp_ptr, sum_exp_ptr, values_scale_ptr, others_ptr,
    target_ptr, x_stride, hidden, scale, BLOCK: tl.constexpr,
):  # fmt: skip
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
    if values_scale_ptr is not None:
        others *= tl.load(values_scale_ptr + row)
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
    """Return `s` and `a`; write `s x`, rounded once, to `scaled`. `logps` and `lse` are upstream gradients."""
    n, hidden = x.shape
    scales = RowScales(*(torch.empty(n, dtype=torch.float32, device=x.device) for _ in RowScales._fields))
    most, num_warps = TUNING[x.device].hidden
    _scale_rows_kernel(
        (n, 1, 1),
        (x, scaled, logps, lse, *exponentials[2:], *scales),
        (x.stride(0), hidden, scale, block_size(hidden, most)),
        num_warps,
    )
    return scales


@Kernel
def _input_kernel(
    product_ptr, w_ptr, target_ptr, others_scale_ptr, target_scale_ptr, out_ptr, w_stride, out_stride, hidden,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    of_weight = tl.where(target < 0, 0, hidden)
    others_scale = tl.load(others_scale_ptr + row)
    target_scale = tl.load(target_scale_ptr + row)
    for start in range(0, hidden, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < hidden
        product = tl.load(product_ptr + row * hidden + cols, mask=inside)
        w = tl.load(w_ptr + target * w_stride + cols, mask=cols < of_weight, other=0.0).to(tl.float32)
        dx = others_scale * product + target_scale * w
        tl.store(out_ptr + row * out_stride + cols, dx.to(out_ptr.dtype.element_ty), mask=inside)


def add_target_rows_of_weight(product: Tensor, weight: Tensor, target: Tensor, scales: RowScales, out: Tensor) -> None:
    """Write `s product + a weight[target]` to `out`, rounded once. `product` is E W, float32, and may be `out`."""
    n, hidden = product.shape
    most, num_warps = TUNING[product.device].hidden
    _input_kernel(
        (n, 1, 1),
        (product, weight, target, *scales, out),
        (weight.stride(0), out.stride(0), hidden, block_size(hidden, most)),
        num_warps,
    )


@Kernel
def _order_kernel(
    target_ptr, order_ptr, start_ptr, length_ptr, n_tokens, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n_tokens
    # Sorted once, so that a program adds all rows of one target. When each block of columns of dW searched all targets,
    # 8192 tokens took 2.3 ms, and now 0.21 (docs/tuning.md).
    target = tl.load(target_ptr + row, mask=inside, other=-1).to(tl.int32)[:, None]
    lower = tl.zeros([ROWS, COLS], tl.int32)
    earlier = tl.zeros([ROWS, COLS], tl.int32)
    equal = tl.zeros([ROWS, COLS], tl.int32)
    for start in range(0, n_tokens, COLS):
        other = start + tl.arange(0, COLS)
        others = tl.load(target_ptr + other, mask=other < n_tokens, other=2147483647).to(tl.int32)[None, :]
        lower += (others < target).to(tl.int32)
        same = others == target
        equal += same.to(tl.int32)
        earlier += (same & (other[None, :] < row[:, None])).to(tl.int32)
    first = tl.sum(lower, axis=1)
    before = tl.sum(earlier, axis=1)
    tl.store(order_ptr + first + before, row, mask=inside)
    tl.store(start_ptr + row, first, mask=inside)
    tl.store(length_ptr + row, tl.where(before == 0, tl.sum(equal, axis=1), 0), mask=inside)


@Kernel
def _target_rows_kernel(
    grad_ptr, grad_stride, x_ptr, x_stride, scale_ptr, target_ptr, order_ptr, start_ptr, length_ptr, n_tokens, hidden,
    RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A target's first token adds them all, in order: atomics would change bits from run to run.
    row = grid_row()
    if row >= n_tokens:
        return
    length = tl.load(length_ptr + row)
    if length == 0:
        return
    target = tl.load(target_ptr + row)
    if target < 0:
        return
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < hidden
    place = grad_ptr + target * grad_stride + cols
    if length == 1:
        x = tl.load(x_ptr + row * x_stride + cols, mask=inside).to(tl.float32)
        tl.store(place, tl.load(place, mask=inside) + tl.load(scale_ptr + row) * x, mask=inside)
    else:
        order_ptr += tl.load(start_ptr + row)
        total = tl.zeros([RUN, BLOCK], tl.float32)
        for first in range(0, length, RUN):
            place_in_run = first + tl.arange(0, RUN)
            there = place_in_run < length
            token = tl.load(order_ptr + place_in_run, mask=there, other=0).to(tl.int64)
            scale = tl.load(scale_ptr + token, mask=there, other=0.0)
            x = tl.load(
                x_ptr + token[:, None] * x_stride + cols[None, :], mask=there[:, None] & inside[None, :], other=0.0
            )
            total += scale[:, None] * x.to(tl.float32)
        tl.store(place, tl.load(place, mask=inside) + tl.sum(total, axis=0), mask=inside)


class Occurrences(NamedTuple):
    order: Tensor  # tokens sorted by target, stable
    start: Tensor  # first place of the target in `order`
    length: Tensor  # its number of tokens; 0 after the first


def occurrences(target: Tensor) -> Occurrences:
    """Return places of targets, (N,) int64, by 3 N**2 comparisons."""
    n = target.shape[0]
    if n > hopper.MOST_SORTED:
        by_target, order = torch.sort(target, stable=True)
        start = torch.searchsorted(by_target, target, out_int32=True)
        length = torch.searchsorted(by_target, target, right=True, out_int32=True) - start
        is_first = order[start] == torch.arange(n, device=target.device)
        return Occurrences(order.int(), start, torch.where(is_first, length, 0))
    found = Occurrences(*(torch.empty(n, dtype=torch.int32, device=target.device) for _ in Occurrences._fields))
    grid = (-(-n // hopper.SORTED[0]), 1, 1)
    _order_kernel(grid, (target, *found), (n, *hopper.SORTED), hopper.TARGET_WARPS)
    return found


def add_target_rows_(grad: Tensor, target: Tensor, found: Occurrences, scale: Tensor, x: Tensor) -> Tensor:
    """Add `scale[n] x[n]` to `grad[target[n]]`, float32, in a fixed order."""
    n, hidden = x.shape
    block = block_size(hidden, hopper.TARGET_COLS)
    _target_rows_kernel[grid_of_rows(n, -(-hidden // block))](
        grad_ptr=grad,
        grad_stride=grad.stride(0),
        x_ptr=x,
        x_stride=x.stride(0),
        scale_ptr=scale,
        target_ptr=target,
        order_ptr=found.order,
        start_ptr=found.start,
        length_ptr=found.length,
        n_tokens=n,
        hidden=hidden,
        RUN=hopper.TARGET_RUN,
        BLOCK=block,
        num_warps=hopper.TARGET_WARPS,
    )
    return grad
