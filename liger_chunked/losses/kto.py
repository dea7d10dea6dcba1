"""KTO, Kahneman-Tversky optimisation (https://arxiv.org/abs/2402.01306): good and bad sequences without pairs.

Rewards are compared with the KL divergence of policy and reference: a number, or estimated on mismatched sequences.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import Unpack

from liger_chunked.losses.reference_point import ReferencePoint
from liger_chunked.losses.settings import check_finite
from liger_chunked.losses.unpaired import LigerFusedLinearUnpairedPreferenceBase
from liger_chunked.types import Examples, LogitOptionsDict, shown

LOSS_TYPES: Mapping[str, ReferencePoint | None] = {"kto": "kl", "apo_zero_unpaired": None}


class LigerFusedLinearKTOLoss(LigerFusedLinearUnpairedPreferenceBase):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306), fused.

    With log-ratios `r = log pi(y|x) - log pi_ref(y|x)` in nats and `z = max(0, kl)`:

    | loss_type | desirable | undesirable | paper |
    |---|---|---|---|
    | `kto` | `w_d (1 - sigmoid(beta (r - z)))` | `w_u (1 - sigmoid(beta (z - r)))` | 2402.01306 |
    | `apo_zero_unpaired` | `w_d (1 - sigmoid(beta r))` | `w_u sigmoid(beta r)` | 2408.06266, equation 7, unpaired |

    `kl`, an estimate of `KL(pi || pi_ref)`, is the mean of `r` over completions of other prompts, without gradient.
    `kto` requires `kl`, or `kl_input`, `kl_target` and their reference; `apo_zero_unpaired` refuses both. To average
    over ranks before clamping, as TRL does, compute `r` by `linear_token_stats` and pass `kl`.

    Args:
        beta: strength of the KL constraint, the factor of the log-ratios; not negative.
        loss_type: "kto" or "apo_zero_unpaired".
        desirable_weight: `w_d`, not negative.
        undesirable_weight: `w_u`, not negative.
        average_log_prob: log-probabilities of sequences are means over their valid tokens instead of sums.
        use_ref_model: True requires a reference in each call, False refuses one. None allows one, and warns once
            without: log-ratios are then log-probabilities.
        **options: fields of `LogitOptions`: `ignore_index` (-100) marks targets to skip; `softcap`, `logit_scale` and
            `temperature` transform the logits; `logits_budget` is the most bytes of logits in memory, such as "512MiB"
            (None: automatic); `logits_dtype=torch.float32` keeps the float32 sums of 16-bit products (None: rounded).

    >>> weight, input = torch.randn(11, 4), torch.randn(2, 3, 4)
    >>> target, labels = torch.tensor([[1, 2, 3], [4, 5, -100]]), torch.tensor([True, False])
    >>> loss, metrics = LigerFusedLinearKTOLoss()(weight, input, target, labels, ref_logps=torch.zeros(2), kl=0.5)
    >>> metrics.chosen_tokens.item(), metrics.rejected_tokens.item(), metrics.reference_point.item()
    (3, 2, 0.5)
    """

    def __init__(
        self,
        *,
        beta: float = 0.1,
        loss_type: str = "kto",
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        average_log_prob: bool = False,
        use_ref_model: bool | None = None,
        **options: Unpack[LogitOptionsDict],
    ) -> None:
        super().__init__(beta=beta, average_log_prob=average_log_prob, use_ref_model=use_ref_model, **options)
        if loss_type not in LOSS_TYPES:
            raise ValueError(f"unknown loss_type {shown(loss_type)}, expected one of {sorted(LOSS_TYPES)}")
        check_finite("desirable_weight", desirable_weight, minimum=0)
        check_finite("undesirable_weight", undesirable_weight, minimum=0)
        self.loss_type = loss_type
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight
        self.reference_point = LOSS_TYPES[loss_type]

    def preference_loss(self, examples: Examples) -> Tensor:
        gain = self.beta * examples.signs * (examples.logratios - examples.reference_point)
        loss = torch.sigmoid(-gain)
        return torch.where(examples.desirable, self.desirable_weight * loss, self.undesirable_weight * loss)

    def extra_repr(self) -> str:
        return (
            f"loss_type={self.loss_type!r}, desirable_weight={self.desirable_weight}, "
            f"undesirable_weight={self.undesirable_weight}, {super().extra_repr()}"
        )
