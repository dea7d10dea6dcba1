"""Values that the caller of a policy loss computes between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from liger_chunked.engine import Packing
from liger_chunked.losses.rollouts import sum_of_logs
from liger_chunked.losses.settings import check_finite, check_positive
from liger_chunked.types import shown

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

    Modes and defaults are TRL's, which has no geometric mean. Multiply weights to combine verl's `rollout_is` and
    `rollout_rs`.

    Args:
        old_logps: (B, T) in nats, of the training engine.
        sampling_logps: (B, T), of the sampler. NaN (unavailable in vLLM) counts as `old_logps`.
        mask: (B, T), True or 1 at the completion's tokens: `target != -100`.
        clip_min, clip_max: None is no bound.
        cu_seqlens: as in the loss, for (N,) instead of (B, T).

    Returns:
        (B, T) or (N,), 1 at other tokens, or (B, 1), without gradient, in at least float32.

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
    log_ratio = torch.where(scored, old_logps.to(dtype) - sampling_logps.to(dtype), 0.0)
    if cu_seqlens is not None and level != "token":
        packing = Packing.of(cu_seqlens, len(mask), mask.device)
        log_ratio, mask = packing.whole(log_ratio), packing.whole(mask, False)
    ratio = _LEVELS[level](log_ratio, mask).exp()
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
        entropy: mean per token of a whole step, in nats: `PolicyMetrics.entropy` over micro-batches and ranks.

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
