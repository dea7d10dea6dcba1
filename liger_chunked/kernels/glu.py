"""Gated linear units, in float32, rounded once.

    y = act(gate) up,  dgate = dy up act'(gate),  dup = dy act(gate)

Bytes: forward 3, backward 5 times `gate`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from liger_chunked.kernels.backend import (
    contiguous_like,
    exp,
    first_derivative,
    jit,
    operator,
    strided_rows,
    tl,
    use_triton,
)
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.operands import check_floating, check_like, plain
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.types import accumulation_dtype, shown

_GELU = {"tanh": "gelu_tanh", "none": "gelu"}
# (1 + tanh(u))/2 = sigmoid(2u), which is faster; 2u = sqrt(8/pi) (z + 0.044715 z**3)
_TANH_LINEAR = math.sqrt(8.0 / math.pi)
_TANH_CUBIC = 0.044715 * _TANH_LINEAR


@jit
def activation(z, KIND: tl.constexpr):
    """Return the activation of z, and its slope."""
    if KIND == "silu":
        s = 1.0 / (1.0 + exp(-z, False))
        y = z * s
        slope = s + y * (1.0 - s)
    elif KIND == "sigmoid":
        y = 1.0 / (1.0 + exp(-z, False))
        slope = y * (1.0 - y)
    elif KIND == "gelu_tanh":
        # exp(-|2 u|) cannot overflow, and 1 - sigmoid does not cancel.
        square = z * z
        e = exp(-tl.abs(z * (1.5957691216057308 + 0.0713548162726 * square)), False)
        larger = 1.0 / (1.0 + e)
        smaller = e * larger
        s = tl.where(z < 0, smaller, larger)
        y = z * s
        slope = s + z * (smaller * larger) * (1.5957691216057308 + 0.2140644488178 * square)
    else:
        cdf = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        y = z * cdf
        slope = cdf + z * 0.3989422804014327 * exp(-0.5 * z * z, False)
    return y, slope


@Kernel
def _forward_kernel(
    gate_ptr, up_ptr, y_ptr,
    gate_stride, up_stride, y_stride, n_cols, blocks_per_row,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    cols = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < n_cols
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + cols, mask=inside, other=0.0).to(tl.float32)
    activated, _ = activation(gate, KIND)
    tl.store(y_ptr + row * y_stride + cols, (activated * up).to(y_ptr.dtype.element_ty), mask=inside)


@Kernel
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr,
    dy_stride, gate_stride, up_stride, dgate_stride, dup_stride, n_cols, blocks_per_row,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    cols = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < n_cols
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + cols, mask=inside, other=0.0).to(tl.float32)
    activated, slope = activation(gate, KIND)
    dgate = dy * up * slope
    tl.store(dgate_ptr + row * dgate_stride + cols, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + row * dup_stride + cols, (dy * activated).to(dup_ptr.dtype.element_ty), mask=inside)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    half = gate.shape[-1] // 2
    return gate[..., :half], gate[..., half:]


def _launch(kernel: Kernel, kind: str, *tensors: Tensor) -> None:
    first = tensors[0]
    n_rows, n_cols = 1, first.numel()
    if not n_cols:
        return
    strides: tuple[int, ...] = (0,) * len(tensors)
    if not all(map(Tensor.is_contiguous, tensors)):  # else one long row
        n_cols = first.shape[-1]
        n_rows = first.numel() // n_cols
        tensors, strides = zip(*map(strided_rows, tensors), strict=True)
    block, num_warps = TUNING[first.device].glu
    blocks_per_row = -(-n_cols // block)
    kernel((n_rows * blocks_per_row, 1, 1), tensors, (*strides, n_cols, blocks_per_row, kind, block), num_warps)


def _forward_triton(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    gate, up = _halves(gate, up)
    y = contiguous_like(gate)
    _launch(_forward_kernel, kind, gate, up, y)
    return y


def activation_torch(z: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    if kind in ("silu", "sigmoid"):
        s = z.sigmoid()
        y = z * s
        return (y, s + y * (1.0 - s)) if kind == "silu" else (s, s * (1.0 - s))
    if kind == "gelu_tanh":
        twice = z * (_TANH_LINEAR + _TANH_CUBIC * z.square())
        s = twice.sigmoid()
        y = z * s
        return y, s + y * twice.neg_().sigmoid_() * (_TANH_LINEAR + 3.0 * _TANH_CUBIC * z.square())
    cdf = 0.5 * (1.0 + torch.erf(z * math.sqrt(0.5)))
    return z * cdf, cdf + z * torch.exp(-0.5 * z.square()) / math.sqrt(2.0 * math.pi)


def _forward_torch(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    gate, up = _halves(gate, up)
    dtype = accumulation_dtype(gate.dtype)
    return (activation_torch(gate.contiguous().to(dtype), kind)[0] * up.contiguous().to(dtype)).to(gate.dtype)


@operator("glu", fake=_forward_torch)
def _forward(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    return (_forward_triton if use_triton(gate) else _forward_torch)(gate, up, kind)


def _gradients(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return contiguous_like(gate), None if up is None else contiguous_like(up)


Halves = tuple[Tensor, Tensor | None]


def _backward_triton(dy: Tensor, gate: Tensor, up: Tensor | None, kind: str, grads: Halves) -> None:
    gate, up = _halves(gate, up)
    dgate, dup = _halves(*grads)
    _launch(_backward_kernel, kind, dy, gate, up, dgate, dup)


def _backward_torch(dy: Tensor, gate: Tensor, up: Tensor | None, kind: str, grads: Halves) -> None:
    gate, up = _halves(gate, up)
    dgate, dup = _halves(*grads)
    dy = dy.to(accumulation_dtype(gate.dtype))
    activated, slope = activation_torch(gate.to(dy.dtype), kind)
    gradients = dy * up * slope, dy * activated  # both before writing: dy may share their memory
    dgate.copy_(gradients[0])
    dup.copy_(gradients[1])


def _backward_into(grads: Halves, dy: Tensor, gate: Tensor, up: Tensor | None, kind: str) -> Halves:
    (_backward_triton if use_triton(gate) else _backward_torch)(dy, gate, up, kind, grads)
    return grads


@operator("glu_backward", fake=lambda dy, gate, up, kind: _gradients(gate, up))
def _backward(dy: Tensor, gate: Tensor, up: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    return _backward_into(_gradients(gate, up), dy, gate, up, kind)  # type: ignore[return-value]


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, kind: str, inplace: bool) -> Tensor:
        ctx.kind = kind
        ctx.inplace = inplace and _are_free(gate, up)
        ctx.save_for_backward(gate, up)
        return _forward(gate, up, kind)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if ctx.inplace and not torch._C._autograd._get_current_graph_task_keep_graph():
            # Makes operations that saved gate or up raise.
            torch.autograd.graph.increment_version([x for x in (gate, up) if x is not None])
            places = gate.detach(), None if up is None else up.detach()
            dgate, dup = _backward_into(places, dy, gate, up, ctx.kind)
        else:
            dgate, dup = _backward(dy, gate, up, ctx.kind)
        needs_dgate, needs_dup, *_ = ctx.needs_input_grad
        return dgate if needs_dgate else None, dup if needs_dup else None, None, None


def _is_intermediate(x: Tensor) -> bool:
    return x.requires_grad and not x.is_leaf and x.is_contiguous() and not torch.compiler.is_compiling()


def _are_free(gate: Tensor, up: Tensor | None) -> bool:
    if up is None:
        return _is_intermediate(gate)
    apart = _is_intermediate(gate) and _is_intermediate(up)
    return apart and abs(gate.data_ptr() - up.data_ptr()) >= gate.nbytes


def _glu(gate: Tensor, up: Tensor | None, kind: str, inplace: bool) -> Tensor:
    given = gate, up
    gate, up = plain(("gate", "up"), given)
    inplace = inplace and gate is given[0] and up is given[1]  # unwrapped tensors may be leaves
    check_floating(gate, "gate")
    if up is not None:
        check_like(up, "up", gate, "gate")
    elif gate.shape[-1] % 2:
        raise ValueError(
            f"gate without up holds both halves, so its last dimension must be even, got {tuple(gate.shape)}"
        )
    if not torch.is_grad_enabled():
        return _forward(gate, up, kind)
    return _GLU.apply(gate, up, kind, inplace)


def liger_swiglu(gate: Tensor, up: Tensor | None = None, *, inplace: bool = False) -> Tensor:
    """Return `F.silu(gate) * up` (Shazeer 2020, equation 6), in the dtype of `gate`.

    Args:
        gate: (..., I), rows in any layout; or (..., 2 I), both halves side by side (Phi-3, GLM-4).
        up: (..., I) of the same dtype, or None for packed halves.
        inplace: let a backward that does not retain its graph overwrite `gate` and `up`, unless they are leaves or
            share memory. Other operations that saved them raise, or under saved-tensor hooks (checkpoints) read
            gradients.

    >>> gate, up = torch.randn(2, 3, 8).unbind(0)
    >>> torch.equal(liger_swiglu(gate, up), liger_swiglu(torch.cat([gate, up], dim=-1)))
    True
    """
    return _glu(gate, up, "silu", inplace)


def liger_geglu(
    gate: Tensor,
    up: Tensor | None = None,
    approximate: Literal["tanh", "none"] = "tanh",
    *,
    inplace: bool = False,
) -> Tensor:
    """Return `F.gelu(gate, approximate=approximate) * up` (Shazeer 2020, equation 6), in the dtype of `gate`.

    `approximate` is "tanh" (`gelu_pytorch_tanh`, Gemma) or "none", the error function. For the rest, see
    `liger_swiglu`.
    """
    if approximate not in _GELU:
        raise ValueError(f"approximate must be one of {tuple(_GELU)}, got {shown(approximate)}")
    return _glu(gate, up, _GELU[approximate], inplace)
