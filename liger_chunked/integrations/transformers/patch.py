"""Patch and restore a model, or all models of a family.

Modules get a subclass of their class (`patched_class.py`, `forward.py`). A family's patch sets attributes of its
classes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from liger_chunked.deferred.code import own_forward
from liger_chunked.integrations.transformers import overrides, verify
from liger_chunked.integrations.transformers.attach import (
    attach_head,
    detach_head,
    fuse,
    fuse_class,
    rebind,
    remove_trainers_head,
)
from liger_chunked.integrations.transformers.detect import inner_model
from liger_chunked.integrations.transformers.experts import EXPERTS_GATE, experts_method
from liger_chunked.integrations.transformers.forward import Fusion
from liger_chunked.integrations.transformers.found import (
    Found,
    check_switches,
    found_in,
    found_in_classes,
    owner_of,
)
from liger_chunked.integrations.transformers.layers import Layer, causal_lm_loss, has_causal_loss
from liger_chunked.integrations.transformers.overrides import family_modeling, family_of
from liger_chunked.integrations.transformers.patched_class import (
    LayerPatch,
    RopePatch,
    has_our_code,
    is_patched,
    layer_method,
    set_patch,
    stock_class,
)
from liger_chunked.integrations.transformers.replaced import rope_of_family, stock_rope
from liger_chunked.integrations.transformers.report import APPLIED, FUSED, Applied
from liger_chunked.integrations.transformers.source import rotary_functions
from liger_chunked.layers.tiled import Tokens, check_tokens
from liger_chunked.types import budget_bytes, shown

if TYPE_CHECKING:
    from transformers.models.auto.modeling_auto import _BaseModelWithGenerate as GenerativeModel

__all__ = [
    "Applied",
    "AutoLigerKernelForCausalLM",
    "AutoLigerKernelForImageTextToText",
    "Fusion",
    "apply_liger_kernel",
    "apply_to_family",
    "attach_head",
    "detach_head",
    "family_function",
    "fuse",
    "is_patched",
    "register_layer",
    "revert_liger_kernel",
    "stock_class",
]

_LOGGER = logging.getLogger(__name__)

FAMILY_WIDE: dict[str, Applied] = {}

P = ParamSpec("P")
T = TypeVar("T")


def lists_switches(function: Callable[P, T]) -> Callable[P, T]:
    """Make a keyword that `function` lacks raise the TypeError that lists the switches."""
    known = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        check_switches(kwargs.keys() - known)
        return function(*args, **kwargs)

    return checked


@lists_switches
def apply_liger_kernel(
    model: nn.Module,
    *,
    logits_budget: int | float | str | None = None,
    rope: bool | None = None,
    rms_norm: bool | None = None,
    layer_norm: bool | None = None,
    swiglu: bool | None = None,
    geglu: bool | None = None,
    relu_squared: bool | None = None,
    cross_entropy: bool | None = None,
    fused_linear_cross_entropy: bool | None = None,
    tiled_mlp: bool | int | Literal["auto"] | None = None,
) -> Applied:
    """Patch the base kernels and the fused loss into one model, in place.

    The model's own forward runs. In training its head returns `DeferredLogits`, and the loss of that forward is fused;
    a call takes three more keywords:

    - `skip_logits`: True defers in evaluation too, and returns `logits=None`; False gets real logits
    - `return_token_accuracy`: adds `token_accuracy` to the output of a fused step
    - `head_fn`: a function of head and hidden states that replaces the logits and the loss; see `attach_head`

    No other model changes, also by `rope`: the model's own layers call another rotary function. The result says what is
    left alone, and why; for the head, what a training step of a small copy did.

    Args:
        model: a transformers model, maybe wrapped (DDP, PEFT).
        logits_budget: most bytes of logits in memory: a number, or a string such as "512MiB". None: automatic.
        rope, rms_norm, layer_norm, swiglu, geglu, relu_squared: switches of the layers. None: on for those that the
            model has. True requires that it has them; False leaves them alone.
        cross_entropy: the loss on logits, without a float32 copy of them. None: off. It excludes
            `fused_linear_cross_entropy`.
        fused_linear_cross_entropy: the loss without logits. None: on if the model's head allows it.
        tiled_mlp: run the gated MLPs in tiles of tokens, for long sequences (`docs/long-contexts.md`): a backward holds
            the activations of one tile. An int: the most tokens of a tile. True: max(4096, 2·H). "auto": so, where a
            sequence's activations take more than twice the memory. None or False: off. Experts are never tiled.

    Returns:
        An `Applied`. `print` shows it; `replaced` counts the patched classes by switch, and `left` maps what is left
        alone to the reason.

    Raises:
        TypeError: an unknown switch, one that is no bool or None, or no transformers model.
        ValueError: a switch that is True matches nothing, nothing matches at all, both losses are asked for, the model
            runs hub kernels, or `logits_budget` or `tiled_mlp` is invalid.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))
    >>> print(apply_liger_kernel(model, rope=False))
    Kernels for llama:
      rms_norm: LlamaRMSNorm x 5
      swiglu: LlamaMLP x 2
      fused_linear_cross_entropy: LlamaForCausalLM
    >>> ids = torch.randint(64, (1, 8))
    >>> output = model.train()(ids, labels=ids)
    >>> output.loss.shape, output.logits
    (torch.Size([]), DeferredLogits((1, 8, 64), torch.float32, cpu, not computed))
    >>> revert_liger_kernel(model)
    """
    logits_budget, tokens = budget_bytes(logits_budget), _tokens(tiled_mlp)  # raise before the first patch
    inner = inner_model(model)
    family = family_of(stock_class(type(inner)))
    if inner.use_kernels:
        raise ValueError(
            "this model runs kernels of the Hugging Face hub (use_kernels=True), which replace the forward of its "
            "layers again at every train() and eval(): load it with use_kernels=False"
        )
    switches = {
        "rope": rope,
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        "swiglu": swiglu,
        "geglu": geglu,
        "relu_squared": relu_squared,
        "cross_entropy": cross_entropy,
        FUSED: fused_linear_cross_entropy,
    }
    found = found_in(inner, fused_linear_cross_entropy)
    on = found.chosen(family, switches)
    found.check_tiles(family, on, tokens)
    reason = found.left.get(owner_of(inner).__name__)
    if reason and FUSED not in on and fused_linear_cross_entropy is None:
        _LOGGER.warning("%s trains with logits: %s", type(inner).__name__, reason)
    _revert(inner)
    applied = Applied(family, left=found.left)
    for name in on:
        for switch, module, binding in found.layers:
            if switch == name:
                in_tiles = binding.layer.is_mlp or binding.layer.is_norm
                set_patch(module, LayerPatch(binding, tokens if in_tiles else False))
                applied.count(switch, owner_of(module).__name__)
                if tokens is not False and binding.layer.is_mlp:
                    applied.count(overrides.TILED, owner_of(module).__name__)
    if "rope" in on:
        _rotate(inner, found.ropes)
        _count_ropes(found, applied)
    if "cross_entropy" in on:
        vars(inner)["_loss_function"] = causal_lm_loss
        applied.count("cross_entropy", "loss_function")
    if FUSED in on:
        fuse(inner, Fusion(logits_budget))
        rebind(model, inner)
        applied.count(FUSED, owner_of(inner).__name__)
    vars(inner)[APPLIED] = applied
    return applied


def _tokens(tiled_mlp: Any) -> Tokens:
    if tiled_mlp is None:
        return False
    check_tokens(overrides.TILED, tiled_mlp)
    return tiled_mlp


def _rotate(model: nn.Module, functions: tuple[tuple[str, str], ...]) -> None:
    """Let the layers of a model call rotary functions of ours in place of these."""
    for module in model.modules():
        read = rotary_functions(stock_class(type(module)))
        called = tuple(function for function in functions if function in read)
        if called and own_forward(module) is None:
            set_patch(module, RopePatch(called))


def _count_ropes(found: Found, applied: Applied) -> None:
    applied.ropes = found.ropes
    for _, name in found.ropes:
        applied.count("rope", name)


def revert_liger_kernel(model: nn.Module | str) -> None:
    """Undo `apply_liger_kernel(model)` or, for a name, `apply_liger_kernel_to_<family>()`.

    The head that a trainer of `liger_chunked.integrations.trl` gave the model goes too, so revert after its last step;
    `attach_head` stays. Forwards set after patching stay. Without a patch, nothing happens.

    Args:
        model: a patched transformers model, maybe wrapped (DDP, PEFT), or the name of a family, such as "llama".

    Raises:
        TypeError: `model` is neither a name nor contains a transformers model.
        ValueError: transformers has no family of this name.
    """
    if isinstance(model, str):
        _revert_family(family_modeling(model))
        return
    inner = inner_model(model)
    _revert(inner)
    remove_trainers_head(inner)


def _revert(inner: PreTrainedModel) -> None:
    fuse(inner, None)
    for module in filter(has_our_code, inner.modules()):
        set_patch(module, None)
    if vars(inner).get("_loss_function") is causal_lm_loss:
        del inner._loss_function
        if not has_causal_loss(inner):
            inner.loss_function = ForCausalLMLoss
    _release(vars(inner).pop(APPLIED, None))


def _revert_family(modeling: ModuleType) -> None:
    for cls in overrides.causal_classes(modeling):
        fuse_class(cls, None)
    _release(FAMILY_WIDE.pop(overrides.family_name(modeling.__name__), None))


def _release(applied: Applied | None) -> None:
    if applied is not None:
        applied.patches.undo()


def apply_to_family(
    name: str,
    *,
    logits_budget: int | float | str | None = None,
    tiled_mlp: bool | int | Literal["auto"] | None = None,
    **switches: bool | None,
) -> Applied:
    """Patch a family's classes, except torch's, and so all its models.

    Unsupported activations raise when they run. Heads that no fused loss computes return logits, and a line in the log
    says why.
    """
    logits_budget, tokens = budget_bytes(logits_budget), _tokens(tiled_mlp)
    modeling = family_modeling(name)
    family = overrides.family_name(modeling.__name__)
    found = found_in_classes(modeling)
    on = found.chosen(family, switches)
    found.check_tiles(family, on, tokens)
    _revert_family(modeling)
    applied = Applied(family, left=found.left)
    for chosen in on:
        for switch, cls, binding in found.layers:
            if switch == chosen:
                method = binding.layer.method
                tiles = tokens if binding.layer.is_mlp else False
                applied.patches.set(cls, method, layer_method(binding, getattr(cls, method), tokens=tiles))
                if method == EXPERTS_GATE and (of_experts := experts_method(cls)) is not None:
                    applied.patches.set(cls, "forward", of_experts)
                applied.count(switch, cls.__name__)
                if tiles is not False:
                    applied.count(overrides.TILED, cls.__name__)
    if "rope" in on:
        for module, name in found.ropes:
            rope = rope_of_family(stock_rope(module, name))
            applied.patches.set(importlib.import_module(module), name, rope)
        _count_ropes(found, applied)
    for owner in overrides.causal_classes(modeling):
        if "cross_entropy" in on and owner.__name__ not in found.other_losses:
            applied.patches.set(owner, "_loss_function", staticmethod(causal_lm_loss))
            applied.count("cross_entropy", "loss_function")
        if FUSED in on:
            fuse_class(owner, Fusion(logits_budget))
            applied.count(FUSED, owner.__name__)
    FAMILY_WIDE[family] = applied
    return applied


class FamilyFunction(Protocol):
    """The type of `apply_liger_kernel_to_<family>`: patches `model`, or the classes of the family if it is None."""

    def __call__(
        self,
        *,
        model: PreTrainedModel | None = None,
        logits_budget: int | float | str | None = None,
        rope: bool | None = None,
        rms_norm: bool | None = None,
        layer_norm: bool | None = None,
        swiglu: bool | None = None,
        geglu: bool | None = None,
        relu_squared: bool | None = None,
        cross_entropy: bool | None = None,
        fused_linear_cross_entropy: bool | None = None,
        tiled_mlp: bool | int | Literal["auto"] | None = None,
    ) -> Applied: ...


@functools.cache
def family_function(name: str) -> FamilyFunction:
    overrides.check_family(name)

    def apply(*, model: PreTrainedModel | None = None, **options: Any) -> Applied:
        if model is None:
            return apply_to_family(name, **options)
        found, family = family_of(type(inner_model(model))), overrides.family_name(family_modeling(name).__name__)
        if found != family:
            raise ValueError(f"model is a {found}, not a {family}: use apply_liger_kernel")
        return apply_liger_kernel(model, **options)

    options = (*overrides.SWITCHES, *overrides.OPTIONS, "model")
    keywords = [inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=None) for option in options]
    apply.__name__ = apply.__qualname__ = f"apply_liger_kernel_to_{name}"
    apply.__doc__ = f"""Patch `model`, or the classes of {name} if it is None, before or after models are built.

    `revert_liger_kernel(model)` or `revert_liger_kernel("{name}")` undoes the patch.

    Args:
        rope, rms_norm, layer_norm, swiglu, geglu, relu_squared: switches of the layers. None: on for those that the
            model or family has. True requires that it has them; False leaves them alone.
        cross_entropy: the loss on logits. None: off. It excludes `fused_linear_cross_entropy`.
        fused_linear_cross_entropy: the loss without logits. None: on if the head allows it.
        logits_budget: most bytes of logits in memory: a number, or a string such as "512MiB". None: automatic.
        tiled_mlp: run the gated MLPs in tiles of tokens: see `apply_liger_kernel`. None: off.
        model: a transformers model of this family, maybe wrapped (DDP, PEFT). None: all models of its classes.

    Returns:
        An `Applied`, which says what is patched, and what is left alone and why.

    Raises:
        TypeError: a switch is unknown, or no bool or None, or `model` contains no transformers model.
        ValueError: the model is of another family, a switch that is True matches nothing, or nothing matches at all.
    """
    vars(apply)["__signature__"] = inspect.Signature(keywords, return_annotation=Applied)
    return apply


def register_layer(cls: type[nn.Module], layer: Layer, **names: str) -> None:
    """Let `layer` serve a class unknown to `apply_liger_kernel`.

    Compares both in each patched model, and here if a module can be built. Serves subclasses without own code too.

    Args:
        cls: a module class. The layer's method, `forward` unless it names another, takes the layer's inputs.
        layer: which kernel runs and which attributes of the module it reads: one of `layers.py`, or a `Layer` of your
            own.
        **names: the class's names of the layer's attributes, where they differ.

    Raises:
        TypeError: `cls` is no class of modules, or `layer` no `Layer`.
        ValueError: the layer has no such attribute or switch, takes other inputs than the class's method, or computes
            something else.

    >>> import torch
    >>> from liger_chunked.integrations.transformers.layers import RMS_NORM
    >>> class Norm(torch.nn.Module):
    ...     def __init__(self, size=8):
    ...         super().__init__()
    ...         self.scale, self.eps = torch.nn.Parameter(torch.ones(size)), 1e-6
    ...
    ...     def forward(self, x):
    ...         return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=self.eps) * self.scale
    >>> register_layer(Norm, RMS_NORM, weight="scale")
    """
    if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
        raise TypeError(f"cls must be a class of modules, got {shown(cls)}")
    if not isinstance(layer, Layer):
        raise TypeError(f"layer must be a Layer, such as layers.RMS_NORM, got {shown(layer)}")
    switches = list(overrides.LAYER_SWITCHES)
    if layer.switch not in (None, *switches):
        raise ValueError(f"the switch of a Layer must be one of {switches}, got {layer.switch!r}")
    if layer.switch is None and layer.attributes[:1] != ("act_fn",):
        raise ValueError(
            f"give the Layer a switch, one of {switches}: without one its first attribute must be act_fn, the "
            f"activation, and it reads {list(layer.attributes)}"
        )
    if unknown := sorted(names.keys() - set(layer.attributes)):
        raise ValueError(f"the layer reads {list(layer.attributes)}, not {unknown}")
    if len(inspect.signature(getattr(cls, layer.method, cls.forward)).parameters) != 1 + layer.inputs:
        tensors = "one tensor" if layer.inputs == 1 else f"{layer.inputs} tensors"
        raise ValueError(f"{layer.method} of {cls.__name__} must take {tensors}, as the Layer does")
    binding = overrides.bound(layer, names)
    with contextlib.suppress(verify.Incomparable):
        verify.check_layer(binding, verify.built(binding, cls, sys.modules[cls.__module__]), cls)
    overrides.register(cls, binding)


class _Patched:
    # transformers looks the name of the class that builds up in a checkpoint's `auto_map`.
    _stock: Any

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *model_args: Any, **kwargs: Any
    ) -> GenerativeModel:
        return _built_patched(cls._stock.from_pretrained, pretrained_model_name_or_path, *model_args, **kwargs)

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> GenerativeModel:
        return _built_patched(cls._stock.from_config, *args, **kwargs)


class AutoLigerKernelForCausalLM(_Patched, AutoModelForCausalLM):
    """`AutoModelForCausalLM` whose models are patched.

    `from_pretrained` and `from_config` take the arguments of transformers' class and, as more keywords, those of
    `apply_liger_kernel`, and return what transformers' class does, after `apply_liger_kernel`.

        model = AutoLigerKernelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, rope=False)
    """

    _stock = AutoModelForCausalLM


class AutoLigerKernelForImageTextToText(_Patched, AutoModelForImageTextToText):
    """`AutoModelForImageTextToText` whose models are patched.

    `from_pretrained` and `from_config` take the arguments of transformers' class and, as more keywords, those of
    `apply_liger_kernel`, and return what transformers' class does, after `apply_liger_kernel`.
    """

    _stock = AutoModelForImageTextToText


def _built_patched(build: Callable[..., GenerativeModel], *args: Any, **kwargs: Any) -> GenerativeModel:
    options = {name: kwargs.pop(name) for name in (*overrides.OPTIONS, *overrides.SWITCHES) if name in kwargs}
    model = build(*args, **kwargs)
    apply_liger_kernel(model, **options)
    return model
