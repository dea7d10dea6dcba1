"""Save a step's tensors between its forward and its backward.

`split` takes the tensors out of a step, so that autograd can save them: autograd then raises if one was changed in
place, and hooks on saved tensors can move them. `join` inserts them again. `isolated` hides graphs that a step builds
and consumes internally from hooks on saved tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

_Value = TypeVar("_Value")


# Words in the annotation of a field that holds no tensor.
_PLAIN = frozenset("None bool int float str list tuple torch dtype Pack Tile".split())


class _Place(NamedTuple):
    """Marks the place of a tensor that `split` took out."""

    position: int


def split(value: _Value) -> tuple[_Value, list[Tensor]]:
    """Take the tensors out of nested dataclasses and named tuples.

    Modules, and the modules of bound methods, are not taken apart. Their tensors are listed too, so that autograd
    detects changes to them. Tensors without storage are not listed.

    Returns:
        The same structure without its tensors, and the tensors, each once.
    """
    taken = _Taken()
    return taken.visit(value), taken.tensors


def join(value: _Value, tensors: Sequence[Tensor]) -> _Value:
    """Undo `split`, with the same or other tensors."""
    return _Joined(tensors).visit(value)


# Classes rather than nested functions: a recursive closure is a reference cycle, which keeps its tensors in memory
# until the garbage collector runs.


class _Taken:
    """Collects tensors, each once, and remembers their places."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._places: dict[int, _Place] = {}

    def _place(self, x: Tensor) -> _Place:
        found = self._places.get(id(x))
        if found is None:
            found = self._places[id(x)] = _Place(len(self.tensors))
            self.tensors.append(x)
        return found

    def visit(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return x if x.is_meta else self._place(x)
        module = x.__self__ if isinstance(x, MethodType) else x
        if isinstance(module, nn.Module):
            for tensor in _tensors_of(module):
                self._place(tensor)
            return x
        return _rebuilt(x, self.visit)


class _Joined:
    """Inserts tensors at their places."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def visit(self, x: Any) -> Any:
        return self._tensors[x.position] if isinstance(x, _Place) else _rebuilt(x, self.visit)


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """Return the fields of a dataclass or a named tuple that may hold tensors, according to their annotations."""
    is_dataclass = dataclasses.is_dataclass(kind)
    names = [field.name for field in dataclasses.fields(kind)] if is_dataclass else getattr(kind, "_fields", ())
    annotations: dict[str, Any] = {}
    if names:
        for base in reversed(kind.__mro__[:-1]):
            annotations.update(vars(base).get("__annotations__", {}))
    return tuple(name for name in names if not _PLAIN.issuperset(re.findall(r"\w+", str(annotations.get(name, name)))))


def _rebuilt(x: Any, visit: Callable[[Any], Any]) -> Any:
    """Rebuild a dataclass or a named tuple with its fields visited; return anything else unchanged."""
    names = _fields(type(x))  # type: ignore[arg-type]
    if not names:
        return x
    if isinstance(x, tuple):
        return x._replace(**{name: visit(getattr(x, name)) for name in names})  # type: ignore[attr-defined]
    # `dataclasses.replace` takes several times as long.
    result = object.__new__(type(x))
    fields = vars(result)
    fields.update(vars(x))
    for name in names:
        if fields[name] is not None:
            fields[name] = visit(fields[name])
    return result


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters, buffers and plain attributes of a module and its children."""
    for each in module.modules() if module._modules else (module,):
        for values in (each._parameters, each._buffers, vars(each)):
            for x in values.values():
                if isinstance(x, Tensor) and not x.is_meta:
                    yield x


def _any_hooks() -> bool:
    """Return whether hooks on saved tensors are active, with public functions only: disabling hooks raises if there are
    any.
    """
    try:
        with disable_saved_tensors_hooks(""):
            return False
    except RuntimeError:
        return True


def _probed() -> Callable[[bool], Any] | None:
    """Return torch's private function for the active hooks, which takes 50 ns, or None if this version lacks it."""
    try:
        top = torch._C._autograd._top_saved_tensors_default_hooks
        top(False)
    except (AttributeError, TypeError):
        return None
    return top


_top_hooks = _probed()


def hooks_active() -> bool:
    """Return whether the caller's hooks, such as a checkpoint or an offloader, will see what autograd saves."""
    if _top_hooks is None:
        return _any_hooks()
    hooks = _top_hooks(False)
    return hooks is not None and hooks[0] is not _pack


def _pack(x: Tensor) -> tuple[Tensor, int]:
    return x.detach(), x._version  # detached: a result that holds its own node would never be freed


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    x, version = packed
    # With hooks, torch does not check versions.
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(x.shape)} is at version {x._version}; expected version {version} instead"
        )
    return x


def isolated() -> AbstractContextManager[object]:
    """Hide saved tensors from active hooks: autograd applies only the innermost of nested hooks."""
    return saved_tensors_hooks(_pack, _unpack) if hooks_active() else nullcontext()
