"""Selections of rows of logits (..., V): indices, views and targets, translated for hidden states."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Makes, of a tensor (..., K) for any K, its rows that are left.
Selection = Callable[[Tensor], Tensor]


def is_index(x: Any, shape: Any, device: torch.device) -> bool:
    plain = isinstance(x, Tensor) and x.dtype == torch.int64
    return plain and tuple(x.shape) == tuple(shape) and x.device == device


def as_rows(x: Tensor, shape: torch.Size) -> Tensor:
    return x.reshape(*shape, x.shape[-1])


def reshaped(shape: torch.Size, size: tuple[int, ...]) -> torch.Size | None:
    known = math.prod(n for n in size if n != -1)
    if size.count(-1) > 1 or not size or any(n < -1 for n in size):
        return None
    if -1 in size:
        if not known or shape.numel() % known:
            return None
        size = tuple(shape.numel() // known if n == -1 else n for n in size)
    return torch.Size(size) if math.prod(size) == shape.numel() else None


def row_index(index: Any, shape: torch.Size) -> tuple[Selection | None, int | None]:
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
