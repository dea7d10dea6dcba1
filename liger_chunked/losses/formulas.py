"""Formulas that several losses share: terms of pairs, log-odds, mixtures and sums over sequences.

They are written to keep value and gradient finite and accurate where the plain formula overflows or loses digits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_chunked.types import LARGEST_EXPONENT, PairTerm

Number = Literal["margin", "mean_margin", "chosen", "rejected"]  # of a `PairTerm`

_LINEAR = 40.0  # above it, `log(1 + exp(x))` is x in float64


_CURVES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softplus": functools.partial(F.softplus, threshold=_LINEAR),
    "sigmoid": torch.sigmoid,
    "square": torch.square,
    "relu": torch.relu,
}


def is_number(setting: float | Tensor, number: float) -> bool:
    """Whether a setting is this number. No tensor is, because autograd may differentiate by it."""
    return not isinstance(setting, Tensor) and setting == number


def sum_of_curves(x: Tensor, *terms: PairTerm) -> Tensor:
    """Return the sum of terms of one number `x` (n,) of each pair."""
    total: Tensor | None = None
    for term in terms:
        z = x if is_number(term.scale, 1) else term.scale * x
        value = _CURVES[term.curve](z if is_number(term.offset, 0) else z + term.offset)
        value = value if is_number(term.weight, 1) else term.weight * value
        total = value if total is None else total + value
    assert total is not None
    return total


def sum_of_terms(terms: Sequence[PairTerm], scores: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of terms (n,), differentiably, of log-ratios or other scores (n, 2) of chosen and rejected ones.

    Args:
        lengths: (n, 2), the valid tokens of the sequences, at least 1.
    """
    used = {term.of for term in terms}
    chosen, rejected = scores.unbind(-1)
    numbers = {"chosen": chosen, "rejected": rejected}
    if "margin" in used:
        numbers["margin"] = chosen - rejected
    if "mean_margin" in used:
        chosen, rejected = (scores / lengths).unbind(-1)
        numbers["mean_margin"] = chosen - rejected
    return functools.reduce(torch.add, [sum_of_curves(numbers[term.of], term) for term in terms])


Terms = tuple[PairTerm, ...]


# Not cached: a setting may be a tensor, such as a trained beta, whose values change from step to step.
def logistic(of: Number = "margin", beta: float = 1.0, eps: float = 0.0, gamma: float = 0.0) -> Terms:
    """Return `-(1 - eps) log sigmoid(beta x - gamma) - eps log sigmoid(gamma - beta x)`."""
    loss = PairTerm("softplus", of, -beta, gamma, 1 - eps)
    return (loss,) if is_number(eps, 0) else (loss, PairTerm("softplus", of, beta, -gamma, eps))


def hinge(beta: float = 1.0, gamma: float = 0.0) -> Terms:
    """Return `max(0, 1 - (beta x - gamma))` of the margin."""
    return (PairTerm("relu", "margin", -beta, 1 + gamma),)


def of_log_ratios(terms: Terms, beta: float) -> Terms:
    """Return terms of log-ratios from terms of rewards, which are `beta` times as large."""
    return tuple(dataclasses.replace(term, scale=term.scale * beta) for term in terms)


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
    return logps - complement(logps).log()


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
