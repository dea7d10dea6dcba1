"""BCO, binary classifier optimisation: a logistic loss of each labelled sequence (https://arxiv.org/abs/2404.04656).

The reward shift `delta` is an argument, because it is a mean over many calls and each sees one batch.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from liger_chunked.losses.unpaired import LigerFusedLinearUnpairedPreferenceBase
from liger_chunked.types import Examples


class LigerFusedLinearBCOLoss(LigerFusedLinearUnpairedPreferenceBase):
    """Binary classifier optimisation (Jung et al. 2024, https://arxiv.org/abs/2404.04656), fused.

    With the reward `r = beta (log pi(y|x) - log pi_ref(y|x))`, the loss of a sequence is

        -log sigmoid(r - delta)      desirable
        -log sigmoid(delta - r)      undesirable

    averaged over the batch, as in TRL; the paper adds the sides' means.

    `delta` is a running mean: in the paper, of `(metrics.chosen_rewards + metrics.rejected_rewards) / 2` in earlier
    calls; in TRL, of all rewards, also this call's.

    The paper's distribution matching has `example_weights` of 1 for a desirable sequence, else `p / (1 - p)`, with `p`
    the probability that its prompt has a desirable one. TRL clamps them to [0.5, 10].

    Args:
        beta: strength of the KL constraint, the factor of the log-ratios; not negative.
        average_log_prob: log-probabilities of sequences are means over their valid tokens instead of sums.
        use_ref_model: True requires a reference in each call, False refuses one. None allows one, and warns once
            without: log-ratios are then log-probabilities.
        **options: fields of `LogitOptions`: `ignore_index` (-100) marks targets to skip; `softcap`, `logit_scale` and
            `temperature` transform the logits; `logits_budget` is the most bytes of logits in memory, such as "512MiB"
            (None: automatic); `logits_dtype=torch.float32` keeps the float32 sums of 16-bit products (None: rounded).

    >>> import torch
    >>> weight, input = torch.randn(11, 4), torch.randn(2, 3, 4)
    >>> target, labels = torch.tensor([[1, 2, 3], [4, 5, -100]]), torch.tensor([True, False])
    >>> loss, metrics = LigerFusedLinearBCOLoss()(weight, input, target, labels, ref_logps=torch.zeros(2), delta=0.0)
    >>> metrics.chosen_count.item(), metrics.rejected_count.item()
    (1, 1)
    """

    reference_point = "delta"

    def preference_loss(self, examples: Examples) -> Tensor:
        rewards = self.beta * examples.logratios
        return -F.logsigmoid(examples.signs * (rewards - examples.reference_point))
