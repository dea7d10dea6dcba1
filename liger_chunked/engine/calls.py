"""Let a loss class be called with settings, or with tensors.

    loss = LigerFusedLinearDPOLoss(beta=0.2)                                        # a module
    value, metrics = LigerFusedLinearDPOLoss(weight, input, target, beta=0.2)       # its value

The second line breaks a torch.compile graph; `liger_chunked.functional` does not.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from liger_chunked import arguments
from liger_chunked.types import LogitOptions

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


def failed_to_bind(error: TypeError) -> bool:
    """Return whether a function rejected its arguments. Call this in the frame of the call."""
    assert error.__traceback__ is not None
    return error.__traceback__.tb_next is None


class LossType(ABCMeta):
    """The metaclass of every loss class."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's signature, for `help` and editors."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:], return_annotation=cls)

    @overload
    def __call__(cls, weight: Tensor, /, *args: Any, **kwargs: Any) -> Any: ...

    @overload
    def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T: ...

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build a loss; evaluate it if the positional arguments are tensors."""
        if args and arguments.are_data(cls, args):
            settings, data = arguments.split(cls, kwargs)
            return cls(**settings)(*args, **data)
        try:
            loss = super().__call__(*args, **kwargs)
        except TypeError as error:
            if not failed_to_bind(error) or cls.__abstractmethods__:
                raise
            explained = arguments.constructor_error(cls, args, kwargs)
            if explained is None:
                raise
            raise explained from None
        if isinstance(loss, cls):
            loss._made()
        return loss


Settings = tuple[tuple[str, Any], ...]


@functools.lru_cache(maxsize=256)
def _kept(cls: Any, settings: Settings) -> nn.Module:
    return cls(**dict(settings))


class _OfGraphs:
    """Holds the losses of compiled graphs: each must outlive its graph."""


_OF_GRAPHS = _OfGraphs()


def _for_graph(cls: type, settings: Settings) -> str:
    """Build a loss during tracing, and return its name in `_OF_GRAPHS`. Tracers read `LogitOptions` only as tuples."""
    given = {name: LogitOptions(*x) if name == "teacher_options" and x else x for name, x in settings}
    name = f"loss_{len(vars(_OF_GRAPHS))}"
    setattr(_OF_GRAPHS, name, cls(**given))
    return name


# What torch.compiler.assume_constant_result sets; calling it would import the compiler, which is slow.
_for_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _traceable(x: Any) -> Any:
    if isinstance(x, LogitOptions):
        return (x.ignore_index, x.softcap, x.logit_scale, x.temperature, x.logits_budget)
    return x


def once(cls: type[nn.Module], **settings: Any) -> nn.Module:
    """Return a loss from a cache, unless a setting is callable: a callable may hold a batch.

    In a compiled function, tracing builds the loss.
    """
    key = tuple((name, tuple(x) if isinstance(x, list) else x) for name, x in settings.items())
    if torch.compiler.is_compiling():
        name = _for_graph(cls, tuple((name, _traceable(x)) for name, x in key))
        return getattr(_OF_GRAPHS, name)
    return _kept(cast(Hashable, cls), key) if all(_may_be_kept(x) for _, x in key) else cls(**settings)


def answering(function: Function) -> Function:
    """Make the error of an unknown argument suggest the right name."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if not failed_to_bind(error):
                raise
            none = arguments.Arguments(())
            raise arguments.call_error(function.__name__, function, args, kwargs, none) or error from None

    return cast(Function, call)


def _may_be_kept(x: Any) -> bool:
    return all(map(_may_be_kept, x)) if isinstance(x, tuple) else isinstance(x, Hashable) and not callable(x)
