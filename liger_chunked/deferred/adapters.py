"""A head with PEFT's LoRA, for a loss that a trainer calls in place of the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_chunked.deferred.code import foreign_code
from liger_chunked.deferred.projection import projections_in
from liger_chunked.private import hooks_of


def down(lm_head: nn.Module, x: Tensor) -> Tensor:
    """Return `lora_A(dropout(x)) * scaling` of the adapters in use (..., r), side by side.

    For hidden states that a `head_fn` made itself, other than those of the head's call. Raises ValueError if hooks of
    the user change what the parts of the layer compute.
    """
    projection = projections_in(lm_head)[0]
    layer: Any = projection.layer
    _check_hooks(layer)
    parts = []
    for name in projection.adapters:
        cast = getattr(layer, "_cast_input_dtype", Tensor.to)
        x = cast(x, layer.lora_A[name].weight.dtype)
        u = layer.lora_A[name](layer.lora_dropout[name](x))
        # `u * scaling` may exceed float16.
        parts.append((u.float() if u.dtype == torch.float16 else u) * layer.scaling[name])
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _check_hooks(layer: Any) -> None:
    for part in (layer.base_layer, layer.lora_B):
        for module in part.modules():
            for slot in ("_forward_pre_hooks", "_forward_hooks"):
                for hook in hooks_of(module, slot):
                    if foreign_code(hook) is not None:
                        name = getattr(hook, "__qualname__", type(hook).__qualname__)
                        raise ValueError(
                            f"the hook {name!r} is on a part of lm_head's LoRA layer, and a loss of other rows than "
                            "those of the call would skip it: remove it, or register it on lm_head"
                        )
