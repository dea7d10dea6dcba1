"""GRPO and its kin: surrogates of the policy gradient, one function a paper, with where each clips ratios.

Reductions and importance levels are settings of the base, so that a surrogate is written once for all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import Self, Unpack

from liger_chunked.arguments import own_options
from liger_chunked.losses.formulas import complement
from liger_chunked.losses.policy import LigerFusedLinearPolicyBase
from liger_chunked.losses.rollouts import IMPORTANCE_LEVELS, sum_of_logs
from liger_chunked.losses.settings import check_finite, check_positive, is_set, refuse_unread
from liger_chunked.types import (
    LARGEST_EXPONENT,
    Clipped,
    LogitOptionsDict,
    Rollouts,
    check_number,
    saturating_exp,
    shown,
)


@dataclass(frozen=True)
class SurrogateSettings:
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    cispo_epsilon_low: float = 0.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    clip_cov_ratio: float = 2e-4
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 2e-4
    ppo_kl_coef: float = 1.0
    ratio_max: float | None = 20.0
    ipo_threshold: float = 0.1
    fipo_half_life: float = 32.0
    fipo_clip_low: float = 0.0
    fipo_clip_high: float = 0.2
    fipo_safety_ratio: float | None = 4.0
    real_temperature: float = 0.5
    group_size: int | None = None
    a2po_beta: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("epsilon_low", "epsilon_high"):
            value = getattr(self, name)
            check_number(name, value)
            if not value >= 0:  # infinity is no bound
                raise ValueError(f"{name} must not be negative, got {value}")
        for name in ("vespo_k_pos", "vespo_k_neg", "cispo_epsilon_low", "ppo_kl_coef"):
            check_finite(name, getattr(self, name), minimum=0)
        for name in ("clip_cov_ratio", "kl_cov_ratio"):
            share = getattr(self, name)
            check_number(name, share)
            if not 0 < share <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {share}")
        for name in ("clip_cov_lb", "clip_cov_ub"):
            check_finite(name, getattr(self, name))
        if not self.clip_cov_lb < self.clip_cov_ub:
            raise ValueError(f"clip_cov_lb={self.clip_cov_lb} must be below clip_cov_ub={self.clip_cov_ub}")
        if self.cispo_epsilon_low > self.epsilon_high:
            raise ValueError(
                f"cispo_epsilon_low={self.cispo_epsilon_low}, the lowest ratio, must not be above "
                f"epsilon_high={self.epsilon_high}, the highest"
            )
        for name in ("sapo_temperature_pos", "sapo_temperature_neg", "vespo_lambda_pos", "vespo_lambda_neg"):
            check_positive(name, getattr(self, name))
        check_positive("delta", self.delta, optional=True)
        check_positive("ratio_max", self.ratio_max, optional=True)
        for name in ("fipo_half_life", "real_temperature", "a2po_beta"):
            check_positive(name, getattr(self, name))
        check_finite("ipo_threshold", self.ipo_threshold, minimum=0)
        check_finite("fipo_clip_high", self.fipo_clip_high, minimum=0)
        check_finite("fipo_clip_low", self.fipo_clip_low, minimum=0, maximum=1)
        check_positive("fipo_safety_ratio", self.fipo_safety_ratio, optional=True)
        check_number("group_size", self.group_size, whole=True, optional=True)
        if self.group_size is not None and self.group_size < 2:
            raise ValueError(f"group_size must be 2 or more, got {self.group_size}")


def _reinforce(r: Rollouts, s: SurrogateSettings) -> Tensor:
    return -r.ratio * r.advantages


def _where(condition: Tensor, like: Tensor, value: float, otherwise: float) -> Tensor:
    """`torch.where` in the dtype of `like`, not float32."""
    return torch.full_like(like, value).where(condition, otherwise)


def _clip(r: Rollouts, s: SurrogateSettings) -> Tensor:
    # min(r A, clamp(r) A) is clamp(r) A with one bound: the upper if A > 0, the lower if A < 0.
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
    return -r.ratio.detach().clamp(s.cispo_epsilon_low, s.epsilon_high) * r.advantages * r.logps


def _clipped_by_cispo(r: Rollouts, s: SurrogateSettings) -> Clipped:
    low = (r.ratio < s.cispo_epsilon_low) & (r.advantages < 0) if s.cispo_epsilon_low else None
    return Clipped(low=low, high=(r.ratio > s.epsilon_high) & (r.advantages > 0))


def _gmpo(r: Rollouts, s: SurrogateSettings) -> Tensor:
    low = _where(r.advantages < 0, r.advantages, -s.epsilon_low, -math.inf)
    high = _where(r.advantages > 0, r.advantages, s.epsilon_high, math.inf)
    log_ratio = (r.logps - r.old_logps).clamp(low, high)
    return -saturating_exp(sum_of_logs(log_ratio) / r.lengths) * r.advantages


def _clipped_by_gmpo(r: Rollouts, s: SurrogateSettings) -> Clipped:
    log_ratio = r.logps - r.old_logps
    return Clipped(
        low=(log_ratio < -s.epsilon_low) & (r.advantages < 0),
        high=(log_ratio > s.epsilon_high) & (r.advantages > 0),
    )


def _sapo(r: Rollouts, s: SurrogateSettings) -> Tensor:
    temperature = _where(r.advantages > 0, r.advantages, s.sapo_temperature_pos, s.sapo_temperature_neg)
    gate = 4 / temperature * torch.sigmoid(temperature * (r.ratio - 1))
    return -gate * r.advantages


# VESPO's bounds of log-ratios, against overflow.
_LOWEST, _HIGHEST = math.log(1e-8), 20.0


@torch.no_grad()
def _vespo_weights(r: Rollouts, s: SurrogateSettings) -> Tensor:
    log_w = (r.logps - r.old_logps).clamp(-_HIGHEST, _HIGHEST).sum(-1, keepdim=True, dtype=torch.float64)
    if r.importance_weights is not None:
        log_w = log_w + r.importance_weights.log().clamp(_LOWEST, _HIGHEST).sum(-1, keepdim=True)
    log_w = log_w.clamp(_LOWEST, _HIGHEST)
    k = _where(r.advantages >= 0, r.advantages, s.vespo_k_pos, s.vespo_k_neg)
    rate = _where(r.advantages >= 0, r.advantages, s.vespo_lambda_pos, s.vespo_lambda_neg)
    return saturating_exp(rate + k * log_w - rate * log_w.exp())


def _vespo(r: Rollouts, s: SurrogateSettings) -> Tensor:
    return -_vespo_weights(r, s) * r.advantages * r.logps


def _covariance(r: Rollouts) -> Tensor:
    """Return (n, T), each token's covariance of log-probability and advantage."""

    def centred(x: Tensor) -> Tensor:
        mean = torch.where(r.mask, x, 0.0).sum(dtype=torch.float64) / r.mask.sum().clamp(min=1)
        return x - mean.to(x.dtype)

    return centred(r.logps.detach()) * centred(r.advantages)


def _highest(values: Tensor, share: float, r: Rollouts, candidates: Tensor) -> Tensor:
    """Return (n, T), True at the candidates with the highest values, a `share` of the call's tokens."""
    ranked = values.masked_fill(~candidates, -math.inf).flatten()
    top = ranked.topk(min(max(1, int(share * r.batch_tokens)), ranked.numel())).indices
    return torch.zeros_like(ranked, dtype=torch.bool).index_fill(0, top, True).view_as(candidates) & candidates


def _clip_cov(r: Rollouts, s: SurrogateSettings) -> Tensor:
    covariance = _covariance(r)
    inside = (covariance > s.clip_cov_lb) & (covariance < s.clip_cov_ub)
    low, high = _clipped_by_clip(r, s)
    assert low is not None
    detached = _highest(covariance, s.clip_cov_ratio, r, r.mask & inside & ~(low | high))
    return torch.where(detached, 0.0, _clip(r, s))


def _kl_cov(r: Rollouts, s: SurrogateSettings) -> Tensor:
    penalized = _highest(_covariance(r), s.kl_cov_ratio, r, r.mask)
    return _reinforce(r, s) + s.ppo_kl_coef * torch.where(penalized, r.log_ratio.abs(), 0.0)


def _log_prob(r: Rollouts, s: SurrogateSettings) -> Tensor:
    return -r.advantages * r.logps


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return `KL(Bernoulli(p) || Bernoulli(q))`."""
    others = complement(log_p)
    return log_p.exp() * (log_p - log_q) + others * (others.log() - complement(log_q).log())


def _outside_tv(r: Rollouts, s: SurrogateSettings) -> Clipped:
    moved = r.logps.detach().exp() - r.old_logps.exp()
    return Clipped(
        low=(moved < -s.epsilon_low) & (r.advantages < 0), high=(moved > s.epsilon_high) & (r.advantages > 0)
    )


def _outside_kl(r: Rollouts, s: SurrogateSettings) -> Clipped:
    logps = r.logps.detach()
    divergence = _binary_kl(r.old_logps, logps)
    return Clipped(
        low=(divergence > s.epsilon_low) & (logps < r.old_logps) & (r.advantages < 0),
        high=(divergence > s.epsilon_high) & (logps > r.old_logps) & (r.advantages > 0),
    )


def _outside_ipo(r: Rollouts, s: SurrogateSettings) -> Clipped:
    moved = r.logps.detach().exp() - r.old_logps.exp()
    return Clipped(low=moved < -s.ipo_threshold, high=moved > s.ipo_threshold)


def _inside(outside: _ClippedBy) -> Callable[[Rollouts, SurrogateSettings], Tensor]:
    """Return the cost `-min(r, ratio_max) A` inside a trust region, and 0 outside, with `grad(log pi)` times it."""

    def cost(r: Rollouts, s: SurrogateSettings) -> Tensor:
        # The logarithm is bounded, so that exp() cannot overflow where the cost is 0.
        highest = LARGEST_EXPONENT if s.ratio_max is None else math.log(s.ratio_max)
        bounded = r.log_ratio.detach().clamp(max=highest).exp()
        masked = outside(r, s)
        assert masked.low is not None
        kept = torch.where(masked.low | masked.high, 0.0, bounded * r.advantages)
        return -kept * (1 + (r.logps - r.logps.detach()))

    return cost


def _discounted_future(x: Tensor, discount: float) -> Tensor:
    """Return (n, T), `sum over j >= t of discount^(j - t) x_j`.

    Each step doubles the window that the sums span: no power of `1 / discount`, which would overflow.
    """
    span = 1
    while span < x.shape[-1] and discount**span > 0:
        x = x + discount**span * torch.nn.functional.pad(x[:, span:], (0, span))
        span *= 2
    return x


@torch.no_grad()
def _fipo_weights(r: Rollouts, s: SurrogateSettings) -> Tensor:
    log_ratio = r.logps - r.old_logps
    counted = r.mask if s.delta is None else r.mask & (log_ratio <= math.log(s.delta))
    future = _discounted_future(torch.where(counted, log_ratio, 0.0), 2 ** (-1 / s.fipo_half_life))
    low = math.log1p(-s.fipo_clip_low) if s.fipo_clip_low < 1 else -math.inf
    weights = future.clamp(low, math.log1p(s.fipo_clip_high)).exp()
    if s.fipo_safety_ratio is None:
        return weights
    unsafe = (r.advantages < 0) & (log_ratio > math.log(s.fipo_safety_ratio))
    return torch.where(unsafe, weights.clamp(*_FIPO_SAFE), weights)


# Bounds of FIPO's weights where the ratio is large and the advantage negative; the paper's and ms-swift's constants.
_FIPO_SAFE = (0.8, 1.0)


def _fipo(r: Rollouts, s: SurrogateSettings) -> Tensor:
    return _fipo_weights(r, s) * _clip(r, s)


def _advantages_of_sequences(r: Rollouts) -> Tensor:
    """Return (n, 1), the mean over tokens of advantages per token."""
    if r.advantages.shape[-1] == 1:
        return r.advantages
    return torch.where(r.mask, r.advantages, 0.0).sum(-1, keepdim=True) / r.lengths


def _real(r: Rollouts, s: SurrogateSettings) -> Tensor:
    size, n = s.group_size, r.mask.shape[0]
    assert size is not None
    if n % size:
        raise ValueError(f"surrogate 'real' needs whole groups of group_size={size} sequences in a call, got {n}")
    scores = (sum_of_logs(r.logps - r.old_logps) / r.lengths / s.real_temperature).view(n // size, size)
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


def _a2po(r: Rollouts, s: SurrogateSettings) -> Tensor:
    assert r.ref_logps is not None
    return (s.a2po_beta * sum_of_logs(r.logps - r.ref_logps) - _advantages_of_sequences(r)).square()


class _ClippedBy(Protocol):
    def __call__(self, r: Rollouts, s: SurrogateSettings) -> Clipped: ...


class _Surrogate(NamedTuple):
    loss: Callable[[Rollouts, SurrogateSettings], Tensor]  # (n, T), or (n, 1)
    reads: tuple[str, ...] = ()  # fields of SurrogateSettings
    clipped: _ClippedBy | None = None
    clips_low: bool = False  # `clipped` fills Clipped.low
    scope: Literal["token", "sequence", "batch"] = "token"
    needs_tokens: bool = False  # only importance level "token"
    reads_ratio: bool = True  # of the importance level
    weighs: bool = False  # applies importance weights
    needs_reference: bool = False


def _trust_region(outside: _ClippedBy, reads: tuple[str, ...]) -> _Surrogate:
    reads = (*reads, "ratio_max")
    return _Surrogate(_inside(outside), reads=reads, clipped=outside, clips_low=True, needs_tokens=True)


SURROGATES: Mapping[str, _Surrogate] = {
    "clip": _Surrogate(
        _clip,
        reads=("epsilon_low", "epsilon_high", "delta"),
        clipped=_clipped_by_clip,
        clips_low=True,
    ),
    "reinforce": _Surrogate(_reinforce),
    "cispo": _Surrogate(_cispo, reads=("epsilon_high", "cispo_epsilon_low"), clipped=_clipped_by_cispo),
    "gmpo": _Surrogate(
        _gmpo,
        reads=("epsilon_low", "epsilon_high"),
        clipped=_clipped_by_gmpo,
        clips_low=True,
        scope="sequence",
        needs_tokens=True,
    ),
    "sapo": _Surrogate(_sapo, reads=("sapo_temperature_pos", "sapo_temperature_neg")),
    "vespo": _Surrogate(
        _vespo,
        reads=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        scope="sequence",
        weighs=True,
        reads_ratio=False,
    ),
    "clip_cov": _Surrogate(
        _clip_cov,
        reads=("epsilon_low", "epsilon_high", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
        clipped=_clipped_by_clip,
        clips_low=True,
        scope="batch",
        needs_tokens=True,
    ),
    "kl_cov": _Surrogate(_kl_cov, reads=("kl_cov_ratio", "ppo_kl_coef"), scope="batch", needs_tokens=True),
    "log_prob": _Surrogate(_log_prob, reads_ratio=False),
    "dppo_tv": _trust_region(_outside_tv, reads=("epsilon_low", "epsilon_high")),
    "dppo_kl": _trust_region(_outside_kl, reads=("epsilon_low", "epsilon_high")),
    "ipo": _trust_region(_outside_ipo, reads=("ipo_threshold",)),
    "fipo": _Surrogate(
        _fipo,
        reads=(
            "epsilon_low",
            "epsilon_high",
            "delta",
            "fipo_half_life",
            "fipo_clip_low",
            "fipo_clip_high",
            "fipo_safety_ratio",
        ),
        clipped=_clipped_by_clip,
        clips_low=True,
        scope="sequence",
        needs_tokens=True,
    ),
    "real": _Surrogate(_real, reads=("real_temperature", "group_size"), scope="batch", needs_tokens=True),
    "a2po": _Surrogate(_a2po, reads=("a2po_beta",), scope="sequence", needs_tokens=True, needs_reference=True),
}

LOSS_TYPES: Mapping[str, Mapping[str, str]] = {
    "grpo": {"surrogate": "clip", "reduction": "grpo"},
    "bnpo": {"surrogate": "clip", "reduction": "bnpo"},
    "dr_grpo": {"surrogate": "clip", "reduction": "dr_grpo"},
    "dapo": {"surrogate": "clip", "reduction": "dapo"},
    "cispo": {"surrogate": "cispo", "reduction": "dapo"},
    "sapo": {"surrogate": "sapo", "reduction": "grpo"},
    "luspo": {"surrogate": "clip", "reduction": "luspo", "importance_level": "sequence"},
    "vespo": {"surrogate": "vespo", "reduction": "dapo"},
}


class LigerFusedLinearGRPOLoss(LigerFusedLinearPolicyBase):
    """Group relative policy optimisation (Shao et al. 2024, https://arxiv.org/abs/2402.03300, equation 3), fused.

    With advantage `A`, importance ratio `r = pi / pi_old` and stopped gradient `sg`, a token costs

    | surrogate | cost | paper |
    |---|---|---|
    | `clip` | `-min(min(r, delta) A, clamp(r, 1 - epsilon_low, 1 + epsilon_high) A)` | PPO 1707.06347; 2505.07291 |
    | `reinforce` | `-r A` | |
    | `cispo` | `-sg(clamp(r, cispo_epsilon_low, epsilon_high)) A log pi` | 2506.13585, equation 4; 2510.13786 |
    | `gmpo` | `-exp(mean over the sequence of log c) A`, `c` below | 2507.20673 |
    | `sapo` | `-4 / tau sigmoid(tau (r - 1)) A`, `tau` by the sign of `A` | 2511.20347 |
    | `vespo` | `-sg(phi(w)) A log pi`, `phi(w) = w^k e^(lambda (1 - w))` by the sign of `A` | 2602.10693 |
    | `clip_cov` | as `clip`, but 0 for `clip_cov_ratio` of the tokens | Clip-Cov, 2505.22617 |
    | `kl_cov` | `-r A`, plus `ppo_kl_coef abs(log r)` for `kl_cov_ratio` of the tokens | KL-Cov, 2505.22617 |
    | `log_prob` | `-A log pi` | GPG, 2504.02546 |
    | `dppo_tv`, `dppo_kl` | `-min(r, ratio_max) A` inside a trust region, else 0 | DPPO, 2602.04879 |
    | `ipo` | the same, with a region for both signs of `A` | prime-rl |
    | `fipo` | as `clip`, times `clamp(exp(F), 1 - fipo_clip_low, 1 + fipo_clip_high)` | 2603.19835 |
    | `real` | classification of a group's sequences, below | 2602.05630 |
    | `a2po` | `(a2po_beta log(pi(y) / pi_ref(y)) - A)^2` of a sequence `y` | A*-PO, 2505.20686 |

    Trust regions, with `d = pi - pi_old` of the sampled token: `dppo_tv` drops tokens with `d > epsilon_high` and a
    positive `A`, or `d < -epsilon_low` and a negative `A`. `dppo_kl` drops them by the KL of Bernoulli distributions,
    `pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))`, above `epsilon_high` where `pi > pi_old` and
    `A > 0`, or above `epsilon_low` where `pi < pi_old` and `A < 0`. `ipo` drops tokens with `abs(d) > ipo_threshold`.
    The gradient of what stays is `-min(r, ratio_max) A grad(log pi)`: verl's; prime-rl's without `ratio_max`.

    `F` is the sum over the sequence's tokens from this one on of `2^(-distance / fipo_half_life) log r`, without those
    whose `r` is above `delta`. Where `A < 0` and `r > fipo_safety_ratio`, the weight is clamped to [0.8, 1]. It is
    constant. Compared with ms-swift.

    `real` takes `group_size` consecutive sequences as a group, with scores `s = mean(log r) / real_temperature`, which
    are positive where `A > 0`: `log(1 + sum over the positive of e^-s) + log(1 + sum over the others of e^s)`, or 0 if
    all have one sign. Sequences without tokens are in no sum. With `reduction="grpo"`, the loss is the mean over
    groups, as in ms-swift.

    `a2po` needs the reference. `A` is `reward - V`, where `V = beta1 logsumexp(rewards / beta1 - log n)` of `n` samples
    of the reference. With `reduction="grpo"`, the loss is TRL's.

    `c` is `min(r, e^epsilon_high)` for a positive `A`, `max(r, e^-epsilon_low)` for a negative one. `w` is the product
    over the sequence's tokens of `pi / pi_old` and the importance weights, which `vespo` does not apply again.

    `clip_cov` and `kl_cov` choose the tokens with the highest `(log pi - mean log pi) (A - mean A)`, at least one, with
    means over the call's tokens. `clip_cov` chooses between `clip_cov_lb` and `clip_cov_ub`, among tokens that `clip`
    does not clip; the paper draws at random.

    If `old_logps` is None, `r` is 1 with the gradient of `log pi`. Ratios are at most e^80 = 5.5e34 and constant
    beyond, and `old_logps` of -inf count as -1e18: a token that is clipped, filtered by its entropy, or has an
    advantage or a weight of 0 has a gradient of exactly zero, however stale it is ("Far ends" in `docs/numerics.md`).

    Variants (TRL's and Liger-Kernel's default reduction is `"dapo"`, which gives long completions more weight):

    | name | arguments |
    |---|---|
    | GRPO | `reduction="grpo"`, the default |
    | DAPO, 2503.14476 | `reduction="dapo", epsilon_high=0.28` |
    | Dr. GRPO, 2503.20783 | `reduction="dr_grpo", max_completion_length=...` |
    | CISPO | `surrogate="cispo", reduction="dapo", epsilon_high=5.0` |
    | SAPO | `surrogate="sapo", reduction="grpo"` |
    | VESPO | `surrogate="vespo", reduction="dapo"` |
    | GSPO, 2507.18071 | `importance_level="sequence", reduction="grpo", epsilon_low=3e-4, epsilon_high=4e-4` |
    | GSPO-token | as GSPO, with `importance_level="sequence_token"` |
    | GMPO | `surrogate="gmpo", reduction="grpo", epsilon_low=0.4, epsilon_high=0.4` |
    | LUSPO, 2602.05261 | `importance_level="sequence", reduction="luspo"` |
    | PPO's policy term, 1707.06347 | `reduction="dapo"`, with advantages (B, T) of its critic |
    | RLOO, 2402.14740, as TRL clips it | `importance_level="trajectory", reduction="grpo"` |
    | REINFORCE | `surrogate="reinforce", importance_level="trajectory", reduction="grpo"` |
    | DPPO, as in verl | `surrogate="dppo_tv", reduction="token-mean"` |
    | | `surrogate="dppo_kl", reduction="token-mean", epsilon_low=0.05, epsilon_high=0.05` |
    | prime-rl's default | `surrogate="dppo_tv", reduction="dapo", ratio_max=None, sampler_kl_coef=1e-3` |
    | prime-rl's IPO | `surrogate="ipo", reduction="dapo", ratio_max=None, sampler_kl_coef=1e-3` |
    | DRO, 2405.19107, as in verl | `surrogate="log_prob", sampler_kl_coef=dro_beta / 2, reduction="token-mean"` |
    | FIPO | `surrogate="fipo", reduction="dapo"` |
    | REAL | `surrogate="real", reduction="grpo", group_size=...` |
    | A*-PO | `surrogate="a2po", reduction="grpo"` |

    Levels other than "token", `gmpo`, `vespo` and `off_policy_mask_threshold` cost one more GEMM for a sequence over
    budget; `clip_cov` and `kl_cov`, for a batch over budget.

    Args:
        beta: weight of the KL to the reference, not negative; above 0, a call requires a reference.
        surrogate: a name from the first table.
        reduction: what the sum over tokens is divided by. "grpo": the mean over sequences of the mean over tokens;
            "bnpo": the valid tokens of the batch; "dapo": `num_items`, or else as "bnpo"; "dr_grpo":
            `B * max_completion_length`; "luspo": `B`. verl's "seq-mean-token-mean", "token-mean",
            "seq-mean-token-sum-norm" and "seq-mean-token-sum" are "grpo", "dapo", "dr_grpo" and "luspo".
        importance_level: of the ratio: "token"; "sequence", the tokens' geometric mean `s` (GSPO,
            https://arxiv.org/abs/2507.18071); "sequence_token", `sg(s) pi / sg(pi)` with stopped gradient `sg`, for
            advantages per token (GSPO-token); "trajectory", their product.
        epsilon_low, epsilon_high: not negative; infinity is no bound. `cispo` reads `epsilon_high` as the largest
            ratio, as in TRL; the papers use about 5.
        delta: largest ratio where the advantage is negative, usually above `1 + epsilon_high`; positive. None: no
            bound.
        max_completion_length: positive number of tokens, required by the reduction "dr_grpo" and refused by others.
            None: not given.
        kl_estimator: "k1", "k2", "k3" or "abs", with `d = log pi_ref - log pi` the estimates `-d`, `d^2 / 2`,
            `exp(d) - d - 1` and `abs(d)`; verl's "kl" and "mse" are the first two, and its "low_var_kl" is `k3` of `d`
            in [-20, 20], at most 10 and constant where it is bounded. With `use_bias_correction_kl`, `k1` and `k3` have
            the KL's gradient; without, `k2` has it, and `k1`'s is zero on average.
        use_bias_correction_kl: multiply the estimate by the importance ratio (DeepSeek-V3.2,
            https://arxiv.org/abs/2512.02556).
        off_policy_mask_threshold: in nats, not negative: tokens with a negative advantage cost 0 where the sequence's
            mean of `old_logps - logps` is above it (DeepSeek-V3.2, whose old policy is the sampler). None: no such
            mask.
        entropy_coef: weight of the entropy bonus, the mean over the call's tokens with any reduction, as in TRL.
        top_entropy_quantile: in [0, 1]; only this share of the call's tokens, at least one, with the highest entropy
            keeps cost and bonus (https://arxiv.org/abs/2506.01939). Below 1, costs one more GEMM if logits exceed the
            budget; large steps leave the other tokens out of the backward.
        cispo_epsilon_low: the smallest ratio of `cispo`, the paper's `1 - epsilon_low`.
        sapo_temperature_pos, sapo_temperature_neg: `tau` for positive and other advantages.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: `k` and `lambda`; `neg` for negative advantages.
        clip_cov_ratio, kl_cov_ratio: in (0, 1], the share of the tokens that `clip_cov` and `kl_cov` choose.
        clip_cov_lb, clip_cov_ub: bounds of the covariance of tokens that `clip_cov` chooses.
        ppo_kl_coef: weight of `abs(log r)` in `kl_cov`. The names and defaults of the last five are verl's.
        ratio_max: the largest factor `r` of a gradient, of `dppo_tv`, `dppo_kl` and `ipo`, positive; verl's
            `clip_ratio_c`. None: no bound.
        ipo_threshold: of `ipo`, not negative.
        fipo_half_life: of `fipo`, in tokens, positive; ms-swift's `fipo_decay_rate`.
        fipo_clip_low, fipo_clip_high: of `fipo`, in [0, 1], and not negative.
        fipo_safety_ratio: of `fipo`, positive. None: no such bound.
        real_temperature: of `real`, positive; ms-swift's `real_tau`.
        group_size: of `real`, required: sequences a prompt. None: not given.
        a2po_beta: of `a2po`, positive; TRL's `beta2`.
        sampler_kl_coef: weight, not negative, of `(log pi - log pi_old)^2` of every valid token (Kimi K2.5,
            https://arxiv.org/abs/2602.02276), which no mask and no importance weight changes; prime-rl's `kl_tau`.
        **options: fields of `LogitOptions`: `ignore_index` (-100) marks targets to skip; `softcap`, `logit_scale` and
            `temperature` transform the logits; `logits_budget` is the most bytes of logits in memory, such as "512MiB"
            (None: automatic); `logits_dtype=torch.float32` keeps the float32 sums of 16-bit products (None: rounded).
            Use the sampler's `temperature`; it also applies to the reference.

    >>> import torch
    >>> weight, input = torch.randn(11, 4), torch.randn(2, 3, 4)        # two completions of up to three tokens
    >>> target, advantages = torch.tensor([[1, 2, 3], [4, 5, -100]]), torch.tensor([1.0, -1.0])
    >>> loss, metrics = LigerFusedLinearGRPOLoss()(weight, input, target, advantages)
    >>> bool(torch.isclose(loss, -advantages.mean(), atol=1e-6)), metrics.clip_ratio.item()        # on-policy
    (True, 0.0)
    """

    def __init__(
        self,
        *,
        beta: float = 0.0,
        surrogate: str = "clip",
        reduction: str = "grpo",
        importance_level: str = "token",
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        delta: float | None = None,
        max_completion_length: int | None = None,
        kl_estimator: str = "k3",
        use_bias_correction_kl: bool = True,
        off_policy_mask_threshold: float | None = None,
        entropy_coef: float = 0.0,
        top_entropy_quantile: float = 1.0,
        cispo_epsilon_low: float = 0.0,
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        clip_cov_ratio: float = 2e-4,
        clip_cov_lb: float = 1.0,
        clip_cov_ub: float = 5.0,
        kl_cov_ratio: float = 2e-4,
        ppo_kl_coef: float = 1.0,
        ratio_max: float | None = 20.0,
        ipo_threshold: float = 0.1,
        fipo_half_life: float = 32.0,
        fipo_clip_low: float = 0.0,
        fipo_clip_high: float = 0.2,
        fipo_safety_ratio: float | None = 4.0,
        real_temperature: float = 0.5,
        group_size: int | None = None,
        a2po_beta: float = 1e-3,
        sampler_kl_coef: float = 0.0,
        **options: Unpack[LogitOptionsDict],
    ) -> None:
        if "loss_type" in options:
            name = type(self).__name__
            raise TypeError(f"{name} takes TRL's loss_type as {name}.from_loss_type(loss_type, ...)")
        if surrogate not in SURROGATES:
            raise ValueError(f"unknown surrogate {shown(surrogate)}, expected one of {sorted(SURROGATES)}")
        definition = SURROGATES[surrogate]
        settings = SurrogateSettings(
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
            delta=delta,
            cispo_epsilon_low=cispo_epsilon_low,
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
            vespo_k_pos=vespo_k_pos,
            vespo_lambda_pos=vespo_lambda_pos,
            vespo_k_neg=vespo_k_neg,
            vespo_lambda_neg=vespo_lambda_neg,
            clip_cov_ratio=clip_cov_ratio,
            clip_cov_lb=clip_cov_lb,
            clip_cov_ub=clip_cov_ub,
            kl_cov_ratio=kl_cov_ratio,
            ppo_kl_coef=ppo_kl_coef,
            ratio_max=ratio_max,
            ipo_threshold=ipo_threshold,
            fipo_half_life=fipo_half_life,
            fipo_clip_low=fipo_clip_low,
            fipo_clip_high=fipo_clip_high,
            fipo_safety_ratio=fipo_safety_ratio,
            real_temperature=real_temperature,
            group_size=group_size,
            a2po_beta=a2po_beta,
        )
        refuse_unread(settings, definition.reads, f"surrogate {surrogate!r}", SURROGATES)
        if definition.needs_tokens and importance_level != "token":
            raise ValueError(
                f"surrogate {surrogate!r} takes its ratios per token: importance_level must be 'token', "
                f"got {shown(importance_level)}"
            )
        if not is_set(beta):
            for name, value, default in (
                ("kl_estimator", kl_estimator, "k3"),
                ("use_bias_correction_kl", use_bias_correction_kl, True),
            ):
                if value != default:
                    raise ValueError(f"{name}={shown(value)} is not read with beta=0, the weight of the KL term")
        if not (definition.reads_ratio or importance_level == "token" or (is_set(beta) and use_bias_correction_kl)):
            raise ValueError(
                f"importance_level={shown(importance_level)} is not read by surrogate {surrogate!r}, whose cost has no "
                "ratio of that level: only a KL term with use_bias_correction_kl would read it"
            )
        if "group_size" in definition.reads and group_size is None:
            raise ValueError(f"surrogate {surrogate!r} needs group_size, the number of sequences a prompt, got None")
        super().__init__(
            beta=beta,
            reduction=reduction,
            importance_level=importance_level,
            max_completion_length=max_completion_length,
            kl_estimator=kl_estimator,
            use_bias_correction_kl=use_bias_correction_kl,
            off_policy_mask_threshold=off_policy_mask_threshold,
            sampler_kl_coef=sampler_kl_coef,
            entropy_coef=entropy_coef,
            top_entropy_quantile=top_entropy_quantile,
            clipped=None if definition.clipped is None else functools.partial(definition.clipped, s=settings),
            **own_options(type(self), options, LogitOptionsDict.__annotations__),
        )
        self.surrogate = surrogate
        self.settings = settings
        mixes_tokens = IMPORTANCE_LEVELS[importance_level].mixes_tokens
        self.scope = "sequence" if mixes_tokens and definition.scope == "token" else definition.scope
        self.weighs = definition.weighs
        self.needs_reference = definition.needs_reference
        self.clips_low = definition.clips_low or cispo_epsilon_low > 0

    @classmethod
    def from_loss_type(cls, loss_type: str, **settings: Any) -> Self:
        """Return the loss that TRL calls `loss_type`; `settings` take precedence.

        `luspo` has sequence level, as in its paper, unlike in TRL.

        Args:
            loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo" or "vespo".
            **settings: arguments of the constructor. "dr_grpo" needs `max_completion_length`.

        Returns:
            The loss, with the `surrogate`, `reduction` and `importance_level` of this name and else the constructor's
            defaults.

        Raises:
            TypeError: the constructor has no such argument, or one has the wrong type.
            ValueError: `loss_type` is unknown, or a setting is out of range or not read.

        >>> LigerFusedLinearGRPOLoss.from_loss_type("dapo", epsilon_high=0.28).reduction
        'dapo'
        """
        if loss_type not in LOSS_TYPES:
            raise ValueError(f"unknown loss_type {shown(loss_type)}, expected one of {sorted(LOSS_TYPES)}")
        arguments: dict[str, Any] = {**LOSS_TYPES[loss_type], **settings}
        return cls(**arguments)

    def policy_loss(self, rollouts: Rollouts) -> Tensor:
        return SURROGATES[self.surrogate].loss(rollouts, self.settings)

    def extra_repr(self) -> str:
        return f"surrogate={self.surrogate!r}, {super().extra_repr()}"
