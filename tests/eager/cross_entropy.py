from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eager.token_stats import logits


def cross_entropy(
    weight: Tensor,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    num_items: int | Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    ce_weight: Tensor | None = None,
    token_weights: Tensor | None = None,
    focal_gamma: float = 0.0,
    dft: bool = False,
    entropy_weight: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
) -> Tensor:
    """Return the loss of `LigerFusedLinearCrossEntropyLoss`, but NaN for a "mean" without valid tokens.

    >>> weight, input, target = torch.randn(11, 4), torch.randn(3, 4), torch.tensor([1, -100, 3])
    >>> per_token = cross_entropy(weight, input, target, reduction="none")
    >>> bool(torch.isclose(per_token.sum() / 2, cross_entropy(weight, input, target)))
    True
    """
    z = logits(weight, input, bias, softcap=softcap, logit_scale=logit_scale, temperature=temperature).flatten(0, -2)
    y = target.flatten().long()
    valid = y != ignore_index
    class_weight = None if ce_weight is None else ce_weight.to(z.dtype)
    losses = F.cross_entropy(
        z, y, class_weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    distribution = torch.distributions.Categorical(logits=z)
    p = distribution.probs.gather(-1, y.where(valid, 0)[:, None])[:, 0]
    if focal_gamma:
        losses = losses * (1 - p) ** focal_gamma
    if dft:
        losses = losses * p.detach()
    extra = (lse_square_scale * z.logsumexp(-1).square() - entropy_weight * distribution.entropy()) * valid
    weights = torch.ones_like(losses) if token_weights is None else token_weights.flatten().to(z.dtype)
    losses, extra = weights * losses, weights * extra
    if reduction == "none":
        return (losses + extra).view(target.shape)
    if num_items is not None:
        return (losses.sum() + extra.sum()) / (num_items or 1)
    if reduction == "sum":
        return losses.sum() + extra.sum()
    by_class = weights if class_weight is None else weights * class_weight[y.where(valid, 0)]
    return losses.sum() / by_class[valid].sum() + extra.sum() / weights[valid].sum()
