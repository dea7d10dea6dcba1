"""speculators: the losses of EAGLE-3, DFlash and DSpark drafts, from hidden states in place of both models' logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_chunked.losses import LigerFusedLinearDraftLoss
from liger_chunked.types import DraftMetrics, Weight

__all__ = ["dflash_loss", "eagle3_loss"]

# Of speculators' names for losses. Its "ce" and "lk_hybrid" are not served.
_DIVERGENCES = {"kl_div": "kl", "rkl": "reverse_kl", "jsd": "jsd", "tv": "tvd", "nla": "log_acceptance"}
_EPS = 1e-5  # of speculators' divisor


def _loss(loss_fn: str, **settings: Any) -> LigerFusedLinearDraftLoss:
    divergence = _DIVERGENCES.get(loss_fn)
    if divergence is None:
        raise ValueError(f"loss_fn must be one of {tuple(_DIVERGENCES)}, got {loss_fn!r}: keep speculators' own loss")
    return LigerFusedLinearDraftLoss(divergence=divergence, **settings)  # type: ignore[arg-type]


def eagle3_loss(
    hidden_states: Sequence[Tensor],
    lm_head: Weight,
    verifier_hidden_states: Tensor,
    verifier_lm_head: Weight,
    loss_mask: Tensor | None = None,
    ttt_step_loss_decay: float = 1.0,
    loss_fn: str = "kl_div",
    logits_budget: int | str | None = None,
) -> tuple[Tensor, DraftMetrics]:
    """Return the sum of the losses of `speculators.models.eagle3.metrics.compute_metrics` over all TTT steps.

    The divisor of a step is its number of tokens, without speculators' 1e-5. The verifier is projected once.

    Args:
        hidden_states: of each step, (1, T, H), as its forward passes them to `lm_head`.
        lm_head, verifier_lm_head: weights, (V_draft, H) and (V_draft, H_verifier), of the draft's tokens both.
        verifier_hidden_states: (1, T, H_verifier), after `verifier_norm`.
        loss_mask: (1, T), of the verifier's positions. None: all count.
    """
    loss = _loss(loss_fn, step_decay=ttt_step_loss_decay, logits_budget=logits_budget)
    mask = None if loss_mask is None else loss_mask.bool()
    return loss(lm_head, torch.stack(list(hidden_states)), verifier_lm_head, verifier_hidden_states, mask=mask)


def dflash_loss(
    hidden: Tensor,
    lm_head: Weight,
    verifier_hidden_states: Tensor,
    verifier_lm_head: Weight,
    target_indices: Tensor,
    aligned_loss_mask: Tensor,
    block_size: int,
    gamma: float = 4.0,
    sample_from_anchor: bool = False,
    loss_fn: str = "kl_div",
    logits_budget: int | str | None = None,
) -> tuple[Tensor, DraftMetrics]:
    """Return the loss of `speculators.models.dflash.metrics.compute_metrics` with "fixed-exp-decay".

    The same of DSpark without its confidence head; its vanilla or gated Markov bias is an `AdaptedWeight` of `lm_head`,
    whose `down` returns values for slots in the order of `in_slots`. Steps of the metrics are the drafting slots of a
    block. Blocks that overlap share the verifier's product.

    Args:
        hidden: (1, blocks * block_size, H), the draft's normed output.
        lm_head, verifier_lm_head: weights, (V_draft, H) and (V_draft, H_verifier), of the draft's tokens both.
        verifier_hidden_states: (1, T, H_verifier), after `verifier_norm`, of all positions.
        target_indices: (blocks * block_size,), the verifier's position of each slot, as in its `_backbone_forward`.
        aligned_loss_mask: (1, blocks * block_size).
        sample_from_anchor: whether slot 0 drafts a token. Else it is the anchor and has no loss.
    """
    first = 0 if sample_from_anchor else 1
    mask = in_slots(aligned_loss_mask[0], block_size, first).bool()
    slots = torch.arange(mask.shape[0], device=mask.device, dtype=torch.float32)
    loss = _loss(loss_fn, logits_budget=logits_budget)
    return loss(
        lm_head,
        in_slots(hidden[0], block_size, first),
        verifier_lm_head,
        verifier_hidden_states,
        teacher_rows=in_slots(target_indices, block_size, first),
        mask=mask,
        position_weight=torch.exp(-slots / gamma)[:, None].expand(mask.shape),
        num_items=mask.sum() + _EPS,
    )


def in_slots(x: Tensor, block_size: int, first: int) -> Tensor:
    """Return (slots, blocks, ...) from (blocks * block_size, ...), without the slots before `first`."""
    return x.unflatten(0, (-1, block_size))[:, first:].transpose(0, 1)
