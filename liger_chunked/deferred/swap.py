"""Give one module a subclass of its class, so that a patch travels with copies, pickles and wrappers.

A method that is set on an instance is lost or, worse, bound to the original when the module is copied. A subclass is
neither: `copy.deepcopy`, `pickle` and `torch.save` rebuild it, and Dynamo compiles it once for all modules that share
it.

    set_patch(module, patch)        # type(module) is now a subclass with the methods of `patch`
    patch_of(module) == patch
    set_patch(module, None)         # the class it had
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

# accelerate's hooks keep the forward that an instance had in the second.
FORWARD_SLOTS = ("forward", "_old_forward")

_PATCH = "_liger_patch"
STOCK = "_liger_stock"  # attribute of a patch's forward: the one that it calls


class Patch:
    """Replaces methods of a class. Subclasses are frozen dataclasses: hashable, and they can be pickled."""

    def key(self, cls: Any) -> Hashable:
        """Return the values of `cls` that `methods` reads. Another value makes another subclass."""
        return None

    def methods(self, cls: Any) -> dict[str, Any]:
        """Return the attributes of a subclass of `cls`."""
        raise NotImplementedError


def patched_class(cls: Any, patch: Patch) -> Any:
    """Return the subclass of `cls` that has the methods of `patch`; ValueError if Python cannot make one."""
    return _subclass(cls, patch, patch.key(cls))


@functools.cache
def _subclass(cls: Any, patch: Patch, key: Hashable) -> Any:
    def reduce(self: Any, protocol: Any) -> Any:
        # No module holds this class under its name, so a pickle names the class below it and the patch.
        reduced = super(subclass, self).__reduce_ex__(protocol)
        if type(self) is not subclass:
            return reduced
        make, arguments, *state = reduced
        arguments = tuple(cls if argument is subclass else argument for argument in arguments)
        return (_rebuilt, (patch, make, arguments), *state)

    named = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    namespace = {**named, **patch.methods(cls), "__reduce_ex__": reduce, _PATCH: patch}
    try:
        subclass = type(cls)(cls.__name__, (cls,), namespace)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        raise ValueError(f"{cls.__name__}: no subclass of it can be made ({failure}), and a patch is one") from error
    return subclass


def _rebuilt(patch: Patch, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    module = make(*arguments)
    object.__setattr__(module, "__class__", patched_class(type(module), patch))
    return module


def stock_class(cls: Any) -> Any:
    """Return the class below our subclass; `cls` itself if it has none."""
    if _PATCH in vars(cls):
        return cls.__bases__[0]
    return _rebased(cls) if hasattr(cls, _PATCH) else cls


@functools.cache
def _rebased(cls: Any) -> Any:
    """Rebuild a class that was derived from a patched one, as `fully_shard` does."""
    namespace = {name: x for name, x in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, tuple(map(stock_class, cls.__bases__)), namespace)


def stock_forward(module: Any) -> Any:
    """Return the forward of a module's class that a patch calls."""
    forward = type(module).forward
    return vars(forward).get(STOCK, forward)


def patch_of(module: nn.Module) -> Any:
    """Return the `Patch` of a module, or None."""
    return getattr(type(module), _PATCH, None)


def set_patch(module: nn.Module, patch: Patch | None) -> None:
    stock = stock_class(type(module))
    _set_class(module, stock if patch is None else patched_class(stock, patch))


def _set_class(module: nn.Module, cls: Any) -> None:
    before = type(module)
    if before is cls:
        return
    object.__setattr__(module, "__class__", cls)
    # accelerate's hooks keep a bound method.
    for slot in FORWARD_SLOTS:
        bound = vars(module).get(slot)
        if isinstance(bound, types.MethodType) and bound.__func__ is before.forward:
            vars(module)[slot] = types.MethodType(cls.forward, module)
