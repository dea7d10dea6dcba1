"""The scores that replace log-ratios in DPO for divergences other than the reverse KL."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# The largest exponent: float32 overflows at 88.7.
_MAX_EXPONENT = 80.0


def _reverse_kl(logratios: Tensor, alpha: float) -> Tensor:
    return logratios


def _alpha(logratios: Tensor, alpha: float) -> Tensor:
    power = alpha - 1
    if abs(power) < 1e-6:
        return logratios  # the limit as alpha goes to 1
    return torch.expm1((power * logratios).clamp(max=_MAX_EXPONENT)) / power


def _forward_kl(logratios: Tensor, alpha: float) -> Tensor:
    return _alpha(logratios, 0.0)


def _js(logratios: Tensor, alpha: float) -> Tensor:
    return math.log(2) + F.logsigmoid(logratios)


class _FDivergence(NamedTuple):
    score: Callable[[Tensor, float], Tensor]  # from log-ratios and alpha
    reads: tuple[str, ...] = ()  # fields of DPOSettings


F_DIVERGENCES: Mapping[str, _FDivergence] = {
    "reverse_kl": _FDivergence(_reverse_kl),
    "forward_kl": _FDivergence(_forward_kl),
    "js_divergence": _FDivergence(_js),
    "alpha_divergence": _FDivergence(_alpha, reads=("f_alpha_divergence_coef",)),
}


def scores(logratios: Tensor, divergence: str, alpha: float) -> Tensor:
    """Return `f'(t)` at `t = pi / pi_ref`, element by element, up to a constant that cancels in a margin.

    | divergence | score | limits |
    |---|---|---|
    | `reverse_kl` | `log(t)` | |
    | `forward_kl` | `1 - 1 / t` | |
    | `js_divergence` | `log(2 t / (1 + t))` | |
    | `alpha_divergence` | `(t ** (alpha - 1) - 1) / (alpha - 1)` | alpha 0: forward KL; alpha 1: reverse KL |

    Exponents are clamped at 80; beyond it the gradient is 0. See f-DPO, https://arxiv.org/abs/2309.16240, table 1.

    Args:
        logratios: `log(t)`, of any shape, in nats.
        divergence: a name from the table.
        alpha: parameter of the alpha-divergence.

    >>> scores(torch.tensor([0.0, 2.0]).exp().log(), "forward_kl", 0.5)
    tensor([0.0000, 0.8647])
    """
    return F_DIVERGENCES[divergence].score(logratios, alpha)
