"""Rows without a gradient take no part in the products of a backward.

    count = LiveCount.start(gradients)  after the objective: the number of live rows is on its way to the host
    ...                                 work that needs no number, such as the gradient of the logits in memory
    live = count.read()                 waits for the number; None: nearly all rows are live
    dz, tokens = live.compact_(dz), live.tokens(tokens)

A product of the first `n` rows of dz needs the live ones in front. A row of dz is a row of the vocabulary, so as few as
possible move: live rows behind the first `n` into the places of dead rows among them. No row is both read and written,
so the order of the moves does not matter. Hidden states and values of tokens are gathered, because they are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_chunked.device import accelerator, current_stream, is_on_gpu
from liger_chunked.engine.cutting import Tile, Tiles
from liger_chunked.engine.plan import Tokens
from liger_chunked.kernels.launch import is_dry
from liger_chunked.kernels.tuning.generic import MOST_MOVED, ONE_DEAD_ROW_OF


class LiveRows(NamedTuple):
    """The rows of a chunk that have a gradient.

    Attributes:
        rows: (n,) int64, the row of the chunk at each place of the compacted tensors.
        holes, movers: (m,) int64, places of dead rows among the first n, and the live rows that move there.
    """

    rows: Tensor
    holes: Tensor
    movers: Tensor

    @property
    def length(self) -> int:
        return self.rows.shape[0]

    def compact_(self, x: Tensor) -> Tensor:
        """Move rows of (rows, columns) in place, and return the first n."""
        for start in range(0, self.holes.shape[0], step := max(1, MOST_MOVED // max(1, x.shape[1]))):
            block = slice(start, start + step)
            x.index_copy_(0, self.holes[block], x.index_select(0, self.movers[block]))
        return x[: self.length]

    def tokens(self, tokens: Tokens) -> Tokens:
        """Return the `Tokens` of these rows, in tiles of the same columns."""
        return tokens._replace(
            x=tokens.x.index_select(0, self.rows),
            target=tokens.target[self.rows],
            tiles=self.tiles(tokens.tiles),
            u=None if tokens.u is None else tokens.u.index_select(0, self.rows),
            side={name: x[self.rows] for name, x in tokens.side.items()},
        )

    def tiles(self, tiles: Tiles) -> Tiles:
        n = self.length
        return tuple([Tile(slice(a.start, min(a.stop, n)), columns) for a, columns in tiles if a.start < n])


@dataclass
class LiveCount:
    """A count of the rows with a gradient: which they are, on the device, and their number, on its way to the host."""

    _is_live: Tensor  # (rows,) bool
    _counts: Tensor  # (2,) int64, pinned on a GPU: live rows, and rows to move
    _event: Any  # of the copy to the host; None without one

    @classmethod
    def start(cls, gradients: Mapping[str, Tensor]) -> LiveCount | None:
        """Count the live rows of upstream gradients (rows,) or (rows, K). None in a dry run: rows are unknown."""
        first = next(iter(gradients.values()))
        if first.is_meta or is_dry():
            return None
        is_live = torch.zeros(first.shape[0], dtype=torch.bool, device=first.device)
        for g in gradients.values():
            is_live |= (g != 0) if g.ndim == 1 else (g != 0).any(1)  # NaN counts
        n_live = is_live.sum()
        place = torch.arange(first.shape[0], device=first.device)
        counts = torch.stack([n_live, (~is_live & (place < n_live)).sum()])
        if not is_on_gpu(counts):  # elsewhere `read` waits for the device
            return cls(is_live, counts, None)
        on_host = torch.empty(2, dtype=torch.int64, pin_memory=True)
        on_host.copy_(counts, non_blocking=True)
        event = accelerator.Event()
        event.record(current_stream(first.device))
        return cls(is_live, on_host, event)

    def read(self) -> LiveRows | None:
        """Wait for the count, and return the live rows, or None if leaving the others out does not pay."""
        if self._event is not None:
            self._event.synchronize()
        n_live, n_moved = self._counts.tolist()
        n = self._is_live.shape[0]
        if n - n_live < max(1, n // ONE_DEAD_ROW_OF):
            return None
        rows = torch.arange(n_live, device=self._is_live.device)
        holes = torch.nonzero_static(~self._is_live[:n_live], size=n_moved).view(-1)
        movers = n_live + torch.nonzero_static(self._is_live[n_live:], size=n_moved).view(-1)
        rows[holes] = movers
        return LiveRows(rows, holes, movers)
