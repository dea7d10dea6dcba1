"""ORPO, odds ratio preference optimisation (https://arxiv.org/abs/2403.07691): an NLL with a penalty, no reference."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from liger_chunked.arguments import own_options
from liger_chunked.losses.formulas import log_odds, logistic
from liger_chunked.losses.preference import LigerFusedLinearPreferenceBase
from liger_chunked.types import LogitOptionsDict, Pairs


class LigerFusedLinearORPOLoss(LigerFusedLinearPreferenceBase):
    """Odds ratio preference optimisation (Hong et al. 2024, https://arxiv.org/abs/2403.07691, eq. 4, 6 and 7), fused.

    With `P = exp(mean of log p over a sequence's tokens)`, at most `1 - 1e-12`, and `odds = P / (1 - P)`, in nats,

        loss = nll(chosen) - beta * mean(log sigmoid(log odds(chosen) - log odds(rejected)))

    The NLL is a mean over the tokens of `nll_target`, or else `target`; TRL's includes the prompt. `logps` in the
    metrics are means over tokens.

    Args:
        beta: weight of the odds ratio term, the paper's lambda; not negative.
        **options: fields of `LogitOptions`: `ignore_index` (-100) marks targets to skip; `softcap`, `logit_scale` and
            `temperature` transform the logits; `logits_budget` is the most bytes of logits in memory, such as "512MiB"
            (None: automatic); `logits_dtype=torch.float32` keeps the float32 sums of 16-bit products (None: rounded).

    >>> import torch
    >>> weight, input = torch.randn(11, 4), torch.randn(2, 3, 4)        # one pair of three tokens
    >>> target = torch.tensor([[-100, 2, 3], [-100, 5, -100]])          # two response tokens against one
    >>> nll_target = torch.tensor([[1, 2, 3], [1, 5, -100]])            # the prompt as well
    >>> loss, metrics = LigerFusedLinearORPOLoss(beta=0.1)(weight, input, target, nll_target=nll_target)
    >>> bool(torch.isclose(metrics.chosen_rewards, 0.1 * metrics.chosen_logps))
    True
    """

    def __init__(self, *, beta: float = 0.1, **options: Unpack[LogitOptionsDict]) -> None:
        super().__init__(
            beta=beta,
            compute_nll_loss=True,
            average_log_prob=True,
            use_ref_model=False,
            **own_options(type(self), options, LogitOptionsDict.__annotations__),
        )

    def preference_loss(self, pairs: Pairs) -> Tensor:
        chosen, rejected = log_odds(pairs.logps).unbind(-1)
        return self.beta * logistic(chosen - rejected)
