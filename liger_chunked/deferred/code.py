"""Whose code runs: what wraps a forward or a hook, and whether a framework or the user wrote it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from liger_chunked.deferred.swap import FORWARD_SLOTS as FORWARD_SLOTS

# Their hooks and forwards gather parameters or move devices, and accept any output.
_FRAMEWORKS = {"torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "liger_chunked"}


def forward_slot(module: nn.Module) -> str:
    """Return the name of the attribute that holds a forward set on the instance."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward that was set on this instance, or None."""
    forward = vars(module).get(forward_slot(module))
    return None if getattr(forward, "__func__", None) is type(module).forward else forward


def unwrapped(function: Any) -> Iterator[Any]:
    """Yield a function, the function that it wraps, and so on."""
    while function is not None:
        yield function
        partial = isinstance(function, functools.partial)
        function = function.func if partial else getattr(function, "__wrapped__", None)


def foreign_code(function: Any, known: type | None = None) -> Any:
    """Return the outermost wrapper that no framework defines, unless a forward of `known` comes first."""
    theirs = [] if known is None else [vars(cls)["forward"] for cls in known.__mro__ if "forward" in vars(cls)]
    for code in unwrapped(function):
        if getattr(code, "__func__", code) in theirs:
            return None
        # functools.wraps copies `__module__`, not the globals.
        module = getattr(code, "__globals__", {}).get("__name__") or type(code).__module__
        if module.partition(".")[0] not in _FRAMEWORKS and not isinstance(code, functools.partial):
            return code
    return None
