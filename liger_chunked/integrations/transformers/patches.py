"""Attributes that are replaced for a while, on modules and on classes."""

from __future__ import annotations

from typing import Any

from torch import nn

_ABSENT = "<absent>"


class Patches:
    """What was replaced where, so that it can be put back exactly."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name = value`, in the owner's own dictionary."""
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT), value))
        _set(owner, name, value)

    def undo(self) -> None:
        """Put back what was there. What somebody else has replaced since is theirs, and stays."""
        while self._replaced:
            owner, name, before, value = self._replaced.pop()
            if vars(owner).get(name) is not value:
                continue
            if before is _ABSENT:
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
