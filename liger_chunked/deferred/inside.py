"""Run code in place of the product of an `lm_head`, inside the head's own call.

FSDP and ZeRO gather the head's parameters in hooks of that call, accelerate moves them to their device there, and
tensor parallelism lays out the hidden states. So a loss that reads the weight must run there, and only once: each call
gathers again.

    run_inside(lm_head, hidden_states, lambda head, hidden_states: loss(head.weight, hidden_states, ...))

PEFT and FSDP may replace modules at any time: each call looks at the head again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_chunked.deferred import code, quantized
from liger_chunked.deferred.code import foreign_code, forward_slot
from liger_chunked.deferred.projection import Projection, projections_in
from liger_chunked.deferred.swap import stock_class
from liger_chunked.deferred.switches import has_unknown_switches
from liger_chunked.dtensor import any_dtensor, distributed_like, sharded_on_rows
from liger_chunked.private import HOOKS, SHOWS_HOOKS, has_children, hooks_of
from liger_chunked.types import AdaptedWeight, Head

Compute = Callable[[Head, Tensor], Any]


@dataclass(frozen=True)
class _Running:
    """The state of the heads in a thread.

    - `projecting`: heads inside their call, before their product
    - `computing`: heads whose `compute` runs in place of their product
    - `compute`: the function of the innermost projecting head; None if it returns logits
    """

    projecting: tuple[nn.Module, ...] = ()
    computing: tuple[nn.Module, ...] = ()
    compute: Compute | None = None


# Other threads get logits, or wait to run theirs.
_THREAD = threading.local()
_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def _now() -> _Running:
    return getattr(_THREAD, "running", _IDLE)


_IDLE = _Running()


@contextlib.contextmanager
def _running(now: _Running) -> Iterator[None]:
    before, _THREAD.running = _now(), now
    try:
        yield
    finally:
        _THREAD.running = before


def _projecting(lm_head: nn.Module, compute: Compute | None) -> Any:
    now = _now()
    return _running(_Running((*now.projecting, lm_head), now.computing, compute))


def _computing() -> Any:
    now = _now()
    return _running(_Running((), (*now.computing, *now.projecting)))


def must_project(lm_head: nn.Module) -> bool:
    """Whether this thread is inside `run_inside` or `real_logits` of this head, or of one around it."""
    return any(module is lm_head for head in _now().projecting for module in head.modules())


def is_computing(lm_head: nn.Module) -> bool:
    """Whether a `compute` of this head runs in this thread. The head returns logits to it, unless it asks to defer."""
    return any(head is lm_head for head in _now().computing)


def real_logits(lm_head: nn.Module, hidden_states: Tensor) -> Tensor:
    """Return `lm_head(hidden_states)`, as if it deferred nothing."""
    with _projecting(lm_head, None):
        return lm_head(hidden_states)


def run_inside(lm_head: nn.Module, hidden_states: Tensor, compute: Compute) -> Any:
    """Return `compute(head, hidden_states)`, called where `lm_head(hidden_states)` would multiply.

    `head` has this rank's rows of a sharded weight, the dequantized weight, or an `AdaptedWeight` with PEFT's LoRA.
    `hidden_states` are what the hooks of `lm_head` left.

    Raises ValueError if the product is none that a fused loss computes (see `projections_in`).
    """
    if _is_bare(lm_head):
        with _projecting(lm_head, compute):
            return _at_projection(Projection(lm_head), compute, hidden_states)
    with (
        _LOCKS.setdefault(lm_head, threading.RLock()),
        _projecting(lm_head, compute),
        contextlib.ExitStack() as changes,
    ):
        for module in lm_head.modules():
            _skip_layouts(module, hidden_states, changes)
        for projection in projections_in(lm_head):
            if projection.layer is not None:
                _check_lora(projection.layer)
            step = functools.partial(_at_projection, projection, compute)
            for entered, module in reversed(projection.entered):
                in_place = functools.partial(_in_place_of, module, step, compute)
                changes.enter_context(_replaced(module, forward_slot(module), in_place))
                step = functools.partial(_enter, entered)
        return lm_head(hidden_states)


def why_not_deferred(lm_head: nn.Module) -> str | None:
    """Return what expects real logits of this head's call: a hook or a forward of the user's. None if nothing does."""
    for name, module in lm_head.named_modules():
        parts = set(name.split("."))
        if parts & {"lora_A", "lora_dropout"}:  # they run as in PEFT's own forward
            continue
        if has_children(module) and has_unknown_switches(module):
            return f"the layer {type(module).__name__}, whose adapters may be switched,"
        if code.has_unknown_forward(module):
            return "a forward of accelerate, which may call another"
        state = vars(module)
        own = [("forward", state.get(slot)) for slot in code.FORWARD_SLOTS]
        if parts & {"base_layer", "lora_B"}:  # a fused loss does not compute their products one by one
            own += [("forward pre-hook", hook) for hook in state["_forward_pre_hooks"].values()]
        own += [("backward hook", hook) for hook in state["_backward_hooks"].values()]
        own += [("backward pre-hook", hook) for hook in state["_backward_pre_hooks"].values()]
        own += [("forward hook", hook) for hook in state["_forward_hooks"].values()]
        for kind, reader in own:
            if foreign_code(reader) is not None:
                return f"its {kind} {getattr(reader, '__qualname__', type(reader).__qualname__)}"
    return None


def _is_bare(lm_head: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether nothing but `nn.Linear.forward` runs in the call of a head, on an unquantized weight."""
    if stock_class(type(lm_head)) is not nn.Linear or quantized.is_quantized(lm_head):
        return False
    return SHOWS_HOOKS and "forward" not in vars(lm_head) and not any(vars(lm_head)[slot] for slot in HOOKS)


def _at_projection(projection: Projection, compute: Compute, hidden_states: Tensor) -> Any:
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
    with _computing():
        return compute(head, hidden_states.to(device, dtype))


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


def _fit(parameter: Any) -> Any:
    return parameter if isinstance(parameter, DTensor) and sharded_on_rows(parameter) else _whole(parameter)


def _whole(parameter: Any) -> Any:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _enter(module: nn.Module, hidden_states: Tensor) -> Any:
    return module(hidden_states)


def _in_place_of(
    module: nn.Module, step: Callable[[Tensor], Any], compute: Compute, hidden_states: Tensor, **kwargs: Any
) -> Any:
    if _now().compute is not compute:  # of another thread, or a head inside `compute`
        return type(module).forward(module, hidden_states, **kwargs)
    if given := [name for name, value in kwargs.items() if value is not None]:
        raise ValueError(
            f"lm_head got {', '.join(given)}, but a fused loss uses the same adapters for the whole batch: choose them "
            "with set_adapter, or take lm_head out of target_modules"
        )
    return step(hidden_states)


def _check_lora(layer: Any) -> None:
    """Unmerge disabled adapters, as PEFT does; reject users' hooks on parts."""
    if layer.disable_adapters and layer.merged:
        layer.unmerge()
    if not SHOWS_HOOKS:
        raise ValueError("this torch does not show the hooks of lm_head's LoRA layer, which a fused loss would skip")
    for part in (layer.base_layer, layer.lora_B):
        for hook in (hook for module in part.modules() for hook in hooks_of(module, "_forward_pre_hooks")):
            if foreign_code(hook) is not None:
                name = getattr(hook, "__qualname__", type(hook).__qualname__)
                raise ValueError(
                    f"the forward pre-hook {name!r} is on a part of lm_head's LoRA layer, whose products a fused loss "
                    "does not compute one by one: remove it, or register it on lm_head"
                )


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


def _skip_layouts(module: nn.Module, hidden_states: Tensor, changes: contextlib.ExitStack) -> None:
    """Skip hooks of `parallelize_module`, which gather or split logits, or replicate hidden states.

    A loss takes hidden states sharded on the sequence too.
    """
    slots = ["_forward_hooks", *(["_forward_pre_hooks"] if isinstance(hidden_states, DTensor) else [])]
    for slot in slots:
        hooks = vars(module).get(slot, {})
        kept = {key: hook for key, hook in hooks.items() if not _changes_layout(hook)}
        if len(kept) < len(hooks):
            changes.enter_context(_replaced(module, slot, type(hooks)(kept)))


def _changes_layout(hook: Any) -> bool:
    modules = [getattr(part, "__globals__", {}).get("__name__", "") for part in code.unwrapped(hook)]
    return any(module.startswith("torch.distributed.tensor.") for module in modules)
