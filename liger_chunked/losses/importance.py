"""Importance ratios of the policy to the old policy, per token or per sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


def _sum(log_ratio: Tensor) -> Tensor:
    """Sum in float64: exp() turns the rounding error of a long sequence's sum into a relative error of the ratio."""
    return log_ratio.sum(-1, keepdim=True, dtype=torch.float64)


class _Level(NamedTuple):
    log_ratio: Callable[[Tensor, Tensor], Tensor]  # from token log-ratios (n, T), 0 if ignored, and lengths (n, 1)
    mixes_tokens: bool


IMPORTANCE_LEVELS: Mapping[str, _Level] = {
    "token": _Level(lambda log_ratio, lengths: log_ratio, mixes_tokens=False),
    # GSPO (https://arxiv.org/abs/2507.18071, equation 7): the geometric mean over the tokens.
    "sequence": _Level(lambda log_ratio, lengths: _sum(log_ratio) / lengths, mixes_tokens=True),
    # The probability ratio of the whole sequence, as in REINFORCE and RLOO.
    "trajectory": _Level(lambda log_ratio, lengths: _sum(log_ratio), mixes_tokens=True),
}
