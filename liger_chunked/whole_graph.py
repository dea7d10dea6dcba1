"""A fused loss inside `torch.compile(fullgraph=True)`: one opaque operator, which runs the call as without a compiler.

Dynamo inlines `in_graph` in place of an entry point. It sorts the arguments into tensors and constants, and calls

    fused(name, tensors, needs, sizes) -> [*values, *gradients]

with the name of a `Call`, which holds the function and its constants. At run time the operator computes loss and
gradients in its forward, as ever, so the compiled step takes the same products and has the same bits. A call whose
results have an upstream gradient each, such as `linear_token_stats`, computes gradients in `fused_backward`, which runs
the call again: one product more than without a compiler.

Shapes of results come from the call itself, run without values (`computing_shapes`), so that losses of users need no
code for it.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from liger_chunked.kernels.backend import refuse_second_derivative
from liger_chunked.kernels.operands import named, other_leaves
from liger_chunked.private import aten, breaks_graph, python_number, runs_while_tracing, with_autograd
from liger_chunked.shapes import computing_shapes, shapes_only
from liger_chunked.types import (
    DIFFERENTIABLE,
    OUTPUTS,
    CrossEntropyMetrics,
    DistillationMetrics,
    PolicyMetrics,
    PreferenceMetrics,
    TokenStats,
    UnpairedPreferenceMetrics,
)
from liger_chunked.what_ran import RECORD

_METRICS = (
    CrossEntropyMetrics, DistillationMetrics, PolicyMetrics, PreferenceMetrics, TokenStats, UnpairedPreferenceMetrics,
)  # fmt: skip
_CONSTANTS = (bool, int, float, str, torch.dtype, tuple, list)
# The arguments by which losses and statistics have gradients.
DIFFERENTIATED = frozenset(("weight", "input", "hidden", "bias"))
# Numbers that change from step to step: as constants of a graph they would compile it anew.
_VARYING = frozenset(("num_items", "kl", "delta"))


class Call:
    """A call of an entry point, apart from its tensors.

    Attributes:
        function: takes the module, if it is a method, then keywords.
        names: of the tensors among the arguments.
        constants: the other arguments.
        trains: the caller's grad mode.
        autocast: the dtype of an active autocast. None: it was off.
        form: what the results are, once their shapes are known: see `_flat`.
    """

    form: tuple[Any, ...]

    def __init__(
        self,
        function: Callable[..., Any],
        module: nn.Module | None,
        names: tuple[str, ...],
        constants: Any,
        trains: bool,
        autocast: Any,
    ) -> None:
        self.function, self.names, self.constants = function, names, dict(constants)
        self.trains, self.autocast = trains, autocast
        self.module = None if module is None else weakref.ref(module)

    def __call__(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        own = () if self.module is None else (self._own(),)
        named: dict[str, Any] = dict(zip(self.names, tensors, strict=True))
        if sizes:
            named["sizes"] = sizes
        result = self.function(*own, **named, **self.constants)
        values, self.form = _flat(result)
        return values

    def _own(self) -> nn.Module:
        """Return the module, or for shapes alone a copy whose tensors have no values, as the arguments have none."""
        module = None if self.module is None else self.module()
        if module is None:
            raise RuntimeError(_GONE)
        return _without_values(module) if shapes_only() else module

    def check_gradients(self, values: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        """Raise ValueError if a result depends on other leaves than these: a graph would drop their gradients."""
        for x in values:
            for leaf in other_leaves(x, leaves) if x.requires_grad else ():
                owner = None if self.module is None else self.module()
                raise ValueError(
                    f"the loss depends on a tensor that requires a gradient, {named(leaf, owner)}, and a compiled "
                    "graph computes none for it: make it a parameter of the loss, detach it, or call the loss outside "
                    "of compiled code"
                )

    def surroundings(self, device: torch.device) -> AbstractContextManager[Any]:
        """Compiled code has no autocast at run time: it traced one."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)


def _without_values(module: nn.Module) -> nn.Module:
    """Return a shallow copy of a module with empty tensors for its parameters and buffers, and those of its parts."""

    def empty(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)

    module = copy.copy(module)
    own = vars(module)
    own["_buffers"] = {name: empty(x) for name, x in module._buffers.items()}
    own["_parameters"] = {name: empty(x) for name, x in module._parameters.items()}
    own["_modules"] = {name: None if x is None else _without_values(x) for name, x in module._modules.items()}
    return module


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
    found = []
    for name, is_present in zip(cls._fields, form[1], strict=True):
        x = next(values) if is_present else None
        # Metrics have no gradient.
        is_constant = cls is not TokenStats or name in _CONSTANT_STATISTICS
        found.append(x.detach() if x is not None and is_constant else x)
    return cls(*found)


def formed(results: Sequence[Tensor], name: str) -> Any:
    """Return the results of a call, of the operator's."""
    return _formed(iter(results), form_of_call(name))


_CONSTANT_STATISTICS = frozenset(OUTPUTS).difference(DIFFERENTIABLE)
# By name. A call of a loss goes when the loss does.
_calls: dict[str, Call] = {}
_GONE = "the loss of this compiled graph no longer exists: keep it until the backward has run"
# Entry points without what concerns compilers, by name, and modules by number.
FUNCTIONS: dict[str, Callable[..., Any]] = {}
MODULES: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def number(module: nn.Module) -> None:
    """Give a module its number."""
    vars(module)["_number"] = own = next(_numbers)
    MODULES[own] = module


# A graph names a loss by its number, which one that the graph builds cannot have.
breaks_graph(number, "build a loss once, before compiled code calls it")


_PROCESS = uuid.uuid4().hex
# What is no setting: the number is in the name, and a record says what ran.
_NO_SETTINGS = frozenset(vars(nn.Module())) - {"training"} | {"_fixed", "_number", RECORD}


def _settings_of(module: nn.Module) -> str:
    """Describe what the number and the shapes of a loss's results follow from, beside its arguments.

    A user's class may return what it likes, so its description is the process's own. So is that of a setting whose
    `repr` has an address, such as a function.
    """
    cls = type(module)
    if not cls.__module__.startswith("liger_chunked."):
        return _PROCESS
    settings = {name: x for name, x in vars(module).items() if name not in _NO_SETTINGS}
    parts = {name: _settings_of(part) for name, part in module.named_children()}
    return f"{cls.__module__}.{cls.__qualname__} {settings} {parts}"


@runs_while_tracing
def name_of_call(function: str, module: int | None, *key: Any) -> str:
    """Return the name of a call. Dynamo runs this while it traces, and puts the name into the graph.

    Compiled graphs are cached on disk by their code, and another process may have other calls. So calls of one name
    have results of the same number and shapes.
    """
    from liger_chunked import __version__  # which the package sets after its imports

    own = None if module is None else MODULES[module]
    described = f"{__version__} {function} {key} {'' if own is None else _settings_of(own)}"
    name = f"{function}-{module}-{hashlib.sha256(described.encode()).hexdigest()[:16]}"
    if name not in _calls:
        _calls[name] = Call(FUNCTIONS[function], own, *key)
        if own is not None:
            weakref.finalize(own, _calls.pop, name, None).atexit = False
    return name


def _call_named(name: str) -> Call:
    """Return a call; RuntimeError if its loss no longer exists, because a graph does not keep it alive."""
    if (call := _calls.get(name)) is None:
        raise RuntimeError(_GONE)
    return call


@runs_while_tracing
def form_of_call(name: str) -> tuple[Any, ...]:
    """Return the form of a call's results, which tracing the operator found."""
    return _call_named(name).form


def in_graph(function: str, positional: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an entry point under Dynamo, which traces this.

    Returns:
        The call's results, or NotImplemented if an argument cannot be part of a graph, such as a process group.
    """
    named = {**dict(zip(positional, args)), **kwargs}  # noqa: B905, because Dynamo cannot trace `strict`
    if len(named) < len(args) + len(kwargs):
        return NotImplemented  # too many: eager code says so
    module = named.pop("self", None)
    if module is None and "hidden" in named and "input" not in named:
        named["input"] = named.pop("hidden")
    input = named.get("input")
    trains = torch.is_grad_enabled()
    has_parameters = module is not None and trains and any(p.requires_grad for p in module.parameters())
    if has_parameters or not isinstance(input, Tensor):
        return NotImplemented
    device = input.device
    names, tensors, constants = [], [], []
    for name, x in named.items():
        if isinstance(x, Tensor):
            names.append(name)
            tensors.append(x)
        elif name in _VARYING and isinstance(x, (int, float)):
            names.append(name)
            tensors.append(torch.full((), x, dtype=torch.float64, device=device))
        elif x is None or isinstance(x, _CONSTANTS):
            constants.append((name, _constant(x)))
        else:
            return NotImplemented
    needs = [trains and x.requires_grad and name in DIFFERENTIATED for name, x in zip(names, tensors, strict=True)]
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    number = None if module is None else module._number
    call = name_of_call(function, number, tuple(names), tuple(constants), trains, autocast)
    return formed(fused(call, tensors, needs, []), call)


def _constant(x: Any) -> Any:
    """Return an argument that a graph can hold."""
    if isinstance(x, list):
        return tuple(x)
    return python_number(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else x


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


def _gradients(
    values: Sequence[Tensor], leaves: Sequence[Tensor], upstream: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Return the gradients of results by leaves, zeros where there are none, as of detached logits."""
    upstream = [torch.ones_like(x) for x in values] if upstream is None else upstream
    pairs = [(x, g) for x, g in zip(values, upstream, strict=True) if x.requires_grad]
    outputs, given = zip(*pairs, strict=True) if pairs else ((), ())
    found = torch.autograd.grad(outputs, leaves, given, allow_unused=True) if pairs else [None] * len(leaves)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


_FUSED = "liger_chunked::fused"


@torch.library.custom_op(_FUSED, mutates_args=())
def fused(name: str, tensors: Sequence[Tensor], needs: Sequence[bool], sizes: Sequence[int]) -> list[Tensor]:
    call, (own, leaves) = _call_named(name), _leaves(tensors, needs)

    def run() -> tuple[list[Tensor], Sequence[Tensor]]:
        with torch.set_grad_enabled(call.trains), call.surroundings(tensors[0].device):
            values = call(own, sizes)
            call.check_gradients(values, leaves)
            computes = leaves and _is_reduced(tensors, values)
            return values, _gradients(values[:1], leaves) if computes else ()

    values, gradients = with_autograd(run)
    return _apart([*(x.detach() for x in values), *gradients], tensors)


def is_fused(target: Any) -> bool:
    """Whether the operation of a graph is `fused`."""
    return isinstance(target, type(aten.alias.default)) and target.name() == _FUSED


@fused.register_fake
def _(name: str, tensors: Sequence[Tensor], needs: Sequence[bool], sizes: Sequence[int]) -> list[Tensor]:
    call, (own, _) = _call_named(name), _leaves(tensors, needs)
    with torch.set_grad_enabled(call.trains), computing_shapes(), call.surroundings(tensors[0].device):
        values = call(own, sizes)
    values = [x.new_empty(x.shape) for x in values]
    if not _is_reduced(tensors, values):
        return values
    return [*values, *(x.new_empty(x.shape) for x, need in zip(tensors, needs, strict=True) if need)]


@torch.library.custom_op("liger_chunked::fused_backward", mutates_args=())
def fused_backward(
    name: str, tensors: Sequence[Tensor], needs: Sequence[bool], sizes: Sequence[int], upstream: Sequence[Tensor]
) -> list[Tensor]:
    call, (own, leaves) = _call_named(name), _leaves(tensors, needs)

    def run() -> list[Tensor]:
        with call.surroundings(tensors[0].device):
            values = call(own, sizes)
            return _gradients(values, leaves, upstream)

    return _apart(with_autograd(run), [*tensors, *upstream])


@fused_backward.register_fake
def _(
    name: str, tensors: Sequence[Tensor], needs: Sequence[bool], sizes: Sequence[int], upstream: Sequence[Tensor]
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, need in zip(tensors, needs, strict=True) if need]


def _refuse(*_: Any) -> Any:
    refuse_second_derivative()


fused_backward.register_autograd(_refuse)


def _save(ctx: Any, inputs: tuple[str, Sequence[Tensor], Sequence[bool], Sequence[int]], output: list[Tensor]) -> None:
    name, tensors, needs, sizes = inputs
    ctx.name, ctx.needs, ctx.sizes, ctx.n_values = name, needs, sizes, len(output)
    ctx.is_reduced = _is_reduced(tensors, output)
    if ctx.is_reduced:
        ctx.n_values -= sum(needs)
        ctx.save_for_backward(*output[ctx.n_values :])
    else:
        ctx.save_for_backward(*tensors)


def _backward(ctx: Any, upstream: Sequence[Tensor]) -> tuple[None, list[Tensor | None], None, Any]:
    if torch.is_grad_enabled():  # by create_graph=True; the gradients of the forward are constants here
        refuse_second_derivative()
    if ctx.is_reduced:
        found = [g * upstream[0].to(g.dtype) for g in ctx.saved_tensors]
    else:
        found = fused_backward(ctx.name, ctx.saved_tensors, ctx.needs, ctx.sizes, upstream[: ctx.n_values])
    gradients = iter(found)
    # An empty list counts as a list of tensors.
    return None, [next(gradients) if need else None for need in ctx.needs], None, None if ctx.sizes else []


fused.register_autograd(_backward, setup_context=_save)
