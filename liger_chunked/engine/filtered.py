"""Run a chunk through the head, with statistics of the logits that a sampler keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from liger_chunked.engine.collectives import gather_tensor
from liger_chunked.engine.cutting import Tile
from liger_chunked.engine.head import HeadPass
from liger_chunked.engine.invariant import InvariantPass
from liger_chunked.engine.plan import Tokens
from liger_chunked.engine.sampling import SamplingFilter, SplitVocabulary
from liger_chunked.engine.shard import ShardedPass
from liger_chunked.engine.token_pass import TokenPass
from liger_chunked.kernels import LogitsCotangents, drop_below_
from liger_chunked.kernels.operands import along
from liger_chunked.types import TokenStats


@dataclass
class FilteredPass(HeadPass):
    """`HeadPass` on the logits that a filter keeps. Tiles are whole rows of this rank."""

    filter: SamplingFilter = SamplingFilter()  # noqa: RUF009 - frozen
    most_columns: int = 0  # of a rank
    smallest_kept: Tensor | None = field(default=None, init=False, repr=False)  # (n,) logit of each row
    _finds_bounds: bool = field(default=False, init=False, repr=False)  # the first time that a tile is projected
    _temperature: Tensor | None = field(default=None, init=False, repr=False)

    def statistics(self, tokens: Tokens) -> TokenStats:
        self.smallest_kept = tokens.x.new_empty(tokens.x.shape[0], dtype=self.logits_dtype)
        self._finds_bounds, self._temperature = True, tokens.side.get("temperature")
        stats = super().statistics(tokens)
        self._finds_bounds, self._temperature = False, None
        return stats

    def project(self, x: Tensor, tile: Tile, u: Tensor | None = None) -> Tensor:
        logits = super().project(x, tile, u)
        assert self.smallest_kept is not None
        bounds = along(self.smallest_kept, tile.row_slice)  # a view, so that the backward finds them
        if self._finds_bounds:
            temperature = None if self._temperature is None else along(self._temperature, tile.row_slice)
            bounds.copy_(self._bounds(logits, temperature))
        return drop_below_(logits, bounds)

    def _bounds(self, logits: Tensor, temperature: Tensor | None) -> Tensor:
        """Return (rows,), the smallest logit that the filter keeps of each row."""
        return self.filter.bound(logits, self.options, temperature)

    def pop_tensors(self) -> dict[str, Tensor | None]:
        tensors = {**super().pop_tensors(), "smallest_kept": self.smallest_kept}
        self.smallest_kept = None
        return tensors

    def restore(self, tensors: Mapping[str, Tensor | None]) -> None:
        super().restore(tensors)
        self.smallest_kept = tensors["smallest_kept"]

    def _leaves_rows_out(self, tokens: Tokens) -> bool:
        # Among other rows, the smallest logit that is kept may be projected again as a smaller number, and dropped.
        held = self._held
        return super()._leaves_rows_out(tokens) and held is not None and held.shape[0] == tokens.x.shape[0]

    def _gradient(
        self, logits: Tensor, target: Tensor, tile: Tile, cotangents: LogitsCotangents, live: Tensor | None = None
    ) -> Tensor:
        return super()._gradient(logits, target.masked_fill(self._drops(logits, target), -1), tile, cotangents, live)

    def _drops(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return (rows,), True where a target's logit is among these and was not kept."""
        return logits.gather(1, target[:, None])[:, 0] == -math.inf


@dataclass
class FilteredTokenPass(FilteredPass, TokenPass):
    """A `FilteredPass` whose tiles are one row, so that its bits do not depend on the others."""


@dataclass
class FilteredInvariantPass(FilteredPass, InvariantPass):
    """A `FilteredPass` whose every step treats each row alike, so that its bits do not depend on the others.

    `sampling_bound` does: a row's sums of probabilities add in one order, whatever the other rows.
    """


@dataclass
class FilteredShardedPass(FilteredPass, ShardedPass):
    """A `FilteredPass` on this rank's columns. All ranks find the same ids to keep."""

    def _bounds(self, logits: Tensor, temperature: Tensor | None) -> Tensor:
        # Not `bound`: its kernel reads whole rows, and this rank has a part of each.
        def gather(x: Tensor) -> Tensor:
            return torch.cat(list(gather_tensor(x, self._shard.group)), -1)

        vocabulary = SplitVocabulary(gather, self.most_columns)
        return self.filter.smallest_kept(logits, self.options, temperature, vocabulary)

    def _drops(self, logits: Tensor, target: Tensor) -> Tensor:
        own = target - self._shard.start
        is_own = (own >= 0) & (own < self.columns)
        return is_own & super()._drops(logits, own.clamp(0, self.columns - 1)) if self.columns else is_own


# The pass that filters the logits of another.
FILTERED: Mapping[type[HeadPass], type[FilteredPass]] = {
    HeadPass: FilteredPass,
    TokenPass: FilteredTokenPass,
    InvariantPass: FilteredInvariantPass,
    ShardedPass: FilteredShardedPass,
}
