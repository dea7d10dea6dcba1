"""Classes of patched layers."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_chunked.deferred.swap import STOCK, Patch, patch_of
from liger_chunked.integrations.transformers.experts import EXPERTS_GATE, experts_method
from liger_chunked.integrations.transformers.layers import Binding
from liger_chunked.integrations.transformers.overrides import rope_of
from liger_chunked.integrations.transformers.parallel import ParallelPatch
from liger_chunked.integrations.transformers.source import rotary_methods, with_other_globals
from liger_chunked.kernels.backend import use_triton
from liger_chunked.layers.tiled import Tokens, after_tiles, follows_tiles, tile_tokens, tiled
from liger_chunked.private import transforms_are_active

Method = Callable[..., Any]


@dataclass(frozen=True)
class LayerPatch(Patch):
    """A class whose method runs a layer of ours.

    `tokens`: of a tile; an MLP runs in tiles, and a norm that follows one becomes a part of them.
    """

    binding: Binding
    tokens: Tokens = False

    @property
    def method(self) -> str:
        return self.binding.layer.method

    def key(self, cls: Any) -> Hashable:
        return getattr(cls, self.method), cls.forward

    def methods(self, cls: Any) -> dict[str, Any]:
        namespace = {self.method: layer_method(self.binding, cls, getattr(cls, self.method), self.tokens)}
        if self.method == EXPERTS_GATE and (of_experts := experts_method(cls)) is not None:
            namespace["forward"] = of_experts
        return namespace


@dataclass(frozen=True)
class RopePatch(Patch):
    """A class whose methods call rotary functions of ours.

    A modeling module has one rotary function for all its models, which stays: the methods are copied, and the copies
    call a function beside it.

    `functions`: the modules and names of the stock functions.
    """

    functions: tuple[tuple[str, str], ...]

    def key(self, cls: Any) -> Hashable:
        return tuple((name, getattr(cls, name)) for name in rotary_methods(cls))

    def methods(self, cls: Any) -> dict[str, Any]:
        added = {name: add_rope(module, name) for module, name in self.functions}
        return {name: _rotating(cls, name, added) for name, of in rotary_methods(cls).items() if of & {*self.functions}}


def add_rope(module: str, name: str) -> str:
    """Add a rotary function of ours to a module, beside the stock one, and return its name there.

    It calls what the module has in the place of the stock function: where somebody replaced that, where no kernel runs
    or computes it, because a pickled model met another version of its modeling file, under transforms of torch.func,
    and in compiled graphs, as layers do (`layer_method`). The first argument, the queries, decides whether a kernel
    runs.
    """
    owner = importlib.import_module(module)
    stock = getattr(owner, name)
    ours = rope_of(stock)
    queries = next(iter(inspect.signature(stock).parameters))

    @functools.wraps(stock)
    def rotated(*args: Any, **kwargs: Any) -> Any:
        current = getattr(owner, name)
        if current is not stock or ours is None or torch.compiler.is_compiling() or transforms_are_active():
            return current(*args, **kwargs)
        if not use_triton(args[0] if args else kwargs[queries]):
            return current(*args, **kwargs)
        return ours(*args, **kwargs)

    added = f"_liger_{name}"
    setattr(owner, added, rotated)
    return added


def _rotating(cls: Any, name: str, added: dict[str, str]) -> Any:
    current = getattr(cls, name)
    ours = with_other_globals(current, added)

    @functools.wraps(current)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # The user may replace the method of the class.
        return (ours if getattr(cls, name) is current else getattr(cls, name))(self, *args, **kwargs)

    vars(method)[STOCK] = current
    return method


def layer_method(binding: Binding, cls: Any, stock: Method, tokens: Tokens) -> Method:
    """Return the method of a patched class that runs `binding.layer`. It takes the arguments of `stock`.

    It passes them and attributes of the module to the layer, all tokens at once or `tokens` at a time. In these cases
    it runs the method of `cls` instead:

    - The method is no longer `stock`: the user replaced it.
    - In a compiled graph: Inductor fuses stock code, and an operator of ours costs a call through Python.
    - Where no kernel runs, such as on a CPU and in float64: the layer's PyTorch code is slower than stock code. A
      layer whose binding is `everywhere` runs there.

    With `tokens` the layer runs in the last two cases too. Each class gets code of its own, because Dynamo limits how
    often it compiles one code object.

    Args:
        binding: the layer, and the names of its attributes in `cls`.
        cls: the class without the patch.
        stock: the method of `cls` when it was patched.
        tokens: of a tile, or False; see `LayerPatch`.
    """
    name = binding.layer.method
    owner, *parameters = inspect.signature(stock).parameters.values()
    inputs = ", ".join(x.name for x in parameters)
    taken = ", ".join(x.name if x.default is x.empty else f"{x.name}={x.default!r}" for x in (owner, *parameters))
    reads = binding.reads.items()
    attributes = "".join(
        f", {owner.name}.{n}" if needed else f", getattr({owner.name}, {n!r}, None)" for n, needed in reads
    )
    call = f"_layer({inputs}{attributes})"
    runs_stock = [f"_cls.{name} is not _stock"]
    if tokens is False:
        runs_stock.append("_compiling()")
        if not binding.everywhere:
            runs_stock.append(f"not use_triton({parameters[0].name})")
    lines = [f"if {' or '.join(runs_stock)}: return _cls.{name}({owner.name}, {inputs})"]
    if tokens is not False and binding.layer.is_norm:
        lines.append(f"if _follows({inputs}): return _after(lambda {inputs}: {call}, {owner.name}, {inputs})")
    elif tokens is not False:
        lines.append(f"_n = _tile_tokens({owner.name}, {inputs}, _tokens)")
        lines.append(f"if _n is not None: return _tiled(lambda {inputs}: {call}, {owner.name}, {inputs}, _n)")
    body = "\n  ".join([*lines, f"return {call}"])
    constants = {
        "_layer": binding.layer.run, "_cls": cls, "_stock": stock, "_compiling": torch.compiler.is_compiling,
        "_follows": follows_tiles, "_after": after_tiles,
        "_tile_tokens": tile_tokens, "_tokens": tokens, "_tiled": tiled,
    }  # fmt: skip
    made: dict[str, Any] = {}
    # The constants are in a closure, so that the method reads `use_triton` of this module when it runs.
    exec(f"def make({', '.join(constants)}):\n def {name}({taken}):\n  {body}\n return {name}", globals(), made)
    method: Method = made["make"](**constants)
    vars(method)[STOCK] = stock
    return method


def has_our_code(module: nn.Module) -> bool:
    return isinstance(patch_of(module), (LayerPatch, RopePatch, ParallelPatch))
