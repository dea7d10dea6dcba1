"""Gated linear units, in float32, rounded once.

    y = act(gate) up,  dgate = dy up act'(gate),  dup = dy act(gate)

Bytes: forward 3, backward 5 times `gate`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from liger_chunked.calls import typed_like
from liger_chunked.kernels.backend import (
    contiguous_like,
    exp,
    first_derivative,
    graph_is_retained,
    is_intermediate,
    jit,
    operator,
    strided_rows,
    tl,
    use_triton,
)
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.operands import check_floating, check_like, plain
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.private import SHOWS_HOOKS, global_forward_hooks, has_children
from liger_chunked.types import accumulation_dtype, shown

_GELU = {"tanh": "gelu_tanh", "none": "gelu"}
# (1 + tanh(u))/2 = sigmoid(2u), which is faster; 2u = sqrt(8/pi) (z + 0.044715 z**3)
_TANH_LINEAR = math.sqrt(8.0 / math.pi)
_TANH_CUBIC = 0.044715 * _TANH_LINEAR

# Whether a number that equals its limit has a gradient. It has one in torch's clamp before 2.14, and none since: this
# follows the installed torch, so that a patched model trains as its stock code does in the same environment.
LIMIT_HAS_GRADIENT = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)
_LIMIT_HAS_GRADIENT = LIMIT_HAS_GRADIENT if tl is None else tl.constexpr(LIMIT_HAS_GRADIENT)


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


@jit
def _capped(gate, up, limit):
    """Return gate and up within the limit, or NaN, and whether they have a gradient: NaN has none, as in torch."""
    unlimited = limit == float("inf")
    if _LIMIT_HAS_GRADIENT:
        gate_free, up_free = (gate <= limit) | unlimited, (tl.abs(up) <= limit) | unlimited
    else:
        gate_free, up_free = (gate < limit) | unlimited, (tl.abs(up) < limit) | unlimited
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate, up, gate_free, up_free


@jit
def _load(gate_ptr, up_ptr, gate_stride, up_stride, row, first, n_cols, BLOCK: tl.constexpr):
    """Load gate and up; without `up_ptr`, they are neighbouring columns."""
    if up_ptr is None:
        cols = 2 * first + tl.arange(0, 2 * BLOCK)
        both = tl.load(gate_ptr + row * gate_stride + cols, mask=cols - n_cols < n_cols, other=0.0)
        gate, up = tl.split(tl.reshape(both, [BLOCK, 2]))
    else:
        cols = first + tl.arange(0, BLOCK)
        gate = tl.load(gate_ptr + row * gate_stride + cols, mask=cols < n_cols, other=0.0)
        up = tl.load(up_ptr + row * up_stride + cols, mask=cols < n_cols, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@Kernel
def _forward_kernel(
    gate_ptr, up_ptr, y_ptr,
    gate_stride, up_stride, y_stride, n_cols, blocks_per_row, alpha, limit, offset,
    KIND: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    first = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK
    cols = first + tl.arange(0, BLOCK)
    gate, up = _load(gate_ptr, up_ptr, gate_stride, up_stride, row, first, n_cols, BLOCK)
    if CAPPED:
        gate, up, _, _ = _capped(gate, up, limit)
        activated, _ = activation(gate * alpha, KIND)
        y = activated / alpha * (up + offset)
    else:
        activated, _ = activation(gate, KIND)
        y = activated * up
    tl.store(y_ptr + row * y_stride + cols, y.to(y_ptr.dtype.element_ty), mask=cols < n_cols)


@Kernel
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr,
    dy_stride, gate_stride, up_stride, dgate_stride, dup_stride, n_cols, blocks_per_row, alpha, limit, offset,
    KIND: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    first = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK
    cols = first + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    gate, up = _load(gate_ptr, up_ptr, gate_stride, up_stride, row, first, n_cols, BLOCK)
    if CAPPED:
        gate, up, gate_free, up_free = _capped(gate, up, limit)
        activated, slope = activation(gate * alpha, KIND)
        dgate = tl.where(gate_free, dy * (up + offset) * slope, 0.0)
        dup = tl.where(up_free, dy * (activated / alpha), 0.0)
    else:
        activated, slope = activation(gate, KIND)
        dgate = dy * up * slope
        dup = dy * activated
    if dup_ptr is None:
        both = tl.reshape(tl.join(dgate, dup), [2 * BLOCK]).to(dgate_ptr.dtype.element_ty)
        cols = 2 * first + tl.arange(0, 2 * BLOCK)
        tl.store(dgate_ptr + row * dgate_stride + cols, both, mask=cols - n_cols < n_cols)  # twice may overflow
    else:
        tl.store(dgate_ptr + row * dgate_stride + cols, dgate.to(dgate_ptr.dtype.element_ty), mask=cols < n_cols)
        tl.store(dup_ptr + row * dup_stride + cols, dup.to(dup_ptr.dtype.element_ty), mask=cols < n_cols)


# Kind, interleaved, alpha, limit and offset of `act(alpha gate)/alpha (up + offset)`, of a gate and up clamped to the
# limit: the last arguments of `_forward` and `_backward`.
_Options = tuple[str, bool, float, float, float]
_UNCAPPED = 1.0, math.inf, 0.0


def _halves(gate: Tensor, up: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    if interleaved:
        return gate[..., ::2], gate[..., 1::2]
    gate, up = gate.chunk(2, -1)
    return gate, up


def launch_elementwise(
    kernel: Kernel, like: Tensor, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...]
) -> None:
    """Launch `kernel` on blocks of columns of `tensors`, which have the shape of `like`.

    The kernel takes these numbers, in order: the row stride of each tensor, the columns of a row, the blocks of a row,
    `options`, and the columns of a block. Contiguous tensors are one long row.
    """
    n_rows, n_cols = 1, like.numel()
    if not n_cols:
        return
    strides: tuple[int, ...] = (0,) * len(tensors)
    for x in tensors:
        if x is not None and not x.is_contiguous():  # else one long row
            n_cols = like.shape[-1]
            n_rows = like.numel() // n_cols
            tensors, strides = zip(*((None, 0) if x is None else strided_rows(x) for x in tensors), strict=True)
            break
    block, num_warps = TUNING[like.device].glu
    blocks_per_row = -(-n_cols // block)
    kernel((n_rows * blocks_per_row, 1, 1), tensors, (*strides, n_cols, blocks_per_row, *options, block), num_warps)


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


def _terms_torch(
    gate: Tensor, up: Tensor, kind: str, alpha: float, limit: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the activated gate and its slope, and what multiplies them."""
    if (alpha, limit, offset) == _UNCAPPED:
        return *activation_torch(gate, kind), up
    activated, slope = activation_torch(gate.clamp(max=limit) * alpha, kind)
    return activated / alpha, slope, up.clamp(-limit, limit) + offset


def _forward_torch(gate: Tensor, up: Tensor, *options: Any) -> Tensor:
    dtype = accumulation_dtype(gate.dtype)
    activated, _, factor = _terms_torch(gate.contiguous().to(dtype), up.contiguous().to(dtype), *options)
    return (activated * factor).to(gate.dtype)


@operator("glu", fake=lambda gate, up, kind, interleaved, *_: contiguous_like(_halves(gate, up, interleaved)[0]))
def _forward(
    gate: Tensor, up: Tensor | None, kind: str, interleaved: bool, alpha: float, limit: float, offset: float
) -> Tensor:
    if not use_triton(gate):
        return _forward_torch(*_halves(gate, up, interleaved), kind, alpha, limit, offset)
    if interleaved:
        y = contiguous_like(gate[..., ::2])
    else:
        gate, up = _halves(gate, up, False)
        y = contiguous_like(gate)
    capped = (alpha, limit, offset) != _UNCAPPED
    launch_elementwise(_forward_kernel, y, (gate, up, y), (alpha, limit, offset, kind, capped))
    return y


def _backward_torch(
    dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, kind: str, alpha: float, limit: float,
    offset: float,
) -> None:  # fmt: skip
    dy = dy.to(accumulation_dtype(gate.dtype))
    activated, slope, factor = _terms_torch(gate.to(dy.dtype), up.to(dy.dtype), kind, alpha, limit, offset)
    gradients = dy * factor * slope, dy * activated  # both before writing: dy may share their memory
    if limit < math.inf:
        within = torch.le if LIMIT_HAS_GRADIENT else torch.lt
        beyond = within(gate, limit).logical_not_(), within(up.abs(), limit).logical_not_()
        gradients = gradients[0].masked_fill_(beyond[0], 0.0), gradients[1].masked_fill_(beyond[1], 0.0)
    dgate.copy_(gradients[0])
    dup.copy_(gradients[1])


def _backward_into(
    dgate: Tensor, dup: Tensor | None, dy: Tensor, gate: Tensor, up: Tensor | None, kind: str, interleaved: bool,
    alpha: float, limit: float, offset: float,
) -> None:  # fmt: skip
    """Write gradients into `dgate` and `dup`, laid out as `gate` and `up`; they may share memory."""
    by_kernel = use_triton(gate)
    if up is None and not (interleaved and by_kernel):  # the kernel splits neighbouring columns itself
        gate, up = _halves(gate, None, interleaved)
        dgate, dup = _halves(dgate, None, interleaved)
    if by_kernel:
        capped = (alpha, limit, offset) != _UNCAPPED
        tensors = dy, gate, up, dgate, dup
        launch_elementwise(_backward_kernel, dy, tensors, (alpha, limit, offset, kind, capped))
    else:
        assert up is not None and dup is not None
        _backward_torch(dy, gate, up, dgate, dup, kind, alpha, limit, offset)


def _gradients(dy: Tensor, gate: Tensor, up: Tensor | None, *_: Any) -> tuple[Tensor, Tensor | None]:
    return contiguous_like(gate), None if up is None else contiguous_like(up)


@operator("glu_backward", fake=_gradients)
def _backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, kind: str, interleaved: bool, alpha: float, limit: float, offset: float
) -> tuple[Tensor, Tensor]:
    dgate, dup = _gradients(dy, gate, up)
    _backward_into(dgate, dup, dy, gate, up, kind, interleaved, alpha, limit, offset)
    return dgate, dup  # type: ignore[return-value]


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, options: _Options, inplace: bool) -> Tensor:
        ctx.options = options
        ctx.inplace = inplace and _are_free(gate, up)
        ctx.save_for_backward(gate, up)
        return _forward(gate, up, *options)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if ctx.inplace and not graph_is_retained():
            # Makes operations that saved gate or up raise.
            torch.autograd.graph.increment_version([x for x in (gate, up) if x is not None])
            # Gradients in place of what the backward reads for the last time: 0.6 of 9.4 GiB in an SFT step of
            # Qwen2.5-0.5B on 16 x 4096 tokens.
            dgate, dup = gate.detach(), None if up is None else up.detach()
            _backward_into(dgate, dup, dy, gate, up, *ctx.options)
        else:
            dgate, dup = _backward(dy, gate, up, *ctx.options)
        needs_dgate, needs_dup, *_ = ctx.needs_input_grad
        return dgate if needs_dgate else None, dup if needs_dup else None, None, None


def _are_free(gate: Tensor, up: Tensor | None) -> bool:
    if up is None:
        return is_intermediate(gate)
    apart = is_intermediate(gate) and is_intermediate(up)
    return apart and abs(gate.data_ptr() - up.data_ptr()) >= gate.nbytes


def _glu(gate: Tensor, up: Tensor | None, options: _Options, inplace: bool) -> Tensor:
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
        return _forward(gate, up, *options)
    return _GLU.apply(gate, up, options, inplace)


def liger_swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
    interleaved: bool = False,
    inplace: bool = False,
) -> Tensor:
    """Return `F.silu(gate) * up` (Shazeer 2020, equation 6), computed in float32 and rounded once.

        g sigmoid(alpha g) (u + offset),    g = min(gate, limit),  u = min(max(up, -limit), limit)

    Args:
        gate: (..., I), floating-point, rows in any layout; without `up` (..., 2 I), which holds the gate and then `up`
            (Phi-3, GLM-4).
        up: (..., I), with the dtype and device of `gate`. None: `gate` holds both.
        alpha: positive factor of the sigmoid's argument; 1.702 in GPT-OSS.
        limit: positive bound of `gate` from above, and of `up` on both sides; 7.0 in GPT-OSS. None: no bound.
        offset: added to `up` after the bound; 1.0 in GPT-OSS.
        interleaved: without `up`, even columns are the gate and odd ones `up` (GPT-OSS), instead of two halves.
        inplace: let a backward that does not retain its graph write its gradients over `gate` and `up`. It has no
            effect on leaves, on tensors that share memory, and in compiled graphs. Other operations that saved them for
            their backward raise, or under saved-tensor hooks (checkpoints) read gradients.

    Returns:
        (..., I), contiguous, in the dtype of `gate`.

    Raises:
        TypeError: `gate` is no plain floating-point tensor, or `up` has another dtype.
        ValueError: `up` has another shape or device, `gate` alone has an odd number of columns, `interleaved` is True
            with `up`, or `alpha`, `limit` or `offset` is out of range or no number.
        NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode autograd.

    >>> gate, up = torch.randn(2, 3, 8).unbind(0)
    >>> torch.equal(liger_swiglu(gate, up), liger_swiglu(torch.cat([gate, up], dim=-1)))
    True
    """
    for name, value, positive in (("alpha", alpha, True), ("limit", limit, True), ("offset", offset, False)):
        if value is None and name == "limit":
            continue
        # A tuple: torch 2.9 cannot trace a union.
        if not (isinstance(value, (int, float)) and math.isfinite(value) and (value > 0 or not positive)):
            raise ValueError(f"{name} must be a finite{' positive' * positive} number, got {shown(value)}")
    if interleaved and up is not None:
        raise ValueError("interleaved=True is for gate and up in one tensor, without up")
    options = "silu", interleaved, float(alpha), math.inf if limit is None else float(limit), float(offset)
    return _glu(gate, up, options, inplace)


def liger_geglu(
    gate: Tensor,
    up: Tensor | None = None,
    approximate: Literal["tanh", "none"] = "tanh",
    *,
    inplace: bool = False,
) -> Tensor:
    """Return `F.gelu(gate, approximate=approximate) * up` (Shazeer 2020, equation 6), in float32, rounded once.

    Args:
        gate: (..., I), floating-point, rows in any layout; without `up` (..., 2 I), which holds the gate and then `up`.
        up: (..., I), with the dtype and device of `gate`. None: `gate` holds both.
        approximate: "tanh", the approximation that Gemma uses (`gelu_pytorch_tanh`), or "none", the error function.
        inplace: let a backward that does not retain its graph write its gradients over `gate` and `up`. It has no
            effect on leaves, on tensors that share memory, and in compiled graphs. Other operations that saved them for
            their backward raise, or under saved-tensor hooks (checkpoints) read gradients.

    Returns:
        (..., I), contiguous, in the dtype of `gate`.

    Raises:
        TypeError: `gate` is no plain floating-point tensor, or `up` has another dtype.
        ValueError: `up` has another shape or device, `gate` alone has an odd number of columns, or `approximate` is
            unknown.
        NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode autograd.

    >>> gate, up = torch.randn(2, 3, 8).unbind(0)
    >>> torch.allclose(liger_geglu(gate, up), torch.nn.functional.gelu(gate, approximate="tanh") * up, atol=1e-6)
    True
    """
    if approximate not in _GELU:
        raise ValueError(f"approximate must be one of {tuple(_GELU)}, got {shown(approximate)}")
    return _glu(gate, up, (_GELU[approximate], False, *_UNCAPPED), inplace)


def unobserved(*projections: nn.Module) -> bool:
    """Whether no forward hook, global or local, can keep outputs."""
    if not SHOWS_HOOKS or global_forward_hooks():
        return False
    for projection in projections:
        # Most projections have no modules inside, and listing one takes as long as a launch.
        for module in projection.modules() if has_children(projection) else (projection,):
            if module._forward_hooks:
                return False
    return True


class _GatedMLP(nn.Module):
    """An MLP of three projections, whose unit is that of the subclass."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        width = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=bias)

    @property
    def _inplace(self) -> bool:
        return unobserved(self.gate_proj, self.up_proj)

    def _unit(self, gate: Tensor, up: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer.

        Unless forward hooks may keep them, the backward overwrites the outputs of `gate_proj` and `up_proj`.

        Args:
            x: (..., H), in the dtype of the projections, or in any under autocast.

        Returns:
            (..., H), in the dtype that `down_proj` returns.

        Raises:
            TypeError: a projection returns no plain floating-point tensor, such as a DTensor.
            ValueError: the projections' outputs differ in shape or device.
            NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode
                autograd.
        """
        # One expression: a name for gate or up would keep the tensor in memory while `down_proj` runs.
        return self.down_proj(self._unit(self.gate_proj(x), self.up_proj(x)))

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def _activation_name(config: Any, known: Collection[str]) -> str:
    name = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if name not in known:
        raise ValueError(f"hidden_act must be one of {tuple(known)}, got {shown(name)}")
    return str(name)


class LigerSwiGLUMLP(_GatedMLP):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`, with the parameters of `LlamaMLP`.

    Args:
        config: an object with `hidden_size` (H), `intermediate_size` (I), `hidden_act` or else `hidden_activation`
            ("silu" or "swish"), and optionally `mlp_bias` (whether the three projections have a bias; False).
        intermediate_size: I, instead of the configuration's. None: the configuration's.
    """

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        _activation_name(config, ("silu", "swish"))
        super().__init__(config, intermediate_size)

    def _unit(self, gate: Tensor, up: Tensor) -> Tensor:
        return liger_swiglu(gate, up, inplace=self._inplace)


# The approximation of each name in configurations of transformers.
_GELU_NAMES: dict[str, Literal["tanh", "none"]] = {
    "gelu": "none",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
}


class LigerGEGLUMLP(_GatedMLP):
    """`down_proj(gelu(gate_proj(x)) * up_proj(x))`, with the parameters of `GemmaMLP`.

    Args:
        config: an object with `hidden_size` (H), `intermediate_size` (I), `hidden_act` or else `hidden_activation`
            ("gelu", the error function; "gelu_new", "gelu_pytorch_tanh" or "gelu_python_tanh", its tanh approximation),
            and optionally `mlp_bias` (whether the three projections have a bias; False).
    """

    def __init__(self, config: Any) -> None:
        approximate = _GELU_NAMES[_activation_name(config, _GELU_NAMES)]
        super().__init__(config)
        self.approximate: Literal["tanh", "none"] = approximate

    def _unit(self, gate: Tensor, up: Tensor) -> Tensor:
        return liger_geglu(gate, up, self.approximate, inplace=self._inplace)
