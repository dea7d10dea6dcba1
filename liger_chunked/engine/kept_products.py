"""Statistics of long lists of kept ids, by products of whole rows.

statistics   for each tile: project, read the logits of its entries            one matrix product
backward     for each tile: gradients of its entries, 0 elsewhere; dX, dW, db  two products

Only the entries' logits are kept from one to the other, so nothing is projected again, also above the budget. Softcaps,
temperatures and normalisations act on entries, in the same kernels as where a few rows of the head are read for each
token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_chunked.engine.live_rows import LiveCount
from liger_chunked.engine.plan import Tokens
from liger_chunked.engine.source import LogitsSource
from liger_chunked.kernels import LogitsCotangents
from liger_chunked.kernels.kept import Entries, kept_logits_grad, kept_stats
from liger_chunked.kernels.kept_tile import read_kept_, spread_kept_
from liger_chunked.kernels.operands import along, mapped
from liger_chunked.types import TokenStats, accumulation_dtype


class _Memo(NamedTuple):
    z: Tensor  # (M,) untransformed logits of the entries
    positions: LogitsCotangents  # of all positions


@dataclass
class KeptProducts(LogitsSource):
    """A `LogitsSource` on the entries of a batch. `Tokens.side` has each token's "position" among the entries'."""

    entries: Entries | None = None  # ids in the whole vocabulary
    _largest: int = field(default=0, init=False, repr=False)  # logits of a tile

    @property
    def logits_dtype(self) -> torch.dtype:
        """Sums of products, unrounded: entries are few, so that memory of 4 bytes a logit is that of a tile alone."""
        return accumulation_dtype(self.head.weight.dtype)

    def reserve(self, elements: int) -> None:
        self._largest = elements  # the backward needs no memory for logits

    def statistics(self, tokens: Tokens) -> tuple[TokenStats, Any]:
        entries, positions = self.entries, tokens.side["position"]
        assert entries is not None
        super().reserve(self._largest)
        z = tokens.x.new_zeros(entries.ids.shape[0], dtype=self.logits_dtype)
        for tile in tokens.tiles:
            logits = self.project(tokens.x, tile, tokens.u)
            read_kept_(z, logits, entries, along(positions, tile.row_slice), self._column(tile.vocab_slice))
        self.release()
        if self.head.shard is not None and z.numel():
            dist.all_reduce(z, group=self.head.shard.group)  # each entry is one rank's: the others add zeros
        stats = kept_stats(z, entries, self.options, self._temperature(tokens))
        of_tokens = mapped(lambda x: x[positions], stats)
        argmax, is_top1 = None, None
        if "argmax" in self.outputs or "is_top1" in self.outputs:
            place = of_tokens.argmax.clamp(max=max(0, z.shape[0] - 1))
            argmax = entries.ids[place] if z.shape[0] else place
            is_top1 = argmax == tokens.target
        found = TokenStats(
            logps=of_tokens.logps, lse=of_tokens.lse, entropy=of_tokens.entropy, argmax=argmax, is_top1=is_top1
        )
        memo = LogitsCotangents(stats.max, stats.sum_exp, entropy_value=stats.entropy)
        return TokenStats(**{name: x for name, x in found._asdict().items() if name in self.outputs}), _Memo(z, memo)

    def backward(self, tokens: Tokens, memo: Any, gradients: dict[str, Tensor]) -> None:
        sink, entries, (z, normalisers) = self.sink, self.entries, memo
        assert sink is not None and entries is not None
        count = LiveCount.start(gradients) if self.skips_rows else None
        live = None if count is None else count.read()
        if live is not None:
            tokens = live.tokens(tokens)
            gradients = {name: g[live.rows] for name, g in gradients.items()}
        x, _, row_slice, tiles, u, side = tokens
        positions = side["position"]
        gradients = sink.normalize(gradients, self._slopes, side.get("temperature"))
        spread = {name: self._spread(g, positions, 0.0) for name, g in gradients.items()}
        cotangents = normalisers._replace(**spread, temperature=self._temperature(tokens))
        dz = kept_logits_grad(z, entries, cotangents, self.options)
        buffer = x.new_empty(self._largest)  # in the products' dtype
        sink.open_chunk(self.head, x, row_slice, tiles, u, None if live is None else live.rows)
        for tile in reversed(tiles):
            rows, columns = tile
            dlogits = buffer[: tile.size].view(rows.stop - rows.start, columns.stop - columns.start)
            spread_kept_(dlogits, dz, entries, along(positions, rows), self._column(columns))
            sink.add(tile, dlogits)
        sink.close_chunk()

    def _column(self, vocab_slice: slice) -> int:
        return self.head.vocab_start + vocab_slice.start

    def _temperature(self, tokens: Tokens) -> Tensor | None:
        x = tokens.side.get("temperature")
        return None if x is None else self._spread(x, tokens.side["position"], 1.0)

    def _spread(self, x: Tensor, positions: Tensor, fill: float) -> Tensor:
        """Return values of all positions from those of tokens."""
        assert self.entries is not None
        return x.new_full((self.entries.offsets.shape[0] - 1,), fill).index_copy_(0, positions, x)
