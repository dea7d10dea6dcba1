"""A head whose vocabulary is split over ranks (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).

Each rank computes its rows' logits, like a tile of the vocabulary.

    statistics   the ranks' sums of a chunk are gathered and merged, in rank order: all ranks hold the same bits
    backward     dX is the sum over ranks, reduced while dW is computed; dW and db belong to the rank

All ranks cut the same tokens into the same chunks, so their collectives match.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from liger_chunked.engine.head import HeadPass, Tokens
from liger_chunked.kernels import PartialStats, finish, merge
from liger_chunked.types import TokenStats, VocabShard

Values = TypeVar("Values", bound=Any)

# The second name is deprecated since torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather(values: Values, shard: VocabShard) -> list[Values]:
    """Gather the ranks' NamedTuples of tensors (n,), in rank order, by one collective."""
    fields = {name: f for name, f in values._asdict().items() if f is not None}
    floats = next(f.dtype for f in fields.values() if f.is_floating_point())
    packed = torch.stack([f if f.dtype == floats else _as_bits(f, floats) for f in fields.values()])
    if not packed.numel():
        return [values] * shard.ranks
    gathered = packed.new_empty(shard.ranks, *packed.shape)
    _all_gather(gathered.view(-1), packed.view(-1), group=shard.group)
    parts = []
    for rows in gathered.unbind():
        found = zip(fields.items(), rows.unbind(), strict=True)
        parts.append(values._replace(**{k: x if f.dtype == floats else _from_bits(x, f.dtype) for (k, f), x in found}))
    return parts


def _as_bits(ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return token ids as the bits of floats, which a collective does not change."""
    return ids.to(torch.int32 if dtype.itemsize == 4 else torch.int64).view(dtype)


def _from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.view(torch.int32 if bits.dtype.itemsize == 4 else torch.int64).to(dtype)


def of_one_rank(x: Tensor, shard: VocabShard) -> Tensor:
    """Replace values, in place, by those of the only rank where they are not zero."""
    if x.numel():
        dist.all_reduce(x, group=shard.group)
    return x


@dataclass
class ShardedPass(HeadPass):
    """`HeadPass` on a rank's rows, with statistics of the whole vocabulary."""

    @property
    def _shard(self) -> VocabShard:
        assert self.head.shard is not None
        return self.head.shard

    @property
    def vocab_size(self) -> int:
        return self._shard.vocab_size

    @property
    def vocab_start(self) -> int:
        return self._shard.start

    def _reduce(self, tokens: Tokens) -> tuple[PartialStats, TokenStats]:
        partial = functools.reduce(merge, gather(self._partial(tokens), self._shard))
        return partial, finish(partial, tokens.target, self.vocab_size, self.outputs)

    def _unround(self, logps: Tensor, tokens: Tokens, partial: PartialStats) -> Tensor:
        """Correct `logps` on the rank with the target's row; send the result to all."""
        columns = self.columns
        both = logps.new_zeros(2, logps.shape[0])
        if columns:
            target = tokens.target - self.vocab_start
            own = logps.clone()
            scale = super()._unround(own, tokens._replace(target=target.clamp(0, columns - 1)), partial)
            both = torch.where((target >= 0) & (target < columns), torch.stack([own, scale]), 0.0)
        of_one_rank(both, self._shard)
        logps.copy_(both[0])
        return both[1]
