"""LayerNorm.

    y = (x - mean(x)) / sqrt(var(x) + eps) * w + b

over the last dimension, in float32, with the variance of the centred row. Bytes, in units of `x`: forward 2 (read x,
write y), backward 3 (read dy and x, write dx). 16384 x 4096 in bfloat16 is 134 MB a unit, 0.16 ms for the five at
4.29 TB/s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_chunked.kernels.backend import MAX_ROW, jit, operator, processors, row_tile, strided_rows, tl, use_triton
from liger_chunked.kernels.checks import check_floating, check_row
from liger_chunked.types import accumulation_dtype


@jit
def _forward_kernel(
    x_ptr, x_stride, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr,
    n_rows, n_cols, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A null pointer stands for what is absent.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / n_cols
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / n_cols + eps)
    tl.store(mean_ptr + rows, mean, mask=rows < n_rows)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
    y = centred * rstd[:, None]
    if weight_ptr is not None:
        y = y * tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    dy_ptr, dy_stride, x_ptr, x_stride, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr,
    n_rows, n_cols,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Each program goes through tiles of rows and keeps its shares of dw and db in registers.
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    if dw_ptr is not None:
        dw = tl.zeros([ROWS, BLOCK], tl.float32)
    if db_ptr is not None:
        db = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(program * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        # Beyond the row dy is 0, and so is each product with it.
        normal = (x - mean) * rstd
        if dw_ptr is not None:
            dw += dy * normal
        if db_ptr is not None:
            db += dy
        if dx_ptr is not None:
            if weight_ptr is not None:
                dy = dy * weight[None, :]
            on_normal = (tl.sum(dy * normal, axis=1) / n_cols)[:, None]
            on_one = (tl.sum(dy, axis=1) / n_cols)[:, None]
            dx = rstd * (dy - normal * on_normal - on_one)
            tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
    offsets = program.to(tl.int64) * n_cols + cols
    if dw_ptr is not None:
        tl.store(dw_ptr + offsets, tl.sum(dw, axis=0), mask=cols < n_cols)
    if db_ptr is not None:
        tl.store(db_ptr + offsets, tl.sum(db, axis=0), mask=cols < n_cols)


def _forward_triton(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    tile = row_tile(n_cols)
    rows, stride = strided_rows(x)
    y = x.new_empty(x.shape)
    mean = x.new_empty(x.shape[:-1], dtype=torch.float32)
    rstd = torch.empty_like(mean)
    if n_rows:
        _forward_kernel[(-(-n_rows // tile.rows),)](
            x_ptr=rows,
            x_stride=stride,
            weight_ptr=weight,
            bias_ptr=bias,
            y_ptr=y,
            mean_ptr=mean,
            rstd_ptr=rstd,
            n_rows=n_rows,
            n_cols=n_cols,
            eps=eps,
            ROWS=tile.rows,
            BLOCK=tile.block,
            num_warps=tile.num_warps,
        )
    return y, mean, rstd


def _forward_torch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.contiguous().to(accumulation_dtype(x.dtype))
    mean = wide.mean(-1)
    centred = wide - mean[..., None]
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * rstd[..., None]
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype), mean, rstd


@operator("layer_norm", fake=_forward_torch)
def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`(y, mean, rstd)`."""
    compute = _forward_triton if use_triton(x) and x.shape[-1] <= MAX_ROW else _forward_torch
    return compute(x, weight, bias, eps)


def _backward_triton(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, needs_dx: bool, needs_dw: bool,
    needs_db: bool,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    tile = row_tile(n_cols)
    rows, stride = strided_rows(x)
    dy, dy_stride = strided_rows(dy)
    programs = -(-n_rows // tile.rows)
    if needs_dw or needs_db:
        programs = min(programs, tile.resident * processors(x.device))
    dx = x.new_empty(x.shape) if needs_dx else None
    # Of both, so that one reduction serves.
    partial = rstd.new_empty((needs_dw + needs_db, programs, n_cols))
    if n_rows:
        _backward_kernel[(programs,)](
            dy_ptr=dy,
            dy_stride=dy_stride,
            x_ptr=rows,
            x_stride=stride,
            weight_ptr=weight,
            mean_ptr=mean,
            rstd_ptr=rstd,
            dx_ptr=dx,
            dw_ptr=partial[0] if needs_dw else None,
            db_ptr=partial[-1] if needs_db else None,
            n_rows=n_rows,
            n_cols=n_cols,
            ROWS=tile.rows,
            BLOCK=tile.block,
            STAGES=tile.stages(x),
            num_warps=tile.num_warps,
        )
    return dx, partial.sum(1)


def _backward_torch(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, needs_dx: bool, needs_dw: bool,
    needs_db: bool,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    dy = dy.contiguous().to(rstd.dtype)
    normal = (x.contiguous().to(rstd.dtype) - mean[..., None]) * rstd[..., None]
    dx = None
    sums = rstd.new_empty((needs_dw + needs_db, x.shape[-1]))
    if needs_dw:
        sums[0] = (dy * normal).reshape(-1, x.shape[-1]).sum(0)
    if needs_db:
        sums[-1] = dy.reshape(-1, x.shape[-1]).sum(0)
    if needs_dx:
        if weight is not None:
            dy = dy * weight.to(rstd.dtype)
        on_normal = (dy * normal).mean(-1, keepdim=True)
        dx = (rstd[..., None] * (dy - normal * on_normal - dy.mean(-1, keepdim=True))).to(x.dtype)
    return dx, sums


@operator("layer_norm_backward", fake=_backward_torch)
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, needs_dx: bool, needs_dw: bool,
    needs_db: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`dx`, None unless needed, and those needed of `dw` and `db`, stacked, in the accumulation dtype."""
    compute = _backward_triton if use_triton(x) and x.shape[-1] <= MAX_ROW else _backward_torch
    return compute(dy, x, weight, mean, rstd, needs_dx, needs_dw, needs_db)  # type: ignore[return-value]


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, rstd = _forward(x, weight, bias, eps)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        dx, sums = _backward(dy, x, weight, mean, rstd, needs_dx, needs_dw, needs_db)
        dw = sums[0].to(weight.dtype) if needs_dw else None
        db = sums[-1].to(ctx.bias_dtype) if needs_db else None
        return dx if needs_dx else None, dw, db, None


def liger_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """`F.layer_norm(x, x.shape[-1:], weight, bias, eps)` (Ba, Kiros and Hinton 2016), in the dtype of `x`.

    Args:
        x: (..., D), rows in any layout.
        weight: (D,), or None for none.
        bias: (D,), or None for none. Gradients of both add up in float32, in the same order every time.
        eps: added to the variance.

    Raises:
        TypeError: something that is not a floating tensor.
        ValueError: shapes or devices that do not fit.

    >>> x = torch.randn(2, 5, 64)
    >>> torch.allclose(liger_layer_norm(x, torch.ones(64)), torch.nn.functional.layer_norm(x, (64,)), atol=1e-6)
    True
    """
    check_floating(x, "x")
    if weight is not None:
        check_row(weight, "weight", x)
        weight = weight.contiguous()
    if bias is not None:
        check_row(bias, "bias", x)
        bias = bias.contiguous()
    return _LayerNorm.apply(x, weight, bias, eps)
