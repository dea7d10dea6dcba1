"""Modes that watch what a call does: the memory it holds, and the products it computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from liger_chunked.deferred.lazy import PLAIN
from liger_chunked.engine import sink
from liger_chunked.kernels import add_rows, backend


class Results(TorchDispatchMode):
    """Call `see` with each tensor with memory that an operation under this mode returns.

    Tensor subclasses, such as deferred logits, handle their operations before this mode does: it sees the operations on
    plain tensors that they run.
    """

    def see(self, x: Tensor) -> None:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t not in PLAIN for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if type(x) in PLAIN and not x.is_meta:
                self.see(x)
        return result


class Memory(Results):
    """Track the bytes of tensors created under this mode: their peak, and the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.largest = 0
        self._known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def _freed(self, n_bytes: int) -> None:
        self.alive -= n_bytes

    def expect(self, *given: Tensor) -> None:
        """Exclude tensors that existed before."""
        for x in given:
            self._known[x.untyped_storage()] = 0

    def see(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage not in self._known:
            n_bytes = storage.nbytes()
            self._known[storage] = n_bytes
            self.alive += n_bytes
            self.peak = max(self.peak, self.alive)
            self.largest = max(self.largest, n_bytes)
            weakref.finalize(storage, self._freed, n_bytes)


@contextmanager
def memory_beside(*given: Tensor) -> Iterator[Memory]:
    """Track the memory of what runs inside, without the given tensors.

    The CPU path works in blocks of a constant size, which are made smaller here than the shapes of the tests.
    """
    with pytest.MonkeyPatch.context() as patch, Memory() as memory:
        patch.setitem(backend.TORCH_BLOCK, "cpu", 1 << 12)
        for module in (sink, add_rows):
            patch.setattr(module, "UPCAST_BLOCK", 1 << 12)
        memory.expect(*given)
        yield memory


def noted(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]) -> list[Any]:
    """Replace `owner.name` by a function that appends `note` of its arguments to the returned list before it runs."""
    function, notes = getattr(owner, name), []

    def noting(*args: Any, **kwargs: Any) -> Any:
        notes.append(note(*args))
        return function(*args, **kwargs)

    patch.setattr(owner, name, noting)
    return notes


class Products(TorchDispatchMode):
    """Record the dtypes of the operands of every matrix product under this mode."""

    NAMES = ("mm", "addmm", "addmm_", "bmm", "baddbmm")

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket.__name__ in self.NAMES:
            self.dtypes += [x.dtype for x in args[-2:] if isinstance(x, Tensor)]
        return func(*args, **(kwargs or {}))


def _addmm_flops(out: Any, a: tuple[int, int], b: tuple[int, int], **kwargs: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


class Flops(TorchDispatchMode):
    """Counts FLOPs as `flop_counter`, but hooks no module's output: hooks change what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm_.default:
            self.total += _addmm_flops(*(x.shape for x in args[:3]))
        elif (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def flop_counter() -> FlopCounterMode:
    """Return a mode that counts FLOPs, also those of `addmm_`, which torch's own counter leaves out."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm_flops})
