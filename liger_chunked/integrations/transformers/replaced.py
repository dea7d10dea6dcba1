"""Replaced attributes, and rotary functions, which a module's patched models share."""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from liger_chunked.integrations.transformers.overrides import rope_of
from liger_chunked.private import transforms_are_active

_ABSENT = object()
OURS = "_liger_ours"  # attribute of a rotary function: the one of ours that it calls


class Patches:
    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT), value))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._replaced:
            owner, name, before, value = self._replaced.pop()
            if vars(owner).get(name) is not value:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


class _Rope:
    """Replaces a module's rotary function while a holder lives."""

    def __init__(self, module: str, name: str) -> None:
        self._owner, self._name = importlib.import_module(module), name
        self._patches = Patches()
        self._holders: dict[int, weakref.ref[Any]] = {}
        self._stock: Any = None

    @property
    def stock(self) -> Any:
        return self._stock if self._holders else getattr(self._owner, self._name)

    def hold(self, applied: Any) -> None:
        if not self._holders:
            self._stock = getattr(self._owner, self._name)
            self._replace()
        key = id(applied)
        self._holders[key] = weakref.ref(applied, lambda _: self.release(key))

    def release(self, key: int) -> None:
        self._holders.pop(key, None)
        if not self._holders:
            self._patches.undo()

    def give_up(self) -> None:
        """Restore the function, which is no longer what holders replaced."""
        self._holders.clear()
        self._patches.undo()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        self._patches.undo()
        try:
            yield
        finally:
            if self._holders:
                self._replace()

    def _replace(self) -> None:
        ours = rope_of(self._stock)
        self._patches.set(
            self._owner, self._name, self._stock if ours is None else _outside_transforms(ours, self._stock)
        )


@functools.cache
def _outside_transforms(ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return `ours`, but `stock` under transforms of torch.func: models that are not patched call it too."""

    @functools.wraps(stock)
    def rotated(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and transforms_are_active():
            return stock(*args, **kwargs)
        return ours(*args, **kwargs)

    vars(rotated)[OURS] = ours
    return rotated


ROPES = functools.cache(_Rope)


# Where layers of older transformers keep functions that kernels of the hub may replace.
KEPT_ROPE, KEPT_FUNCTIONS = "rotary_fn", "_hidden_kernels"


def keep_rope(model: torch.nn.Module, patched: bool) -> None:
    """Let layers that keep a rotary function, as in older transformers, keep the patched or stock one.

    Their forward calls the one of their module. But pickle writes a function as its name, and refuses one that is not
    what its module has under this name.
    """
    for layer in model.modules():
        fields = vars(layer)
        if KEPT_ROPE in fields:
            fields[KEPT_ROPE] = _current(fields[KEPT_ROPE], patched)
        functions = fields.get(KEPT_FUNCTIONS) or {}
        for name, function in functions.items():
            functions[name] = _current(function, patched)


def _current(kept: Any, patched: bool) -> Any:
    """Return what the function's module has under its name if `patched`, else the stock function."""
    if not isinstance(kept, types.FunctionType):
        return kept
    if patched:
        current = getattr(importlib.import_module(kept.__module__), kept.__name__, kept)
        return current if hasattr(current, OURS) else kept  # not what somebody else put there
    return kept.__wrapped__ if OURS in vars(kept) else kept  # type: ignore[attr-defined]
