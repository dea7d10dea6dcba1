"""Logits that have not been computed: the result of a head that defers, and how losses use it.

    hidden ──► lm_head(hidden)              DeferredLogits: the call, nothing computed
               .float(), / cap, tanh, * cap     recorded as a transform of the logits
               [:, :-1], .view(-1, V)           recorded as a selection of rows
    F.cross_entropy(deferred, labels)       the fused loss, inside the head's own call
    anything else                           the real logits, computed once and then used by all of these objects

`Call` is one call of a head. `DeferredLogits` is a view of it: each remembers the one that it was made from and the
operation, so that real logits go through the very operations that the caller wrote.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_chunked.calls import once
from liger_chunked.deferred import request
from liger_chunked.deferred.call import Call, Transform, name_of, version_of
from liger_chunked.deferred.inside import Compute
from liger_chunked.deferred.operations import Recorded, RecordedOperations, real
from liger_chunked.deferred.result_dtype import result_dtype
from liger_chunked.deferred.selection import Selection, is_index
from liger_chunked.device import is_gpu
from liger_chunked.engine import linear_token_stats
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss
from liger_chunked.private import tree_leaves, tree_map_only
from liger_chunked.types import Head, LogitOptions

_LOGGER = logging.getLogger("liger_chunked")

REASON = (
    "a head that defers its logits computes them, or a fused loss, outside of graphs; compile without fullgraph=True"
)

# Statistics that depend on no target.
_OF_ROWS = frozenset({"lse", "entropy", "mean_logits", "argmax"})

# No target is ignored: `gather` refuses negative ids.
_NO_TARGET = -(2**31)


class DeferredLogits(RecordedOperations):
    """Logits (..., V) of a head that computes them only if they are needed.

    A head returns it to a model's forward while `defer_logits` or `apply_liger_kernel` is active. The forward uses it
    like a tensor: `shape`, `dtype` and `device` are known. Slices and views of rows, casts, products with
    numbers, `tanh`, and an added bias are recorded. `F.cross_entropy`, `F.nll_loss` of `log_softmax`, `gather` with
    `log_softmax` or `logsumexp`, `argmax`, and the mean or sum over the vocabulary are fused: no logits exist. Every
    other use gets the real logits: right, computed once, at the price of their memory; a line in the log names the
    first such use.

    It is no `torch.Tensor`, as frameworks keep views and hooks of those. `tensor()` returns the real logits.
    """

    def __init__(
        self,
        call: Call,
        recorded: Recorded,
        made_from: DeferredLogits | None = None,
        operation: Callable[[Tensor], Tensor] | None = None,
        rows: Selection | None = None,
    ) -> None:
        self._call, self._recorded = call, recorded
        self.shape, self.dtype, self.device = recorded.shape, recorded.dtype, recorded.device
        # `operation` makes these logits from those of `made_from`. `rows` does the same with tensors (..., K), for any
        # K; None if no row moves.
        self._made_from, self._operation, self._rows = made_from, operation, rows
        self._in_place: list[Callable[[Tensor], Any]] = []
        self._derived = False  # whether another one was made from this
        self._real: Tensor | None = None
        self._real_version = 0
        # By name, and by whether they have a gradient. The first reader has the same tensors, and may change them in
        # place: with their version. Later readers get copies.
        self._stats: dict[tuple[str, bool], tuple[Tensor, int]] = {}
        # Tensors that the operation reads: their values are those of now.
        self._captured: list[tuple[Tensor, int]] = []
        call.stand_ins.append(weakref.ref(self))

    # What a tensor knows without values

    @property
    def requires_grad(self) -> bool:
        of_bias = self._recorded.extra_bias is not None and self._recorded.extra_bias.requires_grad
        return self._recorded.has_grad and (self._call.requires_grad or of_bias)

    @property
    def _vocabulary(self) -> int:
        return self.shape[self._recorded.class_dim]

    is_leaf = is_sparse = is_quantized = is_meta = is_nested = False
    layout = torch.strided

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def element_size(self) -> int:
        return self.dtype.itemsize

    @property
    def is_cuda(self) -> bool:
        return is_gpu(self.device)

    @property
    def is_computed(self) -> bool:
        """Whether the real logits exist: something asked for them."""
        return self._call.real is not None

    @property
    def is_modified(self) -> bool:
        """Whether real logits were changed in place, so that no transform describes them."""
        return any(x._real is not None and version_of(x._real) != x._real_version for x in self._origins())

    def _origins(self) -> Iterator[DeferredLogits]:
        """Yield these logits, those that they were made from, and so on to the head's result."""
        node: DeferredLogits | None = self
        while node is not None:
            yield node
            node = node._made_from

    @property
    def gave_zero(self) -> bool:
        """Whether a cross entropy of these logits was withheld: it returned 0."""
        return self._call.gave_zero

    @property
    def asked_by(self) -> str | None:
        """What asked for real logits, and where; None if nothing did."""
        return self._call.asked_by

    def logit_options(self, ignore_index: int = -100) -> LogitOptions:
        """Return the transform that was recorded, as a loss takes it."""
        return self._recorded.transform.options(ignore_index=ignore_index)

    def run(self, compute: Compute) -> Any:
        """Return `compute(head, hidden_states)`, called inside the head's call, in place of these logits.

        `hidden_states` (..., H) are the rows of these logits, `head` is what multiplies them.
        """
        return self._run(lambda head, rows, shape: compute(head, rows if shape is None else self.selected_rows(rows)))

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    nelement = numel

    def is_floating_point(self) -> bool:
        return True

    def is_complex(self) -> bool:
        return False

    def get_device(self) -> int:
        return -1 if self.device.index is None else self.device.index

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        state = "computed" if self.is_computed else "not computed"
        return f"DeferredLogits({tuple(self.shape)}, {self.dtype}, {self.device}, {state})"

    # Real logits

    def tensor(self) -> Tensor:
        """Return the real logits. The head computes them once, for this and every object made from the same call."""
        if self._real is None:
            if self._made_from is None:
                real = self._call.logits()
            else:
                self._check_captured()
                origin = self._made_from.tensor()
                with torch.inference_mode(self._call.inference), torch.set_grad_enabled(self._recorded.has_grad):
                    real = self._operation(origin)  # type: ignore[misc]
            with torch.inference_mode(self._call.inference), torch.set_grad_enabled(self._call.grad):
                for change in self._in_place:
                    change(real)
            self._real, self._real_version = real, version_of(real)
        return self._real

    def _check_captured(self) -> None:
        if any(version_of(x) != version for x, version in self._captured):
            raise RuntimeError(
                "a tensor that was added to deferred logits, or that indexes or scales them, was modified by an "
                "inplace operation before the logits were computed: use a copy of it, or compute the loss first"
            )

    def asked(self, name: str) -> Tensor:
        """Return the real logits, and say in the log, once for each place, that `name` needed them."""
        self._check_reader()
        if self._call.real is None:
            self._call.asked_by = _log_use(self, name)
        if _is_in_place(name):
            # Copies that were made before do not change with these logits; views do, as they share their memory.
            for reference in list(self._call.stand_ins):
                if (other := reference()) is not None:
                    other.tensor()
        return self.tensor()

    def _check_reader(self) -> None:
        """Raise RuntimeError inside the forward of a custom function of autograd, which would lose the gradient.

        `custom_functions.py` gives them real logits. Since torch 2.14 it cannot do so for a `MyFunction.apply` that was
        kept as an attribute before the first head deferred.
        """
        if torch.is_grad_enabled() or not self.requires_grad:
            return
        frame = sys._getframe(1)
        while (caller := frame.f_back) is not None:
            frame, names = caller, caller.f_code.co_varnames[: caller.f_code.co_argcount]
            context = frame.f_locals.get(names[0]) if len(names) > 1 else None
            if not isinstance(context, torch.autograd.function.FunctionCtx):
                continue
            of_torch = frame.f_globals.get("__name__", "").startswith("torch.")  # a checkpoint runs it with gradients
            if not of_torch and any(type(frame.f_locals.get(name)) is DeferredLogits for name in names):
                function = type(context).__name__.removesuffix("Backward")
                raise RuntimeError(
                    f"{function}.forward got logits that are not computed, and their gradient would be lost: its apply "
                    f"was kept before a head deferred. Write {function}.apply where it is called, or pass "
                    "logits.tensor()"
                )

    # Recorded operations

    def _made(
        self, operation: Callable[[Tensor], Tensor], rows: Selection | None = None, captured: Any = (), **changes: Any
    ) -> DeferredLogits:
        """Return the stand-in for `operation(logits)`, which reads the tensors in `captured`.

        `changes` are to `Recorded`.
        """
        self._derived = True
        has_grad = self._recorded.has_grad and torch.is_grad_enabled()
        recorded = replace(self._recorded, **{"has_grad": has_grad, **changes})
        made = DeferredLogits(self._call, recorded, self, operation, rows)
        made._captured = [(x, version_of(x)) for x in tree_leaves(captured) if isinstance(x, Tensor)]
        return made

    # Fused operations

    def _fuses(self, dim: int | None = None) -> bool:
        of_rows = self._ends_with_vocabulary and self.ndim > 1 and (dim is None or dim in (-1, self.ndim - 1))
        return of_rows and not self.is_computed

    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> Any:
        if self._fuses(dim) and not self._recorded.normalized and dtype in (None, torch.float32, torch.float64):
            known = result_dtype("log_softmax", self.dtype, self.device.type) if dtype is None else dtype
            # The dtype is fixed here, because the logits may be read later under another autocast.
            return self._made(lambda x: F.log_softmax(x, dim, dtype=known), dtype=known, normalized=True)
        return F.log_softmax(self.asked("log_softmax"), dim, dtype=dtype)

    def gather(self, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
        if self._fuses(dim) and is_index(index, (*self.shape[:-1], 1), self.device):
            target = index[..., 0]
            if self._recorded.normalized:
                return self._statistics(target, "logps")["logps"][..., None]
            # The usual next step is the difference to `logsumexp`, which the same pass gives.
            stats = self._statistics(target, "logps", "lse")
            return (stats["logps"] + stats["lse"]).to(self.dtype)[..., None]
        return self.asked("gather").gather(dim, real(index), sparse_grad=sparse_grad)

    def logsumexp(self, dim: Any, keepdim: bool = False) -> Any:
        if not isinstance(dim, int) or not self._fuses(dim) or self._recorded.normalized:
            return torch.logsumexp(self.asked("logsumexp"), dim, keepdim=keepdim)
        lse = self._statistic("lse").to(result_dtype("logsumexp", self.dtype, self.device.type))
        return lse[..., None] if keepdim else lse

    # Metrics that trainers log in each step: with real logits they would take more memory than the loss.

    def mean(self, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
        return self._reduced("mean", dim, keepdim, dtype)

    def sum(self, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
        return self._reduced("sum", dim, keepdim, dtype)

    def nansum(self, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
        total = self._reduced("sum", dim, keepdim, dtype)
        if total.isfinite().all():
            return total
        return torch.nansum(self.asked("nansum"), dim, keepdim, dtype=dtype)

    def _reduced(self, name: str, dim: Any, keepdim: bool, dtype: torch.dtype | None) -> Any:
        """Return the mean or the sum over the vocabulary (`dim` -1) or over everything (`dim` None)."""
        of_ids = isinstance(dim, int)
        takes_dtype = dtype is None or (dtype == torch.float32 and self.dtype != torch.float64)
        fuses = (of_ids or (dim is None and not keepdim)) and self._fuses(dim)
        has_no_rows = self.shape.numel() == 0
        if not fuses or not takes_dtype or self._recorded.normalized or has_no_rows:
            # A metric of a selection without rows is no reason to compute the logits of all rows.
            needs_none = has_no_rows and not self.is_computed and not self._wants_grad
            real = torch.empty(self.shape, dtype=self.dtype, device=self.device) if needs_none else self.asked(name)
            dims = () if dim is None and not keepdim else (dim, keepdim)
            return getattr(real, name)(*dims, dtype=dtype)
        means = self._statistic("mean_logits")
        result = means if of_ids else means.mean()
        if name == "sum":
            result = result * (self._vocabulary if of_ids else self.numel())
        result = result.to(result_dtype(name, self.dtype, self.device.type) if dtype is None else dtype)
        return result[..., None] if keepdim else result

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Any:
        # Real logits round after each scale, which can make the largest two equal.
        rounds = self._recorded.transform != Transform() and self.dtype not in (torch.float32, torch.float64)
        if dim is not None and self._fuses(dim) and not rounds:
            argmax = self._statistic("argmax")
            return argmax[..., None] if keepdim else argmax
        return self.asked("argmax").argmax(dim, keepdim)

    def statistics(self, target: Tensor, *outputs: str) -> dict[str, Tensor]:
        """Return statistics of each row, as `linear_token_stats` does, in one pass and without logits.

        Later calls of `logsumexp`, `mean` and `argmax`, on these logits or on rows selected from them, reuse them.

        Args:
            target: (...) ids, one for each row of the logits (..., V). None is ignored.
            outputs: names of fields of `TokenStats`.

        Returns:
            Tensors (...) by name, in the dtype of the statistics, on the device of the logits.

        Raises:
            ValueError: the vocabulary is not the last dimension, or the logits are computed already (`is_computed`).
        """
        self._check_rows()
        return self._statistics(target, *outputs)

    def statistic(self, name: str) -> Tensor:
        """Return one of `statistics` that needs no target, such as "entropy", without a pass if it is known already.

        Raises:
            ValueError: as `statistics`.
        """
        self._check_rows()
        return self._statistic(name)

    def _check_rows(self) -> None:
        if not self._fuses() or self._recorded.normalized:
            raise ValueError(f"statistics are of rows of logits that are not computed yet, got {self!r}")

    def _statistic(self, name: str) -> Tensor:
        known = self._known(name, self._wants_grad)
        if known is not None:
            return known
        target = torch.zeros(self.shape[:-1], dtype=torch.long, device=self.device)
        return self._statistics(target, name)[name]

    @property
    def _wants_grad(self) -> bool:
        return torch.is_grad_enabled() and self._recorded.has_grad

    def _known(self, name: str, with_grad: bool) -> Tensor | None:
        """Return a statistic that was computed already, for these rows or for those that they were selected from."""
        for had_grad in (True,) if with_grad else (False, True):
            known, version = self._stats.get((name, had_grad), (None, 0))
            if known is not None and version_of(known) == version:
                return (known if with_grad else known.detach()).clone()
        origin = self._made_from
        if origin is None or not self._recorded.has_values_of(origin._recorded):
            return None
        found = origin._known(name, with_grad)
        return found if found is None or self._rows is None else self._rows(found[..., None])[..., 0]

    def _run(self, compute: Callable[[Head, Tensor, torch.Size | None], Any]) -> Any:
        """Return `compute(head, rows, shape)`, inside the head's call.

        `shape`: of a target for `rows`, if this only reshapes the rows of the call. These stay as they are then, in the
        layout in which a framework may have split them.
        """

        def inside(head: Head, hidden: Tensor) -> Any:
            if self._recorded.n_ids is not None:
                first = slice(self._recorded.n_ids)
                head = Head(head.weight[first], None if head.bias is None else head.bias[first])
            if self._recorded.extra_bias is not None:
                extra = self._recorded.extra_bias.to(hidden.device)
                head = Head(head.weight, extra if head.bias is None else head.bias + extra)
            shape = hidden.shape[:-1] if self._reshapes_rows else None
            rows = self.selected_rows(hidden) if shape is None else hidden
            if rows.ndim > 3:  # a loss takes a batch of sequences, or rows
                rows = rows.flatten(0, -2)
                shape = None if shape is None else rows.shape[:-1]
            return compute(head, rows, shape)

        self._check_reader()
        for origin in self._origins():
            origin._check_captured()
        with torch.set_grad_enabled(self._wants_grad):
            return self._call.run(inside)

    @property
    def _reshapes_rows(self) -> bool:
        return all(x._rows is None or isinstance(x._rows, functools.partial) for x in self._origins())

    def selected_rows(self, x: Tensor) -> Tensor:
        """Return the rows of x (..., K), like the hidden states of the call, that belong to these logits."""
        if self._made_from is not None:
            x = self._made_from.selected_rows(x)
        return x if self._rows is None else self._rows(x)

    def _options(self, **options: Any) -> LogitOptions:
        return self._recorded.transform.options(logits_budget=self._call.settings.logits_budget, **options)

    def _statistics(self, target: Tensor, *outputs: str) -> dict[str, Tensor]:
        options = self._options(ignore_index=_NO_TARGET)

        def compute(head: Head, rows: Tensor, shape: torch.Size | None) -> Any:
            ids = target.to(head.weight.device).reshape(rows.shape[:-1] if shape is None else shape)
            return linear_token_stats(
                head.weight,
                rows,
                ids,
                head.bias,
                outputs=outputs,
                softcap=options.softcap,
                logit_scale=options.logit_scale,
                ignore_index=options.ignore_index,
                logits_budget=options.logits_budget,
            )

        stats = self._run(compute)
        found = {name: self._call.as_computed_now(getattr(stats, name)) for name in outputs}
        out = {name: x.reshape(target.shape).to(self.device) for name, x in found.items()}
        of_rows = {name: x for name, x in out.items() if name in _OF_ROWS}
        self._stats.update({(name, self._wants_grad): (_own(x), version_of(x)) for name, x in of_rows.items()})
        return {
            name: x.to(self.dtype) if name == "logps" and self._recorded.normalized else x for name, x in out.items()
        }

    def cross_entropy(
        self,
        target: Any,
        dtype: torch.dtype,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        """Return `F.cross_entropy` of these logits in `dtype`; None if it takes real ones."""
        if self._call.withheld and isinstance(target, Tensor) and not target.is_floating_point():
            self._call.gave_zero = True
            return torch.zeros(target.shape if reduction == "none" else (), dtype=dtype, device=self.device)
        leading = [n for i, n in enumerate(self.shape) if i != self._recorded.class_dim % self.ndim]
        fits = self.ndim > 1 and self._recorded.class_dim % self.ndim == 1
        fits = fits and is_index(target, leading, self.device)
        if self.is_computed or not fits or reduction not in ("mean", "sum", "none"):
            return None
        accuracy = request.accuracy()
        settings = {
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "return_token_accuracy": accuracy is not None,
            **vars(self._options(ignore_index=ignore_index)),
        }
        loss_fn: Any = once(LigerFusedLinearCrossEntropyLoss, **settings)

        def compute(head: Head, rows: Tensor, shape: torch.Size | None) -> Any:
            ids = target.to(head.weight.device).reshape(rows.shape[:-1] if shape is None else shape)
            return loss_fn(head.weight, rows, ids, head.bias, ce_weight=weight)

        result = self._run(compute)
        if accuracy is not None:
            result, metrics = result
            accuracy.append(metrics.token_accuracy)
        result = self._call.as_computed_now(result)
        return result.reshape(target.shape if reduction == "none" else ()).to(self.device, dtype)

    # Everything else

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Tensor, name):
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        return getattr(self.asked(name), name)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.asked("item assignment")[real(index)] = real(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.asked("deepcopy"), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.asked("pickle").__reduce_ex__(protocol)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.asked("numpy").__array__(*args, **kwargs)

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else format(self.asked("format"), spec)

    __hash__ = object.__hash__


def _own(x: Tensor) -> Tensor:
    """Return a statistic that is kept for other readers: a copy in inference mode, which counts no changes in place."""
    return x.clone() if x.is_inference() else x


def _delegated(name: str) -> Any:
    def method(self: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.asked(name), name)(*real(args), **real(kwargs))

    method.__name__ = name
    return method


# Dynamo meets stand-ins as objects of Python, and runs their methods as they are.
for _class in (RecordedOperations, DeferredLogits):
    for _name, _method in list(vars(_class).items()):
        if inspect.isfunction(_method) and _name != "__init__":
            setattr(_class, _name, torch.compiler.disable(_method, reason=REASON))

# Python looks these up on the class, so `__getattr__` does not see them.
for _name in (
    "abs and bool complex contains eq float floordiv ge gt iadd iand ifloordiv index int invert ior ipow isub ixor le "
    "lt matmul mod ne neg or pos pow rdiv reversed rfloordiv rmatmul rmod rpow rsub rtruediv sub xor"
).split():
    if hasattr(Tensor, f"__{_name}__") and f"__{_name}__" not in {*vars(RecordedOperations), *vars(DeferredLogits)}:
        setattr(DeferredLogits, f"__{_name}__", _delegated(f"__{_name}__"))


def _is_in_place(name: str) -> bool:
    """Whether a method, an operator or "item assignment" changes the tensor that it is called on."""
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")
    return name == "item assignment" or (name.endswith("_") and not name.startswith("_"))


# Names of torch's functions that have a method here: the function calls it with its own arguments.
_METHODS = frozenset(
    "add argmax bfloat16 chunk clone contiguous detach div divide double flatten float gather half index_select "
    "log_softmax logsumexp mean mul multiply nansum narrow numel permute reshape split squeeze sum tanh to transpose "
    "true_divide type_as unbind unsqueeze view".split()
)


@torch.compiler.disable(reason=REASON)  # type: ignore[untyped-decorator]
def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch that got a stand-in among its arguments."""
    name = getattr(func, "__name__", str(func))
    named = dict(kwargs)
    first = args[0] if args else named.pop("input", None)
    if type(first) is DeferredLogits and (not first.is_computed or first._call.withheld):
        if func is F.cross_entropy or func is F.nll_loss:
            result = _fused_loss(func, first, *args[1:], **named)
            if result is not None:
                return result
        elif not first.is_computed and name in _METHODS and named.get("dim", 0) is not None:
            named.pop("_stacklevel", None)
            try:
                bound = _signature(name).bind(first, *args[1:], **named)
            except TypeError:  # an argument that only real logits take, such as `out`
                pass
            else:
                return getattr(DeferredLogits, name)(*bound.args, **bound.kwargs)
    for x in _stand_ins((args, kwargs)):
        x.asked(name)
    return func(*real(args), **real(kwargs))


@functools.cache
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(getattr(DeferredLogits, name))


def _stand_ins(tree: Any) -> list[DeferredLogits]:
    found: list[DeferredLogits] = []
    tree_map_only(DeferredLogits, found.append, tree)
    return found


def _fused_loss(
    function: Any,  # `F.cross_entropy` or `F.nll_loss`, with the arguments of both
    logits: DeferredLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    takes_logps = function is F.nll_loss
    if size_average is not None or reduce is not None or logits._recorded.normalized != takes_logps:
        return None
    dtype = result_dtype(function.__name__, logits.dtype, logits.device.type)
    return logits.cross_entropy(target, dtype, weight, ignore_index, reduction, label_smoothing)


_LOGGED: set[tuple[str, str, int]] = set()


def _log_use(logits: DeferredLogits, name: str) -> str:
    """Say once for each place that it made a head compute its logits; return the place."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    place = (name, frame.f_code.co_filename, frame.f_lineno)
    asked_by = f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}"
    if place in _LOGGED:
        return asked_by
    _LOGGED.add(place)
    size = logits._call.hidden.shape[:-1].numel() * logits._vocabulary * logits._call.dtype.itemsize / 2**20
    _LOGGER.warning(
        "logits of %s were computed (%.0f MiB) for %s. Fused losses need none; this line comes once for each place",
        name_of(logits._call.head), size, asked_by,
    )  # fmt: skip
    return asked_by


def _is_ours(module: str) -> bool:
    return module.startswith(("liger_chunked.deferred", "torch.")) or module == "torch"
