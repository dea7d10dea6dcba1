"""Find the product of an `lm_head`: a Linear, quantized or not, maybe under PEFT's LoRA and a framework's wrappers.

Reads PEFT and bitsandbytes only where they are imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from liger_chunked.deferred import quantized
from liger_chunked.deferred.swap import stock_forward


@dataclass(frozen=True)
class Projection:
    """A Linear of `lm_head`, maybe quantized, maybe in PEFT's LoRA layer with `adapters` in use."""

    linear: nn.Linear
    layer: Any = None  # a class of `_LORA`
    adapters: tuple[str, ...] = ()

    @property
    def ups(self) -> list[nn.Linear]:
        """Return the layers (r -> V) of all adapters, in use or not."""
        return [] if self.layer is None else [_linear_in(up, of_adapter=True) for up in self.layer.lora_B.values()]


def projections_in(lm_head: nn.Module) -> list[Projection]:
    """Return the projections of which `lm_head` computes one; ValueError says why a fused loss cannot compute it."""
    found = list(_projections_in(lm_head))
    if not found:
        raise ValueError(_head_refusal(lm_head))
    return found


_WRAPPERS = {"FullyShardedDataParallel", "ModulesToSaveWrapper", "ModuleDict"}  # these only call a Linear


def _projections_in(module: nn.Module) -> Iterator[Projection]:
    if _is_linear(module):
        yield Projection(module)
    elif _is_lora(module):
        found = Projection(_linear_in(module.base_layer), module, _adapters_in_use(module))
        _ = found.ups  # raises unless each `lora_B` is a Linear
        yield found
    elif _WRAPPERS & _base_names(module):
        for child in module.children():
            yield from _projections_in(child)
    else:
        raise ValueError(_head_refusal(module))


def _is_linear(module: nn.Module, of_adapter: bool = False) -> TypeGuard[nn.Linear]:
    """Whether a module's product is that of its `weight`, dequantized; an adapter's weight may be computed."""
    if quantized.is_4bit(module):
        if not of_adapter and quantized.refusal(module) is None:
            return True
        raise ValueError(_head_refusal(module))
    if not isinstance(module, nn.Linear) or stock_forward(module) is not nn.Linear.forward:
        return False
    if is_parametrized(module):
        return True  # the head reads `weight` inside its own call, where it is computed and differentiable
    if quantized.is_quantized(module) and (of_adapter or quantized.refusal(module) is not None):
        raise ValueError(_head_refusal(module))
    return True


def _linear_in(module: Any, of_adapter: bool = False) -> nn.Linear:
    if _is_linear(module, of_adapter):
        return module
    children = list(module.children())
    if "FullyShardedDataParallel" in _base_names(module) and len(children) == 1:
        return _linear_in(children[0], of_adapter)
    raise ValueError(_head_refusal(module))


# PEFT's layers that compute LoRA in the same way.
_LORA = (("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit"))


def _is_lora(module: nn.Module) -> TypeGuard[Any]:
    classes = [getattr(sys.modules.get(name), kind, None) for name, kind in _LORA]
    return any(isinstance(module, cls) and stock_forward(module) is cls.forward for cls in classes if cls is not None)


def _adapters_in_use(layer: Any) -> tuple[str, ...]:
    if layer.disable_adapters or layer.merged:
        return ()
    names = tuple(name for name in layer.active_adapters if name in layer.lora_A)
    for name in names:
        if name in layer.lora_variant:
            variant = layer.lora_variant[name]
            kind = variant.__name__ if isinstance(variant, type) else type(variant).__name__
            raise ValueError(
                f"lm_head has the adapter {name!r} of the kind {kind}, and a fused loss computes LoRA without variants "
                "(DoRA, aLoRA and others). Take lm_head out of target_modules, or use plain LoRA or rsLoRA"
            )
    return names


def _base_names(module: nn.Module) -> set[str]:
    # FSDP derives a class of another name.
    return {base.__name__ for base in type(module).__mro__}


def _head_refusal(module: nn.Module) -> str:
    names, ignored = _base_names(module), ": a fused loss reads its weight and would ignore the"
    adapters = {
        "LoraLayer": "low-rank term, unless it is PEFT's LoRA on a torch.nn.Linear. Take lm_head out of "
        "target_modules; to train it anyway, name it in modules_to_save",
        "TrainableTokensWrapper": "rows of trainable_token_indices. Take lm_head out of trainable_token_indices, "
        "untie it from the embeddings (tie_word_embeddings=False), or train both whole (modules_to_save)",
        "BaseTunerLayer": "adapter. Take lm_head out of the adapter's target_modules",
    }
    base = getattr(module, "base_layer", None)
    if "LoraLayer" in names and isinstance(base, nn.Module) and _is_quantized(base):
        return _head_refusal(base)
    if adapter := next((name for name in adapters if name in names), None):
        reason = f"{ignored} {adapters[adapter]}"
    elif isinstance(module, nn.Linear) or _is_quantized(module):
        why = quantized.refusal(module) if quantized.is_quantized(module) else None
        reason = (
            f"{why or ': a fused loss needs a weight in floating point, multiplied by torch.nn.Linear.forward'}. Leave "
            "lm_head out of quantization (llm_int8_skip_modules, modules_to_not_convert), or make it a torch.nn.Linear"
        )
    else:
        reason = (
            ": a fused loss needs a single torch.nn.Linear. Fold lm_head into one, or train with the logits of the "
            "model's own forward"
        )
    return f"lm_head is computed by {type(module).__module__}.{type(module).__name__}{reason}"


def _is_quantized(module: nn.Module) -> bool:
    known = any("quant" in base.__module__ or "bitsandbytes" in base.__module__ for base in type(module).__mro__)
    return known or quantized.is_quantized(module)
