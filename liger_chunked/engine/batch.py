"""Select and order the tokens that have a target (docs/how-it-works.md: groups, chunks and tiles)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Self

from liger_chunked.engine.collectives import Values, mapped
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.known import Counts, assert_later, check_ids, may_read, on_device
from liger_chunked.engine.packed import Packing, Sequences
from liger_chunked.engine.sequence import SequenceSplit
from liger_chunked.kernels import agrees, survey
from liger_chunked.kernels.operands import along as along
from liger_chunked.types import TokenStats

Group = Literal["token", "sequence", "pair"]


def joined(parts: Sequence[Values]) -> Values:
    if len(parts) == 1:
        return parts[0]
    return parts[0]._make(None if f[0] is None else torch.cat(f) for f in zip(*parts, strict=True))


@dataclass(eq=False)  # not frozen, which would take twice as long
class Layout:
    """The order of tokens, and their places in the input and in the dense layout.

    The dense layout is (N,) for tokens, (B, 1, T) for sequences, and (n, 2, T) for pairs, chosen first. Tokens are in
    input order, except after `by_group`, which steps of several chunks need.
    """

    shape: tuple[int, ...]
    target: Tensor  # (n_valid,)
    mask: Tensor  # dense, True at the valid tokens
    rows: Tensor | None = None  # (n_valid,) in the flattened input; None: all
    slots: Tensor | None = None  # (n_valid,) in the flattened dense layout; None: all
    lengths: Tensor | None = None  # (groups, sequences of a group) valid tokens; None if groups are tokens
    side_lengths: Tensor | None = None  # (2,) `lengths` summed over pairs
    group_lengths: Sequence[int] | None = None  # valid tokens of each group
    shortest: int = 0  # smallest of `lengths`
    stacked: bool = False  # all chosen sequences, then all rejected ones
    length: int = 1  # rows, such as a sequence, that `scatter_rows` splits evenly over ranks
    row_of: Tensor | None = None  # the input's rows of the flattened target; None: the same
    split: SplitLayout | None = None  # this rank's part, if ranks split sequences
    # (n_valid,) float32; that of `LogitOptions` is then 1
    temperature: Tensor | None = None

    def local(self, whole_batch: bool = False) -> Layout:
        if self.split is None:
            return self
        return dataclasses.replace(self.split, exchanges=True) if whole_batch else self.split

    @property
    def n_valid(self) -> int:
        return self.target.shape[0]

    @property
    def cut_lengths(self) -> Sequence[int] | None:
        """The lengths that decide where chunks end, equal on all ranks."""
        return self.group_lengths

    @property
    def ranks_cut_alike(self) -> bool:
        """Whether ranks split sequences and compute the same groups, so that all must cut after the same ones."""
        return False

    @property
    def divisors(self) -> Tensor:
        assert self.lengths is not None
        return self.lengths if self.shortest else self.lengths.clamp(min=1)

    @property
    def tokens_per_group(self) -> int:
        return math.prod(self.shape[1:])

    def at_temperature(self, temperature: Tensor, n_valid: Counts = None) -> Self:
        """Return the layout with a `temperature`, shaped like the target."""
        flat = temperature.contiguous().view(-1)
        own = flat if self.slots is None else flat[self.slots]
        expected = "temperature must be positive and finite at each token that counts"
        if not may_read(own, n_valid):
            assert_later(((own > 0) & (own < math.inf)).all(), expected)
        elif own.numel():
            low, high = torch.stack(own.aminmax()).tolist()
            if not 0 < low <= high < math.inf:  # NaN too
                raise ValueError(f"{expected}, got {low:g} to {high:g}")
        split = None if self.split is None else self.split.at_temperature(temperature[..., self.split.ranks.own])
        return dataclasses.replace(self, temperature=own, split=split)

    def input_rows(self, input: Tensor, rows: slice) -> Tensor:
        return along(input, rows) if self.rows is None else input.index_select(0, along(self.rows, rows))

    def _slots_in(self, chunk: Chunk) -> Tensor | None:
        if self.slots is None or chunk.groups.start == 0:
            return None if self.slots is None else along(self.slots, chunk.rows)
        return self.slots[chunk.rows] - chunk.groups.start * self.tokens_per_group

    def dense(self, values: Tensor, chunk: Chunk) -> Tensor:
        """Move a chunk's values (len,) to the dense layout, zero elsewhere."""
        if self.group_lengths is None:
            return values
        n_groups, slots = chunk.groups.stop - chunk.groups.start, self._slots_in(chunk)
        if slots is not None:
            values = values.new_zeros(n_groups * self.tokens_per_group).scatter_(0, slots, values)
        return self._unflatten(values, n_groups)

    def dense_values(self, values: Values, chunk: Chunk) -> Values:
        return values if self.group_lengths is None else mapped(lambda f: self.dense(f, chunk), values)

    def sum_of_shares(self, loss: Tensor) -> Tensor:
        return loss

    def compact(self, dense: Tensor, chunk: Chunk) -> Tensor:
        if self.group_lengths is not None:
            dense = (dense.transpose(0, 1) if self.stacked else dense).reshape(-1)
            slots = self._slots_in(chunk)
            dense = dense if slots is None else dense.index_select(0, slots)
        return dense.contiguous()

    def scatter(self, values: Tensor, fill: float = 0) -> Tensor:
        if self.slots is not None:
            dense = values.new_full((self.mask.numel(), *values.shape[1:]), fill)
            values = (dense.scatter_ if values.ndim == 1 else dense.index_copy_)(0, self.slots, values)
        return self._unflatten(values, self.shape[0])

    def _unflatten(self, flat: Tensor, n_groups: int) -> Tensor:
        if len(self.shape) == 1:
            return flat
        if self.stacked:
            return flat.view(self.shape[1], n_groups, self.shape[2]).transpose(0, 1)
        return flat.view(n_groups, *self.shape[1:])

    def by_group(self) -> Layout:
        if not self.stacked:
            return self
        n_positions = self.mask.numel()
        # Dense (i, s, t) is the target's row s * n_pairs + i.
        rows = self._unflatten(torch.arange(n_positions, device=self.target.device), self.shape[0]).reshape(-1)
        slots = None
        if self.slots is not None:
            slots = torch.nonzero_static(self.mask.reshape(-1), size=self.n_valid).view(-1)
            rows = rows[slots]

        def reordered(x: Tensor) -> Tensor:
            return (x if self.slots is None else x.new_zeros(n_positions).scatter_(0, self.slots, x))[rows]

        target = reordered(self.target)
        temperature = None if self.temperature is None else reordered(self.temperature)
        rows = rows if self.row_of is None else self.row_of[rows]
        return dataclasses.replace(self, target=target, rows=rows, slots=slots, stacked=False, temperature=temperature)

    def join(self, parts: list[Any]) -> Any:
        """Join the chunks' NamedTuples; statistics become dense."""
        values = joined(parts)
        if self.group_lengths is not None or not isinstance(values, TokenStats):
            return values
        return self.scatter_stats({name: f for name, f in values._asdict().items() if f is not None})

    def scatter_stats(self, values: dict[str, Tensor]) -> TokenStats:
        return TokenStats(**{k: self.scatter(v, fill=-1 if k == "argmax" else 0) for k, v in values.items()})

    def arrange(self, x: Tensor) -> Tensor:
        """Move a tensor stacked like the target to the dense layout."""
        if self.group_lengths is None:
            return x.reshape(self.shape)
        sequences_per_group = self.shape[1]
        return x.unflatten(0, (sequences_per_group, -1)).transpose(0, 1)

    def index(self, chunk: Chunk) -> slice | Tensor:
        if self.group_lengths is not None:
            return chunk.groups
        return chunk.rows if self.slots is None else self.slots[chunk.rows]


def lay_out(
    target: Tensor,
    group: Group,
    ignore_index: int,
    vocab_size: int,
    name: str = "target",
    sequences: Sequences = None,
    n_valid: Counts = None,
) -> Layout:
    """Return the layout of a target (B, T), or (N,) for tokens. Waits for the device once, unless it has `n_valid`.

    Sequences are whole and padded; chosen ones come first.
    """
    whole = _lay_out(target, group, ignore_index, vocab_size, name, n_valid)
    if sequences is None:
        return whole
    if isinstance(sequences, Packing):
        row_of = sequences.rows.view(-1)
        rows = row_of if whole.rows is None else row_of[whole.rows]
        return dataclasses.replace(whole, rows=rows, row_of=row_of, length=sum(sequences.lengths))
    return _split(whole, _lay_out(target[..., sequences.own], group, ignore_index, vocab_size, name), sequences)


def _lay_out(
    target: Tensor, group: Group, ignore_index: int, vocab_size: int, name: str, n_valid: Counts = None
) -> Layout:
    target = target.contiguous()
    flat = target.view(-1)
    by_sequence, reads = group != "token" or isinstance(n_valid, tuple), may_read(target, n_valid)
    found = survey(target if by_sequence else flat.view(1, -1), ignore_index, reads)
    summary, lengths, side_lengths = found.summary, None, None
    if group == "token":
        mask = found.mask.view(-1)
    else:
        per_group = 2 if group == "pair" else 1
        mask = found.mask.view(per_group, target.shape[0] // per_group, target.shape[1]).transpose(0, 1)
        counted = summary[0] if summary.shape[2] == 1 else summary[0].sum(-1)  # (B,) or (B, 1)
        lengths = counted.view(per_group, -1).t()
        side_lengths = lengths.sum(0) if group == "pair" else None
    if reads:
        sizes, lows, highs = found.read()
        counts, low, high = [sum(row) for row in sizes], min(map(min, lows), default=0), max(map(max, highs), default=0)
        check_ids(name, low, high, vocab_size, f"ignore_index ({ignore_index}) or ")
        if n_valid is not None:
            _check_counts(n_valid, counts, name, ignore_index)
    else:
        assert n_valid is not None
        counts = [n_valid] if isinstance(n_valid, int) else list(n_valid)
        given = on_device(n_valid, summary.device) if isinstance(n_valid, tuple) else n_valid
        assert_later(
            agrees(summary, given, vocab_size),
            f"{name} must be ignore_index or an index into the vocabulary, 0 to {vocab_size - 1}, and n_valid must "
            f"count the tokens of {name} that are not ignore_index",
        )

    total, n_groups = sum(counts), mask.shape[0]
    slots = None if total == flat.numel() else torch.nonzero_static(found.mask.view(-1), size=total).view(-1)
    return Layout(
        shape=mask.shape,
        target=flat if slots is None else flat[slots],
        rows=slots,
        slots=slots,
        mask=mask,
        lengths=lengths,
        side_lengths=side_lengths,
        # A pair's sequences are n_groups rows apart.
        group_lengths=None if group == "token" else [sum(counts[i::n_groups]) for i in range(n_groups)],
        shortest=min(counts, default=0),
        stacked=group == "pair" and n_groups > 1,
        length=target.shape[-1],
    )


def _check_counts(n_valid: int | tuple[int, ...], counts: list[int], name: str, ignore_index: int) -> None:
    of = f"the number of tokens of {name} that are not ignore_index ({ignore_index})"
    if isinstance(n_valid, int):
        if n_valid != sum(counts):
            raise ValueError(f"n_valid must be {sum(counts)}, {of}, got {n_valid}")
        return
    for i, (given, count) in enumerate(zip(n_valid, counts, strict=True)):
        if given != count:
            raise ValueError(f"n_valid[{i}] must be {count}, {of} in sequence {i}, got {given}")


def lay_out_every(shape: Sequence[int], split: SequenceSplit | None = None, n_valid: int | None = None) -> Layout:
    """Return the layout if all tokens (B, T) or (N,) are valid."""
    n, length = math.prod(shape), shape[-1]
    if n_valid is not None and n_valid != n:
        raise ValueError(f"n_valid must be {n}, all positions of input, without a target or mask, got {n_valid}")
    if split is None:
        return _lay_out_every(n, length)
    return _split(_lay_out_every(split.batch * split.length, split.length), _lay_out_every(n, length), split)


def _lay_out_every(n: int, length: int) -> Layout:
    mask = torch.empty(n, dtype=torch.bool, device="meta")
    target = torch.empty(n, dtype=torch.int64, device="meta")
    return Layout((n,), target, mask, length=length)


@dataclass(eq=False)
class SplitLayout(Layout):
    """This rank's tokens of sequences split over ranks.

    If `exchanges`, ranks gather each chunk's dense values, so that every objective sees whole groups. Otherwise groups
    are tokens, and each rank computes its share.
    """

    whole: Layout = field(kw_only=True)
    ranks: SequenceSplit = field(kw_only=True)
    longest: Sequence[int] | None = field(kw_only=True)  # per group, the largest of the ranks' `group_lengths`
    exchanges: bool = field(kw_only=True)

    @property
    def cut_lengths(self) -> Sequence[int] | None:
        return self.longest

    @property
    def ranks_cut_alike(self) -> bool:
        return self.longest is not None

    def _gather(self, dense: Values) -> Values:
        if self.group_lengths is not None:
            return self.ranks.whole_values(dense)
        rows = mapped(lambda f: f.view(self.ranks.batch, self.ranks.own_length), dense)
        return mapped(lambda f: f.reshape(-1), self.ranks.whole_values(rows))

    def dense_values(self, values: Values, chunk: Chunk) -> Values:
        if not self.exchanges:
            return super().dense_values(values, chunk)
        if self.group_lengths is not None:
            return self._gather(super().dense_values(values, chunk))
        found, slots = self._gather(mapped(self.scatter, values)), self.whole.slots
        return found if slots is None else mapped(lambda f: f[slots], found)

    def compact(self, dense: Tensor, chunk: Chunk) -> Tensor:
        if not self.exchanges:
            return super().compact(dense, chunk)
        if self.group_lengths is not None:
            return super().compact(dense[..., self.ranks.own], chunk)
        whole = self.whole.scatter(dense).view(self.ranks.batch, self.ranks.length)
        own = whole[:, self.ranks.own].reshape(-1)
        return own if self.slots is None else own[self.slots]

    def index(self, chunk: Chunk) -> slice | Tensor:
        if self.group_lengths is not None:
            return super().index(chunk)
        if self.exchanges:
            every = slice(0, self.whole.n_valid)
            return self.whole.index(Chunk(every, every))
        own = super().index(chunk)
        if isinstance(own, slice):
            own = torch.arange(own.start, own.stop, device=self.target.device)
        return self.ranks.slots(own)

    def scatter_stats(self, values: dict[str, Tensor]) -> TokenStats:
        return self._gather(super().scatter_stats(values))

    def join(self, parts: list[Any]) -> Any:
        if self.group_lengths is not None:
            return super().join(parts)
        if self.exchanges:
            return self.whole.join(parts)
        values = super().join(parts)
        return values if isinstance(values, TokenStats) else self._gather(mapped(self.scatter, values))

    def sum_of_shares(self, loss: Tensor) -> Tensor:
        return loss if self.exchanges else self.ranks.sum(loss)


def _split(whole: Layout, own: Layout, ranks: SequenceSplit) -> Layout:
    longest = None
    if own.group_lengths is not None:
        parts = whole.mask.split(list(ranks.lengths), -1)
        longest = torch.stack([mask.flatten(1).sum(1) for mask in parts]).amax(0).tolist()
    part = SplitLayout(**vars(own), whole=whole, ranks=ranks, longest=longest, exchanges=longest is not None)
    return dataclasses.replace(whole, split=part)
