"""SimPO (https://arxiv.org/abs/2405.14734): the mean log-probability is the reward, so it needs no reference."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from liger_chunked.arguments import own_options
from liger_chunked.losses.formulas import logistic
from liger_chunked.losses.preference import LigerFusedLinearPreferenceBase
from liger_chunked.losses.settings import check_finite
from liger_chunked.types import LogitOptionsDict, Pairs, shown

_LOSS_TYPES = ("sigmoid", "hinge")


class LigerFusedLinearSimPOLoss(LigerFusedLinearPreferenceBase):
    """SimPO (Meng et al. 2024, https://arxiv.org/abs/2405.14734, equation 6), fused.

    With `m = beta * (mean log p of chosen tokens - mean log p of rejected tokens) - gamma`, in nats:

    | loss_type | loss |
    |---|---|
    | `sigmoid` | `-(1 - eps) log sigmoid(m) - eps log sigmoid(-m)` |
    | `hinge` | `max(0, 1 - m)` |

    `sigmoid` is TRL's `CPOTrainer` with `loss_type="simpo"`. `logps` in the metrics are means over tokens.

    Args:
        beta: scale of the rewards, not negative.
        gamma: the margin, TRL's `simpo_gamma`, not its ratio to beta.
        alpha: weight of the mean NLL of the batch's chosen tokens, in nats, with `compute_nll_loss` (CPO-SimPO).
        compute_nll_loss: whether to add this term. False raises unless `alpha` is 0 or 1.
        label_smoothing: `eps`, in [0, 1]; refused with "hinge".
        loss_type: "sigmoid" or "hinge".
        **options: fields of `LogitOptions`: `ignore_index` (-100) marks targets to skip; `softcap`, `logit_scale` and
            `temperature` transform the logits; `logits_budget` is the most bytes of logits in memory, such as "512MiB"
            (None: automatic); `logits_dtype=torch.float32` keeps the float32 sums of 16-bit products (None: rounded).

    >>> import torch
    >>> weight, input = torch.randn(11, 4), torch.randn(2, 3, 4)        # one pair of three tokens
    >>> target = torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss, metrics = LigerFusedLinearSimPOLoss(beta=2.0, gamma=0.5)(weight, input, target)
    >>> margin = metrics.chosen_rewards - metrics.rejected_rewards - 0.5
    >>> bool(torch.isclose(loss, -torch.nn.functional.logsigmoid(margin).mean()))
    True
    """

    def __init__(
        self,
        *,
        beta: float = 0.1,
        gamma: float = 0.5,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        label_smoothing: float = 0.0,
        loss_type: str = "sigmoid",
        **options: Unpack[LogitOptionsDict],
    ) -> None:
        super().__init__(
            beta=beta,
            alpha=alpha,
            compute_nll_loss=compute_nll_loss,
            average_log_prob=True,
            use_ref_model=False,
            **own_options(type(self), options, LogitOptionsDict.__annotations__),
        )
        if loss_type not in _LOSS_TYPES:
            raise ValueError(f"unknown loss_type {shown(loss_type)}, expected one of {_LOSS_TYPES}")
        check_finite("gamma", gamma)
        check_finite("label_smoothing", label_smoothing, minimum=0, maximum=1)
        if label_smoothing and loss_type == "hinge":
            raise ValueError(f"label_smoothing={label_smoothing} is not read by loss_type 'hinge', only by 'sigmoid'")
        self.gamma = gamma
        self.label_smoothing = label_smoothing
        self.loss_type = loss_type

    def preference_loss(self, pairs: Pairs) -> Tensor:
        chosen, rejected = self.reward(pairs.logps).unbind(-1)
        margin = chosen - rejected - self.gamma
        return F.relu(1 - margin) if self.loss_type == "hinge" else logistic(margin, self.label_smoothing)

    def extra_repr(self) -> str:
        return f"loss_type={self.loss_type!r}, gamma={self.gamma}, {super().extra_repr()}"
