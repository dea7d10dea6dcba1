"""Gradients of deferred logits. Like the logits, they have a shape and no values.

The backward of a fused loss knows the gradients of hidden states and weight: its own pass computes them. So it sends a
`LazyGradient` in place of dL/dlogits, whose `Term`s say which pass. Autograd's own formulas for slices, views, casts
and scales run on it. The head's backward collects the terms, and each pass runs once for all of them.

A pass computes the gradient through everything between the head and the loss. An autograd node in between, such as
that of `z / 30`, would apply its derivative again: it is noted in `Term.passed` instead. Whatever else multiplies
the gradient, such as a hook, becomes its `factor`. What reads or writes the gradient gets the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_chunked.deferred.lazy import (
    PLAIN,
    READS_MEMORY,
    SHAPED_LIKE,
    Lazy,
    Op,
    aten,
    contiguous,
    number_of,
    outside_graphs,
    read_memory,
    run_on_values,
    values,
)
from liger_chunked.deferred.logits import SAME_SHAPE_VIEWS, SCALES, DeferredLogits, Node
from liger_chunked.private import tree_map_only, without_torch_function

# Formulas that move the gradient of whole rows, or round it. What terms carry does not change with them.
_MOVES = SAME_SHAPE_VIEWS | {
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.clone.default,
    aten._to_copy.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.transpose.int, aten.t.default, aten.permute.default, aten.slice_backward.default, aten.select_backward.default,
}  # fmt: skip
_CURVE_BACKWARDS = {
    aten.tanh_backward.default, aten._log_softmax_backward_data.default, aten._softmax_backward_data.default,
}  # fmt: skip
_ADDS = {aten.add.Tensor, aten.add_.Tensor}

# Calls after which a gradient still has its terms: they ask for its shape or dtype, copy it, or scale it.
_KEEPS_TERMS = {
    getattr(Tensor, name)
    for name in (
        "size dim ndimension numel nelement stride storage_offset is_contiguous is_floating_point is_complex "
        "get_device element_size __len__ __hash__ register_hook retain_grad requires_grad_ type __mul__ __rmul__ mul "
        "__truediv__ div __neg__ neg clone float double half bfloat16 to is_inference is_set_to _is_view"
    ).split()
    if hasattr(Tensor, name)
} | {torch.mul, torch.div, torch.neg, torch.clone, torch.zeros_like, torch.ones_like, torch.empty_like}
_OVERLOAD = type(aten.alias.default)
_SHARES_MEMORY = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag", "grad")}

Key = tuple[str, float] | Node


class Term(NamedTuple):
    """The gradient of one result of a pass.

    - `run`: the `Pass`
    - `side`: which of the pass's logits this is the gradient of; `plan`: what they are of a head
    - `result`, `upstream`: a result of the pass and its gradient
    - `factor`: what multiplied the gradient since
    - `passed`: the operations whose derivative the pass contains, and whose nodes the gradient has passed
    """

    run: Any
    side: int
    plan: Any
    result: Any
    upstream: Tensor
    factor: Any = 1
    passed: tuple[Key, ...] = ()

    def after(self, key: Key) -> Term | None:
        """Return the term behind the node of an operation; None if the pass does not contain it."""
        if self.passed.count(key) < self.plan.count(key):
            return self._replace(passed=(*self.passed, key))
        return None

    def times(self, factor: Any) -> Term:
        return self._replace(factor=self.factor * factor)


class LazyGradient(Lazy):
    """dL/dlogits: the sum of terms and of `extra`, a real tensor or None. `dense()` computes that of the terms."""

    terms: list[Any]
    extra: Tensor | None
    dense: Callable[[], Tensor]

    @classmethod
    def make(
        cls,
        size: Any,
        dtype: torch.dtype,
        device: torch.device,
        terms: list[Any],
        dense: Callable[[], Tensor],
        extra: Tensor | None,
    ) -> LazyGradient:
        made = cls._wrap(size, contiguous(size), 0, dtype, device)
        made.terms, made.dense, made.extra = terms, dense, extra
        return made

    def value(self) -> Tensor:
        if not self.terms and self.extra is not None:
            return self.extra
        real = self.dense()
        return real if self.extra is None else real + self.extra

    def memory(self) -> Tensor:
        """Return the real gradient, which is this one from now on."""
        if self.terms or self.extra is None:
            self._become(self.value())
        return self.value()

    def _become(self, real: Tensor) -> None:
        self.terms, self.extra, self.dense = [], real, lambda: torch.zeros_like(real)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.value())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copied = self.value().clone()
        return copied

    @classmethod
    @outside_graphs
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give Python, such as a hook, the real gradient: it may write to views of it, which share no terms.

        Autograd's own formulas do not come here.
        """
        with without_torch_function():
            # A mode of dispatch calls operations of ATen again.
            of_aten = type(func) is _OVERLOAD
            if (
                of_aten
                or func in _KEEPS_TERMS
                or (getattr(func, "__name__", "") == "__get__" and func not in _SHARES_MEMORY)
            ):
                return func(*args, **(kwargs or {}))
            if func in READS_MEMORY:
                return read_memory(func, args, kwargs or {})
            return func(*tree_map_only(cls, cls.memory, args), **tree_map_only(cls, cls.memory, kwargs or {}))

    @classmethod
    @outside_graphs
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        g: Any = args[0] if args else None
        made = None
        if func in (aten.cat.default, aten.stack.default):
            made = _concatenated(func, args[0], *args[1:])
        elif func in _ADDS and not kwargs:
            made = _sum(args[0], args[1], func is aten.add_.Tensor)
        elif func is aten.index_put.default or func is aten.index_add.default:
            made = _placed(func, args)
        elif type(g) is cls:
            made = g._lazily(func, args, kwargs)
        return run_on_values(func, args, kwargs) if made is None else made

    def _lazily(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _MOVES and kwargs.get("device") in (None, self.device):
            dtype = kwargs.get("dtype") or self.dtype
            return self._behind(Op(func, args[1:], kwargs), self.terms) if dtype.is_floating_point else None
        if func in SHAPED_LIKE:
            if func is aten.new_zeros.default and kwargs.get("dtype") in (None, self.dtype):
                return self._zeros(args[1])
            return self._filled(func, args, kwargs)
        if func in SCALES and not kwargs:
            return self._scaled(Op(func, args[1:]))
        if func is aten.neg.default:
            return self._through(Op(func), ("mul", -1.0), -1)
        if func in _CURVE_BACKWARDS and type(args[1]) is DeferredLogits:
            return self._through(Op(func, args[1:], kwargs), _key(args[1]), None)
        return None

    def _behind(self, op: Op, terms: list[Any]) -> LazyGradient:
        """Return the gradient behind an operation that is linear in it."""
        extra = None if self.extra is None else op.func(self.extra, *values(op.args), **op.kwargs)
        size, dtype = self._geometry[0], self._known[0]
        if op.func in _MOVES:
            size, _, _, dtype = self._after(op)
        dense = self.dense  # of now: this gradient may become real later
        return self.make(
            size, dtype, self._known[1], terms, lambda: op.func(dense(), *values(op.args), **op.kwargs), extra
        )

    def _scaled(self, op: Op) -> LazyGradient | None:
        factor = op.args[0]
        number = number_of(factor)
        name = SCALES[op.func]
        if number is None:
            if type(factor) is DeferredLogits and name == "mul":  # the backward of exp
                return self._through(op, _key(factor), None)
            if type(factor) not in PLAIN or factor.ndim > 0 or factor.device != self.device:
                return None
            number = factor
        return self._through(
            op, (name, number) if isinstance(number, float) else None, number if name == "mul" else 1 / number
        )

    def _through(self, op: Op, key: Key | None, factor: Any) -> LazyGradient | None:
        """Return the gradient behind the node of an operation; None if its derivative needs the real gradient."""
        terms = [
            (None if key is None else term.after(key)) or (None if factor is None else term.times(factor))
            for term in self.terms
        ]
        if any(term is None for term in terms):
            return None
        return self._behind(op, terms)

    def _zeros(self, size: Any) -> LazyGradient:
        dtype, device = self._known
        return self.make(tuple(size), dtype, device, [], lambda: torch.zeros(size, dtype=dtype, device=device), None)


def _placed(func: Any, args: Any) -> LazyGradient | None:
    """Return the backward of indexing: zeros with the rows of a gradient added."""
    given = args[2] if func is aten.index_put.default else args[3]
    zeros = args[0]
    added = func is aten.index_add.default or (len(args) > 3 and args[3])
    both = isinstance(given, LazyGradient) and isinstance(zeros, LazyGradient) and given.dtype == zeros.dtype
    if not both or not added or zeros.terms or zeros.extra is not None:
        return None
    shape, dtype, device = zeros.shape, zeros.dtype, zeros.device

    def placed(g: Tensor) -> Tensor:
        x = torch.zeros(shape, dtype=dtype, device=device)
        return func(x, args[1], g, True) if func is aten.index_put.default else func(x, args[1], args[2], g)

    extra = None if given.extra is None else placed(given.extra)
    dense = given.dense
    return LazyGradient.make(tuple(shape), dtype, device, given.terms, lambda: placed(dense()), extra)


def _key(z: DeferredLogits) -> Node:
    return z._cell.node


def _sum(a: Any, b: Any, in_place: bool) -> Any:
    same = isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
    lazy: list[Any] = [x for x in (a, b) if isinstance(x, LazyGradient)]
    if not same or (in_place and not isinstance(a, LazyGradient)):
        return None
    found = [x.extra if isinstance(x, LazyGradient) else values(x) for x in (a, b)]
    extras = [x for x in found if x is not None]
    denses = [x.dense for x in lazy]

    def dense() -> Tensor:
        return denses[0]() if len(denses) == 1 else denses[0]() + denses[1]()

    made: Any = lazy[0]
    extra = None if not extras else extras[0] if len(extras) == 1 else extras[0] + extras[1]
    terms = [term for x in lazy for term in x.terms]
    made = made.make(made._geometry[0], made.dtype, made.device, terms, dense, extra)
    if in_place:
        target: Any = a
        target.terms, target.dense, target.extra = made.terms, made.dense, made.extra
        return a
    return made


def _concatenated(join: Any, parts: Any, dim: int = 0) -> LazyGradient | None:
    """Return the backward of `split` and `unbind`: rows of several gradients, which are zeros where nothing came."""
    if not all(isinstance(x, Tensor) and x.dtype == parts[0].dtype for x in parts):
        return None
    lazy = [x for x in parts if isinstance(x, LazyGradient)]
    device, dtype = lazy[0].device, lazy[0].dtype
    metas = [x._meta if isinstance(x, LazyGradient) else torch.empty_like(x, device="meta") for x in parts]

    def joined(tensors: list[Tensor | None]) -> Tensor:
        shapes = [x.shape for x in metas]
        filled = [
            torch.zeros(n, dtype=dtype, device=device) if x is None else x for x, n in zip(tensors, shapes, strict=True)
        ]
        return join(filled, dim)

    denses = [x.dense if isinstance(x, LazyGradient) else None for x in parts]

    def dense() -> Tensor:
        return joined([None if get is None else get() for get in denses])

    extras = [x.extra if isinstance(x, LazyGradient) else values(x) for x in parts]
    extra = None if all(x is None for x in extras) else joined(extras)
    size = tuple(join(metas, dim).shape)
    return LazyGradient.make(size, dtype, device, [t for x in lazy for t in x.terms], dense, extra)
