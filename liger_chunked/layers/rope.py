"""Rotary position embedding in one launch, in float32, rounded once.

Results and gradients have q's memory layout. Bytes: q and k read and written once.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from liger_chunked.kernels.backend import (
    checked_upstream,
    first_derivative,
    has_own_memory,
    jit,
    operator,
    power_of_two,
    tl,
    use_triton,
)
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.operands import check_floating, described, plain
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.private import base_of
from liger_chunked.types import accumulation_dtype, shown


@jit
def _rotate(
    tile, x_ptr, y_ptr, cos_ptr, sin_ptr, x_batch_stride, x_head_stride, x_token_stride, cos_batch_stride,
    cos_token_stride, sin_batch_stride, sin_token_stride, n_tokens, n_rows, n_heads, head_dim, half,
    ROWS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BY_TOKEN: tl.constexpr,
    PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Rotate a tile of heads, whose pairs are neighbouring columns or not; in place without y."""
    rows = tile * ROWS + tl.arange(0, ROWS)[:, None]
    tokens = rows // n_heads
    head = (rows % n_heads).to(tl.int64)
    batch = (tokens // n_tokens).to(tl.int64)
    token = (tokens % n_tokens).to(tl.int64)
    valid = rows < n_rows
    x_ptrs = x_ptr + batch * x_batch_stride + head * x_head_stride + token * x_token_stride
    if y_ptr is None:
        y_ptrs = x_ptrs  # pairs are read before they are written
    elif BY_TOKEN:
        y_ptrs = y_ptr + rows.to(tl.int64) * head_dim
    else:
        y_ptrs = y_ptr + ((batch * n_heads + head) * n_tokens + token) * head_dim
    pairs = tl.arange(0, HALF)[None, :]
    inside = valid & (pairs < half)
    cos = tl.load(cos_ptr + batch * cos_batch_stride + token * cos_token_stride + pairs, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + batch * sin_batch_stride + token * sin_token_stride + pairs, mask=inside, other=0.0)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    if INVERSE:
        sin = -sin
    both = tl.arange(0, 2 * HALF)[None, :]
    inside_both = valid & (both < 2 * half)
    if PAIRS_IN:
        x = tl.load(x_ptrs + both, mask=inside_both, other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, [ROWS, HALF, 2]))
    else:
        x1 = tl.load(x_ptrs + pairs, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptrs + half + pairs, mask=inside, other=0.0).to(tl.float32)
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    if PAIRS_OUT:
        y = tl.reshape(tl.join(y1, y2), [ROWS, 2 * HALF])
        tl.store(y_ptrs + both, y.to(x_ptr.dtype.element_ty), mask=inside_both)
    else:
        tl.store(y_ptrs + pairs, y1.to(x_ptr.dtype.element_ty), mask=inside)
        tl.store(y_ptrs + half + pairs, y2.to(x_ptr.dtype.element_ty), mask=inside)
    if REST > 0 and y_ptr is not None:
        cols = 2 * half + tl.arange(0, REST)[None, :]
        inside = valid & (cols < head_dim)
        tl.store(y_ptrs + cols, tl.load(x_ptrs + cols, mask=inside), mask=inside)


@Kernel
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    q_batch_stride, q_head_stride, q_token_stride, k_batch_stride, k_head_stride, k_token_stride,
    cos_batch_stride, cos_token_stride, sin_batch_stride, sin_token_stride,
    n_tokens, q_rows, k_rows, q_heads, k_heads, head_dim, half,
    ROWS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BY_TOKEN: tl.constexpr,
    PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    q_tiles = tl.cdiv(q_rows, ROWS)
    if tile < q_tiles:
        _rotate(
            tile, q_ptr, q_out_ptr, cos_ptr, sin_ptr, q_batch_stride, q_head_stride, q_token_stride, cos_batch_stride,
            cos_token_stride, sin_batch_stride, sin_token_stride, n_tokens, q_rows, q_heads, head_dim, half,
            ROWS, HALF, REST, BY_TOKEN, PAIRS_IN, PAIRS_OUT, INVERSE,
        )  # fmt: skip
    else:
        _rotate(
            tile - q_tiles, k_ptr, k_out_ptr, cos_ptr, sin_ptr, k_batch_stride, k_head_stride, k_token_stride,
            cos_batch_stride, cos_token_stride, sin_batch_stride, sin_token_stride, n_tokens, k_rows, k_heads, head_dim,
            half, ROWS, HALF, REST, BY_TOKEN, PAIRS_IN, PAIRS_OUT, INVERSE,
        )  # fmt: skip


@functools.cache
def _tiling(head_dim: int, rotary_dim: int, device: torch.device) -> tuple[int, int, int, int]:
    pairs, num_warps = TUNING[device].rope
    half = power_of_two(rotary_dim // 2)
    rest = power_of_two(head_dim - rotary_dim) if head_dim > rotary_dim else 0
    return max(1, pairs // max(half, rest // 2)), half, rest, num_warps


def _empty(x: Tensor, by_token: bool) -> Tensor:
    _, n_heads, n_tokens, head_dim = x.shape
    head, token = (1, n_heads) if by_token else (n_tokens, 1)
    strides = (n_heads * n_tokens * head_dim, head * head_dim, token * head_dim, 1)
    return x.new_empty_strided(x.shape, strides)


def _rope_triton(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, half: int, pairs_in: bool, pairs_out: bool, inverse: bool,
    by_token: bool, inplace: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    n_batch, q_heads, n_tokens, head_dim = q.shape
    k_heads = k.shape[1]
    q, k, cos, sin = [x if x.stride()[-1] == 1 else x.contiguous() for x in (q, k, cos, sin)]
    q_out, k_out = (None, None) if inplace else (_empty(q, by_token), _empty(k, by_token))
    q_rows, k_rows = n_batch * n_tokens * q_heads, n_batch * n_tokens * k_heads
    tile, half_block, rest, num_warps = _tiling(head_dim, 2 * half, q.device)
    if q_rows or k_rows:
        cos_batch, cos_token, _ = cos.stride()
        sin_batch, sin_token, _ = sin.stride()
        if cos.shape[0] == 1:
            cos_batch = sin_batch = 0
        written = q_out, k_out
        if by_token and q_out is not None and k_out is not None:
            # As contiguous tensors, because a launch checks the strides of others at length.
            written = q_out.transpose(1, 2), k_out.transpose(1, 2)
        _rope_kernel(
            (-(-q_rows // tile) + -(-k_rows // tile), 1, 1),
            (q, k, cos, sin, *written),
            (
                *q.stride()[:3], *k.stride()[:3], cos_batch, cos_token, sin_batch, sin_token,
                n_tokens, q_rows, k_rows, q_heads, k_heads, head_dim, half,
                tile, half_block, rest, by_token, pairs_in, pairs_out, inverse,
            ),
            num_warps,
        )  # fmt: skip
    return q if q_out is None else q_out, k if k_out is None else k_out


def _rope_torch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, half: int, pairs_in: bool, pairs_out: bool, inverse: bool,
    by_token: bool, inplace: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rotary_dim = 2 * half
    dtype = accumulation_dtype(q.dtype)
    cos, sin = (x[..., :half].to(dtype).unsqueeze(1) for x in (cos, sin))
    if inverse:
        sin = -sin
    halves = slice(half), slice(half, rotary_dim)
    pairs = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    columns_in, columns_out = (pairs if paired else halves for paired in (pairs_in, pairs_out))

    def rotated(x: Tensor) -> Tensor:
        x1, x2 = (x[..., columns].to(dtype) for columns in columns_in)
        y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        y = x if inplace else _empty(x, by_token)
        y[..., columns_out[0]], y[..., columns_out[1]] = y1, y2
        if not inplace:
            y[..., rotary_dim:] = x[..., rotary_dim:]
        return y

    return rotated(q), rotated(k)


@operator("rotary_pos_emb", fake=_rope_torch)
def _rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, half: int, pairs_in: bool, pairs_out: bool, inverse: bool,
    by_token: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate by the first `half` columns of `cos` and `sin`, (B or 1, T, at least R/2)."""
    compute = _rope_triton if use_triton(q) else _rope_torch
    return compute(q, k, cos, sin, half, pairs_in, pairs_out, inverse, by_token)


# half, pairs_in, pairs_out, inverse: arguments of `_rope`
_Options = tuple[int, bool, bool, bool]


def _is_by_token(q: Tensor) -> bool:
    _, head, token, _ = q.stride()
    return head <= token


class _RotaryPosEmb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
        half, pairs_in, pairs_out, inverse = options
        # Of the gradient, which rotates back and into the input's layout.
        ctx.options = half, pairs_out, pairs_in, not inverse
        ctx.by_token = by_token = _is_by_token(q)
        ctx.save_for_backward(cos, sin)
        return _rope(q, k, cos, sin, half, pairs_in, pairs_out, inverse, by_token)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk = checked_upstream((dq, dk))  # type: ignore[assignment]
        # The gradient of a rotation is the inverse rotation, which has derivatives of its own: a model that is not
        # patched shares this function with one that is, and may need them.
        if torch.is_grad_enabled():
            dq, dk = _RotaryPosEmb.apply(dq, dk, *ctx.saved_tensors, ctx.options)
        else:
            dq, dk = _rope(dq, dk, *ctx.saved_tensors, *ctx.options, ctx.by_token)
        needs_dq, needs_dk, *_ = ctx.needs_input_grad
        return dq if needs_dq else None, dk if needs_dk else None, None, None, None


class _WrittenOver(torch.autograd.Function):
    """Marks a tensor as overwritten before rotation: autograd may raise.

    An overwritten view must be the only output.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, half: int, interleaved: bool) -> Tensor:
        ctx.options = half, interleaved, interleaved, True, _is_by_token(x)
        ctx.save_for_backward(cos, sin)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        no_heads = dy[:, :0]
        return _rope(dy, no_heads, *ctx.saved_tensors, *ctx.options)[0], None, None, None, None


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    if not torch.is_grad_enabled():
        return _rope(q, k, cos, sin, *options, _is_by_token(q))
    return _RotaryPosEmb.apply(q, k, cos, sin, options)


def _rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    options = half, interleaved, interleaved, False
    if torch.compiler.is_compiling():
        # The compiler removes these copies if it owns q and k.
        rotated = _rotated(q, k, cos, sin, options)
        return q.copy_(rotated[0]), k.copy_(rotated[1])
    for name, x in (("q", q), ("k", k)):
        _check_inplace(x, name)
    q, k = (_WrittenOver.apply(x, cos, sin, half, interleaved) for x in (q, k))
    compute = _rope_triton if use_triton(q) else _rope_torch
    compute(q.detach(), k.detach(), cos, sin, *options, by_token=False, inplace=True)
    return q, k


def _check_inplace(x: Tensor, name: str) -> None:
    base = base_of(x)
    if torch.is_grad_enabled() and base.requires_grad and base.is_leaf:
        raise ValueError(
            f"{name} is a leaf that requires a gradient, or a view of one, got {described(x)}: inplace=True would "
            "overwrite a parameter; leave it out or run under torch.no_grad()"
        )
    if x.stride(-1) != 1 or not has_own_memory(x):
        raise ValueError(
            f"{name} must have memory of its own for each element, columns side by side, for inplace=True; got strides "
            f"{x.stride()} for {described(x)}"
        )


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int | None) -> None:
    q_shape, k_shape, cos_shape = q.shape, k.shape, cos.shape
    if (
        len(q_shape) != 4
        or len(k_shape) != 4
        or k_shape[0] != q_shape[0]
        or k_shape[2:] != q_shape[2:]
        or k.dtype != q.dtype
        or k.device != q.device
    ):
        raise ValueError(
            "q and k must have four dimensions and agree on dtype, device, batch, tokens and head size, got q "
            f"{described(q)}, k {described(k)}"
        )
    n_batch, _, n_tokens, head_dim = q_shape
    if rotary_dim is not None and (
        not isinstance(rotary_dim, int) or rotary_dim % 2 or not 0 < rotary_dim <= min(head_dim, 2 * cos_shape[-1])
    ):
        raise ValueError(
            f"rotary_dim must be even, at most the head size {head_dim} and at most twice the columns of cos "
            f"{described(cos)}, got {shown(rotary_dim)}"
        )
    for name, x in (("cos", cos), ("sin", sin)):
        if (
            x.shape != cos_shape
            or len(cos_shape) != 3
            or cos_shape[0] not in (1, n_batch)
            or cos_shape[1] != n_tokens
            or cos_shape[2] > head_dim
            or (cos_shape[2] % 2 and rotary_dim is None)
            or x.requires_grad
            or x.device != q.device
        ):
            raise ValueError(
                f"{name} must be (B or 1, T, R) = ({n_batch}, {n_tokens}, R), R even and at most {head_dim}, "
                f"without gradient and on the device of q {described(q)}, got {described(x)}"
            )


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    *,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    deinterleave: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return queries and keys rotated by their positions (Su et al. 2021, equation 34), computed in float32.

        y_1 = x_1 cos_i - x_2 sin_i
        y_2 = x_2 cos_i + x_1 sin_i        x_1, x_2 = x[i], x[i + R/2], or interleaved x[2i], x[2i + 1]

    Columns from R on are unchanged. The backward rotates back; it can be differentiated again, unless `inplace` is
    True.

    Args:
        q: (B, heads, T, D), floating-point, or (B, T, heads, D) with `unsqueeze_dim=2`.
        k: the same for the keys, (B, heads, T, D), maybe with another number of heads; the dtype and device of `q`.
        cos, sin: (B, T, R) or (1, T, R), floating-point of any dtype, R even and at most D, without gradient. Only the
            first R/2 columns are read: the others repeat them. Or tables (positions, R), see `position_ids`.
        position_ids: (B, T) or (1, T), integers: for each token, its row of the tables `cos` and `sin`. None: row t
            belongs to token t, as it always does in `cos` of three dimensions.
        unsqueeze_dim: the dimension of the heads in `q` and `k`, 1 or 2.
        rotary_dim: R, if `cos` has another number of columns (GPT-OSS: R/2): even, at most D and twice these columns.
            None: the columns of `cos`.
        interleaved: pairs are neighbouring columns (GLM-4) instead of columns i and i + R/2.
        deinterleave: with `interleaved`, return the first of all pairs and then the second, as halves (DeepSeek-V3).
        inplace: overwrite `q` and `k`, which must not share elements or come from `split`, `chunk` or `unbind`. Don't
            use it on a checkpointed region's inputs: the recompute would rotate them again.

    Returns:
        (q, k), rotated, in their shapes and dtype: new tensors, or with `inplace` the given memory.

    Raises:
        TypeError: `q`, `k`, `cos` or `sin` is no plain floating-point tensor.
        ValueError: shapes, dtypes or devices do not fit, `cos` or `sin` requires a gradient, `position_ids` goes with
            `cos` of three dimensions, `unsqueeze_dim` or `rotary_dim` is invalid, `deinterleave` goes without
            `interleaved` or with `inplace`, or `inplace` would overwrite a leaf that requires a gradient or elements
            that share memory.
        IndexError: on a CPU, a position is outside of the tables.
        NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode autograd.

    >>> angle = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1]).repeat(2)
    >>> q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 1, 5, 4)
    >>> q_rotated, _ = liger_rotary_pos_emb(q, k, angle.cos()[None], angle.sin()[None])
    >>> torch.allclose(q_rotated.norm(dim=-1), q.norm(dim=-1))
    True
    """
    if not isinstance(unsqueeze_dim, int) or unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim must be 1 or 2, the dimension of the heads, got {shown(unsqueeze_dim)}")
    names = ("q", "k", "cos", "sin", "position_ids")
    q, k, cos, sin, position_ids = plain(names, (q, k, cos, sin, position_ids))
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):  # torch 2.9 cannot trace zip(strict=False)
        check_floating(x, name)
    if cos.ndim == 2:
        cos, sin = (x[None] if position_ids is None else x[position_ids] for x in (cos, sin))
    elif position_ids is not None:
        raise ValueError(
            f"position_ids picks rows of tables cos and sin (positions, R), got cos {described(cos)}, whose row t "
            "belongs to token t: leave position_ids out, or pass the tables"
        )
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    if deinterleave and (inplace or not interleaved):
        raise ValueError("deinterleave=True needs interleaved=True, and inplace=False")
    _check(q, k, cos, sin, rotary_dim)
    half = (cos.shape[-1] if rotary_dim is None else rotary_dim) // 2
    if inplace:
        q, k = _rope_(q, k, cos, sin, half, interleaved)
    else:
        q, k = _rotated(q, k, cos, sin, (half, interleaved, interleaved and not deinterleave, False))
    return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 2 else (q, k)
