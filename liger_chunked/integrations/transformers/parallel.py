"""Linear layers that tensor parallelism of torch or transformers has split: which of them `parallel_linear` serves."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from liger_chunked.deferred.swap import Patch, patch_of, stock_class
from liger_chunked.kernels.operands import all_plain
from liger_chunked.layers.parallel_linear import parallel_linear
from liger_chunked.private import HOOKS, SHOWS_HOOKS, dispatch_modes, has_global_hooks


@dataclass(frozen=True)
class ParallelPatch(Patch):
    """A linear layer whose call runs `parallel_linear` in place of a style's code and the class's forward.

    The call stays as it was wherever the result, or what the user sees of it, would be another: with any other hook or
    forward, in a compiled graph, under autocast or a dispatch mode, and for tensors that are not plain.
    """

    def methods(self, cls: Any) -> dict[str, Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs and not torch.compiler.is_compiling() and _serves(self, *args):
                return parallel_linear(*args, self.weight, self.bias)
            return cls.__call__(self, *args, **kwargs)

        return {"__call__": call}


def is_parallel(module: nn.Module) -> bool:
    """Whether a module is a linear layer that a style split by columns or rows, without other hooks or patches."""
    if stock_class(type(module)) is not nn.Linear or not isinstance(patch_of(module), (ParallelPatch, NoneType)):
        return False
    return _placements_by_style(module) is not None


def _serves(module: Any, x: Any) -> bool:
    weight = module.weight
    return (
        isinstance(x, Tensor)
        and all_plain((x,))
        and x.dtype == weight.dtype
        and _placements_by_style(module) == getattr(weight, "placements", None)  # one, so its mesh has one dimension
        and not has_global_hooks()
        and not torch.is_autocast_enabled(x.device.type)
        and not dispatch_modes()
    )


def _placements_by_style(module: nn.Module) -> Any:
    """Return the weight's placements under the style that splits a module: None if there is none, or more than it.

    torch's styles are two hooks, those of transformers a forward on the instance.
    """
    if not SHOWS_HOOKS or "torch.distributed.tensor" not in sys.modules:
        return None
    hooks = {slot: [*vars(module)[slot].values()] for slot in HOOKS if vars(module)[slot]}
    forward = vars(module).get("forward")
    if forward is not None:
        return None if hooks else _placements_by_forward(module, forward)
    if {slot: len(found) for slot, found in hooks.items()} != {"_forward_pre_hooks": 1, "_forward_hooks": 1}:
        return None
    return _torch_styles().get((_call_of(*hooks["_forward_pre_hooks"]), _call_of(*hooks["_forward_hooks"])))


def _call_of(hook: Callable[..., Any]) -> Any:
    """Return the function that a hook of `distribute_module` calls, and the arguments that a style has given it."""
    for cell in getattr(hook, "__closure__", None) or ():
        if isinstance(cell.cell_contents, functools.partial):
            return cell.cell_contents.func, cell.cell_contents.args
    return None


@functools.cache
def _torch_styles() -> dict[Any, Any]:
    """Return the placements of the weight for the two hooks of each style."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    placements = {}
    for style, taken, given, placed in (
        (ColwiseParallel, Replicate(), Shard(-1), Shard(0)),
        (RowwiseParallel, Shard(-1), Replicate(), Shard(1)),
    ):
        before, after = (getattr(style, name, None) for name in ("_prepare_input_fn", "_prepare_output_fn"))
        placements[(before, ((taken,), (taken,))), (after, ((given,), True))] = (placed,)
    return placements


def _placements_by_forward(module: nn.Module, forward: Any) -> Any:
    code, styles = _transformers_styles()
    if getattr(forward, "__code__", forward) is not code:
        return None
    held = dict(zip(forward.__code__.co_freevars, (cell.cell_contents for cell in forward.__closure__), strict=True))
    stock, style = held["original_forward"], held["self"]
    if getattr(stock, "__func__", None) is not nn.Linear.forward or stock.__self__ is not module:
        return None
    settings = (getattr(style, name, None) for name in ("input_layouts", "output_layouts", "use_local_output"))
    return styles.get((type(style), *settings))


@functools.cache
def _transformers_styles() -> tuple[Any, dict[Any, Any]]:
    """Return the code of the forward that a style sets, and the placements of the weight by the style's settings."""
    from torch.distributed.tensor import Replicate, Shard

    try:
        from transformers.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel, TensorParallelLayer
    except ImportError:
        return None, {}  # an older transformers
    constants = TensorParallelLayer.install_forward.__code__.co_consts
    code = next((x for x in constants if getattr(x, "co_name", None) == "tp_forward"), None)
    columns, rows = (ColwiseParallel, Replicate(), Shard(-1), True), (RowwiseParallel, Shard(-1), Replicate(), True)
    return code, {columns: (Shard(0),), rows: (Shard(1),)}
