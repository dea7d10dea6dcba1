"""Which tokens count, in which order, and how their values return to the batch (docs/how-it-works.md).

    rows = select_rows(target, "pair", ...)         the tokens that have a target
    rows = rows.with_side("temperature", x)         a tensor that travels with them

    x = rows.take(hidden, chunk.row_slice)          (n, H), a chunk's hidden states
    v = rows.for_objective(statistics, chunk)       what the objective of the chunk's groups sees
    g = rows.from_objective(gradient, chunk)        (n,), its gradient, one value per token again
    stats = rows.join(parts)                        dense statistics of all chunks, from those that objectives saw

A tensor of tokens has one of two layouts:

    compact   (n_valid,), one value per token that counts, in the order of the step; of a chunk, (n,)
    dense     one value per position of the batch, `fill` where none counts: (N,) if groups are tokens,
              (B, 1, T) if they are sequences, (pairs, 2, T), chosen first, if they are pairs

The objective sees compact values of tokens (`TokenRows`), and dense ones of sequences and pairs (`GroupRows`). Where
ranks split sequences, `rank_rows` has rows whose objective sees the values of all ranks.

In the capture of a CUDA graph the host cannot know how many tokens count. `select_rows` then returns rows of all
positions, with a mask: objectives see 0 at ignored tokens, whose gradients are 0. All products take these along, so
their hidden states must be finite.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from liger_chunked.engine.checks import check_ids, host_may_sync
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.packed import Packing, Sequences
from liger_chunked.engine.sequence import SequenceSplit
from liger_chunked.kernels import find_tokens, survey
from liger_chunked.kernels.operands import Values, along, joined, mapped
from liger_chunked.kernels.survey import Survey
from liger_chunked.shapes import shapes_only
from liger_chunked.types import TokenStats

Group = Literal["token", "sequence", "pair"]
SEQUENCES_PER_GROUP: Mapping[str, int] = {"sequence": 1, "pair": 2}


def at_least_1(count: int | Tensor, dtype: torch.dtype) -> int | Tensor:
    """Return a count, at least 1; a tensor becomes one of `dtype`."""
    return count.clamp(min=1).to(dtype) if isinstance(count, Tensor) else max(1, count)


def hide_ignored(values: Values, counted: Tensor | None) -> Values:
    """Return a NamedTuple of tensors (...) or (..., K) with 0 where `counted` (...) is False, and -1 in `argmax`."""
    if counted is None:
        return values

    def hidden(name: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return torch.where(counted if x.ndim == counted.ndim else counted[..., None], x, -1 if name == "argmax" else 0)

    return values._make(map(hidden, values._fields, values))


def _placed(values: Tensor, index: Tensor, n_positions: int, fill: float = 0) -> Tensor:
    """Return (n_positions, ...): `values` (n, ...) at `index` (n,), and `fill` elsewhere."""
    placed = values.new_full((n_positions, *values.shape[1:]), fill)
    # `scatter_` would need an index as wide as values of several columns.
    return (placed.scatter_ if values.ndim == 1 else placed.index_copy_)(0, index, values)


class Groups(NamedTuple):
    """The sequences or pairs of a batch.

    Attributes:
        token_counts: (B,) int64, the tokens of each sequence that count, group by group, on the target's device.
        per_group: sequences of a group.
        host_counts: the tokens of each group, known to the host.
        cut_counts: the counts that decide where chunks end. If ranks split sequences, these are the counts of the rank
            that has most tokens of a group, because all ranks must cut after the same groups; else `host_counts`.
        shortest: the smallest of `lengths`.
    """

    token_counts: Tensor
    per_group: int
    host_counts: tuple[int, ...]
    cut_counts: tuple[int, ...]
    shortest: int

    @property
    def lengths(self) -> Tensor:
        """(groups, sequences of a group): tokens that count."""
        return self.token_counts.view(-1, self.per_group)

    @property
    def divisors(self) -> Tensor:
        """`lengths`, at least 1."""
        return self.lengths if self.shortest else self.lengths.clamp(min=1)

    @property
    def batch_lengths(self) -> Tensor:
        """(2,) tokens of all chosen and of all rejected sequences, of pairs."""
        return self.lengths.sum(0)


class Split(NamedTuple):
    """Sequences that ranks split: the tokens of this rank, and which positions each rank holds."""

    local: Rows
    ranks: SequenceSplit


@dataclass(eq=False)  # not frozen, which would take twice as long to create
class Rows(abc.ABC):
    """The tokens that count, in the order in which a step computes them.

    Attributes:
        n_valid: their number; with `counted`, that of all positions.
        dense_shape: of dense values.
        target: (n_valid,) ids; None if the loss has none, and all tokens count.
        mask: `dense_shape`, True at the tokens that count; None without a target.
        input_index: (n_valid,) each token's row of the flattened input; None: all rows, in order.
        dense_index: (n_valid,) each token's place among the flattened dense values; None: all places, in order.
        token_at: (N,) int32, of each row of the flattened input the number of its token in the order of the step, -1
            where none counts. None: unknown.
        side: by name, (n_valid, ...) inputs of tokens that travel with them, because the head reads them:
            "temperature", float32, in which case that of `LogitOptions` is 1, and "candidates", int64 ids. What only an
            objective reads, such as advantages, is no side input: it stays dense, and `group_index` selects from it.
        groups: None if groups are tokens.
        sequence_length: rows of a sequence of the input, or all rows of a packed one: ranks that split hidden states
            split these evenly.
        split: None unless ranks split sequences. All other fields then describe the whole batch.
        counted: (n_valid,) bool, True at the tokens that count, if the rows are all positions because the host does not
            know which count (`select_rows`). `target` is then 0 at the others. None: all count.
    """

    n_valid: int
    dense_shape: tuple[int, ...]
    target: Tensor | None
    mask: Tensor | None
    input_index: Tensor | None = None
    dense_index: Tensor | None = None
    token_at: Tensor | None = None
    side: dict[str, Tensor] = field(default_factory=dict)
    groups: Groups | None = None
    sequence_length: int = 1
    split: Split | None = None
    counted: Tensor | None = None

    # Whether ranks exchange statistics.
    gathers_statistics: ClassVar[bool] = False
    # Whether all ranks compute the same groups in chunks, and so must cut after the same ones.
    ranks_cut_alike: ClassVar[bool] = False

    @property
    def n_positions(self) -> int:
        """Positions of the batch, with those that do not count."""
        return math.prod(self.dense_shape)

    @property
    def n_counted(self) -> int | Tensor:
        """The number of tokens that count; a tensor () int64 if the device alone knows it."""
        return self.n_valid if self.counted is None else self.counted.sum()

    def divisor(self, dtype: torch.dtype) -> int | Tensor:
        """Return `n_counted`, at least 1; a tensor () of `dtype` if the device alone knows it."""
        return at_least_1(self.n_counted, dtype)

    def counted_in(self, chunk: Chunk) -> Tensor | None:
        """Return `counted` of a chunk's rows."""
        return None if self.counted is None else along(self.counted, chunk.row_slice)

    def fill_ignored(self, x: Tensor, fill: float = 0) -> Tensor:
        """Return `x` (n_positions, ...), flattened dense values, with `fill` at ignored tokens if rows hold those."""
        if self.counted is None:
            return x
        assert self.mask is not None
        return torch.where(self.mask.view(-1, *[1] * (x.ndim - 1)), x, fill)

    def take(self, input: Tensor, row_slice: slice) -> Tensor:
        """Return some tokens' rows of a flattened input (N, ...)."""
        if self.input_index is None:
            return along(input, row_slice)
        return input.index_select(0, along(self.input_index, row_slice))

    def with_side(self, name: str, values: Tensor) -> Self:
        """Add an input of tokens that travels with them. `values` (n_positions, ...) are in the target's order."""
        dense = self.fill_ignored(self._by_group(values), 1 if name == "temperature" else 0)  # or anything is there
        side = {**self.side, name: self.to_compact(dense)}
        split = self.split
        if split is not None:
            split = split._replace(local=split.local.with_side(name, split.ranks.local_positions(values)))
        return replace(self, side=side, split=split)

    def reordered(self, order: Tensor) -> Self:
        """Return the tokens in another order. `order` (n_valid,) holds their places in this one."""
        return replace(
            self,
            target=None if self.target is None else self.target[order],
            input_index=order if self.input_index is None else self.input_index[order],
            dense_index=order if self.dense_index is None else self.dense_index[order],
            token_at=None,
            counted=None if self.counted is None else self.counted[order],
            side={name: x[order] for name, x in self.side.items()},
        )

    def _by_group(self, x: Tensor) -> Tensor:
        """Return flattened dense values (n_positions, ...) from those of the target's positions."""
        return x

    @abc.abstractmethod
    def arrange(self, x: Tensor) -> Tensor:
        """Return dense values from a tensor stacked like the target, (B, T) or (N,), or one of its sequences, (B,)."""

    @abc.abstractmethod
    def for_objective(self, values: Values, chunk: Chunk) -> Values:
        """Return what the objective of a chunk sees: a NamedTuple of tensors, from one of compact (n,) tensors."""

    @abc.abstractmethod
    def from_objective(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Return compact values (n,) from a tensor in the layout that `for_objective` gave, such as a gradient."""

    @abc.abstractmethod
    def group_index(self, chunk: Chunk) -> slice | Tensor:
        """Return what selects the values of the chunk's groups from a dense tensor of the batch."""

    @abc.abstractmethod
    def join(self, parts: list[TokenStats]) -> TokenStats:
        """Return the batch's dense statistics, from what the objective saw of each chunk."""

    def join_compact(self, parts: list[Values]) -> Values:
        """Return the step's values (n_valid,), from compact ones of each chunk."""
        return joined(parts)

    @abc.abstractmethod
    def to_dense(self, x: Tensor, fill: float = 0) -> Tensor:
        """Return dense values from compact ones (n_valid, ...)."""

    def to_compact(self, x: Tensor) -> Tensor:
        """Return compact values from dense ones of the batch's positions, flattened."""
        return x if self.dense_index is None else x[self.dense_index]

    def stats_to_dense(self, stats: Mapping[str, Tensor | None]) -> TokenStats:
        """Return dense statistics from compact ones, by name; tokens that do not count have 0, and argmax -1."""
        found = [(name, x) for name, x in stats.items() if x is not None]
        return TokenStats(**{name: self.to_dense(x, fill=-1 if name == "argmax" else 0) for name, x in found})

    @property
    def every(self) -> Chunk:
        """All tokens and groups, as one chunk."""
        return Chunk(slice(0, self.n_valid), slice(0, self.dense_shape[0]))

    def sum_of_shares(self, loss: Tensor) -> Tensor:
        """Return the batch's loss from what this rank's chunks sum to."""
        return loss


@dataclass(eq=False)
class TokenRows(Rows):
    """Groups are tokens. The objective sees compact values, and `group_index` selects these from dense ones."""

    def arrange(self, x: Tensor) -> Tensor:
        return x.reshape(self.dense_shape)

    def for_objective(self, values: Values, chunk: Chunk) -> Values:
        return values

    def from_objective(self, x: Tensor, chunk: Chunk) -> Tensor:
        return x.contiguous()

    def group_index(self, chunk: Chunk) -> slice | Tensor:
        return chunk.row_slice if self.dense_index is None else self.dense_index[chunk.row_slice]

    def join(self, parts: list[TokenStats]) -> TokenStats:
        # Not `joined` for one chunk: small steps are such, and wait for the host.
        stats = parts[0] if len(parts) == 1 else joined(parts)
        return stats if self.dense_index is None else self.stats_to_dense(stats._asdict())

    def to_dense(self, x: Tensor, fill: float = 0) -> Tensor:
        return x if self.dense_index is None else _placed(x, self.dense_index, self.n_positions, fill)


@dataclass(eq=False)
class GroupRows(Rows):
    """Groups are sequences or pairs. The objective sees dense values of whole groups."""

    groups: Groups = field(kw_only=True)  # never None

    def _by_group(self, x: Tensor) -> Tensor:
        return self.arrange(x.unflatten(0, (-1, self.dense_shape[-1]))).flatten(0, 2)

    def _index_in_chunk(self, chunk: Chunk) -> Tensor | None:
        """Return (n,), the tokens' places among the flattened dense values of the chunk's groups. None: all places."""
        if self.dense_index is None:
            return None
        index, first_group = along(self.dense_index, chunk.row_slice), chunk.group_slice.start
        return index if first_group == 0 else index - first_group * math.prod(self.dense_shape[1:])

    def arrange(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.dense_shape[1], -1)).transpose(0, 1)

    def for_objective(self, values: Values, chunk: Chunk) -> Values:
        shape = chunk.group_slice.stop - chunk.group_slice.start, *self.dense_shape[1:]
        index = self._index_in_chunk(chunk)
        return mapped(lambda x: (x if index is None else _placed(x, index, math.prod(shape))).view(shape), values)

    def from_objective(self, x: Tensor, chunk: Chunk) -> Tensor:
        flat, index = x.reshape(-1), self._index_in_chunk(chunk)
        return (flat if index is None else flat.index_select(0, index)).contiguous()

    def group_index(self, chunk: Chunk) -> slice | Tensor:
        return chunk.group_slice

    def join(self, parts: list[TokenStats]) -> TokenStats:
        return joined(parts)

    def to_dense(self, x: Tensor, fill: float = 0) -> Tensor:
        if self.dense_index is not None:
            x = _placed(x, self.dense_index, self.n_positions, fill)
        return x.view(self.dense_shape)


def _masked_rows(target: Tensor, group: Group, ignore_index: int) -> Rows:
    """Return all positions of a target, with ignored ones masked."""
    mask, length = target != ignore_index, target.shape[-1]
    ids, counted = target.where(mask, 0).view(-1), mask.view(-1)
    if group == "token":
        return TokenRows(target.numel(), counted.shape, ids, counted, counted=counted, sequence_length=length)
    # The shapes of a compiled graph may be symbols, of which Python makes no list.
    lengths = [] if shapes_only() else [length] * target.shape[0]
    groups = _groups_of(mask.sum(1), lengths, SEQUENCES_PER_GROUP[group])
    groups = groups._replace(shortest=0)  # sequences may be empty
    return _group_rows(target.numel(), ids, counted, None, None, groups, length, counted)


def _group_rows(
    n_tokens: int,
    ids: Tensor,
    mask: Tensor,
    dense_index: Tensor | None,
    token_at: Tensor | None,
    groups: Groups,
    length: int,
    counted: Tensor | None = None,
) -> GroupRows:
    """Return rows of a target whose sequences are in the order of groups.

    Args:
        ids: (n_tokens,) at `dense_index`, or at all places.
        mask, token_at: (B * T,), by place.
        counted: see `Rows`.
    """
    per_group, input_index = groups.per_group, dense_index
    n_groups = groups.token_counts.shape[0] // per_group
    if n_groups > 1 < per_group:
        # The input stacks all first sequences of groups, then all second ones.
        places = torch.arange(mask.numel(), device=mask.device)
        row = places.view(per_group, n_groups, length).transpose(0, 1).reshape(-1)
        input_index = row if dense_index is None else row[dense_index]
        token_at = None if token_at is None else token_at.view(n_groups, per_group, length).transpose(0, 1).reshape(-1)
    mask = mask.view(n_groups, per_group, length)
    return GroupRows(
        n_tokens, tuple(mask.shape), ids, mask, input_index, dense_index, token_at,
        groups=groups, sequence_length=length, counted=counted,
    )  # fmt: skip


def select_rows(
    target: Tensor,
    group: Group,
    ignore_index: int,
    vocab_size: int,
    name: str = "target",
    sequences: Sequences = None,
) -> Rows:
    """Return the tokens of a target that are not `ignore_index`. Waits for the device once.

    In the capture of a CUDA graph it returns all positions, with a mask, and neither waits nor checks ids.

    Args:
        target: (B, T) ids of whole sequences, padded, chosen before rejected ones; or (N,) if groups are tokens.
        group: what a chunk must not split.
        name: of the target, for messages.
        sequences: how the input holds these sequences, if not like the target.

    Raises:
        ValueError: an id is outside the vocabulary.
    """
    given, per_group = target, SEQUENCES_PER_GROUP.get(group, 1)
    if per_group > 1:  # one order for all that follows: group by group
        target = target.unflatten(0, (per_group, target.shape[0] // per_group)).transpose(0, 1).flatten(0, 1)
    target = target.contiguous()
    if not host_may_sync(target):
        return _masked_rows(target, group, ignore_index)
    ids, length = target.view(-1), target.shape[-1]
    # One kernel counts tokens and finds the smallest and the largest id, so that the host waits once. It keeps counts
    # by sequence where groups have them, else one for all.
    surveyed_target = target if group != "token" else ids.view(1, -1)
    surveyed = survey(surveyed_target, ignore_index)
    host_counts = _read_counts(surveyed, ignore_index, vocab_size, name)
    n_tokens, mask, index, token_at = sum(host_counts), surveyed.mask, None, None
    if n_tokens != ids.numel():
        index, ids, token_at = find_tokens(surveyed_target, surveyed, ignore_index, n_tokens)
    mask = mask.view(-1)
    if group == "token":
        rows: Rows = TokenRows(n_tokens, mask.shape, ids, mask, index, index, token_at, sequence_length=length)
    else:
        groups = _groups_of(_of_blocks(surveyed.summary[0]), host_counts, per_group)
        rows = _group_rows(n_tokens, ids, mask, index, token_at, groups, length)
    if sequences is None:
        return rows
    if isinstance(sequences, Packing):
        return _packed(rows, sequences)
    return replace(rows, split=Split(_local(given, rows, sequences, group, ignore_index, vocab_size, name), sequences))


def _read_counts(surveyed: Survey, ignore_index: int, vocab_size: int, name: str) -> list[int]:
    """Wait for the counts of a target's tokens, one for each row of the survey, and check its ids.

    Args:
        name: of the target, for messages.

    Raises:
        ValueError: an id is outside the vocabulary.
    """
    counts, lows, highs = surveyed.read()
    low, high = min(map(min, lows), default=0), max(map(max, highs), default=0)
    if low < 0 or high >= vocab_size:
        check_ids(name, low, high, vocab_size, ignore_index)
    return list(map(sum, counts))  # of a row's blocks


def _packed(rows: Rows, packing: Packing) -> Rows:
    """Return the rows of an input without padding, from those of the padded target: only indices of input differ."""
    input_index = packing.rows.view(-1)
    if rows.input_index is not None:
        input_index = input_index[rows.input_index]
    return replace(rows, input_index=input_index, token_at=None, sequence_length=sum(packing.lengths))


def _local(
    target: Tensor, rows: Rows, ranks: SequenceSplit, group: Group, ignore_index: int, vocab_size: int, name: str
) -> Rows:
    """Return the tokens that this rank holds of the batch's `rows`."""
    local = select_rows(target[..., ranks.local_slice], group, ignore_index, vocab_size, name)
    if local.groups is None:
        return local
    mask = rows.mask
    assert mask is not None
    # Ranks must cut their chunks after the same groups, so they cut by the most tokens that any has of each.
    counts_by_rank = [part.flatten(1).sum(1) for part in mask.split(list(ranks.lengths), -1)]
    cut_counts = tuple(torch.stack(counts_by_rank).amax(0).tolist())
    return replace(local, groups=local.groups._replace(cut_counts=cut_counts))


def _of_blocks(block_counts: Tensor) -> Tensor:
    """Return (R,), the tokens that count in each row, from those of its blocks, (R, blocks)."""
    return block_counts.view(-1) if block_counts.shape[1] == 1 else block_counts.sum(-1)


def _groups_of(token_counts: Tensor, sequence_counts: list[int], per_group: int) -> Groups:
    """Return the groups of counted sequences.

    Args:
        token_counts: (B,), the tokens that count in each sequence, group by group.
        sequence_counts: the same B numbers.
        per_group: sequences of a group.
    """
    host_counts = tuple([sum(sequence_counts[i : i + per_group]) for i in range(0, len(sequence_counts), per_group)])
    return Groups(
        token_counts=token_counts,
        per_group=per_group,
        host_counts=host_counts,
        cut_counts=host_counts,
        shortest=min(sequence_counts, default=0),
    )


def all_rows(shape: Sequence[int], split: SequenceSplit | None = None) -> Rows:
    """Return all tokens (B, T) or (N,) of a loss without a target; groups are tokens."""
    n, length = math.prod(shape), shape[-1]
    local = TokenRows(n, (n,), None, None, sequence_length=length)
    if split is None:
        return local
    n = split.batch * split.length
    return TokenRows(n, (n,), None, None, sequence_length=split.length, split=Split(local, split))
