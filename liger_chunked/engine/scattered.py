"""Hidden states split over the ranks of a split vocabulary (sequence parallelism, https://arxiv.org/abs/2205.05198).

A chunk's hidden states are gathered before its product; its dX is reduced and scattered while dW is computed.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from liger_chunked.engine.checks import refuse_capture
from liger_chunked.engine.collectives import gather_tensor
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.rows import Rows
from liger_chunked.kernels.operands import along
from liger_chunked.kernels.survey import on_device
from liger_chunked.types import LossHead, VocabShard

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _key(row_slice: slice) -> tuple[int, int]:
    return row_slice.start, row_slice.stop


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

    def _own_rows(self, row_slice: slice) -> slice | Tensor:
        start = self.starts[_key(row_slice)]
        part = slice(start, start + self.counts[_key(row_slice)][self._rank])
        return part if self.own is None else along(self.own, part)

    def gather(self, flat: Tensor, row_slice: slice, dtype: torch.dtype) -> Tensor:
        counts, own = self.counts[_key(row_slice)], self._own_rows(row_slice)
        x = (along(flat, own) if isinstance(own, slice) else flat.index_select(0, own)).to(dtype)
        if missing := max(counts) - x.shape[0]:
            x = F.pad(x, (0, 0, 0, missing))
        parts = gather_tensor(x, self.shard.group)
        if len(set(counts)) == 1:
            return parts.flatten(0, 1)
        return torch.cat([part[:n] for part, n in zip(parts.unbind(), counts, strict=True)])

    def start_reduce(self, dx: Tensor, row_slice: slice) -> tuple[dist.Work | None, Tensor]:
        """Return the collective, and memory for this rank's rows."""
        counts = self.counts[_key(row_slice)]
        longest = max(counts)
        if len(set(counts)) > 1:
            padded = dx.new_empty(len(counts), longest, dx.shape[1])  # no rank reads the sums of what is not copied
            for whole, part in zip(padded.unbind(), dx.split(counts), strict=True):
                whole[: part.shape[0]] = part
            dx = padded.flatten(0, 1)
        own = dx.new_empty(longest, dx.shape[1])
        work = _reduce_scatter(own, dx, group=self.shard.group, async_op=True) if own.numel() else None
        return work, own[: counts[self._rank]]

    def write(self, out: Tensor, row_slice: slice, own_dx: Tensor) -> None:
        """Write this rank's rows of a chunk's dX into `out`, like its flattened hidden states."""
        own = self._own_rows(row_slice)
        if isinstance(own, slice):
            out[own] = own_dx
        else:
            out.index_copy_(0, own, own_dx.to(out.dtype))


def scatter_rows(rows: Rows, chunks: Sequence[Chunk], head: LossHead) -> tuple[Rows, ScatteredRows | None]:
    """Return the rows with each chunk's tokens in rank order, and its `ScatteredRows`.

    If groups are tokens, chunks take a token of each rank in turn, so that ranks send equally much.
    """
    shard = head.shard
    if shard is None or shard.input_grad != "reduce_scatter":
        return rows, None
    ranks, rank, device = shard.ranks, dist.get_rank(shard.group), head.weight.device
    if rows.target is not None:
        refuse_capture(rows.target, "input_grad='reduce_scatter' of vocab_shard")
    lengths = [chunk.length for chunk in chunks]
    if rows.groups is None:
        order, (of_batch,) = _by_rank(rows, [rows.n_valid], ranks, device)
        counts = _take_turns(of_batch, lengths)
        if len(chunks) > 1:
            taken = zip(order.split(of_batch), zip(*counts, strict=True), strict=True)
            of_ranks = [of_rank.split(list(by_chunks)) for of_rank, by_chunks in taken]
            order = torch.cat([part for of_chunk in zip(*of_ranks, strict=True) for part in of_chunk])
    else:
        order, counts = _by_rank(rows, lengths, ranks, device)

    reordered, own = rows.reordered(order), None
    if rows.input_index is not None:  # else each rank's tokens are all its hidden states, in order
        assert reordered.input_index is not None
        length = rows.sequence_length
        own = torch.cat(reordered.input_index.split(list(itertools.chain(*counts)))[rank::ranks])
        own = own - rank * (length // ranks) - own // max(1, length) * (length - length // ranks)
    by_chunk = {_key(chunk.row_slice): of_ranks for chunk, of_ranks in zip(chunks, counts, strict=True)}
    before = itertools.accumulate((of_ranks[rank] for of_ranks in by_chunk.values()), initial=0)
    starts = dict(zip(by_chunk, before, strict=False))
    return reordered, ScatteredRows(shard, by_chunk, own, starts, order)


def _by_rank(rows: Rows, lengths: list[int], ranks: int, device: torch.device) -> tuple[Tensor, list[list[int]]]:
    """Return the order of tokens by part and rank, and how many each rank holds.

    Parts have `lengths` tokens. Waits for the device if tokens are ignored or reordered.
    """
    length = max(1, rows.sequence_length)
    if rows.input_index is None:
        by_rank = torch.arange(rows.n_valid, device=device).view(-1, ranks, max(1, length // ranks))
        parts = by_rank.split([n // length for n in lengths])
        return torch.cat([part.transpose(0, 1).flatten() for part in parts]), [[n // ranks] * ranks for n in lengths]
    key = rows.input_index % length // max(1, length // ranks)
    if len(lengths) > 1:
        part = torch.repeat_interleave(on_device(lengths, device), output_size=rows.n_valid)
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
