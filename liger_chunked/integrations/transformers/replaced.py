"""Replaced attributes, and rotary functions of modeling modules."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
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


def stock_rope(module: str, name: str) -> Any:
    """Return a rotary function of a module; the stock one, where `rope_of_family` replaced it."""
    current = getattr(importlib.import_module(module), name)
    return vars(current)["__wrapped__"] if OURS in vars(current) else current


def rope_of_family(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that all models of a patched family call in place of `stock`.

    It is `stock` itself if no kernel computes it: a pickled model may meet another version of its modeling file.
    """
    ours = rope_of(stock)
    return stock if ours is None else _outside_transforms(ours, stock)


def add_rope(module: str, name: str) -> str:
    """Add a rotary function of ours to a module, beside the stock one, and return its name there.

    It calls what the module has in the place of the stock function, if somebody replaced that.
    """
    owner, stock = importlib.import_module(module), stock_rope(module, name)
    ours = rope_of_family(stock)

    @functools.wraps(stock)
    def rotated(*args: Any, **kwargs: Any) -> Any:
        current = getattr(owner, name)
        return (ours if current is stock else current)(*args, **kwargs)

    added = f"_liger_{name}"
    setattr(owner, added, rotated)
    return added


@functools.cache
def _outside_transforms(ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return `ours`, but `stock` under transforms of torch.func: all models of a patched family call it."""

    @functools.wraps(stock)
    def rotated(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and transforms_are_active():
            return stock(*args, **kwargs)
        return ours(*args, **kwargs)

    vars(rotated)[OURS] = ours
    return rotated
