"""Rows without a gradient take no part in the products of a backward.

    count = LiveCount.start(gradients)  after the objective: the number of live rows is on its way to the host
    dz = logits_grad_(..., live=count.rows)     needs no number: of logits in memory, the gradient of live rows alone
    live = count.read()                 waits for the number; None: nearly all rows are live
    dz, tokens = dz[: live.length], live.tokens(tokens)

A product of the first `n` rows of dz needs the live ones in front, in the memory of the logits: a second tile would
exceed the budget. So dz is gathered in place. The live rows behind the first `n` go to the places of dead rows among
them, and the others stay. No row is both read for another place and written, so the order does not matter.
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
from liger_chunked.kernels.backend import torch_on_host
from liger_chunked.kernels.tuning.generic import MOST_GATHERED, ONE_DEAD_ROW_OF


class LiveRows(NamedTuple):
    """The rows of a chunk that have a gradient: (n,) int64, the row of the chunk at each place of compacted tensors."""

    rows: Tensor

    @property
    def length(self) -> int:
        return self.rows.shape[0]

    def compact_(self, x: Tensor) -> Tensor:
        """Gather rows of (rows, columns) in place, in blocks, and return the first n."""
        places = (self.rows != torch.arange(self.length, device=x.device)).nonzero().view(-1)
        for part in places.split(max(1, MOST_GATHERED // max(1, x.shape[1]))):
            x.index_copy_(0, part, x.index_select(0, self.rows[part]))
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
    """The rows with a gradient, on the device, and their number, on its way to the host.

    Attributes:
        rows: (rows,) int64, the row at each place of compacted tensors, -1 after the last; if leaving rows out does not
            pay, all rows at their places.
    """

    rows: Tensor
    _n_live: Tensor  # () int64, pinned on a GPU
    _event: Any  # of the copy to the host; None without one

    @classmethod
    def start(cls, gradients: Mapping[str, Tensor]) -> LiveCount | None:
        """Find the live rows of upstream gradients (rows,) or (rows, K). None on a CPU if all rows are live."""
        first = next(iter(gradients.values()))
        n, device = first.shape[0], first.device
        is_live = torch.zeros(n, dtype=torch.bool, device=device)
        for g in gradients.values():
            is_live |= (g != 0) if g.ndim == 1 else (g != 0).any(1)  # NaN counts
        if torch_on_host(is_live) and is_live.all():
            return None
        n_live, place = is_live.sum(), torch.arange(n, device=device)
        stays = place < n_live
        hole, mover = stays & ~is_live, is_live & ~stays
        # The k-th hole gets the k-th mover, with k from 1; place 0 of `movers` collects the other rows.
        movers = torch.zeros(n + 1, dtype=torch.int64, device=device)
        movers.scatter_(0, torch.where(mover, mover.cumsum(0), 0), place)
        rows = torch.where(stays, torch.where(hole, movers[hole.cumsum(0)], place), -1)
        rows = torch.where(n - n_live >= _fewest_dead(is_live), rows, place)
        if not is_on_gpu(n_live):  # elsewhere `read` waits for the device
            return cls(rows, n_live, None)
        pinned = torch.empty((), dtype=torch.int64, pin_memory=True)
        pinned.copy_(n_live, non_blocking=True)
        event = accelerator.Event()
        event.record(current_stream(device))
        return cls(rows, pinned, event)

    def read(self) -> LiveRows | None:
        """Wait for the count, and return the live rows, or None if leaving the others out does not pay."""
        if self._event is not None:
            self._event.synchronize()
        n, n_live = self.rows.shape[0], int(self._n_live)
        return None if n - n_live < _fewest_dead(self.rows) else LiveRows(self.rows[:n_live])


def _fewest_dead(rows: Tensor) -> int:
    """Return how many of (n,) rows must be dead to leave them out. On a CPU, one row's products pay."""
    return 1 if torch_on_host(rows) else max(1, rows.shape[0] // ONE_DEAD_ROW_OF)
