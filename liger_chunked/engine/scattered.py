"""Hidden states split over the ranks of a split vocabulary (sequence parallelism, https://arxiv.org/abs/2205.05198).

A chunk's hidden states are gathered before its product; its dX is reduced and scattered while dW is computed.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from liger_chunked.engine.batch import Layout, along
from liger_chunked.engine.collectives import gather_tensor
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.known import on_device
from liger_chunked.types import VocabShard

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _key(rows: slice) -> tuple[int, int]:
    return rows.start, rows.stop


@dataclass(frozen=True)
class ScatteredRows:
    """The rows that each rank holds. A chunk's key is the start and stop of its rows, which are in rank order."""

    shard: VocabShard
    counts: dict[tuple[int, int], list[int]]  # of a chunk: how many rows each rank holds
    own: Tensor | None  # this rank's valid rows of flattened hidden states, chunk by chunk; None: all, in order
    starts: dict[tuple[int, int], int]  # a chunk's first place in `own`
    order: Tensor  # (n_valid,) each token's earlier index

    @property
    def _rank(self) -> int:
        return dist.get_rank(self.shard.group)

    @property
    def n_own(self) -> int:
        return sum(of_ranks[self._rank] for of_ranks in self.counts.values())

    def _own_rows(self, rows: slice) -> slice | Tensor:
        start = self.starts[_key(rows)]
        part = slice(start, start + self.counts[_key(rows)][self._rank])
        return part if self.own is None else along(self.own, part)

    def gather(self, flat: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
        counts, own = self.counts[_key(rows)], self._own_rows(rows)
        x = (along(flat, own) if isinstance(own, slice) else flat.index_select(0, own)).to(dtype)
        if missing := max(counts) - x.shape[0]:
            x = F.pad(x, (0, 0, 0, missing))
        parts = gather_tensor(x, self.shard.group)
        if len(set(counts)) == 1:
            return parts.flatten(0, 1)
        return torch.cat([part[:n] for part, n in zip(parts.unbind(), counts, strict=True)])

    def start_reduce(self, dx: Tensor, rows: slice) -> tuple[dist.Work | None, Tensor]:
        """Return the collective, and memory for this rank's rows."""
        counts = self.counts[_key(rows)]
        longest = max(counts)
        if len(set(counts)) > 1:
            padded = dx.new_empty(len(counts), longest, dx.shape[1])  # no rank reads the sums of what is not copied
            for whole, part in zip(padded.unbind(), dx.split(counts), strict=True):
                whole[: part.shape[0]] = part
            dx = padded.flatten(0, 1)
        own = dx.new_empty(longest, dx.shape[1])
        work = _reduce_scatter(own, dx, group=self.shard.group, async_op=True) if own.numel() else None
        return work, own[: counts[self._rank]]

    def write(self, out: Tensor, rows: slice, own_dx: Tensor) -> None:
        """Write this rank's rows of a chunk's dX into `out`, like its flattened hidden states."""
        own = self._own_rows(rows)
        if isinstance(own, slice):
            out[own] = own_dx
        else:
            out.index_copy_(0, own, own_dx.to(out.dtype))


def scatter_rows(
    layout: Layout, chunks: Sequence[Chunk], shard: VocabShard | None
) -> tuple[Layout, ScatteredRows | None]:
    """Return the layout with each chunk's tokens in rank order, and its `ScatteredRows`.

    If groups are tokens, chunks take a token of each rank in turn, so that ranks send equally much.
    """
    if shard is None or shard.input_grad != "reduce_scatter":
        return layout, None
    ranks, rank = shard.ranks, dist.get_rank(shard.group)
    lengths = [chunk.rows.stop - chunk.rows.start for chunk in chunks]
    if layout.group_lengths is None:
        order, (of_batch,) = _by_rank(layout, [layout.n_valid], ranks)
        counts = _take_turns(of_batch, lengths)
        if len(chunks) > 1:
            taken = zip(order.split(of_batch), zip(*counts, strict=True), strict=True)
            of_ranks = [of_rank.split(list(by_chunks)) for of_rank, by_chunks in taken]
            order = torch.cat([part for of_chunk in zip(*of_ranks, strict=True) for part in of_chunk])
    else:
        order, counts = _by_rank(layout, lengths, ranks)

    rows, own = order, None
    if layout.rows is not None:  # else each rank's tokens are all its hidden states, in order
        rows, length = layout.rows[order], layout.length // ranks
        own = torch.cat(rows.split(list(itertools.chain(*counts)))[rank::ranks])
        own = own - rank * length - own // max(1, layout.length) * (layout.length - length)
    by_chunk = {_key(chunk.rows): of_ranks for chunk, of_ranks in zip(chunks, counts, strict=True)}
    before = itertools.accumulate((of_ranks[rank] for of_ranks in by_chunk.values()), initial=0)
    starts = dict(zip(by_chunk, before, strict=False))
    slots = order if layout.slots is None else layout.slots[order]
    temperature = None if layout.temperature is None else layout.temperature[order]
    reordered = replace(layout, target=layout.target[order], rows=rows, slots=slots, temperature=temperature)
    return reordered, ScatteredRows(shard, by_chunk, own, starts, order)


def _by_rank(layout: Layout, lengths: list[int], ranks: int) -> tuple[Tensor, list[list[int]]]:
    """Return the order of tokens by part and rank, and how many each rank holds.

    Parts have `lengths` tokens. Waits for the device if tokens are ignored or reordered.
    """
    device, length = layout.target.device, max(1, layout.length)
    if layout.rows is None:
        every = torch.arange(layout.n_valid, device=device).view(-1, ranks, max(1, length // ranks))
        parts = every.split([n // length for n in lengths])
        return torch.cat([part.transpose(0, 1).flatten() for part in parts]), [[n // ranks] * ranks for n in lengths]
    key = layout.rows % length // max(1, length // ranks)
    if len(lengths) > 1:
        part = torch.repeat_interleave(on_device(lengths, device), output_size=layout.n_valid)
        key += ranks * part
    key, order = torch.sort(key, stable=True)
    stops = torch.searchsorted(key, torch.arange(len(lengths) * ranks, device=device), right=True).tolist()
    counts = [stop - start for start, stop in itertools.pairwise([0, *stops])]
    return order, [counts[i : i + ranks] for i in range(0, len(counts), ranks)]


def _take_turns(counts: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """Return how many tokens each chunk takes of each rank, in turn. Ranks have `counts`, chunks `lengths`."""
    taken = [[0] * len(counts)]
    for n in itertools.accumulate(lengths):
        turns = bisect.bisect(range(max(counts)), n, key=lambda turn: sum(min(c, turn + 1) for c in counts))
        taken.append([min(c, turns) for c in counts])
        left = n - sum(taken[-1])
        for rank in [rank for rank, c in enumerate(counts) if c > turns][:left]:
            taken[-1][rank] += 1
    return [[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(taken)]
