"""How a loss computes stand-in logits from a head: which rows of hidden states, which weights, which transform.

Each expression of logits gets its `Plan` when it is made. `Plan.after` is the plan of an operation's result, and
`Plan.seen` that of a view.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_chunked.deferred.lazy import COPIES, Op, aten, contiguous, number_of
from liger_chunked.deferred.transform import Transform
from liger_chunked.dtensor import any_dtensor

ROWS = {aten.index.Tensor, aten.index_select.default}
SCALES = {aten.mul.Tensor: "mul", aten.mul.Scalar: "mul", aten.div.Tensor: "div", aten.div.Scalar: "div"}

# Kinds of plans: logits, their log-softmax or softmax, and the difference or the product of two stand-ins.
LOGITS, LOGPS, PROBS, DIFFERENCE, PRODUCT = "logits", "logps", "probs", "difference", "product"

# Names an operation whose backward multiplies the gradient: a scale by its name and number, others by `Node.key`.
Key = tuple[str, float] | Any


def _in_rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


class View(NamedTuple):
    """Takes rows as `as_strided` does: by a size, strides and an offset, all counted in rows."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return (m, K) of (n, K)."""
        step, one = x.stride()
        size, offset = (*self.size, x.shape[1]), x.storage_offset() + self.offset * step
        return _in_rows(x.as_strided(size, (*(n * step for n in self.strides), one), offset))

    def takes_all(self, n_rows: int) -> bool:
        """Whether it only gives `n_rows` rows another shape."""
        orders = zip(self.size, self.strides, contiguous(self.size), strict=True)
        return self.offset == 0 and math.prod(self.size) == n_rows and all(a == b for n, a, b in orders if n > 1)


@dataclass(frozen=True, eq=False)
class Selection:
    """Takes rows, which have the shape `size`, by an index."""

    size: torch.Size
    op: Op

    def __call__(self, x: Tensor) -> Tensor:
        """Return (m, K) of (n, K)."""
        return _in_rows(self.op(x.view(*self.size, x.shape[1])))


class Plan(NamedTuple):
    """How a loss computes stand-in logits from a head.

    - `sources`: the layer's call, then its adapters', each with the factor of its product
    - `keys`: for each source, the operations between it and these logits whose backward multiplies the gradient
    - `shape`: of the logits; `class_dim`: the dimension of the vocabulary; `n_ids`: how many ids it has, the first ones
    - `rows`: functions that, one after another, take the rows of these logits from the rows of the hidden states
    - `transform`: scale and softcap; `bias`: is added before the transform
    - `kind`: one of `LOGITS` to `PRODUCT`; `sign`: a factor of log-probabilities, probabilities or a product
    - `parts`, `function`: a difference or a product is `function(*parts)`, of two plans
    """

    sources: tuple[tuple[Any, float], ...]
    keys: tuple[tuple[Key, ...], ...]
    shape: torch.Size
    class_dim: int
    n_ids: int
    dtype: torch.dtype
    rows: tuple[View | Selection, ...] = ()
    transform: Transform = Transform()
    bias: Tensor | None = None
    kind: str = LOGITS
    sign: float = 1.0
    parts: tuple[Plan, ...] = ()
    function: Any = None

    @property
    def options(self) -> Any:
        return self.transform.options(logits_budget=self.sources[0][0].settings.logits_budget)

    @property
    def vocabulary(self) -> int:
        return self.sources[0][0].n_ids

    @property
    def row_shape(self) -> torch.Size:
        return self.shape[: self.class_dim] + self.shape[self.class_dim + 1 :]

    @property
    def is_distributed(self) -> bool:
        """Whether the weight is a DTensor, of which a rank has some rows."""
        return any_dtensor([self.sources[0][0].tensors[1]])

    @property
    def signature(self) -> Any:
        """What the statistics of a row depend on."""
        bias = None if self.bias is None else id(self.bias)
        return tuple((id(s), c) for s, c in self.sources), self.transform, bias, self.n_ids

    def passes(self, key: Key) -> int:
        """Return how often an operation stands between these logits and a source."""
        return max(keys.count(key) for keys in self.keys)

    def arrived(self, passed: tuple[Key, ...], source: Any) -> bool:
        """Whether a gradient has passed all operations between these logits and a source, and no others."""
        found = [keys for (s, _), keys in zip(self.sources, self.keys, strict=True) if s is source]
        if not found:  # a reentrant checkpoint ran the head again
            return False
        (expected,) = found
        return len(passed) == len(expected) and all(passed.count(k) == expected.count(k) for k in expected)

    def select(self, x: Tensor, done: int = 0) -> Tensor:
        """Return the rows of x (..., K) that belong to these logits: (rows of the logits..., K).

        x has a row for each of the hidden states, or for each that the first `done` of `rows` take.
        """
        for i, take in enumerate(self.rows[done:]):
            x = take(x if i else _in_rows(x))
        shape = (*self.row_shape, x.shape[-1])
        return x if x.shape == shape else x.reshape(shape)

    def seen(self, size: Any, strides: Any, offset: int, class_dim: int) -> Plan | None:
        """Return the plan of a view of these logits, in a memory of whole rows; None if no loss takes it."""
        ids, pitch = size[class_dim], self.n_ids
        if ids != pitch and (self.kind != LOGITS or self.bias is not None or self.is_distributed):
            return None
        shape = torch.Size(size)
        steps = tuple(n // pitch for i, n in enumerate(strides) if i != class_dim)
        view = View(shape[:class_dim] + shape[class_dim + 1 :], steps, offset // pitch)
        rows = self.rows if view.takes_all(math.prod(self.row_shape)) else (*self.rows, view)
        return self._replace(shape=shape, class_dim=class_dim, n_ids=ids, rows=rows)

    def after(self, op: Op, size: Any, key: Key) -> Plan | None:
        """Return the plan of the result of an operation, which has this size; None if no loss takes it."""
        func = op.func
        if func in ROWS:
            taken = (*self.rows, Selection(self.row_shape, op))
            return self._replace(rows=taken, shape=torch.Size(size), class_dim=len(size) - 1)
        if func in COPIES:
            return self._cast(op.kwargs.get("dtype") or self.dtype)
        if func in SCALES or func is aten.neg.default:
            name, number = ("mul", -1.0) if func is aten.neg.default else (SCALES[func], number_of(op.args[0]) or 0.0)
            return self._behind((name, number))._times(number if name == "mul" else 1 / number)
        if func is aten.add.Tensor:
            fits = self.kind == LOGITS and self.bias is None and self.transform == Transform()
            return self._replace(bias=op.args[0].reshape(-1)) if fits and not self.is_distributed else None
        plan = self._behind(key)
        if func is aten.exp.default:
            return plan._replace(kind=PROBS) if self.kind == LOGPS and self.sign == 1 else None
        if self.kind != LOGITS:
            return None
        if func is aten.tanh.default:
            bent = self.transform.tanh()
            return None if bent is None else plan._replace(transform=bent)
        return plan._replace(kind=LOGPS if func is aten._log_softmax.default else PROBS)

    def _behind(self, key: Key) -> Plan:
        return self._replace(keys=tuple((*keys, key) for keys in self.keys))

    def _times(self, factor: float) -> Plan | None:
        if self.kind == DIFFERENCE:
            return None
        if self.kind != LOGITS:
            return self._replace(sign=self.sign * factor)
        scaled = self.transform.times(factor)
        return None if scaled is None else self._replace(transform=scaled)

    def _cast(self, dtype: torch.dtype) -> Plan | None:
        """Return the plan of a cast; None if the cast rounds more than a loss does, or asks for float64."""
        before, loss = self.dtype, self.sources[0][0].dtype if self.kind != PRODUCT else None
        rounds = dtype.itemsize < min(4, before.itemsize) and dtype != loss
        if dtype != before and (rounds or dtype == torch.float64 or self.kind == DIFFERENCE):
            return None
        return self._replace(dtype=dtype)

    def plus(self, other: Plan) -> Plan | None:
        """Return the plan of a layer's logits plus those of an adapter, times a number; None if no loss takes it."""
        for p in (self, other):
            if p.kind != LOGITS or p.rows or p.bias is not None or p.transform.outer is not None:
                return None
        if len(other.sources) != 1 or any(s is other.sources[0][0] for s, _ in self.sources):
            return None
        if self.transform != Transform():
            # Only one of the two products may have a factor: that of the adapter.
            return None if len(self.sources) > 1 or other.transform != Transform() else other.plus(self)
        return self._replace(
            sources=(*self.sources, (other.sources[0][0], other.transform.inner)),
            keys=self.keys + other.keys,
            dtype=torch.promote_types(self.dtype, other.dtype),
        )


def joined(function: Any, kind: str, a: Plan, b: Plan, size: Any) -> Plan:
    """Return the plan of a difference or a product of two plans' logits."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return Plan(
        a.sources[:1], ((),), torch.Size(size), a.class_dim, a.n_ids, dtype, kind=kind, parts=(a, b), function=function
    )
