"""Make a head defer its logits, and decide for each of its calls whether it does."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from liger_chunked.deferred import quantized, request, sharded, traced
from liger_chunked.deferred.head import OWNER, product
from liger_chunked.deferred.lazy import PLAIN, outside_graphs
from liger_chunked.deferred.projection import projections_in
from liger_chunked.deferred.swap import STOCK, Patch, patch_of, set_patch
from liger_chunked.kernels.operands import all_plain, outside_transforms
from liger_chunked.private import HAS_STAND_INS, has_children
from liger_chunked.types import budget_bytes
from liger_chunked.what_ran import RECORD, note_real_logits, record_of

_LOGGER = logging.getLogger("liger_chunked")
_is_traced = torch.compiler.is_dynamo_compiling

SETTINGS = "_liger_deferral"  # attribute of a head and of the layers in it that multiply


@dataclass(frozen=True)
class Deferral:
    """How a head defers.

    - `logits_budget`: of the fused losses, in bytes; None: automatic
    - `in_training`: whether every call in training mode defers, or only those of a `Request`
    - `in_evaluation`: whether calls in evaluation mode defer too, if they record no gradient
    - `of_trainer`: whether a trainer of TRL's set the head, whose code is known to change no part of a split in place
    - `whole_vocabulary`: under tensor parallelism, logits are of the whole vocabulary, also where a layout keeps them
      sharded
    """

    logits_budget: int | None = None
    in_training: bool = True
    in_evaluation: bool = True
    of_trainer: bool = False
    whole_vocabulary: bool = False


@dataclass(frozen=True)
class DeferringLayer(Patch):
    """A class of linear layers whose forward may return `DeferredLogits`."""

    def methods(self, cls: Any) -> dict[str, Any]:
        stock, stock_call = cls.forward, cls.__call__

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if _may_defer(self) and _is_changed(self) and not _in_graph(self):
                return _called_with_layouts(self, stock_call, args, kwargs)
            return stock_call(self, *args, **kwargs)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if _may_defer(self):
                if _in_graph(self):
                    asked = vars(vars(self).get(OWNER, self)).get(request.ASKED)
                    if asked is not None or not request.ACTIVE:
                        return traced.called(self, stock, vars(self).get(SETTINGS), asked, args, kwargs)
                return _called(self, stock, args, kwargs)
            return stock(self, *args, **kwargs)

        # `functools.wraps` would set `__wrapped__`, which accelerate unwraps.
        forward.__name__, forward.__qualname__, forward.__doc__ = stock.__name__, stock.__qualname__, stock.__doc__
        vars(forward)[STOCK] = stock
        return {"forward": forward, "__call__": call, "_liger_defers": True}


def _may_defer(layer: nn.Module) -> bool:
    """Whether a call may defer: the part of `_why_real` that Dynamo traces.

    Compiled evaluation, as of `generate` with a static cache, computes its logits: a head that defers breaks the graph.
    """
    return layer.training or request.ACTIVE > 0 or not torch.compiler.is_compiling()


def _in_graph(layer: Any) -> bool:
    """Whether Dynamo traces a call of a layer that can defer in a graph. Others break it."""
    if not (_is_traced() and traced.IS_SERVED):
        return False
    if parametrize.is_parametrized(layer):  # whose weight is another one each time that it is read
        return True
    return type(layer.weight) in PLAIN and layer.weight.is_floating_point()


def _is_changed(layer: nn.Module) -> bool:
    state = layer.__dict__
    return bool(state.get("_forward_hooks")) or "forward" in state


@outside_graphs
def _called_with_layouts(
    layer: Any, stock_call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a layer that has hooks or a forward of its own, without those that lay out logits on several ranks."""
    layouts = sharded.layouts_of(layer)
    if layouts is not None and _why_real(layer, args, kwargs) is None:
        try:
            with sharded.without(layer, layouts, args[0]):
                return stock_call(layer, *args)
        except sharded.NotServedError:
            pass
    return stock_call(layer, *args, **kwargs)


@outside_graphs
def _called(layer: Any, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    why = _why_real(layer, args, kwargs)
    made = _stand_in(layer, stock, args[0]) if why is None else why
    if type(made) is not str:
        return made
    if why is None and sharded.skipped(layer) is not None:
        raise sharded.NotServedError
    note_real_logits(vars(layer).get(RECORD), made)
    return stock(layer, *args, **kwargs)


def _why_real(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return what a layer computes its logits for in this call; None: it defers, if a fused loss takes its weight."""
    asked = request.current().defer
    if asked is False:
        return "skip_logits=False"
    why = None if asked else _why_real_unasked(layer)
    if why is None and not (HAS_STAND_INS and len(args) == 1 and not kwargs and _takes(args[0])):
        return "arguments of the head that no fused loss takes"
    return why


def _why_real_unasked(layer: Any) -> str | None:
    # None: a forward that was bound before the head stopped deferring.
    settings: Deferral | None = vars(layer).get(SETTINGS)
    if settings is None or not settings.in_training:
        return "a call without head_fn"
    if torch.is_grad_enabled():  # a trainer may have a loop of its own, on a model in evaluation mode
        return None if layer.training or settings.of_trainer else "a call in evaluation mode with gradients"
    if _is_in_generate():
        return "generate"
    if layer.training:
        return None
    if not settings.in_evaluation:
        return "defer_in_evaluation=False"
    # Under tensor parallelism, all ranks must read real logits, and in evaluation one rank may read them alone.
    return "an evaluation under tensor parallelism" if sharded.is_distributed(layer.weight) else None


def _is_in_generate() -> bool:
    """Whether transformers' `generate` is around this call: it reads all logits that it gets.

    Trainers that sample leave their model in training mode meanwhile.
    """
    frame: Any = sys._getframe(1) if "transformers" in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("transformers.generation."):
            return True
        frame = frame.f_back
    return False


_NOT_TAKEN = "hidden states or a weight of which no fused loss takes the kind, such as a DTensor"


def _stand_in(layer: Any, stock: Callable[..., Any], hidden: Any) -> Any:
    """Return the stand-in for a layer's logits, or why they are computed: no loss takes these tensors."""
    settings: Deferral = vars(layer)[SETTINGS]
    weight, bias, layouts = layer.weight, layer.bias, sharded.skipped(layer)
    options: dict[str, Any] = {}
    reason = None
    if sharded.is_distributed(weight):
        if layouts is None and not (all_plain([hidden]) and sharded.is_bare(layer)):
            return _NOT_TAKEN
        if not sharded.serves(weight, bias) or not _same_dtype(hidden, weight):
            return _NOT_TAKEN
        if (
            layouts is not None
            and not settings.whole_vocabulary
            and not sharded.gives_whole(layer, layouts, weight, hidden.ndim)
        ):
            reason = "its layout keeps logits sharded: for a fused loss, use output_layouts=Replicate()"
        options["forward"] = sharded.real_product(weight.detach(), None if bias is None else bias.detach())
        hidden = sharded.plain(hidden)
    elif not all_plain([hidden]) or layouts is not None:
        return _NOT_TAKEN
    elif quantized.is_quantized(layer):
        reason = refusal_of(layer)  # quantized since `set_deferral`
        options["n_ids"], options["forward"] = layer.out_features, functools.partial(stock, layer)
        options["dequantize"] = functools.partial(quantized.dequantized, layer)
    elif not all_plain([weight]):
        reason = f"its weight is a {type(weight).__name__}, and a fused loss needs a plain tensor"
    elif not _same_dtype(hidden, weight):
        return f"hidden states in {hidden.dtype} of a head in {weight.dtype}"
    if reason is None and "dequantize" not in options:
        reason = sharded.keep_gathered(layer, weight)
    if reason is not None:
        return _refused(layer, reason)
    return product(layer, hidden, weight, bias, settings, request.current(), **options)


def _same_dtype(hidden: Tensor, weight: Tensor) -> bool:
    return hidden.dtype == weight.dtype or torch.is_autocast_enabled(hidden.device.type)


def _takes(hidden: Any) -> bool:
    """Whether a fused loss could take these hidden states, outside of transforms and traces."""
    if not isinstance(hidden, Tensor) or hidden.is_meta or hidden.ndim < 2 or not hidden.is_floating_point():
        return False
    if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined]
        return False
    return all_plain([hidden]) or (sharded.is_distributed(hidden) and outside_transforms())


def _layers(head: nn.Module) -> list[nn.Module]:
    """Return the linear layers of a head: its own, and the last ones of adapters; ValueError if no loss computes it."""
    return [layer for projection in projections_in(head) for layer in (projection.linear, *projection.ups)]


def is_deferring(head: nn.Module) -> bool:
    return SETTINGS in vars(head)


def set_deferral(head: nn.Module, deferral: Deferral | None, model: nn.Module | None = None) -> None:
    """Let a head defer as `deferral` says; None: never again, with the class it had. No handle brings back another one.

    A head that no fused loss computes returns real logits; a line in the log says why, once.

    Args:
        model: the model around the head, which the log names. None: the head is named.
    """
    _REPLACED.pop(head, None)
    for module in head.modules():
        for name in (SETTINGS, OWNER, RECORD):
            vars(module).pop(name, None)
        if isinstance(patch_of(module), DeferringLayer):
            set_patch(module, None)
    if deferral is None:
        return
    record = record_of(head)
    record.owner = weakref.ref(head if model is None else model)
    vars(head).update({SETTINGS: deferral, RECORD: record})
    try:
        layers = _layers(head)
    except ValueError as refusal:
        note_real_logits(record, _refused(head, str(refusal)))
        return
    for layer in layers:
        vars(layer).update({SETTINGS: deferral, RECORD: record})
        if layer is not head:
            vars(layer)[OWNER] = head
        set_patch(layer, DeferringLayer())


def deferral_of(head: nn.Module) -> Deferral | None:
    """Return how a head defers; None if it does not, or an adapter came that does not."""
    found: Deferral | None = vars(head).get(SETTINGS)
    if found is None or not has_children(head):
        return found
    fits = refusal_of(head) is not None or all(SETTINGS in vars(layer) for layer in _layers(head))
    return found if fits else None


def refusal_of(head: nn.Module) -> str | None:
    """Return why no fused loss can compute a head; None if one can."""
    try:
        projections_in(head)
    except ValueError as refusal:
        return str(refusal)
    return None


_LOGGED: set[str] = set()


def _refused(head: nn.Module, reason: str) -> str:
    """Say once in the log why no fused loss computes a head, and return what its logits are computed for."""
    if reason not in _LOGGED:
        _LOGGED.add(reason)
        _LOGGER.warning("%s returns logits in training: %s", type(head).__name__, reason)
    return f"a head that no fused loss computes: {reason}"


class _Replaced(NamedTuple):
    """A deferral whose place a later one took, and a weak reference to the model around the head."""

    deferral: Deferral | None
    owner: weakref.ref[nn.Module] | None


# By head: those that `defer_logits` replaced and that have not ended, the earliest first.
_REPLACED: weakref.WeakKeyDictionary[nn.Module, list[_Replaced]] = weakref.WeakKeyDictionary()


class DeferHandle:
    """What `defer_logits` returns: `remove()` ends this deferral. Usable as a context manager.

    The layer then defers as it did before: as an earlier handle says that was not removed, or a patch of its model.
    Without any, it is an ordinary layer again.
    """

    def __init__(self, linear: nn.Module) -> None:
        self._linear, self._deferral = linear, vars(linear).get(SETTINGS)

    def remove(self) -> None:
        linear = self._linear
        replaced = [x for x in _REPLACED.get(linear, ()) if x.deferral is not self._deferral]
        if vars(linear).get(SETTINGS) is self._deferral:
            before = replaced.pop() if replaced else _Replaced(None, None)
            set_deferral(linear, before.deferral, None if before.owner is None else before.owner())
        _REPLACED[linear] = replaced

    def __enter__(self) -> DeferHandle:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


def defer_logits(
    linear: nn.Module, *, logits_budget: int | float | str | None = None, defer_in_evaluation: bool = True
) -> DeferHandle:
    """Let the last layer of any model return `DeferredLogits`, so that its loss is fused.

    No other line changes. In training mode, and where no gradient is recorded (`torch.no_grad`,
    `torch.inference_mode`), `linear(x)` computes nothing. `F.cross_entropy` of its result, and log-probabilities, run
    on chunks of logits. Every other use of the logits gets all of them, computed once. transformers'
    `generate` gets real logits.

        handle = defer_logits(model.lm_head)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())  # fused
        handle.remove()

    Works under autocast, DDP, FSDP and `torch.compile` (`fullgraph=True` too), in copies and pickles of the
    model, and with PEFT's LoRA, quantized and tied weights. A forward hook of yours on `linear` gets real logits.

    Args:
        linear: an `nn.Linear` (H -> V), with its parameters trainable or not, or an adapter's or a quantized layer.
        logits_budget: most bytes of logits alive at once in a fused loss: a number, or a string such as "512MiB". None:
            automatic.
        defer_in_evaluation: whether calls in evaluation mode defer too, if they record no gradient.

    Returns:
        A `DeferHandle`: its `remove()`, or leaving a `with` block of it, ends this deferral. The layer then defers as
        it did before, or is an ordinary one again.

    Raises:
        TypeError: `linear` is no module.
        ValueError: a fused loss cannot compute its product; the message says why.

    >>> linear = torch.nn.Linear(4, 11)
    >>> handle = defer_logits(linear)
    >>> x, target = torch.randn(2, 3, 4), torch.randint(11, (2, 3))
    >>> logits = linear(x)
    >>> logits
    DeferredLogits((2, 3, 11), torch.float32, cpu, not computed)
    >>> loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    >>> expected = torch.nn.functional.cross_entropy(logits.tensor().flatten(0, 1), target.flatten())
    >>> bool(torch.isclose(loss, expected))
    True
    """
    if not isinstance(linear, nn.Module):
        raise TypeError(f"linear must be a module such as model.lm_head, got {type(linear).__name__}")
    try:
        projections_in(linear)
    except ValueError as refusal:
        raise ValueError(
            f"{refusal}. Pass the layer from hidden states to the vocabulary, such as model.lm_head"
        ) from None
    if not isinstance(defer_in_evaluation, bool):
        raise TypeError(f"defer_in_evaluation must be True or False, got {defer_in_evaluation!r}")
    replaced = _REPLACED.get(linear, [])
    if is_deferring(linear):
        replaced = [*replaced, _Replaced(vars(linear)[SETTINGS], vars(linear)[RECORD].owner)]
    set_deferral(linear, Deferral(budget_bytes(logits_budget), in_evaluation=defer_in_evaluation))
    _REPLACED[linear] = replaced
    return DeferHandle(linear)
