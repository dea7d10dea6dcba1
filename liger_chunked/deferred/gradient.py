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
    COPIES,
    KEEPS_GEOMETRY,
    PLAIN,
    READS_MEMORY,
    RESHAPES,
    SHAPED_LIKE,
    TURNS,
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
from liger_chunked.deferred.logits import DeferredLogits
from liger_chunked.deferred.plan import SCALES, Key, Plan
from liger_chunked.private import tree_map_only, without_torch_function

# Backward formulas that move whole rows of the gradient, or round it. They leave its terms as they are.
_MOVES = KEEPS_GEOMETRY | RESHAPES | TURNS | COPIES | {aten.slice_backward.default, aten.select_backward.default}
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


class Term(NamedTuple):
    """The gradient of one result of a pass.

    - `run`: the `Pass`
    - `side`: index of the logits in `Pass.plans` that this is the gradient of
    - `plan`: of the logits that the gradient has reached: those that the loss got, or a factor of a product of them
    - `result`, `upstream`: a result of the pass and its gradient
    - `factor`: what multiplied the gradient since
    - `passed`: the operations whose nodes the gradient has passed without effect, because the pass contains their
      derivative
    - `path`: for the gradient of a product (`joined.py`), the factors that it goes through from there: each the index
      of a factor, and its plan
    """

    run: Any
    side: int
    plan: Plan
    result: Any
    upstream: Tensor
    factor: Any = 1
    passed: tuple[Key, ...] = ()
    path: tuple[tuple[int, Plan], ...] = ()

    def after(self, key: Key | None, factor: Any) -> Term | None:
        """Return the term after the backward of an operation; None if that needs the real gradient.

        Args:
            key: of the operation in `Plan.keys`; None: the pass cannot contain its derivative.
            factor: what its backward multiplies by; None: no number.
        """
        if key is not None and self.passed.count(key) < self.plan.passes(key):
            return self._replace(passed=(*self.passed, key))
        return None if factor is None else self._replace(factor=self.factor * factor)

    def through(self, i: int) -> list[Term] | None:
        """Return the terms of factor i of a product; None if the gradient is not that of the product itself."""
        if not self.path or len(self.passed) != len(self.plan.keys[0]):
            return None
        at, plan = self.path[0]
        return [self._replace(plan=plan, path=self.path[1:], passed=())] if at == i else []


class LazyGradient(Lazy):
    """dL/dlogits without values: the sum of `terms` and of `extra`, a real tensor or None.

    `dense()` computes the real sum of the terms.
    """

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
        made = cls._wrap((size, contiguous(size), 0), dtype, device)
        made.terms, made.dense, made.extra = terms, dense, extra
        return made

    @classmethod
    def linear(
        cls, function: Callable[..., Tensor], parts: Any, size: Any, dtype: torch.dtype, device: Any, terms: Any = None
    ) -> LazyGradient:
        """Return `function(*parts)`, which is linear in the gradients `parts`, lazy ones and others.

        The function gets None in place of a part that is zero. `terms` are those of the result; None: those of `parts`.
        """
        # The parts' functions are read here, because a part that becomes real later has another one.
        denses = [x.dense if isinstance(x, LazyGradient) else None for x in parts]
        extras = [x.extra if isinstance(x, LazyGradient) else values(x) for x in parts]
        if terms is None:
            terms = [term for x in parts if isinstance(x, LazyGradient) for term in x.terms]

        def dense() -> Tensor:
            return function(*(None if get is None else get() for get in denses))

        extra = None if all(x is None for x in extras) else function(*extras)
        return cls.make(tuple(size), dtype, device, terms, dense, extra)

    def _value(self) -> Tensor:
        if not self.terms and self.extra is not None:
            return self.extra
        real = self.dense()
        return real if self.extra is None else real + self.extra

    def _memory(self) -> Tensor:
        """Return the real gradient, and keep it in place of the terms."""
        if self.terms or self.extra is None:
            self._become(self._value())
        return self._value()

    def _become(self, real: Tensor) -> None:
        self.terms, self.extra, self.dense = [], real, lambda: torch.zeros_like(real)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._value())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._value().__reduce_ex__(protocol)

    @classmethod
    @outside_graphs
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give Python, such as a hook, the real gradient: it may write to views of it, which share no terms.

        Autograd's own formulas do not come here.
        """
        with without_torch_function():
            # A `TorchDispatchMode` that is on calls the operation again from Python, so that it comes here.
            of_aten = type(func) is _OVERLOAD
            if (
                of_aten
                or func in _KEEPS_TERMS
                or (getattr(func, "__name__", "") == "__get__" and func not in _SHARES_MEMORY)
            ):
                return func(*args, **(kwargs or {}))
            if func in READS_MEMORY:
                return read_memory(func, args, kwargs or {})
            return func(*tree_map_only(cls, cls._memory, args), **tree_map_only(cls, cls._memory, kwargs or {}))

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
            if not dtype.is_floating_point:
                return None
            op = Op(func, args[1:], kwargs)
            size, _, _, dtype = self._after(op)
            return self._behind(op, size, dtype, self.terms)
        if func in SHAPED_LIKE:
            if func is aten.new_zeros.default and kwargs.get("dtype") in (None, self.dtype):
                size, (dtype, device) = tuple(args[1]), self._known
                return self.make(size, dtype, device, [], lambda: torch.zeros(size, dtype=dtype, device=device), None)
            return self._filled(func, args, kwargs)
        if func in SCALES and not kwargs:
            return self._scaled(Op(func, args[1:]))
        if func is aten.neg.default:
            return self._through(Op(func), ("mul", -1.0), -1)
        if func in _CURVE_BACKWARDS and type(args[1]) is DeferredLogits:
            return self._through(Op(func, args[1:], kwargs), args[1]._cell.node.key, None)
        return None

    def _scaled(self, op: Op) -> LazyGradient | None:
        factor = op.args[0]
        number = number_of(factor)
        name = SCALES[op.func]
        if number is None:
            if type(factor) is DeferredLogits and name == "mul":  # the backward of exp
                return self._through(op, factor._cell.node.key, None)
            if type(factor) not in PLAIN or factor.ndim > 0 or factor.device != self.device:
                return None
            number = factor
        return self._through(
            op, (name, number) if isinstance(number, float) else None, number if name == "mul" else 1 / number
        )

    def _through(self, op: Op, key: Key | None, factor: Any) -> LazyGradient | None:
        """Return the gradient behind the node of an operation; None if its derivative needs the real gradient."""
        terms = [term.after(key, factor) for term in self.terms]
        if any(term is None for term in terms):
            return None
        return self._behind(op, self._geometry[0], self._known[0], terms)

    def _behind(self, op: Op, size: Any, dtype: torch.dtype, terms: list[Any]) -> LazyGradient:
        """Return the gradient behind an operation that is linear in it."""
        return self.linear(
            lambda g: op.func(g, *values(op.args), **op.kwargs), [self], size, dtype, self._known[1], terms
        )


def _placed(func: Any, args: Any) -> LazyGradient | None:
    """Return the result of the backward of indexing: zeros, to which the rows of a gradient are added."""
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

    return LazyGradient.linear(placed, [given], shape, dtype, device)


def _sum(a: Any, b: Any, in_place: bool) -> Any:
    same = isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
    if not same or (in_place and not isinstance(a, LazyGradient)):
        return None
    lazy: Any = a if isinstance(a, LazyGradient) else b

    def added(x: Tensor | None, y: Tensor | None) -> Any:
        return y if x is None else x if y is None else x + y

    made = LazyGradient.linear(added, [a, b], a.shape, a.dtype, lazy.device)
    if not in_place:
        return made
    assert isinstance(a, LazyGradient)
    a.terms, a.dense, a.extra = made.terms, made.dense, made.extra
    return a


def _concatenated(join: Any, parts: Any, dim: int = 0) -> LazyGradient | None:
    """Return the result of the backward of `split` and `unbind`: several gradients side by side, some of them zeros."""
    if not all(isinstance(x, Tensor) and x.dtype == parts[0].dtype for x in parts):
        return None
    lazy = next(x for x in parts if isinstance(x, LazyGradient))
    shapes, dtype, device = [x.shape for x in parts], lazy.dtype, lazy.device

    def joined(*tensors: Tensor | None) -> Tensor:
        filled = [
            torch.zeros(shape, dtype=dtype, device=device) if x is None else x
            for x, shape in zip(tensors, shapes, strict=True)
        ]
        return join(filled, dim)

    size = join([torch.empty(shape, device="meta") for shape in shapes], dim).shape
    return LazyGradient.linear(joined, parts, size, dtype, device)
