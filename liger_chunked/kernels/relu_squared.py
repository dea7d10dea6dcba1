"""Squared ReLU, in float32, rounded once.

    y = max(x, 0)**2,  dx = 2 dy max(x, 0)

Bytes: forward 2, backward 3 times `x`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_chunked.kernels.backend import contiguous_like, first_derivative, operator, strided_rows, tl, use_triton
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.operands import check_floating, plain
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.types import accumulation_dtype


@Kernel
def _kernel(
    x_ptr, dy_ptr, out_ptr, x_stride, dy_stride, out_stride, n_cols, blocks_per_row,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    cols = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < n_cols
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(x < 0.0, 0.0, x)  # tl.maximum would drop NaN
    if dy_ptr is None:
        y = x * x
    else:
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask=inside, other=0.0).to(tl.float32)
        y = tl.where(x == 0.0, 0.0, 2.0 * x * dy)  # also of an infinite dy
    tl.store(out_ptr + row * out_stride + cols, y.to(out_ptr.dtype.element_ty), mask=inside)


def _run_triton(x: Tensor, dy: Tensor | None) -> Tensor:
    out = contiguous_like(x)
    n_cols, n_rows = x.numel(), 1
    if not n_cols:
        return out
    tensors: tuple[Tensor | None, ...] = x, dy, out
    strides: tuple[int, ...] = 0, 0, 0
    if not all(t is None or t.is_contiguous() for t in tensors):
        n_cols = x.shape[-1]
        n_rows = x.numel() // n_cols
        tensors, strides = zip(*((None, 0) if t is None else strided_rows(t) for t in tensors), strict=True)
    block, num_warps = TUNING[x.device].glu
    blocks_per_row = -(-n_cols // block)
    _kernel((n_rows * blocks_per_row, 1, 1), tensors, (*strides, n_cols, blocks_per_row, block), num_warps)
    return out


def _run_torch(x: Tensor, dy: Tensor | None) -> Tensor:
    z = x.contiguous().to(accumulation_dtype(x.dtype)).clamp(min=0)
    return (z.square() if dy is None else (2 * z * dy.contiguous()).masked_fill_(z == 0, 0.0)).to(x.dtype)


@operator("relu_squared", fake=lambda x, dy: contiguous_like(x))
def _run(x: Tensor, dy: Tensor | None) -> Tensor:
    return (_run_triton if use_triton(x) else _run_torch)(x, dy)


class _ReLUSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _run(x, None)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return _run(ctx.saved_tensors[0], dy)


def liger_relu_squared(x: Tensor) -> Tensor:
    """Return `F.relu(x).square()` (So et al. 2021), in the dtype of `x`; rows in any layout.

    >>> liger_relu_squared(torch.tensor([-1.0, 0.5, 3.0]))
    tensor([0.0000, 0.2500, 9.0000])
    """
    (x,) = plain(("x",), (x,))
    check_floating(x, "x")
    return _ReLUSquared.apply(x) if torch.is_grad_enabled() else _run(x, None)
