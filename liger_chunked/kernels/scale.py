"""Multiply a gradient by the upstream scalar, in place, and at no cost where that scalar is 1.

Bytes: none for a scalar of 1, which the kernel finds out on the device, so that the host waits for nothing; otherwise
the tensor once in and once out.
"""

from __future__ import annotations

from torch import Tensor

from liger_chunked.kernels.backend import tl, triton, use_triton
from liger_chunked.kernels.launch import Kernel

_PROGRAMS = 2048  # a few waves on any GPU: enough to saturate memory, few enough to return at once


@Kernel
def _scale_kernel(x_ptr, scalar_ptr, n, BLOCK: tl.constexpr):
    scalar = tl.load(scalar_ptr).to(tl.float32)
    if scalar != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        start = tl.program_id(0).to(tl.int64) * BLOCK
        while start < n:
            offsets = start + tl.arange(0, BLOCK)
            inside = offsets < n
            x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32) * scalar
            tl.store(x_ptr + offsets, x.to(x_ptr.dtype.element_ty), mask=inside)
            start += step


def scale_(x: Tensor, scalar: Tensor) -> Tensor:
    """`x *= scalar` for a contiguous `x` and a scalar tensor on its device, computed in float32; returns `x`."""
    if not use_triton(x):
        return x if x.device.type == "cpu" and scalar.item() == 1.0 else x.mul_(scalar)
    if x.numel():
        block = 4096
        programs = min(_PROGRAMS, triton.cdiv(x.numel(), block))
        _scale_kernel[(programs,)](x_ptr=x, scalar_ptr=scalar, n=x.numel(), BLOCK=block, num_warps=8)
    return x
