"""Cross entropy from full logits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from liger_chunked.reference.token_stats import logits


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
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
) -> Tensor:
    """`F.cross_entropy` on full logits `z`, plus the z-loss `lse_square_scale * logsumexp(z) ** 2`.

    Args:
        weight: (V, H).
        input: (..., H).
        target: (...) token ids, or `ignore_index`.
        bias: (V,) or None.
        num_items: divides the sum over this batch, instead of its own count of tokens or sum of class weights.
        ignore_index, reduction, label_smoothing: as in `F.cross_entropy`; without any valid token "mean" is NaN.
        lse_square_scale: weight of the z-loss, averaged over the valid tokens, each the same.
        ce_weight: (V,) class weights, or None.
        softcap, logit_scale, temperature: see `logits`.

    Returns:
        A scalar, or a tensor of the shape of `target` with `reduction="none"`.

    >>> import torch
    >>> weight, input, target = torch.randn(11, 4), torch.randn(3, 4), torch.tensor([1, -100, 3])
    >>> per_token = cross_entropy(weight, input, target, reduction="none")
    >>> bool(torch.isclose(per_token.sum() / 2, cross_entropy(weight, input, target)))
    True
    """
    z = logits(weight, input, bias, softcap=softcap, logit_scale=logit_scale, temperature=temperature).flatten(0, -2)
    y = target.flatten().long()
    valid = y != ignore_index
    loss = F.cross_entropy(
        z,
        y,
        weight=None if ce_weight is None else ce_weight.to(z.dtype),
        ignore_index=ignore_index,
        reduction="sum" if num_items is not None else reduction,
        label_smoothing=label_smoothing,
    )
    squares = lse_square_scale * z.logsumexp(-1).square() * valid
    if reduction == "none":
        return (loss + squares).view(target.shape)
    if num_items is not None:
        return (loss + squares.sum()) / num_items
    return loss + (squares.sum() / valid.sum() if reduction == "mean" else squares.sum())
