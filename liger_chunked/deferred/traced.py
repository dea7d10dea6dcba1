"""Deferred logits inside a compiled graph: what a head returns to Dynamo, so that a whole step is one graph.

Dynamo cannot make a `DeferredLogits` inside a graph. It can inline `__torch_function__` of a class of real tensors:

    z = lm_head(hidden)                   the ordinary product of the graph, as `TracedLogits`, with an expression
    z.float()[:, :-1], z / cap, tanh      the ordinary operation, and a step of the expression
    F.cross_entropy(z, labels)            one operator of the graph, of the expression, hidden states and weights
    any other operation                   the ordinary operation on the real logits of the graph
    z leaves the graph                    a `DeferredLogits` of the expression; real logits if the graph computes them

So what Dynamo does not show to `__torch_function__` gets real logits. The compiler removes products that nothing reads.
The operator makes `DeferredLogits` of the expression, and runs the function on them: `rules.py` decides, as without a
compiler, whether it is fused.

Logits that leave: `drop_unread` takes those that no operation of the graph reads out of the graph's outputs. Then
Dynamo makes the object that leaves, and sets its attributes. `_leaving` is a property whose setter Dynamo does not
trace, so that it runs at that moment and swaps the tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from liger_chunked import whole_graph
from liger_chunked.deferred import request, sharded
from liger_chunked.deferred.graph_pass import MARK, drop_unread, inplace_at, is_inplace, is_write, written_arguments
from liger_chunked.deferred.head import product
from liger_chunked.deferred.lazy import outside_graphs
from liger_chunked.deferred.logits import DeferredLogits
from liger_chunked.private import (
    HAS_STAND_INS,
    at_end_of_trace,
    aten,
    runs_while_tracing,
    transforms_are_active,
    without_torch_function,
)
from liger_chunked.shapes import shapes_only
from liger_chunked.versions import release
from liger_chunked.what_ran import RECORD, RECORDS

# What this needs of Dynamo was tried with torch 2.11 and 2.13. An older one breaks the graph at a head that defers.
IS_SERVED = HAS_STAND_INS and release(torch.__version__) >= (2, 11)


class _Made:
    """What the logits of one call share.

    - `written`: whether the graph changed some of them in place, so that they no longer are what expressions say
    - `fused`: whether an operator computes some of them
    - `logits`: outside of the graph, those that exist, by the number of their step; 0: the call
    """

    logits: dict[int, Any]

    def __init__(self) -> None:
        self.written, self.fused = False, False


def _autocast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _under(device: str, dtype: torch.dtype | None) -> Any:
    return torch.autocast(device, dtype, enabled=dtype is not None)


class _Call(NamedTuple):
    """A call of a head in a graph, with the modes under which it ran (`autocast`: None where it was off)."""

    layer: nn.Module
    settings: Any
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    with_grad: bool
    autocast: torch.dtype | None
    made: _Made
    asked: request.Asked | None


class _Step(NamedTuple):
    """A function of logits, by its key in `_FUNCTIONS`; logits among the arguments are a `_Call` or a `_Step`.

    It may run under another `autocast` than the call of the head.
    """

    number: int
    made: _Made
    key: str
    args: Any
    kwargs: Any
    autocast: torch.dtype | None

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


def _call_of(x: Any) -> _Call:
    """Return the call of a head that an expression comes from, the first of several."""
    while isinstance(x, _Step):
        x = next(y for y in x.args if isinstance(y, (_Call, _Step)))
    found: _Call = x
    return found


def _product(call: _Call) -> Any:
    """Return the `DeferredLogits` of a call; real logits for shapes alone, or if no loss can compute them."""
    device = call.hidden.device.type
    with (
        torch.set_grad_enabled(call.with_grad and torch.is_grad_enabled()),
        _under(device, call.autocast),
    ):
        if shapes_only() or sharded.keep_gathered(call.layer, call.weight) is not None:
            return F.linear(call.hidden, call.weight, call.bias)
        return product(call.layer, call.hidden, call.weight, call.bias, call.settings, request.current())


def _applied(key: str, args: Any, kwargs: Any) -> Any:
    """Call a function of logits, also from an operator, in which torch asks no `__torch_function__`."""
    function = _FUNCTIONS[key]
    if any(isinstance(x, DeferredLogits) for x in (*args, *kwargs.values())):
        return DeferredLogits.__torch_function__(function, (DeferredLogits,), args, kwargs)
    return function(*args, **kwargs)


def _logits(x: Any) -> Any:
    """Return `DeferredLogits` of an expression, outside of the graph. Those of one call share memory, as in eager."""
    if isinstance(x, (_Call, _Step)):
        number = x.number if isinstance(x, _Step) else 0
        known = vars(x.made).setdefault("logits", {})
        if number not in known:
            if isinstance(x, _Call):
                known[number] = _product(x)
            else:
                args, kwargs = _logits(x.args), _logits(x.kwargs)
                with _under(_call_of(x).hidden.device.type, x.autocast):
                    known[number] = _applied(x.key, args, kwargs)
        return known[number]
    if isinstance(x, (list, tuple)):
        return type(x)(map(_logits, x))
    return {name: _logits(y) for name, y in x.items()} if isinstance(x, dict) else x


class TracedLogits(Tensor):
    """Real logits of a graph, with the expression that they are the values of."""

    _expression: _Call | _Step
    _lse: tuple[Any, Tensor] | None  # logsumexp and its dimension, if an operator computed them

    def _leave(self, expression: Any) -> None:
        with without_torch_function():
            known = vars(expression.made).setdefault("logits", {})
            number = expression.number if isinstance(expression, _Step) else 0
            if not self.is_meta:
                z = self.as_subclass(Tensor)
            elif number in known:
                z = known[number].view_as(known[number])
            else:
                z = _logits(expression)
                known[number] = self
            torch.utils.swap_tensors(self, z)

    _leaving: Any = property(None, outside_graphs(_leave))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key, logits = _key_of(func), [x for x in (*args, *kwargs.values()) if _has_expression(x)]
        name = key.rpartition(".")[2]
        if _writes(func) or "out" in kwargs or is_inplace(_inplace_at(func), args, kwargs):
            for z in logits:
                z._expression.made.written = True
            if _reshapes(func):  # a change of a view's shape would not be one of the logits
                with without_torch_function():
                    return func(*args, **kwargs)
            return func(*_plain(args), **_plain(kwargs))
        for z in logits:
            if torch.is_grad_enabled() != _call_of(z._expression).with_grad:  # a step holds no grad mode
                return func(*_plain(args), **_plain(kwargs))
        if name in _FUSED and logits and _is_fused(name, args, kwargs):
            return _fused(key, name, args, kwargs)
        result = func(*_plain(args), **_plain(kwargs))
        return _recorded(key, args, kwargs, result) if name in _LAZY and logits else result


def _has_expression(x: Any) -> TypeGuard[TracedLogits]:
    """Whether `x` has an expression: Dynamo makes logits without one, of the rows over which a loop iterates."""
    return isinstance(x, TracedLogits) and hasattr(x, "_expression")


def _plain(tree: Any) -> Any:
    """Return arguments with ordinary tensors in place of logits, whose memory they are."""
    if isinstance(tree, TracedLogits):
        with without_torch_function():
            return Tensor.view_as(tree, tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([_plain(x) for x in tree])
    return {name: _plain(x) for name, x in tree.items()} if isinstance(tree, dict) else tree


def _traced(z: Tensor, expression: Any) -> TracedLogits:
    made: Any = MARK(z).as_subclass(TracedLogits)
    made._expression, made._lse = expression, None
    made._leaving = expression  # the last attribute, so that it is set last outside of the graph, too
    return made


def _starts() -> bool:
    """Whether a head's call defers in this graph: not under transforms or an export. Dynamo runs this as it traces."""
    return not (transforms_are_active() or torch.compiler.is_exporting()) and at_end_of_trace(drop_unread)


def _key_of(func: Any) -> str:
    """Return the key of a function in `_FUNCTIONS`; "" if it is not there. Dynamo runs this as it traces."""
    return _KEYS.get(func, "")


def _writes(func: Any) -> bool:
    """Whether a function changes a tensor in place. Dynamo runs this as it traces."""
    if isinstance(func, (type(MARK), type(aten.alias))):
        return bool(written_arguments(func))
    return is_write(getattr(func, "__name__", ""))


def _reshapes(func: Any) -> bool:
    """Whether a function changes the shape or strides of a tensor itself. Dynamo runs this as it traces."""
    return getattr(func, "__name__", "") in _RESHAPES


_RESHAPES = frozenset("transpose_ swapaxes_ swapdims_ t_ unsqueeze_ squeeze_ as_strided_ set_ resize_".split())


def _inplace_at(func: Any) -> int:
    """Return the place of the argument `inplace` of a function of F; -1 without. Dynamo runs this as it traces."""
    return inplace_at(func)


def _next_number() -> int:
    """Return a number for a step. Dynamo runs this as it traces: a branch of `torch.cond` may count nothing."""
    return next(_numbers)


_numbers = itertools.count(1)

for _constant in (_next_number, _starts, _key_of, _writes, _reshapes, _inplace_at):
    runs_while_tracing(_constant)


def called(
    layer: Any, stock: Callable[..., Any], settings: Any, asked: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a layer that defers inside a graph. `asked` is a `request.Asked`, or None."""
    z = stock(layer, *args, **kwargs)
    if parametrize.is_parametrized(layer):  # each read of its weight computes another one, perhaps a different one
        return z
    takes = len(args) == 1 and not kwargs and type(args[0]) is Tensor and z.ndim > 1
    if not takes or settings is None:
        return z
    defers = settings.in_training and (layer.training or settings.of_trainer)
    if asked is not None and asked.defer is not None:
        defers = asked.defer
    if not defers or not _starts():
        return z
    grad, autocast = torch.is_grad_enabled(), _autocast(args[0].device.type)
    return _traced(z, _Call(layer, settings, args[0], layer.weight, layer.bias, grad, autocast, _Made(), asked))


def _recorded(key: str, args: Any, kwargs: Any, result: Tensor) -> Any:
    """Return a result as logits with an expression; as it is, if no expression can say what it is."""
    logits = [x for x in args if _has_expression(x)]
    written = [z for z in logits if z._expression.made.written]
    if written or not logits or not _is_simple(args) or any(isinstance(x, Tensor) for x in kwargs.values()):
        return result
    args = tuple([x._expression if isinstance(x, TracedLogits) else x for x in args])
    made, autocast = logits[0]._expression.made, _autocast(result.device.type)
    return _traced(result, _Step(_next_number(), made, key, args, kwargs, autocast))


def _is_simple(args: Any) -> bool:
    """Whether a graph can hold these arguments of an operation: logits, numbers and indices."""
    for x in args:
        if isinstance(x, (tuple, list)):
            if not _is_simple(x):
                return False
        elif isinstance(x, Tensor) and not _has_expression(x) and x.dtype != torch.int64:
            return False
    return True


# Functions that are fused


def _is_fused(name: str, args: Any, kwargs: Any) -> bool:
    for x in (*args, *kwargs.values()):
        if _has_expression(x):
            if x._expression.made.written:
                return False
        elif isinstance(x, TracedLogits) or (isinstance(x, Tensor) and x.requires_grad):
            return False
    return name != "kl_div" or kwargs.get("reduction") != "none"


def _selected(z: Any, dim: int, index: Tensor) -> Any:
    """Return `gather` and, because it comes next, `logsumexp`, which together are a log-probability."""
    return _applied("torch.gather", (z, dim, index), {}), _applied("torch.logsumexp", (z, dim), {})


def _is_logits(x: Any) -> bool:
    """Whether an expression is of logits, and not of their log-probabilities."""
    while isinstance(x, _Step):
        if x.name in ("log_softmax", "softmax", "exp"):
            return False
        x = x.args[0]
    return isinstance(x, _Call)


def _fused(key: str, name: str, args: Any, kwargs: Any) -> Any:
    """Return a function of logits as an operator of the graph, or what a request or an earlier operator says."""
    z = args[0] if args else kwargs.get("input")
    asked = _asked(z)
    if name in ("cross_entropy", "nll_loss") and asked is not None:
        if asked.withhold and (zero := _zero_loss(key, *args, **kwargs)) is not None:
            asked.gave_zero = True
            return zero
        if asked.accuracy:
            result, accuracy = _operator(key, args, kwargs, True)
            asked.accuracies.append(accuracy.detach())
            return result
    if name == "gather" and len(args) == 3 and not kwargs and _has_expression(z) and _is_logits(z._expression):
        result, lse = _operator("selected", args, kwargs)
        z._lse = args[1], lse
        return result
    if name == "logsumexp" and len(args) == 1 + (not kwargs) and _has_expression(z) and z._lse is not None:
        dim, lse = z._lse
        if dim == (args[1] if len(args) == 2 else kwargs.get("dim")) and not kwargs.keys() - {"dim"}:
            return lse
    return _operator(key, args, kwargs)


def _zero_loss(key: str, input: Any, target: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """Return zeros of the shape and dtype of a cross entropy; None for one with probabilities as its target."""
    if target.is_floating_point():
        return None
    reduction = args[4] if len(args) > 4 else kwargs.get("reduction", "mean")
    dtype = _FUNCTIONS[key](input.new_zeros(1, 2), target.new_zeros(1)).dtype
    zero: Tensor = target.new_zeros(target.shape if reduction == "none" else (), dtype=dtype)
    return zero


def _asked(z: Any) -> request.Asked | None:
    return _call_of(z._expression).asked if _has_expression(z) else None


def _operator(key: str, args: Any, kwargs: Any, accuracy: bool = False) -> Any:
    """Return a function of logits as one operator of the graph, and the token accuracy of a cross entropy."""
    parts = _Parts()
    tree = parts.encoded(args, True), parts.encoded(kwargs, True)
    trains = torch.is_grad_enabled() and not key.endswith("argmax")
    device = parts.device
    autocast = _autocast(device.type)
    names = tuple([f"x{i}" for i in range(len(parts.tensors))])
    constants = (("key", key), ("calls", tuple(parts.calls)), ("tree", tree), ("accuracy", accuracy))
    call = whole_graph.name_of_call("deferred", None, names, constants, trains, autocast)
    needs = [trains and need for need in parts.needs]
    results = whole_graph.fused(call, parts.tensors, needs, parts.sizes)
    return whole_graph.formed(results if True in needs else [x.detach() for x in results], call)


class _Parts:
    """Arguments as constants, tensors and sizes. Sizes are apart, because they may be symbols of the compiler."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.needs: list[bool] = []
        self.sizes: list[int] = []
        self.calls: list[Any] = []
        self.made: list[_Made] = []
        self.device: Any = None

    def encoded(self, x: Any, live: bool) -> Any:
        """Return a constant that `_decoded` takes. `live`: whether there is a gradient by `x`."""
        if isinstance(x, TracedLogits):
            x = x._expression
        if isinstance(x, _Call):
            return "call", self._call(x, live)
        if isinstance(x, _Step):
            args, kwargs = self.encoded(x.args, live and x.name != "detach"), self.encoded(x.kwargs, False)
            return "step", x.key, args, kwargs, x.autocast
        if isinstance(x, Tensor):
            return "tensor", self._tensor(x)
        if isinstance(x, slice):
            return "slice", self.encoded(x.start, False), self.encoded(x.stop, False), self.encoded(x.step, False)
        if isinstance(x, (tuple, list)):
            return "list" if isinstance(x, list) else "tuple", tuple([self.encoded(y, live) for y in x])
        if isinstance(x, dict):
            return "dict", tuple([(name, self.encoded(y, live)) for name, y in x.items()])
        if isinstance(x, int) and not isinstance(x, bool):
            self.sizes.append(x)
            return "size", len(self.sizes) - 1
        if isinstance(x, float):
            return "number", self._tensor(torch.ones((), dtype=torch.float64) * x)  # a symbol stays one
        return x

    def _tensor(self, x: Tensor) -> int:
        self.tensors.append(x)
        self.needs.append(False)
        return len(self.tensors) - 1

    def _call(self, call: _Call, live: bool) -> int:
        place = len(self.made)
        for i in range(len(self.made)):
            place = i if self.made[i] is call.made else place
        if place == len(self.made):
            tensors = [None if x is None else self._tensor(x) for x in (call.hidden, call.weight, call.bias)]
            settings = call.settings.logits_budget, call.settings.of_trainer
            record = call.layer.__dict__.get(RECORD)
            number = None if record is None else self._tensor(record.place)
            self.device = call.hidden.device
            self.made.append(call.made)
            call.made.fused = True
            self.calls.append((*tensors, settings, call.with_grad, call.autocast, number))
        for i in self.calls[place][:3]:
            if i is not None and live and call.with_grad:
                self.needs[i] = self.needs[i] or self.tensors[i].requires_grad
        return place


def _run(key: str, calls: Any, tree: Any, accuracy: bool, sizes: Sequence[int] = (), **tensors: Tensor) -> Any:
    """Run a function on `DeferredLogits` of the calls; for shapes alone, on ordinary logits."""
    given = list(tensors.values())
    logits = []
    for hidden, weight, bias, settings, with_grad, autocast, number in calls:
        record = None if number is None or shapes_only() else RECORDS.get(int(given[number]))
        tensors_of_call = given[hidden], given[weight], None if bias is None else given[bias]
        options = SimpleNamespace(logits_budget=settings[0], of_trainer=settings[1])
        layer: Any = LayerOfGraph(**{RECORD: record})
        logits.append(_product(_Call(layer, options, *tensors_of_call, with_grad, autocast, _Made(), None)))
    args, kwargs = (_decoded(x, logits, given, sizes) for x in tree)
    if key == "selected":
        return _selected(*args)
    # torch 2.13 infers the shape () for a cross entropy without a reduction, if the lengths of its arguments are two
    # symbols.
    zero = _zero_loss(key, *args, **kwargs) if shapes_only() and key.endswith(("cross_entropy", "nll_loss")) else None
    if zero is not None:
        return (zero, zero.new_zeros((), dtype=torch.float32)) if accuracy else zero
    accuracies: list[Any] = []
    with request.requested(accuracies=accuracies if accuracy else None):
        result = _applied(key, args, kwargs)
    if isinstance(result, DeferredLogits):
        result = result.tensor()
    if not accuracy:
        return result
    return result, accuracies[0] if accuracies else torch.full((), math.nan, device=result.device)


class LayerOfGraph(SimpleNamespace):
    """Stands for the layer of a call that a graph has made, which has its tensors."""


def _device_of(args: Any) -> torch.device:
    device: torch.device = next(x.device for x in args if isinstance(x, Tensor))
    return device


def _decoded(x: Any, logits: list[Any], tensors: list[Tensor], sizes: Sequence[int]) -> Any:
    if not isinstance(x, tuple):
        return x

    def decoded(x: Any) -> Any:
        return _decoded(x, logits, tensors, sizes)

    kind, *rest = x
    if kind in ("call", "tensor", "size"):
        return {"call": logits, "tensor": tensors, "size": sizes}[kind][rest[0]]
    if kind == "number":
        return 1.0 if shapes_only() else tensors[rest[0]].item()
    if kind == "step":
        key, args, kwargs, autocast = rest
        args, kwargs = decoded(args), decoded(kwargs)
        with _under(_device_of(args).type, autocast):
            return _applied(key, args, kwargs)
    if kind == "slice":
        return slice(*map(decoded, rest))
    if kind == "dict":
        return {name: decoded(y) for name, y in rest[0]}
    return {"list": list, "tuple": tuple}[kind](map(decoded, rest[0]))


whole_graph.FUNCTIONS["deferred"] = _run


# Functions by name, whose deferred logits are those of eager code. Each is a function of torch, of F, or a method.
_LAZY = frozenset(
    "view reshape flatten unsqueeze squeeze transpose permute mT swapaxes movedim narrow select contiguous detach "
    "clone __getitem__ to float double half bfloat16 mul multiply __mul__ __rmul__ div divide true_divide __truediv__ "
    "neg __neg__ tanh log_softmax softmax exp add __add__ sub subtract __sub__".split()
)
_FUSED = frozenset("cross_entropy nll_loss kl_div gather take_along_dim logsumexp argmax mean sum nansum".split())
_KEYS: dict[Any, str] = {}
_FUNCTIONS: dict[str, Any] = {}
for _name in sorted(_LAZY | _FUSED):
    for _owner in (torch, F, Tensor):
        _function = getattr(_owner, _name, None)
        if _name == "mT":
            _function = Tensor.mT.__get__  # type: ignore[attr-defined]
        if _function is not None and _function not in _KEYS:
            _key = _KEYS[_function] = f"{_owner.__name__}.{_name}"
            _FUNCTIONS[_key] = _function


def _method(name: str, function: Any) -> Any:
    def method(z: Any, *args: Any, **kwargs: Any) -> Any:
        if name in ("register_hook", "retain_grad") and _has_expression(z):
            made = z._expression.made
            if made.fused:
                raise RuntimeError(f"{name} of deferred logits comes after a loss of them: call it before the loss")
            made.written = True  # an operator would pass by the hook
            with without_torch_function():
                return function(z, *args, **kwargs)
        return getattr(_plain(z), name)(*_plain(args), **_plain(kwargs))

    return method


# Dynamo cannot pass methods that are written in Python through `__torch_function__`.
for _name, _function in vars(Tensor).items():
    if isinstance(_function, FunctionType) and not _name.startswith("_"):
        setattr(TracedLogits, _name, _method(_name, _function))
