"""A batch of completions as a policy loss needs it: masked, and cut to any pack of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_chunked.engine import Layout
from liger_chunked.losses.importance import IMPORTANCE_LEVELS
from liger_chunked.types import Rollouts, TokenStats


def rows(values: Tensor) -> Tensor:
    """The engine's dense layout of tokens (m,) or of sequences (n, 1, T) to the (n, T) of `Rollouts`."""
    return values[:, None] if values.ndim == 1 else values.flatten(0, 1)


def check_side(name: str, x: Tensor, target: Tensor, per_sequence: bool = False) -> None:
    """`x` has one value a token, or where `per_sequence` allows it one a sequence, on the device of the target.

    Raises:
        ValueError: another shape or device.
    """
    size, length = target.shape
    shapes = [(size, length), *([(size,), (size, 1)] if per_sequence else [])]
    if not isinstance(x, Tensor) or x.shape not in shapes:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        expected = f"{(size, length)}, one value a token"
        if per_sequence:
            expected += f", or {(size,)} or {(size, 1)}, one a sequence"
        raise ValueError(f"{name} must be {expected}, got {got}")
    if x.device != target.device:
        raise ValueError(f"{name} is on {x.device}, target on {target.device}: expected one device")


@dataclass(frozen=True)
class Arrangement:
    """How tensors of one value a token, or one a sequence, stand in the layout of the engine; its axis 0 is sequences,
    or tokens where the loss looks at each by itself."""

    layout: Layout
    target: Tensor  # (B, T)
    dtype: torch.dtype

    @property
    def mask(self) -> Tensor:
        """(B, T), True at the valid tokens."""
        return self.layout.mask.view(self.target.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """(B, T) or (B, 1), to (n, T) or (n, 1)."""
        if self.layout.group_lengths is not None:
            return x
        return x.expand(self.target.shape).reshape(-1, 1)

    def side(self, x: Tensor, fill: float) -> Tensor:
        """The same of an argument of the caller, detached, and `fill` where padding may hold anything."""
        x = x.detach().to(self.dtype)
        x = x[:, None] if x.ndim == 1 else x
        return self(torch.where(self.mask, x, fill) if x.shape == self.target.shape else x)


@dataclass(frozen=True)
class RolloutBatch:
    """What the objective knows of the whole batch beside its statistics; axis 0 runs over sequences, or tokens."""

    mask: Tensor  # (n, T)
    lengths: Tensor  # (n, 1), at least 1
    weights: Tensor  # (n, 1) what the loss of each token counts
    advantages: Tensor  # (n, T) or (n, 1)
    old_logps: Tensor | None  # (n, T)
    ref_logps: Tensor | None  # (n, T)
    importance_weights: Tensor | None  # (n, T) or (n, 1)
    importance_level: str
    batch_size: int
    batch_tokens: int

    def rollouts(self, stats: TokenStats, index: slice | Tensor) -> Rollouts:
        """The part of the batch that `index` picks, with its statistics."""
        assert stats.logps is not None and stats.entropy is not None
        logps, lengths = rows(stats.logps), self.lengths[index]
        old_logps = logps.detach() if self.old_logps is None else self.old_logps[index]
        return Rollouts(
            logps=logps,
            old_logps=old_logps,
            ref_logps=None if self.ref_logps is None else self.ref_logps[index],
            log_ratio=IMPORTANCE_LEVELS[self.importance_level].log_ratio(logps - old_logps, lengths),
            advantages=self.advantages[index],
            importance_weights=None if self.importance_weights is None else self.importance_weights[index],
            entropy=rows(stats.entropy),
            mask=self.mask[index],
            lengths=lengths,
            batch_size=self.batch_size,
            batch_tokens=self.batch_tokens,
        )


@dataclass
class LateBatch:
    """A batch that is made when it is first asked for: a device then has its first product to do.

    What it is made from, tensors of the caller's and whatever graph they hang on, is let go with that.
    """

    make: Callable[[], RolloutBatch] | None
    made: RolloutBatch | None = None

    def __call__(self) -> RolloutBatch:
        if self.make is not None:
            self.made, self.make = self.make(), None
        assert self.made is not None
        return self.made
