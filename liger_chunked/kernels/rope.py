"""Rotary position embedding of queries and keys, one launch for both.

Of the `R` rotated columns of a head, pair `i` turns by the angle of frequency `i` at the token's position:

    y_1 = x_1 cos_i - x_2 sin_i
    y_2 = x_2 cos_i + x_1 sin_i        (x_1, x_2) = x[i], x[i + R / 2], or interleaved x[2 i], x[2 i + 1]

in float32, rounded once; columns beyond R pass. The backward is the same launch with the angle turned around. Nothing
is saved but cos and sin. The inputs are left alone: writing into their memory would save no bytes moved, and the model
drops its last reference to the projections when it rebinds their names.

Bytes: q and k read and written once, in either direction. 16384 tokens of 32 + 8 heads of 128 in bfloat16 are 168 MB,
0.16 ms for the four at 4.29 TB/s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_chunked.kernels.backend import jit, operator, tl, use_triton
from liger_chunked.kernels.checks import check_floating, described
from liger_chunked.types import accumulation_dtype

_PAIRS = 2048  # of one tile of heads


@jit
def _rotate(
    x_ptr, x_head_stride, y_ptr, y_head_stride, cos, sin, n_heads, head_dim, half,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Every head of one token."""
    for first in range(0, n_heads, HEADS):
        heads = (first + tl.arange(0, HEADS))[:, None]
        x_ptrs = x_ptr + heads.to(tl.int64) * x_head_stride
        y_ptrs = y_ptr + heads.to(tl.int64) * y_head_stride
        if INTERLEAVED:
            cols = tl.arange(0, 2 * HALF)[None, :]
            inside = (heads < n_heads) & (cols < 2 * half)
            x = tl.load(x_ptrs + cols, mask=inside, other=0.0).to(tl.float32)
            x1, x2 = tl.split(tl.reshape(x, [HEADS, HALF, 2]))
            y = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin)
            y = tl.reshape(y, [HEADS, 2 * HALF])
            tl.store(y_ptrs + cols, y.to(y_ptr.dtype.element_ty), mask=inside)
        else:
            cols = tl.arange(0, HALF)[None, :]
            inside = (heads < n_heads) & (cols < half)
            x1 = tl.load(x_ptrs + cols, mask=inside, other=0.0).to(tl.float32)
            x2 = tl.load(x_ptrs + half + cols, mask=inside, other=0.0).to(tl.float32)
            tl.store(y_ptrs + cols, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty), mask=inside)
            tl.store(y_ptrs + half + cols, (x2 * cos + x1 * sin).to(y_ptr.dtype.element_ty), mask=inside)
        if REST > 0:
            cols = 2 * half + tl.arange(0, REST)[None, :]
            inside = (heads < n_heads) & (cols < head_dim)
            tl.store(y_ptrs + cols, tl.load(x_ptrs + cols, mask=inside), mask=inside)


@jit
def _rope_kernel(
    q_ptr, q_batch_stride, q_head_stride, q_token_stride, q_out_ptr, qo_batch_stride, qo_head_stride, qo_token_stride,
    k_ptr, k_batch_stride, k_head_stride, k_token_stride, k_out_ptr, ko_batch_stride, ko_head_stride, ko_token_stride,
    cos_ptr, cos_batch_stride, cos_token_stride, sin_ptr, sin_batch_stride, sin_token_stride,
    n_tokens, q_heads, k_heads, head_dim, half,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    # One program per token, on x: y and z of a launch grid stop at 65,535.
    batch = (tl.program_id(0) // n_tokens).to(tl.int64)
    token = (tl.program_id(0) % n_tokens).to(tl.int64)
    cols = tl.arange(0, HALF)
    cos_ptrs = cos_ptr + batch * cos_batch_stride + token * cos_token_stride + cols
    sin_ptrs = sin_ptr + batch * sin_batch_stride + token * sin_token_stride + cols
    cos = tl.load(cos_ptrs, mask=cols < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptrs, mask=cols < half, other=0.0).to(tl.float32)[None, :]
    if INVERSE:
        sin = -sin
    _rotate(
        q_ptr + batch * q_batch_stride + token * q_token_stride, q_head_stride,
        q_out_ptr + batch * qo_batch_stride + token * qo_token_stride, qo_head_stride,
        cos, sin, q_heads, head_dim, half, Q_HEADS, HALF, REST, INTERLEAVED,
    )  # fmt: skip
    _rotate(
        k_ptr + batch * k_batch_stride + token * k_token_stride, k_head_stride,
        k_out_ptr + batch * ko_batch_stride + token * ko_token_stride, ko_head_stride,
        cos, sin, k_heads, head_dim, half, K_HEADS, HALF, REST, INTERLEAVED,
    )  # fmt: skip


def _power_of_two(n: int) -> int:
    """The least one that is not below `n`."""
    return 1 << (n - 1).bit_length()


def _rope_triton(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    n_batch, q_heads, n_tokens, head_dim = q.shape
    k_heads, rotary_dim = k.shape[1], cos.shape[-1]
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    # In the layout that their inputs have, which is the one that attention wants.
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    half = _power_of_two(rotary_dim // 2)
    rest = head_dim - rotary_dim
    shared = cos.shape[0] == 1
    if q.numel() or k.numel():
        _rope_kernel[(n_batch * n_tokens,)](
            q, *q.stride()[:3], q_out, *q_out.stride()[:3], k, *k.stride()[:3], k_out, *k_out.stride()[:3],
            cos, 0 if shared else cos.stride(0), cos.stride(1), sin, 0 if shared else sin.stride(0), sin.stride(1),
            n_tokens, q_heads, k_heads, head_dim, rotary_dim // 2,
            Q_HEADS=min(_power_of_two(q_heads), max(1, _PAIRS // half)),
            K_HEADS=min(_power_of_two(k_heads), max(1, _PAIRS // half)),
            HALF=half,
            REST=_power_of_two(rest) if rest else 0,
            INTERLEAVED=interleaved,
            INVERSE=inverse,
            num_warps=4,
        )  # fmt: skip
    return q_out, k_out


def _rope_torch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    rotary_dim = cos.shape[-1]
    half = rotary_dim // 2
    dtype = accumulation_dtype(q.dtype)
    cos, sin = (x[..., :half].to(dtype).unsqueeze(1) for x in (cos, sin))
    if inverse:
        sin = -sin
    pairs = (
        (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)) if interleaved else (slice(half), slice(half, rotary_dim))
    )

    def rotated(x: Tensor) -> Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        y = torch.empty_like(x)
        x1, x2 = (x[..., columns].to(dtype) for columns in pairs)
        y[..., pairs[0]] = x1 * cos - x2 * sin
        y[..., pairs[1]] = x2 * cos + x1 * sin
        y[..., rotary_dim:] = x[..., rotary_dim:]
        return y

    return rotated(q), rotated(k)


@operator("rotary_pos_emb", fake=_rope_torch)
def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> tuple[Tensor, Tensor]:
    return (_rope_triton if use_triton(q) else _rope_torch)(q, k, cos, sin, interleaved, inverse)


class _RotaryPosEmb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        ctx.interleaved = interleaved
        ctx.save_for_backward(cos, sin)
        return _rope(q, k, cos, sin, interleaved, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk = _rope(dq, dk, *ctx.saved_tensors, ctx.interleaved, True)
        needs_dq, needs_dk, *_ = ctx.needs_input_grad
        return dq if needs_dq else None, dk if needs_dk else None, None, None, None


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Of q and k as (B, heads, T, D)."""
    for name, x in (("q", q), ("k", k)):
        check_floating(x, name)
        if x.ndim != 4 or x.shape[0] != q.shape[0] or x.shape[2:] != q.shape[2:] or x.dtype != q.dtype:
            raise ValueError(
                "q and k must have four dimensions and agree on dtype, batch, tokens and head size, got q "
                f"{described(q)}, k {described(k)}"
            )
    for name, x in (("cos", cos), ("sin", sin)):
        check_floating(x, name)
        if (
            x.ndim != 3
            or x.shape != cos.shape
            or x.shape[0] not in (1, q.shape[0])
            or x.shape[1] != q.shape[2]
            or x.shape[2] > q.shape[3]
            or x.shape[2] % 2
            or x.requires_grad
        ):
            raise ValueError(
                f"{name} must be (B or 1, T, R) = ({q.shape[0]}, {q.shape[2]}, R), R even and at most "
                f"{q.shape[3]}, without gradient, as q is {described(q)}; got {described(x)}"
            )


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions (Su et al. 2021, equation 34), as `apply_rotary_pos_emb` does.

    Args:
        q: (B, heads, T, D); with `unsqueeze_dim=2`, (B, T, heads, D). Any layout; the result has the same.
        k: likewise, with its own number of heads, in the dtype of `q`.
        cos, sin: (B or 1, T, R) of any floating dtype, R at most D: of a wider head the first R columns rotate. Their
            second half repeats the first, as every rotary embedding of transformers makes them, and is not read.
        position_ids: (B or 1, T) rows of `cos` and `sin`, where these are tables (positions, R); they are taken as
            being of the tokens' positions where they have three dimensions.
        unsqueeze_dim: which dimension of `q` and `k` is the heads: 1 or 2.
        interleaved: pairs are neighbours (GLM-4), rather than half of R apart.

    Returns:
        `q` and `k` rotated, in their dtype.

    Raises:
        TypeError: something that is not a floating tensor.
        ValueError: shapes that do not fit; `cos` or `sin` that want a gradient.

    >>> angle = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1]).repeat(2)
    >>> q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 1, 5, 4)
    >>> q_rotated, _ = liger_rotary_pos_emb(q, k, angle.cos()[None], angle.sin()[None])
    >>> torch.allclose(q_rotated.norm(dim=-1), q.norm(dim=-1))
    True
    """
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim must be 1 or 2, the dimension of the heads, got {unsqueeze_dim}")
    if cos.ndim == 2:
        cos, sin = (x[None] if position_ids is None else x[position_ids] for x in (cos, sin))
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    _check(q, k, cos, sin)
    q, k = _RotaryPosEmb.apply(q, k, cos, sin, interleaved)
    return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 2 else (q, k)
