"""Values that the caller of a policy loss computes between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from liger_chunked.engine import Packing
from liger_chunked.losses.rollouts import sum_of_logs
from liger_chunked.losses.settings import check_finite, check_positive
from liger_chunked.types import LOWEST_LOGP, saturating_exp, shown

# (log-ratios (B, T), mask (B, T)) -> (B, T) or (B, 1)
_LEVELS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda log_ratio, mask: log_ratio,
    "sequence": lambda log_ratio, mask: sum_of_logs(log_ratio),
    "geometric": lambda log_ratio, mask: sum_of_logs(log_ratio) / mask.sum(-1, keepdim=True).clamp(min=1),
}
IMPORTANCE_WEIGHTS = tuple(f"{level}_{bounded}" for level in _LEVELS for bounded in ("truncate", "mask"))


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
    shape = "(B, T)" if cu_seqlens is None else "(N,) with cu_seqlens"
    for name, x in (("old_logps", old_logps), ("sampling_logps", sampling_logps), ("mask", mask)):
        if not isinstance(x, Tensor) or x.ndim != (2 if cu_seqlens is None else 1) or x.shape != old_logps.shape:
            got = tuple(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(f"{name} must be {shape}, the shape of old_logps, got {got}")
    mask = mask.bool()
    dtype = torch.promote_types(torch.promote_types(old_logps.dtype, sampling_logps.dtype), torch.float32)
    scored = mask & ~sampling_logps.isnan()
    old_logps, sampling_logps = (x.to(dtype).clamp(min=LOWEST_LOGP) for x in (old_logps, sampling_logps))
    log_ratio = torch.where(scored, old_logps - sampling_logps, 0.0)
    if cu_seqlens is not None and level != "token":
        packing = Packing.of(cu_seqlens, len(mask), mask.device)
        log_ratio, mask = packing.whole(log_ratio), packing.whole(mask, False)
    ratio = saturating_exp(_LEVELS[level](log_ratio, mask))
    if bounded == "truncate":
        return ratio.clamp(clip_min, clip_max).to(dtype)
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if clip_min is not None:
        outside |= ratio < clip_min
    if clip_max is not None:
        outside |= ratio > clip_max
    return ratio.masked_fill(outside, 0.0).to(dtype)


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
    ...     coef, entropy_coef = adaptive_entropy_coef(coef, entropy)    # then loss.entropy_coef = entropy_coef
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
