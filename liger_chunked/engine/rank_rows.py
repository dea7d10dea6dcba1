"""Rows of sequences that ranks split (`sequence`): a rank computes its positions, and objectives see those of all.

TokenShares      each rank computes its share of a loss that is a sum over tokens
GatheredTokens   groups are tokens, of which the objective needs all at once
GatheredGroups   groups are sequences or pairs: all ranks compute every group
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.rows import GroupRows, Rows, TokenRows
from liger_chunked.engine.sequence import SequenceSplit
from liger_chunked.kernels.operands import Values, joined, mapped
from liger_chunked.types import TokenStats


def on_this_rank(rows: Rows, whole_batch: bool = False) -> Rows:
    """Return what this rank computes: all rows, unless ranks split sequences (`Rows.split`).

    Args:
        whole_batch: whether the objective needs all groups at once.
    """
    if rows.split is None:
        return rows
    local, ranks = rows.split
    if isinstance(rows, GroupRows):
        return GatheredGroups(**vars(local), ranks=ranks)
    if whole_batch:
        return GatheredTokens(**vars(local), ranks=ranks, batch_rows=rows)
    return TokenShares(**vars(local), ranks=ranks)


def _gather_tokens(values: Values, ranks: SequenceSplit) -> Values:
    """Gather the ranks' values of all their positions, (B * T_r,), to (B * T,)."""
    by_sequence = mapped(lambda x: x.view(ranks.batch, ranks.local_length), values)
    return mapped(lambda x: x.reshape(-1), ranks.whole_values(by_sequence))


@dataclass(eq=False)
class TokenShares(TokenRows):
    """This rank's tokens of sequences split over ranks. Losses are sums over tokens: the ranks add their shares."""

    ranks: SequenceSplit = field(kw_only=True)
    gathers_statistics: ClassVar[bool] = True

    def group_index(self, chunk: Chunk) -> slice | Tensor:
        local = super().group_index(chunk)
        if isinstance(local, slice):
            assert self.target is not None  # a loss without one has no objective
            local = torch.arange(local.start, local.stop, device=self.target.device)
        return self.ranks.batch_index(local)

    def join(self, parts: list[TokenStats]) -> TokenStats:
        return self.stats_to_dense(joined(parts)._asdict())

    def join_compact(self, parts: list[Values]) -> Values:
        """Return the values of all ranks' positions, (B * T,), so that each rank has the whole loss."""
        return _gather_tokens(mapped(self.to_dense, joined(parts)), self.ranks)

    def stats_to_dense(self, stats: Mapping[str, Tensor | None]) -> TokenStats:
        return _gather_tokens(super().stats_to_dense(stats), self.ranks)

    def sum_of_shares(self, loss: Tensor) -> Tensor:
        return self.ranks.sum(loss)


@dataclass(eq=False)
class GatheredTokens(TokenRows):
    """This rank's tokens of sequences split over ranks. The objective sees the tokens of all ranks, in one chunk."""

    ranks: SequenceSplit = field(kw_only=True)
    batch_rows: Rows = field(kw_only=True)  # of all ranks
    gathers_statistics: ClassVar[bool] = True

    def for_objective(self, values: Values, chunk: Chunk) -> Values:
        gathered, index = _gather_tokens(mapped(self.to_dense, values), self.ranks), self.batch_rows.dense_index
        return gathered if index is None else mapped(lambda x: x[index], gathered)

    def from_objective(self, x: Tensor, chunk: Chunk) -> Tensor:
        local = self.ranks.local_positions(self.batch_rows.to_dense(x))
        return local if self.dense_index is None else local[self.dense_index]

    def group_index(self, chunk: Chunk) -> slice | Tensor:
        all_tokens = slice(0, self.batch_rows.n_valid)
        return self.batch_rows.group_index(Chunk(all_tokens, all_tokens))

    def join(self, parts: list[TokenStats]) -> TokenStats:
        return self.batch_rows.join(parts)


@dataclass(eq=False)
class GatheredGroups(GroupRows):
    """This rank's part of groups split over ranks. Objectives see whole groups: ranks gather each chunk's values."""

    ranks: SequenceSplit = field(kw_only=True)
    gathers_statistics: ClassVar[bool] = True
    ranks_cut_alike: ClassVar[bool] = True

    def for_objective(self, values: Values, chunk: Chunk) -> Values:
        return self.ranks.whole_values(super().for_objective(values, chunk))

    def from_objective(self, x: Tensor, chunk: Chunk) -> Tensor:
        return super().from_objective(x[..., self.ranks.local_slice], chunk)

    def stats_to_dense(self, stats: Mapping[str, Tensor | None]) -> TokenStats:
        return self.ranks.whole_values(super().stats_to_dense(stats))
