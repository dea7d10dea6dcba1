"""CPO, contrastive preference optimisation (https://arxiv.org/abs/2401.08417): no reference, and an NLL term.

Its `loss_type` also takes losses of other papers on the same rewards, among them SimPO and AlphaPO.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from liger_chunked.arguments import own_options
from liger_chunked.losses.formulas import logistic, saturating_expm1
from liger_chunked.losses.preference import LigerFusedLinearPreferenceBase
from liger_chunked.losses.settings import check_finite, refuse_unread
from liger_chunked.types import LogitOptionsDict, Pairs, shown


@dataclass(frozen=True)
class CPOSettings:
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5

    def __post_init__(self) -> None:
        check_finite("label_smoothing", self.label_smoothing, minimum=0, maximum=1)
        check_finite("simpo_gamma", self.simpo_gamma)


def _margin(rewards: Tensor) -> Tensor:
    chosen, rejected = rewards.unbind(-1)
    return chosen - rejected


def _sigmoid(rewards: Tensor, beta: float, s: CPOSettings) -> Tensor:
    return logistic(_margin(rewards), s.label_smoothing)


def _hinge(rewards: Tensor, beta: float, s: CPOSettings) -> Tensor:
    return F.relu(1 - _margin(rewards))


def _ipo(rewards: Tensor, beta: float, s: CPOSettings) -> Tensor:
    return (_margin(rewards) / beta - 1 / (2 * beta)).square()


def _simpo(rewards: Tensor, beta: float, s: CPOSettings) -> Tensor:
    return logistic(_margin(rewards) - s.simpo_gamma, s.label_smoothing)


class _LossType(NamedTuple):
    loss: Callable[[Tensor, float, CPOSettings], Tensor]  # of rewards (n, 2) and beta
    reads: tuple[str, ...] = ()  # fields of CPOSettings
    averages: bool = False  # sets average_log_prob


LOSS_TYPES: Mapping[str, _LossType] = {
    "sigmoid": _LossType(_sigmoid, reads=("label_smoothing",)),
    "hinge": _LossType(_hinge),
    "ipo": _LossType(_ipo, averages=True),
    "simpo": _LossType(_simpo, reads=("label_smoothing", "simpo_gamma"), averages=True),
}


def _alphapo(logps: Tensor, alpha: float) -> Tensor:
    """Return `(1 - p ** -alpha) / alpha`; its limit at 0 is `log p`. `p ** -alpha` is at most e^80."""
    return -saturating_expm1(-alpha * logps) / alpha


class LigerFusedLinearCPOLoss(LigerFusedLinearPreferenceBase):
    """Contrastive preference optimisation (Xu et al. 2024, https://arxiv.org/abs/2401.08417, equation 3), fused.

        loss = mean(loss_type of the pair) + cpo_alpha * nll(chosen)

    `l` is a sequence's log-probability in nats, `l'` its mean over tokens, `d` the chosen minus the rejected reward:

    | loss_type | loss | reward |
    |---|---|---|
    | `sigmoid` | `-(1 - eps) log sigmoid(d) - eps log sigmoid(-d)` | `beta l` |
    | `hinge` | `max(0, 1 - d)` | `beta l` |
    | `ipo` | `(d / beta - 1 / (2 beta)) ** 2` | `beta l'` |
    | `simpo` | `sigmoid` of `d - simpo_gamma` | `beta l'` |

    TRL's `alphapo` is `loss_type="simpo"` with `cpo_alpha=0` and an `alphapo_alpha`. `logps` in the metrics are `l` or
    `l'`. An option that `loss_type` does not read raises.

    Args:
        beta: scale of the rewards, not negative; "ipo" divides by it.
        cpo_alpha: weight of the mean NLL of the batch's chosen tokens, in nats; 0: no such term.
        label_smoothing: `eps`, in [0, 1], for "sigmoid" and "simpo".
        loss_type: a name from the table.
        simpo_gamma: the margin that "simpo" subtracts.
        alphapo_alpha: TRL's `alpha`. If it is not 0, it changes `beta l` to
            `beta (1 - exp(-alphapo_alpha l)) / alphapo_alpha`, also of `l'`, with an exponential of at most e^80
            (AlphaPO, https://arxiv.org/abs/2501.03884).
        **options: fields of `LogitOptions`: `ignore_index` (-100) marks targets to skip; `softcap`, `logit_scale` and
            `temperature` transform the logits; `logits_budget` is the most bytes of logits in memory, such as "512MiB"
            (None: automatic); `logits_dtype=torch.float32` keeps the float32 sums of 16-bit products (None: rounded).

    >>> import torch
    >>> weight, input = torch.randn(11, 4), torch.randn(2, 3, 4)        # one pair of three tokens
    >>> target = torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss, metrics = LigerFusedLinearCPOLoss(beta=0.1, cpo_alpha=0)(weight, input, target)
    >>> margin = 0.1 * (metrics.chosen_logps - metrics.rejected_logps)
    >>> bool(torch.isclose(loss, -torch.nn.functional.logsigmoid(margin).mean()))
    True
    """

    def __init__(
        self,
        *,
        beta: float = 0.1,
        cpo_alpha: float = 1.0,
        label_smoothing: float = 0.0,
        loss_type: str = "sigmoid",
        simpo_gamma: float = 0.5,
        alphapo_alpha: float = 0.0,
        **options: Unpack[LogitOptionsDict],
    ) -> None:
        if loss_type not in LOSS_TYPES:
            raise ValueError(f"unknown loss_type {shown(loss_type)}, expected one of {sorted(LOSS_TYPES)}")
        settings = CPOSettings(label_smoothing, simpo_gamma)
        refuse_unread(settings, LOSS_TYPES[loss_type].reads, f"loss_type {loss_type!r}", LOSS_TYPES)
        if loss_type == "ipo" and beta == 0:
            raise ValueError("beta must not be 0 with loss_type 'ipo', which divides by it")
        check_finite("cpo_alpha", cpo_alpha)
        check_finite("alphapo_alpha", alphapo_alpha)
        super().__init__(
            beta=beta,
            alpha=cpo_alpha,
            compute_nll_loss=None,
            average_log_prob=LOSS_TYPES[loss_type].averages,
            use_ref_model=False,
            reward_shape=functools.partial(_alphapo, alpha=alphapo_alpha) if alphapo_alpha else None,
            **own_options(type(self), options, LogitOptionsDict.__annotations__),
        )
        self.loss_type = loss_type
        self.settings = settings

    @property
    def cpo_alpha(self) -> float:
        return self.alpha

    @cpo_alpha.setter
    def cpo_alpha(self, value: float) -> None:
        self.alpha = value

    def preference_loss(self, pairs: Pairs) -> Tensor:
        return LOSS_TYPES[self.loss_type].loss(self.reward(pairs.logps), self.beta, self.settings)

    def extra_repr(self) -> str:
        return f"loss_type={self.loss_type!r}, cpo_alpha={self.alpha}, {super().extra_repr()}"
