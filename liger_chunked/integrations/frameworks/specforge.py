"""SpecForge: the loss of EAGLE-3 drafts, from hidden states in place of both models' logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_chunked.losses import LigerFusedLinearDraftLoss
from liger_chunked.types import DraftMetrics, Weight

__all__ = ["Eagle3Loss"]


class Eagle3Loss:
    """The weighted sum of the losses of `OnlineEagle3Model` without an LK loss, for all TTT steps at once.

        self.fused_loss = Eagle3Loss(draft_model.t2d)                              # once
        hidden.append(draft_model.norm(hidden_states_out))                         # each step, for `compute_logits`
        loss, metrics = self.fused_loss(hidden, draft_model.lm_head.weight, ...)   # after the steps

    Each step costs `KL(target_p || draft)`: SpecForge's cross entropy less the entropy of `target_p`, which has no
    gradient. `target_p` is renormalised over the draft's tokens, and positions whose most likely token is not among
    them cost 0. As there, the divisor of a step is all its positions, masked or not.

    The metric `top1_agreement` is SpecForge's `acces`. Its `acceptance_rates` are means without the positions whose
    most likely token the draft lacks; the metric `acceptance` includes these.

    Args:
        t2d: (V,) bool, the target's tokens that the draft has.
        ploss_decay: weight of a step relative to the step before.
        logits_budget: most bytes of both models' logits in memory. None: automatic.
    """

    def __init__(self, t2d: Tensor, ploss_decay: float = 0.8, logits_budget: int | str | None = None) -> None:
        if t2d.dtype != torch.bool or t2d.ndim != 1:
            raise ValueError(f"t2d must be (V,) bool, got {tuple(t2d.shape)} {t2d.dtype}")
        self.loss = LigerFusedLinearDraftLoss(
            draft_ids=t2d.nonzero().view(-1),
            renormalize=True,
            skip_outside=True,
            step_decay=ploss_decay,
            logits_budget=logits_budget,
        )

    def __call__(
        self,
        hidden_states: Sequence[Tensor],
        lm_head: Weight,
        target_hidden: Tensor,
        target_head: Weight,
        loss_mask: Tensor,
    ) -> tuple[Tensor, DraftMetrics]:
        """Return loss and metrics.

        Args:
            hidden_states: of each step, (B, T, H), as `compute_logits` passes them to `lm_head`, after its norm.
            lm_head, target_head: weights, (V_draft, H) and (V, H_target).
            target_hidden: (B, T, H_target), the target's last hidden states, shifted as `target` is.
            loss_mask: (B, T) or (B, T, 1), of the target's positions.
        """
        batch, length = target_hidden.shape[:2]
        return self.loss(
            lm_head,
            torch.stack(list(hidden_states)),
            target_head,
            target_hidden,
            mask=loss_mask.view(batch, length) > 0,
            num_items=batch * length,
        )
