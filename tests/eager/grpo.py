from __future__ import annotations

import math

import torch
from torch import Tensor

from eager.far_ends import LARGEST, LARGEST_EXPONENT, bounded_logps, saturating_exp
from eager.token_stats import token_stats

SURROGATES = (
    "clip", "reinforce", "cispo", "gmpo", "sapo", "vespo", "clip_cov", "kl_cov", "log_prob", "dppo_tv", "dppo_kl",
    "ipo", "fipo", "real", "a2po",
)  # fmt: skip
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


def _binary_kl(p: Tensor, q: Tensor) -> Tensor:
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def _outside(
    surrogate: str, p: Tensor, q: Tensor, advantage: Tensor, low: float, high: float, threshold: float
) -> tuple[Tensor, Tensor]:
    """Return where a trust region drops tokens of probability `p`, once `q`: for too low, and for too high a `p`."""
    if surrogate == "ipo":
        return q - p > threshold, p - q > threshold
    if surrogate == "dppo_tv":
        return (q - p > low) & (advantage < 0), (p - q > high) & (advantage > 0)
    kl = _binary_kl(q, p)
    return (kl > low) & (p < q) & (advantage < 0), (kl > high) & (p > q) & (advantage > 0)


def _future_kl(log_ratio: Tensor, places: Tensor, half_life: float) -> Tensor:
    """Return each token's sum of later log-ratios and its own, halved at each `half_life` of places."""
    distance = places[None, :] - places[:, None]
    return (torch.where(distance >= 0, 0.5 ** (distance / half_life), 0.0) * log_ratio[None, :]).sum(-1)


def _classification(scores: list[Tensor], positive: list[bool]) -> Tensor:
    """Return REAL's loss of a group."""
    if all(positive) or not any(positive):
        return torch.zeros(()) if not scores else 0 * scores[0]
    one = torch.zeros_like(scores[0])  # its logarithm
    of_positive = torch.stack([one, *(-s for s, yes in zip(scores, positive, strict=True) if yes)])
    of_negative = torch.stack([one, *(s for s, yes in zip(scores, positive, strict=True) if not yes)])
    return of_positive.logsumexp(0) + of_negative.logsumexp(0)  # log(1 + sum(exp(x)))


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
    accumulation_steps: int | None = None,
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
    ratio_max: float | None = 20.0,
    ipo_threshold: float = 0.1,
    fipo_half_life: float = 32.0,
    fipo_clip_low: float = 0.0,
    fipo_clip_high: float = 0.2,
    fipo_safety_ratio: float | None = 4.0,
    real_temperature: float = 0.5,
    group_size: int | None = None,
    a2po_beta: float = 1e-3,
    sampler_kl_coef: float = 0.0,
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

    of_groups: list[Tensor] = []  # each sequence's part of its group's loss
    if surrogate == "real":
        assert group_size is not None
        old = stats["logps"].detach() if old_logps is None else old_logps
        log_ratios = torch.where(valid, stats["logps"] - old, 0.0)
        scores = list(log_ratios.sum(-1) / valid.sum(-1).clamp(min=1) / real_temperature)
        for start in range(0, len(scores), group_size):
            group = [i for i in range(start, start + group_size) if valid[i].any()]
            positive = [bool(advantages[i].expand(valid.shape[1:])[valid[i]].sum() > 0) for i in group]
            of_group = _classification([scores[i] for i in group], positive)
            of_groups += [of_group * group_size / max(1, len(group))] * group_size

    all_ratios: list[Tensor] = []
    loss = bonus = kl_sum = stats["logps"].new_zeros(())
    n_acting = 0
    clipped_low: list[Tensor] = []
    clipped_high: list[Tensor] = []
    for i in range(target.shape[0]):
        here = valid[i]
        length = int(here.sum())
        one_ratio = importance_level in ("sequence", "trajectory") and advantages[i].numel() == 1
        if length == 0:
            if one_ratio:  # its ratio is 1, which is clipped by a bound of CISPO beyond 1 alone
                is_cispo = torch.full_like(here[:1], surrogate == "cispo")
                clipped_low.append(is_cispo & (cispo_epsilon_low > 1) & (advantages[i].reshape(1) < 0))
                clipped_high.append(is_cispo & (epsilon_high < 1) & (advantages[i].reshape(1) > 0))
            continue

        def of_tokens(x: Tensor, i: int = i, here: Tensor = here) -> Tensor:
            return x[i].expand(here.shape)[here].detach().to(dtype)

        logps, entropy = stats["logps"][i][here], stats["entropy"][i][here]
        old = logps.detach() if old_logps is None else of_tokens(old_logps)
        advantage = of_tokens(advantages)
        ratio = _importance_ratio(logps, old, importance_level)
        weights = torch.ones_like(logps) if importance_weights is None else of_tokens(importance_weights)

        all_ratios.append(ratio[:1] if importance_level in ("sequence", "trajectory") else ratio)
        p, q = logps.detach().exp(), saturating_exp(old)
        too_low, too_high = _outside(surrogate, p, q, advantage, epsilon_low, epsilon_high, ipo_threshold)

        match surrogate:
            case "log_prob":
                cost = -weights * advantage * logps
            case "dppo_tv" | "dppo_kl" | "ipo":
                bounded = ratio.detach().clamp(max=math.inf if ratio_max is None else ratio_max)
                inside = ~(too_low | too_high)
                # The ratio as a weight of the policy gradient: of value `bounded`, with grad(log pi) times it.
                cost = -weights * bounded * (1 + logps - logps.detach()) * advantage * inside
            case "fipo":
                log_ratio = (logps - old).detach()
                counted = log_ratio if delta is None else log_ratio * (log_ratio.exp() <= delta)
                future = _future_kl(
                    counted, torch.arange(len(here), dtype=dtype, device=here.device)[here], fipo_half_life
                )
                influence = future.exp().clamp(1 - fipo_clip_low, 1 + fipo_clip_high)
                if fipo_safety_ratio is not None:
                    unsafe = (advantage < 0) & (ratio.detach() > fipo_safety_ratio)
                    influence = torch.where(unsafe, influence.clamp(0.8, 1.0), influence)
                cost = weights * influence * _clip_by_sign(ratio, advantage, 1 - epsilon_low, 1 + epsilon_high, delta)
            case "real":
                cost = weights * of_groups[i]
            case "a2po":
                assert ref_logps is not None
                implicit_reward = a2po_beta * (logps - of_tokens(ref_logps)).sum()
                cost = weights * (implicit_reward - advantage.mean()) ** 2
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
        cost = cost + sampler_kl_coef * (logps - old) ** 2

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
        if surrogate in ("dppo_tv", "dppo_kl", "ipo"):
            below, above = too_low, too_high
        clipped_low.append(below[:1] if one_ratio else below)
        clipped_high.append(above[:1] if one_ratio else above)

    bonus = bonus / max(1, n_acting)
    loss = loss - entropy_coef * bonus / (accumulation_steps or 1)

    def share(flags: list[Tensor]) -> Tensor:
        return torch.cat([loss.new_zeros(0), *flags]).sum() / max(1, sum(len(flag) for flag in flags))

    def shares(flags: list[Tensor]) -> list[float]:
        return [float(flag.double().mean()) for flag in flags] or [math.nan]

    clips_high = surrogate in ("clip", "cispo", "gmpo", "clip_cov", "dppo_tv", "dppo_kl", "ipo", "fipo")
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
        "ratio_mean": None,
        "ratio_min": None,
        "ratio_max": None,
    }
    if old_logps is not None:
        ratios = torch.cat([loss.new_zeros(0), *all_ratios]).detach()
        metrics["ratio_mean"] = ratios.sum() / max(1, len(ratios))
        metrics["ratio_min"] = torch.cat([ratios, loss.new_full((1,), math.inf)]).min().detach()
        metrics["ratio_max"] = torch.cat([ratios, loss.new_full((1,), -math.inf)]).max().detach()
    return loss, metrics
