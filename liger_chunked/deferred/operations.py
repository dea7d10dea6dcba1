"""Operations of a tensor that deferred logits record: each returns another stand-in, and computes nothing.

z.float(), z / cap, z.tanh()           a transform of the logits (`Recorded.transform`)
z[:, :-1], z.view(-1, V)               a selection of rows
what no loss can express               the same method of the real logits
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from liger_chunked.deferred.call import Call, Transform
from liger_chunked.deferred.selection import Selection, as_rows, reshaped, row_index
from liger_chunked.dtensor import any_dtensor
from liger_chunked.private import tree_map_only
from liger_chunked.types import StandIn

Number = float  # in a class with a method of that name


@dataclass(frozen=True)
class Recorded:
    """The recorded operations on the logits of a call.

    - `shape`, `dtype`, `device`: of the result
    - `transform`: scales and softcap, of the logits and `extra_bias` (V,)
    - `n_ids`: how many of the first ids of the vocabulary are left; None: all
    - `normalized`: whether they are log-probabilities
    - `class_dim`: the dimension of the vocabulary, -1 for the last
    - `has_grad`: False after `detach`, and for operations under `no_grad`
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    transform: Transform = Transform()  # noqa: RUF009 - frozen
    class_dim: int = -1
    normalized: bool = False
    has_grad: bool = True
    extra_bias: Tensor | None = None
    n_ids: int | None = None

    def has_values_of(self, other: Recorded) -> bool:
        """Whether statistics of a row are those of `other`, which selections, casts and `detach` do not change."""
        return (
            self.transform == other.transform
            and self.normalized == other.normalized
            and self.extra_bias is other.extra_bias
            and self.n_ids == other.n_ids
        )


class RecordedOperations(StandIn):
    """The operations that `DeferredLogits` records.

    A method looks whether a loss can express what it does to the logits. If so, it returns `_made(...)`; if not, or if
    the logits are computed already, the same of `asked(name)`, the real ones.

    Attributes:
        shape, dtype, device: of the logits.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    _call: Call
    _recorded: Recorded
    _made_from: Any
    _derived: bool  # whether another one was made from this
    _in_place: list[Callable[[Tensor], Any]]  # changes that real logits get too
    _stats: dict[tuple[str, bool], tuple[Tensor, int]]

    # What `DeferredLogits` adds

    @property
    def is_computed(self) -> bool:
        raise NotImplementedError

    @property
    def requires_grad(self) -> bool:
        raise NotImplementedError

    def tensor(self) -> Tensor:
        raise NotImplementedError

    def asked(self, name: str) -> Tensor:
        raise NotImplementedError

    def _made(
        self, operation: Callable[[Tensor], Tensor], rows: Selection | None = None, captured: Any = (), **changes: Any
    ) -> Any:
        raise NotImplementedError

    # Operations

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def _selected(self, rows: Selection, captured: Any = ()) -> Any:
        """Return the stand-in for `rows(logits)`. `rows` works on tensors (..., K) like this one, for any K."""
        if not self._ends_with_vocabulary:
            return None
        like_rows = torch.empty((), device=self._call.hidden.device).expand(*self.shape[:-1], 1)  # of one element
        shape = torch.Size((*rows(like_rows).shape[:-1], self.shape[-1]))
        return self._made(rows, shape=shape, rows=rows, captured=captured)

    @property
    def _ends_with_vocabulary(self) -> bool:
        return self._recorded.class_dim == -1

    def _scaled(self, operation: Callable[[Tensor], Tensor], factor: Any, captured: Any) -> Any:
        transform = None if self._recorded.normalized else self._recorded.transform.times(factor)
        if transform is None or self._recorded.extra_bias is not None:
            return None
        return self._made(operation, transform=transform, captured=captured)

    def mul(self, other: Any) -> Any:
        made = None if self.is_computed else self._scaled(lambda x: x * other, _number(other), other)
        return self.asked("mul") * real(other) if made is None else made

    multiply = __mul__ = __rmul__ = mul

    def div(self, other: Any, *, rounding_mode: str | None = None) -> Any:
        made = None
        if not self.is_computed and rounding_mode is None:
            made = self._scaled(lambda x: x / other, _inverse(_number(other)), other)
        return self.asked("div").div(real(other), rounding_mode=rounding_mode) if made is None else made

    divide = true_divide = __truediv__ = div

    def _scale_in_place(self, name: str, other: Any, factor: Number) -> Any:
        """Scale a stand-in that nothing was made from, so that nothing else changes with it."""
        scaled = None
        alone = not (self.is_computed or self._derived or self._made_from is not None)
        if alone and not self._recorded.normalized and torch.is_grad_enabled() == self._call.grad:
            scaled = self._recorded.transform.times(factor)
        if scaled is None:
            getattr(self.asked(name), name)(real(other))
        else:
            self._recorded = replace(self._recorded, transform=scaled)
            number = _number(other)  # of now: a tensor may change before the logits exist
            self._in_place.append(lambda x: getattr(x, name)(number))
            self._stats.clear()
        return self

    def mul_(self, other: Any) -> Any:
        return self._scale_in_place("mul_", other, _number(other))

    def div_(self, other: Any) -> Any:
        return self._scale_in_place("div_", other, _inverse(_number(other)))

    __imul__, __itruediv__ = mul_, div_

    def tanh(self) -> Any:
        transform = self._recorded.transform.tanh()
        if self.is_computed or transform is None or self._recorded.normalized or self._recorded.extra_bias is not None:
            return self.asked("tanh").tanh()
        return self._made(torch.tanh, transform=transform)

    def add(self, other: Any, *, alpha: Any = 1) -> Any:
        if not self.is_computed and alpha == 1 and self._is_bias(other):
            return self._made(lambda x: x + other, extra_bias=other.reshape(-1), captured=other)
        return torch.add(self.asked("add"), real(other), alpha=alpha)

    __add__ = __radd__ = add

    def _is_bias(self, x: Any) -> bool:
        """Whether adding x is what a bias of the head does: a value for each id of the vocabulary."""
        recorded = self._recorded
        untransformed = recorded.transform == Transform() and not recorded.normalized and recorded.extra_bias is None
        return (
            untransformed
            and self._ends_with_vocabulary
            and type(x) in (Tensor, nn.Parameter, nn.Buffer)
            and x.dtype == self.dtype == self._call.dtype
            and (self.requires_grad or not x.requires_grad)
            and not any_dtensor(self._call.tensors.values())
            and 0 < x.ndim <= self.ndim
            and x.numel() == x.shape[-1] == self.shape[-1]
        )

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_computed:
            return self.tensor().to(*args, **kwargs)
        # A tensor of no elements shows what the arguments mean.
        empty = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **{**kwargs, "copy": False})
        # A caller who rounds to 16 bits, or wants a float64 loss, gets the loss of the cast logits.
        rounds = empty.dtype.itemsize < min(4, self.dtype.itemsize) or empty.dtype == torch.float64 != self.dtype
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
            rows, n_ids = row_index(index, self.shape)
            if rows is not None:
                made = self._selected(rows, index)
            elif n_ids is not None and self._may_drop_ids:
                made = self._made(lambda x: x[..., :n_ids], shape=torch.Size((*self.shape[:-1], n_ids)), n_ids=n_ids)
        return self.asked("indexing")[real(index)] if made is None else made

    @property
    def _may_drop_ids(self) -> bool:
        """Whether ids at the end of the vocabulary can be dropped: before a softmax, and if this rank has all rows."""
        return (
            not self._recorded.normalized
            and self._recorded.extra_bias is None
            and not any_dtensor(self._call.tensors.values())
        )

    def _reshaped(self, name: str, size: Any) -> Any:
        size = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
        if not self.is_computed and all(isinstance(n, int) for n in size):
            shape = reshaped(self.shape, size)
            if shape is not None and shape[-1] == self.shape[-1] and self._ends_with_vocabulary:
                rows = functools.partial(as_rows, shape=shape[:-1])
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
            and isinstance(dim, int)
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
        if not all(isinstance(dim, int) and -self.ndim <= dim < self.ndim for dim in (dim0, dim1)):
            return self.asked("transpose").transpose(dim0, dim1)
        order = list(range(self.ndim))
        a, b = dim0 % self.ndim, dim1 % self.ndim
        order[a], order[b] = order[b], order[a]
        return self.permute(*order)

    def permute(self, *dims: Any) -> Any:
        dims = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
        if not all(isinstance(dim, int) and -self.ndim <= dim < self.ndim for dim in dims):
            return self.asked("permute").permute(*dims)
        order = [dim % self.ndim for dim in dims]
        classes = order.index(self._recorded.class_dim % self.ndim) if sorted(order) == list(range(self.ndim)) else None
        others = [] if classes is None else [i for i in order if i != self._recorded.class_dim % self.ndim]
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
        numbers_given = all(isinstance(x, int) for x in (dim, start, length)) and -self.ndim <= dim < self.ndim
        if not numbers_given or not 0 <= start <= start + length <= self.shape[dim]:
            return self.asked("narrow").narrow(dim, start, length)
        index = (*(slice(None),) * (dim % self.ndim), slice(start, start + length))
        return self[index]

    def index_select(self, dim: int, index: Any) -> Any:
        of_ids = dim % self.ndim == self._recorded.class_dim % self.ndim
        if self.is_computed or of_ids or not isinstance(index, Tensor) or index.ndim != 1:
            return self.asked("index_select").index_select(dim, real(index))
        rows = (*(slice(None),) * (dim % self.ndim), index)
        return self[rows]


def real(x: Any) -> Any:
    """Replace the stand-ins in a tree by real logits."""
    if isinstance(x, RecordedOperations):
        return x.tensor()
    return tree_map_only(RecordedOperations, lambda d: d.tensor(), x)


def _number(x: Any) -> float:
    """Return a factor that keeps the dtype of logits, which a 0-dim tensor does too; nan for others."""
    if isinstance(x, Tensor) and x.ndim == 0 and x.device.type == "cpu" and not x.requires_grad and not x.is_complex():
        return float(x)
    return float(x) if isinstance(x, numbers.Real) else math.nan


def _inverse(x: float) -> float:
    return 1.0 / x if x else math.nan
