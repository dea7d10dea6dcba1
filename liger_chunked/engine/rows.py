"""Which tokens count, in which order, and how their values return to the batch (docs/how-it-works.md).

    rows = select_rows(target, "pair", ...)     the tokens that have a target
    rows = rows.with_side("temperature", x)     a tensor that travels with them
    rows = rows.on_this_rank()                  the part that this rank computes
    rows = rows.in_group_order()                for a step of several chunks

    x = rows.take(hidden, chunk.row_slice)      a chunk's hidden states
    v = rows.for_objective(statistics, chunk)   what the objective of its groups sees
    g = rows.compact(gradient, chunk)           the gradient, one value per token again
    values = rows.join(parts)                   the values of all chunks

Values are *compact*, one per token that counts, or *dense*, one per position of the batch. Dense values are (N,) if
groups are tokens, (B, 1, T) if they are sequences, and (n, 2, T), chosen first, if they are pairs.

    TokenRows, GroupRows      groups are tokens; groups are sequences or pairs
    TokenShares               ranks split sequences, and each computes its share of a loss over tokens
    GatheredTokens            the same, for an objective that needs all tokens at once
    GatheredGroups            ranks split sequences, and all compute every group
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from liger_chunked.engine.collectives import Values, mapped
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.known import Counts, check_ids, host_may_sync, on_device
from liger_chunked.engine.packed import Packing, Sequences
from liger_chunked.engine.sequence import SequenceSplit
from liger_chunked.kernels import assert_counts, survey
from liger_chunked.kernels.operands import along
from liger_chunked.types import TokenStats

Group = Literal["token", "sequence", "pair"]
SEQUENCES_PER_GROUP: Mapping[str, int] = {"sequence": 1, "pair": 2}


def joined(parts: Sequence[Values]) -> Values:
    """Concatenate NamedTuples of tensors, field by field."""
    if len(parts) == 1:
        return parts[0]
    return parts[0]._make(None if f[0] is None else torch.cat(f) for f in zip(*parts, strict=True))


def _spread(values: Tensor, index: Tensor, n_positions: int, fill: float = 0) -> Tensor:
    """Return (n_positions, ...): `values` (n, ...) at `index`, and `fill` elsewhere."""
    spread = values.new_full((n_positions, *values.shape[1:]), fill)
    return (spread.scatter_ if values.ndim == 1 else spread.index_copy_)(0, index, values)


class Groups(NamedTuple):
    """The sequences or pairs of a batch.

    Attributes:
        token_counts: (B,) int64, the tokens of each sequence that count, in the target's order, on its device.
        per_group: sequences of a group.
        host_counts: the tokens of each group, known to the host.
        cut_counts: the counts that decide where chunks end. If ranks split sequences, these are the counts of the rank
            that has most tokens of a group, because all ranks must cut after the same groups; else `host_counts`.
        shortest: the smallest of `lengths`.
        stacked: whether tokens are in the target's order, all chosen sequences before all rejected ones. Chunks of
            pairs need the two of a pair side by side (`Rows.in_group_order`).
    """

    token_counts: Tensor
    per_group: int
    host_counts: tuple[int, ...]
    cut_counts: tuple[int, ...]
    shortest: int
    stacked: bool

    @property
    def lengths(self) -> Tensor:
        """(groups, sequences of a group): tokens that count."""
        return self.token_counts.view(self.per_group, -1).t()

    @property
    def divisors(self) -> Tensor:
        """`lengths`, at least 1."""
        return self.lengths if self.shortest else self.lengths.clamp(min=1)

    @property
    def side_lengths(self) -> Tensor:
        """(2,) tokens of all chosen and of all rejected sequences, of pairs."""
        return self.token_counts.view(self.per_group, -1).sum(1)


class Split(NamedTuple):
    """Sequences that ranks split: the tokens of this rank, and which positions each rank holds."""

    local: Rows
    ranks: SequenceSplit


@dataclass(eq=False)  # not frozen, which would take twice as long to create
class Rows(abc.ABC):
    """The tokens that count, in the order in which a step computes them.

    Attributes:
        n_valid: their number.
        dense_shape: of values per position, see above.
        target: (n_valid,) ids; None if the loss has none, and all tokens count.
        target_mask: True at the tokens that count, in the target's order; None without a target.
        input_index: (n_valid,) each token's row of the flattened input; None: all rows, in order.
        dense_index: (n_valid,) each token's place in the flattened dense values; None: all places, in order.
        side: by name, (n_valid, ...) inputs of tokens that travel with them: "temperature", float32, in which case that
            of `LogitOptions` is 1, and "candidates", int64 ids.
        groups: None if groups are tokens.
        sequence_length: rows of a sequence of the input, or all rows of a packed one: ranks that split hidden states
            split these evenly.
        split: None unless ranks split sequences. All other fields then describe the whole batch.
        host_may_sync: whether the host may wait for the device, because the caller has given no counts.
    """

    n_valid: int
    dense_shape: tuple[int, ...]
    target: Tensor | None
    target_mask: Tensor | None
    input_index: Tensor | None = None
    dense_index: Tensor | None = None
    side: dict[str, Tensor] = field(default_factory=dict)
    groups: Groups | None = None
    sequence_length: int = 1
    split: Split | None = None
    host_may_sync: bool = False

    # Whether ranks exchange statistics, so that a dry run of one rank would wait for the others.
    gathers_statistics: ClassVar[bool] = False
    # Whether all ranks compute the same groups in chunks, and so must cut after the same ones.
    ranks_cut_alike: ClassVar[bool] = False

    @property
    def n_positions(self) -> int:
        """Positions of the batch, with those that do not count."""
        return math.prod(self.dense_shape)

    @property
    def mask(self) -> Tensor | None:
        """`dense_shape`, True at the tokens that count; None without a target."""
        return None if self.target_mask is None else self.arrange(self.target_mask)

    def take(self, input: Tensor, row_slice: slice) -> Tensor:
        """Return some tokens' rows of a flattened input (N, ...)."""
        if self.input_index is None:
            return along(input, row_slice)
        return input.index_select(0, along(self.input_index, row_slice))

    def with_side(self, name: str, values: Tensor) -> Self:
        """Add an input of tokens that travels with them. `values` (n_positions, ...) are in the target's order."""
        side = {**self.side, name: values if self.dense_index is None else values[self.dense_index]}
        split = self.split
        if split is not None:
            split = split._replace(local=split.local.with_side(name, split.ranks.local_positions(values)))
        return replace(self, side=side, split=split)

    def tensors(self) -> dict[str, Tensor | None]:
        """Return, by name, what a later backward reads: ids, indices and side inputs."""
        indices = {"input_index": self.input_index, "dense_index": self.dense_index}
        return {"target": self.target, **indices, **self.side}

    def without_tensors(self) -> Self:
        """Return rows that hold none of `tensors`, nor the mask, which no backward reads."""
        return replace(self, target=None, target_mask=None, input_index=None, dense_index=None, side={})

    def with_tensors(self, tensors: Mapping[str, Tensor | None]) -> Self:
        """Return the rows of `without_tensors` with what `tensors` returned before."""
        side = {name: x for name, x in tensors.items() if x is not None}
        target, input_index, dense_index = (side.pop(name, None) for name in ("target", "input_index", "dense_index"))
        return replace(self, target=target, input_index=input_index, dense_index=dense_index, side=side)

    def reordered(self, order: Tensor) -> Self:
        """Return the tokens in another order. `order` (n_valid,) holds their places in this one."""
        return replace(
            self,
            target=None if self.target is None else self.target[order],
            input_index=order if self.input_index is None else self.input_index[order],
            dense_index=order if self.dense_index is None else self.dense_index[order],
            side={name: x[order] for name, x in self.side.items()},
        )

    def in_group_order(self) -> Rows:
        """Return the tokens group by group, as chunks of several groups need them."""
        return self

    @abc.abstractmethod
    def on_this_rank(self, whole_batch: bool = False) -> Rows:
        """Return what this rank computes: all tokens, unless ranks split sequences.

        Args:
            whole_batch: whether the objective needs all groups at once.
        """

    @abc.abstractmethod
    def arrange(self, x: Tensor) -> Tensor:
        """Return dense values from a tensor stacked like the target, or one with a value for each sequence."""

    @abc.abstractmethod
    def for_objective(self, values: Values, chunk: Chunk) -> Values:
        """Return what the objective of a chunk sees: a NamedTuple of tensors, from one of compact (len,) tensors."""

    @abc.abstractmethod
    def compact(self, dense: Tensor, chunk: Chunk) -> Tensor:
        """Return a chunk's values (len,) from a tensor like those of `for_objective`."""

    @abc.abstractmethod
    def group_index(self, chunk: Chunk) -> slice | Tensor:
        """Return what selects the chunk's groups from dense values of the batch."""

    @abc.abstractmethod
    def join(self, parts: list[Any]) -> Any:
        """Return the values of all chunks, from a NamedTuple per chunk. Statistics are dense."""

    @abc.abstractmethod
    def scatter(self, values: Tensor, fill: float = 0) -> Tensor:
        """Return dense values from compact ones (n_valid, ...)."""

    def scatter_stats(self, values: Mapping[str, Tensor]) -> TokenStats:
        """Return dense statistics from compact ones; tokens that do not count have 0, and argmax -1."""
        return TokenStats(**{k: self.scatter(x, fill=-1 if k == "argmax" else 0) for k, x in values.items()})

    def sum_of_shares(self, loss: Tensor) -> Tensor:
        """Return the batch's loss from what this rank's chunks sum to."""
        return loss


def _computed(stats: TokenStats) -> dict[str, Tensor]:
    return {name: x for name, x in stats._asdict().items() if x is not None}


@dataclass(eq=False)
class TokenRows(Rows):
    """Groups are tokens. The objective sees compact values, and `group_index` selects these from dense ones."""

    def on_this_rank(self, whole_batch: bool = False) -> Rows:
        if self.split is None:
            return self
        local, ranks = self.split
        if whole_batch:
            return GatheredTokens(**vars(local), ranks=ranks, batch_rows=self)
        return TokenShares(**vars(local), ranks=ranks)

    def arrange(self, x: Tensor) -> Tensor:
        return x.reshape(self.dense_shape)

    def for_objective(self, values: Values, chunk: Chunk) -> Values:
        return values

    def compact(self, dense: Tensor, chunk: Chunk) -> Tensor:
        return dense.contiguous()

    def group_index(self, chunk: Chunk) -> slice | Tensor:
        return chunk.row_slice if self.dense_index is None else self.dense_index[chunk.row_slice]

    def join(self, parts: list[Any]) -> Any:
        values = joined(parts)
        if self.dense_index is None or not isinstance(values, TokenStats):
            return values
        return self.scatter_stats(_computed(values))

    def scatter(self, values: Tensor, fill: float = 0) -> Tensor:
        return values if self.dense_index is None else _spread(values, self.dense_index, self.n_positions, fill)


@dataclass(eq=False)
class GroupRows(Rows):
    """Groups are sequences or pairs. The objective sees dense values of whole groups."""

    groups: Groups = field(kw_only=True)  # never None

    def on_this_rank(self, whole_batch: bool = False) -> Rows:
        return self if self.split is None else GatheredGroups(**vars(self.split.local), ranks=self.split.ranks)

    def in_group_order(self) -> GroupRows:
        if not self.groups.stacked:
            return self
        device, dense_index = self.groups.lengths.device, None
        # Dense (i, s, t) is the target's row s * n_pairs + i.
        order = self._unflatten(torch.arange(self.n_positions, device=device), self.dense_shape[0]).reshape(-1)
        if self.dense_index is not None:
            mask = self.mask
            assert mask is not None
            # The host knows the number of tokens: `nonzero` would wait for the device to count them.
            dense_index = torch.nonzero_static(mask.reshape(-1), size=self.n_valid).view(-1)
            tokens = torch.arange(self.n_valid, device=device)
            token_at = torch.empty_like(order).scatter_(0, self.dense_index, tokens)  # by the target's position
            order = token_at[order[dense_index]]
        return replace(self.reordered(order), dense_index=dense_index, groups=self.groups._replace(stacked=False))

    def _unflatten(self, flat: Tensor, n_groups: int) -> Tensor:
        _, sequences, length = self.dense_shape
        if self.groups.stacked:
            return flat.view(sequences, n_groups, length).transpose(0, 1)
        return flat.view(n_groups, sequences, length)

    def _position_in_chunk(self, chunk: Chunk) -> Tensor | None:
        """Return the places of a chunk's tokens in the flattened dense values of its groups."""
        first_group = chunk.group_slice.start
        if self.dense_index is None or first_group == 0:
            return None if self.dense_index is None else along(self.dense_index, chunk.row_slice)
        return self.dense_index[chunk.row_slice] - first_group * math.prod(self.dense_shape[1:])

    def arrange(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.dense_shape[1], -1)).transpose(0, 1)

    def for_objective(self, values: Values, chunk: Chunk) -> Values:
        n_groups = chunk.group_slice.stop - chunk.group_slice.start
        index = self._position_in_chunk(chunk)
        if index is not None:
            n_positions = n_groups * math.prod(self.dense_shape[1:])
            values = mapped(lambda x: _spread(x, index, n_positions), values)
        return values._make([None if x is None else self._unflatten(x, n_groups) for x in values])

    def compact(self, dense: Tensor, chunk: Chunk) -> Tensor:
        flat = (dense.transpose(0, 1) if self.groups.stacked else dense).reshape(-1)
        index = self._position_in_chunk(chunk)
        return (flat if index is None else flat.index_select(0, index)).contiguous()

    def group_index(self, chunk: Chunk) -> slice | Tensor:
        return chunk.group_slice

    def join(self, parts: list[Any]) -> Any:
        return joined(parts)

    def scatter(self, values: Tensor, fill: float = 0) -> Tensor:
        if self.dense_index is not None:
            values = _spread(values, self.dense_index, self.n_positions, fill)
        return self._unflatten(values, self.dense_shape[0])


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
        return self.ranks.dense_index(local)

    def join(self, parts: list[Any]) -> Any:
        values = joined(parts)
        if isinstance(values, TokenStats):
            return self.scatter_stats(_computed(values))
        return _gather_tokens(mapped(self.scatter, values), self.ranks)

    def scatter_stats(self, values: Mapping[str, Tensor]) -> TokenStats:
        return _gather_tokens(super().scatter_stats(values), self.ranks)

    def sum_of_shares(self, loss: Tensor) -> Tensor:
        return self.ranks.sum(loss)


@dataclass(eq=False)
class GatheredTokens(TokenRows):
    """This rank's tokens of sequences split over ranks. The objective sees the tokens of all ranks, in one chunk."""

    ranks: SequenceSplit = field(kw_only=True)
    batch_rows: TokenRows = field(kw_only=True)  # of all ranks
    gathers_statistics: ClassVar[bool] = True

    def for_objective(self, values: Values, chunk: Chunk) -> Values:
        gathered, index = _gather_tokens(mapped(self.scatter, values), self.ranks), self.batch_rows.dense_index
        return gathered if index is None else mapped(lambda x: x[index], gathered)

    def compact(self, dense: Tensor, chunk: Chunk) -> Tensor:
        local = self.ranks.local_positions(self.batch_rows.scatter(dense))
        return local if self.dense_index is None else local[self.dense_index]

    def group_index(self, chunk: Chunk) -> slice | Tensor:
        all_tokens = slice(0, self.batch_rows.n_valid)
        return self.batch_rows.group_index(Chunk(all_tokens, all_tokens))

    def join(self, parts: list[Any]) -> Any:
        return self.batch_rows.join(parts)


@dataclass(eq=False)
class GatheredGroups(GroupRows):
    """This rank's part of groups split over ranks. Objectives see whole groups: ranks gather each chunk's values."""

    ranks: SequenceSplit = field(kw_only=True)
    gathers_statistics: ClassVar[bool] = True
    ranks_cut_alike: ClassVar[bool] = True

    def for_objective(self, values: Values, chunk: Chunk) -> Values:
        return self.ranks.whole_values(super().for_objective(values, chunk))

    def compact(self, dense: Tensor, chunk: Chunk) -> Tensor:
        return super().compact(dense[..., self.ranks.local_slice], chunk)

    def scatter_stats(self, values: Mapping[str, Tensor]) -> TokenStats:
        return self.ranks.whole_values(super().scatter_stats(values))


def select_rows(
    target: Tensor,
    group: Group,
    ignore_index: int,
    vocab_size: int,
    name: str = "target",
    sequences: Sequences = None,
    n_valid: Counts = None,
) -> Rows:
    """Return the tokens of a target (B, T), or (N,) if groups are tokens, that are not `ignore_index`.

    Waits for the device once, unless it has `n_valid`.

    Args:
        target: whole sequences, padded; chosen before rejected ones.
        name: of the target, for messages.
        sequences: how the input holds these sequences, if not like the target.

    Raises:
        ValueError: an id is outside the vocabulary, or `n_valid` is wrong.
    """
    rows = _select(target, group, ignore_index, vocab_size, name, n_valid)
    if sequences is None:
        return rows
    if isinstance(sequences, Packing):
        input_index = sequences.rows.view(-1)
        if rows.input_index is not None:
            input_index = input_index[rows.input_index]
        return replace(rows, input_index=input_index, sequence_length=sum(sequences.lengths))
    local = _select(target[..., sequences.local_slice], group, ignore_index, vocab_size, name)
    if local.groups is not None:
        mask = rows.mask
        assert mask is not None
        counts_by_rank = [part.flatten(1).sum(1) for part in mask.split(list(sequences.lengths), -1)]
        cut_counts = tuple(torch.stack(counts_by_rank).amax(0).tolist())
        local = replace(local, groups=local.groups._replace(cut_counts=cut_counts))
    return replace(rows, split=Split(local, sequences))


def _select(
    target: Tensor, group: Group, ignore_index: int, vocab_size: int, name: str, n_valid: Counts = None
) -> Rows:
    target = target.contiguous()
    flat, may_sync = target.view(-1), host_may_sync(target, n_valid)
    by_sequence = group != "token" or isinstance(n_valid, tuple)
    surveyed = survey(target if by_sequence else flat.view(1, -1), ignore_index, may_sync)
    if may_sync:
        sizes, lows, highs = surveyed.read()
        host_counts = [sum(row) for row in sizes]
        low, high = min(map(min, lows), default=0), max(map(max, highs), default=0)
        if low < 0 or high >= vocab_size:
            check_ids(name, low, high, vocab_size, ignore_index)
        if n_valid is not None:
            _check_n_valid(n_valid, host_counts, name, ignore_index)
    else:
        assert n_valid is not None
        host_counts = [n_valid] if isinstance(n_valid, int) else list(n_valid)
        # Without ignored tokens, their number says how many each sequence has.
        expected: Tensor | int = sum(host_counts)
        if isinstance(n_valid, tuple) and expected != flat.numel():
            expected = on_device(n_valid, surveyed.summary.device)
        assert_counts(
            surveyed.summary,
            expected,
            vocab_size,
            f"{name} must be ignore_index or an index into the vocabulary, 0 to {vocab_size - 1}, and n_valid must "
            f"count the tokens of {name} that are not ignore_index",
        )
    n_tokens, index = sum(host_counts), None
    if n_tokens != flat.numel():
        index = torch.nonzero_static(surveyed.mask.view(-1), size=n_tokens).view(-1)
        flat = flat[index]
    mask, length = surveyed.mask, target.shape[-1]
    if group == "token":
        n_positions = target.numel()
        return TokenRows(
            n_tokens, (n_positions,), flat, mask, index, index, sequence_length=length, host_may_sync=may_sync
        )
    counts = surveyed.summary[0]  # (B, blocks of a kernel)
    counts = counts.view(-1) if counts.shape[1] == 1 else counts.sum(-1)
    groups = groups_of(counts, host_counts, SEQUENCES_PER_GROUP[group])
    dense_shape = len(groups.host_counts), groups.per_group, length
    return GroupRows(
        n_tokens, dense_shape, flat, mask, index, index,
        groups=groups, sequence_length=length, host_may_sync=may_sync,
    )  # fmt: skip


def groups_of(token_counts: Tensor, sequence_counts: Sequence[int], per_group: int) -> Groups:
    """Return the groups of sequences whose numbers of tokens, (B,), are on the device and on the host."""
    n_groups = len(sequence_counts) // per_group
    # A pair's sequences are `n_groups` rows apart.
    host_counts = tuple([sum(sequence_counts[i::n_groups]) for i in range(n_groups)])
    return Groups(
        token_counts=token_counts,
        per_group=per_group,
        host_counts=host_counts,
        cut_counts=host_counts,
        shortest=min(sequence_counts, default=0),
        stacked=per_group > 1 and n_groups > 1,
    )


def _check_n_valid(n_valid: int | tuple[int, ...], counts: list[int], name: str, ignore_index: int) -> None:
    of = f"the number of tokens of {name} that are not ignore_index ({ignore_index})"
    if isinstance(n_valid, int):
        if n_valid != sum(counts):
            raise ValueError(f"n_valid must be {sum(counts)}, {of}, got {n_valid}")
        return
    for i, (given, count) in enumerate(zip(n_valid, counts, strict=True)):
        if given != count:
            raise ValueError(f"n_valid[{i}] must be {count}, {of} in sequence {i}, got {given}")


def all_rows(shape: Sequence[int], split: SequenceSplit | None = None, n_valid: int | None = None) -> Rows:
    """Return all tokens (B, T) or (N,) of a loss without a target; groups are tokens."""
    n, length = math.prod(shape), shape[-1]
    if n_valid is not None and n_valid != n:
        raise ValueError(f"n_valid must be {n}, all positions of input, without a target or mask, got {n_valid}")
    local = TokenRows(n, (n,), None, None, sequence_length=length)
    if split is None:
        return local
    n = split.batch * split.length
    return TokenRows(n, (n,), None, None, sequence_length=split.length, split=Split(local, split))
