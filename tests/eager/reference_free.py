from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eager.far_ends import saturating_exp
from eager.token_stats import token_stats

CPO_LOSS_TYPES = ("sigmoid", "hinge", "ipo", "simpo")


def _sequences(
    weight: Tensor,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None,
    nll_target: Tensor | None,
    example_weights: Tensor | None,
    average: bool,
    ignore_index: int,
    transform: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities (n, 2), weights of pairs (n,), 0 where both sequences are empty, and the NLL."""
    n = target.shape[0] // 2
    in_sequence = target != ignore_index
    in_nll = in_sequence if nll_target is None else nll_target != ignore_index
    either = target if nll_target is None else torch.where(in_sequence, target, nll_target)
    token_logps = token_stats(weight, input, either, bias, ignore_index=ignore_index, **transform)["logps"]
    logps, lengths = (token_logps * in_sequence).sum(1), in_sequence.sum(1)
    if average:
        logps = logps / lengths.clamp(min=1)
    weights = logps.new_ones(n) if example_weights is None else example_weights.to(logps.dtype)
    nll = -((token_logps * in_nll)[:n].sum(1) * weights).sum() / in_nll[:n].sum().clamp(min=1)
    return logps.view(2, n).t(), weights * (lengths.view(2, n).sum(0) > 0), nll


def _logistic(logits: Tensor, epsilon: float) -> Tensor:
    # F.binary_cross_entropy_with_logits would cancel, see dpo.py.
    return -((1 - epsilon) * F.logsigmoid(logits) + epsilon * F.logsigmoid(-logits))


def orpo(
    weight: Tensor,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    nll_target: Tensor | None = None,
    example_weights: Tensor | None = None,
    beta: float = 0.1,
    ignore_index: int = -100,
    **transform: Any,
) -> Tensor:
    """>>> weight, input, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> orpo(weight, input, target).shape
    torch.Size([])
    """
    logps, weights, nll = _sequences(
        weight, input, target, bias, nll_target, example_weights, True, ignore_index, transform
    )
    logps = logps.clamp(max=-1e-12)
    log_odds = logps - torch.log(-torch.expm1(logps))
    penalty = -beta * F.logsigmoid(log_odds[:, 0] - log_odds[:, 1])
    return nll + (weights * penalty).sum() / max(1, len(penalty))


def cpo(
    weight: Tensor,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    nll_target: Tensor | None = None,
    example_weights: Tensor | None = None,
    beta: float = 0.1,
    cpo_alpha: float = 1.0,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    simpo_gamma: float = 0.5,
    alphapo_alpha: float = 0.0,
    ignore_index: int = -100,
    **transform: Any,
) -> Tensor:
    """>>> weight, input, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> cpo(weight, input, target, loss_type="simpo").shape
    torch.Size([])
    """
    average = loss_type in ("ipo", "simpo")
    logps, weights, nll = _sequences(
        weight, input, target, bias, nll_target, example_weights, average, ignore_index, transform
    )
    shaped = logps if alphapo_alpha == 0 else (1 - saturating_exp(-alphapo_alpha * logps)) / alphapo_alpha
    h = shaped[:, 0] - shaped[:, 1]
    match loss_type:
        case "sigmoid":
            losses = _logistic(beta * h, label_smoothing)
        case "hinge":
            losses = torch.clamp(1 - beta * h, min=0)
        case "ipo":
            losses = (h - 1 / (2 * beta)) ** 2
        case "simpo":
            losses = _logistic(beta * (h - simpo_gamma / beta), label_smoothing)
        case _:
            raise ValueError(f"unknown loss_type {loss_type!r}, expected one of {CPO_LOSS_TYPES}")
    return (weights * losses).sum() / max(1, len(losses)) + cpo_alpha * nll


def simpo(
    weight: Tensor,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    nll_target: Tensor | None = None,
    example_weights: Tensor | None = None,
    beta: float = 0.1,
    gamma: float = 0.5,
    alpha: float = 1.0,
    compute_nll_loss: bool = False,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    ignore_index: int = -100,
    **transform: Any,
) -> Tensor:
    """>>> weight, input, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> simpo(weight, input, target).shape
    torch.Size([])
    """
    logps, weights, nll = _sequences(
        weight, input, target, bias, nll_target, example_weights, True, ignore_index, transform
    )
    x = beta * logps[:, 0] - beta * logps[:, 1] - gamma
    losses = torch.clamp(1 - x, min=0) if loss_type == "hinge" else _logistic(x, label_smoothing)
    loss = (weights * losses).sum() / max(1, len(losses))
    return loss + alpha * nll if compute_nll_loss else loss
