"""What the base kernels ask of their inputs; every message names the argument, what came and what was expected.

The checks run before every launch, so that what passes must cost next to nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def described(x: Any) -> str:
    """Shape, dtype and device of a tensor; the type of anything else."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


def check_floating(x: Any, name: str, ndim: int = 1) -> None:
    """`x` is a floating tensor of at least `ndim` dimensions.

    Raises:
        TypeError: it is no floating tensor.
        ValueError: it has fewer dimensions.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {described(x)}")
    if x.ndim < ndim:
        raise ValueError(f"{name} must have at least {ndim} dimensions, got {described(x)}")


def check_like(x: Any, name: str, other: Tensor, other_name: str) -> None:
    """`x` is a tensor of the shape, dtype and device of `other`.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device.
    """
    if not isinstance(x, Tensor) or x.dtype != other.dtype:
        raise TypeError(f"{name} must be a tensor of the dtype of {other_name} {described(other)}, got {described(x)}")
    if x.shape != other.shape or x.device != other.device:
        raise ValueError(
            f"{name} must have the shape and device of {other_name} {described(other)}, got {described(x)}"
        )


def check_row(weight: Any, name: str, x: Tensor) -> None:
    """`weight` is a floating tensor with one value for each column of `x`, on its device.

    Raises:
        TypeError: it is no floating tensor.
        ValueError: another shape or device.
    """
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {described(weight)}")
    if weight.ndim != 1 or weight.shape[0] != x.shape[-1] or weight.device != x.device:
        raise ValueError(
            f"{name} must be ({x.shape[-1]},) on {x.device}, one value for each column of x, got {described(weight)}"
        )
