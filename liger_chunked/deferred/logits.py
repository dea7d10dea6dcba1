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
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from liger_chunked.deferred.lazy import (
    PLAIN,
    READS_MEMORY,
    RESHAPES,
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
from liger_chunked.deferred.sharded import is_freed
from liger_chunked.engine.hooks import isolated
from liger_chunked.private import tree_leaves, version_of, without_torch_function
from liger_chunked.types import Head, LogitOptions, StandIn

_LOGGER = logging.getLogger("liger_chunked")

# Views: the result shares the memory.
SAME_SHAPE_VIEWS = {aten.alias.default, aten.detach.default}
VIEWS = SAME_SHAPE_VIEWS | {
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.slice.Tensor, aten.select.int,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default, aten.transpose.int, aten.t.default,
    aten.permute.default, aten.expand.default,
}  # fmt: skip
# Copies with the same values for each row.
COPIES = {aten.clone.default, aten._to_copy.default}
ROWS = {aten.index.Tensor, aten.index_select.default}
SCALES = {aten.mul.Tensor: "mul", aten.mul.Scalar: "mul", aten.div.Tensor: "div", aten.div.Scalar: "div"}
SCALES_IN_PLACE = {
    aten.mul_.Tensor: aten.mul.Tensor, aten.mul_.Scalar: aten.mul.Scalar,
    aten.div_.Tensor: aten.div.Tensor, aten.div_.Scalar: aten.div.Scalar,
}  # fmt: skip
_ELEMENTWISE = {
    aten.clone.default, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.tanh.default,
    aten.exp.default, aten.neg.default, aten.add.Tensor,
}  # fmt: skip
# The backward of these reads values: a lazy gradient passes them if it is already multiplied by their derivative.
CURVES = {aten.tanh.default, aten._log_softmax.default, aten._softmax.default, aten.exp.default}


_NOTHING = nullcontext()


class Source:
    """One call of a linear layer: `hidden @ weight.T + bias`, not computed.

    It holds tensors outside of the autograd graph, so that kept logits do not keep the graph.

    Attributes:
        needs: which of hidden states, weight and bias have a gradient.
        settings: the `Deferral` of the layer.
        asked_by: what needed real logits, and where; None if nothing did.
        withheld: cross entropies return 0 (`Request.withhold`). `gave_zero`: one did.
        holds_gradient: a loss keeps its gradient of the weight until its backward: a second one would double that.
        n_ids: how many logits a row has. `cells`: all memory of logits that were made of this call.
        passes: statistics of rows that were computed, by what they are of (`rules.py`).
        owner, merged: the layer of PEFT around this one, and the adapters that were merged into the weight, which PEFT
            does through `weight.data`, unnoticed by autograd.
        forward: computes the real product of a layer that is no plain `nn.Linear`; else None.
        dequantize: returns the weight of a quantized layer, from its tensor and the dtype of hidden states; else None.
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
                "before the backward); or get logits at once: model(..., skip_logits=False), or handle.remove() of "
                "defer_logits"
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
    """An expression: a source's product, or an operation on a view of another expression.

    Attributes:
        source: of a product; else None.
        base, views, op: `op(views(base))`.
        other: what `op` adds: a second expression.
        n_ids: how many logits a row has.
        real: its values, once they were read.
    """

    __slots__ = ("base", "n_ids", "op", "other", "real", "source", "views")

    def __init__(
        self,
        source: Source | None = None,
        base: Node | None = None,
        views: tuple[Op, ...] = (),
        op: Op | None = None,
        other: DeferredLogits | None = None,
        n_ids: int = 0,
    ) -> None:
        self.source, self.base, self.views, self.op, self.n_ids = source, base, views, op, n_ids
        self.other = None if other is None else (other._cell.node, other._views)
        self.real: Tensor | None = None

    def value(self) -> Tensor:
        if self.real is not None:
            return self.real
        if self.base is None:
            assert self.source is not None
            self.real = self.source.product()  # every other expression starts with it
            return self.real
        assert self.op is not None
        x = seen(self.base.value(), self.views)
        if self.other is not None:
            node, views = self.other
            return self.op.func(x, seen(node.value(), views), *self.op.args, **self.op.kwargs)
        x = self.op(x)
        return x.contiguous() if self.op.func in ROWS else x  # as the stand-in says

    def sources(self) -> Iterator[Source]:
        """Yield the sources, first that of the layer itself, then those of adapters."""
        if self.source is not None:
            yield self.source
        if self.base is not None:
            yield from self.base.sources()
        if self.other is not None:
            yield from self.other[0].sources()


def seen(x: Tensor, views: tuple[Op, ...]) -> Tensor:
    for view in views:
        x = view(x)
    return x


class Cell:
    """The memory of logits and of all their views: an expression, or real values."""

    __slots__ = ("__weakref__", "changed", "node", "real")

    def __init__(self, node: Node) -> None:
        self.node, self.changed = node, False
        self.real: Tensor | None = None
        next(node.sources()).cells.append(weakref.ref(self))

    def values(self) -> Tensor:
        if self.real is None:
            self.real = self.node.real = self.node.value()
        return self.real

    def own_values(self) -> Tensor:
        """Return values that may be written: copies that were made before get theirs first."""
        if not self.changed:
            self.changed = True
            for source in self.node.sources():
                for reference in list(source.cells):
                    if (cell := reference()) is not None and cell is not self:
                        cell.values()
        real = self.values()
        node: Node | None = self.node
        while node is not None:
            if node.real is not None and _share_memory(node.real, real):
                node.real = None
            node = node.base
        return real


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        type(a) is Tensor and type(b) is Tensor and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    )


class DeferredLogits(Lazy, StandIn):
    """Logits (..., V) of a head that computes them only if they are needed.

    A head returns them to a model's forward while `defer_logits` or `apply_liger_kernel` is active. They are a
    `torch.Tensor` in the autograd graph: hooks, `retain_grad`, wrappers and checkpoints work as with any other.
    `F.cross_entropy`, `F.nll_loss`, `F.kl_div`, `gather` with `log_softmax` or `logsumexp`, `argmax`, and the mean or
    sum over the vocabulary are fused: no logits exist, also after slices, views, casts, products with numbers, `tanh`,
    and an added bias. Every other use gets the real logits: right, computed once, at the price of their memory; a line
    in the log names the first such use.
    """

    _cell: Cell
    _views: tuple[Op, ...]
    _class_dim: int | None

    @classmethod
    def _make(
        cls,
        cell: Cell,
        views: tuple[Op, ...],
        geometry: Any,
        dtype: torch.dtype,
        class_dim: int | None,
        device: torch.device,
    ) -> Any:
        size, strides, offset = geometry
        made = cls._wrap(size, strides, offset, dtype, device)
        # `_class_dim`: the dimension of the vocabulary; None if it is no dimension of its own any more.
        made._cell, made._views, made._class_dim = cell, views, class_dim
        return made

    @classmethod
    def _of(cls, source: Source, n_ids: int) -> Any:
        """Return the result of a layer's call."""
        hidden = source.tensors[0]
        assert hidden is not None
        source.n_ids = n_ids
        size = (*hidden.shape[:-1], n_ids)
        cell = Cell(Node(source, n_ids=n_ids))
        return cls._make(cell, (), (size, contiguous(size), 0), source.dtype, len(size) - 1, hidden.device)

    # What a loss and a reader may ask

    @property
    def is_computed(self) -> bool:
        """Whether the real logits exist: something asked for them."""
        return self._cell.changed or any(source.asked_by is not None for source in self._cell.node.sources())

    @property
    def is_modified(self) -> bool:
        """Whether real logits were changed in place, so that no transform describes them."""
        return self._cell.changed

    @property
    def asked_by(self) -> str | None:
        """What asked for real logits, and where; None if nothing did."""
        return next((s.asked_by for s in self._cell.node.sources() if s.asked_by is not None), None)

    @property
    def gave_zero(self) -> bool:
        """Whether a cross entropy of these logits was withheld: it returned 0."""
        return any(source.gave_zero for source in self._cell.node.sources())

    def tensor(self) -> Tensor:
        """Return the real logits, in the autograd graph. The head computes them once, for all that need them."""
        with without_torch_function():
            return _Values.apply(self)

    def logit_options(self, ignore_index: int = -100) -> LogitOptions:
        """Return the transform of these logits, as a loss takes it; ValueError if no loss can express them."""
        return METHODS["logit_options"](self, ignore_index)

    def run(self, compute: Callable[[Head, Tensor], Any]) -> Any:
        """Return `compute(head, hidden_states)`, a loss in place of these logits.

        `hidden_states` (..., H) are the rows of these logits. `head` is what multiplies them, adapters too. Hooks on
        the way from the head to these logits see a gradient without values, and may multiply it by a number.
        """
        return METHODS["run"](self, compute)

    def statistics(self, target: Tensor, *outputs: str) -> dict[str, Tensor]:
        """Return statistics of each row, as `linear_token_stats` does, in one pass and without logits.

        Later calls of `statistic`, `logsumexp`, `mean` and `argmax` reuse them.

        Args:
            target: (...) ids, one for each row of the logits (..., V). None is ignored.
            outputs: names of fields of `TokenStats`.

        Returns:
            Tensors (...) by name, in the dtype of the statistics, on the device of the logits.

        Raises:
            ValueError: no loss can express these logits.
        """
        return METHODS["statistics"](self, target, *outputs)

    def statistic(self, name: str) -> Tensor:
        """Return one of `statistics` that needs no target, such as "entropy", without a pass if it is known already.

        Raises:
            ValueError: as `statistics`.
        """
        return METHODS["statistics"](self, None, name)[name]

    def value(self) -> Tensor:
        self._ask("tensor")
        return seen(self._cell.values(), self._views)

    def memory(self) -> Tensor:
        """Return the real logits for a reader of memory, who may write there too."""
        self._ask("memory")
        return seen(self._cell.own_values(), self._views)

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
            for source in self._cell.node.sources():
                if source.asked_by is None:
                    source.asked_by = _log_use(source, _ASKING[-1] if _ASKING else name)

    # Interception

    @classmethod
    @outside_graphs
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in RULES and type(func) is _FUNCTION and not func.__globals__["__name__"].startswith("torch."):
            func = _wrapped_function(func)
        rule = RULES.get(func)
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
        if func in _SPLITS:
            return [self._viewed(part) for part in _SPLITS[func](self, *args[1:], **kwargs)]
        if func in SHAPED_LIKE:
            return self._filled(func, args, kwargs)
        if self._cell.changed or self._class_dim is None:
            return None
        if func is aten.argmax.default:
            return METHODS["argmax"](self, *args[1:], **kwargs)
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
        size, strides, _, dtype = (*self._geometry, self._known[0]) if func in _ELEMENTWISE else self._after(op)
        if func in _ELEMENTWISE and strides != contiguous(size):
            # Any function of each element keeps the order of dimensions as a clone does.
            like = op if func is aten.clone.default else Op(aten.clone.default)
            size, strides, _, dtype = self._after(like)
        geometry = size, strides, 0
        device = kwargs.get("device") or self._known[1]
        return self._make(Cell(self._node(op)), (), geometry, dtype, self._class_dim, device)

    def _node(self, op: Op, other: DeferredLogits | None = None) -> Node:
        assert self._class_dim is not None
        return Node(None, self._cell.node, self._views, op, other, self._geometry[0][self._class_dim])

    def _stays(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the result has lazy values: an operation on each row by itself that a loss may express."""
        if func in COPIES:
            dtype = kwargs.get("dtype") or self.dtype
            return dtype.is_floating_point
        if func in SCALES:
            factor = number_of(args[1])
            return factor is not None and math.isfinite(factor) and factor != 0 and not kwargs
        if func in (aten._log_softmax.default, aten._softmax.default):
            return args[1] % self.ndim == self._class_dim
        if func is aten.add.Tensor:
            return not kwargs and self._is_bias(args[1])
        return func in (aten.tanh.default, aten.exp.default, aten.neg.default)

    def _is_bias(self, x: Any) -> bool:
        """Whether adding x is what a bias of the head does: a constant for each id of the vocabulary."""
        dtypes = {source.dtype for source in self._cell.node.sources()}
        plain = type(x) in PLAIN and not x.requires_grad and {x.dtype, self.dtype} == dtypes and x.device == self.device
        return (
            plain
            and 0 < x.ndim <= self.ndim
            and x.numel() == x.shape[-1] == self.shape[-1] == self.shape[self._class_dim or 0]
            and self._class_dim == self.ndim - 1
        )

    def _viewed(self, op: Op) -> Any:
        size, strides, offset, dtype = self._after(op)
        if op.func in RESHAPES and size == self._geometry[0]:  # hooks of frameworks return `x.view_as(x)`
            op = Op(aten.alias.default)
        class_dim = self._class_dim
        if class_dim is not None:
            class_dim = class_dim_after(op, self._geometry[0], class_dim, size)
        if class_dim is None and math.prod(size):
            # No loss can use it: its reader wants values, and so do later ones of these logits.
            self._ask(op.func.overloadpacket.__name__)
            self._cell.values()
        return self._make(self._cell, (*self._views, op), (size, strides, offset), dtype, class_dim, self._known[1])

    def _selected(self, op: Op) -> Any:
        """Return selected rows, such as `z[mask]`; None if the selection reads the dimension of the vocabulary."""
        if self._class_dim != self.ndim - 1 or not _selects_rows(op, self.ndim):
            return None
        one = torch.empty((), device=self.device, dtype=torch.bool).expand(self.shape[:-1])
        size = (*op(one).shape, self.shape[-1])
        # A copy of the index: its values are those of now.
        frozen = Op(op.func, _copied(op.args), op.kwargs)
        cell = Cell(self._node(frozen))
        return self._make(cell, (), (size, contiguous(size), 0), self.dtype, len(size) - 1, self.device)

    def _plus(self, other: DeferredLogits, kwargs: dict[str, Any]) -> Any:
        """Return the sum of two heads' logits, as of a layer and its adapter."""
        if (
            kwargs
            or other._cell.changed
            or other.shape != self.shape
            or other._class_dim != self._class_dim
            or other.device != self.device
        ):
            return None
        dtype = torch.promote_types(self.dtype, other.dtype)
        size = self._geometry[0]
        cell = Cell(self._node(Op(aten.add.Tensor), other))
        return self._make(cell, (), (size, contiguous(size), 0), dtype, self._class_dim, self.device)

    def _scaled_in_place(self, func: Any, factor: Any) -> Any:
        """Scale all logits of a cell, and with them their views; None if some of them are left out."""
        number = number_of(factor)
        whole = all(view.func in SAME_SHAPE_VIEWS | RESHAPES for view in self._views)
        if number is None or not math.isfinite(number) or number == 0 or not whole or self._cell.real is not None:
            return None
        cell = self._cell
        cell.node = Node(None, cell.node, (), Op(func, (number,)), None, cell.node.n_ids)
        return self

    def _set_data(self, data: Tensor) -> None:
        """`z.data = data`: these logits, and not those that share their memory, have other values."""
        real = values(data).detach()
        if real.shape != self.shape or real.dtype != self.dtype or real.device != self.device:
            raise RuntimeError(
                f"deferred logits: z.data must be set to a tensor like z, {tuple(self.shape)} {self.dtype} on "
                f"{self.device}, got {tuple(real.shape)} {real.dtype} on {real.device}"
            )
        self._cell, self._views = Cell(self._cell.node), ()
        self._cell.real, self._cell.changed = real, True

    def __repr__(self) -> str:  # type: ignore[override]
        state = "computed" if self.is_computed else "not computed"
        return f"DeferredLogits({tuple(self.shape)}, {self.dtype}, {self.device}, {state})"

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else format(self.value(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.requires_grad and not self.is_leaf:
            return (torch.empty(1, requires_grad=True) * 1).__deepcopy__(memo)  # raises what torch raises
        copied = self.value().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied


class _Values(torch.autograd.Function):
    """Real logits in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, z: DeferredLogits) -> Tensor:
        return z.memory()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def _differentiated(func: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `torch.autograd.grad` for places in the graph: hooks in it would not be asked about gradients otherwise."""
    with without_torch_function():
        one = isinstance(inputs, Tensor)
        edges = [get_gradient_edge(x) if isinstance(x, Lazy) else x for x in ([inputs] if one else inputs)]
    if not any(isinstance(x, Lazy) for x in tree_leaves((outputs, args, kwargs))):
        return func(outputs, edges, *args, **kwargs)
    with without_torch_function():
        return func(outputs, edges, *args, **kwargs)


# Functions with a lazy result, which autograd saves.
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
# What `rules.py` does for methods of this file, which knows no loss.
METHODS: dict[str, Any] = {}


def _wrapped_function(func: Any) -> Any:
    """Return the function of torch that a wrapper around it hides.

    `F.cross_entropy` asks `__torch_function__` with what has the name `cross_entropy` in its module, and methods of C
    with what has their name in `torch.Tensor`. Where somebody replaced it, that is the wrapper, which runs already:
    running it again would count or change things twice.
    """
    name = next((name for name, x in vars(Tensor).items() if x is func), None)
    if name is not None and hasattr(_Base, name):
        return getattr(_Base, name)
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    if frame is None or frame.f_globals is not vars(F):
        return func
    known = _STOCK.get(frame.f_code)
    if known is None:
        known = _STOCK[frame.f_code] = _FUNCTION(frame.f_code, frame.f_globals, frame.f_code.co_name)
    return known


_Base: Any = Tensor.__base__  # its methods of C
_BETWEEN = {__name__, "liger_chunked.deferred.lazy", "torch.overrides"}
_STOCK: dict[Any, Any] = {f.__code__: f for f in vars(F).values() if type(f) is _FUNCTION and f.__globals__ is vars(F)}


def _split_parts(z: Any, size: Any, dim: int = 0) -> list[Op]:
    n = z.shape[dim]
    sizes = [min(size, n - start) for start in range(0, n, size)] if isinstance(size, int) else list(size)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [Op(aten.slice.Tensor, (dim, start, start + length)) for start, length in zip(starts, sizes, strict=True)]


def _unbind_parts(z: Any, dim: int = 0) -> list[Op]:
    return [Op(aten.select.int, (dim, i)) for i in range(z.shape[dim])]


_SPLITS: dict[Any, Callable[..., list[Op]]] = {
    aten.split.Tensor: _split_parts,
    aten.split_with_sizes.default: _split_parts,
    aten.unbind.int: _unbind_parts,
}


def class_dim_after(op: Op, shape: Any, dim: int, result: Any) -> int | None:
    """Return where a view puts dimension `dim`, whole or (a slice) from its start; None if it is none of its own."""
    func, args, ndim = op.func, op.args, len(shape)
    if func in SAME_SHAPE_VIEWS:
        return dim
    if func in RESHAPES:
        if dim == ndim - 1 and result and result[-1] == shape[-1] and 0 not in result:
            return len(result) - 1
        before = math.prod(shape[:dim])
        ends = [i for i in range(len(result)) if math.prod(result[:i]) == before and result[i] == shape[dim]]
        ends = [i for i in ends if math.prod(result[i + 1 :]) == math.prod(shape[dim + 1 :])]
        return ends[-1] if ends and math.prod(shape) else None
    if func is aten.slice.Tensor:
        on = (args[0] if args else 0) % ndim
        start, step = (args[1] if len(args) > 1 else None), (args[3] if len(args) > 3 else 1)
        return dim if on != dim or (start in (None, 0) and step == 1 and result[dim] > 0) else None
    if func is aten.select.int:
        on = args[0] % ndim
        return None if on == dim else dim - (on < dim)
    if func is aten.unsqueeze.default:
        return dim + (args[0] % (ndim + 1) <= dim)
    if func is aten.squeeze.dim:
        on = args[0] % ndim
        gone = shape[on] == 1
        return None if gone and on == dim else dim - (gone and on < dim)
    if func is aten.squeeze.default:
        return None if shape[dim] == 1 else dim - sum(n == 1 for n in shape[:dim])
    if func is aten.expand.default:
        return dim + len(result) - ndim
    if func is aten.t.default:
        return dim if ndim < 2 else 1 - dim
    if func is aten.transpose.int:
        a, b = args[0] % ndim, args[1] % ndim
        return {a: b, b: a}.get(dim, dim)
    if func is aten.permute.default:
        return [i % ndim for i in args[0]].index(dim)
    return None


def _selects_rows(op: Op, ndim: int) -> bool:
    if op.func is aten.index_select.default:
        return op.args[0] % ndim < ndim - 1
    used = sum(x.ndim if x is not None and x.dtype in (torch.bool, torch.uint8) else 1 for x in op.args[0])
    return used < ndim or (used == ndim and op.args[0][-1] is None)


def _copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        [None if x is None else x.clone() for x in a]
        if isinstance(a, (list, tuple))
        else a.clone()
        if isinstance(a, Tensor)
        else a
        for a in args
    )


_LOGGED: set[tuple[str, str, int]] = set()


def _log_use(source: Source, name: str) -> str:
    """Say once for each place that it made a head compute its logits; return the place."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    name = name.strip("_")
    place = (name, frame.f_code.co_filename, frame.f_lineno)
    asked_by = f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}"
    if place not in _LOGGED:
        _LOGGED.add(place)
        hidden: Any = source.tensors[0]
        size = hidden.shape[:-1].numel() * source.n_ids * source.dtype.itemsize / 2**20
        _LOGGER.warning(
            "logits of %s were computed (%.0f MiB) for %s. Fused losses need none; this line comes once for each place",
            source.name, size, asked_by,
        )  # fmt: skip
    return asked_by


def _is_ours(module: str) -> bool:
    return module.startswith(("liger_chunked.", "torch.")) or module == "torch"
