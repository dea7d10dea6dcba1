"""RMSNorm, in float32.

Bytes: forward 2, backward 3 times `x`; 4 each with a residual; 3 and 5 with a gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from liger_chunked.calls import typed_like
from liger_chunked.kernels.backend import contiguous_like, first_derivative, operator, strided_rows, tl, use_triton
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.operands import check_floating, check_like, check_row, described, plain
from liger_chunked.kernels.tuning.generic import MAX_ROW
from liger_chunked.layers.glu import activation as activate
from liger_chunked.layers.glu import activation_torch
from liger_chunked.layers.norm_rows import row_sweep, row_tile, square, sum_partials
from liger_chunked.types import accumulation_dtype, shown

Casting = Literal["llama", "gemma", "olmo2"]
_CASTS_FIRST = {"llama": True, "gemma": False, "olmo2": False}
_GATES = ("silu", "sigmoid")
# eps, offset, cast_first, the gate's activation, gate_first, groups: the last arguments of `_forward`
_Options = tuple[float, float, bool, str, bool, int]


@Kernel
def _forward_kernel(
    x_ptr, residual_ptr, gate_ptr, weight_ptr, y_ptr, total_ptr, rstd_ptr,
    x_stride, residual_stride, gate_stride, n_rows, n_cols, eps, offset,
    CAST_FIRST: tl.constexpr, GATE: tl.constexpr, GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group, groups = tl.program_id(1), tl.num_programs(1)
    cols = group * n_cols + tl.arange(0, BLOCK)
    inside_cols = tl.arange(0, BLOCK) < n_cols
    inside = (rows < n_rows)[:, None] & inside_cols[None, :]
    places = rows[:, None] * (groups * n_cols) + cols[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=inside, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask=inside, other=0.0)
        # Normalise the rounded sum.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(total_ptr + places, x, mask=inside)
    x = x.to(tl.float32)
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + rows[:, None] * gate_stride + cols[None, :], mask=inside, other=0.0)
        activated, _ = activate(gate.to(tl.float32), GATE)
        if GATE_FIRST:
            x = x * activated
    rstd = tl.rsqrt(tl.sum(square(x), axis=1) / n_cols + eps)
    tl.store(rstd_ptr + rows * groups + group, rstd, mask=rows < n_rows)
    y = x * rstd[:, None]
    if CAST_FIRST:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=inside_cols, other=0.0)
        y = y * (weight.to(tl.float32) + offset)[None, :]
        if CAST_FIRST and weight_ptr.dtype.element_ty == x_ptr.dtype.element_ty:
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    if gate_ptr is not None:
        if not GATE_FIRST:
            y = y * activated
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=inside)


@Kernel
def _backward_kernel(
    dy_ptr, dtotal_ptr, x_ptr, gate_ptr, weight_ptr, rstd_ptr, dx_ptr, dgate_ptr, partial_ptr,
    dy_stride, dtotal_stride, x_stride, gate_stride, n_rows, n_cols, offset,
    GATE: tl.constexpr, GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    group, groups = tl.program_id(1), tl.num_programs(1)
    cols = group * n_cols + tl.arange(0, BLOCK)
    inside_cols = tl.arange(0, BLOCK) < n_cols
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=inside_cols, other=0.0).to(tl.float32) + offset
    if partial_ptr is not None:
        dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(program * ROWS, n_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows < n_rows)[:, None] & inside_cols[None, :]
        places = rows[:, None] * (groups * n_cols) + cols[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows * groups + group, mask=rows < n_rows, other=0.0)[:, None]
        normal = x * rstd
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + rows[:, None] * gate_stride + cols[None, :], mask=inside, other=0.0)
            activated, slope = activate(gate.to(tl.float32), GATE)
            if GATE_FIRST:
                normal = normal * activated
            else:
                dgate = dy * normal * slope
                if weight_ptr is not None:
                    dgate = dgate * weight[None, :]
                tl.store(dgate_ptr + places, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
                dy = dy * activated
        if partial_ptr is not None:
            dw += dy * normal
        if dx_ptr is not None:
            if weight_ptr is not None:
                dy = dy * weight[None, :]
            dx = rstd * (dy - normal * (tl.sum(dy * normal, axis=1) / n_cols)[:, None])
            if gate_ptr is not None:
                if GATE_FIRST:
                    tl.store(dgate_ptr + places, (dx * x * slope).to(dgate_ptr.dtype.element_ty), mask=inside)
                    dx = dx * activated
            if dtotal_ptr is not None:
                ptrs = dtotal_ptr + rows[:, None] * dtotal_stride + cols[None, :]
                dx += tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx_ptr + places, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if partial_ptr is not None:
        ptrs = partial_ptr + program.to(tl.int64) * (groups * n_cols) + cols
        tl.store(ptrs, tl.sum(dw, axis=0), mask=inside_cols)


def _output_dtype(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, cast_first: bool, gate_first: bool
) -> torch.dtype:
    """Return the dtype of the models' own code."""
    if weight is None or weight.dtype == x.dtype or not cast_first or not (gate is None or gate_first):
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def _forward_torch(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, gate: Tensor | None, eps: float, offset: float,
    cast_first: bool, kind: str, gate_first: bool, groups: int,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    total = None
    if residual is not None:
        x = total = (x + residual).contiguous()
    wide = x.contiguous().to(accumulation_dtype(x.dtype))
    activated = None if gate is None else activation_torch(gate.contiguous().to(wide.dtype), kind)[0]
    if activated is not None and gate_first:
        wide = wide * activated
    grouped = wide.view(*x.shape[:-1], groups, x.shape[-1] // groups)
    rstd = torch.rsqrt(grouped.square().mean(-1) + eps)
    y = (grouped * rstd[..., None]).view(x.shape)
    if cast_first:
        y = y.to(x.dtype)
    if weight is not None:
        y = y * (offset + weight.to(wide.dtype) if offset else weight)
    if activated is not None and not gate_first:
        y = y * activated
    return y.to(_output_dtype(x, weight, gate, cast_first, gate_first)), rstd.flatten(), total


@operator("rms_norm", fake=_forward_torch)
def _forward(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, gate: Tensor | None, eps: float, offset: float,
    cast_first: bool, kind: str, gate_first: bool, groups: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    width = x.shape[-1]
    if width > MAX_ROW * groups or not use_triton(x):
        options = eps, offset, cast_first, kind, gate_first, groups
        return _forward_torch(x, weight, residual, gate, *options)  # type: ignore[return-value]
    n_rows, n_cols = x.numel() // width, width // groups
    tile, block, num_warps = row_tile(n_cols, x.device)
    rows, stride = strided_rows(x)
    residual_rows, residual_stride = (None, 0) if residual is None else strided_rows(residual)
    gate_rows, gate_stride = (None, 0) if gate is None else strided_rows(gate)
    y = contiguous_like(x, _output_dtype(x, weight, gate, cast_first, gate_first))
    total = None if residual is None else contiguous_like(x)
    rstd = x.new_empty(n_rows * groups, dtype=torch.float32)
    if n_rows:
        _forward_kernel(
            (-(-n_rows // tile), groups, 1),
            (rows, residual_rows, gate_rows, weight, y, total, rstd),
            (
                stride, residual_stride, gate_stride, n_rows, n_cols, eps, offset,
                cast_first, kind, gate_first, tile, block,
            ),
            num_warps,
        )  # fmt: skip
    return y, rstd, total  # type: ignore[return-value]


def _backward_torch(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, gate: Tensor | None,
    offset: float, kind: str, gate_first: bool, groups: int, needs_dx: bool, needs_dw: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    grouped = (*x.shape[:-1], groups, x.shape[-1] // groups)
    wide = x.contiguous().to(rstd.dtype)
    dy = dy.contiguous().to(rstd.dtype)
    rstd = rstd.view(*grouped[:-1], 1)
    normal = (wide.view(grouped) * rstd).view(x.shape)
    scale = None if weight is None else weight.to(rstd.dtype) + offset
    dx = dw = dgate = activated = slope = None
    if gate is not None:
        activated, slope = activation_torch(gate.contiguous().to(rstd.dtype), kind)
        if gate_first:
            normal = normal * activated
        else:
            dgate = dy * slope * (normal if scale is None else normal * scale)
            dy = dy * activated
    if needs_dw:
        assert weight is not None
        dw = (dy * normal).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    if needs_dx:
        if scale is not None:
            dy = dy * scale
        dy, normal = dy.view(grouped), normal.view(grouped)
        dx = (rstd * (dy - normal * (dy * normal).mean(-1, keepdim=True))).view(x.shape)
        if activated is not None and slope is not None and gate_first:
            dgate, dx = dx * wide * slope, dx * activated
        dx = (dx if dtotal is None else dx + dtotal.contiguous()).to(x.dtype)
    return dx, dw, None if gate is None or dgate is None else dgate.to(gate.dtype)


@operator("rms_norm_backward", fake=_backward_torch)
def _backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, gate: Tensor | None,
    offset: float, kind: str, gate_first: bool, groups: int, needs_dx: bool, needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    width = x.shape[-1]
    if width > MAX_ROW * groups or not use_triton(x):
        options = offset, kind, gate_first, groups, needs_dx, needs_dw
        return _backward_torch(dy, dtotal, x, weight, rstd, gate, *options)  # type: ignore[return-value]
    n_rows, n_cols = x.numel() // width, width // groups
    tile, block, num_warps, programs, stages = row_sweep(n_rows, n_cols, groups, x.element_size(), x.device)
    rows, stride = strided_rows(x)
    dy, dy_stride = strided_rows(dy)
    dtotal_rows, dtotal_stride = (None, 0) if dtotal is None else strided_rows(dtotal)
    gate_rows, gate_stride = (None, 0) if gate is None else strided_rows(gate)
    dx = contiguous_like(x) if needs_dx else None
    dgate = None if gate is None else contiguous_like(gate)
    dw = partial = None
    if needs_dw and weight is not None:
        dw, partial = torch.empty_like(weight), rstd.new_empty(1, programs, width)
    if n_rows:
        _backward_kernel(
            (programs if needs_dw else -(-n_rows // tile), groups, 1),
            (dy, dtotal_rows, rows, gate_rows, weight, rstd, dx, dgate, partial),
            (
                dy_stride, dtotal_stride, stride, gate_stride, n_rows, n_cols, offset,
                kind, gate_first, tile, block, stages,
            ),
            num_warps,
        )  # fmt: skip
    if dw is not None and partial is not None:
        sum_partials(partial, dw)
    return dx, dw, dgate  # type: ignore[return-value]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, residual: Tensor | None, gate: Tensor | None, options: _Options
    ) -> Any:
        y, rstd, total = _forward(x, weight, residual, gate, *options)
        ctx.options = options
        # A compiled graph's order: a checkpoint may run eagerly, then compiled.
        ctx.save_for_backward(*((x, weight, gate, rstd) if residual is None else (weight, gate, rstd, total)))
        return y if residual is None else (y, total)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if dtotal is None:
            x, weight, gate, rstd = ctx.saved_tensors
        else:
            weight, gate, rstd, x = ctx.saved_tensors
        needs_x, needs_dw, needs_residual, needs_gate, _ = ctx.needs_input_grad
        needs_dx = needs_x or needs_residual or needs_gate
        _, offset, _, kind, gate_first, groups = ctx.options
        dx, dw, dgate = _backward(
            dy, dtotal, x, weight, rstd, gate, offset, kind, gate_first, groups, needs_dx, needs_dw
        )
        return (
            dx if needs_x else None,
            dw if needs_dw else None,
            dx if needs_residual else None,
            dgate if needs_gate else None,
            None,
        )


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
    """Return the RMSNorm of `x`, or `(norm, sum)` of `x + residual` (Zhang and Sennrich 2019, equation 4), in float32.

        x/rms(x) * (offset + weight),    rms(x) = sqrt(mean(x**2) + eps)

    Args:
        x: (..., D), floating-point, rows in any layout.
        weight: (D,), floating-point, maybe of another dtype than `x`. None: 1. Its gradient is a sum over the rows in
            float32, in an order that does not change between runs, rounded to its dtype.
        eps: added to the mean square of each row.
        offset: added to the weight in float32; 1.0 for Gemma, whose weights are stored minus 1.
        casting: where the result is rounded, as the models' own code does. "llama" rounds `x / rms(x)` to the dtype of
            `x` before it multiplies by the weight. "gemma" and "olmo2", which mean the same here, round only the
            product.
        residual: (..., D), with the dtype and device of `x`; the norm is then that of `x + residual`. None: that of
            `x`.

    Returns:
        The norm (..., D), contiguous. Its dtype is that of `x`; with "llama" and a weight, the wider dtype of both.
        With `residual` the tuple (norm, sum), where the sum `x + residual` has the dtype of `x`.

    Raises:
        TypeError: `x` or `weight` is no plain floating-point tensor, or `residual` has another dtype than `x`.
        ValueError: `x` has no dimension, `weight` is not (D,), `residual` has another shape than `x`, a device differs,
            or `casting` is unknown.
        NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode autograd.

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
    options = float(eps), float(offset), _CASTS_FIRST[casting], "silu", False, 1
    # Without a graph no Function: it takes a third of a norm's time on the host (15.7 against 10.7 µs).
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, residual, None, options)
    y, _, total = _forward(x, weight, residual, None, *options)
    return y if residual is None else (y, total)


def liger_rms_norm_gated(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    activation: Literal["silu", "sigmoid"] = "silu",
    casting: Casting = "llama",
    gate_first: bool = False,
    groups: int = 1,
) -> Tensor:
    """Return the RMSNorm of `x` times an activation of `gate`, as in linear attention and Mamba 2, in float32.

        x/rms(x) * weight * act(gate),    with gate_first: z/rms(z) * weight,  z = x * act(gate)

    Args:
        x: (..., D), floating-point, rows in any layout.
        gate: (..., D), floating-point, rows in any layout, maybe of another dtype than `x`. None: the norm alone.
        weight: (D,), floating-point, maybe of another dtype than `x`. None: 1. Its gradient is a sum over the rows in
            float32, in an order that does not change between runs, rounded to its dtype.
        eps: added to the mean square.
        activation: "silu" or "sigmoid", applied to the gate.
        casting: "llama" rounds `x / rms(x)` to the dtype of `x` before it multiplies by the weight. "gemma" and
            "olmo2", which mean the same here, round only the result.
        gate_first: multiply `x` by the activated gate before the norm (Mamba 2), not after it.
        groups: number of equal parts of D, each normalised by its own rms; must divide D.

    Returns:
        (..., D), contiguous. Its dtype is that of `x`; with "llama", a weight and no gate after the norm, the wider
        dtype of `x` and `weight`.

    Raises:
        TypeError: `x`, `gate` or `weight` is no plain floating-point tensor.
        ValueError: `x` has no dimension, `gate` has another shape than `x`, `weight` is not (D,), a device differs, or
            `casting`, `activation` or `groups` is invalid.
        NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode autograd.

    >>> x, gate = torch.randn(2, 2, 5, 64).unbind(0)
    >>> expected = liger_rms_norm(x, torch.ones(64)) * torch.nn.functional.silu(gate)
    >>> torch.allclose(liger_rms_norm_gated(x, gate, torch.ones(64)), expected, atol=1e-6)
    True
    """
    if casting not in _CASTS_FIRST:
        raise ValueError(f"casting must be one of {tuple(_CASTS_FIRST)}, got {shown(casting)}")
    if activation not in _GATES:
        raise ValueError(f"activation must be one of {_GATES}, got {shown(activation)}")
    x, gate, weight = plain(("x", "gate", "weight"), (x, gate, weight))
    check_floating(x, "x")
    if gate is not None:
        check_floating(gate, "gate")
        if gate.shape != x.shape or gate.device != x.device:
            raise ValueError(f"gate must have the shape and device of x {described(x)}, got {described(gate)}")
    if not isinstance(groups, int) or groups < 1 or x.shape[-1] % groups:
        raise ValueError(f"groups must divide the last dimension of x, {x.shape[-1]}, got {shown(groups)}")
    if weight is not None:
        check_row(weight, "weight", x)
        weight = weight.contiguous()
    options = float(eps), 0.0, _CASTS_FIRST[casting], activation, bool(gate_first), groups
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, None, gate, options)
    return _forward(x, weight, None, gate, *options)[0]


class LigerRMSNorm(nn.Module):
    """RMSNorm with a trainable weight (Zhang and Sennrich 2019, equation 4), computed in float32.

        x/rms(x) * (offset + weight),    rms(x) = sqrt(mean(x**2) + eps)

    Args:
        hidden_size: D, the columns of a row; `weight` is a float32 parameter (D,), initially `1 - offset`.
        eps: added to the mean square of each row.
        offset: added to the weight in float32; Gemma uses 1.
        casting: "llama" rounds `x / rms(x)` to the dtype of `x` before it multiplies by the weight. "gemma" and
            "olmo2", which mean the same here, round only the product.

    >>> norm = LigerRMSNorm(64)
    >>> y, total = norm(torch.randn(2, 5, 64), residual=torch.randn(2, 5, 64))
    >>> y.shape, total.shape
    (torch.Size([2, 5, 64]), torch.Size([2, 5, 64]))
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, offset: float = 0.0, casting: Casting = "llama") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), 1.0 - offset))
        self.variance_epsilon = eps
        self.offset = offset
        self.casting: Casting = casting

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of `x`, or `(norm, sum)` of `x + residual`.

        Args:
            x: (..., D), floating-point, rows in any layout.
            residual: (..., D), with the dtype and device of `x`. None: the norm of `x` alone.

        Returns:
            The norm (..., D). Its dtype is that of `x`; with casting "llama", the wider dtype of `x` and the weight.
            With `residual` the tuple (norm, sum), where the sum `x + residual` has the dtype of `x`.

        Raises:
            TypeError: `x` is no plain floating-point tensor, or `residual` has another dtype.
            ValueError: `x` has another number of columns than D, `residual` another shape than `x`, or a device
                differs.
            NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode
                autograd.
        """
        return liger_rms_norm(
            x, self.weight, self.variance_epsilon, offset=self.offset, casting=self.casting, residual=residual
        )

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def extra_repr(self) -> str:
        return (
            f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}, offset={self.offset}, casting={self.casting!r}"
        )
