"""Linear layers that tensor parallelism of torch or transformers has split: which of them `parallel_linear` serves."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from types import CodeType, NoneType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_chunked.deferred.swap import Patch, patch_of, stock_class
from liger_chunked.kernels.operands import all_plain
from liger_chunked.layers.parallel_linear import parallel_linear
from liger_chunked.private import HOOKS, SHOWS_HOOKS, function_modes, has_global_hooks, sees_no_dispatch_mode


@dataclass(frozen=True)
class ParallelPatch(Patch):
    """A linear layer whose call runs `parallel_linear` in place of a style's code and the class's forward.

    The call stays as it was wherever the result, or what the user sees of it, would be another: with any other hook or
    forward, in a compiled graph, under autocast or a mode, and for tensors that are not plain. Of a checkpoint, either
    both passes must have such a hook or mode, or none: what they save differs.
    """

    def methods(self, cls: Any) -> dict[str, Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs and not torch.compiler.is_compiling():
                weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
                if _serves(self, *args, weight, bias):
                    return parallel_linear(*args, weight, bias)
            return cls.__call__(self, *args, **kwargs)

        return {"__call__": call}


class Split(NamedTuple):
    """How a style splits the weight of a linear layer."""

    mesh: Any
    placements: Any


def is_parallel(module: nn.Module) -> bool:
    """Whether a module is a linear layer that a style split by columns or rows, without other hooks or patches."""
    if stock_class(type(module)) is not nn.Linear or not isinstance(patch_of(module), (ParallelPatch, NoneType)):
        return False
    split = _split_of(module)
    return split is not None and (module.bias is None or split.placements[0].dim == 0)


# What runs in a layer's call, as it was when this module was imported.
_CALLED = nn.Module.__call__, nn.Linear.forward, F.linear


def _serves(module: Any, x: Any, weight: Any, bias: Any) -> bool:
    """Whether `parallel_linear` computes what the module's call would, and nothing would see a difference."""
    split = _split_of(module)
    return (
        split is not None
        and isinstance(x, Tensor)
        and not x.is_meta
        and _is_split(weight, split, x)
        and (bias is None or (split.placements[0].dim == 0 and _is_split(bias, split, x)))
        and all_plain((x, *_local(weight, bias)))
        and (nn.Module.__call__, nn.Linear.forward, F.linear) == _CALLED
        and "_call_impl" not in vars(module)
        and getattr(module, "_compiled_call_impl", True) is None
        and not has_global_hooks()
        and not torch.is_autocast_enabled(x.device.type)
        and sees_no_dispatch_mode()
        and not function_modes()
    )


def _is_split(parameter: Any, split: Split, x: Tensor) -> bool:
    """Whether a parameter is a DTensor that is split so. One placement, so its mesh has one dimension."""
    placements, mesh = getattr(parameter, "placements", None), getattr(parameter, "device_mesh", None)
    return bool(placements == split.placements and mesh == split.mesh and parameter.dtype == x.dtype)


def _local(*parameters: Any) -> list[Tensor]:
    with torch.no_grad():
        return [p.to_local() for p in parameters if p is not None]


def _split_of(module: nn.Module) -> Split | None:
    """Return how a style has split a module: None if none has, or if there is more on it than the style.

    torch's styles are two hooks, those of transformers a forward on the instance.
    """
    if not SHOWS_HOOKS or "torch.distributed.tensor" not in sys.modules:
        return None
    hooks = {slot: [*vars(module)[slot].values()] for slot in HOOKS if vars(module)[slot]}
    forward = vars(module).get("forward")
    if forward is not None:
        return None if hooks else _split_by_transformers(module, forward)
    if {slot: len(functions) for slot, functions in hooks.items()} != {"_forward_pre_hooks": 1, "_forward_hooks": 1}:
        return None
    return _split_by_torch(*hooks["_forward_pre_hooks"], *hooks["_forward_hooks"])


def _variables(function: Any) -> dict[str, Any]:
    """Return the variables of the functions around a function that it reads."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _code_in(function: Any, name: str) -> list[CodeType]:
    """Return the code of the functions of a name that are defined in a function."""
    return [x for x in function.__code__.co_consts if isinstance(x, CodeType) and x.co_name == name]


def _split_by_torch(before: Any, after: Any) -> Split | None:
    code, styles = _torch_styles()
    if getattr(before, "__code__", None) not in code or getattr(after, "__code__", None) not in code:
        return None
    taken, given = _variables(before), _variables(after)
    calls = taken.get("input_fn"), given.get("output_fn")
    if not all(isinstance(x, functools.partial) for x in calls) or taken["device_mesh"] != given["device_mesh"]:
        return None
    placements = styles.get(tuple([(x.func, x.args) for x in calls]))  # type: ignore[union-attr]
    return None if placements is None else Split(taken["device_mesh"], placements)


@functools.cache
def _torch_styles() -> tuple[list[CodeType], dict[Any, Any]]:
    """Return the code of hooks that a style sets, and the weight's placements by what the hooks of a style call."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    placements = {}
    for style, input_layout, output_layout, of_weight in (
        (ColwiseParallel, Replicate(), Shard(-1), Shard(0)),
        (RowwiseParallel, Shard(-1), Replicate(), Shard(1)),
    ):
        before, after = (getattr(style, name, None) for name in ("_prepare_input_fn", "_prepare_output_fn"))
        placements[(before, ((input_layout,), (input_layout,))), (after, ((output_layout,), True))] = (of_weight,)
    return _code_in(distribute_module, "<lambda>"), placements


def _split_by_transformers(module: nn.Module, forward: Any) -> Split | None:
    code, styles = _transformers_styles()
    if getattr(forward, "__code__", None) not in code:
        return None
    known = _variables(forward)
    stock, style = known.get("original_forward"), known.get("self")
    if getattr(stock, "__func__", None) is not nn.Linear.forward or getattr(stock, "__self__", None) is not module:
        return None
    placements = styles.get(_key_of(style))
    return None if placements is None else Split(known.get("mesh"), placements)


def _key_of(style: Any) -> Any:
    settings = (getattr(style, name, None) for name in ("input_layouts", "output_layouts", "use_local_output"))
    methods = "transform_inputs_pre_forward", "context_around_forward", "transform_output_post_forward"
    return type(style), *settings, *(getattr(type(style), name, None) for name in methods)


@functools.cache
def _transformers_styles() -> tuple[list[CodeType], dict[Any, Any]]:
    """Return the code of the forward that a style sets, and the weight's placements by the style."""
    from torch.distributed.tensor import Replicate, Shard

    try:
        from transformers.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel, TensorParallelLayer
    except ImportError:
        return [], {}  # an older transformers
    columns = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1))
    rows = RowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate())
    code = _code_in(TensorParallelLayer.install_forward, "tp_forward")
    return code, {_key_of(columns): (Shard(0),), _key_of(rows): (Shard(1),)}
