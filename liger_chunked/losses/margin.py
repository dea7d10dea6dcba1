"""Losses of a margin, the reward of a pair's chosen sequence minus that of its rejected one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Above this, `log(1 + exp(x))` equals x to the last bit of a float64.
_LINEAR = 40.0


def logistic(margin: Tensor, label_smoothing: float = 0.0, beta: float = 1.0) -> Tensor:
    """Return `-(1 - eps) log sigmoid(beta margin) - eps log sigmoid(-beta margin)`, with `eps` the label smoothing.

    This is the Bradley-Terry loss for labels that are flipped with probability `eps`.
    """
    # -log sigmoid(m) is softplus(-m).
    loss = F.softplus(-beta * margin, threshold=_LINEAR)
    if label_smoothing == 0:
        return loss
    return (1 - label_smoothing) * loss + label_smoothing * F.softplus(beta * margin, threshold=_LINEAR)


def hinge(margin: Tensor) -> Tensor:
    """Return `max(0, 1 - margin)` (SLiC, https://arxiv.org/abs/2305.10425)."""
    return torch.relu(1 - margin)


def ipo(difference: Tensor, beta: float) -> Tensor:
    """Return `(difference - 1 / (2 beta)) ** 2` of log-ratios (https://arxiv.org/abs/2310.12036, equation 17)."""
    return (difference - 1 / (2 * beta)).square()
