"""The head inside its model: code that runs where `lm_head` and the loss would, on every call of `model.forward`.

`attach_head(model)` teaches a model one keyword, `head_fn`:

    model(input_ids, labels=labels, head_fn=fn)     # returns fn(head: Head, input: HeadInput), whatever that is

The backbone runs as ever, then `fn` instead of the projection. All of it happens inside `model.forward`, and `fn`
inside the forward of `lm_head` itself, so that what hooks either of them (DDP, FSDP, ZeRO, `device_map`) has done its
work: the parameters that `fn` sees are whole, and their gradients are reduced as always. Everything is looked up on the
call, as PEFT and FSDP replace modules after a model was patched.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from liger_chunked.integrations.transformers.experts import balance_of
from liger_chunked.integrations.transformers.head_check import HeadFacts, Subject, check_head, check_loss
from liger_chunked.integrations.transformers.patches import Patches, forward_slot
from liger_chunked.types import Head, LogitOptions


@dataclass(frozen=True)
class HeadInput:
    """What reaches the head of a model, and what its loss was called with.

    - `hidden_states` (B, T, H): of the backbone, those that `logits_to_keep` keeps
    - `options`: how this model transforms its logits, and the label that is ignored
    - `outputs`: what the backbone returned
    - `labels`, `shift_labels` (B, T), `num_items_in_batch`: as `model.forward` got them, None where it did not
    - `aux_loss` (): the load-balancing loss of a mixture of experts, not weighted; None where no router logits were
      asked for, by the call or the config, or where the model's own loss has no such term
    - `aux_loss_coef`: the weight of `aux_loss` in the model's own loss
    """

    hidden_states: Tensor
    options: LogitOptions
    outputs: ModelOutput
    labels: Tensor | None = None
    shift_labels: Tensor | None = None
    num_items_in_batch: int | Tensor | None = None
    aux_loss: Tensor | None = None
    aux_loss_coef: float = 0.0

    @property
    def target(self) -> Tensor:
        """(B, T) what each position predicts: `shift_labels`, otherwise the label of the next position.

        Raises:
            ValueError: the call had no labels.
        """
        target = self.shift_labels
        if target is None:
            if self.labels is None:
                raise ValueError("this head_fn needs a target: pass labels= or shift_labels= to the model")
            target = F.pad(self.labels[..., 1:], (0, 1), value=self.options.ignore_index)
        return target.to(self.hidden_states.device)


HeadFn = Callable[[Head, HeadInput], Any]

# Fields of a config, or of a model, that transform logits in some models. They guard a compiled graph.
_LOGIT_NAMES = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "lm_head_multiplier",
    "logits_mup_width_multiplier",
)
STOCK = "_liger_stock_forward"  # of a forward of ours: the one that it stands in for
_CHECKED = "_liger_checked_heads"  # of a model
_CHECKED_MODELS: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def _numbers(attributes: dict[str, Any]) -> dict[str, Any]:
    """Those that are a number or None."""
    return {name: x for name, x in attributes.items() if x is None or type(x) in (int, float)}


def _named(model: PreTrainedModel) -> tuple[Any, ...]:
    owners = (model, model.config, model.config.get_text_config())
    return tuple(getattr(owner, name, None) for owner in owners for name in _LOGIT_NAMES)


class _CheckedHead:
    """The facts about one model's head, and the forward and the config that they hold for."""

    def __init__(self, subject: Subject) -> None:
        model = subject.model
        self.forward = subject.forward
        self.facts = check_head(subject)
        self.has_causal_loss = False
        self.config, self.text_config = model.config, model.config.get_text_config()
        self._fields = [(config, dict(vars(config))) for config in (self.config, self.text_config)]
        self._own = _numbers(vars(model))
        self._named = _named(model)

    def holds_for(self, model: PreTrainedModel) -> bool:
        """Whether no number of the config, or of the model itself, has changed since the check."""
        if torch.compiler.is_compiling():
            return self._named == _named(model)
        if model.config is not self.config:
            return False
        for i, (config, before) in enumerate(self._fields):
            if vars(config) != before:
                if _numbers(vars(config)) != _numbers(before):
                    return False
                self._fields[i] = (config, dict(vars(config)))
        own = vars(model)
        return all(own.get(name, _CHECKED) == x for name, x in self._own.items())


class _CheckedHeads:
    """An attribute of a model. Copies of the model have an empty one, and are checked anew."""

    def __init__(self) -> None:
        self.heads: list[_CheckedHead] = []

    def __reduce__(self) -> Any:
        return (_CheckedHeads, ())


def _subject(model: PreTrainedModel, forward: Callable[..., Any]) -> Subject:
    return Subject(model, forward, backbone_of(model), projections(model)[0])


def _known(model: PreTrainedModel, forward: Callable[..., Any]) -> _CheckedHead | None:
    known = vars(model).get(_CHECKED)
    if known is not None:
        for checked in known.heads:
            if checked.forward is forward:
                return checked if checked.holds_for(model) else None
    return None


def _checked(model: PreTrainedModel, forward: Callable[..., Any], *, loss: bool) -> _CheckedHead:
    """The checked head of a model; with `loss`, its loss has been checked too."""
    checked = _known(model, forward)
    if checked is None:
        checked = _CheckedHead(_subject(model, forward))
        heads = vars(model).setdefault(_CHECKED, _CheckedHeads()).heads
        heads[:] = [head for head in heads if head.forward is not forward] + [checked]
        _CHECKED_MODELS.add(model)
    if loss and not checked.has_causal_loss:
        check_loss(_subject(model, forward))
        checked.has_causal_loss = True
    return checked


def _constant_while_tracing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo call `function` once and take its result for a constant.

    Before torch 2.13 Dynamo cannot pass a module to such a function, so the graph breaks there.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        return torch.compiler.assume_constant_result(function)
    reason = "the head of a model is checked once: call logit_options(model) before a step with fullgraph=True"
    return torch.compiler.disable(function, reason=reason)


@_constant_while_tracing
def _facts_while_tracing(
    model: PreTrainedModel, forward: Callable[..., Any], loss: bool, guards: tuple[Any, ...]
) -> HeadFacts:
    """`guards`: the graph is good for these values alone."""
    return _checked(model, forward, loss=loss).facts


def head_facts(
    model: PreTrainedModel, forward: Callable[..., Any] | None = None, *, causal_loss: bool = False
) -> HeadFacts:
    """What was found out about the head of a model, now or before.

    Args:
        forward: the function that makes its logits; None for that of its class.
        causal_loss: also check that this function computes the causal loss of its logits.

    Raises:
        ValueError: the logits of this model are not `transform(lm_head(last_hidden_state))`, or its loss is another.
    """
    if forward is None:
        of_class = type(model).forward
        forward = getattr(of_class, STOCK, of_class)
    checked = _known(model, forward)
    if checked is not None and (checked.has_causal_loss or not causal_loss):
        return checked.facts
    if torch.compiler.is_compiling():
        return _facts_while_tracing(model, forward, causal_loss, _named(model))
    return _checked(model, forward, loss=causal_loss).facts


def forget_facts(owner: PreTrainedModel | type[PreTrainedModel]) -> None:
    """Of one model, or of every model of a class."""
    for model in list(_CHECKED_MODELS):
        if model is owner or (isinstance(owner, type) and isinstance(model, owner)):
            vars(model).pop(_CHECKED, None)
            _CHECKED_MODELS.discard(model)


def logit_options(model: PreTrainedModel, *, ignore_index: int = -100) -> LogitOptions:
    """The transform that `model.forward` applies to its logits.

    It is measured: the model's forward runs once on stand-ins for its backbone and its `lm_head`. Numbers of the config
    name it in most models (`final_logit_softcapping`, `logit_scale`, `logits_scaling`), but some multimodal models
    ignore those of their text config. A factor between backbone and `lm_head` is part of `logit_scale`.

    Args:
        model: a transformers model with an `lm_head`.
        ignore_index: the label of tokens that no loss counts.

    Raises:
        ValueError: its logits are not such a transform of `lm_head(last_hidden_state)`; the message names the
            difference.

    >>> from transformers import GraniteConfig, GraniteForCausalLM
    >>> sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    >>> model = GraniteForCausalLM(GraniteConfig(**sizes, num_hidden_layers=1, logits_scaling=8.0))
    >>> logit_options(model).logit_scale
    0.125
    """
    return _with_ignore_index(head_facts(model).options, ignore_index)


def _with_ignore_index(options: LogitOptions, ignore_index: int) -> LogitOptions:
    return options if ignore_index == options.ignore_index else replace(options, ignore_index=ignore_index)


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside DDP, FSDP, DeepSpeed, `torch.compile` and PEFT.

    Raises:
        TypeError: there is none.
    """
    while not isinstance(model, PreTrainedModel):
        if isinstance(inner := getattr(model, "_orig_mod", None) or getattr(model, "module", None), nn.Module):
            model = inner
        elif callable(get_base_model := getattr(model, "get_base_model", None)):
            model = get_base_model()
        else:
            raise TypeError(f"model must be, or wrap, a transformers PreTrainedModel, got {type(model).__name__}")
    return model


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head.

    Raises:
        ValueError: the model has none.
    """
    # A base_model_prefix that names no attribute (MllamaForCausalLM's) makes base_model the model itself.
    backbone = model.base_model if model.base_model is not model else getattr(model, "model", None)
    if backbone is None:
        raise ValueError(f"{type(model).__name__} is not a backbone under an lm_head")
    return backbone


def _names(kind: type) -> set[str]:
    """Of a class and its bases: FSDP makes a subclass, under a name of its own, of what it shards."""
    return {base.__name__ for base in kind.__mro__}


# What may lie around a Linear and does nothing but call it.
_TRANSPARENT = {"FullyShardedDataParallel", "ModulesToSaveWrapper", "ModuleDict"}


def projections(model: PreTrainedModel) -> list[nn.Linear]:
    """The Linear modules of which `lm_head` calls one, and adds nothing to it.

    Raises:
        ValueError: there is no `lm_head`, or it computes something else than `x @ weight.T + bias`.
    """
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        raise ValueError(f"{type(model).__name__} is not a backbone under an lm_head")
    linear = [m for m in lm_head.modules() if isinstance(m, nn.Linear) and type(m).forward is nn.Linear.forward]
    others = [m for m in lm_head.modules() if m not in linear and not _TRANSPARENT & _names(type(m))]
    if parametrized := next((m for m in linear if is_parametrized(m)), None):
        raise ValueError(_refusal_of_head(parametrized))
    if others or not linear:
        raise ValueError(_refusal_of_head((others or [lm_head])[0]))
    return linear


def _refusal_of_head(module: nn.Module) -> str:
    """Why a fused loss cannot read the weight of `lm_head`, and what to do, by what `lm_head` is."""
    kind, names = type(module), _names(type(module))
    found = f"lm_head is computed by {kind.__module__}.{kind.__name__}"
    if "LoraLayer" in names:
        return (
            f"{found}: a fused loss reads its weight and would ignore the low-rank term. Take lm_head out of "
            "target_modules; to train it all the same, name it in modules_to_save"
        )
    if "TrainableTokensWrapper" in names:
        return (
            f"{found}: a fused loss reads its weight and would ignore the rows of trainable_token_indices. Untie the "
            "head from the embeddings (tie_word_embeddings=False), or train both whole (modules_to_save)"
        )
    if "BaseTunerLayer" in names:
        return (
            f"{found}: a fused loss reads its weight and would ignore the adapter. Take lm_head out of the adapter's "
            "target_modules"
        )
    if is_parametrized(module):
        return (
            f"{found}, which is parametrized: a fused loss reads a weight that is a plain parameter. Call "
            "torch.nn.utils.parametrize.remove_parametrizations on lm_head first"
        )
    if isinstance(module, nn.Linear) or _is_quantized(module):
        return (
            f"{found}: a fused loss needs a weight in floating point, multiplied by torch.nn.Linear.forward. Leave "
            "lm_head out of quantization (llm_int8_skip_modules, modules_to_not_convert), or make it a torch.nn.Linear"
        )
    return (
        f"{found}: a fused loss needs a single torch.nn.Linear. Fold lm_head into one, or train with the logits of "
        "the model's own forward"
    )


def _is_quantized(module: nn.Module) -> bool:
    return any("quant" in base.__module__ or "bitsandbytes" in base.__module__ for base in type(module).__mro__)


def _whole(parameter: Any) -> Any:
    # Tensor parallelism shards the vocabulary; every rank holds all rows of the input, so the gradient is a slice.
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def arguments(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `model.forward`, all by name: its backbone may order them otherwise."""
    if not args:
        return kwargs
    _, *names = inspect.signature(type(model).forward).parameters
    return dict(zip(names, args, strict=False)) | kwargs


def run_backbone(model: PreTrainedModel, forward: Callable[..., Any] | None = None, /, **kwargs: Any) -> HeadInput:
    """The backbone on the arguments of `model.forward`, as `model.forward` itself would run it.

    `forward` is the function whose place this takes; None for that of the model's class.

    The arguments that belong to head and loss do not reach it: `shift_labels`, `num_items_in_batch`, `ignore_index`,
    `logits_to_keep`, and `labels`, unless `model.forward` hands these to its backbone.
    """
    facts = head_facts(model, forward)
    labels, shift_labels = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
    num_items_in_batch = _at_least_one(kwargs.pop("num_items_in_batch", None))
    logits_to_keep = kwargs.pop("logits_to_keep", 0)
    options = _with_ignore_index(facts.options, kwargs.pop("ignore_index", -100))
    balance = balance_of(model)
    if balance is not None and not balance.asked(model, kwargs.get("output_router_logits")):
        balance = None
    if balance is not None:
        if balance.refusal is not None:
            raise ValueError(
                f"the load-balancing loss of {type(model).__name__} cannot be computed: {balance.refusal}; pass "
                "output_router_logits=False, or set it so in the config, to train without it"
            )
        kwargs["output_router_logits"] = True
    kwargs.setdefault("use_cache", False)
    kwargs["return_dict"] = True
    for name in facts.dropped:
        kwargs.pop(name, None)
    for name, value in facts.constants:
        kwargs.setdefault(name, value)
    if facts.backbone_takes_labels:
        kwargs["labels"] = labels

    outputs = backbone_of(model)(**kwargs)
    aux_loss: Any = None
    aux_loss_coef = 0.0
    if balance is not None:
        aux_loss, aux_loss_coef = balance.loss(model, outputs, kwargs.get("attention_mask")), balance.coefficient(model)
    return HeadInput(
        hidden_states=_kept(outputs.last_hidden_state, logits_to_keep),
        options=options,
        outputs=outputs,
        labels=labels,
        shift_labels=shift_labels,
        num_items_in_batch=num_items_in_batch,
        aux_loss=aux_loss,
        aux_loss_coef=aux_loss_coef,
    )


def _at_least_one(num_items: int | Tensor | None) -> int | Tensor | None:
    """Losses take a tensor of 0 for 1, without a look at it. An int of 0 must do the same."""
    return max(num_items, 1) if isinstance(num_items, int) else num_items


def _kept(hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The positions that `logits_to_keep` names.

    An int keeps that many at the end (0: all), a tensor (K,) these positions of every sample, (B, K) its own of each.
    A boolean mask (B, T) keeps those that are True, as (N, H).
    """
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:] if logits_to_keep else hidden_states
    if logits_to_keep.ndim < 2:
        return hidden_states[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    return hidden_states.take_along_dim(logits_to_keep[..., None], dim=1)


def run_head(model: PreTrainedModel, input: HeadInput, head_fn: HeadFn) -> Any:
    """`head_fn(head, input)`, from within the forward of `lm_head`, where its parameters are whole.

    Raises:
        ValueError: `lm_head` is more than a weight and a bias, such as one with a LoRA adapter, or somebody's hook on
            it, or forward of it, expects logits.
    """
    lm_head = model.get_output_embeddings()
    if _is_bare(lm_head):
        return _at_projection(lm_head, input.hidden_states, input=input, head_fn=head_fn)
    return _run_inside(model, input, head_fn)


# Packages whose hooks gather, move, cast or count, and know outputs of any kind.
_FRAMEWORKS = {"torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "liger_chunked"}

# While one thread runs a head_fn inside an lm_head, others get logits from it, or wait to run theirs.
_RUNNING = threading.local()
_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def _running(head_fn: HeadFn | None) -> Iterator[None]:
    """Whether calls of `lm_head` by this thread run a head_fn; None for no."""
    before, _RUNNING.head_fn = getattr(_RUNNING, "head_fn", None), head_fn
    try:
        yield
    finally:
        _RUNNING.head_fn = before


def _refuse_editors_of_logits(lm_head: nn.Module, patches: Patches) -> None:
    """No logits exist for a hook on the output of `lm_head`, or for a forward that somebody has set on it.

    Hooks on its input run as ever. A forward hook sees the result of the fused loss; while `patches` last, one that
    edits it is an error.

    Raises:
        ValueError: a backward hook, or a forward that somebody has set.
    """
    for module in lm_head.modules():
        own = [("forward", vars(module).get(slot)) for slot in ("forward", "_old_forward")]
        own += [("backward hook", hook) for hook in vars(module)["_backward_hooks"].values()]
        own += [("backward pre-hook", hook) for hook in vars(module)["_backward_pre_hooks"].values()]
        for kind, reader in own:
            if reader is not None and _package(reader) not in _FRAMEWORKS:
                raise _expects_logits(kind, reader)
        hooks = vars(module)["_forward_hooks"]
        if any(_package(hook) not in _FRAMEWORKS for hook in hooks.values()):
            guarded = {
                key: hook if _package(hook) in _FRAMEWORKS else functools.partial(_run_observer, hook)
                for key, hook in hooks.items()
            }
            patches.set(module, "_forward_hooks", type(hooks)(guarded))


def _run_observer(hook: Callable[..., Any], module: nn.Module, args: Any, *kwargs_and_output: Any) -> Any:
    """A forward hook that may look at the output, and not change it unless the output is logits.

    Raises:
        ValueError: it returns another output, edits tensors of this one, or cannot use it.
    """
    if getattr(_RUNNING, "head_fn", None) is None:
        return hook(module, args, *kwargs_and_output)
    output = kwargs_and_output[-1]
    versions = _versions(output)
    try:
        result = hook(module, args, *kwargs_and_output)
    except Exception as error:
        raise _expects_logits("forward hook", hook) from error
    if versions != _versions(output) or not (result is None or result is output):
        raise _expects_logits("forward hook", hook)
    return None


def _versions(output: Any) -> list[int]:
    return [x._version for x in tree_leaves(output) if isinstance(x, Tensor) and not x.is_inference()]


def _expects_logits(kind: str, function: Any) -> ValueError:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return ValueError(
        f"the {kind} {name!r} of lm_head expects logits, and a fused loss builds none. Remove it, or run the model's "
        "own forward (skip_logits=False, or without head_fn)"
    )


def _package(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return (getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]


def _is_bare(lm_head: nn.Module | None) -> bool:
    """Whether nothing but `nn.Linear.forward` would run: then a compiler need not stop before the head."""
    if type(lm_head) is not nn.Linear:
        return False
    hooks = (lm_head._forward_pre_hooks, lm_head._forward_hooks, lm_head._backward_pre_hooks, lm_head._backward_hooks)
    return not any(hooks) and "forward" not in lm_head.__dict__


def _at_projection(projection: nn.Linear, hidden_states: Tensor, *, input: HeadInput, head_fn: HeadFn) -> Any:
    head = Head(_whole(projection.weight), _whole(projection.bias))
    device, dtype = head.weight.device, hidden_states.dtype
    if dtype != head.weight.dtype and not torch.is_autocast_enabled(device.type):
        # A float32 head on a bfloat16 body. The other way round would round the hidden states: the loss refuses it.
        dtype = torch.promote_types(dtype, head.weight.dtype)
    return head_fn(head, replace(input, hidden_states=hidden_states.to(device, dtype)))


def _in_place_of(projection: nn.Linear, hidden_states: Tensor, *, input: HeadInput, head_fn: HeadFn) -> Any:
    """The forward of a projection while `lm_head` runs `head_fn`."""
    if getattr(_RUNNING, "head_fn", None) is not head_fn:  # another thread, or `head_fn` itself, asks for logits
        return nn.Linear.forward(projection, hidden_states)
    with _running(None):
        return _at_projection(projection, hidden_states, input=input, head_fn=head_fn)


@torch.compiler.disable
def _run_inside(model: PreTrainedModel, input: HeadInput, head_fn: HeadFn) -> Any:
    lm_head = model.get_output_embeddings()
    patches = Patches()
    with _LOCKS.setdefault(lm_head, threading.RLock()), _running(head_fn):
        try:
            _refuse_editors_of_logits(lm_head, patches)
            for projection in projections(model):
                forward = functools.partial(_in_place_of, projection, input=input, head_fn=head_fn)
                patches.set(projection, forward_slot(projection), forward)
            return lm_head(input.hidden_states)
        finally:
            patches.undo()
