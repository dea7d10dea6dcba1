"""Tensors without values: what stand-in logits and their gradients have in common.

A wrapper subclass of `torch.Tensor` has a shape, a dtype, a device and a place in the autograd graph, but no memory.
Autograd, hooks, FSDP, DDP and checkpoints see a tensor. Below autograd, `__torch_dispatch__` gets each operation on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_chunked.private import skip_frame, tracing_callback, tree_leaves, tree_map_only

aten: Any = torch.ops.aten

# The classes of PyTorch's plain tensors.
PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)

# New tensors of which an argument only gives the shape, dtype and device.
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

    vars(call)["_torchdynamo_disable"] = True
    vars(call)["_torchdynamo_disable_msg"] = REASON
    skip_frame(call)
    return call


class Op(NamedTuple):
    """An operation of ATen, with all arguments but the first tensor."""

    func: Any
    args: tuple[Any, ...] = ()
    kwargs: Any = {}  # noqa: RUF012 - never written

    def __call__(self, x: Any) -> Any:
        return self.func(x, *self.args, **self.kwargs)


def number_of(x: Any) -> float | None:
    """Return a number, or the value of a tensor of one number on the CPU; None for anything else."""
    if isinstance(x, (int, float)):
        return float(x)
    if type(x) in PLAIN and x.ndim == 0 and x.device.type == "cpu" and not x.is_complex():
        return float(x)
    return None


_NOTHING = nullcontext()


class Lazy(Tensor):
    """A tensor whose values are computed when something reads them."""

    _meta: Tensor  # shape and strides, on the device "meta"

    @classmethod
    def _wrap(cls, meta: Tensor, device: torch.device) -> Any:
        # Views of an ordinary tensor are ordinary, in inference mode too.
        inside = torch.is_inference_mode_enabled() and not meta.is_inference()
        with torch.inference_mode(False) if inside else _NOTHING:
            made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                meta.shape,
                strides=meta.stride(),
                storage_offset=meta.storage_offset(),
                dtype=meta.dtype,
                device=device,
            )
        made._meta = meta
        return made

    def value(self) -> Tensor:
        """Return the values, as a plain tensor outside of the autograd graph."""
        raise NotImplementedError

    def memory(self) -> Tensor:
        """Return the values as memory of this tensor, which may be written."""
        raise NotImplementedError

    def _shape_of(self, op: Op) -> Tensor:
        """Return the shape and strides of a result, as a tensor on the device "meta"."""
        kwargs = {name: x for name, x in op.kwargs.items() if name != "device"} if op.kwargs else {}
        return op.func(self._meta, *op.args, **kwargs)

    def _filled(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        like = torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)
        return func(like, *args[1:], **kwargs)

    def tolist(self) -> Any:  # C++ that does not ask __torch_function__
        return self.value().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:  # also where hooks run without __torch_function__
        return read_memory(Tensor.numpy, (self, *args), kwargs)


# Functions of C++ and Python that read the memory of a tensor, or write it down.
READS_MEMORY = {
    getattr(Tensor, name)
    for name in (
        "numpy __array__ __repr__ __format__ data_ptr untyped_storage storage _typed_storage __reduce_ex__ "
        "__deepcopy__ __dlpack__ share_memory_ const_data_ptr mutable_data_ptr"
    ).split()
    if hasattr(Tensor, name)
}
_REFUSES_GRADIENTS = {Tensor.numpy, Tensor.__array__, Tensor.__deepcopy__, Tensor.__dlpack__}


def read_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if func in _REFUSES_GRADIENTS and x.requires_grad and not kwargs.get("force"):
        # Raises what torch raises for a result of the graph.
        return func(torch.empty(1, requires_grad=True) * 1, *args[1:], **kwargs)
    return func(x.memory(), *args[1:], **kwargs)


def values(tree: Any) -> Any:
    """Return arguments with real tensors in place of lazy ones."""
    return tree_map_only(Lazy, lambda x: x.value(), tree)


def run_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on real values. What it writes is the memory of the lazy tensors from then on."""
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
                    real[id(x)] = x.memory()
                    if isinstance(given, (list, tuple)):  # `_foreach_` operations count in their kernels
                        torch.autograd.graph.increment_version(x)

    def of(x: Lazy) -> Tensor:
        return real[id(x)] if id(x) in real else x.value()

    out = func(*tree_map_only(Lazy, of, args), **tree_map_only(Lazy, of, kwargs))
    # Autograd expects the tensor that it passed in.
    lazy = [x for x in tree_leaves([args, kwargs]) if isinstance(x, Lazy) and real.get(id(x)) is out]
    return lazy[0] if lazy else out
