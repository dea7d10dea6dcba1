"""A head with PEFT's LoRA, for a loss that a trainer calls in place of the logits."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_chunked.deferred.projection import projections_in
from liger_chunked.dtensor import distributed_like
from liger_chunked.types import AdaptedWeight, Head


def adapted(lm_head: nn.Module, weight: Any, bias: Any) -> Head:
    """Return a head with the adapters of `lm_head` that are in use."""
    projection = projections_in(lm_head)[0]
    layer, adapters = projection.layer, projection.adapters
    if not adapters:
        return Head(weight, bias)
    ups = [whole(layer.lora_B[name].weight) for name in adapters]
    for name in adapters:
        if layer.lora_bias[name]:
            of_adapter = (whole(layer.lora_B[name].bias) * layer.scaling[name]).to(weight.dtype)
            if isinstance(bias, DTensor):
                of_adapter = distributed_like(bias, of_adapter)
            bias = of_adapter if bias is None else bias + of_adapter
    up = ups[0] if len(ups) == 1 else torch.cat(ups, 1)
    return Head(AdaptedWeight(weight, up, functools.partial(_down, layer, adapters)), bias)


def _down(layer: Any, adapters: tuple[str, ...], x: Tensor) -> Tensor:
    parts = []
    for name in adapters:
        cast = getattr(layer, "_cast_input_dtype", Tensor.to)
        x = cast(x, layer.lora_A[name].weight.dtype)
        u = layer.lora_A[name](layer.lora_dropout[name](x))
        # `u * scaling` may exceed float16.
        parts.append((u.float() if u.dtype == torch.float16 else u) * layer.scaling[name])
    u = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    if u.requires_grad:
        u.register_hook(functools.partial(_refuse_merged, layer))
    return u


def _refuse_merged(layer: Any, gradient: Tensor) -> None:
    # PEFT merges through `weight.data`, unnoticed by autograd.
    if layer.merged:
        raise RuntimeError(
            f"the adapters {layer.merged_adapters} of lm_head were merged between forward and backward, which changes "
            "the weight under the gradient: merge after the backward, or unmerge before it"
        )


def whole(parameter: Any) -> Any:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
