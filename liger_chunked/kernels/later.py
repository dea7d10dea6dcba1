"""Triton's part of the kernels' modules, put there by the first launch: `import triton` takes longer than `import
liger_chunked`, and a process without a GPU needs none of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

HAS_TRITON = find_spec("triton") is not None  # there are no wheels outside Linux; the torch path runs there


class Later:
    """Stands for a global that kernels read: a function of theirs, a number, or `triton.language`."""

    def __init__(self, make: Callable[[], Any], function: Callable[..., Any] | None = None) -> None:
        self._make = make
        self.function = function

    @functools.cached_property
    def value(self) -> Any:
        return self._make()


tl: Any = Later(lambda: import_module("triton.language"))


def constant(value: Any) -> Any:
    """Mark a number that kernels read."""
    return Later(lambda: import_module("triton.language").constexpr(value))


def jit(function: Callable[..., Any]) -> Any:
    """Mark a function that kernels call."""
    return Later(lambda: import_module("triton").jit(function), function)


def jitted(kernel: Callable[..., Any]) -> Any:
    """Return `triton.jit(kernel)`, with values in place of `Later` in every module that it reads."""
    _fill(kernel.__globals__)
    return import_module("triton").jit(kernel)


def _fill(names: dict[str, Any]) -> None:
    later = {name: x for name, x in names.items() if isinstance(x, Later)}
    names.update({name: x.value for name, x in later.items()})
    for x in later.values():
        if x.function is not None:
            _fill(x.function.__globals__)
