"""What stays between a forward and its backward, and who may see it.

`split` takes the tensors out of a step, so that autograd saves them: it then raises where one was changed in place, and
hooks on saved tensors can move them. `join` puts them back. `isolated` hides the graphs that a step builds and uses up
by itself from hooks on saved tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

# Words of the annotation of a field that holds no tensor.
_PLAIN = frozenset("None bool int float str list tuple Sequence torch dtype Pack Tile LogitOptions".split())
# Types of values that hold no tensor, as far as they have been met.
_HOLD_NOTHING = {type(None), bool, int, float, str}
# Attributes of every module, hooks for the most part, and those of them that hold tensors.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_REGISTERS = ("_parameters", "_buffers", "_modules")
# Elements of a container that is searched: a loss may keep a log of all its steps.
_MOST_ELEMENTS = 100
_UNASSIGNED = CellType()


class _Place(NamedTuple):
    """Stands for a tensor that `split` took out."""

    position: int


_place = functools.cache(_Place)  # making one takes longer than finding it


class _Watched(NamedTuple):
    """A copy of a module, its tensors, and their versions at the time of `split`."""

    module: nn.Module
    tensors: list[Tensor]
    versions: list[int]


class Parts(NamedTuple):
    """A value without its tensors, and the modules that it calls."""

    value: Any
    watched: tuple[_Watched, ...]


def split(value: Any) -> tuple[Parts, list[Tensor]]:
    """Take the tensors out of nested dataclasses and named tuples.

    A module, also that of a bound method, becomes a shallow copy, so that `join` brings back its present settings. Its
    tensors stay in it. So do tensors without storage, and tensors that were made in inference mode, which autograd
    cannot save.

    Returns:
        The same structure without its tensors, and these, each once.
    """
    taken = _Taken()
    value = taken.visit(value)
    return Parts(value, tuple(taken.watched.values())), taken.tensors


def join(parts: Parts, tensors: Sequence[Tensor]) -> Any:
    """Undo `split`, with the same or other tensors.

    Raises:
        RuntimeError: a tensor of a module was changed in place since, or replaced.
    """
    for module, before, versions in parts.watched:
        now = _tensors_of(module)
        if len(now) != len(before) or any(x is not y for x, y in zip(now, before, strict=True)):
            raise RuntimeError(f"{_MODIFIED}: a tensor that {type(module).__name__} reads was replaced by another")
        for x, version in zip(now, versions, strict=True):
            _check_version(x, version)
    return _Joined(tensors).visit(parts.value)


# Classes rather than nested functions: one that calls itself is a cycle, which keeps its tensors until it is collected.


class _Taken:
    """Tensors that were taken out, each once, and where they were; the modules, by their id."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.watched: dict[int, _Watched] = {}
        self._places: dict[int, _Place] = {}

    def visit(self, x: Any) -> Any:
        names = _FIELDS[type(x)]
        if names:
            return _rebuilt(x, names, self.visit)
        if isinstance(x, Tensor):
            found = self._places.get(id(x))
            if found is None:
                if x.is_inference() or x.is_meta:
                    return x
                found = self._places[id(x)] = _place(len(self.tensors))
                self.tensors.append(x)
            return found
        if isinstance(x, nn.Module):
            return self._copy(x)
        if isinstance(x, MethodType) and isinstance(x.__self__, nn.Module):
            return MethodType(x.__func__, self._copy(x.__self__))
        return x

    def _copy(self, module: nn.Module) -> nn.Module:
        found = self.watched.get(id(module))
        if found is None:
            found = self.watched[id(module)] = _watched(module)
        return found.module


class _Joined:
    """Tensors that go back to their places."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def visit(self, x: Any) -> Any:
        if isinstance(x, _Place):
            return self._tensors[x.position]
        names = _FIELDS[type(x)]
        return _rebuilt(x, names, self.visit) if names else x


class _Fields(dict[type, tuple[str, ...]]):
    """The fields of a dataclass or a named tuple that may hold tensors, by their annotations."""

    def __missing__(self, kind: Any) -> tuple[str, ...]:
        is_dataclass = not issubclass(kind, nn.Module) and dataclasses.is_dataclass(kind)
        names = [field.name for field in dataclasses.fields(kind)] if is_dataclass else getattr(kind, "_fields", ())
        annotations: dict[str, Any] = {}
        if names:
            for base in reversed(kind.__mro__[:-1]):
                annotations.update(vars(base).get("__annotations__", {}))
        words = {name: re.findall(r"\w+", str(annotations.get(name, name))) for name in names}
        found = self[kind] = tuple(name for name in names if not _PLAIN.issuperset(words[name]))
        return found


_FIELDS = _Fields()


def _rebuilt(x: Any, names: tuple[str, ...], visit: Callable[[Any], Any]) -> Any:
    """A dataclass or a named tuple with the fields `names` visited."""
    if isinstance(x, tuple):
        return tuple.__new__(type(x), map(visit, x))
    # Not `dataclasses.replace`: it takes several times as long.
    result = object.__new__(type(x))
    fields = result.__dict__
    fields.update(x.__dict__)
    for name in names:
        value = fields[name]
        if value is not None:
            fields[name] = visit(value)
    return result


def _watched(module: nn.Module) -> _Watched:
    """A shallow copy of a module, without the graphs that its attributes may hang on."""
    copy = object.__new__(type(module))
    attributes = copy.__dict__
    attributes.update(module.__dict__)
    for name in _REGISTERS:
        attributes[name] = attributes[name].copy()
    tensors = _tensors_of(copy)
    if not tensors:
        return _Watched(copy, tensors, [])
    if any(x.grad_fn is not None for x in tensors):
        # A loss that keeps its last value would keep the graph of that, and with it the copy before this one.
        for name, x in attributes.items():
            if isinstance(x, Tensor):
                attributes[name] = x.detach()
        tensors = _tensors_of(copy)
    return _Watched(copy, tensors, [x._version for x in tensors])


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """The tensors that a module holds: in its attributes, in small containers of these, in its children, and captured
    by its functions.
    """
    found: list[Tensor] = []
    left: list[Any] = [module]
    seen: set[int] = set()
    while left:
        x = left.pop()
        if type(x) in _HOLD_NOTHING:
            continue
        if isinstance(x, Tensor):
            if not (x.is_inference() or x.is_meta):
                found.append(x)
        elif id(x) not in seen:
            seen.add(id(x))
            left += _held(x)
    return found


def _held(x: Any) -> Iterable[Any]:
    """The values that an object holds, some of which may be tensors."""
    if isinstance(x, (dict, list, tuple, set)):
        if len(x) > _MOST_ELEMENTS:
            return ()
        return x.values() if isinstance(x, dict) else x
    if isinstance(x, nn.Module):
        own = [v for name, v in vars(x).items() if name not in _OF_EVERY_MODULE and type(v) not in _HOLD_NOTHING]
        return (*own, *x._parameters.values(), *x._buffers.values(), *x._modules.values())
    if isinstance(x, FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or () if cell != _UNASSIGNED]
        return (*cells, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
    if isinstance(x, MethodType):
        return (x.__self__,)
    if isinstance(x, functools.partial):
        return (x.func, *x.args, *x.keywords.values())
    names = _FIELDS[type(x)]
    if not names:
        _HOLD_NOTHING.add(type(x))
    return [getattr(x, name) for name in names]


def _any_hooks() -> bool:
    """Whether hooks on saved tensors are active, by the public interface: disabling them raises if there are any."""
    try:
        with disable_saved_tensors_hooks(""):
            return False
    except RuntimeError:
        return True


def _probed() -> Callable[[bool], Any] | None:
    """The function of torch that returns the active hooks in 50 ns, where this version of torch has it."""
    try:
        top = torch._C._autograd._top_saved_tensors_default_hooks
        top(False)
    except (AttributeError, TypeError):
        return None
    return top


_top_hooks = _probed()


def hooks_active() -> bool:
    """Whether hooks of the caller, a checkpoint or an offloader, will see what autograd saves."""
    if _top_hooks is None:
        return _any_hooks()
    hooks = _top_hooks(False)
    return hooks is not None and hooks[0] is not _pack


_MODIFIED = "one of the variables needed for gradient computation has been modified by an inplace operation"


def _check_version(x: Tensor, version: int) -> None:
    """Raise what torch raises for a saved tensor that was changed."""
    if x._version != version:
        raise RuntimeError(
            f"{_MODIFIED}: a tensor of shape {tuple(x.shape)} is at version {x._version}; expected version {version} "
            "instead"
        )


def _pack(x: Tensor) -> tuple[Tensor, int]:
    return x.detach(), x._version  # detached: a result that holds its own node would never be freed


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    x, version = packed
    _check_version(x, version)  # torch leaves this to the hooks
    return x


def isolated() -> AbstractContextManager[object]:
    """Save tensors as if there were no hooks: of nested hooks, autograd applies the innermost alone."""
    return saved_tensors_hooks(_pack, _unpack) if hooks_active() else nullcontext()
