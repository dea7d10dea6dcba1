"""Exponentials that do not overflow (docs/numerics.md, "Far ends")."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGEST_EXPONENT = 80.0
LARGEST = math.exp(LARGEST_EXPONENT)
LOWEST_LOGP = -1e18


def saturating_exp(x: Tensor) -> Tensor:
    """Return `exp(x)`, constant where `x` is above 80: its gradient is zero there, not infinity times zero."""
    return torch.exp(torch.clamp(x, max=LARGEST_EXPONENT))


def bounded_logps(logps: Tensor) -> Tensor:
    """Return log-probabilities of at least -1e18, whose differences and products with 0 are defined."""
    return torch.clamp(logps, min=LOWEST_LOGP)
