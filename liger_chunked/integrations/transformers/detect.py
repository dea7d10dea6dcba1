"""Facts about a model's code: its parts, and whose code runs."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel

from liger_chunked.integrations.transformers import quantized


def inner_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside wrappers (DDP, PEFT)."""
    while not isinstance(model, PreTrainedModel):
        if isinstance(inner := getattr(model, "_orig_mod", None) or getattr(model, "module", None), nn.Module):
            model = inner
        elif callable(get_base_model := getattr(model, "get_base_model", None)):
            model = get_base_model()
        else:
            raise TypeError(f"model must be, or wrap, a transformers PreTrainedModel, got {type(model).__name__}")
    return model


def backbone_of(model: PreTrainedModel) -> nn.Module:
    # MllamaForCausalLM is its own base_model.
    backbone = model.base_model if model.base_model is not model else getattr(model, "model", None)
    if backbone is None:
        raise ValueError(f"{type(model).__name__} is not a backbone under an lm_head")
    return backbone


def nested_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the causal model inside a model without a backbone (Llama 4 for images and text)."""
    lm_head = model.get_output_embeddings()
    if lm_head is None or model.base_model is not model or getattr(model, "model", None) is not None:
        return None
    children = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return next((child for child in children if child.get_output_embeddings() is lm_head), None)


@dataclass(frozen=True)
class Projection:
    """A Linear of `lm_head`, maybe quantized, maybe in PEFT's LoRA layer with `adapters` in use."""

    linear: nn.Linear
    layer: Any = None  # a class of `_LORA`
    adapters: tuple[str, ...] = ()

    @property
    def has_bias(self) -> bool:
        return self.linear.bias is not None or any(self.layer.lora_bias[name] for name in self.adapters)

    @property
    def entered(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return modules whose hooks gather parameters, outermost first, each with the computing module."""
        if self.layer is None:
            return [(self.linear, self.linear)]
        of_adapters = [self.layer.lora_B[name] for name in self.adapters]
        return [
            (self.layer, self.layer),
            (self.layer.base_layer, self.linear),
            *((module, _linear_in(module, of_adapter=True)) for module in of_adapters),
        ]


def projections(model: PreTrainedModel) -> list[Projection]:
    """Return the projections of which `lm_head` calls one."""
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        raise ValueError(f"{type(model).__name__} is not a backbone under an lm_head")
    return projections_in(lm_head)


def projections_in(lm_head: nn.Module) -> list[Projection]:
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
        _ = found.entered  # raises unless each `lora_B` is a Linear
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
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    if is_parametrized(module):
        if of_adapter:
            return True
        raise ValueError(_head_refusal(module))
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
    return any(isinstance(module, cls) and type(module).forward is cls.forward for cls in classes if cls is not None)


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
    elif is_parametrized(module):
        reason = (
            ", which is parametrized: a fused loss reads a weight that is a plain parameter. Call "
            "torch.nn.utils.parametrize.remove_parametrizations on lm_head first"
        )
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


# accelerate's hooks move an instance's forward to the second.
FORWARD_SLOTS = ("forward", "_old_forward")

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# Packages whose hooks and forwards accept any output.
_FRAMEWORKS = {"torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "liger_chunked"}


def forward_slot(module: nn.Module) -> str:
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    forward = vars(module).get(forward_slot(module))
    return None if getattr(forward, "__func__", None) is type(module).forward else forward


def unwrapped(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        partial = isinstance(function, functools.partial)
        function = function.func if partial else getattr(function, "__wrapped__", None)


def foreign_code(function: Any, known: type | None = None) -> Any:
    """Return the outermost wrapper that no framework defines, unless a forward of `known` comes first."""
    theirs = [] if known is None else [vars(cls)["forward"] for cls in known.__mro__ if "forward" in vars(cls)]
    for code in unwrapped(function):
        if getattr(code, "__func__", code) in theirs:
            return None
        # functools.wraps copies `__module__`, not the globals.
        module = getattr(code, "__globals__", {}).get("__name__") or type(code).__module__
        if module.partition(".")[0] not in _FRAMEWORKS and not isinstance(code, functools.partial):
            return code
    return None


def parsed(function: Any) -> ast.stmt:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return tree


def runs_code_of(found: type[nn.Module], cls: type[nn.Module], method: str) -> bool:
    return all(stock_method(found, name) is stock_method(cls, name) for name in ("forward", method))


STOCK = "_liger_stock"  # attribute of our methods: the originals
TRIAL = "_liger_trial"  # attribute of copies that `head_check.py` runs


def stock_method(cls: type, name: str) -> Any:
    method = getattr(cls, name, None)
    return getattr(method, STOCK, method)
