"""Apple's `cut_cross_entropy.linear_cross_entropy`.

Run with cut_cross_entropy 25.1.1 and commit d42911f.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_chunked.engine import linear_token_stats
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss
from liger_chunked.types import VocabShard

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    filter_eps: float | str | None = None,
    accum_e_fp32: bool = True,
    accum_c_fp32: bool = True,
    filter_e_grad: bool = False,
    filter_c_grad: bool = False,
    impl: Any = None,
    vocab_parallel_options: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the cross entropy of the logits `e @ c.T + bias`.

    With `return_lse`, return `(loss, lse)`; `lse` is 0 at ignored tokens. `e[..., t, :]` predicts
    `targets[..., t + shift]`. `vocab_parallel_options` needs `start`, `stop`, `group` and `reduce_e_grad`.

    Gradients are exact, in float32: `filter_*`, `accum_*` and `impl` are not used. Raises ValueError if the rows of `c`
    are not those of `vocab_parallel_options`.
    """
    shift = int(shift)
    if not 0 <= shift < targets.shape[-1]:
        raise ValueError(f"shift must be in 0 to {targets.shape[-1] - 1}, got {shift}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if shift:
        e, targets = e[..., :-shift, :], targets[..., shift:]
    shape = targets.shape
    e, targets = e.reshape(-1, e.shape[-1]), targets.reshape(-1)
    options: dict[str, Any] = {"ignore_index": ignore_index, "softcap": softcap}
    shard = _shard(c, vocab_parallel_options)
    if not return_lse:
        loss = LigerFusedLinearCrossEntropyLoss(reduction=reduction, **options)(c, e, targets, bias, vocab_shard=shard)
        assert isinstance(loss, Tensor)
        return loss.view(shape) if reduction == "none" else loss
    stats = linear_token_stats(c, e, targets, bias, outputs=("logps", "lse"), vocab_shard=shard, **options)
    assert stats.logps is not None and stats.lse is not None
    if reduction == "none":
        return -stats.logps.view(shape), stats.lse.view(shape)
    tokens = (targets != ignore_index).sum().clamp(min=1) if reduction == "mean" else 1
    return -stats.logps.sum() / tokens, stats.lse.view(shape)


def _shard(c: Tensor, options: Any) -> VocabShard | None:
    if options is None:
        return None
    if c.shape[0] != options.stop - options.start:
        raise ValueError(
            f"c must have the rows {options.start} to {options.stop} of vocab_parallel_options, got {tuple(c.shape)}"
        )
    size = _vocab_size(options.group, options.stop, c.device)
    return VocabShard(options.group, options.start, size, "all_reduce" if options.reduce_e_grad else "partial")


def _vocab_size(group: Any, stop: int, device: torch.device) -> int:
    size = torch.tensor(stop, device=device)
    dist.all_reduce(size, dist.ReduceOp.MAX, group=group)
    return int(size)
