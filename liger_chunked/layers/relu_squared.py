"""Squared ReLU, in float32, rounded once.

    y = max(x, 0)**2,  dx = 2 dy max(x, 0)

Bytes: forward 2, backward 3 times `x`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_chunked.kernels.backend import contiguous_like, first_derivative, operator, tl, use_triton
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.operands import check_floating, plain
from liger_chunked.layers.glu import launch_elementwise
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


def _run_torch(x: Tensor, dy: Tensor | None) -> Tensor:
    z = x.contiguous().to(accumulation_dtype(x.dtype)).clamp(min=0)
    return (z.square() if dy is None else (2 * z * dy.contiguous()).masked_fill_(z == 0, 0.0)).to(x.dtype)


@operator("relu_squared", fake=lambda x, dy: contiguous_like(x))
def _run(x: Tensor, dy: Tensor | None) -> Tensor:
    if not use_triton(x):
        return _run_torch(x, dy)
    out = contiguous_like(x)
    launch_elementwise(_kernel, out, (x, dy, out), ())
    return out


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
    """Return `F.relu(x).square()` (So et al. 2021), computed in float32 and rounded once.

    Args:
        x: (..., D), floating-point, rows in any layout.

    Returns:
        (..., D), contiguous, in the dtype of `x`.

    Raises:
        TypeError: `x` is no plain floating-point tensor.
        ValueError: `x` has no dimension.
        NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode autograd.

    >>> liger_relu_squared(torch.tensor([-1.0, 0.5, 3.0]))
    tensor([0.0000, 0.2500, 9.0000])
    """
    (x,) = plain(("x",), (x,))
    check_floating(x, "x")
    return _ReLUSquared.apply(x) if torch.is_grad_enabled() else _run(x, None)
