"""What the kernels serve of a model: its layers and rotary functions, by their code, and its head."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from liger_chunked.deferred.code import own_forward
from liger_chunked.deferred.swap import patched_class, stock_class
from liger_chunked.integrations.transformers import overrides, source
from liger_chunked.integrations.transformers.attach import check_head
from liger_chunked.integrations.transformers.detect import calls_loss_function, head_of
from liger_chunked.integrations.transformers.layers import Binding, has_causal_loss
from liger_chunked.integrations.transformers.overrides import binding_of, rope_of
from liger_chunked.integrations.transformers.parallel import is_parallel
from liger_chunked.integrations.transformers.patched_class import LayerPatch
from liger_chunked.integrations.transformers.report import FUSED
from liger_chunked.integrations.transformers.rotary import HALF_ANGLES
from liger_chunked.layers.tiled import Tokens


@dataclass
class Found:
    """What can be patched.

    - `layers`: a switch of `apply_liger_kernel`, a module, and how the layer reads it
    - `ropes`: the modules and names of rotary functions
    - `parallel`: linear layers that `parallelize_module` split
    - `head_class`: the name of the model's class, and `heads`: switches of its head
    - `left`: the reason for each class or function that is left alone
    """

    layers: list[tuple[str, nn.Module, Binding]] = field(default_factory=list)
    ropes: tuple[tuple[str, str], ...] = ()
    parallel: list[nn.Module] = field(default_factory=list)
    head_class: str = ""
    heads: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)
    other_loss: dict[str, str] = field(default_factory=dict)  # the class that cross_entropy cannot serve, and why

    @property
    def switches(self) -> list[str]:
        layers = {switch for switch, *_ in self.layers}
        found = [switch for switch in overrides.LAYER_SWITCHES if switch in layers]
        if self.parallel:
            found.append(overrides.PARALLEL)
        return [*found, *(["rope"] if self.ropes else []), *self.heads]

    def add_layer(self, module: nn.Module, cls: Any) -> None:
        binding = binding_of(cls)
        if binding is None:
            looks_like_ours = source.looks_like_layer(cls) or source.looks_like_norm(module, cls)
            reason = _OTHER_CODE if looks_like_ours else None
        elif (reason := _refusal(module, cls, binding)) is None:
            self.layers.append((binding.switch(module), module, binding))
        if reason is not None:
            self.left.setdefault(owner_of(module).__name__, reason)

    def add_ropes(self, classes: Iterable[type], rotary: set[type]) -> None:
        """Add the rotary functions that these classes call. `rotary`: the classes that compute their angles."""
        repeats = not rotary or any(map(source.repeats_angles, rotary))
        for module, name in sorted(set().union(*map(source.rotary_functions, classes))):
            ours = rope_of(getattr(importlib.import_module(module), name))
            if ours is None:
                self.left.setdefault(name, _VARIANT)
            elif ours not in HALF_ANGLES and not repeats:
                self.left.setdefault(name, _ONE_ANGLE)
            else:
                self.ropes = (*self.ropes, (module, name))

    def add_head(self, model: PreTrainedModel) -> None:
        name = self.head_class = owner_of(model).__name__
        if head_of(model) is None:
            if model.can_generate():
                self.left[name] = "it is not a backbone under an lm_head"
            return
        if not calls_loss_function(stock_class(type(model))):
            self.other_loss[name] = _OWN_LOSS
        elif not has_causal_loss(model):
            self.other_loss[name] = _OTHER_LOSS
        else:
            self.heads = ("cross_entropy",)
        try:
            check_head(model)
        except ValueError as refusal:
            self.left[name] = str(refusal)
        else:
            self.heads = (*self.heads, FUSED)

    def chosen(self, family: str, switches: dict[str, bool | None]) -> list[str]:
        """Return the switches that are on; ValueError if one that is True matches nothing, or nothing is on."""
        wanted = {switch for switch, on in switches.items() if on}
        if "cross_entropy" in wanted:
            self._leave_other_loss()
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in self.left.items())
        if absent := wanted - set(self.switches):
            raise ValueError(f"{sorted(absent)} matches nothing in {family} here; it has {self.switches}{reasons}")
        if set(self.switches) <= {"cross_entropy"} and not wanted and switches.get(FUSED) is not False:
            raise ValueError(f"our kernels serve nothing in {family}{reasons}")
        off = {switch for switch, on in switches.items() if on is False}
        off.add(FUSED if "cross_entropy" in wanted else "cross_entropy")
        if FUSED in off and switches.get("cross_entropy") is not False:
            self._leave_other_loss()  # where the fused loss is on, it is not left alone
        self._leave_off(off)
        return [switch for switch in self.switches if switch not in off]

    def check_tiles(self, family: str, on: list[str], tokens: Tokens) -> None:
        """Note which layers are not tiled, and raise if tiles are asked for and none is."""
        if tokens is False:
            return
        mlps = {switch for switch, _, binding in self.layers if binding.layer.is_mlp}
        for switch, module, binding in self.layers:
            if switch in ("swiglu", "geglu") and not binding.layer.is_mlp:
                self.left.setdefault(owner_of(module).__name__, _NOT_TILED)
        if tokens == "auto":
            return
        if not mlps:
            raise ValueError(f"{overrides.TILED} matches nothing in {family}, which has no gated MLP beside experts")
        if mlps.isdisjoint(on):
            raise ValueError(f"{overrides.TILED} tiles the MLPs of {sorted(mlps)}, which is off")

    def _leave_off(self, off: set[str]) -> None:
        served = [(switch, owner_of(module).__name__) for switch, module, _ in self.layers]
        served += [(overrides.PARALLEL, owner_of(module).__name__) for module in self.parallel]
        served += [("rope", name) for _, name in self.ropes]
        served += [(FUSED, self.head_class)] if FUSED in self.heads else []
        for switch, name in served:
            if switch in off:
                self.left.setdefault(name, f"{switch} is off")

    def _leave_other_loss(self) -> None:
        for name, reason in self.other_loss.items():
            self.left.setdefault(name, reason)


def _refusal(module: nn.Module, cls: Any, binding: Binding) -> str | None:
    if hasattr(module, "_distribute_module_applied"):
        return "parallelize_module runs it on DTensors"
    reason = binding.refusal(module)
    if reason is None:
        try:
            patched_class(cls, LayerPatch(binding))
        except ValueError as refusal:
            return str(refusal)
    return reason


_NOT_TILED = "not tiled: float32 sums of all experts' gradients would take more memory than tiles save"
_VARIANT = "a variant that no kernel computes"
_ONE_ANGLE = "its model's rotary embedding does not give each angle twice, and the kernel reads one of the two"
_OTHER_CODE = "a variant in other code: register_layer serves it if a kernel computes the same"
_OWN_LOSS = "its code computes the loss itself and does not call loss_function"
_OTHER_LOSS = "its loss_function is not the causal one of transformers"


def found_in(model: PreTrainedModel) -> Found:
    found, used = Found(), set()
    head = head_of(model)
    of_head = set() if head is None else {*head.modules()}
    for module in model.modules():
        cls = stock_class(type(module))
        if is_parallel(module) and module not in of_head:
            found.parallel.append(module)
        if own_forward(module) is None:
            used.add(cls)
            found.add_layer(module, cls)
        elif binding_of(cls) is not None:
            found.left.setdefault(owner_of(module).__name__, "its forward was set on the instance")
    found.add_ropes(used, {cls for cls in used if "Rotary" in cls.__name__})
    found.add_head(model)
    return found


def owner_of(module: nn.Module) -> type:
    """Return the class that defines the forward, unlike classes that FSDP derives."""
    return next(cls for cls in stock_class(type(module)).__mro__ if "forward" in vars(cls))
