"""Losses of a margin: how much more reward the chosen sequence of a pair has than the rejected one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Above it `log(1 + exp(x))` is x, to the last bit of a float64.
_LINEAR = 40.0


def logistic(margin: Tensor, label_smoothing: float = 0.0, beta: float = 1.0) -> Tensor:
    """`-(1 - eps) log sigmoid(beta margin) - eps log sigmoid(-beta margin)`: Bradley-Terry, labels flipped with chance
    `eps`.
    """
    # -log sigmoid(m) is log(1 + exp(-m)): its sign goes into beta, both ways.
    loss = F.softplus(-beta * margin, threshold=_LINEAR)
    if label_smoothing == 0:
        return loss
    return (1 - label_smoothing) * loss + label_smoothing * F.softplus(beta * margin, threshold=_LINEAR)


def hinge(margin: Tensor) -> Tensor:
    """`max(0, 1 - margin)` (SLiC, https://arxiv.org/abs/2305.10425)."""
    return torch.relu(1 - margin)


def ipo(difference: Tensor, beta: float) -> Tensor:
    """`(difference - 1 / (2 beta)) ** 2`, of log-ratios, not of rewards (https://arxiv.org/abs/2310.12036, eq. 17)."""
    return (difference - 1 / (2 * beta)).square()
