from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eager.far_ends import bounded_logps
from eager.token_stats import token_stats


def _logps(
    weight: Tensor,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None,
    average: bool,
    ignore_index: int,
    **transform: Any,
) -> Tensor:
    tokens = token_stats(weight, input, target, bias, ignore_index=ignore_index, **transform)["logps"]
    return _of_sequences(tokens, target, average, ignore_index)


def _of_sequences(tokens: Tensor, target: Tensor, average: bool, ignore_index: int) -> Tensor:
    valid = target != ignore_index
    total = (tokens * valid).sum(1, dtype=torch.float64)
    return total / valid.sum(1).clamp(min=1) if average else total


@torch.no_grad()
def _reference(
    given: Tensor | None,
    input: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    target: Tensor,
    average: bool,
    ignore_index: int,
    **transform: Any,
) -> Tensor | float:
    if input is not None and weight is not None:
        return _logps(weight, input, target, bias, average, ignore_index, **transform)
    if given is None:
        return 0.0
    given = bounded_logps(given)
    return given if given.ndim == 1 else _of_sequences(given, target, average, ignore_index)


def _mean(losses: list[Tensor], target: Tensor, ignore_index: int, zero: Tensor) -> Tensor:
    """Return the mean; sequences without tokens add 0."""
    has_tokens = (target != ignore_index).any(1).tolist()
    return sum((loss for loss, counts in zip(losses, has_tokens, strict=True) if counts), zero) / max(1, len(losses))


def kto(
    weight: Tensor,
    input: Tensor,
    target: Tensor,
    preference_labels: Tensor,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    *,
    ref_logps: Tensor | None = None,
    kl: float | Tensor | None = None,
    kl_input: Tensor | None = None,
    kl_target: Tensor | None = None,
    ref_kl_input: Tensor | None = None,
    ref_kl_logps: Tensor | None = None,
    example_weights: Tensor | None = None,
    beta: float = 0.1,
    loss_type: str = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    average_log_prob: bool = False,
    ignore_index: int = -100,
    **transform: Any,
) -> Tensor:
    """>>> weight, input, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> kto(weight, input, target, torch.tensor([True, False]), kl=0.5).shape
    torch.Size([])
    """
    settings: dict[str, Any] = {"average": average_log_prob, "ignore_index": ignore_index, **transform}
    logratios = _logps(weight, input, target, bias, **settings)
    logratios = logratios - _reference(ref_logps, ref_input, ref_weight, ref_bias, target, **settings)
    z = 0.0
    if loss_type == "kto" and kl is not None:
        z = max(0.0, float(kl))
    elif loss_type == "kto" and kl_input is not None and kl_target is not None and len(kl_target):
        with torch.no_grad():
            mismatched = _logps(weight, kl_input, kl_target, bias, **settings)
            mismatched = mismatched - _reference(
                ref_kl_logps, ref_kl_input, ref_weight, ref_bias, kl_target, **settings
            )
        z = max(0.0, float(mismatched.mean()))

    losses = []
    for r, desirable in zip(logratios, preference_labels.tolist(), strict=True):
        if desirable:
            losses.append(desirable_weight * torch.sigmoid(beta * (z - r)))
        else:
            losses.append(undesirable_weight * torch.sigmoid(beta * (r - z)))
    if example_weights is not None:
        losses = [factor * loss for factor, loss in zip(example_weights, losses, strict=True)]
    return _mean(losses, target, ignore_index, 0.0 * logratios.sum())


def bco(
    weight: Tensor,
    input: Tensor,
    target: Tensor,
    preference_labels: Tensor,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    *,
    ref_logps: Tensor | None = None,
    delta: float | Tensor = 0.0,
    example_weights: Tensor | None = None,
    beta: float = 0.1,
    average_log_prob: bool = False,
    ignore_index: int = -100,
    **transform: Any,
) -> Tensor:
    """>>> weight, input, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> bco(weight, input, target, torch.tensor([True, False])).shape
    torch.Size([])
    """
    settings: dict[str, Any] = {"average": average_log_prob, "ignore_index": ignore_index, **transform}
    logps = _logps(weight, input, target, bias, **settings)
    rewards = beta * (logps - _reference(ref_logps, ref_input, ref_weight, ref_bias, target, **settings))
    classes = preference_labels.to(rewards.dtype)
    losses = F.binary_cross_entropy_with_logits(rewards - float(delta), classes, reduction="none")
    if example_weights is not None:
        losses = losses * example_weights
    return _mean(list(losses), target, ignore_index, 0.0 * logps.sum())
