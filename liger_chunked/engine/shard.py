"""A head whose vocabulary is split over ranks (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).

Each rank computes its rows' logits, like a tile of the vocabulary. The ranks' sums of a chunk are merged in rank order:
all ranks hold the same bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_chunked.engine.collectives import gather, sum_disjoint_
from liger_chunked.engine.head import HeadPass
from liger_chunked.engine.plan import Tokens
from liger_chunked.kernels import PartialStats, finish, merge
from liger_chunked.types import TokenStats, VocabShard


@dataclass
class ShardedPass(HeadPass):
    @property
    def _shard(self) -> VocabShard:
        assert self.head.shard is not None
        return self.head.shard

    def _reduce(self, tokens: Tokens) -> tuple[PartialStats, TokenStats, Tensor | None]:
        # In rank order on every rank, so that all get the same bits.
        partial = functools.reduce(merge, gather(self._partial(tokens), self._shard.group))
        if self._candidates is not None:
            sum_disjoint_(self._candidates.logits, self._shard.group)
        return partial, finish(partial, tokens.target, self._shard.vocab_size, self.outputs), None

    def _unround(self, logps: Tensor, tokens: Tokens, partial: PartialStats) -> Tensor:
        """Correct `logps` on the rank with the target's row; send the result to all."""
        columns = self.columns
        both = logps.new_zeros(2, logps.shape[0])
        if columns:
            target = tokens.target - self._shard.start
            # A clone: the correction is in place, and targets of other ranks are clamped to a row that is not theirs.
            own = logps.clone()
            scale = super()._unround(own, tokens._replace(target=target.clamp(0, columns - 1)), partial)
            both = torch.where((target >= 0) & (target < columns), torch.stack([own, scale]), 0.0)
        sum_disjoint_(both, self._shard.group)
        logps.copy_(both[0])
        return both[1]
