"""Losses of deferred logits, computed chunk by chunk in place of the logits.

A `Pass` runs a loss of the library on the rows and weights of a `Plan`, in a graph of its own. `fuse` makes the result
a function of the logits in the caller's graph. The backward sends a `LazyGradient`; the head's backward asks the pass
for dX, dW and db.

    run = Pass([logits._plan], lambda head: loss(head.weight, head.rows, ids, head.bias), wants_grad(logits))
    value = fuse(run, run.results, logits, plan, stock)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_chunked.deferred.adapters import down
from liger_chunked.deferred.gradient import LazyGradient, Term
from liger_chunked.deferred.logits import DeferredLogits, Source
from liger_chunked.deferred.plan import Plan
from liger_chunked.dtensor import any_dtensor, distributed_like
from liger_chunked.engine.surroundings import isolated
from liger_chunked.private import graph_is_retained, version_of, with_autograd, without_torch_function
from liger_chunked.types import AdaptedWeight, Head
from liger_chunked.what_ran import asked_by


class HeadRows(NamedTuple):
    """What a pass gives a loss: the head, and the hidden states (..., H) of the rows of logits."""

    weight: Any
    bias: Tensor | None
    rows: Tensor


class Pass:
    """One run of a loss on hidden states and a head, in a graph of its own.

    Args:
        plans: of the logits that the loss reads.
        compute: the loss, a function of one `HeadRows` for each plan.
        keeps_gradient: whether the loss computes dW in its forward and keeps it until its backward.
        captured: other tensors that the loss reads, which must not change before its backward.

    Attributes:
        results: what `compute` returned, with the inner graph.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        compute: Callable[..., Any],
        wants_grad: bool,
        *,
        keeps_gradient: bool = False,
        captured: Sequence[Tensor] = (),
    ) -> None:
        self.plans, self._compute = plans, compute
        self._captured = [(x, version_of(x)) for x in captured]
        sources = [source for plan in plans for source, _ in plan.sources]
        # Another loss keeps a dW of this weight: compute this one's in its backward, so that only one is in memory.
        self._late = keeps_gradient and wants_grad and any(source.holds_gradient for source in sources)
        self._holds = keeps_gradient and wants_grad and not self._late
        for source in sources:
            source.holds_gradient |= self._holds
        self.results = self._run(wants_grad and not self._late)
        self._memo: tuple[list[Any], Any, Any] | None = None

    def _run(self, wants_grad: bool) -> Any:
        self._leaves: list[list[tuple[Source, list[Tensor | None]]]] = []
        sides = []
        first = self.plans[0].sources[0][0]
        records = [plan.sources[0][0].record for plan in self.plans]
        with isolated(), torch.set_grad_enabled(wants_grad), first.modes(), asked_by(*records):
            for plan in self.plans:
                leaves = [(source, _leaves(source, wants_grad)) for source, _ in plan.sources]
                self._leaves.append(leaves)
                sides.append(_head_rows(plan, [tensors for _, tensors in leaves]))
            return self._compute(*sides)

    def gradients(self, pairs: list[tuple[Any, Tensor, Any]], side: int, source: Source) -> list[Tensor | None]:
        """Return dX, dW, db of a source, for (result, upstream, factor); computed once for all sources."""
        called_for = [(id(result), id(g), f if isinstance(f, (int, float)) else id(f)) for result, g, f in pairs]
        if self._memo is None or self._memo[0] != called_for:
            # The pairs are kept alive, so that no other tensor gets one of their ids.
            self._memo = called_for, pairs, self._backward(pairs)
        found = self._memo[2][side][id(source)]
        if not self._several:
            self._memo = None
        return found

    def check_captured(self) -> None:
        """Raise RuntimeError if a tensor that the loss reads, other than those of the head, changed since the loss."""
        if any(version_of(x) != version for x, version in self._captured):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                "tensor that a fused loss of deferred logits reads"
            )

    @property
    def _several(self) -> bool:
        """Whether the backward of more than one layer asks for gradients."""
        return sum(len(leaves) for leaves in self._leaves) > 1

    def _backward(self, pairs: list[tuple[Any, Tensor, Any]]) -> Any:
        if self._late:
            self.check_captured()
            results = [self._run(True)]
        else:
            results = [result for result, _, _ in pairs]
        upstream = [(g * factor if not isinstance(factor, int) or factor != 1 else g) for _, g, factor in pairs]
        if self._late and len(upstream) > 1:
            upstream = [torch.stack(torch.broadcast_tensors(*upstream)).sum(0)]
        flat = [
            x for leaves in self._leaves for _, tensors in leaves for x in tensors if x is not None and x.requires_grad
        ]
        upstream = [g.to(r.dtype).reshape(r.shape) for g, r in zip(upstream, results, strict=True)]
        retain = graph_is_retained() or self._several
        with isolated():
            try:
                grads = torch.autograd.grad(results, flat, upstream, retain_graph=retain, allow_unused=True)
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                first = self.plans[0].sources[0][0].name
                raise RuntimeError(
                    f"a tensor that the loss of {first}'s deferred logits reads in its backward was modified by an "
                    "inplace operation: run the backward before the optimizer steps, or get logits at once"
                ) from error
        if self._holds and not graph_is_retained():
            self.release()
        gradients_by_leaf = dict(zip(map(id, flat), grads, strict=True))
        return [
            {
                id(source): [None if x is None else gradients_by_leaf.get(id(x)) for x in tensors]
                for source, tensors in leaves
            }
            for leaves in self._leaves
        ]

    def release(self) -> None:
        for plan in self.plans:
            for source, _ in plan.sources:
                source.holds_gradient = False


def _leaves(source: Source, wants_grad: bool) -> list[Tensor | None]:
    tensors = source.matrices()
    return [
        None if x is None else x.detach().requires_grad_(wants_grad and needed)
        for x, needed in zip(tensors, source.needs, strict=True)
    ]


def _head_rows(
    plan: Plan, leaves: Sequence[Sequence[Any]], recompute: Callable[[Tensor], Tensor] | None = None
) -> HeadRows:
    """Return the head and the rows of a plan.

    Args:
        leaves: (hidden, weight, bias) of each of its sources.
        recompute: the adapters' `down` for other hidden states than those of the call. None: the loss reads no others.
    """
    hidden, weight, bias = leaves[0]

    def of_ids(x: Any) -> Any:
        return x if x is None or plan.n_ids == plan.vocabulary else x[: plan.n_ids]

    def of_rows(x: Tensor) -> Tensor:
        x = plan.select(x)
        return x.flatten(0, -2) if x.ndim > 3 else x

    rows, weight, bias = of_rows(hidden), of_ids(weight), of_ids(bias)
    if plan.bias is not None:
        bias = plan.bias if bias is None else bias + plan.bias
    if len(plan.sources) == 1:
        return HeadRows(weight, bias, rows)
    ups, downs = [], []
    for (_, factor), (u, up, more) in zip(plan.sources[1:], leaves[1:], strict=True):
        u = of_rows(u)
        u = u.float() if u.dtype == torch.float16 else u  # `u * factor` may exceed float16
        downs.append(u * factor if factor != 1 else u)
        ups.append(of_ids(up))
        if more is not None:
            added = (of_ids(more) * factor).to(rows.dtype)
            added = distributed_like(bias, added) if any_dtensor([bias]) else added
            bias = added if bias is None else bias + added
    product = downs[0] if len(downs) == 1 else torch.cat(downs, -1)

    def down(x: Tensor) -> Tensor:
        if x.data_ptr() == rows.data_ptr() and x.numel() == rows.numel():
            return product.reshape(*x.shape[:-1], -1)
        assert recompute is not None
        return recompute(x)

    return HeadRows(AdaptedWeight(weight, ups[0] if len(ups) == 1 else torch.cat(ups, 1), down), bias, rows)


class _Fused(torch.autograd.Function):
    """The value of a pass as a function of logits in the caller's graph."""

    @staticmethod
    def forward(ctx: Any, value: tuple[Tensor], terms: Any, stock: Any, z: Any) -> Tensor:
        ctx.kept = terms, stock, z, version_of(z), z._cell.node, z._geometry
        return value[0].detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if ctx.kept is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: a fused loss of deferred logits has freed what it "
                "saved. Specify retain_graph=True in the first backward"
            )
        terms, stock, z, version, node, geometry = ctx.kept
        if torch.is_grad_enabled():
            if version_of(z) != version:
                raise RuntimeError(
                    "deferred logits were changed in place after a loss, whose second derivative reads them"
                )
            return None, None, None, _gradient_of_stock(stock, z.tensor(), g, create_graph=True)

        def dense() -> Tensor:
            real = node.view(geometry).detach()
            # Computed in float32, as under autocast, which is off in a backward.
            wide = real.to(torch.promote_types(real.dtype, torch.float32)).requires_grad_()
            return _gradient_of_stock(stock, wide, g).to(real.dtype)

        if not graph_is_retained():
            ctx.kept = None
        dz, (dtype, device) = functools.partial(with_autograd, dense), z._known
        return None, None, None, LazyGradient.make(z._geometry[0], dtype, device, terms(g), dz, None)


def _gradient_of_stock(stock: Callable[[Tensor], Tensor], z: Tensor, g: Tensor, create_graph: bool = False) -> Tensor:
    out = stock(z)
    return torch.autograd.grad(out, z, g.to(out.dtype).reshape(out.shape), create_graph=create_graph)[0]


def wants_grad(z: Any) -> bool:
    return torch.is_grad_enabled() and z.requires_grad


def link(value: Tensor, z: Any, terms: Callable[[Tensor], list[Any]], stock: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the value of a pass as a function of logits z; detached, if z has no gradient.

    Args:
        terms: returns the terms of the gradient of z for an upstream gradient.
        stock: computes the same value from real logits, where their real gradient or a second derivative is needed.
    """
    # In a tuple, autograd does not see the value's own graph.
    return _Fused.apply((value,), terms, stock, z) if wants_grad(z) else value.detach()


def fuse(run: Pass, result: Tensor, z: Any, plan: Plan, stock: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a result of a pass as a function of logits; `stock(logits)` is the same of real ones."""
    return link(result, z, lambda g: [Term(run, 0, plan, result, g)], stock)


class _Opened(NamedTuple):
    """Stands for a `Pass` in terms: the gradients that the caller's own loss gave, of `run_live`.

    `found`: dX, dW and db by the id of a source.
    """

    found: dict[int, list[Tensor | None]]

    def gradients(self, pairs: list[tuple[Any, Tensor, Any]], side: int, source: Source) -> list[Tensor | None]:
        factor = sum(factor for _, _, factor in pairs)
        parts = self.found[id(source)]
        return parts if isinstance(factor, int) and factor == 1 else [None if x is None else x * factor for x in parts]


class _Open(torch.autograd.Function):
    """Hidden states, weights and biases as functions of the logits, for `run_live`.

    Their gradient thus passes the hooks between the head and these logits.
    """

    @staticmethod
    def forward(ctx: Any, z: DeferredLogits, plan: Plan, places: list[tuple[int, int]], leaves: Any) -> Any:
        ctx.plan, ctx.places, ctx.like = plan, places, (z._geometry[0], z.dtype, z.device)
        ctx.set_materialize_grads(False)
        return tuple(leaves[k][i].detach() for k, i in places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        opened = _Opened({id(source): [None, None, None] for source, _ in ctx.plan.sources})
        for (k, i), g in zip(ctx.places, grads, strict=True):
            opened.found[id(ctx.plan.sources[k][0])][i] = g
        term = Term(opened, 0, ctx.plan, None, torch.empty(0))
        size, dtype, device = ctx.like
        return LazyGradient.make(size, dtype, device, [term], _without_values, None), None, None, None


def _without_values() -> Tensor:
    raise RuntimeError(
        "a hook reads the gradient of logits, or changes it by more than a factor, or `expand` repeated the logits, "
        "and the loss takes hidden states in place of logits, because the model was called with head_fn or by a "
        "trainer under patch_trl: remove the hook or `expand`, or train without head_fn or patch_trl"
    )


def run_live(z: DeferredLogits, compute: Callable[[Head, Tensor], Any]) -> Any:
    """Return `compute(head, hidden_states)` in place of logits of a call with `head_fn`, in the graph behind them."""
    plan = z._plan
    # After a scale of the layer's own product, such as a hook's, the adapter comes first, and its hidden states too.
    if plan is None or plan.sources[0][0] is not z._cell.node.sources[0]:
        raise ValueError(f"a head_fn needs logits that are those of a head, got {z!r}")
    first = plan.sources[0][0]
    with first.as_called():
        leaves = [list(source.matrices()) for source, _ in plan.sources]
        places = [(k, i) for k, (source, _) in enumerate(plan.sources) for i in range(3) if source.needs[i]]
        if places and z.requires_grad:
            with without_torch_function():
                opened = _Open.apply(z, plan, places, leaves)
            for (k, i), x in zip(places, opened, strict=True):
                leaves[k][i] = x
        weight, bias, rows = _head_rows(plan, leaves, functools.partial(down, first.owner))
        if first.owner is not None and rows.requires_grad:
            rows.register_hook(lambda g: first.check_merged())
        with asked_by(first.record):
            return compute(Head(weight, bias), rows)
