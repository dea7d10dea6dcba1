"""Losses of deferred logits, computed chunk by chunk in place of the logits.

`plan_of(logits)` says what they are of a head: hidden states, weight and the transform that a loss takes. A `Pass`
runs a loss of the library there, on leaves outside of the caller's graph. `fuse` puts its result into the graph, behind
the logits. The backward sends a `LazyGradient`; the head's backward asks the pass for dX, dW and db.

    run = Pass([plan_of(logits)], lambda head: loss(head.weight, head.rows, ids, head.bias), ...)
    value = fuse(run, run.results, logits, plan, stock)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_chunked.deferred.gradient import Key, LazyGradient, Term
from liger_chunked.deferred.lazy import PLAIN, Op, aten, number_of
from liger_chunked.deferred.logits import (
    COPIES,
    CURVES,
    RESHAPES,
    ROWS,
    SAME_SHAPE_VIEWS,
    SCALES,
    DeferredLogits,
    Node,
    Source,
    class_dim_after,
    seen,
)
from liger_chunked.deferred.transform import Transform
from liger_chunked.dtensor import any_dtensor, distributed_like
from liger_chunked.engine.hooks import isolated
from liger_chunked.private import graph_is_retained, version_of, with_autograd
from liger_chunked.types import AdaptedWeight, Head

# What logits became: themselves, or functions of whole rows.
LOGITS, LOGPS, PROBS = "logits", "logps", "probs"


@dataclass
class Plan:
    """What stand-in logits are, in the terms of a loss.

    - `sources`: of the layer, then of adapters, each with the factor of its product
    - `rows`: views and selections of rows, to apply to hidden states
    - `transform`: scale and softcap; `bias`: what is added before; `n_ids`: how many ids of the vocabulary are left
    - `kind`: `LOGITS`, `LOGPS` or `PROBS`, times `sign`
    - `keys`: for each source, the operations behind it whose backward multiplies or bends
    """

    sources: list[tuple[Source, float]]
    class_dim: int
    shape: torch.Size
    rows: list[Op] = field(default_factory=list)
    transform: Transform = Transform()  # noqa: RUF009 - frozen
    bias: Tensor | None = None
    n_ids: int | None = None
    kind: str = LOGITS
    sign: float = 1.0
    keys: list[list[Key]] = field(default_factory=list)
    dtype: torch.dtype = torch.float32

    @property
    def options(self) -> Any:
        return self.transform.options(logits_budget=self.sources[0][0].settings.logits_budget)

    @property
    def signature(self) -> Any:
        """What the statistics of a row depend on."""
        bias = None if self.bias is None else id(self.bias)
        return tuple((id(s), c) for s, c in self.sources), self.transform, bias, self.n_ids

    def count(self, key: Key) -> int:
        """Return how often an operation stands between these logits and a source."""
        return max(keys.count(key) for keys in self.keys)

    def arrived(self, passed: tuple[Key, ...], source: Source) -> bool:
        """Whether a gradient has passed all operations behind a source, and no other that these logits have."""
        found = [keys for (s, _), keys in zip(self.sources, self.keys, strict=True) if s is source]
        if not found:  # a reentrant checkpoint ran the head again
            return False
        (expected,) = found
        return len(passed) == len(expected) and all(passed.count(k) == expected.count(k) for k in expected)

    def selects(self) -> list[Op]:
        """Return `rows` without views at the end that keep the order of rows."""
        ops = list(self.rows)
        while ops and ops[-1].func in RESHAPES:
            ops.pop()
        return ops

    def select(self, x: Tensor) -> Tensor:
        """Return the rows of x (..., K), like the hidden states of the call, that belong to these logits: (..., K)."""
        return self._select(x, torch.Size((*x.shape[:-1], self._vocabulary)), x.ndim - 1, self.rows)

    def select_from(self, earlier: Plan, x: Tensor) -> Tensor:
        """Return these rows of x, a value for each row of `earlier`, whose selections these logits have too."""
        hidden: Any = self.sources[0][0].tensors[0]
        like = torch.empty((), device=x.device).expand(*hidden.shape[:-1], 1)
        shape, dim, done = torch.Size((*hidden.shape[:-1], self._vocabulary)), hidden.ndim - 1, earlier.selects()
        for op in done:
            like, shape, dim = _moved(op, like, shape, dim, 1)
        return self._select(x.reshape(like.shape), shape, dim, self.rows[len(done) :]).squeeze(-1)

    def _select(self, x: Tensor, shape: torch.Size, dim: int, ops: list[Op]) -> Tensor:
        k = x.shape[dim]
        for op in ops:
            x, shape, dim = _moved(op, x, shape, dim, k)
        return x.movedim(dim, -1) if dim != x.ndim - 1 else x

    @property
    def _vocabulary(self) -> int:
        return self.sources[0][0].n_ids

    def place(self, x: Tensor) -> Tensor:
        """Return (rows of the logits...) values in the order of the logits' dimensions."""
        return x.reshape(*self.row_shape)

    @property
    def row_shape(self) -> torch.Size:
        return torch.Size([n for i, n in enumerate(self.shape) if i != self.class_dim])


def _moved(op: Op, x: Tensor, shape: torch.Size, dim: int, k: int) -> tuple[Tensor, torch.Size, int]:
    """Return a view of x, with K in place of the vocabulary, the view's shape of logits, and the dimension of K."""
    if op.func in RESHAPES or op.func is aten.expand.default:
        size = list(op.args[0])
        result = torch.Size(_known(size, shape) if op.func in RESHAPES else [_expanded(n, shape, i - len(size)) for i, n in enumerate(size)])
        at = class_dim_after(op, shape, dim, result)
        assert at is not None
        sizes = [*result[:at], k, *result[at + 1 :]]
        return (x.reshape(sizes) if op.func in RESHAPES else x.expand(sizes)), result, at
    if op.func is aten.slice.Tensor and (op.args[0] if op.args else 0) % len(shape) == dim:
        stop = min(op.args[2] if len(op.args) > 2 and op.args[2] is not None else shape[dim], shape[dim])
        return x, torch.Size((*shape[:dim], stop if stop >= 0 else stop + shape[dim], *shape[dim + 1 :])), dim
    moved = op(x)
    if op.func in ROWS:
        return moved, torch.Size((*moved.shape[:-1], shape[-1])), moved.ndim - 1
    at = class_dim_after(op, shape, dim, moved.shape)
    assert at is not None
    return moved, torch.Size((*moved.shape[:at], shape[dim], *moved.shape[at + 1 :])), at


def _known(size: list[int], shape: torch.Size) -> list[int]:
    if -1 not in size:
        return size
    rest = -torch.Size(size).numel()
    return [shape.numel() // rest if n == -1 else n for n in size]


def _expanded(n: int, shape: torch.Size, i: int) -> int:
    return shape[i] if n == -1 else n


def continues(ops: list[Op], first: list[Op]) -> bool:
    """Whether a list of operations begins with another."""
    return len(first) <= len(ops) and all(a.func is b.func and _same(a.args, b.args) for a, b in zip(ops, first, strict=False))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(_same, a, b))
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


def plan_of(z: Any) -> Plan | None:
    """Return the plan of logits; None if real ones exist, or no loss can express them."""
    if type(z) is not DeferredLogits or z.is_computed or z._class_dim is None or z.ndim < 2:
        return None
    plan = plan_of_node(z._cell.node)
    if plan is None or not add_views(plan, z._views):
        return None
    plan.shape, plan.class_dim, plan.dtype = z.shape, z._class_dim, z.dtype
    return plan


def plan_of_node(node: Node) -> Plan | None:
    """Return the plan of an expression; None if no loss can express it."""
    if node.base is None:
        assert node.source is not None
        source = node.source
        return Plan([(source, 1.0)], 0, torch.Size(), keys=[[]], dtype=source.dtype)
    plan = plan_of_node(node.base)
    if plan is None or not add_views(plan, node.views):
        return None
    assert node.op is not None
    if node.other is not None:
        return _summed(plan, node.other) if node.op.func is aten.add.Tensor else None
    return plan if _add_operation(plan, node, node.op) else None


def add_views(plan: Plan, views: tuple[Op, ...]) -> bool:
    for op in views:
        if op.func in SAME_SHAPE_VIEWS:
            continue
        plan.rows.append(op)
    return _find_ids(plan)


def _find_ids(plan: Plan) -> bool:
    """Find how many ids views leave; False if they leave some after a softmax."""
    hidden: Any = plan.sources[0][0].tensors[0]
    dim, shape = hidden.ndim - 1, torch.Size((*hidden.shape[:-1], plan._vocabulary))
    return True if not plan.rows else _trace(plan, shape, dim)


def _trace(plan: Plan, shape: torch.Size, dim: int) -> bool:
    left = shape[dim]
    x = torch.empty((), device="meta").expand(*shape[:dim], 1)
    for op in plan.rows:
        if op.func in ROWS:  # its shape needs values
            one = torch.empty((), device=plan.sources[0][0].tensors[0].device).expand(x.shape)  # type: ignore[union-attr]
            moved = op(one)
            x, shape, dim = torch.empty((), device="meta").expand(moved.shape), torch.Size((*moved.shape[:-1], shape[-1])), moved.ndim - 1
        else:
            x, shape, dim = _moved(op, x, shape, dim, 1)
    if shape[dim] == left:
        return True
    if plan.kind != LOGITS or plan.bias is not None or any_dtensor([plan.sources[0][0].tensors[1]]):
        return False
    plan.n_ids = shape[dim]
    return True


def _add_operation(plan: Plan, node: Node, op: Op) -> bool:
    func = op.func
    if func in ROWS:
        plan.rows.append(op)
        return True
    if func in COPIES:
        return _cast(plan, op.kwargs.get("dtype"))
    if func in SCALES or func is aten.neg.default:
        number = -1.0 if func is aten.neg.default else number_of(op.args[0])
        assert number is not None
        key: Key = ("mul", -1.0) if func is aten.neg.default else (SCALES[func], number)
        factor = number if SCALES.get(func, "mul") == "mul" else 1 / number
        _all(plan, key)
        if plan.kind != LOGITS:
            plan.sign *= factor
            return True
        scaled = plan.transform.times(factor)
        if scaled is None:
            return False
        plan.transform = scaled
        return True
    if func is aten.add.Tensor:
        if plan.kind != LOGITS or plan.bias is not None or plan.transform != Transform():
            return False
        if any_dtensor([plan.sources[0][0].tensors[1]]):
            return False
        plan.bias = op.args[0].reshape(-1)
        return True
    _all(plan, node)
    if func is aten.tanh.default:
        bent = plan.transform.tanh() if plan.kind == LOGITS else None
        plan.transform = bent or plan.transform
        return bent is not None
    if func is aten.exp.default:
        fits = plan.kind == LOGPS and plan.sign == 1
        plan.kind = PROBS
        return fits
    fits = plan.kind == LOGITS
    plan.kind = LOGPS if func is aten._log_softmax.default else PROBS
    return fits


def _all(plan: Plan, key: Key) -> None:
    for keys in plan.keys:
        keys.append(key)


def _cast(plan: Plan, dtype: torch.dtype | None) -> bool:
    """Note a cast; False if it rounds what a loss would not, or asks for more digits than its logits have."""
    before, plan.dtype = plan.dtype, dtype or plan.dtype
    if plan.dtype == before:
        return True
    rounds = plan.dtype.itemsize < min(4, before.itemsize) and plan.dtype != plan.sources[0][0].dtype
    return not rounds and not (plan.dtype == torch.float64 != before)


def _summed(plan: Plan, other: tuple[Node, tuple[Op, ...]]) -> Plan | None:
    """Return the plan of a layer's logits plus those of an adapter, times a number."""
    more = plan_of_node(other[0])
    if more is None or not add_views(more, other[1]):
        return None
    plain = all(p.kind == LOGITS and not p.rows and p.bias is None and p.transform.outer is None for p in (plan, more))
    if not plain or len(more.sources) > 1:
        return None
    if plan.transform != Transform():
        if len(plan.sources) > 1 or more.transform != Transform():
            return None
        plan, more = more, plan
    (source, _), factor = more.sources[0], more.transform.inner
    plan.sources.append((source, factor))
    plan.keys.append(more.keys[0])
    plan.dtype = torch.promote_types(plan.dtype, more.dtype)
    return plan


class HeadRows(NamedTuple):
    """What a pass gives a loss: the head, and the rows of hidden states that belong to logits."""

    weight: Any
    bias: Tensor | None
    rows: Tensor


class Pass:
    """One run of a loss on hidden states and a head, in a graph of its own.

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
        # A second gradient of the same weight would double what the first keeps until its backward.
        self._late = keeps_gradient and wants_grad and any(source.holds_gradient for source in sources)
        self._holds = keeps_gradient and wants_grad and not self._late
        for source in sources:
            source.holds_gradient |= self._holds
        self.results = self._run(wants_grad and not self._late)
        self._memo: tuple[Any, Any] | None = None

    def _run(self, wants_grad: bool) -> Any:
        self._leaves: list[list[tuple[Source, list[Tensor | None]]]] = []
        sides = []
        first = self.plans[0].sources[0][0]
        with isolated(), torch.inference_mode(False) if wants_grad else torch.no_grad(), torch.set_grad_enabled(wants_grad), first.modes():
            for plan in self.plans:
                leaves = [(source, _leaves(source, wants_grad)) for source, _ in plan.sources]
                self._leaves.append(leaves)
                sides.append(_head_rows(plan, [tensors for _, tensors in leaves]))
            return self._compute(*sides)

    def gradients(self, pairs: list[tuple[Any, Tensor, Any]], side: int, source: Source) -> list[Tensor | None]:
        """Return dX, dW, db of a source, for (result, upstream, factor); computed once for all sources."""
        key = [(id(result), id(g), factor if isinstance(factor, (int, float)) else id(factor)) for result, g, factor in pairs]
        if self._memo is None or self._memo[0] != key:
            self._memo = key, self._backward(pairs)
        of_sides = self._memo[1]
        return of_sides[side][id(source)]

    def _backward(self, pairs: list[tuple[Any, Tensor, Any]]) -> Any:
        if self._late:
            if any(version_of(x) != version for x, version in self._captured):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                    "tensor that a fused loss of deferred logits reads"
                )
            results = [self._run(True)]
        else:
            results = [result for result, _, _ in pairs]
        upstream = [(g * factor if not isinstance(factor, int) or factor != 1 else g) for _, g, factor in pairs]
        if self._late and len(upstream) > 1:
            upstream = [torch.stack(torch.broadcast_tensors(*upstream)).sum(0)]
        flat = [x for leaves in self._leaves for _, tensors in leaves for x in tensors if x is not None and x.requires_grad]
        several = sum(len(leaves) for leaves in self._leaves) > 1
        upstream = [g.to(r.dtype).reshape(r.shape) for g, r in zip(upstream, results, strict=True)]
        with isolated():
            grads = torch.autograd.grad(results, flat, upstream, retain_graph=graph_is_retained() or several, allow_unused=True)
        if self._holds and not graph_is_retained():
            self.release()
        found = dict(zip(map(id, flat), grads, strict=True))
        return [
            {id(source): [None if x is None else found.get(id(x)) for x in tensors] for source, tensors in leaves}
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


def _head_rows(plan: Plan, leaves: Sequence[Sequence[Any]], recompute: Callable[[Tensor], Tensor] | None = None) -> HeadRows:
    """Return the head and the rows of a plan, made of (hidden, weight, bias) of its sources.

    `recompute` is the adapters' product of other hidden states.
    """
    hidden, weight, bias = leaves[0]

    def of_ids(x: Any) -> Any:
        return x if x is None or plan.n_ids is None else x[: plan.n_ids]

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
    """A result of a pass, in the graph behind the logits."""

    @staticmethod
    def forward(
        ctx: Any, run: Pass, held: tuple[Tensor], plan: Plan, stock: Callable[..., Tensor], *logits: Any
    ) -> Tensor:
        # `held` hides a tensor of the pass's own graph from autograd, which would make that graph a part of this one.
        (result,) = held
        ctx.run, ctx.result, ctx.plan, ctx.stock = run, result, plan, stock
        ctx.logits = [(z, version_of(z), z._cell.node if isinstance(z, DeferredLogits) else None) for z in logits]
        return result.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if ctx.run is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: a fused loss of deferred logits has freed what it "
                "saved. Specify retain_graph=True in the first backward"
            )
        if torch.is_grad_enabled():
            return None, None, None, None, *_differentiable(ctx, g)
        grads = []
        for side, (z, _, node) in enumerate(ctx.logits):
            if not ctx.needs_input_grad[4 + side]:
                grads.append(None)
                continue
            term = Term(ctx.run, side, ctx.plan, ctx.result, g)
            grads.append(LazyGradient.make(z._meta, z.device, [term], _dense(ctx, side, node, g), None))
        if not graph_is_retained():
            ctx.run = ctx.result = ctx.logits = None
        return None, None, None, None, *grads


def _dense(ctx: Any, side: int, node: Node, g: Tensor) -> Callable[[], Tensor]:
    stock, nodes = ctx.stock, [(z._views, at) for z, _, at in ctx.logits]

    def real(z: Tensor, needs_grad: bool) -> Tensor:
        wide = torch.promote_types(z.dtype, torch.float32)  # autocast, which would widen it, is off here
        return z.detach().to(wide).requires_grad_(needs_grad)

    def dense() -> Tensor:
        reals = [real(seen(at.value(), views), i == side) for i, (views, at) in enumerate(nodes)]
        out = stock(*reals)
        dz = torch.autograd.grad(out, reals[side], g.to(out.dtype).reshape(out.shape))[0]
        return dz.to(nodes[side][1].value().dtype)

    return functools.partial(with_autograd, dense)


def _differentiable(ctx: Any, g: Tensor) -> list[Tensor | None]:
    """Return the gradient of the logits as a function of them and of g, for a second derivative."""
    if any(version_of(z) != version for z, version, _ in ctx.logits):
        raise RuntimeError("deferred logits were changed in place after a loss, whose second derivative reads them")
    reals = [z.tensor() for z, _, _ in ctx.logits]
    out = ctx.stock(*reals)
    needed = [x for x, need in zip(reals, ctx.needs_input_grad[4:], strict=True) if need]
    found = iter(torch.autograd.grad(out, needed, g.to(out.dtype).reshape(out.shape), create_graph=True))
    return [next(found) if need else None for need in ctx.needs_input_grad[4:]]


def wants_grad(*logits: Any) -> bool:
    return torch.is_grad_enabled() and any(z.requires_grad for z in logits)


def fuse(run: Pass, result: Tensor, z: Any, plan: Plan, stock: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a result of a pass as a function of logits; `stock(logits)` is the same of real ones."""
    if not wants_grad(z):
        return result.detach()
    return _Fused.apply(run, (result,), plan, stock, z)


def run_live(z: DeferredLogits, compute: Callable[[Head, Tensor], Any], recompute: Callable[[Tensor], Tensor]) -> Any:
    """Return `compute(head, hidden_states)` in the caller's graph, in place of logits of a call with `head_fn`.

    `recompute` is the adapters' product of other hidden states than those of the call.
    """
    plan = plan_of(z)
    live = [] if plan is None else [source.live for source, _ in plan.sources]
    # A factor of the layer's own product, such as a hook's, would make hidden states of the adapter's.
    if plan is None or None in live or plan.sources[0][0] is not next(z._cell.node.sources()):
        raise ValueError(f"a head_fn needs logits that are those of a head, got {z!r}")
    first = plan.sources[0][0]
    if first.dequantize is not None:
        hidden, _, _ = live[0]  # type: ignore[misc]
        live[0] = (hidden, *first.matrices()[1:])
    with first.modes():
        weight, bias, rows = _head_rows(plan, live, recompute)  # type: ignore[arg-type]
        _refuse_merged(first, rows)
        return compute(Head(weight, bias), rows)


def _refuse_merged(source: Source, rows: Tensor) -> None:
    if source.owner is not None and rows.requires_grad:
        rows.register_hook(lambda g: source.check_merged())
