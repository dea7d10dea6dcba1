"""What a policy loss reads of a batch of rollouts, arranged by sequence or by token, ratios and means of metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.engine import Rows, Sequences, SequenceSplit, whole
from liger_chunked.types import LOWEST_LOGP, Rollouts, TokenStats


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the values where `mask` is True, 0 of none."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


class RatioRange(NamedTuple):
    """The mean, least and largest ratio: 0, infinity and -infinity of none. None: there are no ratios."""

    mean: Tensor | None = None
    min: Tensor | None = None
    max: Tensor | None = None


def ratio_range(ratio: Tensor, mask: Tensor, mean: Tensor | None = None) -> RatioRange:
    """Return the range of the ratios where `mask` is True. `mean`: theirs, if it is known."""
    if not ratio.numel():
        return RatioRange(*(ratio.new_full((), x) for x in (0.0, math.inf, -math.inf)))
    low, high = torch.where(mask, ratio, math.inf).amin(), torch.where(mask, ratio, -math.inf).amax()
    return RatioRange(masked_mean(ratio, mask) if mean is None else mean, low, high)


class Means(NamedTuple):
    """Means of values, by name: over all valid tokens, (), and over those of each sequence, (B,), NaN of none."""

    of_all: Mapping[str, Tensor]
    by_sequence: Mapping[str, Tensor]


def token_means(values: Mapping[str, Tensor], mask: Tensor, shape: torch.Size, dtype: torch.dtype) -> Means:
    """Return means over valid tokens, all in one reduction: each launch takes longer than the sums themselves.

    Args:
        values: one or more, bool or floating-point, like `mask`.
        mask: True at valid tokens, (n, T). Losses by token have n = B * T rows of one token.
        shape: (B, T) of the target.
        dtype: of the means.
    """
    valid = mask.reshape(shape)
    sums = torch.where(valid, torch.stack([x.reshape(shape) for x in values.values()]).to(dtype), 0.0).sum(-1)
    lengths = valid.sum(-1)
    of_all, by_sequence = sums.sum(-1) / lengths.sum().clamp(min=1), sums / lengths
    return Means(*(dict(zip(values, x.unbind(), strict=True)) for x in (of_all, by_sequence)))


def sum_of_logs(log_ratio: Tensor) -> Tensor:
    """Sum over the sequence in float64: exp() makes the sum's rounding error relative."""
    return log_ratio.sum(-1, keepdim=True, dtype=torch.float64)


def _value_of_sequence_gradient_of_token(log_ratio: Tensor, lengths: Tensor) -> Tensor:
    mean = (sum_of_logs(log_ratio) / lengths).to(log_ratio.dtype)
    log_ratio = log_ratio.clamp(min=LOWEST_LOGP)  # -inf - -inf would be NaN
    return mean.detach() + (log_ratio - log_ratio.detach())


class _Level(NamedTuple):
    log_ratio: Callable[[Tensor, Tensor], Tensor]  # (per token (n, T), lengths (n, 1)) -> `Rollouts.log_ratio`
    mixes_tokens: bool = False
    per_sequence: bool = False  # (n, 1)


IMPORTANCE_LEVELS: Mapping[str, _Level] = {
    "token": _Level(lambda log_ratio, lengths: log_ratio),
    "sequence": _Level(
        lambda log_ratio, lengths: sum_of_logs(log_ratio) / lengths, mixes_tokens=True, per_sequence=True
    ),
    "sequence_token": _Level(_value_of_sequence_gradient_of_token, mixes_tokens=True),
    "trajectory": _Level(lambda log_ratio, lengths: sum_of_logs(log_ratio), mixes_tokens=True, per_sequence=True),
}


def by_rollout(values: Tensor) -> Tensor:
    """Return (m, 1) or (n, T) from a chunk's dense values, (m,) of tokens or (n, 1, T) of sequences."""
    return values[:, None] if values.ndim == 1 else values.flatten(0, 1)


def check_side(name: str, x: Tensor, target: Tensor, n: int | None = None) -> None:
    """Raise ValueError unless `x`, an argument of the call, has one value a token, or with `n` one a sequence.

    Args:
        target: (B, T), or (N,) of packed sequences: of this rank's positions, if ranks split sequences.
        n: the number of sequences. None: one value a sequence is not enough.
    """
    of_sequences = [] if n is None else [(n,), (n, 1)]
    if not isinstance(x, Tensor) or x.shape not in (target.shape, *of_sequences):
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        expected = f"{tuple(target.shape)}, one value a token"
        if of_sequences:
            expected += f", or {(n,)} or {(n, 1)}, one a sequence"
        raise ValueError(f"{name} must be {expected}, got {got}")
    if x.device != target.device:
        raise ValueError(f"{name} is on {x.device}, target on {target.device}: expected one device")


def whole_side(name: str, x: Tensor, target: Tensor, sequences: Sequences) -> Tensor:
    """Return `whole` of an argument that `check_side` took with `n`. Values of sequences stay as they are."""
    if isinstance(sequences, SequenceSplit) and x.ndim == 2 and 1 in (of_ranks := sequences.lengths):
        if max(of_ranks) > 1:
            raise ValueError(
                f"{name} {tuple(x.shape)} may be per token or per sequence on a rank with one position: pass (B,) for "
                f"one value a sequence, or split sequences into longer parts than {list(of_ranks)}"
            )
    return whole(x, sequences) if x.shape == target.shape else x


class RolloutSides(NamedTuple):
    """What a call gave beside the target, of whole sequences: (B, T), or (B,) or (B, 1) where said. Without gradient.

    - `advantages`, `importance_weights`: also one value a sequence; no weights are 1
    - `old_logps`: log-probabilities under the sampling policy; None on-policy
    - `ref_logps`: under the reference, in the shape of `reference_logps`; None without one
    """

    advantages: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor | None
    importance_weights: Tensor | None


@dataclass(frozen=True)
class RolloutBatch:
    """Fields of `Rollouts` of the whole batch, in the same shapes: what is known before a step has statistics."""

    mask: Tensor
    lengths: Tensor  # at least 1
    weights: Tensor  # (n, 1) one over the reduction's denominator
    advantages: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor | None
    importance_weights: Tensor | None
    importance_level: str
    batch_size: int
    batch_tokens: int | Tensor

    @classmethod
    def of(
        cls,
        sides: RolloutSides,
        rows: Rows,
        shape: torch.Size,
        dtype: torch.dtype,
        *,
        divisor: float | Tensor,
        by_length: bool,
        importance_level: str,
    ) -> RolloutBatch:
        """Arrange the tensors of a call by the groups of its rows: sequences, or tokens.

        Args:
            shape: (B, T) of the target.
            dtype: of the values.
            divisor: of the reduction's sum over tokens.
            by_length: whether a sequence's tokens are also divided by their number.
        """
        assert rows.mask is not None
        mask = rows.mask.view(shape)
        lengths = mask.sum(-1, keepdim=True).to(dtype)
        at_least_1 = lengths.clamp(min=1)

        def arranged(x: Tensor) -> Tensor:
            """Return (n, T) or (n, 1) from (B, T) or (B, 1)."""
            return x if rows.groups is not None else x.expand(shape).reshape(-1, 1)

        def side(x: Tensor, fill: float) -> Tensor:
            """Return a detached tensor, in which `fill` replaces padding, that may hold anything."""
            x = x.detach().to(dtype)
            x = x[:, None] if x.ndim == 1 else x
            return arranged(torch.where(mask, x, fill) if x.shape == shape else x)

        advantages, old_logps, ref_logps, importance_weights = sides
        return cls(
            mask=arranged(mask),
            lengths=arranged(at_least_1),
            weights=arranged(torch.ones_like(lengths) / (divisor * at_least_1 if by_length else divisor)),
            advantages=side(advantages, 0.0),
            old_logps=None if old_logps is None else side(old_logps, 0.0).clamp(min=LOWEST_LOGP),
            ref_logps=None if ref_logps is None else by_rollout(ref_logps),
            importance_weights=None if importance_weights is None else side(importance_weights, 1.0),
            importance_level=importance_level,
            batch_size=shape[0],
            batch_tokens=rows.n_counted,
        )

    def rollouts(self, stats: TokenStats, index: slice | Tensor) -> Rollouts:
        assert stats.logps is not None and stats.entropy is not None
        logps, lengths = by_rollout(stats.logps), self.lengths[index]
        old_logps = logps.detach() if self.old_logps is None else self.old_logps[index]
        ref_logps = None if self.ref_logps is None else self.ref_logps[index]
        importance_weights = None if self.importance_weights is None else self.importance_weights[index]
        return Rollouts(
            logps=logps,
            old_logps=old_logps,
            ref_logps=ref_logps,
            log_ratio=IMPORTANCE_LEVELS[self.importance_level].log_ratio(logps - old_logps, lengths),
            advantages=self.advantages[index],
            importance_weights=importance_weights,
            entropy=by_rollout(stats.entropy),
            mask=self.mask[index],
            lengths=lengths,
            batch_size=self.batch_size,
            batch_tokens=self.batch_tokens,
        )
