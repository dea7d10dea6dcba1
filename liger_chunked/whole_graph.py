"""A fused loss inside `torch.compile(fullgraph=True)`: one opaque operator, which runs the call as without a compiler.

Dynamo inlines `in_graph` in place of an entry point. It sorts the arguments into tensors and constants, and calls

    fused(number, tensors, needs) -> [*values, *gradients]

with the number of a `Call`, which holds the function and its constants. At run time the operator computes loss and
gradients in its forward, as ever, so the compiled step takes the same products and has the same bits. A call whose
results have an upstream gradient each, such as `linear_token_stats`, computes gradients in `fused_backward`, which runs
the call again: one product more than without a compiler.

Shapes of results come from the call itself, run without values (`computing_shapes`), so that losses of users need no
code for it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from liger_chunked.kernels.backend import refuse_second_derivative
from liger_chunked.private import with_autograd
from liger_chunked.shapes import computing_shapes, shapes_only
from liger_chunked.types import (
    CrossEntropyMetrics,
    DistillationMetrics,
    PolicyMetrics,
    PreferenceMetrics,
    TokenStats,
    UnpairedPreferenceMetrics,
)

_METRICS = (
    CrossEntropyMetrics, DistillationMetrics, PolicyMetrics, PreferenceMetrics, TokenStats, UnpairedPreferenceMetrics,
)  # fmt: skip
_CONSTANTS = (bool, int, float, str, torch.dtype, tuple, list)
# Numbers that change from step to step: as constants of a graph they would compile it anew.
_VARYING = frozenset(("num_items", "kl", "delta"))


class Call:
    """A call of an entry point, apart from its tensors.

    Attributes:
        function: takes the module, if it is a method, then keywords.
        names: of the tensors among the arguments.
        constants: the other arguments.
        autocast: the dtype of an active autocast. None: it was off.
        form: what the results are, once their shapes are known: see `_flat`.
    """

    form: tuple[Any, ...]

    def __init__(
        self, function: Callable[..., Any], module: Any, names: tuple[str, ...], constants: Any, autocast: Any
    ) -> None:
        self.function, self.names, self.constants, self.autocast = function, names, dict(constants), autocast
        self.module = None if module is None else weakref.ref(module)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        own = () if self.module is None else (self._own(),)
        result = self.function(*own, **dict(zip(self.names, tensors, strict=True)), **self.constants)
        values, self.form = _flat(result)
        return values

    def _own(self) -> Any:
        """Return the module, or for shapes alone a copy whose buffers have no values, as the arguments have none."""
        module = None if self.module is None else self.module()
        if module is None or not shapes_only():
            return module
        module = copy.copy(module)
        buffers = {k: None if x is None else torch.empty_like(x, device=x.device) for k, x in module._buffers.items()}
        vars(module)["_buffers"] = buffers
        return module

    def surroundings(self, device: torch.device) -> AbstractContextManager[Any]:
        """Compiled code has no autocast at run time: it traced one."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)


def _flat(result: Any) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Return the tensors of a result, and a form of constants from which `_formed` makes it again.

    The form of a tensor is (); of a NamedTuple its place among `_METRICS` and which fields are present; of a tuple, the
    forms of its parts.
    """
    if isinstance(result, Tensor):
        return [result], ()
    if type(result) in _METRICS:
        present = tuple(x is not None for x in result)
        return [x for x in result if x is not None], (_METRICS.index(type(result)), present)
    parts = [_flat(x) for x in result]
    return [x for values, _ in parts for x in values], ("tuple", *(form for _, form in parts))


def _formed(values: Any, form: tuple[Any, ...]) -> Any:
    """Make a result of an iterator of its tensors."""
    if not form:
        return next(values)
    if form[0] == "tuple":
        return tuple([_formed(values, part) for part in form[1:]])
    cls: Any = _METRICS[form[0]]
    found = [next(values) if is_present else None for is_present in form[1]]
    if cls is not TokenStats:  # metrics have no gradient
        found = [None if x is None else x.detach() for x in found]
    return cls(*found)


_calls: list[Call] = []
# Entry points without what concerns compilers, by name, and modules by number. A graph holds the number as a constant.
FUNCTIONS: dict[str, Callable[..., Any]] = {}
MODULES: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def number(module: nn.Module) -> None:
    """Give a module its number."""
    vars(module)["_number"] = own = next(_numbers)
    MODULES[own] = module


@functools.cache
def _call_number(
    function: str, module: int | None, names: tuple[str, ...], constants: tuple[Any, ...], autocast: Any
) -> int:
    _calls.append(Call(FUNCTIONS[function], None if module is None else MODULES[module], names, constants, autocast))
    return len(_calls) - 1


def number_of_call(*key: Any) -> int:
    """Return the number of a call. Dynamo runs it while it traces, and puts the result into the graph."""
    return _call_number(*key)


def form_of_call(number: int) -> tuple[Any, ...]:
    """Return the form of a call's results, which tracing the operator found."""
    return _calls[number].form


# torch.compiler.assume_constant_result says so, but imports the compiler.
number_of_call._dynamo_marked_constant = form_of_call._dynamo_marked_constant = True  # type: ignore[attr-defined]


def in_graph(function: str, positional: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an entry point under Dynamo, which traces this.

    Returns:
        The call's results, or NotImplemented if an argument cannot be part of a graph, such as a process group.
    """
    named = {**dict(zip(positional, args)), **kwargs}  # noqa: B905, as entry points check the number of arguments
    module = named.pop("self", None)
    names, tensors, constants = [], [], []
    device = named["input"].device if "input" in named else None
    for name, x in named.items():
        if isinstance(x, Tensor):
            names.append(name)
            tensors.append(x)
        elif name in _VARYING and x is not None:
            names.append(name)
            tensors.append(torch.full((), x, dtype=torch.float64, device=device))
        elif x is None or isinstance(x, _CONSTANTS):
            constants.append((name, tuple(x) if isinstance(x, list) else x))
        else:
            return NotImplemented
    if device is None or (module is not None and any(p.requires_grad for p in module.parameters())):
        return NotImplemented
    trains = torch.is_grad_enabled()
    needs = [trains and x.requires_grad for x in tensors]
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    number = number_of_call(
        function, None if module is None else module._number, tuple(names), tuple(constants), autocast
    )
    results = fused(number, tensors, needs)
    return _formed(iter(results), form_of_call(number))


def _leaves(tensors: Sequence[Tensor], needs: Sequence[bool]) -> tuple[list[Tensor], list[Tensor]]:
    """Return detached tensors, and those of them by which to differentiate."""
    own = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
    return own, [x for x in own if x.requires_grad]


def _apart(results: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous results, of which none shares memory with another or with an argument, as operators must."""
    taken = {x.untyped_storage().data_ptr() for x in given}
    apart = []
    for x in results:
        if x.untyped_storage().data_ptr() in taken:
            x = x.clone(memory_format=torch.contiguous_format)
        x = x.contiguous()
        taken.add(x.untyped_storage().data_ptr())
        apart.append(x)
    return apart


def _is_reduced(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Whether gradients are computed in the forward: of one loss (), unless a loss scale is to come (float16)."""
    return values[0].ndim == 0 and all(x.dtype != torch.float16 for x in tensors)


@torch.library.custom_op("liger_chunked::fused", mutates_args=())
def fused(number: int, tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    call, (own, leaves) = _calls[number], _leaves(tensors, needs)

    def run() -> tuple[list[Tensor], Sequence[Tensor]]:
        with torch.set_grad_enabled(bool(leaves)), call.surroundings(tensors[0].device):
            values = call(own)
            computes = leaves and _is_reduced(tensors, values)
            return values, torch.autograd.grad(values[0], leaves) if computes else ()

    values, gradients = with_autograd(run)
    return _apart([*(x.detach() for x in values), *gradients], tensors)


@fused.register_fake
def _(number: int, tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    call = _calls[number]
    own, leaves = _leaves(tensors, needs)
    with torch.set_grad_enabled(bool(leaves)), computing_shapes(), call.surroundings(tensors[0].device):
        values = call(own)
    values = [x.new_empty(x.shape) for x in values]
    if not _is_reduced(tensors, values):
        return values
    return [*values, *(x.new_empty(x.shape) for x, need in zip(tensors, needs, strict=True) if need)]


@torch.library.custom_op("liger_chunked::fused_backward", mutates_args=())
def fused_backward(
    number: int, tensors: Sequence[Tensor], needs: Sequence[bool], upstream: Sequence[Tensor]
) -> list[Tensor]:
    call, (own, leaves) = _calls[number], _leaves(tensors, needs)

    def run() -> list[Tensor]:
        with call.surroundings(tensors[0].device):
            values = call(own)
            pairs = [(x, g) for x, g in zip(values, upstream, strict=True) if x.requires_grad]
            outputs, gradients = zip(*pairs, strict=True)
            return list(torch.autograd.grad(outputs, leaves, gradients))

    return _apart(with_autograd(run), [*tensors, *upstream])


@fused_backward.register_fake
def _(number: int, tensors: Sequence[Tensor], needs: Sequence[bool], upstream: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, need in zip(tensors, needs, strict=True) if need]


def _refuse(*_: Any) -> Any:
    refuse_second_derivative()


fused_backward.register_autograd(_refuse)


def _save(ctx: Any, inputs: tuple[int, Sequence[Tensor], Sequence[bool]], output: list[Tensor]) -> None:
    number, tensors, needs = inputs
    ctx.number, ctx.needs, ctx.n_values = number, needs, len(output)
    ctx.is_reduced = _is_reduced(tensors, output)
    if ctx.is_reduced:
        ctx.n_values -= sum(needs)
        ctx.save_for_backward(*output[ctx.n_values :])
    else:
        ctx.save_for_backward(*tensors)


def _backward(ctx: Any, upstream: Sequence[Tensor]) -> tuple[None, list[Tensor | None], None]:
    if ctx.is_reduced:
        found = [g * upstream[0].to(g.dtype) for g in ctx.saved_tensors]
    else:
        found = fused_backward(ctx.number, ctx.saved_tensors, ctx.needs, upstream[: ctx.n_values])
    gradients = iter(found)
    return None, [next(gradients) if need else None for need in ctx.needs], None


fused.register_autograd(_backward, setup_context=_save)
