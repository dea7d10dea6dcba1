"""Make a loss one operation of a torch.compile graph.

A loss cannot be traced: it waits for the device to count its tokens, and its objective may be a closure.
`one_operation` therefore writes a call of `liger_chunked::forward` into the graph:

    forward     run the eager loss on detached arguments; keep what the backward needs
    backward    a scalar loss:          scale the forward's gradients by the upstream gradient
                a value per token:      `liger_chunked::backward` runs the eager loss again, then its backward

Both are pure functions of the graph's tensors and the named loss. Shapes are symbolic: another length does not
recompile.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from liger_chunked.arguments import Arguments, call_error, of_constructor
from liger_chunked.engine.calls import LossType, failed_to_bind
from liger_chunked.engine.hooks import isolated
from liger_chunked.kernels.backend import refuse_second_derivative
from liger_chunked.kernels.operands import plain
from liger_chunked.types import LogitOptions, accumulation_dtype

# A loss detaches its other arguments.
_PARAMETERS = ("weight", "input", "bias")
# Queried on import, because some tracers cannot trace the query.
_AUTOCAST_DEVICES = tuple(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla")))


class Like(NamedTuple):
    """Shape and dtype of one returned tensor.

    Shapes are () per batch, (B / 2,) per pair, the target's per token. "wide" is the weight's `accumulation_dtype`.
    """

    per: Literal["batch", "pair", "token"] = "batch"
    dtype: Literal["wide", "float32", "float64", "int64", "bool"] = "wide"

    def empty(self, weight: Tensor, target: Tensor | None) -> Tensor:
        """Return such a tensor, empty."""
        shape: Sequence[int] = ()
        if self.per != "batch":
            assert target is not None
            shape = target.shape if self.per == "token" else (target.shape[0] // 2,)
        dtype = accumulation_dtype(weight.dtype) if self.dtype == "wide" else getattr(torch, self.dtype)
        return weight.new_empty(shape, dtype=dtype)


class Returns(NamedTuple):
    """What a loss returns: `build(**tensors)`. If the first is per batch, its gradients come from the forward."""

    build: Callable[..., Any]
    tensors: Mapping[str, Like]


def loss_and(metrics: Callable[..., Any], fields: Mapping[str, Like], loss: Like) -> Returns:
    """Return the `Returns` of a loss with detached metrics."""

    def build(loss: Tensor, **values: Tensor) -> tuple[Tensor, Any]:
        return loss, metrics(**{name: x.detach() for name, x in values.items()})

    return Returns(build, {"loss": loss, **fields})


_OWNERS: weakref.WeakValueDictionary[str, FusedLoss] = weakref.WeakValueDictionary()
_FUNCTIONS: dict[str, Callable[..., Any]] = {}
_count = itertools.count()


class FusedLoss(nn.Module, metaclass=LossType):
    """A loss module that graphs find by a unique name.

    `Loss(weight, input, ..., beta=0.2)` is `Loss(beta=0.2)(weight, input, ...)`. Type checkers that ignore metaclasses,
    such as mypy, accept only the second.
    """

    options: LogitOptions

    def __init__(self) -> None:
        super().__init__()
        self._enter()

    def _made(self) -> None:
        """Raise RuntimeError unless the constructor called the base's."""
        if "_name_in_graphs" not in vars(self) or not hasattr(self, "options"):
            name = type(self).__name__
            raise RuntimeError(f"{name}.__init__ does not call super().__init__(): call it first, with beta and so on")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._enter()

    def _enter(self) -> None:
        self._name_in_graphs = f"{type(self).__name__}-{next(_count)}"
        _OWNERS[self._name_in_graphs] = self


class _Call(NamedTuple):
    """An eager call, encoded for a graph.

    - `tensors`, `ints`, `floats`, `texts`: values of the arguments `names`; a tuple of words is a text with a comma
      after each
    - `function`, `owner`: keys of `_FUNCTIONS` and `_OWNERS`
    - `needs`: the arguments that need gradients
    - `returns`: each output's `Like`, as "per dtype"
    - `autocast`: its dtype, or ""; compiled graphs run with autocast off
    """

    tensors: Sequence[Tensor]
    ints: Sequence[int]
    floats: Sequence[float]
    texts: Sequence[str]
    names: Sequence[str]
    function: str
    owner: str
    needs: Sequence[str]
    returns: Sequence[str]
    autocast: str

    @property
    def arguments(self) -> dict[str, Any]:
        texts = (tuple(text[:-1].split(",")) if text.endswith(",") else text for text in self.texts)
        return dict(zip(self.names, (*self.tensors, *self.ints, *self.floats, *texts), strict=True))

    @property
    def returned(self) -> list[Like]:
        return [Like(*like.split()) for like in self.returns]  # type: ignore[arg-type]

    @property
    def brings_gradients(self) -> bool:
        return bool(self.needs) and self.returned[0].per == "batch"

    def empty_returned(self) -> list[Tensor]:
        arguments = self.arguments
        return [like.empty(arguments["weight"], arguments.get("target")) for like in self.returned]

    def empty_gradients(self, unscaled: bool) -> list[Tensor]:
        """Return empty gradients; unscaled float16 ones are float32."""
        arguments = self.arguments
        half = (self.autocast or str(arguments["input"].dtype)) == "torch.float16"

        def dtype(x: Tensor) -> torch.dtype:
            return torch.float32 if half and unscaled and x.dtype != torch.float64 else x.dtype

        parameters = [arguments[name] for name in self.needs]
        return [torch.empty(x.shape, dtype=dtype(x), device=x.device) for x in parameters]

    def autocasting(self) -> torch.autocast:
        dtype = getattr(torch, self.autocast.removeprefix("torch.")) if self.autocast else None
        return torch.autocast(self.arguments["weight"].device.type, dtype, enabled=dtype is not None)

    def run(self) -> tuple[list[Tensor], list[Tensor]]:
        """Run the function. Return its flat outputs, and the leaves `needs`."""
        arguments = {name: x.detach() if isinstance(x, Tensor) else x for name, x in self.arguments.items()}
        leaves = [arguments[name].requires_grad_() for name in self.needs]
        owner = [_OWNERS.get(self.owner)] if self.owner else []
        if None in owner:
            raise RuntimeError(f"{self.owner} was deleted: keep a loss until the backward of the graph that calls it")
        with isolated(), _autograd(), torch.set_grad_enabled(bool(leaves)), self.autocasting():
            return _flat(_FUNCTIONS[self.function](*owner, **arguments)), leaves


def _flat(x: Any) -> list[Tensor]:
    if x is None:
        return []
    return [x] if isinstance(x, Tensor) else [tensor for part in x for tensor in _flat(part)]


@contextmanager
def _autograd() -> Iterator[None]:
    """Turn autograd on, which the dispatcher turns off in operations."""
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        exclude = exclude - torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude):
        yield


def _like(x: Tensor, declared: Tensor, name: str) -> Tensor:
    """Return a contiguous copy, as the graph expects."""
    if x.shape != declared.shape:
        raise RuntimeError(f"{name} is declared to be {tuple(declared.shape)}, and is {tuple(x.shape)}")
    return x.detach().to(declared.dtype, copy=True, memory_format=torch.contiguous_format)


_CALL = (
    "Tensor[] tensors, SymInt[] ints, float[] floats, str[] texts, str[] names, str function, str owner, "
    "str[] needs, str[] returns, str autocast"
)
# A loss waits for the device, and its token count varies.
_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("liger_chunked::forward", mutates_args=(), schema=f"({_CALL}) -> Tensor[]", tags=_TAGS)
def _forward(*call: Any) -> list[Tensor]:
    """Return the outputs, then any gradients that the forward computes."""
    made = _Call(*call)
    outputs, _ = made.run()
    declared = made.empty_returned()
    if len(outputs) != len(declared):
        raise RuntimeError(f"{made.function} is declared to return {len(declared)} tensors, and returns {len(outputs)}")
    returned = [_like(*x, made.function) for x in zip(outputs, declared, strict=True)]
    if not made.brings_gradients:
        return returned
    gradients = dict(zip(("input", "weight", "bias"), outputs[0].grad_fn.gradients, strict=True))  # type: ignore[union-attr]
    needed = zip(made.needs, made.empty_gradients(unscaled=True), strict=True)
    return [*returned, *(gradients[name].view(like.shape).to(like.dtype) for name, like in needed)]


@_forward.register_fake
def _(*call: Any) -> list[Tensor]:
    made = _Call(*call)
    return made.empty_returned() + (made.empty_gradients(unscaled=True) if made.brings_gradients else [])


@torch.library.custom_op(
    "liger_chunked::backward", mutates_args=(), schema=f"(Tensor[] upstream, {_CALL}) -> Tensor[]", tags=_TAGS
)
def _backward(upstream: Sequence[Tensor], *call: Any) -> list[Tensor]:
    """Return the gradients of `needs`, given those of floating-point outputs."""
    outputs, leaves = _Call(*call).run()
    floating = (x for x in outputs if x.is_floating_point())
    given = {x: g for x, g in zip(floating, upstream, strict=True) if x.requires_grad}
    with _autograd():
        return list(torch.autograd.grad(list(given), leaves, list(given.values())))


@_backward.register_fake
def _(upstream: Sequence[Tensor], *call: Any) -> list[Tensor]:
    return _Call(*call).empty_gradients(unscaled=False)


@torch.library.custom_op("liger_chunked::once", mutates_args=(), schema="(Tensor upstream, Tensor[] sources) -> Tensor")
def _once(upstream: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """Return the upstream gradient, connected to `sources`, so that second derivatives raise.

    Saved gradients alone would count as constants.
    """
    return upstream.clone()


@_once.register_fake
def _(upstream: Tensor, sources: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(upstream)


_once.register_autograd(refuse_second_derivative)
_backward.register_autograd(refuse_second_derivative)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    call = _Call(*inputs)
    ctx.call = call._replace(tensors=())
    if not call.brings_gradients:
        return ctx.save_for_backward(*call.tensors)
    parameters = [call.arguments[name] for name in call.needs]
    ctx.dtypes = [x.dtype for x in parameters]
    ctx.save_for_backward(*output[len(call.returns) :], *parameters)


def _differentiate(ctx: Any, upstream: Sequence[Tensor]) -> tuple[Any, ...]:
    call = ctx.call
    if call.brings_gradients:
        n = len(call.needs)
        saved = ctx.saved_tensors  # a checkpoint allows one read
        unscaled, parameters = saved[:n], saved[n:]
        scalar = _once(upstream[0], parameters)
        # The compiler computes this product in the saved memory, unless the graph is retained.
        scaled = (
            (g.to(accumulation_dtype(dtype)) * scalar, dtype) for g, dtype in zip(unscaled, ctx.dtypes, strict=True)
        )
        gradients = [g.to(dtype) for g, dtype in scaled]
    else:
        returned = zip(upstream, call.returned, strict=False)
        given = [g for g, like in returned if like.dtype not in ("int64", "bool")]
        gradients = _backward(given, *call._replace(tensors=ctx.saved_tensors))
    by_name = dict(zip(call.needs, gradients, strict=True))
    n_tensors = len(call.names) - len(call.ints) - len(call.floats) - len(call.texts)
    # Torch takes an empty list for one of tensors, whose gradient is an empty list.
    return [by_name.get(name) for name in call.names[:n_tensors]], *([] if x == [] else None for x in call[1:])


_forward.register_autograd(_differentiate, setup_context=_save)


def _spelt(function: str, owner: FusedLoss | None, arguments: Mapping[str, Any], returns: Mapping[str, Like]) -> _Call:
    """Encode a call, as the tracer sees it."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    ints = {name: x for name, x in arguments.items() if isinstance(x, int)}
    floats = {name: x for name, x in arguments.items() if isinstance(x, float)}
    texts = {name: x for name, x in arguments.items() if isinstance(x, (str, tuple))}
    names = [*tensors, *ints, *floats, *texts]
    if len(names) < len(arguments):
        unknown = [name for name in arguments if name not in names]
        raise TypeError(
            f"under torch.compile, {function} takes tensors, numbers and words, got other types for {unknown}"
        )
    trainable = [name for name in _PARAMETERS if name in tensors and tensors[name].requires_grad]
    device = tensors["weight"].device.type
    autocast = device in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device)
    return _Call(
        tensors=list(tensors.values()),
        ints=list(ints.values()),
        floats=list(floats.values()),
        texts=[x if isinstance(x, str) else "".join(f"{word}," for word in x) for x in texts.values()],
        names=names,
        function=function,
        owner="" if owner is None else owner._name_in_graphs,
        needs=trainable if torch.is_grad_enabled() else [],
        returns=[f"{like.per} {like.dtype}" for like in returns.values()],
        autocast=str(torch.get_autocast_dtype(device)) if autocast else "",
    )


_Function = TypeVar("_Function", bound=Callable[..., Any])


def one_operation(returns: Callable[..., Returns]) -> Callable[[_Function], _Function]:
    """Make a function of `weight`, `input` and `target`, or a method of a `FusedLoss`, one operation of torch.compile.

    Arguments are tensors, numbers, words and tuples of words. A float is a constant of the graph: pass a changing
    number as a tensor. `returns` maps the given arguments to `Returns`.
    """

    def decorate(function: _Function) -> _Function:
        key = function.__qualname__
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        is_method = positional[0] == "self"

        @functools.wraps(function)
        def either(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                args = plain(positional, args)
                if kwargs:
                    given = tuple(kwargs.values())
                    served = plain(tuple(kwargs), given)
                    kwargs = kwargs if served is given else dict(zip(kwargs, served, strict=True))
                try:
                    return function(*args, **kwargs)
                except TypeError as error:
                    if not failed_to_bind(error):
                        raise
                    cls = type(args[0]) if is_method else None
                    owner, constructor = (key, Arguments(())) if cls is None else (cls.__name__, of_constructor(cls))
                    raise call_error(owner, function, args, kwargs, constructor) or error from None
            if len(args) > len(positional):
                raise TypeError(f"{key} takes {len(positional)} positional arguments, got {len(args)}")
            named = {**dict(zip(positional, args, strict=False)), **kwargs}
            module = named.pop("self") if is_method else None
            arguments = {name: x for name, x in named.items() if x is not None}
            expected = returns(module, arguments) if is_method else returns(arguments)
            outputs = _forward(*_spelt(key, module, arguments, expected.tensors))
            result = dict(zip(expected.tensors, outputs, strict=False))
            return expected.build(**result)

        _FUNCTIONS[key] = either
        return cast(_Function, either)

    return decorate
