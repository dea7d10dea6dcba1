"""The base kernels under the names that the table uses."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor


def liger_rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, casting: str = "llama") -> Tensor:
    normalized = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if casting == "llama":
        return (offset + weight) * normalized.to(x.dtype)
    if casting == "gemma":
        return ((offset + weight.float()) * normalized).to(x.dtype)
    return ((offset + weight) * normalized).to(x.dtype)


def liger_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def liger_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def liger_swiglu_packed(gate_up: Tensor) -> Tensor:
    return liger_swiglu(*gate_up.chunk(2, dim=-1))


def liger_geglu(gate: Tensor, up: Tensor, *, approximate: str = "tanh") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def liger_geglu_packed(gate_up: Tensor, *, approximate: str = "tanh") -> Tensor:
    return liger_geglu(*gate_up.chunk(2, dim=-1), approximate=approximate)


liger_geglu_tanh = functools.partial(liger_geglu, approximate="tanh")
liger_geglu_erf = functools.partial(liger_geglu, approximate="none")
liger_geglu_tanh_packed = functools.partial(liger_geglu_packed, approximate="tanh")
liger_geglu_erf_packed = functools.partial(liger_geglu_packed, approximate="none")


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def liger_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotated(q, cos, sin).to(q.dtype), _rotated(k, cos, sin).to(k.dtype)


def liger_rotary_pos_emb_partial(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    width = cos.shape[-1]
    rotated = liger_rotary_pos_emb(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    q_out, k_out = (torch.cat((r, x[..., width:]), dim=-1) for r, x in zip(rotated, (q, k), strict=True))
    return q_out, k_out


def liger_rotary_pos_emb_interleaved(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    width = cos.shape[-1]

    def halves(x: Tensor) -> Tensor:
        return torch.cat((x[..., 0:width:2], x[..., 1:width:2]), dim=-1)

    def pairs(x: Tensor, rest: Tensor) -> Tensor:
        return torch.cat((torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2), rest[..., width:]), dim=-1)

    q_out, k_out = liger_rotary_pos_emb(halves(q), halves(k), cos, sin, unsqueeze_dim)
    return pairs(q_out, q), pairs(k_out, k)
