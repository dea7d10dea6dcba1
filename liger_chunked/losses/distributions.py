"""Divergences of two distributions from their log-probabilities, (n, V) each to (n,), in nats.

All are differentiable, and finite wherever the divergence is. A token with probability 0 contributes 0 to the value and
to the gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Replaces -inf: its exp() is 0 in every dtype, but logaddexp of two of them is finite.
_LOG_ZERO = -1e4


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return `KL(a || b) = sum(a * log(a / b))`."""
    a = log_a.exp()
    return (a * (log_a - log_b).masked_fill(a == 0, 0.0)).sum(-1)


def log_mixture(log_a: Tensor, log_b: Tensor, share_of_b: float) -> Tensor:
    """Return `log((1 - share_of_b) * a + share_of_b * b)` for a share in (0, 1)."""
    a, b = log_a.clamp(min=_LOG_ZERO), log_b.clamp(min=_LOG_ZERO)
    return torch.logaddexp(a + math.log1p(-share_of_b), b + math.log(share_of_b))


def jensen_shannon(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Return `beta * KL(q || m) + (1 - beta) * KL(p || m)`, `m = (1 - beta) * p + beta * q`, for a beta in (0, 1)."""
    log_m = log_mixture(log_p, log_q, beta)
    return beta * kl(log_q, log_m) + (1.0 - beta) * kl(log_p, log_m)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return `sum(|p - q|) / 2`."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)
