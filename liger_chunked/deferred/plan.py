"""What stand-in logits are of a head, in the terms that a loss takes: hidden states, weights and a transform."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from liger_chunked.deferred.gradient import Key
from liger_chunked.deferred.lazy import RESHAPES, Op, aten, known_size, number_of
from liger_chunked.deferred.logits import (
    COPIES,
    ROWS,
    SAME_SHAPE_VIEWS,
    SCALES,
    DeferredLogits,
    Node,
    Source,
    class_dim_after,
)
from liger_chunked.deferred.transform import Transform
from liger_chunked.dtensor import any_dtensor

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
    def is_distributed(self) -> bool:
        """Whether the weight is a DTensor, of which a rank has some rows."""
        return any_dtensor([self.sources[0][0].tensors[1]])

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
        return self._select(x, torch.Size((*x.shape[:-1], self.vocabulary)), x.ndim - 1, self.rows)

    def select_from(self, done: list[Op], x: Tensor) -> Tensor:
        """Return these rows of x, a value for each row after `done`, the first of this plan's `rows`."""
        hidden: Any = self.sources[0][0].tensors[0]
        like = torch.empty((), device=x.device).expand(*hidden.shape[:-1], 1)
        shape, dim = torch.Size((*hidden.shape[:-1], self.vocabulary)), hidden.ndim - 1
        for op in done:
            like, shape, dim = _moved(op, like, shape, dim, 1)
        return self._select(x.reshape(like.shape), shape, dim, self.rows[len(done) :]).squeeze(-1)

    def _select(self, x: Tensor, shape: torch.Size, dim: int, ops: list[Op]) -> Tensor:
        k = x.shape[dim]
        for op in ops:
            x, shape, dim = _moved(op, x, shape, dim, k)
        return x.movedim(dim, -1) if dim != x.ndim - 1 else x

    @property
    def vocabulary(self) -> int:
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
        result = torch.Size(
            known_size(size, shape)
            if op.func in RESHAPES
            else [_expanded(n, shape, i - len(size)) for i, n in enumerate(size)]
        )
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


def _expanded(n: int, shape: torch.Size, i: int) -> int:
    return shape[i] if n == -1 else n


def continues(ops: list[Op], first: list[Op]) -> bool:
    """Whether a list of operations begins with another."""
    return len(first) <= len(ops) and all(
        a.func is b.func and _same(a.args, b.args) for a, b in zip(ops, first, strict=False)
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(_same, a, b))
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


def plan_of(z: Any) -> Plan | None:
    """Return the plan of logits; None if real ones exist, or no loss can express them."""
    if type(z) is not DeferredLogits or z.is_computed or z._class_dim is None or z.ndim < 2:
        return None
    plan = plan_of_node(z._cell.node)
    if plan is None or not add_views(plan, z._views, z._geometry[0][z._class_dim]):
        return None
    plan.shape, plan.class_dim, plan.dtype = torch.Size(z._geometry[0]), z._class_dim, z._known[0]
    return plan


def plan_of_node(node: Node) -> Plan | None:
    """Return the plan of an expression; None if no loss can express it."""
    if node.base is None:
        assert node.source is not None
        source = node.source
        return Plan([(source, 1.0)], 0, torch.Size(), keys=[[]], dtype=source.dtype)
    plan = plan_of_node(node.base)
    if plan is None or not add_views(plan, node.views, node.n_ids):
        return None
    assert node.op is not None
    if node.other is not None:
        return _summed(plan, node.other) if node.op.func is aten.add.Tensor else None
    return plan if _add_operation(plan, node, node.op) else None


def add_views(plan: Plan, views: tuple[Op, ...], n_ids: int) -> bool:
    """Add views, which leave `n_ids` of the vocabulary; False if they cut it where a loss cannot."""
    plan.rows.extend(op for op in views if op.func not in SAME_SHAPE_VIEWS)
    if n_ids == (plan.vocabulary if plan.n_ids is None else plan.n_ids):
        return True
    plan.n_ids = n_ids
    return plan.kind == LOGITS and plan.bias is None and not plan.is_distributed


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
        plan.bias = op.args[0].reshape(-1)
        return not plan.is_distributed
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
    if more is None or not add_views(more, other[1], other[0].n_ids):
        return None
    plain = all(p.kind == LOGITS and not p.rows and p.bias is None and p.transform.outer is None for p in (plan, more))
    again = {id(s) for s, _ in plan.sources} & {id(s) for s, _ in more.sources}
    if not plain or len(more.sources) > 1 or again:
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
