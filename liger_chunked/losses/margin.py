"""Losses of a margin: how much more reward the chosen sequence of a pair has than the rejected one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def logistic(margin: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """`-(1 - eps) log sigmoid(margin) - eps log sigmoid(-margin)`: Bradley-Terry, labels flipped with chance `eps`."""
    loss = -F.logsigmoid(margin)
    if label_smoothing == 0:
        return loss
    return (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-margin)


def hinge(margin: Tensor) -> Tensor:
    """`max(0, 1 - margin)` (SLiC, https://arxiv.org/abs/2305.10425)."""
    return torch.relu(1 - margin)


def ipo(difference: Tensor, beta: float) -> Tensor:
    """`(difference - 1 / (2 beta)) ** 2`, on log-ratios and not on rewards (https://arxiv.org/abs/2310.12036, 17)."""
    return (difference - 1 / (2 * beta)).square()
