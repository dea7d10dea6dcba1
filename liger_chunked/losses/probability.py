"""Functions of log-probabilities that stay accurate for probabilities close to 1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The least distance of a probability to 1. It is below the resolution of float32, even for a mean over 10^5 tokens, and
# large enough for a logarithm or a fractional power to have a finite gradient.
_CERTAIN = 1e-12


def complement(logps: Tensor) -> Tensor:
    """Return `1 - exp(logps)`, in [1e-12, 1], with a gradient as accurate as its value.

    Near 0, `exp(logps)` rounds to 1, hence `expm1`. Far from 0, autograd computes the derivative of `expm1` as
    `expm1(x) + 1`, which rounds to 0, hence `exp`. Both branches are finite everywhere, so `where` passes no NaN into
    the gradient.

    >>> complement(torch.tensor([-1e-9, 0.0])).tolist()
    [9.999999717180685e-10, 9.999999960041972e-13]
    """
    logps = logps.clamp(max=-_CERTAIN)
    return torch.where(logps > -math.log(2), -torch.expm1(logps), 1 - logps.exp())


def log_odds(logps: Tensor) -> Tensor:
    """Return `log(p / (1 - p))` for `logps = log(p)`, at most 27.6.

    >>> log_odds(torch.tensor([0.5, 0.75]).log())
    tensor([0.0000, 1.0986])
    """
    logps = logps.clamp(max=-_CERTAIN)
    return logps - complement(logps).log()
