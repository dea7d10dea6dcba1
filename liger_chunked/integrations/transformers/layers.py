"""What takes the place of a method of a model's layers: the base kernels, on the parameters that the layer has.

A `Layer` fits every class whose attributes have the names that it reads; `families.py` says which those are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation

from liger_chunked.integrations.transformers import operations as ops


@dataclass(frozen=True)
class Layer:
    """`run` replaces `method` of a module, which is its first argument.

    `refusal` says why a module of the right class cannot be served, for instance because its activation is another one.
    """

    run: Callable[..., Tensor]
    method: str = "forward"
    refusal: Callable[[Any], str | None] = lambda module: None


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return ops.liger_rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _rms_norm_fp32(self: Any, hidden_states: Tensor) -> Tensor:
    return ops.liger_rms_norm(hidden_states, self.weight, self.variance_epsilon, casting="olmo2")


def _rms_norm_offset(self: Any, x: Tensor) -> Tensor:
    return ops.liger_rms_norm(x, self.weight, self.eps, offset=1.0, casting="gemma")


def _layer_norm(self: Any, input: Tensor) -> Tensor:
    return ops.liger_layer_norm(input, self.weight, self.bias, self.eps)


def _layer_norm_refusal(norm: nn.LayerNorm) -> str | None:
    affine = norm.weight is not None and norm.bias is not None and len(norm.normalized_shape) == 1
    return None if affine else "it is not over one dimension with a weight and a bias"


# The activation of a gated MLP, by the module that computes it: of (gate, up), and of both packed into one tensor.
_GATES: dict[type[nn.Module], tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    nn.SiLU: (ops.liger_swiglu, ops.liger_swiglu_packed),
    SiLUActivation: (ops.liger_swiglu, ops.liger_swiglu_packed),
    GELUTanh: (ops.liger_geglu_tanh, ops.liger_geglu_tanh_packed),
    GELUActivation: (ops.liger_geglu_erf, ops.liger_geglu_erf_packed),
}


def _glu(self: Any, x: Tensor) -> Tensor:
    gated, _ = _GATES[type(self.act_fn)]
    return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))


def _packed_glu(self: Any, hidden_states: Tensor) -> Tensor:
    _, gated = _GATES[type(self.activation_fn)]
    return self.down_proj(gated(self.gate_up_proj(hidden_states)))


def _experts_gate(self: Any, gate_up_out: Tensor) -> Tensor:
    _, gated = _GATES[type(self.act_fn)]
    return gated(gate_up_out)


def _activation_refusal(activation: nn.Module) -> str | None:
    if type(activation) in _GATES:
        return None
    return f"its activation is {type(activation).__name__}, not one of {', '.join(sorted(t.__name__ for t in _GATES))}"


def _experts_refusal(experts: Any) -> str | None:
    if experts.config._experts_implementation == "eager":
        return "eager experts have no place for it: model.set_experts_implementation('grouped_mm') first"
    return _activation_refusal(experts.act_fn)


RMS_NORM = Layer(_rms_norm)
"""`weight * normalized`, rounded before the product; `variance_epsilon` (Llama and its kin)."""

RMS_NORM_FP32 = Layer(_rms_norm_fp32)
"""`weight * normalized`, rounded after the product; `variance_epsilon` (OLMo 2)."""

RMS_NORM_OFFSET = Layer(_rms_norm_offset)
"""`(1 + weight) * normalized`, rounded after the product; `eps` (Gemma)."""

LAYER_NORM = Layer(_layer_norm, refusal=_layer_norm_refusal)
"""`nn.LayerNorm` over the last dimension."""

GLU = Layer(_glu, refusal=lambda mlp: _activation_refusal(mlp.act_fn))
"""`down_proj(act_fn(gate_proj(x)) * up_proj(x))`."""

PACKED_GLU = Layer(_packed_glu, refusal=lambda mlp: _activation_refusal(mlp.activation_fn))
"""The same with `gate_up_proj`, whose output is gate, then up."""

EXPERTS = Layer(_experts_gate, method="_apply_gate", refusal=_experts_refusal)
"""Experts in 3-D parameters, whose grouped or batched product is followed by `_apply_gate`."""
