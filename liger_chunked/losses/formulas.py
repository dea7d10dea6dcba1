"""Formulas that several losses share: the logistic loss, log-odds, mixtures and sums over sequences.

They are written to keep value and gradient finite and accurate where the plain formula overflows or loses digits.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_chunked.types import LARGEST_EXPONENT

_LINEAR = 40.0  # above it, `log(1 + exp(x))` is x in float64


def softplus(x: Tensor) -> Tensor:
    """Return `log(1 + exp(x))`, which is `-log sigmoid(-x)`."""
    return F.softplus(x, threshold=_LINEAR)


def is_number(setting: float | Tensor, number: float) -> bool:
    """Whether a setting is this number. No tensor is, because autograd may differentiate by it."""
    return not isinstance(setting, Tensor) and setting == number


def logistic(x: Tensor, eps: float = 0.0) -> Tensor:
    """Return `-(1 - eps) log sigmoid(x) - eps log sigmoid(-x)`: the logistic loss of a margin with smoothed labels."""
    if is_number(eps, 0):
        return softplus(-x)
    return (1 - eps) * softplus(-x) + eps * softplus(x)


def saturating_expm1(x: Tensor) -> Tensor:
    """Return `exp(x) - 1` with the bound of `saturating_exp`: constant where `x` is above 80."""
    return torch.expm1(x.clamp(max=LARGEST_EXPONENT))


# Least distance of a probability to 1, with finite log-odds and gradients.
CERTAIN = 1e-12


def complement(logps: Tensor) -> Tensor:
    """Return `1 - exp(logps)`, in [1e-12, 1], with an accurate gradient.

    >>> complement(torch.tensor([-1e-9, 0.0])).tolist()
    [9.999999717180685e-10, 9.999999960041972e-13]
    """
    logps = logps.clamp(max=-CERTAIN)
    # Near 0, exp() rounds to 1. Far from 0, the derivative of expm1 rounds to 0.
    return torch.where(logps > -math.log(2), -torch.expm1(logps), 1 - logps.exp())


def log_odds(logps: Tensor) -> Tensor:
    """Return `log(p / (1 - p))` for `logps = log(p)`, at most 27.6.

    >>> log_odds(torch.tensor([0.5, 0.75]).log())
    tensor([0.0000, 1.0986])
    """
    logps = logps.clamp(max=-CERTAIN)
    # The gradient of expm1 rounds to 0 far from 0, where it counts for nothing beside that of `logps`, 1.
    return logps - (-torch.expm1(logps)).log()


# Replaces -inf: logaddexp(-inf, -inf) is not finite.
_LOG_ZERO = -1e4


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return `KL(a || b) = sum(a * log(a / b))` from log-probabilities (n, V)."""
    a = log_a.exp()
    return (a * (log_a - log_b).masked_fill(a == 0, 0.0)).sum(-1)


def log_mixture(log_a: Tensor, log_b: Tensor, share_of_b: float) -> Tensor:
    """Return `log((1 - share_of_b) * a + share_of_b * b)` for a share in (0, 1)."""
    a, b = log_a.clamp(min=_LOG_ZERO), log_b.clamp(min=_LOG_ZERO)
    return torch.logaddexp(a + math.log1p(-share_of_b), b + math.log(share_of_b))


def sequence_logps(token_logps: Tensor, lengths: Tensor, average: bool) -> Tensor:
    """Return sequences' log-probabilities (...) from tokens' (..., T), zero if ignored."""
    # float64: a difference of large sums loses digits.
    logps = token_logps.sum(-1, dtype=torch.float64)
    return logps / lengths if average else logps


def share_of_mean(losses: Tensor, n: int) -> Tensor:
    # mean() is one launch.
    return losses.mean() if losses.shape[0] == n else losses.sum() / n
