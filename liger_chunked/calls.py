"""Entry points: what a class called with tensors does, and functions that run outside compiled graphs."""

from __future__ import annotations

import copy
import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from liger_chunked import arguments, whole_graph
from liger_chunked.dtensor import any_dtensor, localized
from liger_chunked.kernels.operands import all_plain, plain
from liger_chunked.private import runs_while_tracing, skip_frame, tracing_callback
from liger_chunked.shapes import shapes_only
from liger_chunked.types import AdaptedWeight, Weight
from liger_chunked.what_ran import RECORD, asked_by

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


def typed_like(forward: Function) -> Callable[[Callable[..., Any]], Function]:
    """Give `__call__` the type of `forward`; nn.Module's is Callable[..., Any]."""
    return lambda _: forward


class FixedSettings(nn.Module):
    """A module whose settings are those that it was built with.

    Checks, kernels and what follows from a setting read them when a loss is built, so a later one would have half its
    effect, or none. Names in `_fixed`, which the end of construction puts on the module, cannot be set: that raises
    AttributeError. Parameters and buffers can, whatever their names.
    """

    def __init__(self) -> None:
        super().__init__()
        whole_graph.number(self)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name in own.get("_fixed", ()) and not (name in own["_parameters"] or name in own["_buffers"]):
            kind = type(self).__name__
            raise AttributeError(
                f"{kind}.{name} cannot be set: build a new {kind}(..., {name}=...), or set it in the __init__ of a "
                "subclass"
            )
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        whole_graph.number(self)  # a copy is another module, with its own number


def altered(module: T, **attributes: Any) -> T:
    """Return a shallow copy of a loss with other attributes, also settings: for the library, which knows what follows.

    Args:
        module: a loss, or another callable that has the attributes.
    """
    own = copy.copy(module)
    fixed = vars(own).pop("_fixed", ())
    for name, value in attributes.items():
        setattr(own, name, value)
    vars(own)["_fixed"] = fixed
    return own


class LossType(ABCMeta):
    """The type of loss classes: `Loss(weight, input, ...)` evaluates the loss.

    A metaclass, because `__new__` cannot return what is no loss without the loss's `__init__` seeing the tensors, and a
    base's `__init__` cannot check what a subclass's `__init__` does after it (`_check_after_init`).
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        # Because inspect would show the metaclass's `__call__`.
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:], return_annotation=cls)

    @overload
    def __call__(cls, weight: Weight, /, *args: Any, **kwargs: Any) -> Any: ...

    @overload
    def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T: ...

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build a loss; evaluate it if positional arguments are tensors, or `input` is among the keywords."""
        if arguments.are_data(cls, args, kwargs, (Tensor, AdaptedWeight)):
            settings, data = arguments.split(cls, kwargs)
            loss: Any = cls(**settings)
            vars(loss).pop(RECORD, None)  # of one call: nobody can explain it, and each step has another
            return loss(*args, **data)
        try:
            loss = super().__call__(*args, **kwargs)
        except TypeError:
            explained = None if cls.__abstractmethods__ else arguments.constructor_error(cls, args, kwargs)
            if explained is None:  # the call binds, so the error is from within
                raise
            raise explained from None
        if isinstance(loss, cls):
            loss._check_after_init()
        return loss


# The heads of other models. Their own parameters may require a gradient, because a model that nobody trains is seldom
# frozen. A matrix computed from trainable tensors may not.
_OTHER_HEADS = frozenset(("ref_weight", "ref_bias", "teacher_weight", "teacher_bias"))


def check_constants(owner: str, arguments: Iterable[tuple[str, Any]]) -> None:
    """Raise ValueError if an argument that `owner` treats as a constant requires a gradient.

    Such an argument would get no gradient, and the caller would not notice. Under `torch.no_grad()` nothing is lost, so
    nothing is refused.

    Args:
        owner: the name of the loss or function, for the error.
        arguments: names and values. Names in `DIFFERENTIATED` and values that are no tensors pass.
    """
    if not torch.is_grad_enabled():
        return
    for name, x in arguments:
        adapted = isinstance(x, AdaptedWeight)
        # getattr, because isinstance(x, Tensor) is slow for what is no tensor, and every step comes here.
        if name in whole_graph.DIFFERENTIATED or not (adapted or getattr(x, "requires_grad", False)):
            continue
        tensors = [t for t in ((x.weight, x.up) if adapted else (x,)) if isinstance(t, Tensor) and t.requires_grad]
        if not tensors or (name in _OTHER_HEADS and all(t.is_leaf for t in tensors)):
            continue
        message = f"{owner} treats {name} as a constant, but it requires a gradient: pass {name}.detach()"
        if adapted:
            message = f"{owner} treats {name} as a constant, but it requires a gradient: .detach() its weight and up"
        head = {"ref_input": "ref_weight", "teacher_input": "teacher_weight"}.get(name)
        if head is not None and isinstance(x, nn.Parameter):  # hidden states are none
            message = f"{name} is a Parameter, as the weight of a head is: {head} and {name} look swapped"
        elif owner != "linear_token_stats":
            message += (
                f". For a gradient by {name}, compute a loss of your own from linear_token_stats, whose statistics "
                "are differentiable"
            )
        raise ValueError(message)


class _Eager:
    """Holds untraced entry points, by name. An object, because Dynamo cannot take functions from constants."""


# Under Dynamo an entry point is an operator of the graph (`whole_graph`), or, if an argument cannot be part of a graph,
# breaks it. Entry points are not `torch.compiler.disable`d from the start, because that imports the
# compiler, which takes seconds, and because each call of a disabled function takes microseconds. Instead, `call` runs a
# disabled `checked` if Dynamo traces it, and from then on (`tracing_callback`), as Dynamo would trace what it calls.
_EAGER = _Eager()
_REASON = (
    "this call of a fused loss has an argument that no graph holds (KeptIds, an AdaptedWeight, a shard or group of "
    "ranks), or a loss with parameters; compile without fullgraph=True"
)
_ENTRY_POINTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


@runs_while_tracing
def _keep_out_of_graphs(name: str) -> None:
    """Put a disabled entry point on `_EAGER`."""
    if not hasattr(_EAGER, name):
        call, checked = _ENTRY_POINTS[name]
        setattr(_EAGER, name, torch.compiler.disable(checked, reason=_REASON))
        skip_frame(call)  # and with it all entry points, because they share its code
        skip_frame(_keep_out_of_graphs)  # which a skipped `call` runs


@runs_while_tracing
def _is_exporting() -> bool:
    """Return `torch.compiler.is_exporting()`, which is True in every graph that Dynamo of torch < 2.13 traces."""
    return torch.compiler.is_exporting()


def entry_point(function: Function) -> Function:
    """Make a function, or the `forward` of a loss, an entry point.

    It gets plain tensors, suggests names for unknown arguments, refuses constants that require a gradient, and breaks
    torch.compile's graph.
    """
    name = f"{function.__module__}.{function.__qualname__}".replace(".", "_")
    while name in _ENTRY_POINTS:  # as the method of another class that the same factory made
        name += "_"
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    is_method = positional[0] == "self"
    known = {p.name for p in parameters} | {"hidden"}  # which the functions take for `input`

    def as_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if any_dtensor(args) or any_dtensor(kwargs.values()):
            named = dict(zip(positional, args, strict=False))
            if len(named) < len(args) or not named.keys().isdisjoint(kwargs):
                return args, kwargs  # `function` raises
            named = localized(named | kwargs)
            args, kwargs = args[:is_method], {name: x for name, x in named.items() if name != "self"}
        return plain(positional, args), dict(zip(kwargs, plain(tuple(kwargs), tuple(kwargs.values())), strict=True))

    def explain(owner: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypeError | None:
        constructor = arguments.of_constructor(type(args[0])) if is_method and args else arguments.Arguments(())
        return arguments.call_error(owner, function, args, kwargs, constructor)

    def owner_of(args: tuple[Any, ...]) -> str:
        return type(args[0]).__name__ if is_method and args else function.__name__

    def checked(*args: Any, **kwargs: Any) -> Any:
        # Before DTensors become local: the local tensor of a parameter is no leaf.
        owner = owner_of(args)
        try:
            check_constants(owner, (*zip(positional, args, strict=False), *kwargs.items()))
        except ValueError:
            # An argument that does not exist is no constant: say what it is called here.
            if kwargs.keys() - known and (explained := explain(owner, args, kwargs)) is not None:
                raise explained from None
            raise
        if not (shapes_only() or all_plain((*args, *kwargs.values()))):
            args, kwargs = as_plain(args, kwargs)
        try:
            with asked_by(vars(args[0]).get(RECORD) if is_method and args else None):
                return function(*args, **kwargs)
        except TypeError:
            explained = explain(owner, args, kwargs)
            if explained is None:  # the call binds, so the error is from within
                raise
            called_hidden = not is_method and "hidden" in kwargs and "input" not in kwargs
        if called_hidden:  # the functions called their `input` so
            return checked(*args, **{"input" if name == "hidden" else name: x for name, x in kwargs.items()})
        raise explained

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if _is_exporting():
                raise RuntimeError(
                    "torch.export cannot trace a fused loss: the program would name a call of this process"
                )
            # Here, because the operator gets tensors without their graphs. A number may be a symbol of the compiler.
            named = (*zip(positional, args, strict=False), *kwargs.items())
            check_constants(owner_of(args), [(k, x) for k, x in named if isinstance(x, (Tensor, AdaptedWeight))])
            results = whole_graph.in_graph(name, positional, args, kwargs)
            if results is NotImplemented:
                _keep_out_of_graphs(name)
                return getattr(_EAGER, name)(*args, **kwargs)
            return results
        if tracing_callback() is not None:
            _keep_out_of_graphs(name)
        return getattr(_EAGER, name, checked)(*args, **kwargs)

    functools.update_wrapper(call, function)
    _ENTRY_POINTS[name] = call, checked
    whole_graph.FUNCTIONS[name] = checked
    return cast(Function, call)


@functools.lru_cache(maxsize=256)
def _kept(cls: Any, settings: tuple[tuple[str, Any], ...]) -> nn.Module:
    return cls(**dict(settings))


def once(cls: type[nn.Module], **settings: Any) -> nn.Module:
    """Return a cached loss, unless a setting is callable: the cache would keep its closure."""
    key = tuple((name, tuple(x) if isinstance(x, list) else x) for name, x in settings.items())
    return _kept(cast(Hashable, cls), key) if all(_may_be_kept(x) for _, x in key) else cls(**settings)


def _may_be_kept(x: Any) -> bool:
    return all(map(_may_be_kept, x)) if isinstance(x, tuple) else isinstance(x, Hashable) and not callable(x)
