"""Logits that have not been computed: what a head returns while it defers, and what losses make of it.

    hidden ──► lm_head(hidden)              DeferredLogits: the call, nothing computed
               .float(), / cap, tanh, * cap     recorded as a transform of the logits
               [:, :-1], .view(-1, V)           recorded as a selection of rows
    F.cross_entropy(deferred, labels)       the fused loss, inside the head's own call
    anything else                           the real logits, computed once and then used by all of these objects

`_Call` is one call of a head. `DeferredLogits` is a view of it: each remembers the one that it was made from and the
operation, so that real logits go through the very operations that the caller wrote.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import math
import numbers
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from liger_chunked.calls import once
from liger_chunked.deferred import request
from liger_chunked.deferred.inside import Compute, real_logits, run_inside
from liger_chunked.dtensor import any_dtensor
from liger_chunked.engine import linear_token_stats
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss
from liger_chunked.types import Head, LogitOptions, StandIn

_LOGGER = logging.getLogger("liger_chunked")

REASON = (
    "a head that defers its logits computes them, or a fused loss, outside of graphs; compile without fullgraph=True"
)

# A target that no one can ask for: `gather` and `nll_loss` have their own checks of an index.
_NO_TARGET = -(2**31)


@dataclass(frozen=True)
class Transform:
    """`outer * tanh(inner * z)`, or `inner * z` without `outer`, of logits z."""

    inner: float = 1.0
    outer: float | None = None

    def times(self, factor: float) -> Transform | None:
        """None: a loss cannot express the product."""
        if not math.isfinite(factor) or factor == 0:
            return None
        if self.outer is None:
            return Transform(self.inner * factor)
        return Transform(self.inner, self.outer * factor) if factor > 0 else None

    def tanh(self) -> Transform | None:
        return Transform(self.inner, 1.0) if self.outer is None else None

    def options(self, **options: Any) -> LogitOptions:
        """Return it as softcap and scale: `softcap * tanh(logit_scale * z / softcap)`."""
        if self.outer is None:
            return LogitOptions(logit_scale=self.inner, **options)
        return LogitOptions(softcap=self.outer, logit_scale=self.inner * self.outer, **options)


class Call:
    """One call of a head: its input, and the modes that were active when the model called it.

    The product runs at most once for real logits, and once for each loss, always as if it ran then: under the same
    autocast, grad mode and weights.
    """

    def __init__(self, head: nn.Module, hidden: Tensor, settings: Any) -> None:
        self.head, self.hidden, self.settings = head, hidden, settings
        device = hidden.device.type
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.autocast: tuple[str, torch.dtype, bool, bool] = (
            device,
            torch.get_autocast_dtype(device),
            torch.is_autocast_enabled(device),
            torch.is_autocast_cache_enabled(),
        )
        self.device = _device_of(head, hidden)
        self.tensors = _tensors_of(head)
        self.versions = [_version(x) for x in (hidden, *self.tensors.values())]
        self.real: Tensor | None = None
        self.asked_by: str | None = None  # what needed real logits
        self.withheld = False  # cross entropies return 0: the caller wants only what a forward adds to them

    @property
    def dtype(self) -> torch.dtype:
        _, dtype, enabled, _ = self.autocast
        return dtype if enabled and self.hidden.dtype != torch.float64 else self.hidden.dtype

    @property
    def requires_grad(self) -> bool:
        return self.grad and any(x.requires_grad for x in (self.hidden, *self.tensors.values()))

    @contextlib.contextmanager
    def _as_called(self, grad: bool) -> Iterator[None]:
        device, dtype, enabled, cached = self.autocast
        with contextlib.ExitStack() as modes:
            if self.inference and not torch.is_inference_mode_enabled():
                modes.enter_context(torch.inference_mode())
            if grad != torch.is_grad_enabled() and not self.inference:
                modes.enter_context(torch.set_grad_enabled(grad))
            now = (torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            if now != (dtype, enabled):
                modes.enter_context(torch.autocast(device, dtype, enabled=enabled, cache_enabled=cached))
            yield

    def _with_its_weights(self, run: Callable[[], Any]) -> Any:
        """Run with the tensors that the head had when it was called; RuntimeError if their values are gone."""
        now = _tensors_of(self.head)
        # accelerate's offloading puts new meta tensors in place of those that it takes away.
        same = now.keys() == self.tensors.keys() and all(
            now[name] is x or (x.is_meta and now[name].is_meta) for name, x in self.tensors.items()
        )
        versions = [_version(x) for x in (self.hidden, *self.tensors.values())]
        if versions != self.versions or (not same and any(map(_is_freed, self.tensors.values()))):
            what = "the hidden states" if versions[0] != self.versions[0] else "the weights"
            raise RuntimeError(
                f"{what} of {_name_of(self.head)} changed after the model called it, and its deferred logits were "
                "not computed before. Compute the loss, or read the logits, before the optimizer steps (and, with a "
                "head that a framework shards, inside the model's forward); or get logits at once: "
                "model(..., skip_logits=False), or handle.remove() of defer_logits"
            )
        if same:
            return run()
        # torch.func.functional_call had put other tensors in, and has taken them out again.
        return torch.func.functional_call(_Runner(self.head, run), {f"head.{n}": x for n, x in self.tensors.items()})

    def logits(self) -> Tensor:
        if self.real is None:
            with self._as_called(self.grad):
                self.real = self._with_its_weights(functools.partial(real_logits, self.head, self.hidden))
        return self.real

    def run(self, compute: Compute) -> Any:
        """Return `compute(head, hidden_states)`, called where the head would multiply."""
        with self._as_called(self.grad and torch.is_grad_enabled()):
            return self._with_its_weights(functools.partial(run_inside, self.head, self.hidden, compute))


class _Runner(nn.Module):
    def __init__(self, head: nn.Module, run: Callable[[], Any]) -> None:
        super().__init__()
        self.head, self.run = head, run

    def forward(self) -> Any:
        return self.run()


def _tensors_of(head: nn.Module) -> dict[str, Tensor]:
    if len(head._modules) == 0:  # most heads: without walking through modules
        own = {**head._parameters, **head._buffers}
        return {name: x for name, x in own.items() if x is not None}
    return {**dict(head.named_parameters(remove_duplicate=False)), **dict(head.named_buffers(remove_duplicate=False))}


def _device_of(head: nn.Module, hidden: Tensor) -> torch.device:
    """Return the device of the logits: with `device_map`, a hook of accelerate moves the hidden states there."""
    device = getattr(getattr(head, "_hf_hook", None), "execution_device", None)
    return hidden.device if device is None else torch.empty(0, device=device).device


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _is_freed(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.numel() > 0 and x.untyped_storage().nbytes() == 0


def _name_of(head: nn.Module) -> str:
    return f"the head ({type(head).__name__})"


Rows = Callable[[Tensor], Tensor]
Number = float  # in a class with a method of that name


class DeferredLogits(StandIn):
    """Logits (..., V) of a head that computes them only if they are needed.

    A model's forward gets it from its head while `defer_logits` or `apply_liger_kernel` is active, and uses it as the
    tensor that it stands for: `shape`, `dtype` and `device` are known. Slices and views of rows, casts, products with
    numbers, `tanh`, and an added bias are recorded. `F.cross_entropy`, `F.nll_loss` of `log_softmax`, and `gather`
    with `log_softmax` or `logsumexp` are fused: no logits exist. Every other use gets the real logits: right, computed
    once, at the price of their memory; a line in the log names the first such use.

    It is no `torch.Tensor`, as frameworks keep views and hooks of those. `tensor()` returns the real logits.
    """

    def __init__(
        self,
        call: Call,
        shape: torch.Size,
        dtype: torch.dtype,
        *,
        made_from: DeferredLogits | None = None,
        operation: Callable[[Tensor], Tensor] | None = None,
        rows: Rows | None = None,
        transform: Transform = Transform(),
        class_dim: int = -1,
        normalized: bool = False,
        has_grad: bool = True,
        extra_bias: Tensor | None = None,
        device: torch.device | None = None,
        n_ids: int | None = None,
    ) -> None:
        self._call, self.shape, self.dtype = call, shape, dtype
        self.device = call.device if device is None else device
        self._made_from, self._operation = made_from, operation
        self._rows = rows  # from rows of `made_from` to those of this; None: the same
        self._transform, self._class_dim = transform, class_dim
        self._normalized, self._has_grad, self._extra_bias = normalized, has_grad, extra_bias
        self._n_ids = n_ids  # of the first ids of the vocabulary, without the padding after them; None: all
        self._in_place: list[Callable[[Tensor], Any]] = []
        self._real: Tensor | None = None
        self._stats: dict[str, Tensor] = {}
        self._derived = False

    # What a tensor knows without values

    @property
    def requires_grad(self) -> bool:
        of_bias = self._extra_bias is not None and self._extra_bias.requires_grad
        return self._has_grad and (self._call.requires_grad or of_bias)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def _vocabulary(self) -> int:
        return self.shape[self._class_dim]

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_computed(self) -> bool:
        """Whether the real logits exist: something asked for them."""
        return self._call.real is not None

    @property
    def asked_by(self) -> str | None:
        """What asked for real logits, and where; None if nothing did."""
        return self._call.asked_by

    def logit_options(self, ignore_index: int = -100) -> LogitOptions:
        """Return the transform that was recorded, as a loss takes it."""
        return self._transform.options(ignore_index=ignore_index)

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
                with torch.set_grad_enabled(self._has_grad):
                    real = self._operation(self._made_from.tensor())  # type: ignore[misc]
            for change in self._in_place:
                change(real)
            self._real = real
        return self._real

    def asked(self, name: str) -> Tensor:
        """Return the real logits, and say in the log, once for each place, that `name` needed them."""
        if self._call.real is None:
            self._call.asked_by = _log_use(self, name)
        return self.tensor()

    # Recorded operations

    def _made(self, operation: Callable[[Tensor], Tensor], **changes: Any) -> DeferredLogits:
        """Return the result of `operation` on the logits, described by what it changes."""
        self._derived = True
        with_grad = torch.is_grad_enabled()
        made = {
            "shape": self.shape,
            "dtype": self.dtype,
            "transform": self._transform,
            "class_dim": self._class_dim,
            "normalized": self._normalized,
            "has_grad": self._has_grad and with_grad,
            "extra_bias": self._extra_bias,
            "device": self.device,
            "n_ids": self._n_ids,
            **changes,
        }
        return DeferredLogits(self._call, made_from=self, operation=operation, **made)

    def _selected(self, rows: Rows) -> DeferredLogits | None:
        """Return what `rows` makes of the logits. It works on tensors (..., K) like this one, for any K."""
        if not self._ends_with_vocabulary:
            return None
        like_rows = torch.empty((), device=self._call.hidden.device).expand(*self.shape[:-1], 1)  # of one element
        shape = torch.Size((*rows(like_rows).shape[:-1], self.shape[-1]))
        return self._made(rows, shape=shape, rows=rows)

    @property
    def _ends_with_vocabulary(self) -> bool:
        return self._class_dim == -1

    def _scaled(self, operation: Callable[[Tensor], Tensor], factor: Any) -> DeferredLogits | None:
        transform = None if self._normalized else self._transform.times(factor)
        if transform is None or self._extra_bias is not None:
            return None
        return self._made(operation, transform=transform)

    def mul(self, other: Any) -> Any:
        made = None if self.is_computed else self._scaled(lambda x: x * other, _number(other))
        return self.asked("mul") * _real(other) if made is None else made

    multiply = __mul__ = __rmul__ = mul

    def div(self, other: Any, *, rounding_mode: str | None = None) -> Any:
        made = None
        if not self.is_computed and rounding_mode is None:
            made = self._scaled(lambda x: x / other, _inverse(_number(other)))
        return self.asked("div").div(_real(other), rounding_mode=rounding_mode) if made is None else made

    divide = true_divide = __truediv__ = div

    def _scale_in_place(self, name: str, factor: Number, change: Callable[[Tensor], Any]) -> DeferredLogits:
        """Scale a stand-in that nothing was made from, so that nothing else changes with it."""
        scaled = None
        if not (self.is_computed or self._derived or self._normalized or self._made_from is not None):
            scaled = self._transform.times(factor)
        if scaled is None:
            change(self.asked(name))
        else:
            self._transform = scaled
            self._in_place.append(change)
        return self

    def mul_(self, other: Any) -> DeferredLogits:
        return self._scale_in_place("mul_", _number(other), lambda x: x.mul_(_real(other)))

    def div_(self, other: Any) -> DeferredLogits:
        return self._scale_in_place("div_", _inverse(_number(other)), lambda x: x.div_(_real(other)))

    __imul__, __itruediv__ = mul_, div_

    def tanh(self) -> Any:
        transform = self._transform.tanh()
        if self.is_computed or transform is None or self._normalized or self._extra_bias is not None:
            return self.asked("tanh").tanh()
        return self._made(torch.tanh, transform=transform)

    def add(self, other: Any, *, alpha: Any = 1) -> Any:
        if not self.is_computed and alpha == 1 and self._is_bias(other):
            return self._made(lambda x: x + other, extra_bias=other.reshape(-1))
        return torch.add(self.asked("add"), _real(other), alpha=alpha)

    __add__ = __radd__ = add

    def _is_bias(self, x: Any) -> bool:
        """Whether adding x is what a bias of the head does: a value for each id of the vocabulary."""
        untransformed = self._transform == Transform() and not self._normalized and self._extra_bias is None
        return (
            untransformed
            and self._ends_with_vocabulary
            and type(x) in (Tensor, nn.Parameter, nn.Buffer)
            and x.dtype == self.dtype
            and 0 < x.ndim <= self.ndim
            and x.numel() == x.shape[-1] == self.shape[-1]
        )

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_computed:
            return self.tensor().to(*args, **kwargs)
        # A tensor of no elements shows what the arguments mean.
        empty = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **{**kwargs, "copy": False})
        # Rounding to fewer bits, and float64 losses of other logits, are what the caller asks for.
        rounds = empty.dtype.itemsize < self.dtype.itemsize or empty.dtype == torch.float64 != self.dtype
        if not empty.is_floating_point() or rounds or kwargs.get("memory_format") is not None:
            return self.asked("to").to(*args, **kwargs)
        if (empty.dtype, empty.device) == (self.dtype, self.device) and not kwargs.get("copy"):
            return self
        return self._made(lambda x: x.to(*args, **kwargs), dtype=empty.dtype, device=empty.device)

    def float(self) -> Any:
        return self.to(torch.float32)

    def double(self) -> Any:
        return self.to(torch.float64)

    def half(self) -> Any:
        return self.to(torch.float16)

    def bfloat16(self) -> Any:
        return self.to(torch.bfloat16)

    def type_as(self, other: Any) -> Any:
        return self.to(other.dtype).to(other.device)

    def contiguous(self) -> Any:
        return self.tensor().contiguous() if self.is_computed else self

    def clone(self) -> Any:
        return self.tensor().clone() if self.is_computed else self._made(torch.clone)

    def detach(self) -> Any:
        return self.tensor().detach() if self.is_computed else self._made(torch.detach, has_grad=False)

    def __getitem__(self, index: Any) -> Any:
        made = None
        if not self.is_computed and self._ends_with_vocabulary:
            rows, n_ids = _row_index(index, self.shape)
            if rows is not None:
                made = self._selected(rows)
            elif n_ids is not None and self._may_drop_ids:
                made = self._made(lambda x: x[..., :n_ids], shape=torch.Size((*self.shape[:-1], n_ids)), n_ids=n_ids)
        return self.asked("indexing")[_real(index)] if made is None else made

    @property
    def _may_drop_ids(self) -> bool:
        """Whether ids at the end of the vocabulary may be left out: before a softmax, of a weight that is whole."""
        return not self._normalized and self._extra_bias is None and not any_dtensor(self._call.tensors.values())

    def _reshaped(self, name: str, size: Any) -> Any:
        size = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
        if not self.is_computed and all(isinstance(n, int) for n in size):
            shape = _reshaped(self.shape, size)
            if shape is not None and shape[-1] == self.shape[-1] and self._ends_with_vocabulary:
                rows = functools.partial(_as_rows, shape=shape[:-1])
                return self._made(rows, shape=shape, rows=rows)
        return getattr(self.asked(name), name)(*size)

    def view(self, *size: Any) -> Any:
        return self._reshaped("view", size)

    def reshape(self, *size: Any) -> Any:
        return self._reshaped("reshape", size)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        start, end = start_dim % max(1, self.ndim), end_dim % max(1, self.ndim)
        if not self.is_computed and start <= end < self.ndim - 1:
            return self.view(*self.shape[:start], self.shape[start : end + 1].numel(), *self.shape[end + 1 :])
        return self.asked("flatten").flatten(start_dim, end_dim)

    def squeeze(self, dim: int | None = None) -> Any:
        if (
            not self.is_computed
            and dim is not None
            and -self.ndim <= dim < self.ndim
            and dim % self.ndim < self.ndim - 1
        ):
            if self.shape[dim] != 1:
                return self
            return self.view(*self.shape[: dim % self.ndim], *self.shape[dim % self.ndim + 1 :])
        real = self.asked("squeeze")
        return real.squeeze() if dim is None else real.squeeze(dim)

    def unsqueeze(self, dim: int) -> Any:
        if not self.is_computed and -self.ndim <= dim + 1 <= self.ndim and dim % (self.ndim + 1) < self.ndim:
            dim %= self.ndim + 1
            return self.view(*self.shape[:dim], 1, *self.shape[dim:])
        return self.asked("unsqueeze").unsqueeze(dim)

    def transpose(self, dim0: int, dim1: int) -> Any:
        order = list(range(self.ndim))
        a, b = dim0 % self.ndim, dim1 % self.ndim
        order[a], order[b] = order[b], order[a]
        return self.permute(*order)

    def permute(self, *dims: Any) -> Any:
        dims = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
        order = [dim % self.ndim for dim in dims]
        classes = order.index(self._class_dim % self.ndim) if sorted(order) == list(range(self.ndim)) else None
        others = [] if classes is None else [i for i in order if i != self._class_dim % self.ndim]
        if not self.is_computed and classes == self.ndim - 1 and self._ends_with_vocabulary:
            return self._selected(lambda x: x.permute(*order))
        if self.is_computed or classes is None or others != sorted(others):
            return self.asked("permute").permute(*dims)
        shape = torch.Size(self.shape[i] for i in order)
        class_dim = -1 if classes == self.ndim - 1 else classes
        return self._made(lambda x: x.permute(*dims), shape=shape, class_dim=class_dim)

    @property
    def mT(self) -> Any:
        return self.transpose(-2, -1)

    def unbind(self, dim: int = 0) -> Any:
        if self.is_computed or self.ndim < 2 or dim % self.ndim != 0 or not self._ends_with_vocabulary:
            return self.asked("unbind").unbind(dim)
        return tuple(self[i] for i in range(self.shape[0]))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def _split(self, name: str, size: Any, dim: int) -> Any:
        if self.is_computed or self.ndim < 2 or dim % self.ndim == self.ndim - 1 or not self._ends_with_vocabulary:
            return getattr(self.asked(name), name)(size, dim)
        lengths = [len(x) for x in getattr(torch.arange(self.shape[dim]), name)(size)]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        before = (slice(None),) * (dim % self.ndim)
        parts = [(*before, slice(s, s + n)) for s, n in zip(starts, lengths, strict=True)]
        return tuple(self[part] for part in parts)

    def split(self, split_size: Any, dim: int = 0) -> Any:
        return self._split("split", split_size, dim)

    def chunk(self, chunks: int, dim: int = 0) -> Any:
        return self._split("chunk", chunks, dim)

    def narrow(self, dim: int, start: int, length: int) -> Any:
        before = (slice(None),) * (dim % self.ndim)
        index = (*before, slice(start, start + length))
        return self[index]

    # Fused operations

    def _fuses(self, dim: int | None = None) -> bool:
        of_rows = self._ends_with_vocabulary and self.ndim > 1 and (dim is None or dim in (-1, self.ndim - 1))
        return of_rows and not self.is_computed

    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> Any:
        if self._fuses(dim) and not self._normalized and dtype in (None, torch.float32, torch.float64):
            known = _dtype_of(F.log_softmax, self.dtype, self.device.type) if dtype is None else dtype
            return self._made(lambda x: F.log_softmax(x, dim, dtype=dtype), dtype=known, normalized=True)
        return F.log_softmax(self.asked("log_softmax"), dim, dtype=dtype)

    def gather(self, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
        if self._fuses(dim) and _is_index(index, (*self.shape[:-1], 1), self.device):
            target = index[..., 0]
            if self._normalized:
                return self._statistics(target, "logps")["logps"][..., None]
            # The usual next step is the difference to `logsumexp`, which the same pass gives.
            stats = self._statistics(target, "logps", "lse")
            self._stats["lse"] = stats["lse"]
            return (stats["logps"] + stats["lse"]).to(self.dtype)[..., None]
        return self.asked("gather").gather(dim, _real(index), sparse_grad=sparse_grad)

    def logsumexp(self, dim: Any, keepdim: bool = False) -> Any:
        if not isinstance(dim, int) or not self._fuses(dim) or self._normalized:
            return torch.logsumexp(self.asked("logsumexp"), dim, keepdim=keepdim)
        lse = self._known("lse")
        if lse is None:
            target = torch.zeros(self.shape[:-1], dtype=torch.long, device=self.device)
            lse = self._stats["lse"] = self._statistics(target, "lse")["lse"]
        lse = lse.to(_dtype_of(_logsumexp, self.dtype, self.device.type))
        return lse[..., None] if keepdim else lse

    def _known(self, name: str) -> Tensor | None:
        """Return a statistic that was computed already, for these rows or for those that they were selected from."""
        if name in self._stats:
            return self._stats[name]
        origin = self._made_from
        if origin is None or self._rows is None or self._has_grad != origin._has_grad:
            return None
        known = origin._known(name)
        return None if known is None else self._rows(known[..., None])[..., 0]

    def _run(self, compute: Callable[[Head, Tensor, torch.Size | None], Any]) -> Any:
        """Return `compute(head, rows, shape)`, inside the head's call.

        `shape`: of a target for `rows`, if this only reshapes the rows of the call. These stay as they are then, in the
        layout in which a framework may have split them.
        """

        def inside(head: Head, hidden: Tensor) -> Any:
            if self._extra_bias is not None:
                extra = self._extra_bias.to(hidden.device)
                head = Head(head.weight, extra if head.bias is None else head.bias + extra)
            if self._n_ids is not None:
                first = slice(self._n_ids)
                head = Head(head.weight[first], None if head.bias is None else head.bias[first])
            if self._reshapes_rows:
                return compute(head, hidden, hidden.shape[:-1])
            return compute(head, self.selected_rows(hidden), None)

        grad = torch.is_grad_enabled() and self._has_grad
        with torch.set_grad_enabled(grad):
            return self._call.run(inside)

    @property
    def _reshapes_rows(self) -> bool:
        node: DeferredLogits | None = self
        while node is not None:
            if node._rows is not None and not isinstance(node._rows, functools.partial):
                return False
            node = node._made_from
        return True

    def selected_rows(self, x: Tensor) -> Tensor:
        """Return the rows of x (..., K), like the hidden states of the call, that belong to these logits."""
        if self._made_from is not None:
            x = self._made_from.selected_rows(x)
        return x if self._rows is None else self._rows(x)

    def _options(self, **options: Any) -> LogitOptions:
        return self._transform.options(logits_budget=self._call.settings.logits_budget, **options)

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
        out = {name: getattr(stats, name).reshape(target.shape).to(self.device) for name in outputs}
        return {name: x.to(self.dtype) if name == "logps" and self._normalized else x for name, x in out.items()}

    def cross_entropy(
        self,
        target: Any,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: Number = 0.0,
        dtype: torch.dtype | None = None,
    ) -> Tensor | None:
        """Return `F.cross_entropy` of these logits; None if it takes real ones."""
        leading = [n for i, n in enumerate(self.shape) if i != self._class_dim % self.ndim]
        fits = self.ndim > 1 and self._class_dim % self.ndim == 1 and _is_index(target, leading, self.device)
        if self.is_computed or not fits or reduction not in ("mean", "sum", "none"):
            return None
        dtype = _dtype_of(_cross_entropy, self.dtype, self.device.type) if dtype is None else dtype
        if self._call.withheld:
            return torch.zeros(target.shape if reduction == "none" else (), dtype=dtype, device=self.device)
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
        self.asked("item assignment")[_real(index)] = _real(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.asked("deepcopy"), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.asked("pickle").__reduce_ex__(protocol)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.asked("numpy").__array__(*args, **kwargs)

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else format(self.asked("format"), spec)

    __hash__ = object.__hash__


def _delegated(name: str) -> Any:
    def method(self: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.asked(name.strip("_")), name)(*_real(args), **_real(kwargs))

    method.__name__ = name
    return method


# Dynamo meets stand-ins as objects of Python, and runs their methods as they are.
for _name, _method in list(vars(DeferredLogits).items()):
    if inspect.isfunction(_method) and _name != "__init__":
        setattr(DeferredLogits, _name, torch.compiler.disable(_method, reason=REASON))

# Python looks these up on the class, so `__getattr__` does not see them.
for _name in (
    "abs and bool complex contains eq float floordiv ge gt iadd iand ifloordiv index int invert ior ipow isub ixor le "
    "lt matmul mod ne neg or pos pow rdiv reversed rfloordiv rmatmul rmod rpow rsub rtruediv sub xor"
).split():
    if hasattr(Tensor, f"__{_name}__") and f"__{_name}__" not in vars(DeferredLogits):
        setattr(DeferredLogits, f"__{_name}__", _delegated(f"__{_name}__"))


def _real(x: Any) -> Any:
    """Replace the stand-ins in a tree by real logits."""
    return x.tensor() if type(x) is DeferredLogits else tree_map_only(DeferredLogits, lambda d: d.tensor(), x)


def _number(x: Any) -> float:
    """Return a factor that keeps the dtype of logits, which a 0-dim tensor does too; nan for others."""
    if isinstance(x, Tensor) and x.ndim == 0 and x.device.type == "cpu" and not x.requires_grad and not x.is_complex():
        return float(x)
    return float(x) if isinstance(x, numbers.Real) else math.nan


def _inverse(x: float) -> float:
    return 1.0 / x if x else math.nan


def _is_index(x: Any, shape: Any, device: torch.device) -> bool:
    plain = isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32, torch.uint8)
    return plain and tuple(x.shape) == tuple(shape) and x.device == device


def _as_rows(x: Tensor, shape: torch.Size) -> Tensor:
    return x.reshape(*shape, x.shape[-1])


def _reshaped(shape: torch.Size, size: tuple[int, ...]) -> torch.Size | None:
    known = math.prod(n for n in size if n != -1)
    if size.count(-1) > 1 or not size or any(n < -1 for n in size):
        return None
    if -1 in size:
        if not known or shape.numel() % known:
            return None
        size = tuple(shape.numel() // known if n == -1 else n for n in size)
    return torch.Size(size) if math.prod(size) == shape.numel() else None


def _row_index(index: Any, shape: torch.Size) -> tuple[Rows | None, int | None]:
    """Return the selection of rows that an index makes, or how many of the first ids it keeps; neither: others."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(map(_is_index_part, parts)):
        return None, None
    ndim = len(shape)
    used = sum(_dims(x) for x in parts)
    dots = [i for i, x in enumerate(parts) if x is Ellipsis]
    if len(dots) > 1 or used > ndim:
        return None, None
    at = dots[0] if dots else len(parts)
    filled: list[Any] = [*parts[:at], *[slice(None)] * (ndim - used), *parts[at + 1 :]]
    *leading, last = filled
    kept = range(*last.indices(shape[-1])) if isinstance(last, slice) else range(0)
    if kept == range(shape[-1]):
        return lambda x: x[tuple(_on(i, x.device) for i in leading)], None
    all_rows = all(isinstance(x, slice) and x == slice(None) for x in leading)
    return None, len(kept) if all_rows and len(kept) > 0 and kept == range(len(kept)) else None


def _is_index_part(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.ndim > 0 and x.dtype in (torch.int64, torch.int32, torch.bool)
    return x is Ellipsis or isinstance(x, slice) or (isinstance(x, numbers.Integral) and not isinstance(x, bool))


def _dims(part: Any) -> int:
    if part is Ellipsis:
        return 0
    return part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def _on(index: Any, device: torch.device) -> Any:
    return index.to(device) if isinstance(index, Tensor) else index


# Names of torch's functions that have a method here: the function calls it with its own arguments.
_METHODS = frozenset(
    "add bfloat16 chunk clone contiguous detach div divide double flatten float gather half log_softmax logsumexp mul "
    "multiply narrow numel permute reshape split squeeze tanh to transpose true_divide type_as unbind unsqueeze "
    "view".split()
)


@torch.compiler.disable(reason=REASON)
def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch that got a stand-in among its arguments."""
    name = getattr(func, "__name__", str(func))
    named = dict(kwargs)
    first = args[0] if args else named.pop("input", None)
    if type(first) is DeferredLogits and not first.is_computed:
        if func is F.cross_entropy or func is F.nll_loss:
            fused = _cross_entropy_of if func is F.cross_entropy else _nll_of
            result = fused(first, *args[1:], **named)
            if result is not None:
                return result
        elif name in _METHODS and named.get("dim", 0) is not None:
            named.pop("_stacklevel", None)
            try:
                bound = _signature(name).bind(first, *args[1:], **named)
            except TypeError:  # an argument that only real logits take, such as `out`
                pass
            else:
                return getattr(DeferredLogits, name)(*bound.args, **bound.kwargs)
    for x in _stand_ins((args, kwargs)):
        x.asked(name)
    return func(*_real(args), **_real(kwargs))


@functools.cache
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(getattr(DeferredLogits, name))


def _stand_ins(tree: Any) -> list[DeferredLogits]:
    found: list[DeferredLogits] = []
    tree_map_only(DeferredLogits, found.append, tree)
    return found


def _cross_entropy_of(
    logits: DeferredLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    if size_average is not None or reduce is not None or logits._normalized:
        return None
    return logits.cross_entropy(target, weight, ignore_index, reduction, label_smoothing)


def _nll_of(
    logps: DeferredLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor | None:
    if size_average is not None or reduce is not None or not logps._normalized:
        return None
    dtype = _dtype_of(_nll, logps.dtype, logps.device.type)
    return logps.cross_entropy(target, weight, ignore_index, reduction, 0.0, dtype)


def _cross_entropy(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.zeros(1, dtype=torch.long, device=x.device))


def _nll(x: Tensor) -> Tensor:
    return F.nll_loss(x, torch.zeros(1, dtype=torch.long, device=x.device))


def _logsumexp(x: Tensor) -> Tensor:
    return torch.logsumexp(x, -1)


def _dtype_of(function: Callable[..., Tensor], dtype: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype of a function's result, which autocast may widen."""
    enabled = torch.is_autocast_enabled(device)
    if not enabled and dtype in (torch.float32, torch.float64):
        return dtype
    return _probed(function, dtype, device, torch.get_autocast_dtype(device) if enabled else None)


@functools.lru_cache(maxsize=128)
def _probed(function: Callable[..., Tensor], dtype: torch.dtype, device: str, autocast: torch.dtype | None) -> Any:
    with torch.no_grad():
        x = torch.zeros(1, 2, dtype=dtype, device=device)
        return (function(x, -1) if function is F.log_softmax else function(x)).dtype


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
        _name_of(logits._call.head), size, asked_by,
    )  # fmt: skip
    return asked_by


def _is_ours(module: str) -> bool:
    return module.startswith(("liger_chunked.deferred", "torch.")) or module == "torch"
