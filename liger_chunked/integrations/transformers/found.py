"""What the kernels serve of a model, or of all models of a family."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from liger_chunked.deferred.code import own_forward
from liger_chunked.integrations.transformers import overrides, source, tried, verify
from liger_chunked.integrations.transformers.attach import check_head
from liger_chunked.integrations.transformers.detect import calls_loss_function, head_of
from liger_chunked.integrations.transformers.layers import Binding, has_causal_loss
from liger_chunked.integrations.transformers.overrides import binding_of, rope_of
from liger_chunked.integrations.transformers.patched_class import LayerPatch, patched_class, stock_class
from liger_chunked.integrations.transformers.replaced import stock_rope
from liger_chunked.integrations.transformers.report import FUSED
from liger_chunked.layers.tiled import Tokens


@dataclass
class Found:
    layers: list[tuple[str, Any, Binding]] = field(default_factory=list)  # switch, and module or class
    ropes: tuple[tuple[str, str], ...] = ()
    heads: tuple[str, ...] = ()  # switches
    left: dict[str, str] = field(default_factory=dict)
    other_losses: dict[str, str] = field(default_factory=dict)  # classes that cross_entropy cannot serve, and why

    @property
    def switches(self) -> list[str]:
        layers = {switch for switch, *_ in self.layers}
        found = [switch for switch in overrides.LAYER_SWITCHES if switch in layers]
        return [*found, *(["rope"] if self.ropes else []), *self.heads]

    def add_layer(self, owner: Any, module: nn.Module, cls: Any, binding: Binding | None) -> None:
        if binding is None:
            reason = _OTHER_CODE if source.looks_like_layer(cls) else None
        elif (reason := self._refusal(owner, module, cls, binding)) is None:
            self.layers.append((binding.switch(module), owner, binding))
        if reason is not None:
            self.left.setdefault(owner_of(module).__name__, reason)

    @staticmethod
    def _refusal(owner: Any, module: nn.Module, cls: Any, binding: Binding) -> str | None:
        reason = binding.refusal(module) or verify.difference(binding, module, cls)
        if reason is None and owner is module:
            try:
                patched_class(cls, LayerPatch(binding))
            except ValueError as refusal:
                return str(refusal)
        return reason

    def add_ropes(self, classes: Iterable[type], rotary: list[nn.Module]) -> None:
        for key in sorted(set().union(*map(source.rotary_functions, classes))):
            stock = stock_rope(*key)
            ours = rope_of(stock)
            reason = _VARIANT if ours is None else verify.rotary_difference(ours, stock, rotary)
            if reason is None:
                self.ropes = (*self.ropes, key)
            else:
                self.left.setdefault(key[1], reason)

    def chosen(self, family: str, switches: dict[str, bool | None]) -> list[str]:
        check_switches(switches.keys() - set(overrides.SWITCHES))
        for switch, on in switches.items():
            if not (on is None or isinstance(on, bool)):
                raise TypeError(f"{switch} must be True, False or None, got {on!r}")
        wanted = {switch for switch, on in switches.items() if on}
        if "cross_entropy" in wanted:
            self._leave_other_losses()
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in self.left.items())
        if absent := wanted - set(self.switches):
            raise ValueError(f"{sorted(absent)} matches nothing in {family} here; it has {self.switches}{reasons}")
        if set(overrides.HEAD_SWITCHES) <= wanted:
            raise ValueError("cross_entropy works on logits and fused_linear_cross_entropy builds none: choose one")
        if set(self.switches) <= {"cross_entropy"} and not wanted and switches.get(FUSED) is not False:
            raise ValueError(f"our kernels serve nothing in {family}{reasons}")
        off = {switch for switch, on in switches.items() if on is False}
        off.add(FUSED if "cross_entropy" in wanted else "cross_entropy")
        if FUSED in off and switches.get("cross_entropy") is not False:
            self._leave_other_losses()  # where the fused loss is on, none of them is left alone
        return [switch for switch in self.switches if switch not in off]

    def check_tiles(self, family: str, on: list[str], tokens: Tokens) -> None:
        """Note which layers are not tiled, and raise if tiles are asked for and none is."""
        if tokens is False:
            return
        mlps = {switch for switch, _, binding in self.layers if binding.layer.is_mlp}
        for switch, owner, binding in self.layers:
            if switch in ("swiglu", "geglu") and not binding.layer.is_mlp:
                cls = owner if isinstance(owner, type) else owner_of(owner)
                self.left.setdefault(cls.__name__, _NOT_TILED)
        if tokens == "auto":
            return
        if not mlps:
            raise ValueError(f"{overrides.TILED} matches nothing in {family}, which has no gated MLP beside experts")
        if mlps.isdisjoint(on):
            raise ValueError(f"{overrides.TILED} tiles the MLPs of {sorted(mlps)}, which is off")

    def _leave_other_losses(self) -> None:
        for name, reason in self.other_losses.items():
            self.left.setdefault(name, reason)


def check_switches(unknown: set[str]) -> None:
    if unknown:
        raise TypeError(f"unknown switches {sorted(unknown)}; there are {sorted(overrides.SWITCHES)}")


_NOT_TILED = "not tiled: float32 sums of all experts' gradients would take more memory than tiles save"
_VARIANT = "a variant that no kernel computes"
_OTHER_CODE = "a variant in other code: register_layer serves it if a kernel computes the same, or says what differs"
_OWN_LOSS = "its code computes the loss itself and does not call loss_function"
_OTHER_LOSS = "its loss_function is not the causal one of transformers"


def found_in(model: PreTrainedModel, fused: bool | None = None) -> Found:
    found = Found()
    used = set()
    for module in model.modules():
        cls = stock_class(type(module))
        binding, own = binding_of(cls), own_forward(module) is not None
        if not own:
            used.add(cls)
        if binding is not None and own:
            found.left.setdefault(owner_of(module).__name__, "its forward was set on the instance")
        elif binding is not None and hasattr(module, "_distribute_module_applied"):
            found.left.setdefault(owner_of(module).__name__, "parallelize_module runs it on DTensors")
        elif not own:
            found.add_layer(module, module, cls, binding)
    found.add_ropes(used, [module for module in model.modules() if "Rotary" in type(module).__name__])
    if head_of(model) is not None:
        reason = None if fused is False else head_refusal(model)
        own_loss = None if calls_loss_function(stock_class(type(model))) else _OWN_LOSS
        other_loss = own_loss or (None if has_causal_loss(model) else _OTHER_LOSS)
        if other_loss is not None:
            found.other_losses[owner_of(model).__name__] = other_loss
        on_logits = other_loss is None
        switches = {"cross_entropy": on_logits, FUSED: fused is not False and reason is None}
        found.heads = tuple(switch for switch, on in switches.items() if on)
        found.left |= {} if reason is None else {owner_of(model).__name__: reason}
    elif model.can_generate():
        found.left[owner_of(model).__name__] = "it is not a backbone under an lm_head"
    return found


def owner_of(module: nn.Module) -> type:
    """Return the class that defines the forward, unlike classes that FSDP derives."""
    return next(cls for cls in stock_class(type(module)).__mro__ if "forward" in vars(cls))


def head_refusal(model: PreTrainedModel) -> str | None:
    """Return why a model trains with logits: what its lm_head is, or what a small copy did with them."""
    try:
        check_head(model)
    except ValueError as refusal:
        return str(refusal)
    return tried.why_logits(model)


def found_in_classes(modeling: ModuleType) -> Found:
    causal = overrides.causal_classes(modeling)
    other_losses = {cls.__name__: _OWN_LOSS for cls in causal if not calls_loss_function(cls)}
    heads = {"cross_entropy": len(other_losses) < len(causal), FUSED: bool(causal)}
    found = Found(heads=tuple(switch for switch, on in heads.items() if on), other_losses=other_losses)
    classes: list[Any] = [x for x in vars(modeling).values() if inspect.isclass(x) and issubclass(x, nn.Module)]
    classes = [cls for cls in classes if cls.__module__.partition(".")[0] != "torch"]
    for cls in dict.fromkeys(classes):
        binding = binding_of(cls)
        if binding is not None:
            try:
                found.add_layer(cls, verify.built(binding, cls, modeling), cls, binding)
            except (verify.Incomparable, verify.Difference) as failure:
                found.left[cls.__name__] = f"it cannot be compared without a model ({failure})"
        elif source.looks_like_layer(cls):
            found.left[cls.__name__] = _OTHER_CODE
    found.add_ropes(classes, [])
    return found
