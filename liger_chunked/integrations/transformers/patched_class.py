"""Patched classes: a subclass that all patched modules of a class share. Dynamo compiles it once."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from liger_chunked.integrations.transformers import detect, head
from liger_chunked.integrations.transformers.detect import STOCK
from liger_chunked.integrations.transformers.experts import EXPERTS_GATE, experts_method
from liger_chunked.integrations.transformers.layers import Binding

Method = Callable[..., Any]
_PATCH = "_liger_patch"


@dataclass(frozen=True)
class Patch:
    """A method's replacement: a layer, or None for the forward of `head.py`."""

    binding: Binding | None = None

    @property
    def method(self) -> str:
        return "forward" if self.binding is None else self.binding.layer.method


def patched_class(cls: Any, patch: Patch) -> Any:
    return _subclass(cls, patch, getattr(cls, patch.method), cls.forward)


@functools.cache
def layer_method(binding: Binding, stock: Method) -> Method:
    """Compile a method like `stock` that passes inputs and attributes to the layer.

    Each has its own code, because Dynamo limits a code's compilations.
    """
    owner, *parameters = inspect.signature(stock).parameters.values()
    inputs = ", ".join(x.name for x in parameters)
    taken = ", ".join(x.name if x.default is x.empty else f"{x.name}={x.default!r}" for x in (owner, *parameters))
    reads = binding.reads.items()
    attributes = "".join(
        f", {owner.name}.{n}" if needed else f", getattr({owner.name}, {n!r}, None)" for n, needed in reads
    )
    namespace: dict[str, Any] = {"_run": binding.layer.run}
    exec(f"def {binding.layer.method}({taken}):\n    return _run({inputs}{attributes})", namespace)
    method = namespace[binding.layer.method]
    vars(method)[STOCK] = stock
    return method


@functools.cache
def _subclass(cls: Any, patch: Patch, method: Method, forward: Method) -> Any:  # forward: a key of the cache
    def reduce(self: Any, protocol: Any) -> Any:
        # Nothing can import this class.
        reduced = super(subclass, self).__reduce_ex__(protocol)
        if type(self) is not subclass:
            return reduced
        make, arguments, *state = reduced
        arguments = tuple(cls if argument is subclass else argument for argument in arguments)
        return (_rebuilt, (patch, make, arguments), *state)

    named = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    if patch.binding is None:
        replacement = class_forward(method)
    else:
        replacement = layer_method(patch.binding, getattr(method, STOCK, method))
    namespace = {**named, "__reduce_ex__": reduce, patch.method: replacement, _PATCH: patch}
    if patch.method == EXPERTS_GATE and (of_experts := experts_method(cls)) is not None:
        namespace["forward"] = of_experts
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
    if _PATCH in vars(cls):
        return cls.__bases__[0]
    return _rebased(cls) if hasattr(cls, _PATCH) else cls


@functools.cache
def _rebased(cls: Any) -> Any:
    """Rebuild a class derived from a patched one, as by `fully_shard`."""
    namespace = {name: x for name, x in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, tuple(map(stock_class, cls.__bases__)), namespace)


def patch_of(module: nn.Module) -> Patch | None:
    return getattr(type(module), _PATCH, None)


def is_patched(module: nn.Module) -> bool:
    return patch_of(module) is not None


def has_our_layer(module: nn.Module) -> bool:
    patch = patch_of(module)
    return patch is not None and patch.binding is not None


def set_patch(module: nn.Module, patch: Patch | None) -> None:
    stock = stock_class(type(module))
    _set_class(module, stock if patch is None else patched_class(stock, patch))


def _set_class(module: nn.Module, cls: Any) -> None:
    before = type(module)
    if before is cls:
        return
    object.__setattr__(module, "__class__", cls)
    # accelerate's hooks keep a bound method.
    for slot in detect.FORWARD_SLOTS:
        bound = vars(module).get(slot)
        if isinstance(bound, types.MethodType) and bound.__func__ is before.forward:
            vars(module)[slot] = types.MethodType(cls.forward, module)


def class_forward(stock: Method) -> Method:
    stock = getattr(stock, STOCK, stock)  # of a patched family

    @functools.wraps(stock)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return head.forward(self, functools.partial(stock, self), *args, **kwargs)

    vars(forward)[STOCK] = stock
    return forward
