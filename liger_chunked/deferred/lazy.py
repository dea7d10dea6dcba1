"""Tensors without values: what stand-in logits and their gradients have in common.

A wrapper subclass of `torch.Tensor` has a shape, a dtype, a device and a place in the autograd graph, but no memory.
Autograd, hooks, FSDP, DDP and checkpoints see a tensor. Below autograd, `__torch_dispatch__` gets each operation on it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_chunked.private import aten as aten
from liger_chunked.private import breaks_graph, skip_frame, tracing_callback, tree_leaves, tree_map_only

# The classes of PyTorch's plain tensors.
PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)

# Operations that read only the shape, dtype and device of their first argument.
SHAPED_LIKE = {
    getattr(aten, name).default
    for name in "empty_like zeros_like ones_like rand_like randn_like new_empty new_zeros new_ones".split()
} | {aten.full_like.default, aten.new_full.default, aten.new_empty_strided.default}


REASON = (
    "a head that defers its logits computes them, or a fused loss, outside of graphs; compile without fullgraph=True"
)


def outside_graphs(function: Callable[..., Any]) -> Any:
    """Let Dynamo break its graph at a function and compile nothing in it; without Dynamo, the call costs nothing."""
    disabled = torch.compiler.disable(function, reason=REASON)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if tracing_callback() is None else disabled)(*args, **kwargs)

    skip_frame(call)
    return breaks_graph(call, REASON)


class Op(NamedTuple):
    """An operation of ATen, with all arguments but the first tensor."""

    func: Any
    args: tuple[Any, ...] = ()
    kwargs: Any = {}  # noqa: RUF012 - never written

    def __call__(self, x: Any) -> Any:
        return self.func(x, *self.args, **self.kwargs)


Geometry = tuple[Any, Any, int]  # size, strides, offset

# Views: the result shares the memory.
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default}
KEEPS_GEOMETRY = {aten.alias.default, aten.detach.default}
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
TURNS = {
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.transpose.int,
    aten.t.default, aten.permute.default,
}  # fmt: skip
# Copies, with the same values for each row.
COPIES = {aten.clone.default, aten._to_copy.default}
_KEEPS_ORDER = (None, torch.preserve_format, torch.contiguous_format)
VIEWS = KEEPS_GEOMETRY | RESHAPES | SPLITS | TURNS | {aten.slice.Tensor, aten.select.int, aten.expand.default}


def contiguous(size: Any) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= n or 1
    return tuple(reversed(strides))


def known_size(size: Any, shape: Any) -> tuple[int, ...]:
    """Return a size with the number that its -1 stands for."""
    if -1 not in size:
        return tuple(size)
    rest = -math.prod(size)
    return tuple(math.prod(shape) // rest if n == -1 and rest else n for n in size)


def number_of(x: Any) -> float | None:
    """Return a number, or the value of a constant tensor of one number on the CPU; None for anything else."""
    if isinstance(x, (int, float)):
        return float(x)
    if type(x) in PLAIN and x.ndim == 0 and x.device.type == "cpu" and not x.is_complex() and not x.requires_grad:
        with contextlib.suppress(RuntimeError):  # a tensor that is traced has no value
            return float(x)
    return None


def _on_meta(op: Op, geometry: Geometry, dtype: torch.dtype) -> Any:
    """Return an operation's result for a tensor of this size and strides, on the device "meta"."""
    size, strides, _ = geometry
    kwargs = {name: x for name, x in op.kwargs.items() if name != "device"} if op.kwargs else {}
    return op.func(torch.empty_strided(size, strides, dtype=dtype, device="meta"), *op.args, **kwargs)


def after(op: Op, geometry: Geometry) -> Any:
    """Return the geometry of a view of memory, or a list of them for an operation that splits."""
    size, strides, offset = geometry
    if op.func in KEEPS_GEOMETRY:
        return geometry
    if op.func in RESHAPES and strides == contiguous(size):
        result = known_size(op.args[0], size)
        if math.prod(result) == math.prod(size):  # else torch says what is wrong
            return result, contiguous(result), offset
    meta = _on_meta(op, geometry, torch.uint8)
    if op.func in SPLITS:
        return [(tuple(x.shape), x.stride(), offset + x.storage_offset()) for x in meta]
    return tuple(meta.shape), meta.stride(), offset + meta.storage_offset()


def strided(x: Tensor, of: Geometry, geometry: Geometry) -> Tensor:
    """Return the view of x that has a geometry; x itself has the geometry `of`."""
    size, strides, offset = geometry
    return x if geometry == of else x.as_strided(size, strides, x.storage_offset() + offset)


class Lazy(Tensor):
    """A tensor whose values are computed when something reads them."""

    _geometry: Geometry
    _known: tuple[torch.dtype, torch.device]

    @classmethod
    def _wrap(cls, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Any:
        size, strides, offset = geometry
        made = Tensor._make_wrapper_subclass(
            cls, size, strides=strides, storage_offset=offset, dtype=dtype, device=device
        )
        made._geometry, made._known = geometry, (dtype, device)
        return made

    def _value(self) -> Tensor:
        """Return the values, as a plain tensor outside of the autograd graph."""
        raise NotImplementedError

    def _memory(self) -> Tensor:
        """Return the values as memory of this tensor, which may be written."""
        raise NotImplementedError

    def _after(self, op: Op) -> tuple[Any, Any, int, torch.dtype]:
        """Return size, strides, offset and dtype of the result of an operation."""
        (size, strides, _), dtype = self._geometry, self._known[0]
        if op.func in VIEWS:
            return *after(op, self._geometry), dtype
        if op.func in COPIES and strides == contiguous(size) and op.kwargs.get("memory_format") in _KEEPS_ORDER:
            return size, strides, 0, op.kwargs.get("dtype") or dtype
        meta = _on_meta(op, self._geometry, dtype)
        return tuple(meta.shape), meta.stride(), 0, meta.dtype

    def _filled(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        like = torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)
        return func(like, *args[1:], **kwargs)

    def tolist(self) -> Any:  # C++ that does not ask __torch_function__
        return self._value().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:  # also where hooks run without __torch_function__
        return read_memory(Tensor.numpy, (self, *args), kwargs)


# Functions of C++ and Python that read the memory of a tensor, or write it down.
READS_MEMORY = {
    getattr(Tensor, name)
    for name in (
        "numpy __array__ __repr__ __format__ data_ptr untyped_storage storage _typed_storage __reduce_ex__ "
        "__deepcopy__ __dlpack__ share_memory_ const_data_ptr mutable_data_ptr tolist"
    ).split()
    if hasattr(Tensor, name)
}
_REFUSES_GRADIENTS = {Tensor.numpy, Tensor.__array__, Tensor.__deepcopy__, Tensor.__dlpack__}


def read_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if func in _REFUSES_GRADIENTS and x.requires_grad and not kwargs.get("force"):
        # Raises what torch raises for a result of the graph.
        return func(torch.empty(1, requires_grad=True) * 1, *args[1:], **kwargs)
    result = func(x._memory(), *args[1:], **kwargs)
    return result.requires_grad_(x.requires_grad) if func is Tensor.__deepcopy__ else result


def values(tree: Any) -> Any:
    """Return arguments with real tensors in place of lazy ones."""
    return tree_map_only(Lazy, lambda x: x._value(), tree)


def run_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on real values. A lazy tensor that it writes to keeps the written values as its memory."""
    schema = func._schema
    if not schema.is_mutable:
        return func(*values(args), **values(kwargs))
    named = [*zip(schema.arguments, args, strict=False)]
    named += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
    real: dict[int, Tensor] = {}
    for argument, given in named:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for x in tree_leaves(given):
                if isinstance(x, Lazy):
                    real[id(x)] = x._memory()
                    if isinstance(given, (list, tuple)):  # `_foreach_` operations count in their kernels
                        torch.autograd.graph.increment_version(x)

    def of(x: Lazy) -> Tensor:
        return real[id(x)] if id(x) in real else x._value()

    out = func(*tree_map_only(Lazy, of, args), **tree_map_only(Lazy, of, kwargs))
    # Autograd expects the tensor that it passed in.
    lazy = [x for x in tree_leaves([args, kwargs]) if isinstance(x, Lazy) and real.get(id(x)) is out]
    return lazy[0] if lazy else out
