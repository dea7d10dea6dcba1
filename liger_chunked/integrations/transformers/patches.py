"""Methods and attributes that are replaced for a while, on modules and on classes.

A module gets a method by a subclass of its own class (`replace_method`). All modules of a class share that subclass, so
Dynamo compiles them once, and a copy of a module runs its own parameters. A class, or the projection of one call, gets
an attribute (`Patches`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Method = Callable[..., Any]
Make = Callable[[Method], Method]
"""From a method to its replacement. Must be hashable, and picklable if the model is to be pickled."""

# The two places of an instance's forward: hooks of accelerate put the forward that they find into the second one.
_FORWARD_SLOTS = ("forward", "_old_forward")
_PATCH = "_liger_patch"


@dataclass(frozen=True)
class Instead:
    """Makes `run` the replacement of any method."""

    run: Method

    def __call__(self, method: Method) -> Method:
        return self.run


@dataclass(frozen=True)
class Patch:
    """Which method of a class was replaced, and by what."""

    method: str
    make: Make


def _patched_class(cls: Any, patch: Patch) -> Any:
    """A subclass of the same name whose method is the replacement. There is one for each class, method and `make`."""
    return _subclass(cls, patch, getattr(cls, patch.method))


@functools.cache
def _subclass(cls: Any, patch: Patch, method: Method) -> Any:
    def reduce(self: Any, protocol: Any) -> Any:
        """Copies and pickles name the original class: nobody can import this one."""
        reduced = super(subclass, self).__reduce_ex__(protocol)
        if type(self) is not subclass:
            return reduced
        make, arguments, *state = reduced
        arguments = tuple(cls if argument is subclass else argument for argument in arguments)
        return (_rebuilt, (patch, make, arguments), *state)

    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": reduce,
        patch.method: patch.make(method),
        _PATCH: patch,
    }
    subclass = type(cls)(cls.__name__, (cls,), namespace)
    return subclass


def _rebuilt(patch: Patch, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    module = make(*arguments)
    object.__setattr__(module, "__class__", _patched_class(type(module), patch))
    return module


def stock_class(cls: Any) -> Any:
    """The class without our patch."""
    if _PATCH in vars(cls):
        return cls.__bases__[0]
    return _rebased(cls) if hasattr(cls, _PATCH) else cls


@functools.cache
def _rebased(cls: Any) -> Any:
    """Rebuild a class that `fully_shard` or `register_parametrization` derived from a patched one, unpatched."""
    namespace = {name: x for name, x in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, tuple(map(stock_class, cls.__bases__)), namespace)


def is_patched(module: nn.Module) -> bool:
    """Whether `replace_method` gave the module its class."""
    return hasattr(type(module), _PATCH)


def patch_of(module: nn.Module) -> Patch | None:
    """Which method of the module was replaced, and by what; None for no method."""
    return getattr(type(module), _PATCH, None)


def replacement_of(module: nn.Module) -> Make | None:
    """What made the module's replaced method; None where no method was replaced."""
    patch = patch_of(module)
    return None if patch is None else patch.make


def replace_method(module: nn.Module, method: str, make: Make) -> None:
    """Give a module the method `make(method)`, in place of a replacement that it has already."""
    _set_class(module, _patched_class(stock_class(type(module)), Patch(method, make)))


def restore_method(module: nn.Module) -> None:
    """Undo `replace_method`."""
    _set_class(module, stock_class(type(module)))


def _set_class(module: nn.Module, cls: Any) -> None:
    before = type(module)
    if before is cls:
        return
    object.__setattr__(module, "__class__", cls)
    # Hooks of accelerate hold the bound method of the class before.
    for slot in _FORWARD_SLOTS:
        bound = vars(module).get(slot)
        if isinstance(bound, types.MethodType) and bound.__func__ is before.forward:
            vars(module)[slot] = types.MethodType(cls.forward, module)


def has_own_forward(module: nn.Module) -> bool:
    """Whether somebody set a forward on this instance that is not the one of its class.

    Hooks of accelerate do not count where the forward that they call is the one of the class.
    """
    forward = vars(module).get(forward_slot(module))
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


class _Absent:
    """Stands for no attribute; the class itself, which copies and pickles leave as it is."""


class Patches:
    """Attributes that were replaced, to be put back exactly."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name = value`, in the owner's own dictionary."""
        self._replaced.append((owner, name, vars(owner).get(name, _Absent), value))
        _set(owner, name, value)

    def current(self) -> list[tuple[Any, str, Any]]:
        """What was set: owner, name and value."""
        return [(owner, name, value) for owner, name, _, value in self._replaced]

    def undo(self) -> None:
        """Put the attributes back. One that somebody else has replaced since stays as it is."""
        while self._replaced:
            owner, name, before, value = self._replaced.pop()
            if vars(owner).get(name) is not value:
                continue
            if before is _Absent:
                delattr(owner, name)
            else:
                _set(owner, name, before)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, nn.Module):
        vars(owner)[name] = value
    else:
        setattr(owner, name, value)


def forward_slot(module: nn.Module) -> str:
    """The attribute that holds the forward of one module: hooks of accelerate call the one they have put aside."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"
