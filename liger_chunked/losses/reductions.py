"""What the loss of a token is divided by, before all are summed: the denominators that the papers disagree about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


def checked_items(num_items: float | Tensor, like: Tensor, dtype: torch.dtype) -> float | Tensor:
    """The number of tokens to divide by; as a tensor, () on the device of `like`.

    In a tensor, less than 1 counts as 1: to look at it would mean to wait for the device.

    Raises:
        ValueError: a number that is not positive, a tensor of several.
    """
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"num_items must be one number, got a tensor {tuple(num_items.shape)}")
        return num_items.to(like.device, dtype).reshape(()).clamp(min=1)
    if not num_items > 0:
        raise ValueError(f"num_items must be positive, got {num_items}")
    return num_items


@dataclass(frozen=True)
class ReductionSettings:
    """The numbers that reductions read: `num_items` of "dapo", `max_completion_length` of "dr_grpo"."""

    num_items: float | Tensor | None = None
    max_completion_length: int | None = None


def _sequences(lengths: Tensor) -> int:
    return max(1, lengths.shape[0])


def _tokens(lengths: Tensor) -> Tensor:
    return lengths.sum().clamp(min=1)


def _dr_grpo(lengths: Tensor, s: ReductionSettings) -> int:
    assert s.max_completion_length is not None
    return _sequences(lengths) * s.max_completion_length


class _Reduction(NamedTuple):
    denominator: Callable[[Tensor, ReductionSettings], float | Tensor]  # from lengths (B, 1): a number, or (B, 1)
    counts_items: bool = False  # reads num_items
    needs_length: bool = False  # reads max_completion_length


REDUCTIONS: Mapping[str, _Reduction] = {
    "grpo": _Reduction(lambda lengths, s: _sequences(lengths) * lengths.clamp(min=1)),
    "bnpo": _Reduction(lambda lengths, s: _tokens(lengths)),
    "dr_grpo": _Reduction(_dr_grpo, needs_length=True),
    "dapo": _Reduction(lambda lengths, s: _tokens(lengths) if s.num_items is None else s.num_items, counts_items=True),
    "luspo": _Reduction(lambda lengths, s: _sequences(lengths)),
}
