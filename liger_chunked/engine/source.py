"""Run a chunk through the head.

statistics   for each tile: project, reduce to PartialStats, merge           one matrix product
backward     for each tile, last first: project unless in memory,
             logits -> gradient in place, dX, dW, db                         two products, three if projected again
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from liger_chunked.engine.candidates import Candidates
from liger_chunked.engine.collectives import gather, sum_disjoint_
from liger_chunked.engine.cutting import Tile
from liger_chunked.engine.live_rows import LiveCount, LiveRows
from liger_chunked.engine.plan import Tokens
from liger_chunked.engine.sink import Sink, accumulate
from liger_chunked.kernels import (
    ExactTarget,
    LogitsCotangents,
    PartialStats,
    finish,
    logits_grad_,
    logits_stats,
    merge,
    row_stats,
    row_stats_are_exact,
    slopes_of_stats,
    unround_logps_,
)
from liger_chunked.kernels.operands import along, joined
from liger_chunked.types import HeadTensors, LogitOptions, Slopes, TokenStats, VocabShard


class Source(Protocol):
    """Computes values of tokens from the head of one step, and their gradients.

    For each chunk `statistics`, then `backward` unless nothing has a gradient.
    """

    def statistics(self, tokens: Tokens) -> tuple[Any, Any]:
        """Return values (n,) of the chunk's tokens, a NamedTuple, and a memo, what `backward` needs of them."""
        ...

    def backward(self, tokens: Tokens, memo: Any, gradients: dict[str, Tensor]) -> None:
        """Add the chunk's dX, dW and db.

        Args:
            memo: that of `statistics` of these tokens.
            gradients: (n,) upstream gradients of values, by name; empty if the loss ignores the chunk.
        """
        ...

    def release(self) -> None:
        """Free the logits after the last chunk."""
        ...


@dataclass
class LogitsSource:
    """A `Source` with one buffer for the logits of all tiles."""

    # Whether the launch that reduces whole rows may correct their log-probabilities too.
    unrounds_at_once: ClassVar[bool] = True

    head: HeadTensors
    options: LogitOptions
    outputs: tuple[str, ...] = ()
    class_weight: Tensor | None = None  # (V,) of `mean_logits`
    sink: Sink | None = None
    skips_rows: bool = False  # whether rows without a gradient take no part in the backward's products
    _candidates: Candidates | None = field(default=None, init=False, repr=False)  # of the chunk that is measured
    _buffer: Tensor | None = field(default=None, init=False, repr=False)
    _held: Tensor | None = field(default=None, init=False, repr=False)  # logits of the last tile
    _rounded: Tensor | None = field(default=None, init=False, repr=False)  # gradient of wide logits

    @property
    def columns(self) -> int:
        return self.head.weight.shape[0]

    @functools.cached_property
    def logits_dtype(self) -> torch.dtype:
        return self.options.logits_dtype or self.head.weight.dtype

    def reserve(self, elements: int) -> None:
        self._buffer = self.head.weight.new_empty(elements, dtype=self.logits_dtype)

    def release(self) -> None:
        self._buffer = self._held = self._rounded = None

    def project(self, x: Tensor, tile: Tile, u: Tensor | None = None) -> Tensor:
        """Return a tile's untransformed logits (rows, columns) in the buffer."""
        buffer, weight, (rows, columns) = self._buffer, self.head.weight, tile
        assert buffer is not None
        # Not `along`, which a step would call six times: most chunks are one tile.
        if (n_rows := rows.stop - rows.start) != x.shape[0]:
            x = x[rows]
        if (n_columns := columns.stop - columns.start) != weight.shape[0]:
            weight = weight[columns]
        if n_rows * n_columns != buffer.shape[0]:
            buffer = buffer[: n_rows * n_columns]
        logits = buffer.view(n_rows, n_columns)
        first, matrix = x, weight
        if u is not None:
            # First the smaller term, which rounds less.
            assert self.head.up is not None
            first, matrix = along(u, tile.row_slice), along(self.head.up, tile.vocab_slice)
        bias = None if self.head.bias is None else along(self.head.bias, tile.vocab_slice)
        if bias is not None and logits.dtype == x.dtype:
            torch.addmm(bias, first, matrix.t(), out=logits)
        else:
            accumulate(logits, first, matrix.t(), first=True)
            if bias is not None:
                logits += bias
        if u is not None:
            accumulate(logits, x, weight.t(), first=False)
        return logits

    def project_all(self, x: Tensor, u: Tensor | None = None) -> Tensor:
        return self.project(x, Tile(slice(0, x.shape[0]), slice(0, self.columns)), u)

    def _class_weight(self, tile: Tile) -> Tensor | None:
        if self.class_weight is None:
            return None
        start = self.head.vocab_start
        return along(self.class_weight, slice(start + tile.vocab_slice.start, start + tile.vocab_slice.stop))

    def statistics(self, tokens: Tokens) -> tuple[TokenStats, LogitsCotangents]:
        side = tokens.side
        if "candidates" in side:
            self._candidates = Candidates(side["candidates"], self.logits_dtype)
        partial, stats, scale = self._reduce(tokens)
        # A 16-bit product rounds each logit, and a sequence adds up the errors of its targets: these are computed again
        # in float32 (docs/numerics.md).
        if scale is None and stats.logps is not None and self.logits_dtype in (torch.bfloat16, torch.float16):
            scale = self._unround(stats.logps, tokens, partial)
        memo = LogitsCotangents(partial.max, partial.sum_exp, scale, entropy_value=stats.entropy)
        if self._candidates is not None:
            of_ids = self._candidates.logps(partial.max, partial.sum_exp, self.options, side.get("temperature"))
            self._candidates = None
            stats = stats._replace(candidate_logps=of_ids)
        return stats, memo

    def _project_and_hold(self, x: Tensor, tile: Tile, u: Tensor | None) -> Tensor:
        """Return a tile's logits, after candidates read theirs. A backward finds those of the last tile in `_held`."""
        self._held = self.project(x, tile, u)
        if self._candidates is not None:
            self._candidates.read(self._held, tile, self.head.vocab_start)
        return self._held

    def _unround(self, logps: Tensor, tokens: Tokens, partial: PartialStats) -> Tensor:
        x, target, _, _, u, side = tokens
        of_rows = u, side.get("temperature")
        return unround_logps_(logps, x, self.head, target, partial.max, partial.sum_exp, self.options, *of_rows)

    def _reduce(self, tokens: Tokens) -> tuple[PartialStats, TokenStats, Tensor | None]:
        """Return sums and statistics, and what `_unround` returns (None: log-probabilities are not corrected yet)."""
        x, target, _, tiles, u, side = tokens
        if len(tiles) == 1:
            logits, (weight, bias, *_), exact = self._project_and_hold(x, tiles[0], u), self.head, None
            if self.unrounds_at_once and u is None and row_stats_are_exact(logits, self.outputs, x, weight):
                grad_scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
                exact = ExactTarget(x, weight, None if bias is None else bias.contiguous(), grad_scale)
            options, temperature = self.options, side.get("temperature")
            partial, stats = row_stats(logits, target, options, self.outputs, self.class_weight, temperature, exact)
            return partial, stats, None if exact is None else exact.grad_scale
        partial = self._partial(tokens)
        return partial, finish(partial, target, self.head.vocab_size, self.outputs), None

    def _partial(self, tokens: Tokens) -> PartialStats:
        x, target, _, tiles, u, side = tokens
        temperature = side.get("temperature")
        by_rows: dict[int, PartialStats] = {}
        for tile in tiles:
            part = logits_stats(
                logits=self._project_and_hold(x, tile, u),
                target=along(target, tile.row_slice),
                options=self.options,
                outputs=self.outputs,
                vocab_start=self.head.vocab_start + tile.vocab_slice.start,
                class_weight=self._class_weight(tile),
                temperature=None if temperature is None else along(temperature, tile.row_slice),
            )
            earlier = by_rows.get(tile.row_slice.start)
            by_rows[tile.row_slice.start] = part if earlier is None else merge(earlier, part)
        if by_rows:
            return joined(list(by_rows.values()))
        return logits_stats(x.new_empty(0, 1), target[:0], self.options, self.outputs)

    def backward(self, tokens: Tokens, memo: LogitsCotangents, gradients: dict[str, Tensor]) -> None:
        assert self.sink is not None
        # A chunk that the loss ignores runs too: its rows of dX, and maybe all of dW, may be uninitialised.
        gradients = gradients or {"logps": torch.zeros_like(memo.max)}
        count = LiveCount.start(gradients) if self.skips_rows else None
        gradients = self.sink.normalize(gradients, self._slopes, tokens.side.get("temperature"))
        x, target, row_slice, tiles, u, side = tokens
        cotangents = memo._replace(**gradients, temperature=side.get("temperature"))
        last: Tensor | None = None  # the gradient of the held tile, if it is known before the loop
        live: LiveRows | None = None
        if count is not None:
            if self._held is not None and self._held.shape[0] == x.shape[0]:
                # Before the count, so that the device computes it while the host waits.
                last, self._held = self._gradient(self._held, target, tiles[-1], cotangents, count.rows), None
            live = count.read()
        if live is not None:
            self._held = None  # of some rows, dead ones among them: its live rows are projected again
            last = None if last is None else last[: live.length]
            x, target, row_slice, tiles, u, side = live.tokens(tokens)
            cotangents = cotangents.at(live.rows)
        self.sink.open_chunk(self.head, x, row_slice, tiles, u, None if live is None else live.rows)
        for tile in reversed(tiles):
            dz, last = last, None
            if dz is None:
                logits = self.project(x, tile, u) if self._held is None else self._held
                self._held = None
                has_all_rows = logits.shape[0] == x.shape[0]
                of_rows = cotangents if has_all_rows else cotangents.at(tile.row_slice)
                of_tile = target if has_all_rows else target[tile.row_slice]
                dz = self._gradient(logits, of_tile, tile, of_rows)
            self.sink.add(tile, dz)
        self.sink.close_chunk()

    def _slopes(self) -> Slopes:
        return slopes_of_stats(self.options, self.head.vocab_size, self.class_weight)

    def _gradient(
        self, logits: Tensor, target: Tensor, tile: Tile, cotangents: LogitsCotangents, live: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of a tile's logits, in their memory unless wider than the products.

        Args:
            live: as in `logits_grad_`.
        """
        out = None
        if logits.dtype != self.head.weight.dtype:
            assert self._buffer is not None
            if self._rounded is None:
                self._rounded = self.head.weight.new_empty(self._buffer.numel())
            out = along(self._rounded, slice(0, logits.numel())).view(logits.shape)
        head, first_column, class_weight = self.head, tile.vocab_slice.start, self.class_weight
        return logits_grad_(
            logits=logits,
            target=target,
            cotangents=cotangents,
            options=self.options,
            vocab_size=head.weight.shape[0] if head.shard is None else head.shard.vocab_size,
            vocab_start=first_column if head.shard is None else head.shard.start + first_column,
            class_weight=None if class_weight is None else self._class_weight(tile),
            out=out,
            live=live,
        )


@dataclass
class ShardedSource(LogitsSource):
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
