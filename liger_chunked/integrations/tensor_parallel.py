"""Helpers of tensor-parallel frameworks, whose ranks hold equally many rows of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from liger_chunked.types import VocabShard, described

T = TypeVar("T")


def even_shard(
    weight: Tensor,
    group: Any,
    input_grad: Literal["all_reduce", "partial", "reduce_scatter"],
    *,
    rows: range | None = None,
    vocab_size: int | None = None,
) -> VocabShard | None:
    """Return this rank's shard; None for one rank without padding.

    ValueError if `rows`, the framework's ids, are not those of `weight`. For the other arguments, see `VocabShard`.
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
    """Return the bytes of `tokens` rows of logits; None: automatic."""
    if tokens is None:
        return None
    if tokens < 1:
        raise ValueError(f"chunk_size must be a positive number of tokens or None, got {tokens}")
    return tokens * weight.shape[0] * weight.itemsize


def call_in_forward(module: nn.Module, fn: Callable[..., T], *args: Any) -> T:
    """Return `fn(*args)`, called as the forward of `module`, with its hooks, such as FSDP's."""
    own = vars(module).get("forward")
    module.forward = fn
    try:
        return module(*args)
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
