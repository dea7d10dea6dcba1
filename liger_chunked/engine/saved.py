"""Save a step for a second backward, and hide its inner graphs from hooks on saved tensors.

`split` takes the tensors out of a step, so that autograd saves them. Autograd then raises if one was changed in place,
and hooks on saved tensors can move them. `join` puts the tensors back. `isolated` hides the graphs that a step builds
and frees inside its forward.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

# A field whose annotation has only these words holds no tensor.
_PLAIN = frozenset("None bool int float str list tuple Sequence torch dtype Pack Tile LogitOptions".split())
# Types of values that hold no tensor; `_Snapshot` adds the ones it meets.
_HOLD_NOTHING = {type(None), bool, int, float, str}
# Attributes that every module has, and which of them hold tensors.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_REGISTERS = ("_parameters", "_buffers", "_modules")
# Larger containers are not searched: a loss may keep a log of all its steps.
_MOST_ELEMENTS = 100
_UNASSIGNED = CellType()


class _Place(NamedTuple):
    """The position of a tensor that `split` took out."""

    position: int


_place = functools.cache(_Place)  # making one takes longer than finding it


class Parts(NamedTuple):
    """A value without its tensors, and the modules that it calls."""

    value: Any
    modules: tuple[_Snapshot, ...]


def split(value: Any) -> tuple[Parts, list[Tensor]]:
    """Take the tensors out of nested dataclasses and named tuples.

    A copy with the present settings replaces each module, and each module of a bound method. The copy keeps its
    tensors. Meta tensors and inference tensors stay in the structure: autograd cannot save inference tensors.

    Returns:
        The same structure without its tensors, and the tensors, each once.
    """
    taken = _Taken()
    value = taken.visit(value)
    return Parts(value, tuple(taken.modules.values())), taken.tensors


def join(parts: Parts, tensors: Sequence[Tensor]) -> Any:
    """Undo `split`, with the same or other tensors.

    Raises:
        RuntimeError: a tensor of a module was changed in place, or a child module has a new parameter, buffer or child.
    """
    for snapshot in parts.modules:
        snapshot.check()
    return _Joined(tensors).visit(parts.value)


# Classes rather than nested functions: a recursive closure is a reference cycle, which keeps its tensors in memory
# until the garbage collector runs.


class _Taken:
    """Collects tensors, each once, and snapshots of modules by their id."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.modules: dict[int, _Snapshot] = {}
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
        found = self.modules.get(id(module))
        if found is None:
            found = self.modules[id(module)] = _Snapshot(module)
        return found.copy


class _Joined:
    """Puts tensors back in their places."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def visit(self, x: Any) -> Any:
        if isinstance(x, _Place):
            return self._tensors[x.position]
        names = _FIELDS[type(x)]
        return _rebuilt(x, names, self.visit) if names else x


class _Fields(dict[type, tuple[str, ...]]):
    """Maps a dataclass or named tuple to its fields that may hold tensors, according to their annotations."""

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
    """Rebuild a dataclass or a named tuple with the fields `names` visited."""
    if isinstance(x, tuple):
        return tuple.__new__(type(x), map(visit, x))
    # `dataclasses.replace` takes several times as long.
    result = object.__new__(type(x))
    fields = x.__dict__.copy()
    for name in names:
        value = fields[name]
        if value is not None:
            fields[name] = visit(value)
    object.__setattr__(result, "__dict__", fields)  # the dataclass may be frozen
    return result


class _Snapshot:
    """A copy of a module and of its small containers, and the versions of all tensors that the module reaches.

    Child modules and captured variables of functions are searched for tensors, and not copied. The copy's tensors are
    detached: a loss may store its last value, whose graph holds the snapshot of the step before, and so on.
    """

    def __init__(self, module: nn.Module) -> None:
        copy = self.copy = object.__new__(type(module))
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._registers: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of children, and as they are now
        self._seen: dict[int, Any] = {id(module): module}
        attributes = module.__dict__.copy()
        for name in _own_attributes(attributes):
            attributes[name] = self._kept(attributes[name])
        for name in _REGISTERS:
            register = attributes[name]
            attributes[name] = {key: self._kept(x) for key, x in register.items()} if register else {}
        object.__setattr__(copy, "__dict__", attributes)
        self._seen.clear()

    def check(self) -> None:
        for x, version in zip(self._tensors, self._versions, strict=True):
            _check_version(x, version)
        for now, before in self._registers:
            if list(map(id, now.values())) != list(map(id, before.values())):
                raise RuntimeError(
                    f"{_MODIFIED}: a module within {type(self.copy).__name__} has another parameter, buffer or child"
                )

    def _kept(self, x: Any) -> Any:
        if type(x) in _HOLD_NOTHING:
            return x
        if isinstance(x, Tensor):
            return self._kept_tensor(x)
        if id(x) not in self._seen:
            self._seen[id(x)] = x
            self._seen[id(x)] = self._kept_object(x)
        return self._seen[id(x)]

    def _kept_tensor(self, x: Tensor) -> Tensor:
        if x.grad_fn is not None:
            x = x.detach()
        if not (x.is_inference() or x.is_meta):
            self._tensors.append(x)
            self._versions.append(x._version)
        return x

    def _kept_object(self, x: Any) -> Any:
        if isinstance(x, (dict, list, tuple, set)):
            if len(x) > _MOST_ELEMENTS:
                return x
            if isinstance(x, dict):
                values = {key: self._kept(each) for key, each in x.items()}
                return values if type(x) is dict else x
            kept = [self._kept(each) for each in x]
            return kept if type(x) is list else tuple.__new__(type(x), kept) if isinstance(x, tuple) else x
        names = _FIELDS[type(x)]
        if names:
            return _rebuilt(x, names, self._kept)
        if isinstance(x, nn.Module):
            attributes = vars(x)
            found = [attributes[name] for name in _own_attributes(attributes)]
            for name in _REGISTERS:
                register = getattr(x, name)
                if register:
                    self._registers.append((register, dict(register.items())))
                    found += register.values()
        elif isinstance(x, FunctionType):
            found = [cell.cell_contents for cell in x.__closure__ or () if cell != _UNASSIGNED]
            found += (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
        elif isinstance(x, MethodType):
            found = [x.__self__]
        elif isinstance(x, functools.partial):
            found = [x.func, *x.args, *x.keywords.values()]
        else:
            _HOLD_NOTHING.add(type(x))
            return x
        for each in found:
            self._kept(each)
        return x


def _own_attributes(attributes: dict[str, Any]) -> list[str]:
    """Return the names of unregistered attributes of a module that may hold tensors."""
    return [name for name, x in attributes.items() if name not in _OF_EVERY_MODULE and type(x) not in _HOLD_NOTHING]


def _any_hooks() -> bool:
    """Return whether hooks on saved tensors are active. Disabling the hooks raises if there are any."""
    try:
        with disable_saved_tensors_hooks(""):
            return False
    except RuntimeError:
        return True


def _probed() -> Callable[[bool], Any] | None:
    """Return torch's private function that reads the active hooks, or None if this version lacks it."""
    try:
        top = torch._C._autograd._top_saved_tensors_default_hooks
        top(False)
    except (AttributeError, TypeError):
        return None
    return top


_top_hooks = _probed()


def hooks_active() -> bool:
    """Return whether hooks of the caller, for example of a checkpoint, see the tensors that autograd saves."""
    if _top_hooks is None:
        return _any_hooks()
    hooks = _top_hooks(False)
    return hooks is not None and hooks[0] is not _pack


_MODIFIED = "one of the variables needed for gradient computation has been modified by an inplace operation"


def _check_version(x: Tensor, version: int) -> None:
    """Raise torch's version error if the tensor was changed in place."""
    if x._version != version:
        raise RuntimeError(
            f"{_MODIFIED}: a tensor of shape {tuple(x.shape)} is at version {x._version}; expected version {version} "
            "instead"
        )


def _pack(x: Tensor) -> tuple[Tensor, int]:
    return x.detach(), x._version  # detached: a result that holds its own node would never be freed


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    x, version = packed
    _check_version(x, version)  # with hooks, torch does not check versions
    return x


def isolated() -> AbstractContextManager[object]:
    """Save tensors as if there were no hooks.

    Autograd calls the innermost of nested hooks only, so hooks that do nothing hide those of the caller.
    """
    return saved_tensors_hooks(_pack, _unpack) if hooks_active() else nullcontext()
