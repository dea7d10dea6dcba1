"""Patch and restore a model: its modules get a subclass of their class (`patched_class.py`, `forward.py`)."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from liger_chunked import versions
from liger_chunked.deferred.code import own_forward
from liger_chunked.deferred.swap import set_patch, stock_class
from liger_chunked.integrations.transformers import overrides
from liger_chunked.integrations.transformers.attach import fuse, rebind, remove_trainers_head
from liger_chunked.integrations.transformers.detect import inner_model
from liger_chunked.integrations.transformers.forward import Fusion
from liger_chunked.integrations.transformers.found import found_in, owner_of
from liger_chunked.integrations.transformers.layers import Layer, causal_lm_loss, has_causal_loss
from liger_chunked.integrations.transformers.overrides import family_of
from liger_chunked.integrations.transformers.parallel import ParallelPatch
from liger_chunked.integrations.transformers.patched_class import LayerPatch, RopePatch, has_our_code
from liger_chunked.integrations.transformers.report import APPLIED, FUSED, Applied
from liger_chunked.integrations.transformers.source import rotary_functions
from liger_chunked.layers.tiled import Tokens, check_tokens
from liger_chunked.types import budget_bytes, shown

if TYPE_CHECKING:
    from transformers.models.auto.modeling_auto import _BaseModelWithGenerate as GenerativeModel

_LOGGER = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def lists_switches(function: Callable[P, T]) -> Callable[P, T]:
    """Make a keyword that `function` lacks raise the TypeError that lists the switches."""
    known = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        overrides.check_switches(kwargs.keys() - known)
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
    parallel_linear: bool | None = None,
    cross_entropy: bool | None = None,
    fused_linear_cross_entropy: bool | None = None,
    tiled_mlp: bool | int | Literal["auto"] | None = None,
    defer_in_evaluation: bool = True,
) -> Applied:
    """Patch the base kernels and the fused loss into one model, in place.

    The model's own forward runs. In training, and without gradients, its head returns `DeferredLogits`, and the loss of
    that forward is fused. `generate` gets real logits. A call takes three more keywords:

    - `skip_logits`: True defers in each mode, and returns `logits=None`; False gets real logits
    - `return_token_accuracy`: adds `token_accuracy` to the output of a fused step
    - `head_fn`: a function of head and hidden states that replaces the logits and the loss; see `attach_head`

    No other model changes, also by `rope`: the model's own layers call another rotary function. The result says what is
    left alone, and why.

    Args:
        model: a transformers model, maybe wrapped (DDP, PEFT).
        logits_budget: most bytes of logits in memory: a number, or a string such as "512MiB". None: automatic.
        rope, rms_norm, layer_norm, swiglu, geglu, relu_squared: switches of the layers. None: on for those that the
            model has. True requires that it has them; False leaves them alone.
        parallel_linear: compute the linear layers that `parallelize_module` or `tp_plan` has split by columns or by
            rows on each rank's plain tensors, instead of DTensors. None: on if the model has such layers.
        cross_entropy: the loss on logits, without a float32 copy of them. None: off. It excludes
            `fused_linear_cross_entropy`.
        fused_linear_cross_entropy: the loss, on chunks of logits. None: on if the model's head allows it.
        tiled_mlp: run the gated MLPs in tiles of tokens, for long sequences (`docs/memory.md`): a backward holds
            the activations of one tile. An int: the most tokens of a tile. True: max(4096, 2·H). "auto": so, where a
            sequence's activations take more than twice the memory. None or False: off. Experts are never tiled.
        defer_in_evaluation: whether calls in evaluation mode that record no gradient defer their logits too.

    Returns:
        An `Applied`. `print` shows it; `replaced` counts the patched classes by switch, and `left` maps what is left
        alone to the reason.

    Raises:
        TypeError: an unknown switch, one that is no bool or None, or no transformers model.
        ValueError: a switch that is True matches nothing, nothing matches at all, both losses are asked for, the model
            runs hub kernels, or `logits_budget` or `tiled_mlp` is invalid.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from liger_chunked import revert_liger_kernel
    >>> sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))
    >>> print(apply_liger_kernel(model, rope=False))
    Patched in llama:
      rms_norm: LlamaRMSNorm x 5
      swiglu: LlamaMLP x 2
      fused_linear_cross_entropy: LlamaForCausalLM
    Left alone:
      apply_rotary_pos_emb: rope is off
    >>> ids = torch.randint(64, (1, 8))
    >>> output = model.train()(ids, labels=ids)
    >>> output.loss.shape, output.logits
    (torch.Size([]), DeferredLogits((1, 8, 64), torch.float32, cpu, not computed))
    >>> revert_liger_kernel(model)
    """
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
        overrides.PARALLEL: parallel_linear,
        "cross_entropy": cross_entropy,
        FUSED: fused_linear_cross_entropy,
    }
    options = {
        "logits_budget": logits_budget, overrides.TILED: tiled_mlp, "defer_in_evaluation": defer_in_evaluation,
    }  # fmt: skip
    check_options(switches | options)
    tokens: Tokens = False if tiled_mlp is None else tiled_mlp
    _warn_of_newer()
    found = found_in(inner)
    on = found.chosen(family, switches)
    found.check_tiles(family, on, tokens)
    reason = found.left.get(owner_of(inner).__name__)
    if reason and FUSED not in found.switches and fused_linear_cross_entropy is None:
        _LOGGER.warning("%s trains with logits: %s", type(inner).__name__, reason)
    _revert(inner)
    applied = Applied(family, left=found.left)
    for name in on:
        for switch, module, binding in found.layers:
            if switch == name:
                in_tiles = binding.layer.is_mlp or binding.layer.is_norm
                set_patch(module, LayerPatch(binding, tokens if in_tiles else False))
                applied.count(switch, owner_of(module).__name__)
                if binding.everywhere:
                    applied.everywhere.add(owner_of(module).__name__)
                if tokens is not False and binding.layer.is_mlp:
                    applied.count(overrides.TILED, owner_of(module).__name__)
    for module in found.parallel if overrides.PARALLEL in on else ():
        set_patch(module, ParallelPatch())
        applied.count(overrides.PARALLEL, owner_of(module).__name__)
        applied.everywhere.add(owner_of(module).__name__)
    if "rope" in on:
        _rotate(inner, found.ropes)
        applied.ropes = found.ropes
        for _, name in found.ropes:
            applied.count("rope", name)
    if "cross_entropy" in on:
        vars(inner)["_loss_function"] = causal_lm_loss
        applied.count("cross_entropy", "loss_function")
    if FUSED in on:
        fuse(inner, Fusion(budget_bytes(logits_budget), defer_in_evaluation))
        rebind(model, inner)
        applied.count(FUSED, owner_of(inner).__name__)
    vars(inner)[APPLIED] = applied
    return applied


@functools.cache
def _warn_of_newer() -> None:
    """Say once that stock code, which classes are compared with, may be other than what the tests saw."""
    if versions.release(transformers.__version__)[:2] > versions.release(versions.NEWEST_COMPARED):
        _LOGGER.warning(
            "transformers %s is newer than %s, whose layers were compared with the kernels that replace them: run "
            "liger_chunked.testing.check_model(model) once",
            transformers.__version__, versions.NEWEST_COMPARED,
        )  # fmt: skip


def check_options(options: dict[str, Any]) -> None:
    """Raise before the first patch if a switch is no bool or None, both losses are on, or an option is invalid."""
    for switch in options.keys() & {*overrides.SWITCHES}:
        if not (options[switch] is None or isinstance(options[switch], bool)):
            raise TypeError(f"{switch} must be True, False or None, got {options[switch]!r}")
    if all(options.get(switch) for switch in overrides.HEAD_SWITCHES):
        raise ValueError("cross_entropy works on logits and fused_linear_cross_entropy builds none: choose one")
    if not isinstance(in_evaluation := options.get("defer_in_evaluation", True), bool):
        raise TypeError(f"defer_in_evaluation must be True or False, got {in_evaluation!r}")
    budget_bytes(options.get("logits_budget"))
    if (tokens := options.get(overrides.TILED)) is not None:
        check_tokens(overrides.TILED, tokens)


def _rotate(model: nn.Module, functions: tuple[tuple[str, str], ...]) -> None:
    """Let the layers of a model call rotary functions of ours in place of these."""
    for module in model.modules():
        read = rotary_functions(stock_class(type(module)))
        called = tuple(function for function in functions if function in read)
        if called and own_forward(module) is None:
            set_patch(module, RopePatch(called))


def revert_model(model: nn.Module) -> None:
    """Undo `apply_liger_kernel(model)`."""
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
    vars(inner).pop(APPLIED, None)


def register_layer(cls: type[nn.Module], layer: Layer, **names: str) -> None:
    """Let `layer` serve a class whose code `apply_liger_kernel` does not recognise.

    That both compute the same is yours to know, `check_model` compares a model with it. Serves subclasses without own
    code too. The layer runs on every device and dtype, also where no kernel does.

    Args:
        cls: a module class. The layer's method, `forward` unless it names another, takes the layer's inputs.
        layer: which kernel runs and which attributes of the module it reads: one of `layers.py`, or a `Layer` of your
            own.
        **names: the class's names of the layer's attributes, where they differ.

    Raises:
        TypeError: `cls` is no class of modules, or `layer` no `Layer`.
        ValueError: the layer has no such attribute or switch, or takes other inputs than the class's method.

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
    overrides.register(cls, overrides.bound(layer, names))


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
