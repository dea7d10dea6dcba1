"""Surrogates of policy optimisation: the cost of a token as a pure function of ratios and advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from liger_chunked.losses.checks import check_finite, check_positive
from liger_chunked.types import Rollouts, check_number


@dataclass(frozen=True)
class SurrogateSettings:
    """The settings of the surrogates. `SURROGATES` lists the readers of each; `LigerFusedLinearGRPOLoss` explains them.

    Raises:
        ValueError: if a number is out of range.
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        for name in ("epsilon_low", "epsilon_high"):
            value = getattr(self, name)
            check_number(name, value)
            if not value >= 0:  # infinity is no bound
                raise ValueError(f"{name} must not be negative, got {value}")
        for name in ("vespo_k_pos", "vespo_k_neg"):
            check_finite(name, getattr(self, name), minimum=0)
        for name in ("sapo_temperature_pos", "sapo_temperature_neg", "vespo_lambda_pos", "vespo_lambda_neg"):
            check_positive(name, getattr(self, name))
        check_positive("delta", self.delta, optional=True)


class Clipped(NamedTuple):
    """Where the ratio is out of bounds in the direction in which its advantage pushes it; in the shape of the loss."""

    low: Tensor | None
    high: Tensor


def _reinforce(r: Rollouts, s: SurrogateSettings) -> Tensor:
    return -r.ratio * r.advantages


def _where(condition: Tensor, like: Tensor, value: float, otherwise: float) -> Tensor:
    """Select one of two numbers in the dtype of `like`; `torch.where` on two numbers always returns float32."""
    return torch.full_like(like, value).where(condition, otherwise)


def _clip(r: Rollouts, s: SurrogateSettings) -> Tensor:
    # min(r A, clamp(r) A) equals clamp(r) A with one bound only: the upper one if A > 0, the lower one if A < 0.
    delta, highest = math.inf if s.delta is None else s.delta, 1 + s.epsilon_high
    low = _where(r.advantages < 0, r.advantages, 1 - s.epsilon_low, -math.inf)
    high = _where(r.advantages > 0, r.advantages, min(delta, highest), max(delta, highest))
    return -r.ratio.clamp(low, high) * r.advantages


def _clipped_by_clip(r: Rollouts, s: SurrogateSettings) -> Clipped:
    ratio = r.ratio if s.delta is None else r.ratio.clamp(max=s.delta)
    return Clipped(
        low=(ratio < 1 - s.epsilon_low) & (r.advantages < 0),
        high=(ratio > 1 + s.epsilon_high) & (r.advantages > 0),
    )


def _cispo(r: Rollouts, s: SurrogateSettings) -> Tensor:
    # The ratio is only a weight, so a token keeps its gradient where PPO's clip would drop it.
    return -r.ratio.detach().clamp(max=s.epsilon_high) * r.advantages * r.logps


def _clipped_by_cispo(r: Rollouts, s: SurrogateSettings) -> Clipped:
    return Clipped(low=None, high=(r.ratio > s.epsilon_high) & (r.advantages > 0))


def _sapo(r: Rollouts, s: SurrogateSettings) -> Tensor:
    temperature = _where(r.advantages > 0, r.advantages, s.sapo_temperature_pos, s.sapo_temperature_neg)
    gate = 4 / temperature * torch.sigmoid(temperature * (r.ratio - 1))
    return -gate * r.advantages


# VESPO's bounds of log-ratios, which keep the weights from overflowing.
_LOWEST, _HIGHEST = math.log(1e-8), 20.0


@torch.no_grad()
def _vespo_weights(r: Rollouts, s: SurrogateSettings) -> Tensor:
    """Return `phi(w) = w^k e^(lambda (1 - w))` of the ratio `w` of a sequence, in the shape of the advantages."""
    log_w = (r.logps - r.old_logps).clamp(-_HIGHEST, _HIGHEST).sum(-1, keepdim=True, dtype=torch.float64)
    if r.importance_weights is not None:
        log_w = log_w + r.importance_weights.log().clamp(_LOWEST, _HIGHEST).sum(-1, keepdim=True)
    log_w = log_w.clamp(_LOWEST, _HIGHEST)
    k = _where(r.advantages >= 0, r.advantages, s.vespo_k_pos, s.vespo_k_neg)
    rate = _where(r.advantages >= 0, r.advantages, s.vespo_lambda_pos, s.vespo_lambda_neg)
    return torch.exp(rate + k * log_w - rate * log_w.exp())


def _vespo(r: Rollouts, s: SurrogateSettings) -> Tensor:
    return -_vespo_weights(r, s) * r.advantages * r.logps


class _ClippedBy(Protocol):
    def __call__(self, r: Rollouts, s: SurrogateSettings) -> Clipped: ...


class _Surrogate(NamedTuple):
    loss: Callable[[Rollouts, SurrogateSettings], Tensor]  # (n, T), or (n, 1) with one value per sequence
    reads: tuple[str, ...] = ()  # fields of SurrogateSettings
    clipped: _ClippedBy | None = None
    clips_low: bool = False  # `clipped` fills Clipped.low
    mixes_tokens: bool = False  # needs whole sequences, at any importance level
    weighs: bool = False  # applies the importance weights itself


SURROGATES: Mapping[str, _Surrogate] = {
    "clip": _Surrogate(_clip, reads=("epsilon_low", "epsilon_high", "delta"), clipped=_clipped_by_clip, clips_low=True),
    "reinforce": _Surrogate(_reinforce),
    "cispo": _Surrogate(_cispo, reads=("epsilon_high",), clipped=_clipped_by_cispo),
    "sapo": _Surrogate(_sapo, reads=("sapo_temperature_pos", "sapo_temperature_neg")),
    "vespo": _Surrogate(
        _vespo,
        reads=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        mixes_tokens=True,
        weighs=True,
    ),
}
