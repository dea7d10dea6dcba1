"""Binary classifier optimisation: good and bad sequences told apart by their rewards."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from liger_chunked.losses.unpaired import LigerFusedLinearUnpairedPreferenceBase
from liger_chunked.types import Examples


class LigerFusedLinearBCOLoss(LigerFusedLinearUnpairedPreferenceBase):
    """Binary classifier optimisation (Jung et al. 2024, https://arxiv.org/abs/2404.04656), fused.

    With the reward `r = beta (log pi(y|x) - log pi_ref(y|x))` of a sequence, its loss is

        -log sigmoid(r - delta)      desirable
        -log sigmoid(delta - r)      undesirable

    and the loss is the mean over the batch, as in TRL 1.0 (`trl.experimental.bco`, since removed); the paper adds the
    means of the two sides.

    The reward shift `delta` is passed to every call, in units of rewards: a running mean of earlier rewards, which the
    caller keeps. In the paper it is half way between the mean rewards of the two sides,
    `(metrics.chosen_rewards + metrics.rejected_rewards) / 2`. In TRL it is the mean of all rewards so far, on all
    ranks, those of the batch itself included; here gradients are ready before the last reward is known, and a batch
    counts from the next one on.

    `example_weights` are the paper's underlying distribution matching: with `p` the probability, by a classifier of
    prompts, that a prompt is one of a desirable sequence, an undesirable sequence weighs `p / (1 - p)` (in TRL clamped
    to [0.5, 10]), a desirable one 1.

    Args:
        beta: scale of the rewards.
        average_log_prob: log-ratios per token instead of per sequence.
        use_ref_model: True: required; False: refused; None: used if given, else log-ratios are plain log-probabilities,
            which the loss warns of once.
        **options: see `LogitOptions`.

    >>> import torch
    >>> weight, input = torch.randn(11, 4), torch.randn(2, 3, 4)
    >>> target, labels = torch.tensor([[1, 2, 3], [4, 5, -100]]), torch.tensor([True, False])
    >>> loss, metrics = LigerFusedLinearBCOLoss()(weight, input, target, labels, ref_logps=torch.zeros(2), delta=0.0)
    >>> metrics.chosen_count.item(), metrics.rejected_count.item()
    (1, 1)
    """

    reference_point = "delta"
    _expects_reference: ClassVar[bool] = True

    def preference_loss(self, examples: Examples) -> Tensor:
        rewards = self.beta * examples.logratios
        return -F.logsigmoid(examples.signs * (rewards - examples.reference_point))
