"""GRPO and its variants."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import Self, Unpack

from liger_chunked.arguments import own_options
from liger_chunked.losses.policy import Clipped, LigerFusedLinearPolicyBase
from liger_chunked.losses.rollouts import IMPORTANCE_LEVELS
from liger_chunked.losses.settings import check_finite, check_positive, refuse_unread
from liger_chunked.types import LogitOptionsDict, Rollouts, check_number, shown


@dataclass(frozen=True)
class SurrogateSettings:
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


def _reinforce(r: Rollouts, s: SurrogateSettings) -> Tensor:
    return -r.ratio * r.advantages


def _where(condition: Tensor, like: Tensor, value: float, otherwise: float) -> Tensor:
    """Like `torch.where`, in the dtype of `like` instead of float32."""
    return torch.full_like(like, value).where(condition, otherwise)


def _clip(r: Rollouts, s: SurrogateSettings) -> Tensor:
    # min(r A, clamp(r) A) is clamp(r) A with only the upper bound if A > 0, the lower if A < 0.
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
    return -r.ratio.detach().clamp(max=s.epsilon_high) * r.advantages * r.logps


def _clipped_by_cispo(r: Rollouts, s: SurrogateSettings) -> Clipped:
    return Clipped(low=None, high=(r.ratio > s.epsilon_high) & (r.advantages > 0))


def _sapo(r: Rollouts, s: SurrogateSettings) -> Tensor:
    temperature = _where(r.advantages > 0, r.advantages, s.sapo_temperature_pos, s.sapo_temperature_neg)
    gate = 4 / temperature * torch.sigmoid(temperature * (r.ratio - 1))
    return -gate * r.advantages


# VESPO's bounds of log-ratios, against overflow.
_LOWEST, _HIGHEST = math.log(1e-8), 20.0


@torch.no_grad()
def _vespo_weights(r: Rollouts, s: SurrogateSettings) -> Tensor:
    """Return `phi(w)` in the shape of the advantages."""
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
    loss: Callable[[Rollouts, SurrogateSettings], Tensor]  # (n, T), or (n, 1)
    reads: tuple[str, ...] = ()  # fields of SurrogateSettings
    clipped: _ClippedBy | None = None
    clips_low: bool = False  # `clipped` fills Clipped.low
    mixes_tokens: bool = False  # needs whole sequences
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

# TRL's names.
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

    A variant combines a surrogate, a reduction and an importance level. With advantage `A`, importance ratio
    `r = pi / pi_old` and stopped gradient `sg`, a token costs

    | surrogate | cost | paper |
    |---|---|---|
    | `clip` | `-min(min(r, delta) A, clamp(r, 1 - epsilon_low, 1 + epsilon_high) A)` | PPO 1707.06347; 2505.07291 |
    | `reinforce` | `-r A` | |
    | `cispo` | `-sg(min(r, epsilon_high)) A log pi` | 2506.13585, equation 4; 2510.13786 |
    | `sapo` | `-4 / tau sigmoid(tau (r - 1)) A`, `tau` by the sign of `A` | 2511.20347 |
    | `vespo` | `-sg(phi(w)) A log pi`, `phi(w) = w^k e^(lambda (1 - w))` by the sign of `A` | 2602.10693 |

    `w` is the product over the sequence's tokens of `pi / pi_old` and the importance weights, which `vespo` does not
    apply again. Without `old_logps`, `r` is 1 with the gradient of `log pi`. See `LigerFusedLinearPolicyBase`.

    TRL's and Liger-Kernel's default reduction is `"dapo"`, which gives long completions more weight. Variants:

    | name | arguments |
    |---|---|
    | GRPO | `reduction="grpo"`, the default |
    | DAPO, 2503.14476 | `reduction="dapo", epsilon_high=0.28` |
    | Dr. GRPO, 2503.20783 | `reduction="dr_grpo", max_completion_length=...` |
    | CISPO | `surrogate="cispo", reduction="dapo", epsilon_high=5.0` |
    | SAPO | `surrogate="sapo", reduction="grpo"` |
    | VESPO | `surrogate="vespo", reduction="dapo"` |
    | GSPO, 2507.18071 | `importance_level="sequence", reduction="grpo", epsilon_low=3e-4, epsilon_high=4e-4` |
    | LUSPO, 2602.05261 | `importance_level="sequence", reduction="luspo"` |
    | PPO's policy term, 1707.06347 | `reduction="dapo"`, with advantages (B, T) of its critic |
    | RLOO, 2402.14740, as TRL clips it | `importance_level="trajectory", reduction="grpo"` |
    | REINFORCE | `surrogate="reinforce", importance_level="trajectory", reduction="grpo"` |

    Sequence and trajectory level and `vespo` cost one more GEMM for a sequence over budget.

    Args:
        epsilon_low, epsilon_high: the ratio's largest distance from 1 under `clip`; infinity is no bound. For `cispo`,
            `epsilon_high` is the largest ratio, as in TRL; the papers use about 5.
        delta: upper bound of `clip`, above `1 + epsilon_high`.
        sapo_temperature_pos, sapo_temperature_neg: `tau` for positive and other advantages.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: `k` and `lambda`; `neg` for negative advantages.

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
        use_bias_correction_kl: bool = True,
        entropy_coef: float = 0.0,
        top_entropy_quantile: float = 1.0,
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
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
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
            vespo_k_pos=vespo_k_pos,
            vespo_lambda_pos=vespo_lambda_pos,
            vespo_k_neg=vespo_k_neg,
            vespo_lambda_neg=vespo_lambda_neg,
        )
        refuse_unread(settings, definition.reads, f"surrogate {surrogate!r}", SURROGATES)
        super().__init__(
            beta=beta,
            reduction=reduction,
            importance_level=importance_level,
            max_completion_length=max_completion_length,
            use_bias_correction_kl=use_bias_correction_kl,
            entropy_coef=entropy_coef,
            top_entropy_quantile=top_entropy_quantile,
            clipped=None if definition.clipped is None else functools.partial(definition.clipped, s=settings),
            **own_options(type(self), options, LogitOptionsDict.__annotations__),
        )
        self.surrogate = surrogate
        self.settings = settings
        mixes_tokens = definition.mixes_tokens or IMPORTANCE_LEVELS[importance_level].mixes_tokens
        self.scope = "sequence" if mixes_tokens else "token"
        self.weighs = definition.weighs
        self.clips_low = definition.clips_low

    @classmethod
    def from_loss_type(cls, loss_type: str, **settings: Any) -> Self:
        """Return the loss that TRL calls `loss_type`; `settings` take precedence.

        `luspo` has sequence level, as in its paper, unlike in TRL.

        >>> LigerFusedLinearGRPOLoss.from_loss_type("dapo", epsilon_high=0.28).reduction
        'dapo'
        """
        if loss_type not in LOSS_TYPES:
            raise ValueError(f"unknown loss_type {shown(loss_type)}, expected one of {sorted(LOSS_TYPES)}")
        return cls(**{**LOSS_TYPES[loss_type], **settings})

    def policy_loss(self, rollouts: Rollouts) -> Tensor:
        return SURROGATES[self.surrogate].loss(rollouts, self.settings)

    def extra_repr(self) -> str:
        return f"surrogate={self.surrogate!r}, {super().extra_repr()}"
