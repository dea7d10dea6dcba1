"""From tokens to sequences: what the losses on whole sequences share."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_logps(token_logps: Tensor, lengths: Tensor, average: bool) -> Tensor:
    """(...) log-probability of each sequence in nats: the sum over its valid tokens, or their mean.

    In float64: losses look at differences of such sums, and thousands of nats leave float32 few digits for them.

    Args:
        token_logps: (..., T) log-probability of each token, zero at those that are not valid.
        lengths: (...) how many are, at least 1.
        average: divide by it.
    """
    logps = token_logps.sum(-1, dtype=torch.float64)
    return logps / lengths if average else logps


def share_of_mean(losses: Tensor, n: int) -> Tensor:
    """What some of `n` losses add to their mean: `losses.sum() / n`."""
    # Of all of them in one launch.
    return losses.mean() if losses.shape[0] == n else losses.sum() / n
