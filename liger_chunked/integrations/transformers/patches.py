"""Attributes that are replaced for a while, on modules and on classes."""

from __future__ import annotations

import types
from typing import Any

from torch import nn

# Where the forward of one module may stand: hooks of accelerate put the one that they find aside, and later back.
_FORWARD_SLOTS = ("forward", "_old_forward")


class _Absent:
    """Stands for no attribute; the class itself, which copies and pickles leave as it is."""


class Patches:
    """What was replaced where, so that it can be put back exactly."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name = value`, in the owner's own dictionary."""
        self._replaced.append((owner, name, vars(owner).get(name, _Absent), value))
        _set(owner, name, value)

    def undo(self) -> None:
        """Put back what was there. What somebody else has replaced since is theirs, and stays."""
        while self._replaced:
            owner, name, before, value = self._replaced.pop()
            for slot in _FORWARD_SLOTS if name in _FORWARD_SLOTS else (name,):
                if vars(owner).get(slot) is value:
                    _put_back(owner, slot, before)


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is not _Absent:
        _set(owner, name, before)
    elif name == "_old_forward":  # the hook, which came later, calls it
        _set(owner, name, types.MethodType(type(owner).forward, owner))
    else:
        delattr(owner, name)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, nn.Module):
        vars(owner)[name] = value
    else:
        setattr(owner, name, value)


def forward_slot(module: nn.Module) -> str:
    """The attribute that holds the forward of one module: hooks of accelerate call the one they have put aside."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"
