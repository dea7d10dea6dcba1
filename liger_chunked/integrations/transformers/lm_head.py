"""Run our code inside the forward of `lm_head`, with the hooks of FSDP, ZeRO and `device_map`.

Each call looks modules up again, because PEFT and FSDP may replace them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from liger_chunked.dtensor import any_dtensor, distributed_like, sharded_on_rows
from liger_chunked.integrations.transformers import detect, quantized
from liger_chunked.integrations.transformers.detect import Projection, foreign_code, forward_slot
from liger_chunked.integrations.transformers.head_facts import REASON
from liger_chunked.integrations.transformers.head_input import HeadFn, HeadInput
from liger_chunked.types import AdaptedWeight, Head

# While a thread runs its head_fn, others get logits, or wait to run theirs.
_RUNNING = threading.local()
_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def lock_of(lm_head: nn.Module) -> threading.RLock:
    return _LOCKS.setdefault(lm_head, threading.RLock())


@torch.compiler.disable(reason=REASON)
def run_lm_head(model: PreTrainedModel, input: HeadInput, head_fn: HeadFn) -> Any:
    lm_head = model.get_output_embeddings()
    if _is_bare(lm_head):
        return _at_projection(Projection(lm_head), input.hidden_states, input=input, head_fn=head_fn)
    return _run_inside(model, input, head_fn)


def _is_bare(lm_head: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether only `nn.Linear.forward` would run, unquantized."""
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
    """Return the head with its adapters, sharded on rows or plain."""
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
    with lock_of(lm_head), _running(head_fn), contextlib.ExitStack() as changes:
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
