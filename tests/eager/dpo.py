from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eager.far_ends import bounded_logps, saturating_exp
from eager.token_stats import token_stats

LOSS_TYPES = (
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft",
)  # fmt: skip


class _Pair(NamedTuple):
    """One pair: log-probabilities in nats, lengths in tokens, weight."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_length: int
    rejected_length: int
    weight: Tensor


class _Divergence(NamedTuple):
    name: str
    alpha: float

    def score(self, logratio: Tensor) -> Tensor:
        """Return `f'(t)` of f-DPO (table 1), `t = pi/pi_ref`."""
        match self.name:
            case "reverse_kl":
                return logratio
            case "forward_kl":  # 1 - 1 / t
                return 1 - saturating_exp(-logratio)
            case "js_divergence":  # log(2 t / (t + 1))
                return math.log(2) - torch.logaddexp(torch.zeros_like(logratio), -logratio)
            case "alpha_divergence" if self.alpha == 1:
                return logratio
            case "alpha_divergence":  # (t ** (alpha - 1) - 1) / (alpha - 1)
                power = self.alpha - 1
                return (saturating_exp(power * logratio) - 1) / power
        raise ValueError(f"unknown divergence {self.name!r}")


def _logistic(logit: Tensor, probability: float) -> Tensor:
    # F.binary_cross_entropy_with_logits has a gradient, sigmoid(x) - q, that cancels.
    return -(probability * F.logsigmoid(logit) + (1 - probability) * F.logsigmoid(-logit))


def _pair_loss(loss_type: str, pair: _Pair, beta: float, epsilon: float, tau: float, divergence: _Divergence) -> Tensor:
    """Return one pair's loss from its paper, with rewards `beta f'(pi/pi_ref)`."""
    chosen = divergence.score(pair.chosen - pair.ref_chosen)
    rejected = divergence.score(pair.rejected - pair.ref_rejected)
    per_token = chosen / max(1, pair.chosen_length) - rejected / max(1, pair.rejected_length)
    reward_chosen, reward_rejected = beta * chosen, beta * rejected
    margin = reward_chosen - reward_rejected
    match loss_type:
        case "sigmoid":  # Bradley-Terry, flipped with probability eps
            return _logistic(margin, 1 - epsilon)
        case "sigmoid_norm":
            return _logistic(beta * per_token, 1.0)
        case "hinge":
            return torch.clamp(1 - margin, min=0)
        case "ipo":  # equation 17, per token
            return (per_token - 1 / (2 * beta)) ** 2
        case "exo_pair":  # equation 16: KL(softmax(rewards) || (1 - eps, eps))
            log_q = torch.stack([reward_chosen, reward_rejected]).log_softmax(0)
            log_p = log_q.new_tensor([1 - epsilon, epsilon]).log()
            return (log_q.exp() * (log_q - log_p)).sum()
        case "nca_pair":
            return _logistic(reward_chosen, 1.0) + (_logistic(reward_chosen, 0.0) + _logistic(reward_rejected, 0.0)) / 2
        case "robust":  # equation 10
            clean, flipped = _logistic(margin, 1.0), _logistic(margin, 0.0)
            return ((1 - epsilon) * clean - epsilon * flipped) / (1 - 2 * epsilon)
        case "bco_pair":
            return _logistic(reward_chosen, 1.0) + _logistic(reward_rejected, 0.0)
        case "sppo_hard":  # equation 4.7 with win probabilities 1 and 0
            return (chosen - 1 / (2 * beta)) ** 2 + (rejected + 1 / (2 * beta)) ** 2
        case "apo_zero":  # equation 7
            return torch.sigmoid(-reward_chosen) + torch.sigmoid(reward_rejected)
        case "apo_down":  # equation 8
            return torch.sigmoid(reward_chosen) + torch.sigmoid(-margin)
        case "discopop":  # equation 5
            gated = saturating_exp(F.logsigmoid(margin / tau) - margin)  # gate * exp(-margin)
            return torch.sigmoid(-margin / tau) * _logistic(margin, 1.0) + gated
    raise ValueError(f"unknown loss_type {loss_type!r}, expected one of {LOSS_TYPES}")


def _quantile_losses(loss_type: str, pairs: list[_Pair], beta: float, epsilon: float) -> list[Tensor]:
    if loss_type == "aot":
        high = [pair.chosen - pair.rejected for pair in pairs]
        low = [pair.ref_chosen - pair.ref_rejected for pair in pairs]
    else:
        high = [pair.chosen - pair.ref_chosen for pair in pairs]
        low = [pair.rejected - pair.ref_rejected for pair in pairs]
    in_order = zip(sorted(high, key=Tensor.item), sorted(low, key=Tensor.item), strict=True)
    return [_logistic(beta * (a - b), 1 - epsilon) for a, b in in_order]


def _counts(valid: Tensor, ld_alpha: float | None) -> Tensor:
    """Return (2 n, T) token weights, `ld_alpha` past the other sequence's length."""
    counts = valid.double()
    if ld_alpha is not None:
        n = valid.shape[0] // 2
        for i in range(2 * n):
            shared = min(int(valid[i].sum()), int(valid[(i + n) % (2 * n)].sum()))
            counts[i, valid[i].nonzero()[shared:, 0]] = ld_alpha
    return counts


def dpo(
    weight: Tensor,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    *,
    ref_logps: Tensor | None = None,
    example_weights: Tensor | None = None,
    beta: float = 0.1,
    loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    compute_nll_loss: bool = False,
    alpha: float = 1.0,
    average_log_prob: bool = False,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    ld_alpha: float | None = None,
    use_weighting: bool = False,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and detached metrics.

    >>> weight, input = torch.randn(11, 4), torch.randn(2, 3, 4)
    >>> target = torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss, metrics = dpo(weight, input, target, ref_logps=torch.zeros(2))
    >>> metrics["chosen_rewards"].shape
    torch.Size([1])
    """
    transform: dict[str, Any] = {"softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
    valid = target != ignore_index
    lengths = valid.sum(1)
    units = lengths.clamp(min=1) if average_log_prob else 1

    outputs = ("logps", "mean_logits", "log_sum_sq_probs")
    policy = token_stats(weight, input, target, bias, outputs=outputs, ignore_index=ignore_index, **transform)
    counts = _counts(valid, ld_alpha).to(policy["logps"].dtype)
    logps = (policy["logps"] * counts).sum(1) / units
    if ref_input is not None and ref_weight is not None:
        with torch.no_grad():
            reference = token_stats(ref_weight, ref_input, target, ref_bias, ignore_index=ignore_index, **transform)
        ref_logps = reference["logps"]
    if ref_logps is None:
        ref_logps = torch.zeros_like(logps)
    ref_logps = bounded_logps(ref_logps.detach().to(logps.dtype))
    if ref_logps.ndim == 2:
        ref_logps = (ref_logps * counts).sum(1) / units

    n = target.shape[0] // 2
    of_pairs = logps.new_ones(n) if example_weights is None else example_weights.to(logps.dtype)
    weights = torch.ones_like(logps)
    if use_weighting:  # equation 2
        weights = ((policy["logps"] - policy["log_sum_sq_probs"]).sum(1) / lengths.clamp(min=1)).exp().detach()
    pairs = [
        _Pair(
            chosen=logps[i],
            rejected=logps[n + i],
            ref_chosen=ref_logps[i],
            ref_rejected=ref_logps[n + i],
            chosen_length=int(lengths[i]),
            rejected_length=int(lengths[n + i]),
            weight=weights[i] * weights[n + i] * of_pairs[i],
        )
        for i in range(n)
        if lengths[i] + lengths[n + i] > 0
    ]
    divergence = _Divergence(f_divergence_type, f_alpha_divergence_coef)
    n_chosen = lengths[:n].sum().clamp(min=1)
    nll = -policy["logps"][:n].sum() / n_chosen
    weighted_nll = -(policy["logps"][:n].sum(1) * of_pairs).sum() / n_chosen

    names = [loss_type] if isinstance(loss_type, str) else list(loss_type)
    shares = [1.0] * len(names) if loss_weights is None else list(loss_weights)
    loss = alpha * weighted_nll if compute_nll_loss else torch.zeros_like(nll)
    for name, share in zip(names, shares, strict=True):
        if name == "sft":
            loss = loss + share * weighted_nll
            continue
        if name in ("aot", "aot_unpaired"):
            losses = _quantile_losses(name, pairs, beta, label_smoothing)
        else:
            losses = [
                pair.weight * _pair_loss(name, pair, beta, label_smoothing, discopop_tau, divergence) for pair in pairs
            ]
        loss = loss + share * sum(losses) / n

    rewards = beta * (logps - ref_logps)
    logits_mean = policy["mean_logits"].unflatten(0, (2, n)).sum((1, 2)) / lengths.view(2, n).sum(1).clamp(min=1)
    metrics = {
        "chosen_logps": logps[:n],
        "rejected_logps": logps[n:],
        "chosen_logits_mean": logits_mean[0],
        "rejected_logits_mean": logits_mean[1],
        "nll_loss": nll if compute_nll_loss else torch.zeros_like(nll),
        "chosen_rewards": rewards[:n],
        "rejected_rewards": rewards[n:],
        "reward_accuracies": (rewards[:n] > rewards[n:]).to(rewards.dtype),
        "reward_margins": rewards[:n] - rewards[n:],
    }
    return loss, {name: value.detach() for name, value in metrics.items()}
