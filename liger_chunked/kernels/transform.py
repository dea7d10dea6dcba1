"""The transform of `LogitOptions` and its derivative, in torch and Triton."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.kernels.backend import jit, tanh, tl
from liger_chunked.types import LogitOptions


def transform_and_slope(
    z: Tensor, logit_scale: float, softcap: float | None, temperature: float | Tensor, needs_slope: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return transformed logits, and the softcap's derivative or None, differentiably."""
    slope = None
    if logit_scale != 1.0:
        z = z * logit_scale
    if softcap is not None:
        tanh_z = torch.div(z, softcap).tanh_()
        if needs_slope:
            slope = 1.0 - tanh_z.square()
        z = tanh_z * softcap
    if isinstance(temperature, Tensor) or temperature != 1.0:
        z = z / temperature
    return z, slope


def transform(z: Tensor, logit_scale: float, softcap: float | None, temperature: float | Tensor) -> Tensor:
    return transform_and_slope(z, logit_scale, softcap, temperature, needs_slope=False)[0]


class TransformArguments(NamedTuple):
    """The arguments of `transform_block`; None compiles to nothing."""

    scale: float | None
    softcap: float | None
    inv_temperature: float | None


def _unless_one(factor: float) -> float | None:
    return None if factor == 1.0 else float(factor)


@functools.lru_cache  # three kernels of each step ask
def transform_arguments(options: LogitOptions) -> TransformArguments:
    """Return what kernels get for `options`."""
    if options.softcap is None:
        return TransformArguments(_unless_one(options.logit_scale / options.temperature), None, None)
    return TransformArguments(
        scale=_unless_one(options.logit_scale / options.softcap),
        softcap=float(options.softcap),
        inv_temperature=_unless_one(1.0 / options.temperature),
    )


@jit
def transform_and_tanh(z, scale, softcap, inv_temperature):
    if scale is not None:
        z = z * scale
    tanh_z = z
    if softcap is not None:
        tanh_z = tanh(z)
        z = softcap * tanh_z
    if inv_temperature is not None:
        z = z * inv_temperature
    return z, tanh_z


@jit
def transform_block(z, scale, softcap, inv_temperature):
    z, _ = transform_and_tanh(z, scale, softcap, inv_temperature)
    return z


@jit
def transform_gradient(grad, tanh_z, scale, softcap, inv_temperature):
    if inv_temperature is not None:
        grad = grad * inv_temperature
    if softcap is not None:
        grad = grad * softcap * (1.0 - tanh_z * tanh_z)
    if scale is not None:
        grad = grad * scale
    return grad


@jit
def load_block(ptr, cols, n_cols, WHOLE: tl.constexpr):
    """Load a block in float32; unless WHOLE, 0 past the row."""
    if WHOLE:
        x = tl.load(ptr + cols)
    else:
        x = tl.load(ptr + cols, mask=cols < n_cols, other=0.0)
    return x.to(tl.float32)
