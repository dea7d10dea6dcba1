"""RMSNorm over the last dimension, in float32.

Bytes: forward 2, backward 3 times `x`; 4 each with a residual.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from liger_chunked.kernels.backend import contiguous_like, first_derivative, operator, strided_rows, tl, use_triton
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.norm_rows import row_sweep, row_tile, sum_partials
from liger_chunked.kernels.operands import check_floating, check_like, check_row, plain
from liger_chunked.kernels.tuning.generic import MAX_ROW
from liger_chunked.types import accumulation_dtype, shown

Casting = Literal["llama", "gemma", "olmo2"]
# Whether to cast before multiplying by the weight.
_CASTS_FIRST = {"llama": True, "gemma": False, "olmo2": False}


@Kernel
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, rstd_ptr,
    x_stride, residual_stride, n_rows, n_cols, eps, offset,
    CAST_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=inside, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask=inside, other=0.0)
        # Normalise the rounded sum.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(total_ptr + rows[:, None] * n_cols + cols[None, :], x, mask=inside)
    x = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
    y = x * rstd[:, None]
    if CAST_FIRST:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) + offset
        y = y * weight[None, :]
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@Kernel
def _backward_kernel(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr,
    dy_stride, dtotal_stride, x_stride, n_rows, n_cols, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) + offset
    if partial_ptr is not None:
        dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(program * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=inside, other=0.0)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        normal = x.to(tl.float32) * rstd
        if partial_ptr is not None:
            dw += dy * normal
        if dx_ptr is not None:
            if weight_ptr is not None:
                dy = dy * weight[None, :]
            dx = rstd * (dy - normal * (tl.sum(dy * normal, axis=1) / n_cols)[:, None])
            if dtotal_ptr is not None:
                ptrs = dtotal_ptr + rows[:, None] * dtotal_stride + cols[None, :]
                dx += tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if partial_ptr is not None:
        ptrs = partial_ptr + program.to(tl.int64) * n_cols + cols
        tl.store(ptrs, tl.sum(dw, axis=0), mask=cols < n_cols)


def _output_dtype(x: Tensor, weight: Tensor | None, cast_first: bool) -> torch.dtype:
    """Return the dtype of the models' own code."""
    if weight is None or weight.dtype == x.dtype or not cast_first:
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def _forward_triton(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, offset: float, cast_first: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    tile_rows, block, num_warps = row_tile(n_cols, x.device)
    rows, stride = strided_rows(x)
    residual_rows, residual_stride = (None, 0) if residual is None else strided_rows(residual)
    y = contiguous_like(x, _output_dtype(x, weight, cast_first))
    total = None if residual is None else contiguous_like(x)
    rstd = x.new_empty(n_rows, dtype=torch.float32)
    if n_rows:
        _forward_kernel(
            (-(-n_rows // tile_rows), 1, 1),
            (rows, residual_rows, weight, y, total, rstd),
            (stride, residual_stride, n_rows, n_cols, eps, offset, cast_first, tile_rows, block),
            num_warps,
        )
    return y, rstd, total


def _forward_torch(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, offset: float, cast_first: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    total = None
    if residual is not None:
        x = total = (x + residual).contiguous()
    wide = x.contiguous().to(accumulation_dtype(x.dtype))
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    y = wide * rstd[..., None]
    if cast_first:
        y = y.to(x.dtype)
    if weight is not None:
        y = y * (offset + weight.to(wide.dtype) if offset else weight)
    return y.to(_output_dtype(x, weight, cast_first)), rstd.flatten(), total


@operator("rms_norm", fake=_forward_torch)
def _forward(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, offset: float, cast_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    compute = _forward_triton if use_triton(x) and x.shape[-1] <= MAX_ROW else _forward_torch
    return compute(x, weight, residual, eps, offset, cast_first)  # type: ignore[return-value]


def _backward_triton(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, needs_dx: bool,
    needs_dw: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    tile, programs, stages = row_sweep(n_rows, n_cols, x.element_size(), x.device)
    rows, stride = strided_rows(x)
    dy, dy_stride = strided_rows(dy)
    dtotal_rows, dtotal_stride = (None, 0) if dtotal is None else strided_rows(dtotal)
    dx = contiguous_like(x) if needs_dx else None
    dw = partial = None
    if needs_dw:
        assert weight is not None
        dw, partial = contiguous_like(weight), rstd.new_empty((1, programs, n_cols))
    if n_rows:
        _backward_kernel(
            (programs if needs_dw else -(-n_rows // tile.rows), 1, 1),
            (dy, dtotal_rows, rows, weight, rstd, dx, partial),
            (dy_stride, dtotal_stride, stride, n_rows, n_cols, offset, tile.rows, tile.block, stages),
            tile.num_warps,
        )
    if dw is not None and partial is not None:
        sum_partials(partial, dw)
    return dx, dw


def _backward_torch(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, needs_dx: bool,
    needs_dw: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    wide = x.contiguous().to(rstd.dtype)
    dy = dy.contiguous().to(rstd.dtype)
    rstd = rstd.view(*x.shape[:-1], 1)
    normal = wide * rstd
    dx = dw = None
    if needs_dw:
        assert weight is not None
        dw = (dy * normal).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    if needs_dx:
        if weight is not None:
            dy = dy * (weight.to(rstd.dtype) + offset)
        dx = rstd * (dy - normal * (dy * normal).mean(-1, keepdim=True))
        dx = (dx if dtotal is None else dx + dtotal.contiguous()).to(x.dtype)
    return dx, dw


@operator("rms_norm_backward", fake=_backward_torch)
def _backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, needs_dx: bool,
    needs_dw: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    compute = _backward_triton if use_triton(x) and x.shape[-1] <= MAX_ROW else _backward_torch
    return compute(dy, dtotal, x, weight, rstd, offset, needs_dx, needs_dw)  # type: ignore[return-value]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, residual: Tensor | None, options: tuple[float, float, bool]
    ) -> Any:
        y, rstd, total = _forward(x, weight, residual, *options)
        _, ctx.offset, _ = options
        # A compiled graph's order: a checkpoint may run eagerly, then compiled.
        ctx.save_for_backward(*((x, weight, rstd) if residual is None else (weight, rstd, total)))
        return y if residual is None else (y, total)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if dtotal is None:
            x, weight, rstd = ctx.saved_tensors
        else:
            weight, rstd, x = ctx.saved_tensors
        needs_x, needs_dw, needs_residual, _ = ctx.needs_input_grad
        dx, dw = _backward(dy, dtotal, x, weight, rstd, ctx.offset, needs_x or needs_residual, needs_dw)
        return dx if needs_x else None, dw if needs_dw else None, dx if needs_residual else None, None


@overload
def liger_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = ..., *, offset: float = ..., casting: Casting = ...,
    residual: None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def liger_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = ..., *, offset: float = ..., casting: Casting = ...,
    residual: Tensor,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def liger_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: Casting = "llama",
    residual: Tensor | None = None,
) -> Any:
    """Return the RMSNorm of `x`, or `(norm, sum)` of `x + residual` (Zhang and Sennrich 2019, equation 4).

        x/rms(x) * (offset + weight),    rms(x) = sqrt(mean(x**2) + eps)

    Args:
        x: (..., D), rows in any layout.
        weight: (D,) or None; its gradient is a deterministic sum.
        offset: added to the weight in float32; 1.0 for Gemma.
        casting: "llama" casts `x / rms(x)` to the dtype of `x`, and returns the wider dtype of `x` and `weight`;
            "gemma" and "olmo2" cast the result to the dtype of `x`.
        residual: same shape and dtype as `x`.

    >>> x = torch.randn(2, 5, 64)
    >>> torch.allclose(liger_rms_norm(x, torch.ones(64)), torch.nn.functional.rms_norm(x, (64,), eps=1e-6), atol=1e-6)
    True
    """
    if casting not in _CASTS_FIRST:
        raise ValueError(f"casting must be one of {tuple(_CASTS_FIRST)}, got {shown(casting)}")
    x, weight, residual = plain(("x", "weight", "residual"), (x, weight, residual))
    check_floating(x, "x")
    if weight is not None:
        check_row(weight, "weight", x)
        weight = weight.contiguous()
    if residual is not None:
        check_like(residual, "residual", x, "x")
    options = (float(eps), float(offset), _CASTS_FIRST[casting])
    if not torch.is_grad_enabled():
        y, _, total = _forward(x, weight, residual, *options)
        return y if residual is None else (y, total)
    return _RMSNorm.apply(x, weight, residual, options)
