"""Add the target's terms to gradients: `E` of `project_exp` is 0 at target `y`.

    dL/dz[n, v] = s[n] E[n, v] + a[n] 1[v = y[n]]
    s = scale/sum (g_lse - g_logps),     a = scale/sum (g_logps rest + g_lse exp(z_y - c))
    dX = s (E W) + a W[y],               dW = E^T (s x), plus a[n] x[n] at row y[n]

A negative target is another rank's: no row has its terms.

`add_rows.py` adds the target's rows to dW. Bytes: `scale_rows` 4 N H, `add_target_rows_of_weight` 8 N H. Rows are
contiguous.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.kernels.backend import block_size, tl
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.projection import Exponentials
from liger_chunked.kernels.tuning import TUNING


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
