"""Direct preference optimisation and the losses that TRL files under its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from liger_chunked.losses.preference import LigerFusedLinearPreferenceBase
from liger_chunked.types import LogitOptionsDict, Pairs


@dataclass(frozen=True)
class DPOSettings:
    """The numbers that loss types share: `beta`, `label_smoothing` (epsilon below), `discopop_tau` (tau below)."""

    beta: float
    label_smoothing: float
    discopop_tau: float


def _margin(pairs: Pairs) -> Tensor:
    chosen, rejected = pairs.logratios.unbind(-1)
    return chosen - rejected


def _mean_margin(pairs: Pairs) -> Tensor:
    chosen, rejected = (pairs.logratios / pairs.lengths).unbind(-1)
    return chosen - rejected


def _smoothed_logsigmoid(logits: Tensor, smoothing: float) -> Tensor:
    loss = -F.logsigmoid(logits)
    return loss if smoothing == 0 else (1 - smoothing) * loss - smoothing * F.logsigmoid(-logits)


def _sigmoid(pairs: Pairs, s: DPOSettings) -> Tensor:
    return _smoothed_logsigmoid(s.beta * _margin(pairs), s.label_smoothing)


def _sigmoid_norm(pairs: Pairs, s: DPOSettings) -> Tensor:
    return -F.logsigmoid(s.beta * _mean_margin(pairs))


def _hinge(pairs: Pairs, s: DPOSettings) -> Tensor:
    return torch.relu(1 - s.beta * _margin(pairs))


def _ipo(pairs: Pairs, s: DPOSettings) -> Tensor:
    return (_mean_margin(pairs) - 1 / (2 * s.beta)).square()


def _exo_pair(pairs: Pairs, s: DPOSettings) -> Tensor:
    # KL of softmax(beta (log pi - log pi_ref)) over the pair against (1 - epsilon, epsilon).
    logits = s.beta * _margin(pairs)
    chosen = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-s.label_smoothing))
    rejected = torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(s.label_smoothing))
    return chosen + rejected


def _nca_pair(pairs: Pairs, s: DPOSettings) -> Tensor:
    chosen, rejected = (s.beta * pairs.logratios).unbind(-1)
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(pairs: Pairs, s: DPOSettings) -> Tensor:
    # Unbiased under labels flipped with probability epsilon: the flipped term is taken away, not added.
    logits = s.beta * _margin(pairs)
    clean = (1 - s.label_smoothing) * F.logsigmoid(logits)
    return (s.label_smoothing * F.logsigmoid(-logits) - clean) / (1 - 2 * s.label_smoothing)


def _bco_pair(pairs: Pairs, s: DPOSettings) -> Tensor:
    chosen, rejected = (s.beta * pairs.logratios).unbind(-1)
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def _sppo_hard(pairs: Pairs, s: DPOSettings) -> Tensor:
    chosen, rejected = pairs.logratios.unbind(-1)
    return (chosen - 0.5 / s.beta).square() + (rejected + 0.5 / s.beta).square()


def _aot(pairs: Pairs, s: DPOSettings) -> Tensor:
    policy = (pairs.logps[:, 0] - pairs.logps[:, 1]).sort().values
    reference = (pairs.ref_logps[:, 0] - pairs.ref_logps[:, 1]).sort().values
    return _smoothed_logsigmoid(s.beta * (policy - reference), s.label_smoothing)


def _aot_unpaired(pairs: Pairs, s: DPOSettings) -> Tensor:
    chosen, rejected = pairs.logratios.sort(dim=0).values.unbind(-1)
    return _smoothed_logsigmoid(s.beta * (chosen - rejected), s.label_smoothing)


def _apo_zero(pairs: Pairs, s: DPOSettings) -> Tensor:
    chosen, rejected = (s.beta * pairs.logratios).unbind(-1)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def _apo_down(pairs: Pairs, s: DPOSettings) -> Tensor:
    chosen, rejected = (s.beta * pairs.logratios).unbind(-1)
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


def _discopop(pairs: Pairs, s: DPOSettings) -> Tensor:
    logits = s.beta * _margin(pairs)
    exponential = torch.sigmoid(logits / s.discopop_tau)
    return (1 - exponential) * -F.logsigmoid(logits) + exponential * torch.exp(-logits)


def _sft(pairs: Pairs, s: DPOSettings) -> Tensor:
    # A mean over the tokens of the batch, said pair by pair: the mean over pairs takes batch_size back out.
    chosen = torch.where(pairs.mask[:, 0], pairs.token_logps[:, 0], 0.0).sum(-1)
    return -chosen * pairs.batch_size / pairs.batch_lengths[0]


class _LossType(NamedTuple):
    loss: Callable[[Pairs, DPOSettings], Tensor]
    smoothed: bool = False  # reads label_smoothing
    whole_batch: bool = False  # sorts the batch
    averages: bool = False  # divides by the lengths itself


LOSS_TYPES: Mapping[str, _LossType] = {
    "sigmoid": _LossType(_sigmoid, smoothed=True),
    "hinge": _LossType(_hinge),
    "ipo": _LossType(_ipo, averages=True),
    "exo_pair": _LossType(_exo_pair, smoothed=True),
    "nca_pair": _LossType(_nca_pair),
    "robust": _LossType(_robust, smoothed=True),
    "bco_pair": _LossType(_bco_pair),
    "sppo_hard": _LossType(_sppo_hard),
    "aot": _LossType(_aot, smoothed=True, whole_batch=True),
    "aot_unpaired": _LossType(_aot_unpaired, smoothed=True, whole_batch=True),
    "apo_zero": _LossType(_apo_zero),
    "apo_down": _LossType(_apo_down),
    "discopop": _LossType(_discopop),
    "sft": _LossType(_sft),
    "sigmoid_norm": _LossType(_sigmoid_norm, averages=True),
}

PairLoss = Callable[[Pairs], Tensor]


class LigerFusedLinearDPOLoss(LigerFusedLinearPreferenceBase):
    """Direct preference optimisation (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7), fused.

    With `c`, `r` the log-ratios `log pi(y|x) - log pi_ref(y|x)` of the chosen and the rejected sequence in nats,
    `d = c - r`, `c'`, `r'`, `d'` the same per token, `L = -log sigmoid`, `S = sigmoid`, the loss of a pair is, by
    `loss_type`:

    | loss_type | loss | paper |
    |---|---|---|
    | `sigmoid` | `(1 - eps) L(beta d) + eps L(-beta d)` | 2305.18290; eps: conservative DPO, 2305.18290 notes |
    | `sigmoid_norm` | `L(beta d')` | 2411.15124 |
    | `hinge` | `max(0, 1 - beta d)` | 2305.10425 |
    | `ipo` | `(d' - 1 / (2 beta)) ** 2` | 2310.12036, equation 17, per token as its authors confirmed |
    | `exo_pair` | `S(beta d) (-L(beta d) - log(1 - eps)) + S(-beta d) (-L(-beta d) - log(eps))` | 2402.00856, 16 |
    | `nca_pair` | `L(beta c) + L(-beta c) / 2 + L(-beta r) / 2` | 2402.05369 |
    | `robust` | `((1 - eps) L(beta d) - eps L(-beta d)) / (1 - 2 eps)` | 2403.00409 |
    | `bco_pair` | `L(beta c) + L(-beta r)` | 2404.04656 |
    | `sppo_hard` | `(c - 1 / (2 beta)) ** 2 + (r + 1 / (2 beta)) ** 2` | 2405.00675, equation 4.7 |
    | `aot` | `sigmoid` on `sort(log pi(chosen) - log pi(rejected)) - sort(the same under pi_ref)` | 2406.05882 |
    | `aot_unpaired` | `sigmoid` on `sort(c) - sort(r)`, over the batch | 2406.05882 |
    | `apo_zero` | `S(-beta c) + S(beta r)` | 2408.06266, equation 7 |
    | `apo_down` | `S(beta c) + S(beta (r - c))` | 2408.06266, equation 8 |
    | `discopop` | `(1 - m) L(beta d) + m exp(-beta d)`, `m = S(beta d / tau)` | 2406.08414, equation 5 |
    | `sft` | mean NLL of the batch's chosen tokens | |

    These are TRL's. One differs: TRL ignores `label_smoothing` with `sigmoid`.

    Args:
        beta: strength of the KL constraint to the reference; IPO's tau.
        loss_type: a name above, a callable from `Pairs` to (n,), or a list of these.
        loss_weights: a weight for each entry of a list of loss types; None for ones.
        label_smoothing: `eps` above; refused where no loss type reads it.
        discopop_tau: `tau` above.
        compute_nll_loss, alpha: add `alpha` times the NLL of the chosen tokens (RPO, https://arxiv.org/abs/2404.19733).
        average_log_prob: log-ratios per token instead of per sequence.
        use_ref_model: None: used if given, else log-ratios are plain log-probabilities; True: required; False: refused.
        **options: see `LogitOptions`.

    Raises:
        ValueError: an unknown loss type, weights that do not match, a smoothing that the loss type cannot use.

    >>> weight, input = torch.randn(11, 4), torch.randn(2, 3, 4)        # one pair of three tokens
    >>> target = torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss, metrics = LigerFusedLinearDPOLoss(beta=0.1)(weight, input, target, ref_logps=torch.zeros(2))
    >>> metrics.chosen_rewards.shape
    torch.Size([1])
    """

    def __init__(
        self,
        *,
        beta: float = 0.1,
        loss_type: str | PairLoss | Sequence[str | PairLoss] = "sigmoid",
        loss_weights: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        compute_nll_loss: bool = False,
        alpha: float = 1.0,
        average_log_prob: bool = False,
        use_ref_model: bool | None = None,
        **options: Unpack[LogitOptionsDict],
    ) -> None:
        super().__init__(
            beta=beta,
            alpha=alpha,
            compute_nll_loss=compute_nll_loss,
            average_log_prob=average_log_prob,
            use_ref_model=use_ref_model,
            **options,
        )
        self.loss_types = [loss_type] if isinstance(loss_type, str) or callable(loss_type) else list(loss_type)
        self.loss_weights = [1.0] * len(self.loss_types) if loss_weights is None else list(loss_weights)
        self.settings = DPOSettings(beta, label_smoothing, discopop_tau)
        self._check()

    def _check(self) -> None:
        if not self.loss_types:
            raise ValueError("loss_type must name at least one loss, got an empty list")
        if len(self.loss_weights) != len(self.loss_types):
            raise ValueError(
                f"loss_weights must have one weight for each of {len(self.loss_types)} loss types, "
                f"got {len(self.loss_weights)}"
            )
        names = [name for name in self.loss_types if not callable(name)]
        for name in names:
            if name not in LOSS_TYPES:
                raise ValueError(f"unknown loss_type {name!r}, expected one of {sorted(LOSS_TYPES)} or a callable")
            if self.average_log_prob and LOSS_TYPES[name].averages:
                raise ValueError(f"loss_type {name!r} averages over tokens itself: average_log_prob must be False")
        smoothing = self.settings.label_smoothing
        if not 0.0 <= smoothing <= 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1], got {smoothing}")
        if smoothing and not any(LOSS_TYPES[name].smoothed for name in names):
            users = sorted(name for name, kind in LOSS_TYPES.items() if kind.smoothed)
            raise ValueError(f"label_smoothing={smoothing} is read by none of {names}, only by {users}")
        if "robust" in names and not smoothing < 0.5:
            raise ValueError(f"loss_type 'robust' needs label_smoothing in [0, 0.5), got {smoothing}")
        if "exo_pair" in names and not 0.0 < smoothing < 1.0:
            raise ValueError(f"loss_type 'exo_pair' needs label_smoothing in (0, 1), got {smoothing}")
        if not self.settings.discopop_tau > 0:
            raise ValueError(f"discopop_tau must be positive, got {self.settings.discopop_tau}")
        if self.settings.beta == 0 and {"ipo", "sppo_hard"} & set(names):
            raise ValueError(f"beta must not be 0 with loss_type {names}: they divide by it")
        if any(LOSS_TYPES[name].whole_batch for name in names):
            self.scope = "batch"  # type: ignore[misc]

    def preference_loss(self, pairs: Pairs) -> Tensor:
        losses = [
            weight * (kind(pairs) if callable(kind) else LOSS_TYPES[kind].loss(pairs, self.settings))
            for kind, weight in zip(self.loss_types, self.loss_weights, strict=True)
        ]
        return torch.stack(losses).sum(0)

    def extra_repr(self) -> str:
        names = [kind if isinstance(kind, str) else getattr(kind, "__name__", repr(kind)) for kind in self.loss_types]
        return f"loss_type={names}, label_smoothing={self.settings.label_smoothing}, {super().extra_repr()}"
