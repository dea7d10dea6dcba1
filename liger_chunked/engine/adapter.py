from __future__ import annotations

import torch
from torch import Tensor

from liger_chunked.engine.checks import autocast_dtype
from liger_chunked.kernels.operands import described, plain
from liger_chunked.types import AdaptedWeight, HeadTensors, LossHead

# float16 cannot hold a `u` of 1e5 or an `up` of 1e-7. Constant, because ranks sum gradients of `u`.
_RANGE = 256.0


def _parts(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `x` rounded to `dtype`, and the rest, without gradient."""
    given = x.detach()
    rest = given - given.to(dtype).to(x.dtype)
    return x - rest, rest  # exact


def apply_down(head: LossHead, input: Tensor, dtype: torch.dtype) -> tuple[HeadTensors, Tensor | None]:
    """Return the head's tensors, and an adapter's `u` (..., k), with logits `u @ up.T`.

    k is r, but 3 r for float32 adapters of a 16-bit head outside autocast: rounding gives up to 1.6 times the error.

        u @ up.T  ~  u_rounded @ up_rounded.T + u_rest @ up_rounded.T + u_rounded @ up_rest.T
    """
    weight = head.weight
    if not isinstance(weight, AdaptedWeight):
        return HeadTensors(weight, head.bias, None, head.shard), None
    u = weight.down(input)
    if not isinstance(u, Tensor) or not u.is_floating_point():
        raise TypeError(f"weight.down must return a floating-point tensor, got {described(u)}")
    (u,) = plain(("weight.down(input)",), (u,))
    expected = (*input.shape[:-1], weight.up.shape[1])
    if u.shape != expected or u.device != input.device:
        raise ValueError(
            f"weight.down must return {expected} on {input.device} for hidden states {described(input)}, one value per "
            f"column of weight.up, got {described(u)}"
        )
    up = weight.up
    if dtype == torch.float16 and u.dtype != dtype:
        u, up = u / _RANGE, up * _RANGE
    if max(u.dtype.itemsize, up.dtype.itemsize) > dtype.itemsize and autocast_dtype(input.device.type) is None:
        (u, u_rest), (up, up_rest) = _parts(u, dtype), _parts(up, dtype)
        u, up = torch.cat([u, u_rest, u], -1), torch.cat([up, up, up_rest], -1)
    return HeadTensors(weight.weight, head.bias, up, head.shard), u
