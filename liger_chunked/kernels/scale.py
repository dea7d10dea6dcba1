"""Multiply gradients by the upstream scalar. Bytes: each tensor read and written once, none if the scalar is 1."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from liger_chunked.kernels.backend import jit, on_host, tl, use_triton
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.tuning import TUNING

_MOST = 3  # of a launch: dX, dW, db


@jit
def _scale_one(x_ptr, n, scalar, BLOCK: tl.constexpr):
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < n:
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < n
        x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32) * scalar
        tl.store(x_ptr + offsets, x.to(x_ptr.dtype.element_ty), mask=inside)
        start += step


@Kernel
def _scale_kernel(
    scalar_ptr, first_ptr, second_ptr, third_ptr, n_first, n_second, n_third, BLOCK: tl.constexpr
):  # fmt: skip
    scalar = tl.load(scalar_ptr).to(tl.float32)
    if scalar != 1.0:
        _scale_one(first_ptr, n_first, scalar, BLOCK)
        if second_ptr is not None:
            _scale_one(second_ptr, n_second, scalar, BLOCK)
        if third_ptr is not None:
            _scale_one(third_ptr, n_third, scalar, BLOCK)


def scale_(tensors: Sequence[Tensor], scalar: Tensor) -> None:
    """Compute `x *= scalar` in the accumulation dtype for contiguous tensors."""
    every: list[Tensor] = []
    others: list[Tensor] = []
    for x in tensors:
        if x.numel():
            (every if use_triton(x) else others).append(x)
    for start in range(0, len(every), _MOST):
        served = every[start : start + _MOST]
        tuned = TUNING[served[0].device]
        block, num_warps = tuned.scale
        sizes = [x.numel() for x in served]
        absent = _MOST - len(served)
        _scale_kernel(
            (min(tuned.scale_programs, -(-max(sizes) // block)), 1, 1),
            (scalar, *served, *[None] * absent),
            (*sizes, *[0] * absent, block),
            num_warps,
        )
    if others and not (on_host(scalar) and scalar.item() == 1.0):
        for x in others:
            x.mul_(scalar)
