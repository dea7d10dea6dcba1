"""Surrogates of the policy gradient: what a token of a rollout costs. One class a paper, with its own settings.

    loss = LigerFusedLinearGRPOLoss(surrogate=Clip(epsilon_low=0.1), reduction="dapo")
    loss = LigerFusedLinearGRPOLoss(surrogate="clip", epsilon_low=0.1, reduction="dapo")        # the same

A surrogate knows nothing of reductions, importance levels, the KL term or the entropy bonus: those belong to the loss,
so each surrogate works with each of them. In the formulas, `A` is the advantage, `pi` and `pi_old` are probabilities of
the sampled token under the policy and the sampler, `r = pi / pi_old` is the importance ratio, and `sg` stops the
gradient. A method takes `Rollouts`, whose docstring has shapes and dtypes.

To add a surrogate to the library: write its class here, add it to `SURROGATES`, and its settings to `SurrogateOptions`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from liger_chunked.engine import refuse_capture
from liger_chunked.losses.formulas import complement
from liger_chunked.losses.rollouts import sum_of_logs
from liger_chunked.losses.settings import check_finite, check_positive, check_scope
from liger_chunked.types import (
    LARGEST_EXPONENT,
    Clipped,
    LogitOptionsDict,
    Rollouts,
    check_number,
    saturating_exp,
    shown,
)

__all__ = [
    "A2PO",
    "CISPO",
    "DPPOKL",
    "DPPOTV",
    "FIPO",
    "GMPO",
    "IPO",
    "REAL",
    "SAPO",
    "SURROGATES",
    "VESPO",
    "Clip",
    "ClipCov",
    "KLCov",
    "LogProb",
    "Reinforce",
    "Surrogate",
]

Scope = Literal["token", "sequence", "batch"]


class Surrogate(ABC):
    """What a token of a rollout costs, in place of the policy gradient: pass an instance as a loss's `surrogate`.

    A subclass has the method `cost`, and `clipped` if it clips ratios. Settings are fields of a frozen dataclass. Class
    attributes say what the loss must know:

    - `scope`: the rollouts that `cost` gets at once. "sequence": whole sequences. "token": single tokens, of shape
      (n, 1), for a cost that treats each independently: a sequence over budget then costs nothing extra. "batch": the
      whole batch, for a cost that compares sequences
    - `needs_tokens`: whether only `importance_level="token"` is accepted
    - `reads_ratio`: whether `cost` reads the ratio of the importance level. If not, a loss refuses other levels than
      "token", which would have no effect
    - `weighs`: whether `cost` applies `importance_weights`. If not, the loss multiplies by them
    - `needs_reference`: whether `cost` reads `ref_logps`. If so, a call requires a reference
    - `token_outputs`: ("entropy",) if `cost` has a gradient by the entropy

    >>> import torch
    >>> from liger_chunked import LigerFusedLinearGRPOLoss
    >>> class Squared(Surrogate):
    ...     def cost(self, rollouts):
    ...         return (rollouts.log_ratio - rollouts.advantages).square()
    >>> weight, input, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss, metrics = LigerFusedLinearGRPOLoss(surrogate=Squared())(weight, input, target, torch.tensor([2.0, -1.0]))
    >>> loss.item()        # on-policy, the logarithm of the ratio is 0
    2.5
    """

    scope: ClassVar[Scope] = "sequence"
    needs_tokens: ClassVar[bool] = False
    reads_ratio: ClassVar[bool] = True
    weighs: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    token_outputs: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_scope(cls.__name__, cls.scope, get_args(Scope))

    @abstractmethod
    def cost(self, rollouts: Rollouts) -> Tensor:
        """Return costs: (n, T) per token, or (n, 1) if a sequence's tokens share one."""

    def clipped(self, rollouts: Rollouts) -> Clipped | None:
        """Return where ratios are clipped in the whole batch, for the metrics; None: nowhere."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


# What several surrogates share


def _where(condition: Tensor, like: Tensor, value: float, otherwise: float) -> Tensor:
    """`torch.where` in the dtype of `like`, not float32."""
    return torch.full_like(like, value).where(condition, otherwise)


def _check_bound(name: str, value: Any) -> None:
    check_number(name, value)
    if not value >= 0:  # infinity is no bound
        raise ValueError(f"{name} must not be negative, got {value}")


@dataclass(frozen=True, kw_only=True)
class _Bounded(Surrogate):
    """A surrogate with a lower bound, which acts where `A < 0`, and an upper bound, which acts where `A > 0`."""

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2

    def __post_init__(self) -> None:
        _check_bound("epsilon_low", self.epsilon_low)
        _check_bound("epsilon_high", self.epsilon_high)

    def _outside(self, moved: Tensor, rollouts: Rollouts) -> Clipped:
        """Return where `moved`, 0 on-policy, is beyond the bound for the advantage's sign."""
        return Clipped(
            low=(moved < -self.epsilon_low) & (rollouts.advantages < 0),
            high=(moved > self.epsilon_high) & (rollouts.advantages > 0),
        )


class _ClipsRatio(_Bounded):
    """PPO's clip of the ratio. `delta`, the largest ratio where `A < 0`, is a setting of some subclasses."""

    def _clip_cost(self, r: Rollouts, delta: float | None) -> Tensor:
        # min(r A, clamp(r) A) is clamp(r) A with one bound: the upper if A > 0, the lower if A < 0.
        largest, highest = math.inf if delta is None else delta, 1 + self.epsilon_high
        low = _where(r.advantages < 0, r.advantages, 1 - self.epsilon_low, -math.inf)
        high = _where(r.advantages > 0, r.advantages, min(largest, highest), max(largest, highest))
        return r.ratio.clamp(low, high) * -r.advantages

    def _clipped(self, r: Rollouts, delta: float | None) -> Clipped:
        ratio = r.ratio if delta is None else r.ratio.clamp(max=delta)
        return Clipped(
            low=(ratio < 1 - self.epsilon_low) & (r.advantages < 0),
            high=(ratio > 1 + self.epsilon_high) & (r.advantages > 0),
        )


@dataclass(frozen=True, kw_only=True)
class _TrustRegion(Surrogate):
    """The cost `-min(r, ratio_max) A` inside a trust region, and 0 where `clipped` says that the token is outside.

    The gradient of a token inside is `-min(r, ratio_max) A grad(log pi)`: verl's; prime-rl's with `ratio_max=None`.
    """

    scope = "token"
    needs_tokens = True
    ratio_max: float | None = 20.0

    def __post_init__(self) -> None:
        check_positive("ratio_max", self.ratio_max, optional=True)

    @abstractmethod
    def clipped(self, rollouts: Rollouts) -> Clipped: ...

    def cost(self, rollouts: Rollouts) -> Tensor:
        r = rollouts
        # The logarithm is bounded, so that exp() cannot overflow where the cost is 0.
        highest = LARGEST_EXPONENT if self.ratio_max is None else math.log(self.ratio_max)
        bounded = r.log_ratio.detach().clamp(max=highest).exp()
        outside = self.clipped(r)
        assert outside.low is not None
        kept = torch.where(outside.low | outside.high, 0.0, bounded * r.advantages)
        return -kept * (1 + (r.logps - r.logps.detach()))


def _covariance(r: Rollouts) -> Tensor:
    """Return (n, T), each token's covariance of log-probability and advantage."""

    def centred(x: Tensor) -> Tensor:
        mean = torch.where(r.mask, x, 0.0).sum(dtype=torch.float64) / r.mask.sum().clamp(min=1)
        return x - mean.to(x.dtype)

    return centred(r.logps.detach()) * centred(r.advantages)


def _highest(values: Tensor, share: float, r: Rollouts, candidates: Tensor) -> Tensor:
    """Return (n, T), True at the candidates with the highest values, a `share` of the call's tokens."""
    refuse_capture(values, "a surrogate that ranks tokens by their covariance")
    ranked = values.masked_fill(~candidates, -math.inf).flatten()
    top = ranked.topk(min(max(1, int(share * r.batch_tokens)), ranked.numel())).indices
    return torch.zeros_like(ranked, dtype=torch.bool).index_fill(0, top, True).view_as(candidates) & candidates


def _check_share(name: str, share: Any) -> None:
    check_number(name, share)
    if not 0 < share <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {share}")


def _advantages_of_sequences(r: Rollouts) -> Tensor:
    """Return (n, 1), the mean over tokens of advantages per token."""
    if r.advantages.shape[-1] == 1:
        return r.advantages
    return torch.where(r.mask, r.advantages, 0.0).sum(-1, keepdim=True) / r.lengths


# Without bounds


@dataclass(frozen=True, kw_only=True)
class Reinforce(Surrogate):
    """REINFORCE with an importance ratio: a token costs `-r A`."""

    scope = "token"

    def cost(self, rollouts: Rollouts) -> Tensor:
        return rollouts.ratio * -rollouts.advantages


@dataclass(frozen=True, kw_only=True)
class LogProb(Surrogate):
    """A token costs `-A log pi`, without a ratio: GPG, https://arxiv.org/abs/2504.02546.

    With the loss's `sampler_kl_coef`, DRO (https://arxiv.org/abs/2405.19107), as in verl.
    """

    scope = "token"
    reads_ratio = False

    def cost(self, rollouts: Rollouts) -> Tensor:
        return -rollouts.advantages * rollouts.logps


# Bounds of the ratio


@dataclass(frozen=True, kw_only=True)
class Clip(_ClipsRatio):
    """PPO's clip (https://arxiv.org/abs/1707.06347), of GRPO, DAPO, Dr. GRPO, GSPO and LUSPO. A token costs

        -min(min(r, delta) A, clamp(r, 1 - epsilon_low, 1 + epsilon_high) A)

    Args:
        epsilon_low, epsilon_high: bounds of `1 - r` and `r - 1`; not negative, infinity is no bound.
        delta: the largest ratio where the advantage is negative (two-sided clipping, INTELLECT-2,
            https://arxiv.org/abs/2505.07291), usually above `1 + epsilon_high`; positive. None: no bound.
    """

    scope: ClassVar[Scope] = "token"  # which subclasses may change
    delta: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("delta", self.delta, optional=True)

    def cost(self, rollouts: Rollouts) -> Tensor:
        return self._clip_cost(rollouts, self.delta)

    def clipped(self, rollouts: Rollouts) -> Clipped | None:
        return self._clipped(rollouts, self.delta)


@dataclass(frozen=True, kw_only=True)
class CISPO(Surrogate):
    """Clipped importance weights (https://arxiv.org/abs/2506.13585, equation 4; 2510.13786). A token costs

        -sg(clamp(r, cispo_epsilon_low, epsilon_high)) A log pi

    Args:
        epsilon_high: the largest ratio, not negative, as in TRL; the papers use about 5.
        cispo_epsilon_low: the smallest ratio, the paper's `1 - epsilon_low`; not negative, at most `epsilon_high`.
    """

    scope = "token"
    epsilon_high: float = 0.2
    cispo_epsilon_low: float = 0.0

    def __post_init__(self) -> None:
        _check_bound("epsilon_high", self.epsilon_high)
        check_finite("cispo_epsilon_low", self.cispo_epsilon_low, minimum=0)
        if self.cispo_epsilon_low > self.epsilon_high:
            raise ValueError(
                f"cispo_epsilon_low={self.cispo_epsilon_low}, the lowest ratio, must not be above "
                f"epsilon_high={self.epsilon_high}, the highest"
            )

    def cost(self, rollouts: Rollouts) -> Tensor:
        r = rollouts
        return -r.ratio.detach().clamp(self.cispo_epsilon_low, self.epsilon_high) * r.advantages * r.logps

    def clipped(self, rollouts: Rollouts) -> Clipped:
        r = rollouts
        low = (r.ratio < self.cispo_epsilon_low) & (r.advantages < 0) if self.cispo_epsilon_low else None
        return Clipped(low=low, high=(r.ratio > self.epsilon_high) & (r.advantages > 0))


@dataclass(frozen=True, kw_only=True)
class GMPO(_Bounded):
    """Geometric means (https://arxiv.org/abs/2507.20673). A sequence costs `-exp(mean over its tokens of log c) A`.

    `c` is `min(r, e^epsilon_high)` where `A > 0`, and `max(r, e^-epsilon_low)` where `A < 0`.

    Args:
        epsilon_low, epsilon_high: bounds of `-log r` and `log r` in nats, 0.4 in the paper; not negative, infinity
            is no bound.
    """

    needs_tokens = True

    def cost(self, rollouts: Rollouts) -> Tensor:
        r = rollouts
        low = _where(r.advantages < 0, r.advantages, -self.epsilon_low, -math.inf)
        high = _where(r.advantages > 0, r.advantages, self.epsilon_high, math.inf)
        log_ratio = (r.logps - r.old_logps).clamp(low, high)
        return saturating_exp(sum_of_logs(log_ratio) / r.lengths) * -r.advantages

    def clipped(self, rollouts: Rollouts) -> Clipped:
        return self._outside(rollouts.logps - rollouts.old_logps, rollouts)


@dataclass(frozen=True, kw_only=True)
class FIPO(Clip):
    """`Clip`, times a weight by the ratios of later tokens (https://arxiv.org/abs/2603.19835, as in ms-swift).

    The weight is `sg(clamp(exp(F), 1 - fipo_clip_low, 1 + fipo_clip_high))`. `F` is the sum over the sequence's tokens
    from this one on of `2^(-distance / fipo_half_life) log r`, without tokens whose `r` is above `delta`.

    Args:
        epsilon_low, epsilon_high: bounds of `1 - r` and `r - 1`; not negative, infinity is no bound.
        delta: the largest ratio where the advantage is negative, and of tokens that count in `F`; positive. None: no
            bound.
        fipo_half_life: the distance at which `log r` counts half, in tokens, positive; ms-swift's `fipo_decay_rate`.
        fipo_clip_low, fipo_clip_high: bounds of the weight, in [0, 1], and not negative.
        fipo_safety_ratio: where `A < 0` and `r` is above this ratio, the weight is in [0.8, 1]; positive. None: no such
            bound.
    """

    scope = "sequence"
    needs_tokens = True
    fipo_half_life: float = 32.0
    fipo_clip_low: float = 0.0
    fipo_clip_high: float = 0.2
    fipo_safety_ratio: float | None = 4.0
    _safe: ClassVar[tuple[float, float]] = (0.8, 1.0)  # the paper's and ms-swift's constants

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("fipo_half_life", self.fipo_half_life)
        check_finite("fipo_clip_low", self.fipo_clip_low, minimum=0, maximum=1)
        check_finite("fipo_clip_high", self.fipo_clip_high, minimum=0)
        check_positive("fipo_safety_ratio", self.fipo_safety_ratio, optional=True)

    def cost(self, rollouts: Rollouts) -> Tensor:
        return self._weights(rollouts) * super().cost(rollouts)

    @torch.no_grad()
    def _weights(self, r: Rollouts) -> Tensor:
        log_ratio = r.logps - r.old_logps
        counted = r.mask if self.delta is None else r.mask & (log_ratio <= math.log(self.delta))
        future = _discounted_future(torch.where(counted, log_ratio, 0.0), 2 ** (-1 / self.fipo_half_life))
        low = math.log1p(-self.fipo_clip_low) if self.fipo_clip_low < 1 else -math.inf
        weights = future.clamp(low, math.log1p(self.fipo_clip_high)).exp()
        if self.fipo_safety_ratio is None:
            return weights
        unsafe = (r.advantages < 0) & (log_ratio > math.log(self.fipo_safety_ratio))
        return torch.where(unsafe, weights.clamp(*self._safe), weights)


def _discounted_future(x: Tensor, discount: float) -> Tensor:
    """Return (n, T), `sum over j >= t of discount^(j - t) x_j`.

    Each step doubles the window that the sums span: no power of `1 / discount`, which would overflow.
    """
    span = 1
    while span < x.shape[-1] and discount**span > 0:
        x = x + discount**span * torch.nn.functional.pad(x[:, span:], (0, span))
        span *= 2
    return x


# Smooth weights


@dataclass(frozen=True, kw_only=True)
class SAPO(Surrogate):
    """Soft gates (https://arxiv.org/abs/2511.20347). A token costs `-(4 / tau) sigmoid(tau (r - 1)) A`.

    Args:
        sapo_temperature_pos, sapo_temperature_neg: `tau` where `A > 0`, and elsewhere; positive.
    """

    scope = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05

    def __post_init__(self) -> None:
        check_positive("sapo_temperature_pos", self.sapo_temperature_pos)
        check_positive("sapo_temperature_neg", self.sapo_temperature_neg)

    def cost(self, rollouts: Rollouts) -> Tensor:
        r = rollouts
        temperature = _where(r.advantages > 0, r.advantages, self.sapo_temperature_pos, self.sapo_temperature_neg)
        gate = 4 / temperature * torch.sigmoid(temperature * (r.ratio - 1))
        return gate * -r.advantages


@dataclass(frozen=True, kw_only=True)
class VESPO(Surrogate):
    """Weights of whole sequences (https://arxiv.org/abs/2602.10693). A token costs `-sg(phi(w)) A log pi`.

    `phi(w) = w^k e^(lambda (1 - w))`, and `w` is the product over the sequence's tokens of `r` and of the importance
    weights, which are not applied again.

    Args:
        vespo_k_pos, vespo_lambda_pos: `k` and `lambda` where `A >= 0`; not negative, and positive.
        vespo_k_neg, vespo_lambda_neg: `k` and `lambda` where `A < 0`; not negative, and positive.
    """

    weighs = True
    reads_ratio = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    # Bounds of log-ratios, against overflow.
    _lowest: ClassVar[float] = math.log(1e-8)
    _highest: ClassVar[float] = 20.0

    def __post_init__(self) -> None:
        for side in ("pos", "neg"):
            check_finite(f"vespo_k_{side}", getattr(self, f"vespo_k_{side}"), minimum=0)
            check_positive(f"vespo_lambda_{side}", getattr(self, f"vespo_lambda_{side}"))

    def cost(self, rollouts: Rollouts) -> Tensor:
        return -self._weights(rollouts) * rollouts.advantages * rollouts.logps

    @torch.no_grad()
    def _weights(self, r: Rollouts) -> Tensor:
        lowest, highest = self._lowest, self._highest
        log_w = (r.logps - r.old_logps).clamp(-highest, highest).sum(-1, keepdim=True, dtype=torch.float64)
        if r.importance_weights is not None:
            log_w = log_w + r.importance_weights.log().clamp(lowest, highest).sum(-1, keepdim=True)
        log_w = log_w.clamp(lowest, highest)
        k = _where(r.advantages >= 0, r.advantages, self.vespo_k_pos, self.vespo_k_neg)
        rate = _where(r.advantages >= 0, r.advantages, self.vespo_lambda_pos, self.vespo_lambda_neg)
        return saturating_exp(rate + k * log_w - rate * log_w.exp())


# By the covariance of log-probability and advantage


@dataclass(frozen=True, kw_only=True)
class ClipCov(_ClipsRatio):
    """Clip-Cov (https://arxiv.org/abs/2505.22617): as `Clip`, but 0 for a share of the tokens.

    These are the tokens with the highest `(log pi - mean log pi) (A - mean A)`, at least one, with means over the
    call's tokens. They are chosen among tokens inside the bounds that `Clip` does not clip; the paper draws at random.
    The names and defaults are verl's.

    Args:
        epsilon_low, epsilon_high: bounds of `1 - r` and `r - 1`; not negative, infinity is no bound.
        clip_cov_ratio: the share of the call's tokens, in (0, 1].
        clip_cov_lb, clip_cov_ub: bounds of the covariance of these tokens, in nats times units of the advantage.
    """

    scope = "batch"
    needs_tokens = True
    clip_cov_ratio: float = 2e-4
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share("clip_cov_ratio", self.clip_cov_ratio)
        check_finite("clip_cov_lb", self.clip_cov_lb)
        check_finite("clip_cov_ub", self.clip_cov_ub)
        if not self.clip_cov_lb < self.clip_cov_ub:
            raise ValueError(f"clip_cov_lb={self.clip_cov_lb} must be below clip_cov_ub={self.clip_cov_ub}")

    def cost(self, rollouts: Rollouts) -> Tensor:
        r, covariance = rollouts, _covariance(rollouts)
        inside = (covariance > self.clip_cov_lb) & (covariance < self.clip_cov_ub)
        low, high = self.clipped(r)
        assert low is not None
        detached = _highest(covariance, self.clip_cov_ratio, r, r.mask & inside & ~(low | high))
        return torch.where(detached, 0.0, self._clip_cost(r, delta=None))

    def clipped(self, rollouts: Rollouts) -> Clipped:
        return self._clipped(rollouts, delta=None)


@dataclass(frozen=True, kw_only=True)
class KLCov(Surrogate):
    """KL-Cov (https://arxiv.org/abs/2505.22617): a token costs `-r A`, a share of them `ppo_kl_coef abs(log r)` more.

    These are the tokens with the highest `(log pi - mean log pi) (A - mean A)`, at least one, with means over the
    call's tokens. The names and defaults are verl's.

    Args:
        kl_cov_ratio: the share of the call's tokens, in (0, 1].
        ppo_kl_coef: weight of `abs(log r)`, not negative.
    """

    scope = "batch"
    needs_tokens = True
    kl_cov_ratio: float = 2e-4
    ppo_kl_coef: float = 1.0

    def __post_init__(self) -> None:
        _check_share("kl_cov_ratio", self.kl_cov_ratio)
        check_finite("ppo_kl_coef", self.ppo_kl_coef, minimum=0)

    def cost(self, rollouts: Rollouts) -> Tensor:
        r = rollouts
        penalized = _highest(_covariance(r), self.kl_cov_ratio, r, r.mask)
        return r.ratio * -r.advantages + self.ppo_kl_coef * torch.where(penalized, r.log_ratio.abs(), 0.0)


# Trust regions


@dataclass(frozen=True, kw_only=True)
class DPPOTV(_Bounded, _TrustRegion):
    """DPPO by total variation (https://arxiv.org/abs/2602.04879). A token costs `-min(r, ratio_max) A`, or 0 outside.

    Outside the trust region, with `d = pi - pi_old` of the sampled token, are tokens with `d > epsilon_high` and
    `A > 0`, and with `d < -epsilon_low` and `A < 0`. The gradient inside is `-min(r, ratio_max) A grad(log pi)`.

    Args:
        epsilon_low, epsilon_high: bounds of `-d` and `d`; not negative, infinity is no bound.
        ratio_max: the largest `r` of a gradient, positive; verl's `clip_ratio_c`. None: no bound, as in prime-rl.
    """

    def __post_init__(self) -> None:
        _Bounded.__post_init__(self)
        _TrustRegion.__post_init__(self)

    def clipped(self, rollouts: Rollouts) -> Clipped:
        return self._outside(rollouts.logps.detach().exp() - rollouts.old_logps.exp(), rollouts)


@dataclass(frozen=True, kw_only=True)
class DPPOKL(DPPOTV):
    """DPPO by the KL (https://arxiv.org/abs/2602.04879). A token costs `-min(r, ratio_max) A`, or 0 outside.

    Outside the trust region are tokens whose KL of Bernoulli distributions,
    `pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))`, is above `epsilon_high` where `pi > pi_old`
    and `A > 0`, or above `epsilon_low` where `pi < pi_old` and `A < 0`. Gradients inside are as in `DPPOTV`.

    Args:
        epsilon_low, epsilon_high: bounds of the KL in nats, the paper's are 0.05; not negative, infinity is no bound.
        ratio_max: the largest `r` of a gradient, positive; verl's `clip_ratio_c`. None: no bound, as in prime-rl.
    """

    def clipped(self, rollouts: Rollouts) -> Clipped:
        r, logps = rollouts, rollouts.logps.detach()
        divergence = _binary_kl(r.old_logps, logps)
        return Clipped(
            low=(divergence > self.epsilon_low) & (logps < r.old_logps) & (r.advantages < 0),
            high=(divergence > self.epsilon_high) & (logps > r.old_logps) & (r.advantages > 0),
        )


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return `KL(Bernoulli(p) || Bernoulli(q))`."""
    others = complement(log_p)
    return log_p.exp() * (log_p - log_q) + others * (others.log() - complement(log_q).log())


@dataclass(frozen=True, kw_only=True)
class IPO(_TrustRegion):
    """prime-rl's IPO: a token costs `-min(r, ratio_max) A`, or 0 where `abs(pi - pi_old) > ipo_threshold`.

    Gradients inside are as in `DPPOTV`.

    Args:
        ipo_threshold: bound of `abs(pi - pi_old)` of the sampled token, for both signs of `A`; not negative.
        ratio_max: the largest `r` of a gradient, positive. None: no bound, as in prime-rl.
    """

    ipo_threshold: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite("ipo_threshold", self.ipo_threshold, minimum=0)

    def clipped(self, rollouts: Rollouts) -> Clipped:
        moved = rollouts.logps.detach().exp() - rollouts.old_logps.exp()
        return Clipped(low=moved < -self.ipo_threshold, high=moved > self.ipo_threshold)


# Of sequences


@dataclass(frozen=True, kw_only=True)
class REAL(Surrogate):
    """Classification of a group's sequences (https://arxiv.org/abs/2602.05630). A group of `group_size` costs

        log(1 + sum over sequences with A > 0 of e^-s) + log(1 + sum over the others of e^s)

    with scores `s = mean over the sequence of log r / real_temperature`, or 0 if all its advantages have one sign.
    Consecutive sequences are a group. Sequences without tokens are in no sum. With `reduction="grpo"`, the loss is the
    mean over groups, as in ms-swift.

    Args:
        group_size: sequences a prompt, 2 or more; required. None: not given.
        real_temperature: of the scores, in nats, positive; ms-swift's `real_tau`.
    """

    scope = "batch"
    needs_tokens = True
    group_size: int | None = None  # None, so that the constructor of a loss has a default too
    real_temperature: float = 0.5

    def __post_init__(self) -> None:
        check_number("group_size", self.group_size, whole=True, optional=True)
        if self.group_size is None:
            raise ValueError("surrogate 'real' needs group_size, the number of sequences a prompt, got None")
        if self.group_size < 2:
            raise ValueError(f"group_size must be 2 or more, got {self.group_size}")
        check_positive("real_temperature", self.real_temperature)

    def cost(self, rollouts: Rollouts) -> Tensor:
        r, size, n = rollouts, self.group_size, rollouts.mask.shape[0]
        assert size is not None
        if n % size:
            raise ValueError(f"surrogate 'real' needs whole groups of group_size={size} sequences in a call, got {n}")
        scores = (sum_of_logs(r.logps - r.old_logps) / r.lengths / self.real_temperature).view(n // size, size)
        present = r.mask.any(-1).view_as(scores)
        advantages = _advantages_of_sequences(r).view_as(scores)
        positive = (advantages > 0) & present
        others = present & ~positive

        def of_class(members: Tensor, exponents: Tensor) -> Tensor:
            zero = exponents.new_zeros(n // size, 1)  # the 1 of log(1 + ...)
            return torch.cat([exponents.masked_fill(~members, -math.inf), zero], -1).logsumexp(-1, keepdim=True)

        mixed = positive.any(-1, keepdim=True) & others.any(-1, keepdim=True)
        of_groups = torch.where(mixed, of_class(positive, -scores) + of_class(others, scores), 0.0)
        unknown = ((advantages.isnan() | scores.isnan()) & present).any(-1, keepdim=True)  # NaN is of neither class
        of_groups = of_groups.masked_fill(unknown, math.nan)
        # Each sequence with tokens carries an equal part of its group's loss, so that their mean is that over groups.
        return (of_groups * size / present.sum(-1, keepdim=True).clamp(min=1)).expand_as(scores).reshape(n, 1)


@dataclass(frozen=True, kw_only=True)
class A2PO(Surrogate):
    """A*-PO (https://arxiv.org/abs/2505.20686). A sequence `y` costs `(a2po_beta log(pi(y) / pi_ref(y)) - A)^2`.

    It needs the reference. `A` is `reward - V`, where `V = beta1 logsumexp(rewards / beta1 - log n)` of `n` samples of
    the reference. With `reduction="grpo"`, the loss is TRL's.

    Args:
        a2po_beta: units of the advantage per nat, positive; TRL's `beta2`.
    """

    needs_tokens = True
    needs_reference = True
    a2po_beta: float = 1e-3

    def __post_init__(self) -> None:
        check_positive("a2po_beta", self.a2po_beta)

    def cost(self, rollouts: Rollouts) -> Tensor:
        r = rollouts
        assert r.ref_logps is not None
        return (self.a2po_beta * sum_of_logs(r.logps - r.ref_logps) - _advantages_of_sequences(r)).square()


# By name

SURROGATES: Mapping[str, type[Surrogate]] = {
    "clip": Clip,
    "reinforce": Reinforce,
    "cispo": CISPO,
    "gmpo": GMPO,
    "sapo": SAPO,
    "vespo": VESPO,
    "clip_cov": ClipCov,
    "kl_cov": KLCov,
    "log_prob": LogProb,
    "dppo_tv": DPPOTV,
    "dppo_kl": DPPOKL,
    "ipo": IPO,
    "fipo": FIPO,
    "real": REAL,
    "a2po": A2PO,
}


class SurrogateOptions(LogitOptionsDict, total=False):
    """The keywords of a loss that chooses its surrogate by name: fields of the surrogates, and logit options."""

    epsilon_low: float
    epsilon_high: float
    delta: float | None
    cispo_epsilon_low: float
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float
    clip_cov_ratio: float
    clip_cov_lb: float
    clip_cov_ub: float
    kl_cov_ratio: float
    ppo_kl_coef: float
    ratio_max: float | None
    ipo_threshold: float
    fipo_half_life: float
    fipo_clip_low: float
    fipo_clip_high: float
    fipo_safety_ratio: float | None
    real_temperature: float
    group_size: int | None
    a2po_beta: float


def settings_of(kind: type[Surrogate]) -> dict[str, Any]:
    """Return the settings of a built-in surrogate with their defaults, by name."""
    return {field.name: field.default for field in dataclasses.fields(kind)}  # type: ignore[arg-type]


def surrogate_of(
    surrogate: Any, settings: Mapping[str, Any], table: Mapping[str, type[Surrogate]] = SURROGATES
) -> tuple[Surrogate, str]:
    """Return what a loss was given as `surrogate`, and what errors call it.

    Args:
        surrogate: a name of `table`, or a `Surrogate`, which has its own settings.
        settings: keywords of the loss that are settings of surrogates of `table`. With a name, one at its default
            counts as not given, whatever reads it: a sweep over names may pass it to all.

    Raises:
        TypeError: `surrogate` is a class, or a setting has the wrong type.
        ValueError: `surrogate` is unknown, or a setting is out of range or not read.
    """
    if isinstance(surrogate, type) and issubclass(surrogate, Surrogate):
        raise TypeError(f"surrogate must be an object, {surrogate.__name__}(...), got the class {surrogate.__name__}")
    if isinstance(surrogate, Surrogate):
        own = type(surrogate).__name__
        for setting, value in settings.items():
            raise ValueError(
                f"{setting}={shown(value)} is not read by a surrogate that is an object: pass it to {own}(...)"
            )
        return surrogate, f"surrogate {own}"
    if not isinstance(surrogate, str) or surrogate not in table:
        raise ValueError(
            f"unknown surrogate {shown(surrogate)}, expected one of {sorted(table)}, or a Surrogate, such as Clip()"
        )
    by, read = f"surrogate {surrogate!r}", settings_of(table[surrogate])
    for setting, value in settings.items():
        if setting in read:
            continue
        readers = {name: settings_of(table[name]) for name in sorted(table) if setting in settings_of(table[name])}
        default = next(iter(readers.values()))[setting]  # of every reader
        if not (value is default or (isinstance(value, (int, float)) and value == default)):
            raise ValueError(f"{setting}={shown(value)} is not read by {by}, only by {list(readers)}")
    return table[surrogate](**{name: x for name, x in settings.items() if name in read}), by
