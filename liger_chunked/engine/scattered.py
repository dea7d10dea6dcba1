"""Hidden states split over the ranks of a split vocabulary (sequence parallelism, https://arxiv.org/abs/2205.05198).

A chunk's hidden states are gathered before its product; its dX is reduced and scattered while dW is computed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from liger_chunked.engine.batch import Chunk, Layout
from liger_chunked.engine.collectives import gather_tensor
from liger_chunked.types import VocabShard

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _key(rows: slice) -> tuple[int, int]:
    return rows.start, rows.stop


@dataclass(frozen=True)
class ScatteredRows:
    """The rows that each rank holds. A chunk's key is the start and stop of its rows, which are in rank order."""

    shard: VocabShard
    counts: dict[tuple[int, int], list[int]]  # of a chunk: how many rows each rank holds
    own: Tensor  # this rank's valid rows of flattened hidden states, chunk by chunk
    starts: dict[tuple[int, int], int]  # a chunk's first place in `own`
    order: Tensor  # (n_valid,) each token's earlier index

    @property
    def _rank(self) -> int:
        return dist.get_rank(self.shard.group)

    def own_rows(self, rows: slice) -> Tensor:
        start = self.starts[_key(rows)]
        return self.own[start : start + self.counts[_key(rows)][self._rank]]

    def gather(self, flat: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
        counts = self.counts[_key(rows)]
        x = flat.index_select(0, self.own_rows(rows)).to(dtype)
        parts = gather_tensor(F.pad(x, (0, 0, 0, max(counts) - x.shape[0])), self.shard.group)
        if len(set(counts)) == 1:
            return parts.flatten(0, 1)
        return torch.cat([part[:n] for part, n in zip(parts.unbind(), counts, strict=True)])

    def start_reduce(self, dx: Tensor, rows: slice) -> tuple[dist.Work | None, Tensor]:
        """Return the collective, and memory for this rank's rows."""
        counts = self.counts[_key(rows)]
        longest = max(counts)
        if len(set(counts)) > 1:
            dx = torch.cat([F.pad(part, (0, 0, 0, longest - part.shape[0])) for part in dx.split(counts)])
        own = dx.new_empty(longest, dx.shape[1])
        work = _reduce_scatter(own, dx, group=self.shard.group, async_op=True) if own.numel() else None
        return work, own[: counts[self._rank]]


def scatter_rows(layout: Layout, chunks: list[Chunk], shard: VocabShard | None) -> tuple[Layout, ScatteredRows | None]:
    """Return the layout with each chunk's tokens in rank order, and its `ScatteredRows`. Waits for the device.

    If groups are tokens, chunks take a token of each rank in turn, so that ranks send equally much.
    """
    if shard is None or shard.input_grad != "reduce_scatter":
        return layout, None
    ranks, rank = shard.ranks, dist.get_rank(shard.group)
    device = layout.target.device
    rows = torch.arange(layout.n_valid, device=device) if layout.rows is None else layout.rows
    position, length = rows % max(1, layout.length), layout.length // ranks
    owner = position.div(max(1, length), rounding_mode="floor")
    order = torch.arange(layout.n_valid, device=device)
    if layout.group_lengths is None:
        turn = F.one_hot(owner, ranks).cumsum(0).gather(1, owner[:, None])[:, 0]
        order = torch.argsort(turn, stable=True)
    lengths = [chunk.rows.stop - chunk.rows.start for chunk in chunks]
    of_chunk = torch.arange(len(chunks), device=device).repeat_interleave(torch.tensor(lengths, device=device))
    key = of_chunk * ranks + owner[order]
    order = order[torch.argsort(key, stable=True)]
    counts = torch.bincount(key, minlength=len(chunks) * ranks).view(-1, ranks).tolist()

    rows, owner = rows[order], owner[order]
    mine = rows[owner == rank]
    own = mine.div(max(1, layout.length), rounding_mode="floor") * length + mine % max(1, layout.length) - rank * length
    by_chunk = {_key(chunk.rows): of_ranks for chunk, of_ranks in zip(chunks, counts, strict=True)}
    before = itertools.accumulate((of_ranks[rank] for of_ranks in by_chunk.values()), initial=0)
    starts = dict(zip(by_chunk, before, strict=False))
    slots = order if layout.slots is None else layout.slots[order]
    temperature = None if layout.temperature is None else layout.temperature[order]
    reordered = replace(layout, target=layout.target[order], rows=rows, slots=slots, temperature=temperature)
    return reordered, ScatteredRows(shard, by_chunk, own, starts, order)
