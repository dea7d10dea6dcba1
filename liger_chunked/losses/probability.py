"""Probabilities from their logarithms, accurate where they are close to 1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# A probability closer to 1 than this counts as this close. Below the resolution of float32, even averaged over 10^5
# tokens, and large enough for a logarithm or a fractional power to have a finite gradient.
_CERTAIN = 1e-12


def complement(logps: Tensor) -> Tensor:
    """`1 - exp(logps)`, in [1e-12, 1], with a gradient as accurate as its value.

    `exp(logps)` rounds to 1 long before `logps` reaches 0, hence `expm1` near there. But autograd takes the derivative
    of `expm1` for `expm1(x) + 1`, which rounds to 0 at the other end. Both sides are finite everywhere, so that the one
    that `where` drops puts no NaN into the gradient.

    >>> complement(torch.tensor([-1e-9, 0.0])).tolist()
    [9.999999717180685e-10, 9.999999960041972e-13]
    """
    logps = logps.clamp(max=-_CERTAIN)
    return torch.where(logps > -math.log(2), -torch.expm1(logps), 1 - logps.exp())


def log_odds(logps: Tensor) -> Tensor:
    """`log(p / (1 - p))` for `logps = log(p)`, at most 27.6.

    >>> log_odds(torch.tensor([0.5, 0.75]).log())
    tensor([0.0000, 1.0986])
    """
    logps = logps.clamp(max=-_CERTAIN)
    return logps - complement(logps).log()
