"""Make a head defer its logits, and decide for each of its calls whether it does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from liger_chunked.deferred import quantized, request
from liger_chunked.deferred.call import Call
from liger_chunked.deferred.code import foreign_code
from liger_chunked.deferred.custom_functions import give_real_logits_to_custom_functions
from liger_chunked.deferred.inside import is_computing, must_project, why_not_deferred
from liger_chunked.deferred.logits import REASON, DeferredLogits
from liger_chunked.deferred.operations import Recorded
from liger_chunked.deferred.projection import projections_in
from liger_chunked.deferred.swap import Patch, patch_of, set_patch
from liger_chunked.dtensor import any_dtensor
from liger_chunked.kernels.operands import all_plain
from liger_chunked.private import HAS_VERSIONS, SHOWS_HOOKS, global_forward_hooks, is_replica
from liger_chunked.types import budget_bytes

_LOGGER = logging.getLogger("liger_chunked")

_SETTINGS = "_liger_deferral"  # attribute of a head


@dataclass(frozen=True)
class Deferral:
    """How a head defers.

    - `logits_budget`: of the fused losses, in bytes; None: automatic
    - `in_training`: whether every call in training mode defers, or only those of a `Request`
    - `while_true`: the head defers in training while this is so; None: always
    """

    logits_budget: int | None = None
    in_training: bool = True
    while_true: Callable[[], bool] | None = None

    def defers(self, training: bool) -> bool:
        return training and self.in_training and (self.while_true is None or self.while_true())


@dataclass(frozen=True)
class DeferringHead(Patch):
    """A class of heads whose calls may return `DeferredLogits`."""

    def methods(self, cls: Any) -> dict[str, Any]:
        stock_call = cls.__call__

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # The hooks of the call run when the logits or a loss are computed, not here.
            if self.training or request.ACTIVE:
                return _called(self, stock_call, args, kwargs)
            return stock_call(self, *args, **kwargs)

        return {"__call__": __call__, "_liger_defers": True}


@torch.compiler.disable(reason=REASON)  # type: ignore[untyped-decorator]
def _called(head: nn.Module, stock_call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    settings: Deferral = vars(head)[_SETTINGS]
    if kwargs or len(args) != 1 or not _defers(head, settings) or not _takes(args[0]):
        return stock_call(head, *args, **kwargs)
    if (reason := refusal_of(head)) is not None:
        _log_reason(head, reason)
        return stock_call(head, *args, **kwargs)
    call = Call(head, args[0], settings)
    call.withheld = request.current().withhold
    shape = torch.Size((*call.hidden.shape[:-1], _vocabulary(head)))
    return DeferredLogits(call, Recorded(shape, call.dtype, call.device))


def _defers(head: nn.Module, settings: Deferral) -> bool:
    if must_project(head):
        return False
    asked = request.current()
    if is_computing(head):
        return bool(asked.defer)
    if asked.defer is not None:
        return asked.defer and not (asked.returns_logits and ddp_reads_outputs())
    if not (HAS_VERSIONS and settings.defers(head.training)):  # a change of the weights would go unnoticed
        return False
    if is_replica(head) and not asked.returns_loss:
        return False  # DataParallel gathers tensors
    if any(map(_may_change, (name for name, _ in head.named_buffers()))):
        _log_reason(head, "its spectral norm changes in each call of the head, and a stand-in may need several")
        return False
    if ddp_reads_outputs() and not asked.returns_loss:
        _log_reason(head, "DDP with find_unused_parameters or static_graph reads the graph of the logits, its output")
        return False
    return True


def ddp_reads_outputs() -> bool:
    """Whether this is the forward of a DDP that finds used parameters, or its own hook, through the model's outputs.

    A stand-in has no graph: DDP would take all parameters for unused, and reduce their gradients before they exist.
    """
    if not hasattr(DistributedDataParallel, "_active_ddp_module"):  # then any DDP might
        return torch.distributed.is_available() and torch.distributed.is_initialized()
    active = DistributedDataParallel._active_ddp_module
    return active is not None and (active.find_unused_parameters or active.static_graph)


def _takes(hidden: Any) -> bool:
    """Whether a fused loss could take these hidden states: a plain tensor, outside of transforms and traces."""
    if not isinstance(hidden, Tensor) or hidden.is_meta or hidden.ndim < 2 or not hidden.is_floating_point():
        return False
    if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined]
        return False
    return any_dtensor([hidden]) or all_plain([hidden])


def refusal_of(head: nn.Module) -> str | None:
    """Return why a call of this head gives real logits; None if it may defer."""
    if not SHOWS_HOOKS:
        return "a hook, which this torch does not show, perhaps"
    reason = why_not_deferred(head)
    if reason is not None:
        return f"{reason} takes logits"
    if any(foreign_code(hook) is not None for hook in global_forward_hooks()):
        return "a global forward hook takes logits"
    try:
        projections_in(head)
    except ValueError as refusal:
        return str(refusal)
    return None


def _may_change(buffer: str) -> bool:
    """Whether a call of the head may change a buffer of this name, as the spectral norms of torch, old and new, do.

    The buffers of other parametrizations may be constant, but nothing public says so. That of `orthogonal` is.
    """
    in_parametrization = buffer.startswith("parametrizations.") and not buffer.endswith(".base")
    return in_parametrization or buffer.endswith(("weight_u", "weight_v"))


_LOGGED: set[str] = set()


def _log_reason(head: nn.Module, reason: str) -> None:
    if reason not in _LOGGED:
        _LOGGED.add(reason)
        _LOGGER.warning("%s returns logits in training: %s", type(head).__name__, reason)


def _vocabulary(head: nn.Module) -> int:
    linear = projections_in(head)[0].linear
    if is_parametrized(linear):  # reading the weight would compute it, and spectral_norm counts that as a step
        return linear.out_features
    if quantized.is_4bit(linear):  # codes, in no shape of a head
        return linear.out_features
    # A tensor-parallel or sharded weight is whole in its shape; one that ZeRO or FSDP took away has none.
    rows = linear.weight.shape[0] if linear.weight.ndim == 2 else 0
    return rows or linear.out_features


def is_deferring(head: nn.Module) -> bool:
    return isinstance(patch_of(head), DeferringHead)


def set_deferral(head: nn.Module, deferral: Deferral | None) -> None:
    """Let a head defer as `deferral` says; None: never again, with the class it had.

    Deferral is removed from heads inside it, such as the base layer of an adapter.
    """
    for module in head.modules():
        if module is not head and is_deferring(module):
            set_deferral(module, None)
    if deferral is None:
        vars(head).pop(_SETTINGS, None)
        if is_deferring(head):
            set_patch(head, None)
        return
    give_real_logits_to_custom_functions()
    vars(head)[_SETTINGS] = deferral
    if not is_deferring(head):
        set_patch(head, DeferringHead())


def deferral_of(head: nn.Module) -> Deferral | None:
    return vars(head).get(_SETTINGS) if is_deferring(head) else None


class DeferHandle:
    """What `defer_logits` returns: `remove()` makes the layer an ordinary one again. Usable as a context manager."""

    def __init__(self, linear: nn.Module) -> None:
        self._linear = linear

    def remove(self) -> None:
        set_deferral(self._linear, None)

    def __enter__(self) -> DeferHandle:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


def defer_logits(linear: nn.Module, *, logits_budget: int | float | str | None = None) -> DeferHandle:
    """Let the last layer of any model return `DeferredLogits` in training, so that its loss is fused.

    No other line changes. In training mode, `linear(x)` computes nothing. `F.cross_entropy` of its result, and
    log-probabilities, run chunk by chunk, with no logits in memory. Every other use of the logits
    gets them, computed once. Evaluation mode does not change.

        handle = defer_logits(model.lm_head)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())  # fused
        handle.remove()

    Works under autocast, DDP, FSDP and `torch.compile` (which breaks the graph there), in copies and pickles of the
    model, and with PEFT's LoRA, quantized and tied weights. A forward hook of yours on `linear` gets real logits.

    Args:
        linear: an `nn.Linear` (H -> V), with its parameters trainable or not, or an adapter's or a quantized layer.
        logits_budget: most bytes of logits alive at once in a fused loss: a number, or a string such as "512MiB". None:
            automatic.

    Returns:
        A `DeferHandle`: its `remove()` makes the layer an ordinary one again, as does leaving a `with` block of it.

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
    set_deferral(linear, Deferral(budget_bytes(logits_budget)))
    return DeferHandle(linear)
