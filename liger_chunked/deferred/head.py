"""The call of a layer that defers: `hidden @ weight.T + bias` as a stand-in, and its backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from liger_chunked.deferred import sharded
from liger_chunked.deferred.gradient import LazyGradient, Term
from liger_chunked.deferred.logits import DeferredLogits, Source
from liger_chunked.engine.surroundings import hooks_active
from liger_chunked.private import graph_is_retained, without_torch_function
from liger_chunked.what_ran import RECORD

OWNER = "_liger_owner"  # attribute of a layer that defers: the head around it, if it is another module


class _Product(torch.autograd.Function):
    """A source's logits without values."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, source: Source, n_ids: int) -> Any:
        source.needs = tuple(ctx.needs_input_grad[:3])
        ctx.source, ctx.hooked = source, hooks_active()
        # Saved as by a Linear: backward raises if one of these changed, and other tensors may change.
        needs_x, needs_w, _ = source.needs
        ctx.save_for_backward(hidden if needs_w else None, weight if needs_x else None)
        return DeferredLogits._of(source, n_ids)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        source, need = ctx.source, ctx.needs_input_grad[:3]
        if source is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: a head that defers has freed what it saved. "
                "Specify retain_graph=True in the first backward"
            )
        if not graph_is_retained():
            ctx.source = None  # else the hidden states stay in memory until the backward of all layers is over
        source.check_merged()
        total: list[Any] = [None, None, None]
        real: Tensor | None = g
        if isinstance(g, LazyGradient):
            of_terms = _of_terms(g, source)
            total = of_terms or total
            real = g._value() if of_terms is None else g.extra
        if real is not None or not ctx.hooked:
            hidden, weight = ctx.saved_tensors  # raises if one changed, or the graph was freed
        if real is not None:
            ordinary = _ordinary(real, hidden, weight, source, need)
            total = [b if a is None else a if b is None else a + b for a, b in zip(total, ordinary, strict=True)]
        return *(x if needed else None for x, needed in zip(total, need, strict=True)), None, None


def _of_terms(g: LazyGradient, source: Source) -> list[Any] | None:
    """Return dX, dW and db of a gradient's terms; None if one of them needs the real gradient."""
    runs: dict[tuple[int, int], list[Any]] = {}
    for term in g.terms:
        if not isinstance(term, Term) or not term.plan.arrived(term.passed, source):
            return None
        runs.setdefault((id(term.run), term.side), []).append(term)
    total: list[Any] = [None, None, None]
    for terms in runs.values():
        pairs = [(term.result, term.upstream, term.factor) for term in terms]
        parts = terms[0].run.gradients(pairs, terms[0].side, source)
        total = [b if a is None else a if b is None else a + b for a, b in zip(total, parts, strict=True)]
    return total


def _ordinary(g: Tensor, hidden: Tensor, weight: Any, source: Source, need: tuple[bool, ...]) -> list[Any]:
    """Return dX, dW and db of a real gradient."""
    of_weight: Any = source.tensors[1]
    with torch.autocast(g.device.type, enabled=False):
        flat = g.reshape(-1, g.shape[-1])
        dx = dw = db = None
        if sharded.is_distributed(of_weight):
            given, whole, _ = source.read()
            dx, dw, db = sharded.real_gradients(flat, given.reshape(-1, given.shape[-1]), whole, need)
            return [None if dx is None else dx.view(given.shape).to(given.dtype), dw, db]
        if need[0]:
            matrix = weight if source.dequantize is None else source.matrices()[1]
            like: Any = source.tensors[0]
            dx = (flat @ matrix.to(g.dtype)).view(like.shape).to(like.dtype)
        if need[1]:
            dw = (flat.t() @ hidden.reshape(-1, hidden.shape[-1]).to(g.dtype)).to(of_weight.dtype)
        if need[2]:
            db = flat.sum(0)
    return [dx, dw, db]


def product(
    layer: nn.Module,
    hidden: Tensor,
    weight: Any,
    bias: Tensor | None,
    settings: Any,
    asked: Any,
    *,
    n_ids: int | None = None,
    forward: Callable[[Tensor], Tensor] | None = None,
    dequantize: Callable[[Any, torch.dtype], Tensor] | None = None,
) -> Any:
    """Return the stand-in for a layer's call. `asked` is the current `Request`; the rest as in `Source`."""
    source = Source(hidden, weight, bias, settings, f"the head ({type(layer).__name__})", vars(layer).get(OWNER))
    source.withheld, source.forward, source.dequantize = asked.withhold, forward, dequantize
    source.record = record = vars(layer).get(RECORD)
    if record is not None:
        record.real_logits = None
    if asked.sources is not None:
        asked.sources.append(source)
    # In inference mode autograd has nothing to save for, also where somebody enabled gradients there.
    no_graph = torch.no_grad() if torch.is_inference_mode_enabled() else nullcontext()
    with without_torch_function(), no_graph:
        return _Product.apply(hidden, weight, bias, source, n_ids or weight.shape[0])
