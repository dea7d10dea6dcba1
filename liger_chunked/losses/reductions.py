"""The denominators of policy losses: each token's loss is divided by one before all are summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


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
    denominator: Callable[[Tensor, ReductionSettings], float | Tensor]  # from lengths (B, 1) to a number or (B, 1)
    counts_items: bool = False  # reads num_items
    needs_length: bool = False  # reads max_completion_length


REDUCTIONS: Mapping[str, _Reduction] = {
    "grpo": _Reduction(lambda lengths, s: _sequences(lengths) * lengths.clamp(min=1)),
    "bnpo": _Reduction(lambda lengths, s: _tokens(lengths)),
    "dr_grpo": _Reduction(_dr_grpo, needs_length=True),
    "dapo": _Reduction(lambda lengths, s: _tokens(lengths) if s.num_items is None else s.num_items, counts_items=True),
    "luspo": _Reduction(lambda lengths, s: _sequences(lengths)),
}
