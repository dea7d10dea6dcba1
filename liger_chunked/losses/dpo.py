"""DPO, direct preference optimisation (https://arxiv.org/abs/2305.18290), and the losses that TRL has under its name.

Each is a function of `Pairs`, in the table `LOSS_TYPES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from liger_chunked.arguments import own_options
from liger_chunked.engine import check_values
from liger_chunked.losses.formulas import is_number, logistic, saturating_expm1, softplus
from liger_chunked.losses.preference import LigerFusedLinearPreferenceBase
from liger_chunked.losses.settings import check_finite, check_positive, refuse_unread
from liger_chunked.types import LogitOptionsDict, Pairs, saturating_exp, shown


def _reverse_kl(logratios: Tensor, alpha: float) -> Tensor:
    return logratios


def _alpha(logratios: Tensor, alpha: float) -> Tensor:
    power = alpha - 1
    if abs(power) < 1e-6:
        return logratios  # the limit
    return saturating_expm1(power * logratios) / power


def _forward_kl(logratios: Tensor, alpha: float) -> Tensor:
    return _alpha(logratios, 0.0)


def _js(logratios: Tensor, alpha: float) -> Tensor:
    return math.log(2) + F.logsigmoid(logratios)


class _FDivergence(NamedTuple):
    """A row of `F_DIVERGENCES`."""

    score: Callable[[Tensor, float], Tensor]  # (log-ratios, alpha) -> `f'(pi / pi_ref)`, up to a constant
    reads: tuple[str, ...] = ()  # fields of DPOSettings


F_DIVERGENCES: Mapping[str, _FDivergence] = {
    "reverse_kl": _FDivergence(_reverse_kl),
    "forward_kl": _FDivergence(_forward_kl),
    "js_divergence": _FDivergence(_js),
    "alpha_divergence": _FDivergence(_alpha, reads=("f_alpha_divergence_coef",)),
}


@dataclass(frozen=True)
class DPOSettings:
    """The arguments of `LigerFusedLinearDPOLoss` that single losses read besides beta."""

    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5

    def __post_init__(self) -> None:
        check_finite("label_smoothing", self.label_smoothing, minimum=0, maximum=1)
        check_positive("discopop_tau", self.discopop_tau)
        if self.f_divergence_type not in F_DIVERGENCES:
            raise ValueError(
                f"unknown f_divergence_type {shown(self.f_divergence_type)}, expected one of {list(F_DIVERGENCES)}"
            )
        check_finite("f_alpha_divergence_coef", self.f_alpha_divergence_coef)

    def scores(self, pairs: Pairs) -> Tensor:
        """Return the scores (n, 2) of the f-divergence; the log-ratios for the reverse KL."""
        return F_DIVERGENCES[self.f_divergence_type].score(pairs.logratios, self.f_alpha_divergence_coef)


def _margin(pairs: Pairs, s: DPOSettings) -> Tensor:
    chosen, rejected = s.scores(pairs).unbind(-1)
    return chosen - rejected


def _mean_margin(pairs: Pairs, s: DPOSettings) -> Tensor:
    chosen, rejected = (s.scores(pairs) / pairs.lengths).unbind(-1)
    return chosen - rejected


def _sigmoid(pairs: Pairs, beta: float, s: DPOSettings) -> Tensor:
    return logistic(beta * _margin(pairs, s), s.label_smoothing)


def _sigmoid_norm(pairs: Pairs, beta: float, s: DPOSettings) -> Tensor:
    return logistic(beta * _mean_margin(pairs, s))


def _hinge(pairs: Pairs, beta: float, s: DPOSettings) -> Tensor:
    return F.relu(1 - beta * _margin(pairs, s))


def _ipo(pairs: Pairs, beta: float, s: DPOSettings) -> Tensor:
    return (_mean_margin(pairs, s) - 1 / (2 * beta)).square()


def _robust(pairs: Pairs, beta: float, s: DPOSettings) -> Tensor:
    # Unbiased if a share `label_smoothing` of the labels is flipped: the formula is a smoothing by a negative number.
    return logistic(beta * _margin(pairs, s), -s.label_smoothing / (1 - 2 * s.label_smoothing))


def _nca_pair(pairs: Pairs, beta: float, s: DPOSettings) -> Tensor:
    chosen, rejected = (beta * pairs.logratios).unbind(-1)
    return softplus(-chosen) + 0.5 * softplus(chosen) + 0.5 * softplus(rejected)


def _bco_pair(pairs: Pairs, beta: float, s: DPOSettings) -> Tensor:
    chosen, rejected = (beta * pairs.logratios).unbind(-1)
    return softplus(-chosen) + softplus(rejected)


def _sppo_hard(pairs: Pairs, beta: float, s: DPOSettings) -> Tensor:
    chosen, rejected = pairs.logratios.unbind(-1)
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def _apo_zero(pairs: Pairs, beta: float, s: DPOSettings) -> Tensor:
    chosen, rejected = (beta * pairs.logratios).unbind(-1)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def _apo_down(pairs: Pairs, beta: float, s: DPOSettings) -> Tensor:
    chosen, rejected = pairs.logratios.unbind(-1)
    return torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected))


def _exo_pair(pairs: Pairs, beta: float, s: DPOSettings) -> Tensor:
    logits = beta * _margin(pairs, s)
    chosen = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-s.label_smoothing))
    rejected = torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(s.label_smoothing))
    return chosen + rejected


def _aot(pairs: Pairs, beta: float, s: DPOSettings) -> Tensor:
    policy = (pairs.logps[:, 0] - pairs.logps[:, 1]).sort().values
    reference = (pairs.ref_logps[:, 0] - pairs.ref_logps[:, 1]).sort().values
    return logistic(beta * (policy - reference), s.label_smoothing)


def _aot_unpaired(pairs: Pairs, beta: float, s: DPOSettings) -> Tensor:
    chosen, rejected = pairs.logratios.sort(dim=0).values.unbind(-1)
    return logistic(beta * (chosen - rejected), s.label_smoothing)


def _discopop(pairs: Pairs, beta: float, s: DPOSettings) -> Tensor:
    logits = beta * _margin(pairs, s)
    scaled = logits / s.discopop_tau
    # m exp(-x) as exp(log(m) - x): at a very negative x, m rounds to 0 and exp(-x) overflows.
    exponential = saturating_exp(F.logsigmoid(scaled) - logits)
    return torch.sigmoid(-scaled) * -F.logsigmoid(logits) + exponential


def _sft(pairs: Pairs, beta: float, s: DPOSettings) -> Tensor:
    # The base takes the mean of these over the batch_size pairs, and an NLL is a mean over tokens.
    chosen = torch.where(pairs.mask[:, 0], pairs.token_logps[:, 0], 0.0).sum(-1)
    return -chosen * pairs.batch_size / pairs.batch_lengths[0]


def _wpo_weights(pairs: Pairs) -> Tensor:
    stats = pairs.token_stats
    assert stats.log_sum_sq_probs is not None
    aligned = torch.where(pairs.mask, pairs.token_logps - stats.log_sum_sq_probs, 0.0)
    return (aligned.sum(-1, dtype=torch.float64) / pairs.lengths).sum(-1).exp().detach()


class _LossType(NamedTuple):
    """A row of `LOSS_TYPES`."""

    loss: Callable[[Pairs, float, DPOSettings], Tensor]  # (pairs, beta, settings) -> (n,)
    reads: tuple[str, ...] = ()  # fields of DPOSettings
    whole_batch: bool = False  # whether it sorts the batch
    averages: bool = False  # whether it takes means over tokens itself, and so refuses average_log_prob
    takes_f_divergence: bool = False  # whether it reads `scores`, or compares with no reference
    weighable: bool = True  # whether each value belongs to one pair, which use_weighting multiplies


_SCORES = ("f_divergence_type", "f_alpha_divergence_coef")

LOSS_TYPES: Mapping[str, _LossType] = {
    "sigmoid": _LossType(_sigmoid, reads=("label_smoothing", *_SCORES), takes_f_divergence=True),
    "hinge": _LossType(_hinge, reads=_SCORES, takes_f_divergence=True),
    "ipo": _LossType(_ipo, reads=_SCORES, averages=True, takes_f_divergence=True),
    "exo_pair": _LossType(_exo_pair, reads=("label_smoothing", *_SCORES), takes_f_divergence=True),
    "nca_pair": _LossType(_nca_pair),
    "robust": _LossType(_robust, reads=("label_smoothing", *_SCORES), takes_f_divergence=True),
    "bco_pair": _LossType(_bco_pair),
    "sppo_hard": _LossType(_sppo_hard),
    "aot": _LossType(_aot, reads=("label_smoothing",), whole_batch=True, weighable=False),
    "aot_unpaired": _LossType(_aot_unpaired, reads=("label_smoothing",), whole_batch=True, weighable=False),
    "apo_zero": _LossType(_apo_zero),
    "apo_down": _LossType(_apo_down),
    "discopop": _LossType(_discopop, reads=("discopop_tau", *_SCORES), takes_f_divergence=True),
    "sft": _LossType(_sft, takes_f_divergence=True, weighable=False),
    "sigmoid_norm": _LossType(_sigmoid_norm, reads=_SCORES, averages=True, takes_f_divergence=True),
}

LossOfPairs = Callable[[Pairs], Tensor]


class LigerFusedLinearDPOLoss(LigerFusedLinearPreferenceBase):
    """Direct preference optimisation (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7), fused.

    `c` and `r` are the log-ratios `log(pi(y|x) / pi_ref(y|x))` of chosen and rejected sequence in nats, `d = c - r`,
    and `d'` is the same with means over tokens. `L = -log sigmoid`, and `S = sigmoid`.

    | loss_type | loss | paper |
    |---|---|---|
    | `sigmoid` | `(1 - eps) L(beta d) + eps L(-beta d)` | 2305.18290; eps: ericmitchell.ai/cdpo.pdf |
    | `sigmoid_norm` | `L(beta d')` | 2411.15124 |
    | `hinge` | `max(0, 1 - beta d)` | 2305.10425 |
    | `ipo` | `(d' - 1 / (2 beta)) ** 2` | 2310.12036, equation 17, per token as its authors confirmed |
    | `exo_pair` | `S(beta d) (-L(beta d) - log(1 - eps)) + S(-beta d) (-L(-beta d) - log(eps))` | 2402.00856, eq. 16 |
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

    TRL has the same losses, but ignores `label_smoothing` with `sigmoid`. Three options change them:

    - `f_divergence_type` (f-DPO, https://arxiv.org/abs/2309.16240, table 1) replaces `c` and `r` in `d`, not in the
      metrics, by a score of `t = pi / pi_ref`, with exponents up to 80. Losses of `c` or `r` alone refuse it.
      `exp(-beta d)` of `discopop` has the same bound, and `ref_logps` of -inf count as -1e18.
    - `ld_alpha`: LD-DPO (https://arxiv.org/abs/2409.06411).
    - `use_weighting` (WPO, https://arxiv.org/abs/2406.11827, equation 2) multiplies a pair's loss by the constant
      `w(chosen) w(rejected)`, with `log w` the mean over tokens of `log p_y - log(sum of p ** 2)`. `aot`,
      `aot_unpaired` and `sft` refuse it.

    | f_divergence_type | score |
    |---|---|
    | `reverse_kl` | `log(t)` |
    | `forward_kl` | `1 - 1 / t` |
    | `js_divergence` | `log(2 t / (1 + t))` |
    | `alpha_divergence` | `(t ** (alpha - 1) - 1) / (alpha - 1)`; alpha 0: forward KL; alpha 1: reverse KL |

    An option that no `loss_type` reads raises.

    Args:
        beta: strength of the KL constraint, not negative; IPO's tau. "ipo" and "sppo_hard" divide by it.
        loss_type: a name from the table, a callable from `Pairs` to (n,), or a list of these, whose losses are added.
        loss_weights: a factor for each loss type. None: 1.
        label_smoothing: `eps`, in [0, 1]; "robust" needs one below 0.5, and "exo_pair" one above 0 and below 1.
        discopop_tau: `tau`, positive.
        compute_nll_loss: whether to add the mean NLL of the batch's chosen tokens, in nats (RPO,
            https://arxiv.org/abs/2404.19733).
        alpha: weight of this term; without it 0 or 1.
        average_log_prob: log-probabilities of sequences are means over tokens instead of sums; refused with "ipo" and
            "sigmoid_norm", which average themselves.
        f_divergence_type: a name from the second table.
        f_alpha_divergence_coef: `alpha` of the second table.
        ld_alpha: weight, in [0, 1], of tokens beyond the pair's shorter length, under policy and reference; refused
            with "sft" alone. None: 1.
        use_weighting: weigh pairs as WPO does, see above.
        use_ref_model: True requires a reference in each call, False refuses one. None allows one, and warns once
            without: log-ratios are then log-probabilities.
        **options: fields of `LogitOptions`: `ignore_index` (-100) marks targets to skip; `softcap`, `logit_scale` and
            `temperature` transform the logits; `logits_budget` is the most bytes of logits in memory, such as "512MiB"
            (None: automatic); `logits_dtype=torch.float32` keeps the float32 sums of 16-bit products (None: rounded).

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
        loss_type: str | LossOfPairs | Sequence[str | LossOfPairs] = "sigmoid",
        loss_weights: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        compute_nll_loss: bool = False,
        alpha: float = 1.0,
        average_log_prob: bool = False,
        f_divergence_type: str = "reverse_kl",
        f_alpha_divergence_coef: float = 0.5,
        ld_alpha: float | None = None,
        use_weighting: bool = False,
        use_ref_model: bool | None = None,
        **options: Unpack[LogitOptionsDict],
    ) -> None:
        super().__init__(
            beta=beta,
            alpha=alpha,
            compute_nll_loss=compute_nll_loss,
            average_log_prob=average_log_prob,
            ld_alpha=ld_alpha,
            use_ref_model=use_ref_model,
            **own_options(type(self), options, LogitOptionsDict.__annotations__),
        )
        self.loss_types = [loss_type] if isinstance(loss_type, str) or callable(loss_type) else list(loss_type)
        self.loss_weights = [1.0] * len(self.loss_types) if loss_weights is None else list(loss_weights)
        self.settings = DPOSettings(label_smoothing, discopop_tau, f_divergence_type, f_alpha_divergence_coef)
        self.use_weighting = use_weighting
        names = self._checked_names()
        self._check_options(names)
        self._check_read(names)
        self._check_smoothing(names)
        if any(LOSS_TYPES[name].whole_batch for name in names):
            self.scope = "batch"
        if use_weighting:
            self.token_outputs = ("log_sum_sq_probs",)

    def _checked_names(self) -> list[str]:
        if not self.loss_types:
            raise ValueError("loss_type must name at least one loss, got an empty list")
        if len(self.loss_weights) != len(self.loss_types):
            raise ValueError(
                f"loss_weights must have one weight for each of {len(self.loss_types)} loss types, "
                f"got {len(self.loss_weights)}"
            )
        for i, weight in enumerate(self.loss_weights):
            check_finite(f"loss_weights[{i}]", weight)
        names = [name for name in self.loss_types if not callable(name)]
        for name in names:
            if name not in LOSS_TYPES:
                raise ValueError(f"unknown loss_type {shown(name)}, expected one of {sorted(LOSS_TYPES)} or a callable")
        return names

    def _check_options(self, names: list[str]) -> None:
        s = self.settings
        if self.loss_types == ["sft"]:
            unread = {"beta": 0.1, "average_log_prob": False, "ld_alpha": None}
            for name, default in unread.items():
                if (value := getattr(self, name)) != default:
                    raise ValueError(f"{name}={value} is not read by loss_type 'sft', whose loss is an NLL of tokens")
        if self.beta == 0 and {"ipo", "sppo_hard"} & set(names):
            raise ValueError(f"beta must not be 0 with loss_type {names}, which divide by it")
        if self.average_log_prob and any(LOSS_TYPES[name].averages for name in names):
            raise ValueError(f"loss_type {names} averages over tokens itself: average_log_prob must be False")
        if s.f_divergence_type != "reverse_kl":
            fitting = {name for name, kind in LOSS_TYPES.items() if kind.takes_f_divergence}
            if not set(self.loss_types) <= fitting:
                readers = sorted(name for name, kind in LOSS_TYPES.items() if "f_divergence_type" in kind.reads)
                raise ValueError(
                    f"f_divergence_type={s.f_divergence_type!r} needs loss types among {readers}, "
                    f"got {self._shown_names()}"
                )
        if self.use_weighting and not all(LOSS_TYPES[name].weighable for name in names):
            unweighable = sorted(name for name, kind in LOSS_TYPES.items() if not kind.weighable)
            raise ValueError(f"use_weighting needs a loss per pair, which {unweighable} do not have, got {names}")

    def _check_read(self, names: list[str]) -> None:
        s = self.settings
        by = f"loss_type {', '.join(map(repr, self._shown_names()))}"
        refuse_unread(s, {field for name in names for field in LOSS_TYPES[name].reads}, by, LOSS_TYPES)
        if self.ld_alpha is not None and all(kind == "sft" for kind in self.loss_types):
            raise ValueError(
                f"ld_alpha={self.ld_alpha} is not read by {by}, which compares no sequences: leave it out, or add "
                "another loss type"
            )
        by = f"f_divergence_type {s.f_divergence_type!r}"
        refuse_unread(s, F_DIVERGENCES[s.f_divergence_type].reads, by, F_DIVERGENCES)

    def _check_smoothing(self, names: list[str]) -> None:
        smoothing = self.settings.label_smoothing
        if "robust" in names and not smoothing < 0.5:
            raise ValueError(f"loss_type 'robust' needs label_smoothing in [0, 0.5), got {smoothing}")
        if "exo_pair" in names and not 0.0 < smoothing < 1.0:
            raise ValueError(f"loss_type 'exo_pair' needs label_smoothing in (0, 1), got {smoothing}")

    def preference_loss(self, pairs: Pairs) -> Tensor:
        total: Tensor | None = None
        for kind, weight in zip(self.loss_types, self.loss_weights, strict=True):
            loss = self._loss(kind, pairs)
            loss = loss if is_number(weight, 1) else weight * loss
            total = loss if total is None else total + loss
        assert total is not None  # there is at least one
        return total * _wpo_weights(pairs) if self.use_weighting else total

    def _loss(self, kind: str | LossOfPairs, pairs: Pairs) -> Tensor:
        if not callable(kind):
            return LOSS_TYPES[kind].loss(pairs, self.beta, self.settings)
        loss = kind(pairs)
        check_values(f"loss_type {kind}", loss, pairs.logps.shape[:1], "pairs")  # a sum would broadcast
        return loss

    def _shown_names(self) -> list[str]:
        return [kind if isinstance(kind, str) else getattr(kind, "__name__", repr(kind)) for kind in self.loss_types]

    def extra_repr(self) -> str:
        return (
            f"loss_type={self._shown_names()}, label_smoothing={self.settings.label_smoothing}, {super().extra_repr()}"
        )
