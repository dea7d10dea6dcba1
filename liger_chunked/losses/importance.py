"""Importance ratios: how much likelier than under the old policy a token, or a sequence, has become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


def _sum(log_ratio: Tensor) -> Tensor:
    """In float64: what the tokens of a long sequence round, an exponential makes of it a factor."""
    return log_ratio.sum(-1, keepdim=True, dtype=torch.float64)


class _Level(NamedTuple):
    log_ratio: Callable[[Tensor, Tensor], Tensor]  # of the tokens (n, T), zero where ignored, and lengths (n, 1)
    mixes_tokens: bool


IMPORTANCE_LEVELS: Mapping[str, _Level] = {
    "token": _Level(lambda log_ratio, lengths: log_ratio, mixes_tokens=False),
    # GSPO (https://arxiv.org/abs/2507.18071, equation 7): the geometric mean over the tokens.
    "sequence": _Level(lambda log_ratio, lengths: _sum(log_ratio) / lengths, mixes_tokens=True),
    # The ratio of the probabilities of whole sequences, as in REINFORCE and RLOO.
    "trajectory": _Level(lambda log_ratio, lengths: _sum(log_ratio), mixes_tokens=True),
}
