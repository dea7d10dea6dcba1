"""Rotary functions that take the arguments of stock ones. `overrides.py` lists the stock function of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_chunked.layers.rope import liger_rotary_pos_emb

Rotated = tuple[Tensor, Tensor]


def rotate_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Rotated:
    """Rotate the halves of a head. `cos` may be narrower, as in Phi-3."""
    return liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


def rotate_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Rotated:
    """Rotate neighbouring columns."""
    return liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, interleaved=True)


def rotate_to_halves(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> Rotated:
    """`rotate_pairs`, but neighbouring columns become halves."""
    return liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, interleaved=True, deinterleave=True)


def rotate_halves_by_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Rotated:
    """`rotate_halves`, but `cos` has half the columns."""
    return liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, rotary_dim=q.shape[-1])


def rotate_pairs_of_repeated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Rotated:
    """`rotate_pairs`, but `cos` repeats each column."""
    cos, sin = cos[..., ::2], sin[..., ::2]
    options: dict[str, Any] = {"rotary_dim": 2 * cos.shape[-1], "interleaved": True}
    return liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, **options)


def rotate_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Rotated:
    """`rotate_halves` by the negative angle."""
    return liger_rotary_pos_emb(q, k, cos, -sin, unsqueeze_dim=unsqueeze_dim)


def rotate_one(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """`rotate_halves` of queries or keys."""
    no_heads = x.detach().narrow(unsqueeze_dim, 0, 0)
    return liger_rotary_pos_emb(x, no_heads, cos, sin, unsqueeze_dim=unsqueeze_dim)[0]


def rotate_one_by_half(tensor: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """`rotate_pairs` of queries or keys, with half-width `cos`."""
    options: dict[str, Any] = {"rotary_dim": tensor.shape[-1], "interleaved": True, "unsqueeze_dim": 2}
    return liger_rotary_pos_emb(tensor, tensor.detach()[:, :, :0], cos, sin, **options)[0]


def _with_gradient(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.float().chunk(2, dim=-1)
    return (x * cos.unsqueeze(-2) + torch.cat((-x2, x1), dim=-1) * sin.unsqueeze(-2)).to(x.dtype)


def rotate_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Rotated:
    """`rotate_halves` with heads after tokens, with or without a batch."""
    if cos.requires_grad:  # learned positions (MLCD)
        return _with_gradient(q, cos, sin), _with_gradient(k, cos, sin)
    if q.ndim == 4:
        return liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    q, k = liger_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    return q[0], k[0]


def _rotate_complex(q: Tensor, k: Tensor, freqs_cis: Tensor, heads_dim: int) -> Rotated:
    options: dict[str, Any] = {"rotary_dim": q.shape[-1], "interleaved": True, "unsqueeze_dim": heads_dim}
    return liger_rotary_pos_emb(q, k, freqs_cis.real, freqs_cis.imag, **options)


def rotate_complex(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Rotated:
    """Multiply complex numbers, with heads after tokens."""
    return _rotate_complex(xq, xk, freqs_cis, 2)


def rotate_complex_heads(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Rotated:
    """`rotate_complex`, with heads before tokens."""
    return _rotate_complex(xq, xk, freqs_cis.to(xq.device), 1)


# Those that read a half of `cos` as it is. The others read one of two equal halves, or of two equal neighbours.
HALF_ANGLES = {rotate_halves_by_half, rotate_one_by_half, rotate_complex, rotate_complex_heads}
