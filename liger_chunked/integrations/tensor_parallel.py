"""What the adapters of tensor-parallel frameworks share. Their ranks hold equally many rows of the vocabulary."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from liger_chunked.types import VocabShard, described

# The second names are deprecated since torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def even_shard(
    weight: Tensor,
    group: Any,
    input_grad: Literal["all_reduce", "partial"],
    *,
    rows: range | None = None,
    vocab_size: int | None = None,
) -> VocabShard | None:
    """Return this rank's shard; None for one rank without padding.

    Args:
        weight, group, input_grad: this rank's rows, and as in `VocabShard`.
        rows: the ids that the framework names. ValueError if they are not those of `weight`.
        vocab_size: None: all rows are in the softmax.
    """
    n, ranks = weight.shape[0], dist.get_world_size(group)
    start = dist.get_rank(group) * n
    if rows is not None and rows != range(start, start + n):
        raise ValueError(
            f"the vocabulary range must be {start} to {start + n}, the rows of weight {described(weight)} on this rank "
            f"of {ranks}, got {rows.start} to {rows.stop}"
        )
    if ranks == 1 and vocab_size in (None, n):
        return None
    return VocabShard(group, start, ranks * n if vocab_size is None else vocab_size, input_grad=input_grad)


def budget_of(tokens: int | None, weight: Tensor) -> int | None:
    """Return the bytes of `tokens` rows of logits, for frameworks that count chunks in tokens; None: automatic."""
    if tokens is None:
        return None
    if tokens < 1:
        raise ValueError(f"chunk_size must be a positive number of tokens or None, got {tokens}")
    return tokens * weight.shape[0] * weight.itemsize


def gather_sequence(x: Tensor, group: Any) -> Tensor:
    """Gather the ranks' parts of dim 0, in rank order. The gradient is summed over the ranks and scattered."""
    return x if dist.get_world_size(group) == 1 else _GatherSequence.apply(x, group)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        whole = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
        _all_gather(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        part = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        _reduce_scatter(part, grad.contiguous(), group=ctx.group)
        return part, None
