from __future__ import annotations

import math

import torch
from torch import Tensor

from liger_chunked.eager.far_ends import LARGEST, LARGEST_EXPONENT, bounded_logps, saturating_exp
from liger_chunked.eager.token_stats import token_stats

SURROGATES = ("clip", "reinforce", "cispo", "gmpo", "sapo", "vespo", "clip_cov", "kl_cov")
REDUCTIONS = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")
VERL_REDUCTIONS = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
IMPORTANCE_LEVELS = ("token", "sequence", "sequence_token", "trajectory")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl")


def _importance_ratio(logps: Tensor, old_logps: Tensor, level: str) -> Tensor:
    logs = logps - old_logps
    match level:
        case "token":
            return saturating_exp(logs)
        case "sequence":  # GSPO, equation 7: (pi(y) / pi_old(y)) ** (1 / |y|)
            return saturating_exp(logs.mean()).expand_as(logs)
        case "sequence_token":  # GSPO-token: sg(s) pi / sg(pi), constant where s is
            return saturating_exp(logs.mean().detach() + logps - logps.detach())
        case "trajectory":  # pi(y) / pi_old(y)
            return saturating_exp(logs.sum()).expand_as(logs)
    raise ValueError(f"unknown importance_level {level!r}, expected one of {IMPORTANCE_LEVELS}")


def _kl(logps: Tensor, ref_logps: Tensor, estimator: str) -> Tensor:
    match estimator:
        case "k1" | "kl":
            return logps - ref_logps
        case "k2" | "mse":
            return (logps - ref_logps) ** 2 / 2
        case "k3":
            d = torch.clamp(ref_logps - logps, max=LARGEST_EXPONENT)
            return d.exp() - d - 1
        case "low_var_kl":
            d = torch.clamp(ref_logps - logps, -20, 20)
            return torch.clamp(d.exp() - d - 1, max=10)
        case "abs":
            return (logps - ref_logps).abs()
    raise ValueError(f"unknown kl_estimator {estimator!r}, expected one of {KL_ESTIMATORS}")


def _covariances(logps: Tensor, advantages: Tensor, valid: Tensor) -> Tensor:
    """Return `(log pi - mean) * (A - mean)` over the batch's tokens, NaN at ignored tokens."""
    logps, advantages = logps.detach()[valid], advantages.expand(valid.shape)[valid].to(logps.dtype)
    result = torch.full(valid.shape, math.nan, dtype=logps.dtype, device=logps.device)
    result[valid] = (logps - logps.mean()) * (advantages - advantages.mean())
    return result


def _largest(values: Tensor, candidates: Tensor, count: int) -> Tensor:
    places = [tuple(place) for place in candidates.nonzero().tolist()]
    places.sort(key=lambda place: -float(values[place]))
    chosen = torch.zeros_like(candidates)
    for place in places[:count]:
        chosen[place] = True
    return chosen


def _clip_by_sign(ratio: Tensor, advantage: Tensor, low: float, high: float, delta: float | None) -> Tensor:
    """Return PPO's clipped cost, with ratios also at most `delta`."""
    most = math.inf if delta is None else delta
    good = ratio.clamp(max=min(high, most))
    bad = ratio.clamp(low, max(high, most))
    return -advantage * torch.where(advantage > 0, good, bad)


def _gamma_weight(log_w: float, k: float, rate: float) -> float:
    log_w = min(max(log_w, math.log(1e-8)), 20.0)
    w = math.exp(log_w)
    return math.exp(k * log_w + rate * (1 - w))


def grpo(
    weight: Tensor,
    input: Tensor,
    target: Tensor,
    advantages: Tensor,
    bias: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    importance_weights: Tensor | None = None,
    num_items: float | Tensor | None = None,
    beta: float = 0.0,
    surrogate: str = "clip",
    reduction: str = "grpo",
    importance_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    max_completion_length: int | None = None,
    kl_estimator: str = "k3",
    use_bias_correction_kl: bool = True,
    off_policy_mask_threshold: float | None = None,
    entropy_coef: float = 0.0,
    top_entropy_quantile: float = 1.0,
    cispo_epsilon_low: float = 0.0,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    kl_cov_ratio: float = 2e-4,
    ppo_kl_coef: float = 1.0,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the loss and detached metrics.

    >>> weight, input = torch.randn(11, 4), torch.randn(2, 3, 4)
    >>> target = torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss, metrics = grpo(weight, input, target, torch.tensor([1.0, -1.0]))
    >>> bool(loss.abs() < 1e-6), metrics["clip_ratio"].item()
    (True, 0.0)
    """
    if attention_mask is not None:
        target = torch.where(attention_mask.bool(), target, ignore_index)
    valid = target != ignore_index

    def statistics(weight: Tensor, input: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        return token_stats(
            weight,
            input,
            target,
            bias,
            outputs=("logps", "entropy"),
            softcap=softcap,
            logit_scale=logit_scale,
            temperature=temperature,
            ignore_index=ignore_index,
        )

    stats = statistics(weight, input, bias)
    dtype = stats["logps"].dtype
    if ref_input is not None and ref_weight is not None:
        with torch.no_grad():
            ref_logps = statistics(ref_weight, ref_input, ref_bias)["logps"]

    old_logps, ref_logps = (None if x is None else bounded_logps(x.to(dtype)) for x in (old_logps, ref_logps))
    n_sequences, n_tokens = max(1, target.shape[0]), max(1, int(valid.sum()))
    threshold = -math.inf
    if top_entropy_quantile < 1 and valid.any():
        entropies = stats["entropy"][valid].detach()
        threshold = float(entropies.quantile(1 - top_entropy_quantile))

    chosen = torch.zeros_like(valid)
    if surrogate in ("clip_cov", "kl_cov") and valid.any():
        of_sequences = advantages[:, None] if advantages.ndim == 1 else advantages
        covariances = _covariances(stats["logps"], of_sequences, valid)
        if surrogate == "kl_cov":
            chosen = _largest(covariances, valid, max(1, int(kl_cov_ratio * n_tokens)))
        else:
            now = torch.ones_like(stats["logps"])
            if old_logps is not None:
                now = saturating_exp(stats["logps"].detach() - old_logps)
            outside = torch.where(of_sequences > 0, now > 1 + epsilon_high, now < 1 - epsilon_low) & (of_sequences != 0)
            inside = (covariances > clip_cov_lb) & (covariances < clip_cov_ub)
            chosen = _largest(covariances, valid & inside & ~outside, max(1, int(clip_cov_ratio * n_tokens)))

    loss = bonus = kl_sum = stats["logps"].new_zeros(())
    n_acting = 0
    clipped_low: list[Tensor] = []
    clipped_high: list[Tensor] = []
    for i in range(target.shape[0]):
        here = valid[i]
        length = int(here.sum())
        one_ratio = importance_level in ("sequence", "trajectory") and advantages[i].numel() == 1
        if length == 0:
            if one_ratio:  # its ratio is 1, which is not clipped
                clipped_low.append(here[:1])
                clipped_high.append(here[:1])
            continue

        def of_tokens(x: Tensor, i: int = i, here: Tensor = here) -> Tensor:
            return x[i].expand(here.shape)[here].detach().to(dtype)

        logps, entropy = stats["logps"][i][here], stats["entropy"][i][here]
        old = logps.detach() if old_logps is None else of_tokens(old_logps)
        advantage = of_tokens(advantages)
        ratio = _importance_ratio(logps, old, importance_level)
        weights = torch.ones_like(logps) if importance_weights is None else of_tokens(importance_weights)

        match surrogate:
            case "clip":
                cost = _clip_by_sign(ratio, advantage, 1 - epsilon_low, 1 + epsilon_high, delta)
                cost = weights * cost
            case "reinforce":
                cost = -weights * ratio * advantage
            case "cispo":
                cost = -weights * torch.clamp(ratio.detach(), cispo_epsilon_low, epsilon_high) * advantage * logps
            case "gmpo":
                bounds = [
                    (-epsilon_low if a < 0 else -math.inf, epsilon_high if a > 0 else math.inf) for a in advantage
                ]
                bounded = torch.stack([d.clamp(*bound) for d, bound in zip(logps - old, bounds, strict=True)])
                cost = -weights * saturating_exp(bounded.mean()) * advantage
            case "clip_cov":
                cost = _clip_by_sign(ratio, advantage, 1 - epsilon_low, 1 + epsilon_high, None)
                cost = weights * cost * ~chosen[i][here]
            case "kl_cov":
                cost = weights * (-ratio * advantage + ppo_kl_coef * (logps - old).abs() * chosen[i][here])
            case "sapo":
                taus = [sapo_temperature_pos if a > 0 else sapo_temperature_neg for a in advantage.tolist()]
                tau = torch.tensor(taus, dtype=dtype, device=logps.device)
                cost = -weights * 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
            case "vespo":
                one_weight = importance_weights is not None and importance_weights[i].numel() == 1
                log_w = float((logps.detach() - old).clamp(-20, 20).sum())
                corrections = weights.log().clamp(math.log(1e-8), 20)
                log_w += float(corrections[0] if one_weight else corrections.sum())
                phi = [
                    _gamma_weight(log_w, vespo_k_pos, vespo_lambda_pos)
                    if a >= 0
                    else _gamma_weight(log_w, vespo_k_neg, vespo_lambda_neg)
                    for a in advantage.tolist()
                ]
                cost = -advantage * logps * torch.tensor(phi, dtype=dtype, device=logps.device)
            case _:
                raise ValueError(f"unknown surrogate {surrogate!r}, expected one of {SURROGATES}")

        acting = entropy.detach() >= threshold
        cost = cost * acting
        if off_policy_mask_threshold is not None and (old - logps).mean() > off_policy_mask_threshold:
            cost = cost * (advantage >= 0)
        if ref_logps is not None:
            kl = _kl(logps, of_tokens(ref_logps), kl_estimator)
            if use_bias_correction_kl:
                kl = torch.clamp(ratio * kl, -LARGEST, LARGEST)
            cost = cost + beta * kl
            kl_sum = kl_sum + kl.sum()

        match VERL_REDUCTIONS.get(reduction, reduction):
            case "grpo":
                loss = loss + cost.mean() / n_sequences
            case "bnpo":
                loss = loss + cost.sum() / n_tokens
            case "dapo":
                loss = loss + cost.sum() / (n_tokens if num_items is None else float(num_items or 1))
            case "dr_grpo":
                if max_completion_length is None:
                    raise ValueError("dr_grpo needs max_completion_length")
                loss = loss + cost.sum() / max_completion_length / n_sequences
            case "luspo":
                loss = loss + cost.sum() / n_sequences
            case _:
                raise ValueError(f"unknown reduction {reduction!r}, expected one of {REDUCTIONS}")
        bonus = bonus + (entropy * acting).sum()
        n_acting += int(acting.sum())

        bounded = ratio if delta is None else ratio.clamp(max=delta)
        lowest, highest = {
            "cispo": (cispo_epsilon_low, epsilon_high),
            "gmpo": (math.exp(-epsilon_low), math.exp(epsilon_high)),
        }.get(surrogate, (1 - epsilon_low, 1 + epsilon_high))
        below = (bounded < lowest) & (advantage < 0)
        above = (bounded > highest) & (advantage > 0)
        clipped_low.append(below[:1] if one_ratio else below)
        clipped_high.append(above[:1] if one_ratio else above)

    bonus = bonus / max(1, n_acting)
    if num_items is not None:
        bonus = bonus * (int(valid.sum()) / float(num_items or 1))
    loss = loss - entropy_coef * bonus

    def share(flags: list[Tensor]) -> Tensor:
        return torch.cat([loss.new_zeros(0), *flags]).sum() / max(1, sum(len(flag) for flag in flags))

    def shares(flags: list[Tensor]) -> list[float]:
        return [float(flag.double().mean()) for flag in flags] or [math.nan]

    clips_high = surrogate in ("clip", "cispo", "gmpo", "clip_cov")
    clips_low = cispo_epsilon_low > 0 if surrogate == "cispo" else clips_high
    either = [low | high if clips_low else high for low, high in zip(clipped_low, clipped_high, strict=True)]
    metrics = {
        "entropy": stats["entropy"].sum().detach() / n_tokens,
        "kl": None if ref_logps is None else kl_sum.detach() / n_tokens,
        "clip_ratio_low": share(clipped_low) if clips_low else None,
        "clip_ratio_high": share(clipped_high) if clips_high else None,
        "clip_ratio": share(either) if clips_high else None,
        "clip_ratio_low_min": loss.new_tensor(min(shares(clipped_low))) if clips_low else None,
        "clip_ratio_high_max": loss.new_tensor(max(shares(clipped_high))) if clips_high else None,
    }
    return loss, metrics
