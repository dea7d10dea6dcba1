"""LayerNorm, in float32. Bytes: forward 2, backward 3 times `x`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from liger_chunked.calls import typed_like
from liger_chunked.kernels.backend import contiguous_like, first_derivative, operator, strided_rows, tl, use_triton
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.operands import check_floating, check_row, plain
from liger_chunked.kernels.tuning.generic import MAX_ROW
from liger_chunked.layers.norm_rows import row_sweep, row_tile, square, sum_partials
from liger_chunked.types import accumulation_dtype


@Kernel
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, stats_ptr,
    x_stride, n_rows, n_cols, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / n_cols
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(square(centred), axis=1) / n_cols + eps)
    tl.store(stats_ptr + rows, mean, mask=rows < n_rows)
    tl.store(stats_ptr + n_rows + rows, rstd, mask=rows < n_rows)
    y = centred * rstd[:, None]
    if weight_ptr is not None:
        y = y * tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@Kernel
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, stats_ptr, dx_ptr, partial_ptr,
    dy_stride, x_stride, n_rows, n_cols,
    NEEDS_DW: tl.constexpr, NEEDS_DB: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    if NEEDS_DW:
        dw = tl.zeros([ROWS, BLOCK], tl.float32)
    if NEEDS_DB:
        db = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(program * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(stats_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        rstd = tl.load(stats_ptr + n_rows + rows, mask=rows < n_rows, other=0.0)[:, None]
        # dy is 0 past the row.
        normal = (x - mean) * rstd
        if NEEDS_DW:
            dw += dy * normal
        if NEEDS_DB:
            db += dy
        if dx_ptr is not None:
            if weight_ptr is not None:
                dy = dy * weight[None, :]
            on_normal = (tl.sum(dy * normal, axis=1) / n_cols)[:, None]
            on_one = (tl.sum(dy, axis=1) / n_cols)[:, None]
            dx = rstd * (dy - normal * on_normal - on_one)
            tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
    offsets = program.to(tl.int64) * n_cols + cols
    if NEEDS_DW:
        tl.store(partial_ptr + offsets, tl.sum(dw, axis=0), mask=cols < n_cols)
        offsets += tl.num_programs(0).to(tl.int64) * n_cols
    if NEEDS_DB:
        tl.store(partial_ptr + offsets, tl.sum(db, axis=0), mask=cols < n_cols)


def _forward_torch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.contiguous().to(accumulation_dtype(x.dtype))
    mean = wide.mean(-1)
    centred = wide - mean[..., None]
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * rstd[..., None]
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype), torch.stack((mean.flatten(), rstd.flatten()))


@operator("layer_norm", fake=_forward_torch)
def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    n_cols = x.shape[-1]
    if n_cols > MAX_ROW or not use_triton(x):
        return _forward_torch(x, weight, bias, eps)
    n_rows = x.numel() // n_cols
    tile, block, num_warps = row_tile(n_cols, x.device)
    rows, stride = strided_rows(x)
    y = contiguous_like(x)
    stats = x.new_empty(2, n_rows, dtype=torch.float32)
    if n_rows:
        _forward_kernel(
            (-(-n_rows // tile), 1, 1),
            (rows, weight, bias, y, stats),
            (stride, n_rows, n_cols, eps, tile, block),
            num_warps,
        )
    return y, stats


def _backward_torch(
    dy: Tensor, x: Tensor, weight: Tensor | None, stats: Tensor, needs_dx: bool, dw_dtype: torch.dtype | None,
    db_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    mean, rstd = stats.view(2, *x.shape[:-1], 1)
    dy = dy.contiguous().to(stats.dtype)
    normal = (x.contiguous().to(stats.dtype) - mean) * rstd
    dx = dw = db = None
    if dw_dtype is not None:
        dw = (dy * normal).reshape(-1, x.shape[-1]).sum(0).to(dw_dtype)
    if db_dtype is not None:
        db = dy.reshape(-1, x.shape[-1]).sum(0).to(db_dtype)
    if needs_dx:
        if weight is not None:
            dy = dy * weight.to(stats.dtype)
        on_normal = (dy * normal).mean(-1, keepdim=True)
        dx = (rstd * (dy - normal * on_normal - dy.mean(-1, keepdim=True))).to(x.dtype)
    return dx, dw, db


@operator("layer_norm_backward", fake=_backward_torch)
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, stats: Tensor, needs_dx: bool, dw_dtype: torch.dtype | None,
    db_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n_cols = x.shape[-1]
    if n_cols > MAX_ROW or not use_triton(x):
        return _backward_torch(dy, x, weight, stats, needs_dx, dw_dtype, db_dtype)  # type: ignore[return-value]
    n_rows = x.numel() // n_cols
    tile, block, num_warps, programs, stages = row_sweep(n_rows, n_cols, 1, x.element_size(), x.device)
    rows, stride = strided_rows(x)
    dy, dy_stride = strided_rows(dy)
    dx = contiguous_like(x) if needs_dx else None
    dw = None if dw_dtype is None else x.new_empty(n_cols, dtype=dw_dtype)
    db = None if db_dtype is None else x.new_empty(n_cols, dtype=db_dtype)
    sums = [d for d in (dw, db) if d is not None]
    partial = stats.new_empty(len(sums), programs, n_cols) if sums else None
    if n_rows:
        _backward_kernel(
            (programs if sums else -(-n_rows // tile), 1, 1),
            (dy, rows, weight, stats, dx, partial),
            (dy_stride, stride, n_rows, n_cols, dw is not None, db is not None, tile, block, stages),
            num_warps,
        )
    if partial is not None:
        sum_partials(partial, *sums)
    return dx, dw, db  # type: ignore[return-value]


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y, stats = _forward(x, weight, bias, eps)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight, stats)
        return y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, stats = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        dw_dtype, db_dtype = weight.dtype if needs_dw else None, ctx.bias_dtype if needs_db else None
        dx, dw, db = _backward(dy, x, weight, stats, needs_dx, dw_dtype, db_dtype)
        return dx if needs_dx else None, dw if needs_dw else None, db if needs_db else None, None


def liger_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return `F.layer_norm(x, x.shape[-1:], weight, bias, eps)` (Ba, Kiros and Hinton 2016), computed in float32.

        y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

    Args:
        x: (..., D), floating-point, rows in any layout.
        weight: (D,), floating-point, maybe of another dtype than `x`. None: 1. Its gradient is a sum over the rows in
            float32, in an order that does not change between runs, rounded to its dtype.
        bias: (D,), floating-point, with a gradient like that of `weight`. None: 0.
        eps: added to the variance of each row.

    Returns:
        (..., D), contiguous, in the dtype of `x`.

    Raises:
        TypeError: `x`, `weight` or `bias` is no plain floating-point tensor.
        ValueError: `x` has no dimension, or `weight` or `bias` is not (D,) on the device of `x`.
        NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode autograd.

    >>> x = torch.randn(2, 5, 64)
    >>> torch.allclose(liger_layer_norm(x, torch.ones(64)), torch.nn.functional.layer_norm(x, (64,)), atol=1e-6)
    True
    """
    x, weight, bias = plain(("x", "weight", "bias"), (x, weight, bias))
    check_floating(x, "x")
    if weight is not None:
        check_row(weight, "weight", x)
        weight = weight.contiguous()
    if bias is not None:
        check_row(bias, "bias", x)
        bias = bias.contiguous()
    if not torch.is_grad_enabled():
        return _forward(x, weight, bias, float(eps))[0]
    return _LayerNorm.apply(x, weight, bias, float(eps))


class LigerLayerNorm(nn.Module):
    """LayerNorm with trainable weight and bias: `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, in float32.

    Args:
        hidden_size: D, the columns of a row; `weight` and `bias` are float32 parameters (D,), initially 1 and 0.
        eps: added to the variance of each row.
        bias: False leaves out the bias.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the LayerNorm of the rows of `x`.

        Args:
            x: (..., D), floating-point, rows in any layout.

        Returns:
            (..., D), contiguous, in the dtype of `x`.

        Raises:
            TypeError: `x` is no plain floating-point tensor.
            ValueError: `x` has another number of columns than D, or is on another device than the weight.
            NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode
                autograd.
        """
        return liger_layer_norm(x, self.weight, self.bias, self.eps)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, bias={self.bias is not None}"
