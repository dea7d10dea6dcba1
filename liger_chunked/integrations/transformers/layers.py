"""Layers that base kernels replace, and the causal loss. `overrides.py` lists stock classes, `rotary.py` has rope."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation
from transformers.loss.loss_utils import ForCausalLMLoss

from liger_chunked.kernels import liger_cross_entropy
from liger_chunked.layers.glu import liger_geglu, liger_swiglu, unobserved
from liger_chunked.layers.layer_norm import liger_layer_norm
from liger_chunked.layers.relu_squared import liger_relu_squared
from liger_chunked.layers.rms_norm import liger_rms_norm, liger_rms_norm_gated
from liger_chunked.private import HOOKS, SHOWS_HOOKS


@dataclass(frozen=True)
class Layer:
    """`run(input, ...)` replaces `method`; its other arguments are attributes of the module.

    - `inputs`: how many arguments `method` takes
    - `switch`: of `apply_liger_kernel`; None for `swiglu` or `geglu`, by the first attribute, `act_fn`
    - `refusal`: returns why `run` cannot serve given attributes, or None
    - `optional`: attributes that may be missing; `run` then gets None
    - `is_mlp`: whether `tiled_mlp` serves it: token-wise, with the weights of one MLP
    """

    run: Callable[..., Any]
    switch: str | None = None
    method: str = "forward"
    refusal: Callable[..., str | None] | None = None
    optional: tuple[str, ...] = ()
    inputs: int = 1
    is_mlp: bool = False

    @property
    def is_norm(self) -> bool:
        """Whether it may be a part of the tiles of an MLP that it follows."""
        return self.switch in ("rms_norm", "layer_norm") and self.inputs == 1

    @functools.cached_property
    def attributes(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.run).parameters)[self.inputs :]


@dataclass(frozen=True)
class Binding:
    """A layer, and a class's names of its attributes.

    `everywhere`: whether the layer serves devices and dtypes without kernels too, such as a CPU and float64. The
    class's own method runs there otherwise.
    """

    layer: Layer
    names: tuple[str, ...]
    everywhere: bool = False

    @functools.cached_property
    def reads(self) -> dict[str, bool]:
        """Attributes, and whether a module must have them."""
        optional = self.layer.optional
        return {name: own not in optional for own, name in zip(self.layer.attributes, self.names, strict=True)}

    def values(self, module: Any) -> list[Any]:
        return [getattr(module, n) if needed else getattr(module, n, None) for n, needed in self.reads.items()]

    def refusal(self, module: Any) -> str | None:
        try:
            values = self.values(module)
        except AttributeError as missing:
            return f"it is laid out differently: {missing}"
        reason = None if self.layer.refusal is None else self.layer.refusal(*values)
        return _activation_refusal(*values) if reason is None and self.layer.switch is None else reason

    def switch(self, module: Any) -> str:
        if self.layer.switch is not None:
            return self.layer.switch
        return "swiglu" if _GATED[_kind(getattr(module, self.names[0]))] is liger_swiglu else "geglu"


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return liger_rms_norm(x, weight, eps)


def _rms_norm_fp32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return liger_rms_norm(x, weight, eps, casting="olmo2")


def _rms_norm_offset(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return liger_rms_norm(x, weight, eps, offset=1.0, casting="gemma")


def _rms_norm_scaled(x: Tensor, weight: Tensor | None, eps: float, with_scale: bool) -> Tensor:
    return liger_rms_norm(x, weight if with_scale else None, eps, casting="olmo2")


def _rms_norm_bare(x: Tensor, eps: float) -> Tensor:
    return liger_rms_norm(x, None, eps)


def _layer_norm_scaled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return liger_layer_norm(x, weight, None, eps)


def _layer_norm_bare(x: Tensor, normalized_shape: Any) -> Tensor:
    return liger_layer_norm(x, None, None, 1e-5)


def _relu_squared(x: Tensor) -> Tensor:
    return liger_relu_squared(x)


def _rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Any) -> Tensor:
    return liger_rms_norm_gated(x, gate, weight, eps, activation=activation)


def _rms_norm_gated_silu(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return liger_rms_norm_gated(x, gate, weight, eps)


def _rms_norm_gated_fp32(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Any) -> Tensor:
    return liger_rms_norm_gated(x, gate, weight, eps, activation=activation, casting="olmo2")


def _gated_refusal(weight: Any, eps: float, activation: str) -> str | None:
    return None if activation in ("silu", "sigmoid") else f"its activation is {activation}, not silu or sigmoid"


def _rms_norm_gate_first(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, group_size: int) -> Tensor:
    return liger_rms_norm_gated(x, gate, weight, eps, gate_first=True, groups=x.shape[-1] // group_size)


def _rms_norm_gate_first_one_group(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    return liger_rms_norm_gated(x, gate, weight, eps, gate_first=True)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, normalized_shape: Any) -> Tensor:
    return liger_layer_norm(x, weight, bias, eps)


def _layer_norm_refusal(weight: Any, bias: Any, eps: float, normalized_shape: tuple[int, ...]) -> str | None:
    return _bare_refusal(normalized_shape)


def _scaled_refusal(weight: Tensor, eps: float) -> str | None:
    return _bare_refusal(weight.shape)


def _bare_refusal(normalized_shape: tuple[int, ...]) -> str | None:
    return None if len(normalized_shape) == 1 else f"it is over {len(normalized_shape)} dimensions, not one"


# Functions of (gate, up), or of both in one tensor.
_GATED: dict[Any, Callable[..., Tensor]] = {
    F.silu: liger_swiglu,
    SiLUActivation: liger_swiglu,
    nn.SiLU: liger_swiglu,
    GELUTanh: functools.partial(liger_geglu, approximate="tanh"),
    NewGELUActivation: functools.partial(liger_geglu, approximate="tanh"),
    GELUActivation: functools.partial(liger_geglu, approximate="none"),
}


def _kind(activation: Any) -> Any:
    return type(activation) if isinstance(activation, nn.Module) else activation


def _gated(act_fn: Any, *gate_and_up: Tensor, inplace: bool, limit: float | None = None) -> Tensor:
    """Apply the kernel, or the activation itself if it has hooks. `limit` is for SiLU, also if `act_fn` is None."""
    if isinstance(act_fn, nn.Module) and (not SHOWS_HOOKS or any(vars(act_fn)[slot] for slot in HOOKS)):
        gate, up = gate_and_up if len(gate_and_up) == 2 else gate_and_up[0].chunk(2, -1)
        return act_fn(gate) * up if limit is None else act_fn(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    if limit is not None:
        return liger_swiglu(*gate_and_up, limit=limit, inplace=inplace)
    return _GATED[_kind(act_fn)](*gate_and_up, inplace=inplace)


def _glu(x: Tensor, act_fn: Any, gate_proj: Any, up_proj: Any, down_proj: Any) -> Tensor:
    return down_proj(_gated(act_fn, gate_proj(x), up_proj(x), inplace=unobserved(gate_proj, up_proj)))


def _sparse_glu(
    x: Tensor, act_fn: Any, activation_sparsity: float, gate_proj: Any, up_proj: Any, down_proj: Any
) -> Tensor:
    if activation_sparsity <= 0:
        return _glu(x, act_fn, gate_proj, up_proj, down_proj)
    gate, up = gate_proj(x), up_proj(x)
    share = torch.full((), activation_sparsity, dtype=torch.float32, device=gate.device)
    quantile = torch.special.ndtri(share).to(gate.dtype)
    cutoff = gate.mean(-1, keepdim=True) + gate.std(-1, unbiased=False, keepdim=True) * quantile
    # Not in place: the backward of relu reads its result.
    return down_proj(_gated(act_fn, F.relu(gate - cutoff), up, inplace=False))


def _silu_glu(x: Tensor, gate_proj: Any, up_proj: Any, down_proj: Any) -> Tensor:
    return down_proj(liger_swiglu(gate_proj(x), up_proj(x), inplace=unobserved(gate_proj, up_proj)))


def _packed_glu(x: Tensor, act_fn: Any, gate_up_proj: Any, down_proj: Any) -> Tensor:
    return down_proj(_gated(act_fn, gate_up_proj(x), inplace=unobserved(gate_up_proj)))


def _limited_glu(x: Tensor, act_fn: Any, limit: float, gate_proj: Any, up_proj: Any, down_proj: Any) -> Tensor:
    inplace = unobserved(gate_proj, up_proj)
    return down_proj(_gated(act_fn, gate_proj(x), up_proj(x), inplace=inplace, limit=limit))


def _clamped_packed_glu(x: Tensor, alpha: float, limit: float, gate_up_proj: Any, down_proj: Any) -> Tensor:
    inplace = unobserved(gate_up_proj)
    return down_proj(liger_swiglu(gate_up_proj(x), alpha=alpha, limit=limit, offset=1.0, inplace=inplace))


def _clamped_gate(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    return liger_swiglu(gate_up, alpha=alpha, limit=limit, offset=1.0, inplace=True)


def _interleaved_gate(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    return liger_swiglu(gate_up, alpha=alpha, limit=limit, offset=1.0, interleaved=True, inplace=True)


def _limited_gate(gate_up: Tensor, act_fn: Any, limit: float) -> Tensor:
    return _gated(act_fn, gate_up, inplace=True, limit=limit)


def _stacked_experts(x: Tensor, act_fn: Any, gate_up_proj: Tensor, down_proj: Tensor, hidden_size: int) -> Tensor:
    gate_up = torch.bmm(x.view(gate_up_proj.shape[0], -1, hidden_size), gate_up_proj)
    return torch.bmm(_gated(act_fn, gate_up, inplace=True), down_proj).view(-1, hidden_size)


def _experts_gate(gate_up_out: Tensor, act_fn: Any, config: Any, has_gate: bool) -> Tensor:
    # No hook sees the gate's input.
    return _gated(act_fn, gate_up_out, inplace=True)


def _activation_refusal(activation: Any, *_: Any) -> str | None:
    kind = _kind(activation)
    if kind in _GATED:
        return None
    known = ", ".join(sorted(k.__name__ for k in _GATED))
    return f"its activation is {getattr(kind, '__name__', kind)}, not one of {known}"


def _silu_refusal(act_fn: Any, *_: Any) -> str | None:
    if act_fn is None or _GATED.get(_kind(act_fn)) is liger_swiglu:
        return None
    return f"its activation is {_kind(act_fn).__name__}, and the kernel with a limit has SiLU"


def _experts_refusal(act_fn: Any, config: Any, has_gate: bool) -> str | None:
    way = getattr(config, "_experts_implementation", None)
    if not has_gate:
        return "these experts have no gate"
    if way not in ("grouped_mm", "batched_mm", "deepgemm"):
        return f"{way} experts do not call _apply_gate: call model.set_experts_implementation('grouped_mm') first"
    return _activation_refusal(act_fn)


RMS_NORM = Layer(_rms_norm, "rms_norm")
"""`weight * normalized`, rounded before the product (Llama)."""

RMS_NORM_FP32 = Layer(_rms_norm_fp32, "rms_norm")
"""`weight * normalized`, rounded after the product (OLMo 2)."""

RMS_NORM_OFFSET = Layer(_rms_norm_offset, "rms_norm")
"""`(1 + weight) * normalized`, rounded after the product (Gemma)."""

RMS_NORM_SCALED = Layer(_rms_norm_scaled, "rms_norm", optional=("weight",))
"""`RMS_NORM_FP32`, without a weight unless `with_scale` (Gemma 4)."""

RMS_NORM_BARE = Layer(_rms_norm_bare, "rms_norm")
"""RMSNorm without a weight (NanoChat)."""

RMS_NORM_GATED = Layer(_rms_norm_gated, "rms_norm", refusal=_gated_refusal, inputs=2)
"""`RMS_NORM` times the activation of a gate (Qwen3-Next)."""

RMS_NORM_GATED_FP32 = Layer(_rms_norm_gated_fp32, "rms_norm", refusal=_gated_refusal, inputs=2)
"""`RMS_NORM_FP32` times the activation of a gate, rounded once (Kimi Linear)."""

RMS_NORM_GATE_FIRST = Layer(_rms_norm_gate_first, "rms_norm", inputs=2)
"""`RMS_NORM` of `x * silu(gate)`, by groups of columns (Mamba 2)."""

# Older transformers, such as 5.5, write these two layers without the attributes `activation` and `group_size`.
_RMS_NORM_GATED_SILU = Layer(_rms_norm_gated_silu, "rms_norm", inputs=2)
_RMS_NORM_GATE_FIRST_ONE_GROUP = Layer(_rms_norm_gate_first_one_group, "rms_norm", inputs=2)

LAYER_NORM = Layer(_layer_norm, "layer_norm", refusal=_layer_norm_refusal)
"""`nn.LayerNorm` over the last dimension."""

LAYER_NORM_SCALED = Layer(_layer_norm_scaled, "layer_norm", refusal=_scaled_refusal)
"""LayerNorm with a weight (Cohere)."""

LAYER_NORM_BARE = Layer(_layer_norm_bare, "layer_norm", refusal=_bare_refusal)
"""LayerNorm without weight and bias (OLMo)."""

RELU_SQUARED = Layer(_relu_squared, "relu_squared")
"""The activation `relu(x)**2` (Nemotron, Arcee)."""

GLU_SPARSE = Layer(_sparse_glu, refusal=_activation_refusal, is_mlp=True)
"""`GLU` of each token's gates above a normal quantile, `activation_sparsity` (Gemma 3n)."""

GLU = Layer(_glu, refusal=_activation_refusal, is_mlp=True)
"""`down_proj(act_fn(gate_proj(x)) * up_proj(x))`."""

SILU_GLU = Layer(_silu_glu, "swiglu", is_mlp=True)
"""`GLU` whose activation is `F.silu` (LFM 2)."""

PACKED_GLU = Layer(_packed_glu, refusal=_activation_refusal, is_mlp=True)
"""`GLU` with one `gate_up_proj`, whose output holds gate, then up."""

GLU_LIMITED = Layer(_limited_glu, "swiglu", refusal=_silu_refusal, is_mlp=True)
"""`GLU` with SiLU, of a clamped gate and up (DeepSeek-V4)."""

PACKED_GLU_CLAMPED = Layer(_clamped_packed_glu, "swiglu", is_mlp=True)
"""`EXPERTS_CLAMPED` as an MLP (MiniMax-M3)."""

EXPERTS_INTERLEAVED = Layer(_interleaved_gate, "swiglu", "_apply_gate")
"""Experts' clamped `(up + 1) * gate * sigmoid(alpha * gate)`, of neighbouring columns (GPT-OSS)."""

EXPERTS_CLAMPED = Layer(_clamped_gate, "swiglu", "_apply_gate")
"""The same of halves (MiniMax-M3)."""

EXPERTS_LIMITED = Layer(_limited_gate, "swiglu", "_apply_gate", refusal=_silu_refusal, optional=("act_fn",))
"""Experts' SwiGLU of a clamped gate and up (DeepSeek-V4)."""

EXPERTS_STACKED = Layer(_stacked_experts, refusal=_activation_refusal)
"""Experts that take the same number of tokens each (Llama 4)."""

EXPERTS = Layer(_experts_gate, method="_apply_gate", refusal=_experts_refusal)
"""Experts with 3-D parameters that call `_apply_gate`."""


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """`ForCausalLMLoss` without a float32 copy of the logits; 0, not NaN, without labels."""
    target = F.pad(labels[..., 1:], (0, 1), value=ignore_index) if shift_labels is None else shift_labels
    loss = liger_cross_entropy(
        logits.view(-1, vocab_size),
        target.reshape(-1).to(logits.device),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    if num_items_in_batch is None:
        return loss
    items = num_items_in_batch
    return loss / (items.to(loss.device).clamp(min=1) if isinstance(items, Tensor) else max(items, 1))


def has_causal_loss(model: Any) -> bool:
    return model.loss_function in (ForCausalLMLoss, causal_lm_loss)
