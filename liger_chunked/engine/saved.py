"""Keep what a backward reads with autograd, wherever it stands in a tree of NamedTuples, dataclasses and dicts.

    save(ctx, tree)         in a Function's forward
    tree = saved(ctx)       in its backward: raises if a tensor changed in place, or the graph was freed

Autograd then watches the tensors' versions, shows them to hooks such as a checkpoint's, and frees them with the graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class _Saved:
    """The place of a tensor in a tree: its number among the tensors that autograd keeps."""

    number: int


class Unsaved:
    """A part of a tree that autograd does not keep: memory for one backward, which can also do without."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def take(self) -> Any:
        """Return the value, and None from then on."""
        value, self._value = self._value, None
        return value


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.init)


def _mapped(tree: Any, leaf_type: type, function: Any) -> Any:
    """Return the tree with `function` applied to its leaves of a type. Plain tuples and lists are not searched."""
    if isinstance(tree, leaf_type):
        return function(tree)
    kind = type(tree)
    if kind is dict:
        return {name: _mapped(x, leaf_type, function) for name, x in tree.items()}
    make: Any = getattr(kind, "_make", None)  # of NamedTuples
    if make is not None:
        return make([_mapped(x, leaf_type, function) for x in tree])
    if not is_dataclass(kind):
        return tree
    changed = {}
    for name in _names(kind):
        x = getattr(tree, name)
        y = _mapped(x, leaf_type, function)
        if y is not x:
            changed[name] = y
    return replace(tree, **changed) if changed else tree


def save(ctx: Any, tree: Any) -> set[int]:
    """Save the tensors of a tree for the backward of an autograd Function, and return their `id`s."""
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}  # a tensor may stand at several places

    def keep(x: Tensor) -> _Saved:
        number = numbers.get(id(x))
        if number is None:
            number = numbers[id(x)] = len(tensors)
            tensors.append(x)
        return _Saved(number)

    ctx.tree = _mapped(tree, Tensor, keep)
    # Autograd cannot save a tensor of inference mode, so it gets a copy.
    ctx.save_for_backward(*[x.clone() if x.is_inference() else x for x in tensors])
    return set(numbers)


def saved(ctx: Any) -> Any:
    """Return the tree that `save` got."""
    tensors = ctx.saved_tensors
    return _mapped(ctx.tree, _Saved, lambda place: tensors[place.number])
