"""A head whose vocabulary is split over ranks (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).

Each rank computes the logits of its own rows, as if they were a tile of the vocabulary.

    statistics   the ranks' sums of a chunk are gathered and merged, in rank order: all ranks hold the same bits
    backward     dX is the sum over ranks, reduced while dW is computed; dW and db belong to the rank

The ranks hold the same tokens and cut the same chunks, so their collectives match.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from liger_chunked.engine.head import HeadPass, Tokens
from liger_chunked.kernels import PartialStats, finish, merge, unround_logps_
from liger_chunked.types import TokenStats, VocabShard


@dataclass
class ShardedPass(HeadPass):
    """`HeadPass` on one rank's rows of the vocabulary. The statistics are those of the whole."""

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
        n = tokens.x.shape[0]
        partial = self._partial(tokens)
        if n:
            partial = _merged(partial if tokens.tiles else _of_nothing(partial, n), self._shard)
        return partial, finish(partial, tokens.target, self.vocab_size, self.outputs)

    def _unround(self, logps: Tensor, tokens: Tokens, partial: PartialStats) -> Tensor:
        """Correct `logps` on the rank that holds the target's row, and send the result to all."""
        columns = self.head.weight.shape[0]
        target = tokens.target - self.vocab_start
        here = (target >= 0) & (target < columns)
        both = logps.new_zeros(2, logps.shape[0])
        if columns:
            own = logps.clone()
            scale = unround_logps_(
                own,
                tokens.x,
                self.head,
                target.clamp(0, columns - 1),
                partial.max,
                partial.sum_exp,
                self.options,
                tokens.u,
            )
            both = torch.where(here, torch.stack([own, scale]), 0.0)
        if logps.shape[0]:
            dist.all_reduce(both, group=self._shard.group)  # one rank's value, and zeros
        logps.copy_(both[0])
        return both[1]


def _of_nothing(empty: PartialStats, n: int) -> PartialStats:
    """Return the statistics of n rows without columns, with the fields of `empty`."""
    fill = {"max": -torch.inf, "target_logit": -torch.inf}
    fields = {k: None if f is None else f.new_full((n,), fill.get(k, 0)) for k, f in empty._asdict().items()}
    return PartialStats(**fields)  # type: ignore[arg-type]


def _merged(partial: PartialStats, shard: VocabShard) -> PartialStats:
    """Merge the ranks' statistics, in rank order, by one collective."""
    fields = {name: f for name, f in partial._asdict().items() if f is not None}
    dtype = partial.max.dtype
    packed = torch.stack([f if f.dtype == dtype else _as_bits(f, dtype) for f in fields.values()])
    gathered = packed.new_empty(shard.ranks, *packed.shape)
    dist.all_gather_into_tensor(gathered.view(-1), packed.view(-1), group=shard.group)
    parts = []
    for rows in gathered.unbind():
        values = zip(fields.items(), rows.unbind(), strict=True)
        parts.append(PartialStats(**{k: x if f.dtype == dtype else _from_bits(x, f.dtype) for (k, f), x in values}))
    return functools.reduce(merge, parts)


def _as_bits(ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return token ids as the bits of floats, which a collective does not change."""
    return ids.to(torch.int32 if dtype.itemsize == 4 else torch.int64).view(dtype)


def _from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.view(torch.int32 if bits.dtype.itemsize == 4 else torch.int64).to(dtype)
