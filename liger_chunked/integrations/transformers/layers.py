"""Layers that base kernels replace.

A `Layer` fits every class that computes the same from the same attributes; `overrides.py` lists these classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation

from liger_chunked.kernels import (
    liger_cross_entropy,
    liger_geglu,
    liger_layer_norm,
    liger_rms_norm,
    liger_rotary_pos_emb,
    liger_swiglu,
)
from liger_chunked.modules import unobserved


@dataclass(frozen=True)
class Layer:
    """`run(module, ...)` replaces `method`, unless `refusal(module)` returns a reason."""

    run: Callable[..., Tensor]
    method: str = "forward"
    refusal: Callable[[Any], str | None] = lambda module: None


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return liger_rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _rms_norm_fp32(self: Any, hidden_states: Tensor) -> Tensor:
    return liger_rms_norm(hidden_states, self.weight, self.variance_epsilon, casting="olmo2")


def _rms_norm_offset(self: Any, x: Tensor) -> Tensor:
    return liger_rms_norm(x, self.weight, self.eps, offset=1.0, casting="gemma")


def _layer_norm(self: Any, input: Tensor) -> Tensor:
    return liger_layer_norm(input, self.weight, self.bias, self.eps)


def _layer_norm_refusal(norm: nn.LayerNorm) -> str | None:
    return None if len(norm.normalized_shape) == 1 else f"it is over {len(norm.normalized_shape)} dimensions, not one"


# Functions of (gate, up), or of both in one tensor.
_GATED: dict[type[nn.Module], Callable[..., Tensor]] = {
    SiLUActivation: liger_swiglu,
    nn.SiLU: liger_swiglu,
    GELUTanh: functools.partial(liger_geglu, approximate="tanh"),
    NewGELUActivation: functools.partial(liger_geglu, approximate="tanh"),
    GELUActivation: functools.partial(liger_geglu, approximate="none"),
}


def _glu(self: Any, x: Tensor) -> Tensor:
    gated = _GATED[type(self.act_fn)]
    return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), inplace=unobserved(self.gate_proj, self.up_proj)))


def _packed_glu(self: Any, hidden_states: Tensor) -> Tensor:
    gated = _GATED[type(self.activation_fn)]
    return self.down_proj(gated(self.gate_up_proj(hidden_states), inplace=unobserved(self.gate_up_proj)))


def _experts_gate(self: Any, gate_up_out: Tensor) -> Tensor:
    # No hook sees the gate's input.
    return _GATED[type(self.act_fn)](gate_up_out, inplace=True)


def _activation_refusal(activation: nn.Module) -> str | None:
    if type(activation) in _GATED:
        return None
    return f"its activation is {type(activation).__name__}, not one of {', '.join(sorted(k.__name__ for k in _GATED))}"


def _experts_refusal(experts: Any) -> str | None:
    way = experts.config._experts_implementation
    if way not in ("grouped_mm", "batched_mm", "deepgemm"):
        return f"{way} experts do not call _apply_gate: call model.set_experts_implementation('grouped_mm') first"
    return _activation_refusal(experts.act_fn)


RMS_NORM = Layer(_rms_norm)
"""`weight * normalized`, rounded before the product (Llama)."""

RMS_NORM_FP32 = Layer(_rms_norm_fp32)
"""`weight * normalized`, rounded after the product (OLMo 2)."""

RMS_NORM_OFFSET = Layer(_rms_norm_offset)
"""`(1 + weight) * normalized`, rounded after the product (Gemma)."""

LAYER_NORM = Layer(_layer_norm, refusal=_layer_norm_refusal)
"""`nn.LayerNorm` over the last dimension."""

GLU = Layer(_glu, refusal=lambda mlp: _activation_refusal(mlp.act_fn))
"""`down_proj(act_fn(gate_proj(x)) * up_proj(x))`."""

PACKED_GLU = Layer(_packed_glu, refusal=lambda mlp: _activation_refusal(mlp.activation_fn))
"""`GLU` with one `gate_up_proj`, whose output holds gate, then up."""

EXPERTS = Layer(_experts_gate, method="_apply_gate", refusal=_experts_refusal)
"""Experts with 3-D parameters that call `_apply_gate`."""


def rotate_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` of Llama. `cos` may be narrower than a head, as in Phi-3."""
    return liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


def rotate_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` of GLM-4, which rotates neighbouring columns."""
    return liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, interleaved=True)


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
