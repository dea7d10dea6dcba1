"""Heads whose weight several processes share: gathered by FSDP for a while, or split over the vocabulary.

The loss of deferred logits comes after the head's call, so it needs the weight longer than the call does.

- FSDP2 (`fully_shard`): `keep_gathered` asks the group of the weight to stay gathered from the head's forward to its
  backward. FSDP does so by default for its root, whose all-gather would come again at once.
- FSDP1: its root stays gathered. A unit inside it is set to `SHARD_GRAD_OP`, which keeps it, by `keep_in_unit`.
- tensor parallelism (`parallelize_module`, and the plans of transformers): hooks of the layer lay out its logits. A
  call that defers skips them. Its stand-in is of the whole vocabulary, and losses take the weight as it is distributed.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_chunked.deferred.code import unwrapped
from liger_chunked.dtensor import any_dtensor, sharded_on_rows
from liger_chunked.private import base_of, composable_states, keep_in_unit

# FSDP

# By layer: the weight, and the module of FSDP2 whose group holds it, or None.
_OWNERS: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def keep_gathered(layer: nn.Module, weight: Tensor) -> str | None:
    """Let FSDP keep a layer's weight gathered from this call to its backward. Return why it cannot, or None.

    For FSDP2 this calls `set_reshard_after_forward(False, recurse=False)` on the module whose group holds the weight,
    at each deferring call: the group then stays gathered after later forwards of the module, in evaluation too. A unit
    of FSDP1 that is not the root changes to `SHARD_GRAD_OP`, which does the same.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return None
    if isinstance(base_of(weight), fsdp.FlatParameter):
        units = _units_running(fsdp.FullyShardedDataParallel)
        if len(units) == 1 or (units and keep_in_unit(units[0])):
            return None
        return "it is in a unit of FSDP1 inside another, which frees its weight before the loss"
    if composable_states() is None:
        if torch.distributed.is_initialized():
            return "this torch does not show which module of FSDP holds its weight, which may be freed before the loss"
        return None
    # In a graph a namespace stands for the layer: FSDP gathers the graph's tensors around it.
    owner = _owner(layer, weight) if isinstance(layer, nn.Module) else None
    if owner is not None:
        # Raised for a group that only replicates, which never frees its weights after a forward.
        with contextlib.suppress(AssertionError):
            owner.set_reshard_after_forward(False, recurse=False)
    return None


def _owner(layer: nn.Module, weight: Any) -> Any:
    """Return the innermost module of FSDP2 around a layer, whose group holds its weight; None if there is none."""
    states = composable_states()
    if not states:
        return None
    found = _OWNERS.get(layer)
    if found is None or found[0]() is not weight:
        fsdp: Any = sys.modules["torch.distributed.fsdp"]
        around = [
            m for m in list(states) if isinstance(m, fsdp.FSDPModule) and any(part is layer for part in m.modules())
        ]
        owner = min(around, key=lambda module: sum(1 for _ in module.modules()), default=None)
        found = _OWNERS[layer] = weakref.ref(weight), None if owner is None else weakref.ref(owner)
    return None if found[1] is None else found[1]()


def _units_running(cls: Any) -> list[Any]:
    """Return the units of FSDP1 whose forward is around this call, innermost first. The outermost stays gathered."""
    code, units = cls.forward.__code__, []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            units.append(frame.f_locals["self"])
        frame = frame.f_back
    return units


def is_freed(x: Any) -> bool:
    """Whether a framework took the memory of a tensor away."""
    if any_dtensor([x]):
        x = x.to_local()
    return type(x) in (Tensor, nn.Parameter) and x.numel() > 0 and x.untyped_storage().nbytes() == 0


# Tensor parallelism


class NotServedError(Exception):
    """Raised inside a call without layouts: the layer needs its ordinary call."""


class Layouts(NamedTuple):
    """What lays out the input and the logits of a layer: hooks by slot and key, or a forward set on the instance."""

    hooks: dict[str, dict[int, Any]]
    forward: Any


# The layer whose call skips its layouts, by thread, and the layouts.
_SKIPPING = threading.local()
# By layer: the layouts for which `gives_whole` was computed, and its result.
_WHOLE: weakref.WeakKeyDictionary[nn.Module, tuple[list[Any], bool]] = weakref.WeakKeyDictionary()
# Calls of one layer in several threads take turns, because `without` changes the module's own hooks.
_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def is_distributed(x: Any) -> bool:
    return any_dtensor([x])


def layouts_of(layer: nn.Module) -> Layouts | None:
    """Return what lays out the logits of a layer; None if nothing does."""
    forward = vars(layer).get("forward")
    forward = forward if forward is not None and _is_layout(forward) else None
    hooks = {}
    for slot in ("_forward_pre_hooks", "_forward_hooks"):
        known = vars(layer)[slot]
        hooks[slot] = {key: hook for key, hook in known.items() if _is_layout(hook)}
    return Layouts(hooks, forward) if forward is not None or hooks["_forward_hooks"] else None


def is_bare(layer: nn.Module) -> bool:
    """Whether the user made a layer's weight a DTensor: no hook lays out its logits, and no group of FSDP2 holds it.

    A weight that FSDP2 has not gathered is a DTensor too. Its ranks have different hidden states, so no loss may
    take the weight as one that is split over the vocabulary.
    """
    if "torch.distributed.fsdp" in sys.modules and (
        composable_states() is None or _owner(layer, layer.weight) is not None
    ):
        return False
    hooks = [
        *vars(layer)["_forward_pre_hooks"].values(),
        *vars(layer)["_forward_hooks"].values(),
        vars(layer).get("forward"),
    ]
    return not any(_is_layout(hook) for hook in hooks)


_LAYOUTS = (
    "torch.distributed.tensor.",
    "transformers.distributed.tensor_parallel",
    "transformers.integrations.tensor_parallel",
)


def _is_layout(function: Any) -> bool:
    modules = [getattr(part, "__globals__", {}).get("__name__", "") for part in unwrapped(function)]
    return any(module.startswith(_LAYOUTS) for module in modules)


@contextlib.contextmanager
def without(layer: nn.Module, layouts: Layouts, hidden: Any) -> Iterator[None]:
    """Skip the layouts of a layer inside the block. Hooks still lay out plain hidden states."""
    before = getattr(_SKIPPING, "layer", None)
    slots: dict[str, Any] = {"_forward_hooks": None}
    if is_distributed(hidden):
        slots["_forward_pre_hooks"] = None
    state = vars(layer)
    with _LOCKS.setdefault(layer, threading.RLock()):
        kept = {slot: state[slot] for slot in slots}
        for slot, known in kept.items():
            state[slot] = type(known)({k: hook for k, hook in known.items() if k not in layouts.hooks[slot]})
        if layouts.forward is not None:
            del state["forward"]
        _SKIPPING.layer = layer, layouts
        try:
            yield
        finally:
            _SKIPPING.layer = before
            state.update(kept)
            if layouts.forward is not None:
                state["forward"] = layouts.forward


def skipped(layer: nn.Module) -> Layouts | None:
    """Return the layouts that the current call of a layer skips; None if it skips none."""
    found = getattr(_SKIPPING, "layer", None)
    return found[1] if found is not None and found[0] is layer else None


@torch.no_grad()
def gives_whole(layer: nn.Module, layouts: Layouts, weight: Any, n_dims: int) -> bool:
    """Whether the ordinary call returns plain logits of the whole vocabulary.

    It asks the layouts of a layer once, for a row of zeros.
    """
    hooks = [*layouts.hooks["_forward_hooks"].values()]
    known = [layouts.forward, *hooks]
    found = _WHOLE.get(layer)
    if found is None or len(found[0]) != len(known) or any(a is not b for a, b in zip(found[0], known, strict=True)):
        one = weight.to_local().new_zeros(*[1] * (n_dims - 1), weight.shape[1])
        if layouts.forward is not None:
            logits = layouts.forward(one)
        else:
            logits = F.linear(_on_mesh(one, weight), weight)
            for hook in hooks:
                changed = hook(layer, (one,), logits)
                logits = logits if changed is None else changed
        whole = not is_distributed(logits) and logits.shape[-1] == weight.shape[0]
        found = _WHOLE[layer] = known, whole
    return found[1]


def plain(hidden: Any) -> Any:
    """Return whole hidden states as a plain tensor, in the autograd graph."""
    if not is_distributed(hidden):
        return hidden
    return hidden.to_local() if all(p.is_replicate() for p in hidden.placements) else hidden.full_tensor()


def serves(weight: Any, bias: Any) -> bool:
    """Whether losses take a DTensor weight as it is."""
    return sharded_on_rows(weight) and (bias is None or is_distributed(bias))


def real_product(weight: Any, bias: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that computes real logits of the whole vocabulary, which all ranks of the mesh call."""

    def forward(hidden: Tensor) -> Tensor:
        logits: Any = F.linear(_on_mesh(hidden, weight), weight, bias)
        return logits.full_tensor()

    return forward


def real_gradients(g: Tensor, hidden: Tensor, weight: Any, need: tuple[bool, ...]) -> list[Any]:
    """Return dX, dW and db of a real gradient g (N, V) that is the same on all ranks, and hidden states (N, H)."""
    from torch.distributed.tensor import Shard

    placements = [Shard(1) if p.is_shard() else p for p in weight.placements]
    own = _on_mesh(g, weight).redistribute(placements=placements)
    dx = dw = db = None
    if need[0]:
        dx = (own @ weight.to(g.dtype)).full_tensor()
    if need[1]:
        dw = (
            (own.t() @ _on_mesh(hidden.to(g.dtype), weight)).redistribute(placements=weight.placements).to(weight.dtype)
        )
    if need[2]:
        db = own.sum(0).redistribute(placements=weight.placements)
    return [dx, dw, db]


def _on_mesh(x: Tensor, weight: Any) -> Any:
    """Return a tensor that is the same on all ranks as a DTensor on the mesh of `weight`."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
