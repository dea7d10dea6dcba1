"""Reductions from tokens to sequences, and from sequences to a mean."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_logps(token_logps: Tensor, lengths: Tensor, average: bool) -> Tensor:
    """Return the log-probability of each sequence (...) in nats: the sum over its valid tokens, or their mean.

    The sum is in float64, because losses use differences of such sums, and thousands of nats leave float32 few digits.

    Args:
        token_logps: (..., T), zero at tokens that are not valid.
        lengths: (...) number of valid tokens, at least 1.
        average: divide by `lengths`.
    """
    logps = token_logps.sum(-1, dtype=torch.float64)
    return logps / lengths if average else logps


def share_of_mean(losses: Tensor, n: int) -> Tensor:
    """Return the contribution of these losses to the mean of all `n` losses: `losses.sum() / n`."""
    # mean() is one launch instead of two.
    return losses.mean() if losses.shape[0] == n else losses.sum() / n
