"""Pack a padded batch as a trie of tokens (docs/shared_prefix.md).

Nodes are laid out depth first. Token q attends to k where `k <= q < end[k]`: `end[k]` is the place behind the last
descendant of k.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from liger_chunked.device import is_on_gpu

_Array = NDArray[Any]

_CHUNK = 1 << 24  # float32 gradients at once


@dataclass(frozen=True)
class PackedTrie:
    """A batch of B padded sequences as R rows of L tokens.

    - `input_ids`, `position_ids`, `end` (R, L): each node's token, depth, and end of the subtree (int32, in the row).
      Filler behind the nodes attends to itself only.
    - `node` (B, T): each token's index in the flattened rows, -1 at padding
    - `tokens`, `nodes`: their numbers, without padding and filler
    - `padding`: "between" the tokens of some sequence, else "left" of some, else "right"
    - `trailing`: the most padding behind a last token, which counts as tokens with `with_trailing`
    """

    input_ids: Tensor
    position_ids: Tensor
    end: Tensor
    node: Tensor
    tokens: int
    nodes: int
    padding: str
    trailing: int

    @property
    def saved(self) -> float:
        """The share of tokens that is not computed; filler counts as computed."""
        return 1 - self.input_ids.numel() / max(self.tokens, 1)


def pack_trie(
    input_ids: Tensor, attention_mask: Tensor | None = None, *, row_tokens: int | None = None,
    tree_tokens: int | None = None, multiple: int = 128, with_trailing: bool = False,
) -> PackedTrie:  # fmt: skip
    """Merge a padded batch's sequences into a trie, on the host. Waits for the device once.

    Args:
        input_ids, attention_mask: as in `share_batch`.
        row_tokens: longest row, unless a tree is larger; None for one row.
        tree_tokens: largest tree. Larger ones are cut at their shallowest branches; each part copies shared tokens.
        multiple: a row's length is a multiple of this.
        with_trailing: also pack padding behind last tokens.

    >>> batch = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]])
    >>> packed = pack_trie(batch, torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]), multiple=1)
    >>> packed.input_ids.tolist(), packed.position_ids.tolist(), packed.end.tolist()
    ([[5, 6, 7, 8, 9]], [[0, 1, 2, 3, 2]], [[5, 5, 4, 4, 5]])
    >>> packed.node.tolist()
    [[0, 1, 2, 3], [0, 1, 4, -1]]
    """
    plan = plan_trie(
        input_ids, attention_mask, row_tokens=row_tokens, tree_tokens=tree_tokens, multiple=multiple,
        with_trailing=with_trailing,
    )  # fmt: skip
    return plan.pack()


def plan_trie(
    input_ids: Tensor, attention_mask: Tensor | None = None, *, row_tokens: int | None = None,
    tree_tokens: int | None = None, multiple: int = 128, with_trailing: bool = False,
) -> TriePlan:  # fmt: skip
    """Do the part of `pack_trie` that tells what is saved."""
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids must have shape (B, T) with B > 0 and T > 0, got {tuple(input_ids.shape)}")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have shape {tuple(input_ids.shape)}, got {tuple(attention_mask.shape)}: sharing "
            "needs the padding mask of the batch"
        )
    batch, valid = _on_host(input_ids, attention_mask)
    places = _places(batch, valid)
    sequences = [row[place] for row, place in zip(batch, places, strict=True)]
    behind = [_behind(place, batch.shape[1]) for place in places]
    trailing = [batch.shape[1] - n if with_trailing else 0 for n in behind]
    order = _depth_first_order(sequences)
    shared = [0] * len(sequences)
    for before, i in itertools.pairwise(order):
        shared[i] = _n_common(sequences[before], sequences[i])
    if tree_tokens is not None:
        lengths = [len(sequence) + extra for sequence, extra in zip(sequences, trailing, strict=True)]
        _cut_trees(order, lengths, shared, tree_tokens)
    fresh = [len(sequence) - n for sequence, n in zip(sequences, shared, strict=True)]
    sizes = [n + extra for n, extra in zip(fresh, trailing, strict=True)]
    rows = _rows(order, sizes, shared, row_tokens)
    row_length = max(1, -(-max(sum(sizes[i] for i in row) for row in rows) // multiple)) * multiple
    return TriePlan(input_ids, batch, places, behind, trailing, shared, fresh, rows, row_length)


def _on_host(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[_Array, _Array | None]:
    n, ids = input_ids.numel(), input_ids.int()
    valid = [] if attention_mask is None else [(attention_mask != 0).flatten()]
    device_bytes = torch.cat([x.view(torch.uint8) for x in (ids.flatten(), *valid, (ids == input_ids).all().view(1))])
    host_bytes = torch.empty(device_bytes.shape, dtype=torch.uint8, pin_memory=is_on_gpu(input_ids))
    values = host_bytes.copy_(device_bytes).numpy()
    if not values[-1]:
        raise ValueError("input_ids must be of 32 bits, got larger ones: no vocabulary has them")
    shape = tuple(input_ids.shape)
    mask = None if attention_mask is None else values[4 * n : 5 * n].view(np.bool_).reshape(shape)
    return values[: 4 * n].view(np.int32).reshape(shape), mask


@dataclass(frozen=True)
class TriePlan:
    """How a batch becomes a trie.

    - `batch` (B, T): tokens on the host; `places`: indices of each sequence's tokens; `behind`: place after its last
    - `trailing`: packed padding behind each sequence
    - `shared`, `fresh`: tokens that each sequence shares with the one before, and others
    - `rows`: the sequences in each row, in packing order; `row_length`: after rounding
    """

    input_ids: Tensor
    batch: _Array
    places: list[Any]
    behind: list[int]
    trailing: list[int]
    shared: list[int]
    fresh: list[int]
    rows: list[list[int]]
    row_length: int

    @property
    def tokens(self) -> int:
        return sum(self.shared) + sum(self.fresh) + sum(self.trailing)

    @property
    def saved(self) -> float:
        return 1 - len(self.rows) * self.row_length / max(self.tokens, 1)

    @property
    def padding(self) -> str:
        return _side(self.places)

    @property
    def longest(self) -> int:
        return max(shared + fresh for shared, fresh in zip(self.shared, self.fresh, strict=True))

    @property
    def most_trailing(self) -> int:
        return max(self.batch.shape[1] - n for n in self.behind)

    def pack(self) -> PackedTrie:
        batch, places, trailing, shared = self.batch, self.places, self.trailing, self.shared
        shape = len(self.rows), self.row_length
        host = _buffer(shape, batch.shape, pinned=is_on_gpu(self.input_ids))
        all_ids, all_depths, all_ends, node = (x.numpy() for x in _parts(host, shape, batch.shape))
        node.fill(-1)
        depth = np.arange(batch.shape[1], dtype=np.int32)
        for r, row in enumerate(self.rows):
            ids, depths, ends = all_ids[r], all_depths[r], all_ends[r]
            path = _Path(ends)
            for i in row:
                path.leave(shared[i])
                own, n = path.enter(self.fresh[i]), shared[i] + self.fresh[i]
                ids[own], depths[own] = batch[i, places[i]][shared[i] :], depth[shared[i] : n]
                node[i, places[i]] = path.nodes(r * self.row_length)
                if trailing[i]:
                    own = path.skip(trailing[i])
                    ids[own], depths[own] = batch[i, self.behind[i] :], np.arange(n, n + trailing[i])
                    # Padding does not attend to itself.
                    ends[own] = np.arange(own.start, own.stop) + (n == 0)
                    node[i, self.behind[i] :] = np.arange(own.start, own.stop) + r * self.row_length
            path.leave(0)
            filler = slice(path.place, self.row_length)
            ids[filler], depths[filler] = 0, 0
            ends[filler] = np.arange(path.place, self.row_length, dtype=np.int32) + 1
        device = self.input_ids.device
        ids, positions, end, nodes = _parts(host.to(device, non_blocking=True), shape, batch.shape)
        return PackedTrie(
            input_ids=ids.type(self.input_ids.dtype),
            position_ids=positions.long(),
            end=end,
            node=nodes.long(),
            tokens=self.tokens,
            nodes=sum(self.fresh) + sum(trailing),
            padding=self.padding,
            trailing=self.most_trailing,
        )


def _buffer(packed: tuple[int, ...], padded: tuple[int, ...], pinned: bool) -> Tensor:
    """Return memory for all results, of less than 2^31 tokens, copied at once."""
    size = 3 * math.prod(packed) + math.prod(padded)
    if pinned:
        return torch.empty(size, dtype=torch.int32, pin_memory=True)
    return torch.from_numpy(np.empty(size, np.int32))  # NumPy uses huge pages, which are faster


def _parts(buffer: Tensor, packed: tuple[int, ...], padded: tuple[int, ...]) -> tuple[Tensor, ...]:
    n = math.prod(packed)
    ids, depths, ends, nodes = buffer.split([n, n, n, math.prod(padded)])
    return ids.view(packed), depths.view(packed), ends.view(packed), nodes.view(padded)


def _places(batch: _Array, valid: _Array | None) -> list[Any]:
    """Index each sequence's tokens: a slice, or a mask for padding between them."""
    if valid is None or valid.all():
        return [slice(None)] * len(batch)
    places: list[Any] = []
    for row in valid:
        first, n = int(row.argmax()), int(np.count_nonzero(row))
        is_one_part = row[first : first + n].all()
        places.append(slice(first, first + n) if is_one_part else row)
    return places


def _behind(place: Any, width: int) -> int:
    if isinstance(place, slice):
        return width if place.stop is None else int(place.stop)
    return width - int(place[::-1].argmax())


def _side(places: list[Any]) -> str:
    if not all(isinstance(place, slice) for place in places):
        return "between"
    return "left" if any(place.start and place.stop > place.start for place in places) else "right"


def _depth_first_order(sequences: list[_Array]) -> list[int]:
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _n_common(a: _Array, b: _Array) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _trees(order: list[int], shared: list[int]) -> list[list[int]]:
    trees: list[list[int]] = []
    for i in order:
        if not shared[i]:
            trees.append([])
        trees[-1].append(i)
    return trees


def _cut_trees(order: list[int], lengths: list[int], shared: list[int], largest: int) -> None:
    """Set `shared` to 0 at branches until trees of several sequences are small enough."""
    trees = _trees(order, shared)
    while trees:
        tree = trees.pop()
        if len(tree) == 1 or sum(lengths[i] - shared[i] for i in tree) <= largest:
            continue
        place = min(range(1, len(tree)), key=lambda k: (shared[tree[k]], abs(2 * k - len(tree))))
        shared[tree[place]] = 0
        trees += [tree[:place], tree[place:]]


def _rows(order: list[int], sizes: list[int], shared: list[int], row_tokens: int | None) -> list[list[int]]:
    """Distribute the trees over as few rows as a first fit needs, filled evenly."""
    if row_tokens is None or sum(sizes) <= row_tokens:
        return [order]
    trees = _trees(order, shared)
    of_trees = [sum(sizes[i] for i in tree) for tree in trees]
    room = max(row_tokens, *of_trees)
    largest_first = sorted(zip(trees, of_trees, strict=True), key=lambda pair: -pair[1])
    rows: list[list[int]] = []
    filled: list[int] = []
    for tree, size in largest_first:
        row = next((r for r, used in enumerate(filled) if used + size <= room), len(rows))
        if row == len(rows):
            rows.append([])
            filled.append(0)
        rows[row] += tree
        filled[row] += size
    # Each row gets the length of the longest.
    even: list[list[int]] = [[] for _ in rows]
    used = [0] * len(rows)
    for tree, size in largest_first:
        row = used.index(min(used))
        even[row] += tree
        used[row] += size
    return even if max(used) < max(filled) else rows


class _Path:
    """Walks through a row, and writes the ends of nodes that it leaves."""

    def __init__(self, ends: _Array) -> None:
        self.place = 0  # of the next node
        self._ends = ends
        self._parts = [slice(0, 0)]
        self._depth = 0

    def enter(self, n: int) -> slice:
        part = slice(self.place, self.place + n)
        self._parts.append(part)
        self._depth += n
        self.place += n
        return part

    def skip(self, n: int) -> slice:
        self.place += n
        return slice(self.place - n, self.place)

    def leave(self, depth: int) -> None:
        while self._depth > depth:
            part = self._parts.pop()
            kept = max(part.start, part.stop - (self._depth - depth))
            self._ends[kept : part.stop] = self.place
            self._depth -= part.stop - kept
            if kept > part.start:
                self._parts.append(slice(part.start, kept))

    def nodes(self, base: int) -> _Array:
        return np.concatenate([np.arange(base + part.start, base + part.stop) for part in self._parts])


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.n_rows = len(rows)
        padding = index < 0
        return rows.index_select(0, index.masked_fill(padding, 0)).masked_fill_(padding[:, None], 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        dtype = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(ctx.n_rows, grad.shape[1], dtype=dtype, device=grad.device)
        padding = index < 0
        # Spread padding: additions to one row wait for each other.
        spread = torch.arange(len(index), device=index.device) % max(ctx.n_rows, 1)
        index = torch.where(padding, spread, index)
        step = max(1, _CHUNK // max(grad.shape[1], 1))
        for i in range(0, len(index), step):
            part = slice(i, i + step)
            values = grad[part].to(dtype).masked_fill(padding[part, None], 0)
            if is_on_gpu(grad):
                total.index_put_((index[part],), values, accumulate=True)  # deterministic
            else:
                total.index_add_(0, index[part], values)
        return total.to(grad.dtype), None


def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Return `rows[index]` of `rows` (N, H), with zeros where `index` is negative.

    Gradients of repeated rows are summed in float32, deterministically.
    """
    return _GatherRows.apply(rows, index.flatten()).view(*index.shape, rows.shape[1])
