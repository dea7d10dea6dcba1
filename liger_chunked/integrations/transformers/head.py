"""The fused head: the model's backbone, then our code in place of `lm_head` and loss.

Our code runs inside the forwards of model and `lm_head`, with the hooks of DDP, FSDP, ZeRO and `device_map`. Each call
looks modules up again, because PEFT and FSDP may replace them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput, can_return_tuple

from liger_chunked.dtensor import any_dtensor, distributed_like, sharded_on_rows
from liger_chunked.integrations.transformers import detect, head_check, quantized
from liger_chunked.integrations.transformers.detect import STOCK, Projection, foreign_code, forward_slot
from liger_chunked.integrations.transformers.head_check import HeadFacts
from liger_chunked.integrations.transformers.layers import causal_lm_loss
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss
from liger_chunked.types import AdaptedWeight, Head, LogitOptions

_LOGGER = logging.getLogger(__name__)

_LEFT = "_liger_left"  # attribute of a model of a patched class with an unfit head
STATE = "_liger_forward"  # attribute of a model or class


@dataclass(frozen=True)
class HeadInput:
    """A head's input, and its loss's arguments.

    - `hidden_states` (B, T, H), which `logits_to_keep` selects
    - `options`: transform of the logits, and ignored label
    - `outputs`: the backbone's
    - `labels`, `shift_labels` (B, T), `num_items_in_batch`: arguments of `model.forward`
    - `aux_loss` (), `aux_loss_coef`: the load-balancing loss and its weight
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
        """(B, T): `shift_labels`, or else the next labels."""
        target = self.shift_labels
        if target is None:
            if self.labels is None:
                raise ValueError("this head_fn needs a target: pass labels= or shift_labels= to the model")
            target = F.pad(self.labels[..., 1:], (0, 1), value=self.options.ignore_index)
        return target.to(self.hidden_states.device)

    def loss(self, loss: nn.Module, head: Head, **tensors: Any) -> Any:
        """Return the value of `loss`, at the model's softcap and scale; `tensors` are more arguments.

        Raises ValueError if the loss has different ones.

        >>> def head_fn(head, input):
        ...     return input.loss(LigerFusedLinearCrossEntropyLoss(), head)
        """
        own = fitted(loss, self.options)
        return own(head.weight, self.hidden_states, target=self.target, bias=head.bias, **tensors)


TRANSFORM = ("softcap", "logit_scale")


def with_transform(own: LogitOptions, model: LogitOptions, names: tuple[str, ...] = TRANSFORM) -> LogitOptions:
    """Return a loss's options with the model's; they must agree."""
    plain = LogitOptions()
    for name in names:
        given, of_model = getattr(own, name), getattr(model, name)
        if given not in (getattr(plain, name), of_model):
            raise ValueError(f"the loss has {name}={given}, but the model is trained with {name}={of_model}")
    return dataclasses.replace(own, **{name: getattr(model, name) for name in names})


def fitted(loss: nn.Module, options: LogitOptions, names: tuple[str, ...] = TRANSFORM) -> Any:
    own: Any = copy.copy(loss)
    own.options = with_transform(own.options, options, names)
    return own


HeadFn = Callable[[Head, HeadInput], Any]


@dataclass(frozen=True)
class Fusion:
    """Settings of the fused loss. If `required`, an unfit model raises; otherwise it runs its own forward."""

    logits_budget: int | None = None
    required: bool = True


def forward(
    model: PreTrainedModel, stock: Callable[..., Any], *args: Any, head_fn: HeadFn | None = None, **kwargs: Any
) -> Any:
    """Run `stock`, the model's forward, or instead `head_fn` or the fused loss."""
    if args:  # the backbone's order may differ
        _, *names = inspect.signature(type(model).forward).parameters
        kwargs = dict(zip(names, args, strict=False)) | kwargs
    if head_fn is not None:
        return run_head(model, run_backbone(model, **kwargs), head_fn)
    states = (vars(model).get(STATE), getattr(type(model), STATE, None))
    fusion = next((state.fusion for state in states if state is not None and state.fusion is not None), None)
    if fusion is not None:
        skip_logits = kwargs.pop("skip_logits", None)
        token_accuracy = kwargs.pop("return_token_accuracy", False)
        if _fuses(model, skip_logits, kwargs):
            # A subclass may call a patched forward.
            of_class = stock.func if isinstance(stock, functools.partial) else None
            if _serves(model, of_class, fusion, skip_logits, kwargs):
                return _without_logits(model, of_class, fusion, token_accuracy, **kwargs)
    return stock(**kwargs)


def _serves(model: Any, forward: Any, fusion: Fusion, skip_logits: bool | None, kwargs: dict[str, Any]) -> bool:
    required = fusion.required or bool(skip_logits)
    if not required and vars(model).get(_LEFT):
        return False
    try:
        facts = head_facts(model, forward, causal_loss=True)
    except ValueError as refusal:
        if required:
            raise
        _leave_alone(model, str(refusal))
        return False
    used = [name for name in facts.of_forward if kwargs.get(name) is not None]
    if used and skip_logits:
        raise ValueError(
            f"skip_logits=True cannot take {', '.join(used)}: the forward of {type(model).__name__} may use this after "
            "its backbone. Leave skip_logits out, and the model's own forward runs"
        )
    return not used


@torch.compiler.disable
def _leave_alone(model: PreTrainedModel, reason: str) -> None:
    vars(model)[_LEFT] = True
    _LOGGER.warning("%s trains with logits: %s", type(model).__name__, reason)


def has_causal_loss(model: PreTrainedModel) -> bool:
    return model.loss_function in (ForCausalLMLoss, causal_lm_loss)


def _fuses(model: PreTrainedModel, skip_logits: bool | None, kwargs: dict[str, Any]) -> bool:
    labelled = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
    if skip_logits and not labelled:
        raise ValueError("skip_logits=True needs labels= or shift_labels=: there is nothing else to return")
    wanted = model.training if skip_logits is None else skip_logits
    if labelled and skip_logits and not has_causal_loss(model):
        raise ValueError(
            f"skip_logits=True is the causal loss, but the loss_function of this model is {model.loss_function}: leave "
            "skip_logits out, and that function gets its logits"
        )
    return bool(labelled and wanted and has_causal_loss(model))


@can_return_tuple
def _without_logits(
    model: PreTrainedModel, forward: Callable[..., Any] | None, fusion: Fusion, token_accuracy: bool, **kwargs: Any
) -> ModelOutput:
    input = run_backbone(model, forward, **kwargs)

    loss, accuracy = run_head(model, input, _CrossEntropy(fusion.logits_budget, bool(token_accuracy)))
    output: Any = head_facts(model, forward).output
    shared = {name: x for name, x in input.outputs.items() if name in output.__dataclass_fields__}
    if input.aux_loss is not None:
        loss = loss + input.aux_loss_coef * input.aux_loss.to(loss.device)
        shared["aux_loss"] = input.aux_loss
    result = output(loss=loss, **shared)
    if accuracy is not None:
        result["token_accuracy"] = accuracy
    return result


@dataclass(frozen=True)
class _CrossEntropy:
    logits_budget: int | None
    token_accuracy: bool

    def __call__(self, head: Head, input: HeadInput) -> tuple[Tensor, Tensor | None]:
        options = input.options
        loss = LigerFusedLinearCrossEntropyLoss(
            ignore_index=options.ignore_index,
            softcap=options.softcap,
            logit_scale=options.logit_scale,
            logits_budget=self.logits_budget,
            return_token_accuracy=self.token_accuracy,
        )
        result = loss(head.weight, input.hidden_states, input.target, head.bias, num_items=input.num_items_in_batch)
        if isinstance(result, Tensor):
            return result, None
        value, metrics = result
        return value, metrics.token_accuracy


_CHECKED = "_liger_checked_heads"
_CHECKED_MODELS: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def _numbers(model: PreTrainedModel) -> list[dict[str, Any]]:
    owners = (model, model.config, model.config.get_text_config())
    return [{name: x for name, x in vars(o).items() if x is None or type(x) in (int, float)} for o in owners]


class _CheckedHead:
    def __init__(self, model: PreTrainedModel, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.facts = head_check.check_head(model, forward)
        self.has_causal_loss = False
        self._config, self._numbers = model.config, _numbers(model)

    def holds_for(self, model: PreTrainedModel) -> bool:
        return model.config is self._config and self._numbers == _numbers(model)


class _CheckedHeads:
    """A model's checked heads, not copied with it."""

    def __init__(self) -> None:
        self.heads: list[_CheckedHead] = []

    def __reduce__(self) -> Any:
        return (_CheckedHeads, ())


def _known(model: PreTrainedModel, forward: Callable[..., Any]) -> _CheckedHead | None:
    known = vars(model).get(_CHECKED)
    if known is not None:
        for checked in known.heads:
            if checked.forward is forward:
                return checked if checked.holds_for(model) else None
    return None


_REASON = "a patched model checks its head, and a fused loss waits for the device; compile without fullgraph=True"


@torch.compiler.disable(reason=_REASON)
def head_facts(
    model: PreTrainedModel, forward: Callable[..., Any] | None = None, *, causal_loss: bool = False
) -> HeadFacts:
    """Return the cached facts about the head of `forward`, by default the class's."""
    if forward is None:
        of_class = type(model).forward
        forward = getattr(of_class, STOCK, of_class)
    checked = _known(model, forward)
    if checked is None:
        checked = _CheckedHead(model, forward)
        heads = vars(model).setdefault(_CHECKED, _CheckedHeads()).heads
        heads[:] = [head for head in heads if head.forward is not forward] + [checked]
        _CHECKED_MODELS.add(model)
    if causal_loss and not checked.has_causal_loss:
        head_check.check_loss(model, forward)
        checked.has_causal_loss = True
    return checked.facts


def forget_facts(owner: PreTrainedModel | type[PreTrainedModel]) -> None:
    for model in list(_CHECKED_MODELS):
        if model is owner or (isinstance(owner, type) and isinstance(model, owner)):
            vars(model).pop(_CHECKED, None)
            _CHECKED_MODELS.discard(model)


def logit_options(model: PreTrainedModel, *, ignore_index: int = -100) -> LogitOptions:
    """Return the transform that `model.forward` applies to its logits.

    Measured, not read from the config. `logit_scale` includes a factor before `lm_head`.

    Raises ValueError unless the logits are a scale and softcap of `lm_head(last_hidden_state)`.

    >>> from transformers import GraniteConfig, GraniteForCausalLM
    >>> sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    >>> model = GraniteForCausalLM(GraniteConfig(**sizes, num_hidden_layers=1, logits_scaling=8.0))
    >>> logit_options(model).logit_scale
    0.125
    """
    return _with_ignore_index(head_facts(model).options, ignore_index)


def _with_ignore_index(options: LogitOptions, ignore_index: int) -> LogitOptions:
    return options if ignore_index == options.ignore_index else replace(options, ignore_index=ignore_index)


def run_backbone(model: PreTrainedModel, forward: Callable[..., Any] | None = None, /, **kwargs: Any) -> HeadInput:
    """Run the backbone as `forward` would, by default the class's."""
    facts = head_facts(model, forward)
    labels, shift_labels = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
    num_items = kwargs.pop("num_items_in_batch", None)
    if isinstance(num_items, int):  # the losses clamp a tensor without a synchronization
        num_items = max(num_items, 1)
    logits_to_keep = kwargs.pop("logits_to_keep", 0)
    options = _with_ignore_index(facts.options, kwargs.pop("ignore_index", -100))
    balance = detect.balance_of(model)
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
    if facts.nested:
        outputs = _without_head(model, forward or type(model).forward, kwargs)
    else:
        for name in facts.dropped:
            kwargs.pop(name, None)
        for name, value in facts.constants:
            kwargs.setdefault(name, value)
        if facts.backbone_takes_labels:
            kwargs["labels"] = labels
        outputs = detect.backbone_of(model)(**kwargs)
    aux_loss: Any = None
    aux_loss_coef = 0.0
    if balance is not None:
        aux_loss, aux_loss_coef = balance.loss(model, outputs, kwargs.get("attention_mask")), balance.coefficient(model)
    hidden_states = _kept(outputs.last_hidden_state, logits_to_keep)
    return HeadInput(hidden_states, options, outputs, labels, shift_labels, num_items, aux_loss, aux_loss_coef)


class _Recorder(nn.Module):
    """Replaces `lm_head`: records and returns its input, but computes logits in other threads."""

    def __init__(self, lm_head: nn.Module) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.reached: list[Tensor] = []
        self.real = (lm_head,)  # a tuple, not a submodule

    @property
    def weight(self) -> Any:  # some forwards read its dtype
        return self.real[0].weight

    def forward(self, hidden_states: Tensor) -> Tensor:
        if threading.get_ident() != self.thread:
            return self.real[0](hidden_states)
        self.reached.append(hidden_states)
        return hidden_states


@torch.compiler.disable(reason="the head is in a model inside this one")
def _without_head(model: PreTrainedModel, forward: Callable[..., Any], kwargs: dict[str, Any]) -> ModelOutput:
    """Return the hidden states, if the head is in a causal model inside this one."""
    lm_head = model.get_output_embeddings()
    owner, name = next((m, n) for m in model.modules() for n, child in m._modules.items() if child is lm_head)
    with _LOCKS.setdefault(lm_head, threading.RLock()):
        owner._modules[name] = recorder = _Recorder(lm_head)
        try:
            outputs = getattr(forward, STOCK, forward)(model, **kwargs)
        finally:
            owner._modules[name] = lm_head
    fields = {name: x for name, x in outputs.items() if name not in ("loss", "logits")}
    (hidden_states,) = recorder.reached
    return ModelOutput(last_hidden_state=hidden_states, **fields)


def _kept(hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Select the last positions (int; 0: all), (K,) for all samples, (B, K), or a mask (B, T)."""
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:] if logits_to_keep else hidden_states
    if logits_to_keep.ndim < 2:
        return hidden_states[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    return hidden_states.take_along_dim(logits_to_keep[..., None], dim=1)


# While a thread runs its head_fn, others get logits, or wait to run theirs.
_RUNNING = threading.local()
_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


@torch.compiler.disable(reason=_REASON)
def run_head(model: PreTrainedModel, input: HeadInput, head_fn: HeadFn) -> Any:
    """Return `head_fn(head, input)`."""
    lm_head = model.get_output_embeddings()
    if _is_bare(lm_head):
        return _at_projection(Projection(lm_head), input.hidden_states, input=input, head_fn=head_fn)
    return _run_inside(model, input, head_fn)


def _is_bare(lm_head: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Return whether only `nn.Linear.forward` would run, unquantized."""
    if type(lm_head) is not nn.Linear or quantized.is_quantized(lm_head):
        return False
    hooks = (lm_head._forward_pre_hooks, lm_head._forward_hooks, lm_head._backward_pre_hooks, lm_head._backward_hooks)
    return not any(hooks) and "forward" not in lm_head.__dict__


def _at_projection(projection: Projection, hidden_states: Tensor, *, input: HeadInput, head_fn: HeadFn) -> Any:
    linear = projection.linear
    weight, bias = _fit(linear.weight), _fit(linear.bias)
    if quantized.is_quantized(linear):
        weight = quantized.dequantized(linear, weight, hidden_states.dtype)
        bias = None if bias is None else bias.to(weight.dtype)
    head = _head_of(projection, weight, bias)
    if isinstance(hidden_states, DTensor):
        whole = all(placement.is_replicate() for placement in hidden_states.placements)
        if whole or not any_dtensor([head.weight]):
            hidden_states = hidden_states.full_tensor()
    device, dtype = head.weight.device, hidden_states.dtype
    if dtype != head.weight.dtype and not torch.is_autocast_enabled(device.type):
        # For a float32 head on a bfloat16 backbone, and for Mamba, whose forward casts its float32 hidden states.
        dtype = head.weight.dtype
    return head_fn(head, replace(input, hidden_states=hidden_states.to(device, dtype)))


def _head_of(projection: Projection, weight: Any, bias: Any) -> Head:
    """Return the head with its adapters, as DTensors sharded on rows, or plain and whole."""
    layer, adapters = projection.layer, projection.adapters
    if not adapters:
        return Head(weight, bias)
    ups = [_whole(layer.lora_B[name].weight) for name in adapters]
    for name in adapters:
        if layer.lora_bias[name]:
            of_adapter = (_whole(layer.lora_B[name].bias) * layer.scaling[name]).to(weight.dtype)
            if isinstance(bias, DTensor):
                of_adapter = distributed_like(bias, of_adapter)
            bias = of_adapter if bias is None else bias + of_adapter
    up = ups[0] if len(ups) == 1 else torch.cat(ups, 1)
    return Head(AdaptedWeight(weight, up, functools.partial(_down, layer, adapters)), bias)


def _down(layer: Any, adapters: tuple[str, ...], x: Tensor) -> Tensor:
    parts = []
    for name in adapters:
        x = layer._cast_input_dtype(x, layer.lora_A[name].weight.dtype)
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


def _fit(parameter: Any) -> Any:
    return parameter if isinstance(parameter, DTensor) and sharded_on_rows(parameter) else _whole(parameter)


def _whole(parameter: Any) -> Any:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _run_inside(model: PreTrainedModel, input: HeadInput, head_fn: HeadFn) -> Any:
    lm_head = model.get_output_embeddings()
    with _LOCKS.setdefault(lm_head, threading.RLock()), _running(head_fn), contextlib.ExitStack() as changes:
        for module in lm_head.modules():
            _guard_hooks(module, changes)
            _skip_layouts(module, input.hidden_states, changes)
        for projection in detect.projections(model):
            if projection.layer is not None:
                _check_lora(projection.layer)
            compute = functools.partial(_run_head_fn, projection, input, head_fn)
            for entered, module in reversed(projection.entered):
                in_place = functools.partial(_in_place_of, module, compute, head_fn)
                changes.enter_context(_replaced(module, forward_slot(module), in_place))
                compute = functools.partial(_enter, entered)
        return lm_head(input.hidden_states)


def _run_head_fn(projection: Projection, input: HeadInput, head_fn: HeadFn, hidden_states: Tensor) -> Any:
    with _running(None):
        return _at_projection(projection, hidden_states, input=input, head_fn=head_fn)


def _enter(module: nn.Module, hidden_states: Tensor) -> Any:
    return module(hidden_states)


def _in_place_of(
    module: nn.Module, compute: Callable[[Tensor], Any], head_fn: HeadFn, hidden_states: Tensor, **kwargs: Any
) -> Any:
    if getattr(_RUNNING, "head_fn", None) is not head_fn:  # of another thread, or in `head_fn`
        return type(module).forward(module, hidden_states, **kwargs)
    if given := [name for name, value in kwargs.items() if value is not None]:
        raise ValueError(
            f"lm_head got {', '.join(given)}, but a fused loss uses the same adapters for the whole batch: choose them "
            "with set_adapter, or take lm_head out of target_modules"
        )
    return compute(hidden_states)


def _check_lora(layer: Any) -> None:
    """Unmerge disabled adapters, as PEFT does; reject users' hooks on parts."""
    if layer.disable_adapters and layer.merged:
        layer.unmerge()
    for part in (layer.base_layer, layer.lora_B):
        for hook in (hook for module in part.modules() for hook in vars(module)["_forward_pre_hooks"].values()):
            if foreign_code(hook) is not None:
                raise _expects_logits("forward pre-hook", hook)


@contextlib.contextmanager
def _running(head_fn: HeadFn | None) -> Iterator[None]:
    """Make `lm_head` run `head_fn` in this thread; None for logits."""
    before, _RUNNING.head_fn = getattr(_RUNNING, "head_fn", None), head_fn
    try:
        yield
    finally:
        _RUNNING.head_fn = before


@contextlib.contextmanager
def _replaced(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    before = {key: x for key, x in vars(module).items() if key == name}
    vars(module)[name] = value
    try:
        yield
    finally:
        if vars(module).get(name) is value:
            del vars(module)[name]
            vars(module).update(before)


def _guard_hooks(module: nn.Module, changes: contextlib.ExitStack) -> None:
    """Reject users' forwards and backward hooks; forward hooks may not edit."""
    own = [("forward", vars(module).get(slot)) for slot in detect.FORWARD_SLOTS]
    own += [("backward hook", hook) for hook in vars(module)["_backward_hooks"].values()]
    own += [("backward pre-hook", hook) for hook in vars(module)["_backward_pre_hooks"].values()]
    for kind, reader in own:
        if foreign_code(reader) is not None:
            raise _expects_logits(kind, reader)
    hooks = vars(module)["_forward_hooks"]
    if foreign := {key for key, hook in hooks.items() if foreign_code(hook) is not None}:
        guarded = {key: functools.partial(_observe, hook) if key in foreign else hook for key, hook in hooks.items()}
        changes.enter_context(_replaced(module, "_forward_hooks", type(hooks)(guarded)))


def _skip_layouts(module: nn.Module, hidden_states: Tensor, changes: contextlib.ExitStack) -> None:
    """Skip hooks of `parallelize_module`, which gather or split logits, or replicate hidden states.

    A loss takes hidden states sharded on the sequence too.
    """
    slots = ["_forward_hooks", *(["_forward_pre_hooks"] if isinstance(hidden_states, DTensor) else [])]
    for slot in slots:
        hooks = vars(module)[slot]
        kept = {key: hook for key, hook in hooks.items() if not _changes_layout(hook)}
        if len(kept) < len(hooks):
            changes.enter_context(_replaced(module, slot, type(hooks)(kept)))


def _changes_layout(hook: Any) -> bool:
    modules = [getattr(code, "__globals__", {}).get("__name__", "") for code in detect.unwrapped(hook)]
    return any(module.startswith("torch.distributed.tensor.") for module in modules)


def _observe(hook: Callable[..., Any], module: nn.Module, args: Any, *kwargs_and_output: Any) -> Any:
    """Run a forward hook, which may only change logits."""
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
