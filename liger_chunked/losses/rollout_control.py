"""Values that the caller of a policy loss computes between steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.engine import Packing
from liger_chunked.losses.rollouts import ratio_range, sum_of_logs
from liger_chunked.losses.settings import check_finite, check_positive
from liger_chunked.types import LOWEST_LOGP, check_number, saturating_exp, shown

# (log-ratios (B, T), mask (B, T)) -> (B, T) or (B, 1)
_LEVELS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda log_ratio, mask: log_ratio,
    "sequence": lambda log_ratio, mask: sum_of_logs(log_ratio),
    "geometric": lambda log_ratio, mask: sum_of_logs(log_ratio) / mask.sum(-1, keepdim=True).clamp(min=1),
}
IMPORTANCE_WEIGHTS = tuple(f"{level}_{bounded}" for level in _LEVELS for bounded in ("truncate", "mask"))


def _log_ratios(
    old_logps: Tensor, sampling_logps: Tensor, mask: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return `log(pi_old / pi_sampler)`, 0 outside of the mask and where the sampler's is NaN, and the bool mask."""
    shape = "(B, T)" if cu_seqlens is None else "(N,) with cu_seqlens"
    for name, x in (("old_logps", old_logps), ("sampling_logps", sampling_logps), ("mask", mask)):
        if not isinstance(x, Tensor) or x.ndim != (2 if cu_seqlens is None else 1) or x.shape != old_logps.shape:
            got = tuple(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(f"{name} must be {shape}, the shape of old_logps, got {got}")
    mask = mask.bool()
    dtype = torch.promote_types(torch.promote_types(old_logps.dtype, sampling_logps.dtype), torch.float32)
    scored = mask & ~sampling_logps.isnan()
    old_logps, sampling_logps = (x.to(dtype).clamp(min=LOWEST_LOGP) for x in (old_logps, sampling_logps))
    return torch.where(scored, old_logps - sampling_logps, 0.0), mask


def _by_sequence(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both in the shape (B, T)."""
    if cu_seqlens is None:
        return log_ratio, mask
    packing = Packing.of(cu_seqlens, len(mask), mask.device)
    return packing.whole(log_ratio), packing.whole(mask, False)


@torch.no_grad()
def rollout_importance_weights(
    old_logps: Tensor,
    sampling_logps: Tensor,
    mask: Tensor,
    *,
    mode: str = "sequence_mask",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return the `importance_weights` of a policy loss for tokens that another engine sampled with the same parameters.

    With `w = pi_old / pi_sampler`:

    | mode | ratio | outside of [clip_min, clip_max] |
    |---|---|---|
    | `token_truncate` | `w` of the token | the bound: TIS, https://fengyao.notion.site/off-policy-rl |
    | `token_mask` | `w` of the token | 0: MIS, https://richardli.xyz/rl-collapse |
    | `sequence_truncate`, `sequence_mask` | product of `w` over the sequence | the bound, 0 |
    | `geometric_truncate`, `geometric_mask` | geometric mean of `w` over the sequence | the bound, 0 |

    `w` is at most e^80, and a log-probability of -inf counts as -1e18 ("Far ends" in `docs/numerics.md`).

    Modes and defaults are TRL's, which has no geometric mean. Multiply weights to combine verl's `rollout_is` and
    `rollout_rs`.

    Args:
        old_logps: (B, T), log-probabilities of the sampled tokens in nats, computed by the training engine.
        sampling_logps: (B, T), the sampler's. NaN (unavailable in vLLM) counts as `old_logps`.
        mask: (B, T), True or 1 at the completion's tokens: `target != -100`.
        mode: a name from the table.
        clip_min: lower bound of the ratio, not negative and below `clip_max`. None: no bound.
        clip_max: upper bound of the ratio, positive. None: no bound.
        cu_seqlens: (B + 1,), int32 or int64, for packed sequences: the first row of each sequence, then N; the tensors
            are then (N,) instead of (B, T). None: the batch is padded.

    Returns:
        Weights without gradient, in the widest dtype of both log-probabilities and float32: with a mode per token,
        (B, T), or (N,) with `cu_seqlens`; with one per sequence (B, 1). Tokens outside of `mask` have the ratio 1.

    Raises:
        TypeError: a bound is no number, or `cu_seqlens` is no int32 or int64 tensor.
        ValueError: `mode` is unknown, the bounds are out of range or, for "..._truncate", both None, the three tensors
            are none or differ in shape, or `cu_seqlens` does not rise from 0 to N.

    >>> import torch
    >>> old, sampled = torch.tensor([[0.5, 0.9]]).log(), torch.tensor([[0.1, 0.9]]).log()
    >>> rollout_importance_weights(old, sampled, torch.ones(1, 2), mode="token_truncate", clip_max=2.0)
    tensor([[2., 1.]])
    >>> rollout_importance_weights(old, sampled, torch.ones(1, 2))      # the ratio is 5
    tensor([[0.]])
    """
    if mode not in IMPORTANCE_WEIGHTS:
        raise ValueError(f"unknown mode {shown(mode)}, expected one of {list(IMPORTANCE_WEIGHTS)}")
    check_finite("clip_min", clip_min, minimum=0, optional=True)
    check_positive("clip_max", clip_max, optional=True)
    level, bounded = mode.split("_")
    if bounded == "truncate" and clip_min is None and clip_max is None:
        raise ValueError(f"mode {mode!r} needs clip_min or clip_max, got None for both")
    if clip_min is not None and clip_max is not None and not clip_min < clip_max:
        raise ValueError(f"clip_min={clip_min} must be below clip_max={clip_max}")
    log_ratio, mask = _log_ratios(old_logps, sampling_logps, mask, cu_seqlens)
    dtype = log_ratio.dtype
    if cu_seqlens is not None and level != "token":
        log_ratio, mask = _by_sequence(log_ratio, mask, cu_seqlens)
    ratio = saturating_exp(_LEVELS[level](log_ratio, mask))
    if bounded == "truncate":
        return ratio.clamp(clip_min, clip_max).to(dtype)
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if clip_min is not None:
        outside |= ratio < clip_min
    if clip_max is not None:
        outside |= ratio > clip_max
    return ratio.masked_fill(outside, 0.0).to(dtype)


# Log-ratios are clamped to this distance from 0, so that exp() is finite; verl's bound.
_FARTHEST = 20.0

_ESTIMATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: torch.expm1(log_ratio) - log_ratio,
}
# (estimates (B, T), 0 outside of the mask; the mask) -> (B, 1)
_OF_SEQUENCES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda estimate, mask: sum_of_logs(estimate),
    "mean": lambda estimate, mask: sum_of_logs(estimate) / mask.sum(-1, keepdim=True).clamp(min=1),
    "max": lambda estimate, mask: torch.nn.functional.pad(estimate, (0, 1)).amax(-1, keepdim=True),
}
REJECTIONS = (
    *(f"token_{estimate}" for estimate in _ESTIMATES),
    *(f"seq_{of}_{k}" for of in _OF_SEQUENCES for k in _ESTIMATES if (of, k) != ("max", "k1")),
)


def _rejection_bounds(name: str, bound: float | tuple[float, float]) -> tuple[float, float]:
    """Return the least and the largest estimate that are kept."""
    if name not in REJECTIONS:
        raise ValueError(f"unknown criterion {shown(name)}, expected one of {list(REJECTIONS)}")
    of_ratio = name.endswith("k1")
    bounds = bound if isinstance(bound, tuple) else (bound,)
    if len(bounds) > (2 if of_ratio else 1):
        expected = "a bound, or two of the ratio" if of_ratio else "one bound"
        raise ValueError(f"criterion {name!r} takes {expected}, got {shown(bound)}")
    for x in bounds:
        check_number(f"the bound of {name}", x)
        if not x > 0:
            raise ValueError(f"the bound of {name} must be positive, got {x}")
    if not of_ratio:
        return -math.inf, bounds[0]
    low, high = (1 / bounds[0], bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
    if not low <= high:
        raise ValueError(f"the bounds of {name} must rise, got {low:g} and {high:g}")
    return math.log(low), math.log(high)


@torch.no_grad()
def rollout_rejection_mask(
    old_logps: Tensor,
    sampling_logps: Tensor,
    mask: Tensor,
    bounds: Mapping[str, float | tuple[float, float]],
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return which tokens pass a chain of criteria on the distance of the training engine from the sampler.

    With `x = log(pi_old / pi_sampler)` of a token, clamped to [-20, 20], a criterion `{level}_{estimate}` keeps what
    has

    | estimate | | kept |
    |---|---|---|
    | `k1` | `-x` | `exp(k1)` in [lower, upper]; one number `u` is [1 / u, u] |
    | `k2` | `x^2 / 2` | at most the bound |
    | `k3` | `exp(x) - 1 - x` | at most the bound |

    `token_...` is of each token. `seq_sum_...`, `seq_mean_...` and `seq_max_...` are of a sequence, all of whose tokens
    are kept or not; `seq_mean_k1` bounds the geometric mean of `pi_sampler / pi_old`. There is no `seq_max_k1`. Names
    and formulas are those of verl's `rollout_rs`; see https://richardli.xyz/rl-collapse.

    Args:
        old_logps: (B, T), log-probabilities of the sampled tokens in nats, computed by the training engine.
        sampling_logps: (B, T), the sampler's. NaN (unavailable in vLLM) counts as `old_logps`.
        mask: (B, T), True or 1 at the completion's tokens: `target != -100`.
        bounds: the bound of each criterion, by name. A token must pass all.
        cu_seqlens: (B + 1,), int32 or int64, for packed sequences: the first row of each sequence, then N; the tensors
            are then (N,) instead of (B, T). None: the batch is padded.

    Returns:
        (B, T) or (N,), bool: where `mask` is True and every criterion passes. As a loss's `attention_mask` it takes
        tokens out of denominators too, as in verl; multiplied into `importance_weights` it leaves them there.

    Raises:
        TypeError: a bound is no number, or `cu_seqlens` is no int32 or int64 tensor.
        ValueError: a criterion is unknown, its bound is not positive or has too many numbers, the three tensors are
            none or differ in shape, or `cu_seqlens` does not rise from 0 to N.

    >>> import torch
    >>> old, sampled = torch.tensor([[0.5, 0.9], [0.4, 0.8]]).log(), torch.tensor([[0.1, 0.9], [0.5, 0.8]]).log()
    >>> rollout_rejection_mask(old, sampled, torch.ones(2, 2), {"token_k1": (0.5, 2.0)})
    tensor([[False,  True],
            [ True,  True]])
    >>> rollout_rejection_mask(old, sampled, torch.ones(2, 2), {"token_k1": 8.0, "seq_mean_k3": 0.1})
    tensor([[False, False],
            [ True,  True]])
    """
    log_ratio, mask = _log_ratios(old_logps, sampling_logps, mask, cu_seqlens)
    log_ratio = log_ratio.clamp(-_FARTHEST, _FARTHEST)
    whole, whole_mask = _by_sequence(log_ratio, mask, cu_seqlens)
    kept = mask
    for name, bound in bounds.items():
        low, high = _rejection_bounds(name, bound)
        level, estimate = name.rsplit("_", 1)
        if level == "token":
            values = _ESTIMATES[estimate](log_ratio)
        else:
            values = _OF_SEQUENCES[level.removeprefix("seq_")](_ESTIMATES[estimate](whole), whole_mask)
        passes = (values >= low) & (values <= high)
        if level != "token" and cu_seqlens is not None:
            lengths = cu_seqlens.to(mask.device).diff()
            passes = passes[:, 0].repeat_interleave(lengths, output_size=len(mask))
        kept = kept & passes
    return kept


class RolloutMetrics(NamedTuple):
    """How far the training engine is from the sampler, of `w = pi_old / pi_sampler` before any bound; all ().

    - `ratio_mean`, `ratio_min`, `ratio_max`: of `w`; 0, infinity and -infinity of none
    - `effective_sample_size`: `sum(w)^2 / (n sum(w^2))`, in (0, 1]; 0 of none
    - `k1`, `k3`: the means of `-log w` and of `w - 1 - log w`, two estimates of `KL(pi_sampler || pi_old)` per token,
      in nats
    """

    ratio_mean: Tensor
    ratio_min: Tensor
    ratio_max: Tensor
    effective_sample_size: Tensor
    k1: Tensor
    k3: Tensor


@torch.no_grad()
def rollout_metrics(
    old_logps: Tensor,
    sampling_logps: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    cu_seqlens: Tensor | None = None,
) -> RolloutMetrics:
    """Return what a trainer logs of `rollout_importance_weights`, before it bounds them.

    Args:
        old_logps: (B, T), log-probabilities of the sampled tokens in nats, computed by the training engine.
        sampling_logps: (B, T), the sampler's. NaN (unavailable in vLLM) counts as `old_logps`.
        mask: (B, T), True or 1 at the completion's tokens: `target != -100`.
        level: of `w`: "token", "sequence", the product over a sequence, or "geometric", its geometric mean. Its
            logarithm is clamped to [-20, 20], as in verl.
        cu_seqlens: (B + 1,), int32 or int64, for packed sequences: the first row of each sequence, then N; the tensors
            are then (N,) instead of (B, T). None: the batch is padded.

    Returns:
        `RolloutMetrics`, in the widest dtype of both log-probabilities and float32.

    Raises:
        TypeError: `cu_seqlens` is no int32 or int64 tensor.
        ValueError: `level` is unknown, the three tensors are none or differ in shape, or `cu_seqlens` does not rise
            from 0 to N.

    >>> import torch
    >>> old, sampled = torch.tensor([[0.5, 0.9]]).log(), torch.tensor([[0.25, 0.9]]).log()
    >>> metrics = rollout_metrics(old, sampled, torch.ones(1, 2))
    >>> metrics.ratio_mean, metrics.ratio_max, metrics.effective_sample_size
    (tensor(1.5000), tensor(2.), tensor(0.9000))
    """
    if level not in _LEVELS:
        raise ValueError(f"unknown level {shown(level)}, expected one of {list(_LEVELS)}")
    log_ratio, mask = _by_sequence(*_log_ratios(old_logps, sampling_logps, mask, cu_seqlens), cu_seqlens)
    n_tokens, dtype = mask.sum().clamp(min=1), log_ratio.dtype
    near = log_ratio.clamp(-_FARTHEST, _FARTHEST)
    ratio = _LEVELS[level](log_ratio, mask).clamp(-_FARTHEST, _FARTHEST).exp().to(dtype)
    counted = mask if level == "token" else mask.any(-1, keepdim=True)
    w, n = torch.where(counted, ratio, 0.0), counted.sum().clamp(min=1)
    return RolloutMetrics(
        *ratio_range(ratio, counted),  # type: ignore[arg-type]
        effective_sample_size=w.sum().square() / (n * w.square().sum()).clamp(min=torch.finfo(dtype).tiny),
        k1=-log_ratio.sum() / n_tokens,
        k3=_ESTIMATES["k3"](near).sum() / n_tokens,
    )


def adaptive_entropy_coef(
    coef: float,
    entropy: float | Tensor,
    *,
    entropy_target: float = 0.2,
    entropy_coef_delta: float = 0.005,
    entropy_coef_min: float = 0.0,
    entropy_coef_max: float = 1.0,
) -> tuple[float, float]:
    """Return the next `coef` and `entropy_coef`, to keep the entropy from falling below a target.

    With entropy `e` and target `t`, starting from `c_0 = 0` (Skywork-OR1, https://arxiv.org/abs/2505.22312):

        entropy_coef_k = c_k if e_k <= t else 0,  c_(k+1) = c_k + delta if e_k <= t else c_k - delta

    Args:
        coef: `c_k`; keep the returned one, also in checkpoints.
        entropy: mean per token of a whole step, in nats, a number or (), which is read and so waits for the device:
            `PolicyMetrics.entropy` over micro-batches and ranks.
        entropy_target: `t` in nats, not negative.
        entropy_coef_delta: `delta`, not negative.
        entropy_coef_min, entropy_coef_max: bounds of `c_(k+1)`.

    Returns:
        (coef, entropy_coef), two floats: `c_(k+1)`, and the loss's `entropy_coef`, which is `c_(k+1)` if the entropy is
        at or below its target, else 0.

    Raises:
        TypeError: an argument is no number.
        ValueError: an argument is not finite or out of range, `entropy` has several elements, or `entropy_coef_min` is
            above `entropy_coef_max`.

    >>> coef, entropy_coef = 0.0, 0.0
    >>> for entropy in (0.15, 0.19, 0.3):
    ...     coef, entropy_coef = adaptive_entropy_coef(coef, entropy)    # of the next step's loss
    ...     print(round(coef, 3), round(entropy_coef, 3))
    0.005 0.005
    0.01 0.01
    0.005 0.0
    """
    for name, value in (("coef", coef), ("entropy_coef_min", entropy_coef_min), ("entropy_coef_max", entropy_coef_max)):
        check_finite(name, value)
    check_finite("entropy_target", entropy_target, minimum=0)
    check_finite("entropy_coef_delta", entropy_coef_delta, minimum=0)
    if not entropy_coef_min <= entropy_coef_max:
        raise ValueError(f"entropy_coef_min={entropy_coef_min} must not be above entropy_coef_max={entropy_coef_max}")
    entropy = float(entropy)
    check_finite("entropy", entropy)
    low = entropy <= entropy_target
    coef = min(max(coef + (entropy_coef_delta if low else -entropy_coef_delta), entropy_coef_min), entropy_coef_max)
    return coef, coef if low else 0.0
