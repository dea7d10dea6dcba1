"""Logits that have not been computed: the result of a head that defers.

    hidden ──► lm_head(hidden)                  DeferredLogits: a tensor in the autograd graph, without values
               .float(), / cap, tanh, [:, :-1]  autograd's own nodes; the values stay lazy
    F.cross_entropy(logits, labels)             fused (`rules.py`); its gradient is lazy too (`gradient.py`)
    anything else                               the real logits, computed once

Four parts:

- `Source`: one call of a linear layer, `hidden @ weight.T + bias`
- `Node`: an expression of a source, such as `tanh(z / 30)`; it never changes
- `Cell`: the memory that logits and their views share: an expression until something needs it or changes it in place
- `DeferredLogits`: a tensor, which is a view of a cell
"""

from __future__ import annotations

import logging
import math
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from liger_chunked.deferred.lazy import (
    COPIES,
    PLAIN,
    READS_MEMORY,
    RESHAPES,
    SHAPED_LIKE,
    SPLITS,
    VIEWS,
    Geometry,
    Lazy,
    Op,
    after,
    aten,
    contiguous,
    number_of,
    outside_graphs,
    read_memory,
    run_on_values,
    strided,
    values,
)
from liger_chunked.deferred.plan import ROWS, SCALES, Plan
from liger_chunked.deferred.sharded import is_freed
from liger_chunked.engine.surroundings import isolated
from liger_chunked.private import (
    transforms_are_active,
    tree_leaves,
    tree_map_only,
    version_of,
    without_torch_function,
)
from liger_chunked.types import Head, LogitOptions, StandIn, caller_outside
from liger_chunked.what_ran import Record

_LOGGER = logging.getLogger("liger_chunked")

SCALES_IN_PLACE = {
    aten.mul_.Tensor: aten.mul.Tensor, aten.mul_.Scalar: aten.mul.Scalar,
    aten.div_.Tensor: aten.div.Tensor, aten.div_.Scalar: aten.div.Scalar,
}  # fmt: skip
_SOFTMAXES = {aten._log_softmax.default, aten._softmax.default}


_NOTHING = nullcontext()


class Source:
    """One call of a linear layer: `hidden @ weight.T + bias`, not computed.

    It holds tensors outside of the autograd graph, so that kept logits do not keep the graph.

    Attributes:
        tensors: (hidden, weight, bias), detached. `versions`: their version counters at the call.
        needs: which of hidden states, weight and bias require a gradient.
        settings: the `Deferral` of the layer.
        asked_by: what needed real logits, and where; None if nothing did.
        withheld: cross entropies return 0 (`Request.withhold`). `gave_zero`: one did.
        holds_gradient: whether a loss holds dW, which it computed in its forward, until its backward. A second such
            loss waits with its dW until its own backward, so that only one dW is in memory (`Pass`).
        n_ids: how many logits a row has.
        cells: weak references to the memory of all logits that were made from this call.
        passes: statistics of rows that were computed, by `Plan.signature` (`rules.statistics`).
        owner, merged: the layer of PEFT around this one, and the adapters that were merged into the weight, which PEFT
            does through `weight.data`, unnoticed by autograd.
        forward: computes the real product of a layer that is no plain `nn.Linear`; else None.
        dequantize: returns the weight of a quantized layer, from its tensor and the dtype of hidden states; else None.
        record: of what the losses of these logits ran, for `explain`.
    """

    def __init__(
        self, hidden: Tensor, weight: Any, bias: Tensor | None, settings: Any, name: str, owner: Any = None
    ) -> None:
        self.tensors = tuple(None if x is None else x.detach() for x in (hidden, weight, bias))
        self.versions = self._versions()
        self.settings, self.name = settings, name
        device = hidden.device.type
        self.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        enabled, dtype = self.autocast
        self.dtype = dtype if enabled and hidden.dtype != torch.float64 else hidden.dtype
        self.merged = _merged_in(owner)
        self.owner = owner
        self.forward: Callable[[Tensor], Tensor] | None = None
        self.dequantize: Callable[[Any, torch.dtype], Tensor] | None = None
        self.record: Record | None = None
        self.needs = (False, False, False)
        self.asked_by: str | None = None
        self.withheld = self.gave_zero = False
        self.holds_gradient = False
        self.n_ids = 0
        self.cells: list[weakref.ref[Cell]] = []
        self.passes: dict[Any, Any] = {}

    def _versions(self) -> list[int]:
        return [0 if x is None else version_of(x) for x in self.tensors]

    def check_merged(self) -> None:
        """Raise RuntimeError if PEFT merged or unmerged an adapter since the call."""
        if _merged_in(self.owner) != self.merged:
            raise RuntimeError(
                f"adapters of {self.name} were merged or unmerged after the model called it, which changes its weight "
                "under its logits and their gradient: merge after the backward, or unmerge before it"
            )

    def read(self) -> tuple[Any, ...]:
        """Return (hidden, weight, bias); RuntimeError if one was changed in place after the layer was called."""
        self.check_merged()
        hidden, weight, _ = self.tensors
        names = zip(("hidden states", "weights", "bias"), self.versions, self._versions(), strict=True)
        changed = [name for name, before, now in names if before != now]
        if changed or (is_freed(weight) and not is_freed(hidden)):
            what = (
                f"the {changed[0]} of {self.name} changed"
                if changed
                else f"a framework freed the weights of {self.name}"
            )
            raise RuntimeError(
                f"{what} after the model called it, and its deferred logits were not computed before. Compute the "
                "loss, or read the logits, before the optimizer steps (and, with a head that a framework shards, "
                "before the backward); or get logits at once: model(..., skip_logits=False), handle.remove() of "
                "defer_logits, or, for logits of an evaluation that are read later, defer_in_evaluation=False"
            )
        return self.tensors

    def matrices(self) -> tuple[Any, ...]:
        """Return (hidden, weight, bias) as a product uses them."""
        hidden, weight, bias = self.read()
        if self.dequantize is None:
            return hidden, weight, bias
        weight = self.dequantize(weight, hidden.dtype)
        return hidden, weight, None if bias is None else bias.to(weight.dtype)

    def as_called(self) -> AbstractContextManager[Any]:
        """Return the modes under which the layer was called: autocast, and those without gradients."""
        stack = ExitStack()
        stack.enter_context(self.modes())
        if self.inference and not torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(self.grad and torch.is_grad_enabled()))
        return stack

    def modes(self) -> AbstractContextManager[Any]:
        """Return the autocast under which the layer was called."""
        device = self.tensors[0].device.type  # type: ignore[union-attr]
        if (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) == self.autocast:
            return _NOTHING
        return torch.autocast(device, self.autocast[1], enabled=self.autocast[0])

    def product(self) -> Tensor:
        """Return real logits."""
        with torch.no_grad(), self.modes():
            if self.forward is not None:
                return self.forward(self.read()[0])
            return F.linear(*self.read())


def _merged_in(layer: Any) -> list[str]:
    return [] if layer is None else list(getattr(layer, "merged_adapters", ()))


class Node:
    """An expression: a source's product, or an operation on views of other expressions.

    Attributes:
        key: names its operation in the `keys` of plans.
        sources: the calls whose products are in the expression: of the layer itself first, then of its adapters.
        geometry: sizes and strides of its values.
        plan: how a loss computes it from the head; None if no loss can.
        real: its values, if they were read and are kept.
    """

    __slots__ = ("_compute", "_keeps", "geometry", "key", "plan", "real", "sources")

    def __init__(
        self,
        sources: tuple[Source, ...],
        geometry: Geometry,
        compute: Callable[[], Tensor],
        plan: Plan | None = None,
        keeps: bool = False,
    ) -> None:
        self.sources, self.geometry, self._compute, self.plan, self._keeps = sources, geometry, compute, plan, keeps
        self.real: Tensor | None = None
        self.key = object()  # not the node itself: its plan has the key

    def value(self) -> Tensor:
        real = self.real
        if real is None:
            real = self._compute()
            size, strides, _ = self.geometry
            if any(a != b for n, a, b in zip(size, strides, real.stride(), strict=True) if n > 1):
                real = torch.empty_strided(size, strides, dtype=real.dtype, device=real.device).copy_(real)
            if self._keeps:
                self.real = real
        return real

    def view(self, geometry: Geometry) -> Tensor:
        """Return a view of the values."""
        return strided(self.value(), self.geometry, geometry)


class Cell:
    """The memory of logits and of all their views: an expression, or real values.

    `changed` says whether somebody may have written to the real values: they are no longer those of the expression.
    """

    __slots__ = ("__weakref__", "changed", "n_ids", "node", "real")

    def __init__(self, node: Node, n_ids: int) -> None:
        self.node, self.n_ids, self.changed = node, n_ids, False
        self.real: Tensor | None = None
        node.sources[0].cells.append(weakref.ref(self))

    def values(self) -> Tensor:
        if self.real is None:
            self.real = self.node.real = self.node.value()
        return self.real

    def own_values(self) -> Tensor:
        """Return values that may be written.

        Lazy copies of these logits are computed first, because their expressions read the values before the change.
        """
        if not self.changed:
            self.changed = True
            for source in self.node.sources:
                for reference in list(source.cells):
                    if (cell := reference()) is not None and cell is not self:
                        cell.values()
        real = self.values()
        if self.node.real is real:
            self.node.real = None
        return real


class DeferredLogits(Lazy, StandIn):
    """Logits (..., V) of a head that computes them only if they are needed.

    A head returns them to a model's forward while `defer_logits` or `apply_liger_kernel` is active. They are a
    `torch.Tensor` in the autograd graph: hooks, `retain_grad`, wrappers and checkpoints work as with any other.
    `F.cross_entropy`, `F.nll_loss`, `F.kl_div`, `gather` with `log_softmax` or `logsumexp`, `argmax`, and the mean or
    sum over the vocabulary are fused: logits exist in chunks, also after slices, views, casts, products with numbers,
    `tanh`, and an added bias. Every other use gets the real logits: right, computed once, at the price of their memory;
    a line in the log names the first such use.
    """

    # `_geometry`: sizes, strides and offset in the cell's memory.
    # `_in_rows`: the same view, as if the memory held one row of logits after another. It differs from `_geometry` if
    # the memory is laid out otherwise, as that of a clone of transposed logits. None: a reshape merged the vocabulary
    # with other dimensions.
    # `_class_dim`: the dimension of the vocabulary. None: a view left out the first ids of rows, or merged rows.
    _cell: Cell
    _in_rows: Geometry | None
    _class_dim: int | None

    @classmethod
    def _made(cls, cell: Cell, geometry: Geometry, in_rows: Geometry | None, dtype: torch.dtype, device: Any) -> Any:
        made = cls._wrap(geometry, dtype, device)
        made._cell, made._in_rows = cell, in_rows
        made._class_dim = None if in_rows is None else _class_dim(in_rows, cell.n_ids)
        return made

    @classmethod
    def _of_node(cls, node: Node, class_dim: int, dtype: torch.dtype, device: Any) -> Any:
        """Return an expression's logits, in memory of their own."""
        size = node.geometry[0]
        in_rows = node.geometry
        if class_dim != len(size) - 1 or in_rows[1] != contiguous(size):
            rows = contiguous((*size[:class_dim], *size[class_dim + 1 :], size[class_dim]))
            in_rows = size, (*rows[:class_dim], 1, *rows[class_dim:-1]), 0
        return cls._made(Cell(node, size[class_dim]), node.geometry, in_rows, dtype, device)

    @classmethod
    def _of(cls, source: Source, n_ids: int) -> Any:
        """Return the result of a layer's call."""
        hidden: Any = source.tensors[0]
        source.n_ids = n_ids
        size = torch.Size((*hidden.shape[:-1], n_ids))
        plan = Plan(((source, 1.0),), ((),), size, len(size) - 1, n_ids, source.dtype)
        node = Node((source,), (size, contiguous(size), 0), source.product, plan, keeps=True)  # all begin with it
        return cls._of_node(node, len(size) - 1, source.dtype, hidden.device)

    @property
    def _plan(self) -> Plan | None:
        """How a loss computes these logits from the head; None if real ones exist, or if no loss can."""
        return None if self.is_computed or self.ndim < 2 else self._planned()

    def _planned(self) -> Plan | None:
        plan, class_dim = self._cell.node.plan, self._class_dim
        if plan is None or class_dim is None or self._in_rows is None:
            return None
        return plan.seen(*self._in_rows, class_dim)

    # What a loss and a reader may ask

    @property
    def is_computed(self) -> bool:
        """Whether the real logits exist: something asked for them."""
        return self._cell.changed or any(source.asked_by is not None for source in self._cell.node.sources)

    @property
    def asked_by(self) -> str | None:
        """What asked for real logits, and where; None if nothing did."""
        return next((s.asked_by for s in self._cell.node.sources if s.asked_by is not None), None)

    @property
    def gave_zero(self) -> bool:
        """Whether a cross entropy of these logits was withheld: it returned 0."""
        return any(source.gave_zero for source in self._cell.node.sources)

    def tensor(self) -> Tensor:
        """Return the real logits, in the autograd graph. The head computes them once, for all that need them."""
        with without_torch_function():
            return _Values.apply(self)

    def logit_options(self, ignore_index: int = -100) -> LogitOptions:
        """Return the transform of these logits, as a loss takes it; ValueError if no loss can express them."""
        from liger_chunked.deferred.rules import logit_options

        return logit_options(self, ignore_index)

    def run(self, compute: Callable[[Head, Tensor], Any]) -> Any:
        """Return `compute(head, hidden_states)`, a loss in place of these logits.

        `hidden_states` (..., H) are the rows of these logits. `head` is what multiplies them, adapters too. Hooks on
        the way from the head to these logits see a gradient without values, and may multiply it by a number.
        """
        from liger_chunked.deferred.fused import run_live

        return run_live(self, compute)

    def _value(self) -> Tensor:
        self._ask("tensor")
        return strided(self._cell.values(), self._cell.node.geometry, self._geometry)

    def _memory(self) -> Tensor:
        """Return the real logits for a reader of memory, who may write there too."""
        self._ask("memory")
        return strided(self._cell.own_values(), self._cell.node.geometry, self._geometry)

    def asked(self, name: str) -> Tensor:
        """Return the real logits for the function or argument `name`, which the log names."""
        _ASKING.append(name)
        try:
            return self.tensor()
        finally:
            _ASKING.pop()

    def _ask(self, name: str) -> None:
        """Remember, and say in the log, what needs real logits."""
        if self._cell.real is None:
            for source in self._cell.node.sources:
                if source.asked_by is None:
                    source.asked_by = _log_use(source, _ASKING[-1] if _ASKING else name)
                    if source.record is not None:
                        source.record.real_logits = source.asked_by

    # Interception

    @classmethod
    @outside_graphs
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in RULES and type(func) is _FUNCTION and not func.__globals__["__name__"].startswith("torch."):
            func = _wrapped_function(func)
        # Transforms and traces take functions apart themselves: they get real logits.
        rule = None if transforms_are_active() or torch.jit.is_tracing() else RULES.get(func)  # type: ignore[attr-defined]
        if func == _SET_DATA and type(args[0]) is cls:
            return args[0]._set_data(args[1])
        if func is torch.autograd.grad:
            return _differentiated(func, *args, **kwargs)
        with without_torch_function():
            if rule is not None:
                result = rule(func, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            if func in _SAVE_RESULT:
                with isolated():  # hooks on saved tensors, as of a checkpoint, would read the result
                    return func(*args, **kwargs)
            _ASKING.append(getattr(func, "__name__", str(func)))
            try:
                return read_memory(func, args, kwargs) if func in READS_MEMORY else func(*args, **kwargs)
            finally:
                _ASKING.pop()

    @classmethod
    @outside_graphs
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(t is not cls and issubclass(t, Lazy) for t in types):
            return NotImplemented  # a gradient's
        if torch.is_inference_mode_enabled():
            # There, composite operations such as reshape come here before they are taken apart.
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in _COMMUTES and type(args[0]) is not cls:
            args = (args[1], args[0])
        z: Any = args[0] if args else None
        if type(z) is cls:
            # Views of an ordinary tensor are ordinary, in inference mode too.
            ordinary = torch.is_inference_mode_enabled() and not z.is_inference()
            with torch.inference_mode(False) if ordinary else _NOTHING:
                made = z._lazily(func, args, kwargs)
            if made is not None:
                return made
        return run_on_values(func, args, kwargs)

    def _lazily(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation without values; None if it needs them."""
        op = Op(func, args[1:], kwargs)
        if func in VIEWS:
            return self._viewed(op)
        if func in SHAPED_LIKE:
            return self._filled(func, args, kwargs)
        if self._cell.changed or self._class_dim is None:
            return None
        if func in SCALES_IN_PLACE:
            return self._scaled_in_place(SCALES_IN_PLACE[func], args[1])
        if func in ROWS:
            return self._selected(op)
        if func is aten.add.Tensor and type(args[1]) is DeferredLogits:
            return self._plus(args[1], kwargs)
        if not self._stays(func, args, kwargs):
            return None
        if func in SCALES:
            op = Op(func, (number_of(args[1]),))
        elif func is aten.add.Tensor:
            op = Op(func, (args[1].clone(),))  # its values are those of now
        device = kwargs.get("device") or self._known[1]
        # Any function of each element keeps the order of dimensions as a clone does.
        shaped = op if func in COPIES or func in _SOFTMAXES else Op(aten.clone.default)
        size, strides, _, dtype = self._after(shaped)
        return self._expressed(op, (size, strides, 0), self._class_dim, dtype, device)

    def _expressed(self, op: Op, geometry: Geometry, class_dim: Any, dtype: torch.dtype, device: Any) -> Any:
        """Return the logits of an operation on these."""
        base, seen = self._cell.node, self._geometry
        node = Node(base.sources, geometry, lambda: op(base.view(seen)))
        plan = self._planned()
        node.plan = None if plan is None else plan.after(op, geometry[0], node.key)
        return self._of_node(node, class_dim, dtype, device)

    def _stays(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the result has lazy values: an operation on each row by itself that a loss may express."""
        if func in COPIES:
            dtype = kwargs.get("dtype") or self.dtype
            return dtype.is_floating_point
        if func in SCALES:
            factor = number_of(args[1])
            return factor is not None and math.isfinite(factor) and factor != 0 and not kwargs
        if func in _SOFTMAXES:
            return args[1] % self.ndim == self._class_dim
        if func is aten.add.Tensor:
            return not kwargs and self._is_bias(args[1])
        return func in (aten.tanh.default, aten.exp.default, aten.neg.default)

    def _is_bias(self, x: Any) -> bool:
        """Whether adding x is what a bias of the head does: a constant for each id of the vocabulary."""
        dtypes = {source.dtype for source in self._cell.node.sources}
        plain = type(x) in PLAIN and not x.requires_grad and {x.dtype, self.dtype} == dtypes and x.device == self.device
        return (
            plain
            and 0 < x.ndim <= self.ndim
            and x.numel() == x.shape[-1] == self.shape[-1] == self.shape[self._class_dim or 0]
            and self._class_dim == self.ndim - 1
        )

    def _viewed(self, op: Op) -> Any:
        if op.func in RESHAPES and tuple(op.args[0]) == tuple(self._geometry[0]):  # hooks return `x.view_as(x)`
            op = Op(aten.alias.default)
        geometries = after(op, self._geometry)
        in_rows: Any = geometries
        if self._in_rows is not self._geometry:
            try:
                in_rows = None if self._in_rows is None else after(op, self._in_rows)
            except RuntimeError:  # a reshape that merges the vocabulary with other dimensions
                in_rows = None
        if op.func in SPLITS:
            pairs = zip(geometries, in_rows or [None] * len(geometries), strict=True)
            return [self._view(geometry, rows, op) for geometry, rows in pairs]
        return self._view(geometries, in_rows, op)

    def _view(self, geometry: Geometry, in_rows: Geometry | None, op: Op) -> Any:
        made = self._made(self._cell, geometry, in_rows, *self._known)
        if made._class_dim is None and math.prod(geometry[0]):
            # No loss takes such a view, so its reader wants values. They are computed once, for later readers too.
            self._ask(op.func.overloadpacket.__name__)
            self._cell.values()
        return made

    def _selected(self, op: Op) -> Any:
        """Return selected rows, such as `z[mask]`; None if the selection reads the dimension of the vocabulary."""
        if self._class_dim != self.ndim - 1 or not _selects_rows(op, self.ndim):
            return None
        one = torch.empty((), device=self.device, dtype=torch.bool).expand(self.shape[:-1])
        size = torch.Size((*op(one).shape, self.shape[-1]))
        # A copy of the index: its values are those of now.
        frozen = Op(op.func, tree_map_only(Tensor, Tensor.clone, op.args), op.kwargs)
        return self._expressed(frozen, (size, contiguous(size), 0), len(size) - 1, *self._known)

    def _plus(self, other: DeferredLogits, kwargs: dict[str, Any]) -> Any:
        """Return the sum of two heads' logits, as of a layer and its adapter."""
        a, b = self._planned(), other._planned()
        return None if kwargs or other._cell.changed else self._joined(torch.add, other, a and b and a.plus(b))

    def _joined(self, function: Any, other: DeferredLogits, plan: Plan | None) -> Any:
        """Return `function` of these logits and others, element by element; None if they do not fit."""
        if other.shape != self.shape or other._class_dim != self._class_dim or other.device != self.device:
            return None
        size, dtype = self._geometry[0], torch.promote_types(self.dtype, other.dtype)
        parts = [(z._cell.node, z._geometry) for z in (self, other)]
        sources = dict.fromkeys((*self._cell.node.sources, *other._cell.node.sources))
        node = Node(tuple(sources), (size, contiguous(size), 0), lambda: function(*(n.view(g) for n, g in parts)), plan)
        assert self._class_dim is not None
        return self._of_node(node, self._class_dim, dtype, self.device)

    def _scaled_in_place(self, func: Any, factor: Any) -> Any:
        """Scale all logits of a cell, and with them their views; None if some of them are left out."""
        cell, number = self._cell, number_of(factor)
        base = cell.node
        if number is None or not math.isfinite(number) or number == 0 or cell.real is not None:
            return None
        if self.numel() != math.prod(base.geometry[0]) or self._geometry[1:] != (contiguous(self._geometry[0]), 0):
            return None
        op = Op(func, (number,))
        cell.node = Node(base.sources, base.geometry, lambda: op(base.value()))
        cell.node.plan = base.plan and base.plan.after(op, base.plan.shape, cell.node.key)
        return self

    def _set_data(self, data: Tensor) -> None:
        """`z.data = data`: these logits, and not those that share their memory, have other values."""
        real = values(data).detach()
        if real.shape != self.shape or real.dtype != self.dtype or real.device != self.device:
            raise RuntimeError(
                f"deferred logits: z.data must be set to a tensor like z, {tuple(self.shape)} {self.dtype} on "
                f"{self.device}, got {tuple(real.shape)} {real.dtype} on {real.device}"
            )
        node = Node(self._cell.node.sources, (self._geometry[0], real.stride(), 0), real.clone)
        self._cell, self._geometry = Cell(node, self._cell.n_ids), node.geometry
        self._cell.real, self._cell.changed = real, True

    def __repr__(self) -> str:  # type: ignore[override]
        state = "computed" if self.is_computed else "not computed"
        return f"DeferredLogits({tuple(self.shape)}, {self.dtype}, {self.device}, {state})"

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else format(self._value(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor().__reduce_ex__(protocol)


class _Values(torch.autograd.Function):
    """Real logits in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, z: DeferredLogits) -> Tensor:
        return z._memory()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def _differentiated(func: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `torch.autograd.grad` by the graph edges of lazy inputs.

    torch calls `__torch_function__` of a lazy input, which runs the call inside `without_torch_function`. In there, a
    hook of the graph that reads a `LazyGradient` would not reach its `__torch_function__`. Edges are no tensors.
    """
    with without_torch_function():
        one = isinstance(inputs, Tensor)
        edges = [get_gradient_edge(x) if isinstance(x, Lazy) else x for x in ([inputs] if one else inputs)]
    if not any(isinstance(x, Lazy) for x in tree_leaves((outputs, args, kwargs))):
        return func(outputs, edges, *args, **kwargs)
    with without_torch_function():
        return func(outputs, edges, *args, **kwargs)


# Functions with a lazy result, which autograd saves for their backward.
_SAVE_RESULT = {
    getattr(owner, name)
    for owner in (torch, Tensor, F, torch.special)
    for name in ("log_softmax", "softmax", "tanh", "exp")
    if hasattr(owner, name)
}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
# What the caller asked for, innermost last: names for the log.
_ASKING: list[str] = []
_COMMUTES = {aten.add.Tensor, aten.mul.Tensor}
_FUNCTION = types.FunctionType

# Functions of torch -> what computes them of deferred logits; filled by `rules.py`.
RULES: dict[Any, Any] = {}


# The functions and methods of torch, by name, where nobody had replaced them when this file was imported.
_STOCK: dict[Any, dict[str, Any]] = {
    Tensor: dict(vars(Tensor.__base__)),
    F: {name: f for name, f in vars(F).items() if type(f) is _FUNCTION and f.__globals__ is vars(F)},
}


def _wrapped_function(func: Any) -> Any:
    """Return torch's own function, if `func` is a wrapper that somebody put in its place; else `func`.

    `F.cross_entropy` looks its own name up in its module, and passes what it finds to `__torch_function__`; methods in
    C do so in `torch.Tensor`. If somebody replaced that name, they pass the wrapper, which is running already: to run
    it again would count or change things twice.
    """
    for owner, stock in _STOCK.items():
        for name, function in vars(owner).items():
            if function is func and name in stock:
                return stock[name]
    return func


def _class_dim(in_rows: Geometry, n_ids: int) -> int | None:
    """Return the dimension of the vocabulary, whole or from its first id, in a view of rows of `n_ids` ids each."""
    size, strides, offset = in_rows
    found = None
    for i, (n, stride) in enumerate(zip(size, strides, strict=True)):
        if stride == 1 and 0 < n <= n_ids and (n > 1 or found is None or size[found] == 1):
            found = i
        elif n > 1 and stride % n_ids:
            return None
    return found if offset % n_ids == 0 else None


def _selects_rows(op: Op, ndim: int) -> bool:
    if op.func is aten.index_select.default:
        return op.args[0] % ndim < ndim - 1
    used = sum(x.ndim if x is not None and x.dtype in (torch.bool, torch.uint8) else 1 for x in op.args[0])
    return used < ndim or (used == ndim and op.args[0][-1] is None)


_LOGGED: set[tuple[str, str, int]] = set()


def _log_use(source: Source, name: str) -> str:
    """Say once for each place that it made a head compute its logits; return the place."""
    frame = caller_outside("liger_chunked", "torch")
    name = name.strip("_")
    place = (name, frame.f_code.co_filename, frame.f_lineno)
    asked_by = f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}"
    if place not in _LOGGED:
        _LOGGED.add(place)
        hidden: Any = source.tensors[0]
        size = hidden.shape[:-1].numel() * source.n_ids * source.dtype.itemsize / 2**20
        # In an evaluation, a metric that reads logits is nothing to warn of.
        _LOGGER.log(
            logging.WARNING if source.grad else logging.INFO,
            "logits of %s were computed (%.0f MiB) for %s. Fused losses need none; this line comes once for each place",
            source.name, size, asked_by,
        )  # fmt: skip
    return asked_by
