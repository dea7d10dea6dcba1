"""Packs a padded batch as the trie of its tokens, so that a prefix that sequences share is computed once.

The nodes of the trie are laid out depth first. Token q then attends to token k, an ancestor of q or q itself, where

    k <= q < end[k]            end[k]: the index behind the last descendant of k

and its position is its depth. Shared prompts, partly shared completions, conversations that branch, and unrelated
sequences without padding are all tries, or forests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 1 << 24  # gradient values that `gather_rows` holds in float32 at a time


@dataclass(frozen=True)
class PackedTrie:
    """A batch of B padded sequences as R rows of L tokens.

    - `input_ids`, `position_ids`, `end` (R, L): token, depth and end of the subtree of each node. `end` is int32 and
      counts within the row. A filler token behind the nodes attends to itself only.
    - `node` (B, T): the index of each token of the padded batch in the flattened rows, -1 at padding
    - `tokens`: how many tokens of the padded batch are not padding
    - `nodes`: how many of the R * L packed tokens are not filler
    """

    input_ids: Tensor
    position_ids: Tensor
    end: Tensor
    node: Tensor
    tokens: int
    nodes: int

    @property
    def saved(self) -> float:
        """The share of the tokens that need not be computed, counting filler as computed."""
        return 1 - self.input_ids.numel() / max(self.tokens, 1)


def pack_trie(
    input_ids: Tensor, attention_mask: Tensor | None = None, *, row_tokens: int | None = None, multiple: int = 128
) -> PackedTrie:
    """Merge the sequences of a padded batch into the trie of their tokens.

    The host waits for the device once, for two integers per sequence. Memory grows with B * B and with B * T.

    Args:
        input_ids: (B, T), padded anywhere.
        attention_mask: (B, T), nonzero where a token is not padding; None if there is no padding.
        row_tokens: cut the forest into rows of at most this many tokens. A tree is never cut, so the largest one may
            make the rows longer. None for one row.
        multiple: round the length of the rows up to a multiple of this.

    >>> batch = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]])
    >>> packed = pack_trie(batch, torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]), multiple=1)
    >>> packed.input_ids.tolist(), packed.position_ids.tolist(), packed.end.tolist()
    ([[5, 6, 7, 8, 9]], [[0, 1, 2, 3, 2]], [[5, 5, 4, 4, 5]])
    >>> packed.node.tolist()
    [[0, 1, 2, 3], [0, 1, 4, -1]]
    """
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids must have shape (B, T) with B > 0 and T > 0, got {tuple(input_ids.shape)}")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have shape {tuple(input_ids.shape)}, got {tuple(attention_mask.shape)}: sharing "
            "needs the padding mask of the batch"
        )
    n, width = input_ids.shape
    valid = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    column = valid.cumsum(1) - 1  # without padding
    length = column[:, -1] + 1
    depth = torch.arange(width + 1, device=input_ids.device)
    # The last column takes the padding, and no sequence is long enough to use it.
    ids = input_ids.new_zeros(n, width + 1).scatter_(1, column.masked_fill(~valid, width), input_ids)
    ended = depth >= length[:, None]

    order = _depth_first_order(ids, ended)
    ids, length, ended = ids[order], length[order], ended[order]
    differs = (ids[1:] != ids[:-1]) | ended[1:] | ended[:-1]
    shared = F.pad(differs.to(torch.uint8).argmax(1), (1, 0))  # tokens in common with the sequence before
    fresh = length - shared
    start = fresh.cumsum(0) - fresh  # the first node of each sequence that is its own
    fresh_counts, shared_counts = torch.stack([fresh, shared]).tolist()  # the only wait for the device
    nodes = sum(fresh_counts)

    # Tokens by sequences, so that the scans over sequences run along contiguous memory.
    owns = depth[:, None] >= shared
    node = torch.where(owns, start - shared + depth[:, None], -1).cummax(1).values
    behind = F.pad(torch.where(owns, start, nodes)[:, 1:], (0, 1), value=nodes)
    end = behind.flip(1).cummin(1).values.flip(1)

    n_rows, row_length, places = _rows(fresh_counts, shared_counts, row_tokens, multiple)
    index = node
    if places is not None:
        row, offset = torch.tensor(places).to(input_ids.device, non_blocking=True)
        end = end + offset
        index = node + offset + row * row_length

    size = n_rows * row_length
    cells = index.masked_fill(ended.T, size).flatten()  # cells behind the end of a sequence go behind the last row
    filler = torch.arange(row_length, device=input_ids.device).repeat(n_rows)

    def packed(fill: Tensor, values: Tensor) -> Tensor:
        # Several sequences write the same value to a node that they share.
        return F.pad(fill, (0, 1)).scatter_(0, cells, values.flatten())[:-1].view(n_rows, row_length)

    by_sequence = index.T[order.argsort()]
    return PackedTrie(
        input_ids=packed(torch.zeros_like(filler, dtype=ids.dtype), ids.T),
        position_ids=packed(torch.zeros_like(filler), depth[:, None].expand(-1, n)),
        end=packed(filler + 1, end).int(),
        node=by_sequence.gather(1, column.clamp(min=0)).masked_fill(~valid, -1),
        tokens=sum(fresh_counts) + sum(shared_counts),
        nodes=nodes,
    )


def _depth_first_order(ids: Tensor, ended: Tensor) -> Tensor:
    """Return the lexicographic order of sequences (B, T + 1).

    Each pair of sequences is compared at the first token that differs. A binary search finds it in the hashes of all
    prefixes. Two prefixes with the same hash would cost a shared node, never a wrong trie: the trie is built from the
    tokens.
    """
    odd = 0x5851F42D4C957F2D
    weight = torch.full_like(ids[0], odd, dtype=torch.int64).cumprod(0)
    prefix = F.pad(((ids + 2) * weight).masked_fill(ended, 0).cumsum(1), (1, 0))[:, :-1]  # hash of the first t tokens
    longest = prefix.shape[1] - 1
    common = torch.zeros(len(ids), len(ids), dtype=torch.int64, device=ids.device)
    for bit in reversed(range(longest.bit_length())):
        longer = common + (1 << bit)
        own = prefix.gather(1, longer.clamp(max=longest))
        common = torch.where((own == own.T) & (longer <= longest), longer, common)
    following = ids.masked_fill(ended, torch.iinfo(ids.dtype).min).gather(1, common)
    return (following.T < following).sum(1).argsort(stable=True)


def _rows(
    fresh: list[int], shared: list[int], row_tokens: int | None, multiple: int
) -> tuple[int, int, tuple[list[int], list[int]] | None]:
    """Return how many rows there are, their length, and where each sequence goes: its row, and the distance from its
    place in a single row.

    Each tree, the largest first, goes into the first row that has room for it.
    """
    nodes = sum(fresh)
    longest = nodes
    places = None
    n_rows = 1
    if row_tokens is not None and nodes > row_tokens:
        tree = [-1] * len(fresh)
        sizes: list[int] = []
        for i, (n, in_common) in enumerate(zip(fresh, shared, strict=True)):
            if not in_common:
                sizes.append(0)
            sizes[-1] += n
            tree[i] = len(sizes) - 1
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        room = max(row_tokens, *sizes)
        filled: list[int] = []
        row, offset = [0] * len(sizes), [0] * len(sizes)
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            row[i] = next((r for r, used in enumerate(filled) if used + sizes[i] <= room), len(filled))
            if row[i] == len(filled):
                filled.append(0)
            offset[i] = filled[row[i]] - starts[i]
            filled[row[i]] += sizes[i]
        n_rows, longest = len(filled), max(filled)
        places = [row[i] for i in tree], [offset[i] for i in tree]
    return n_rows, max(1, -(-longest // multiple)) * multiple, places


class _GatherRows(torch.autograd.Function):
    """The gradient of a row is the sum over all its copies: in float32, in the order of the copies."""

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
        # Padding adds zero. It is spread over the rows, because the additions to one row wait for each other.
        spread = torch.arange(len(index), device=index.device) % max(ctx.n_rows, 1)
        index = torch.where(padding, spread, index)
        step = max(1, _CHUNK // max(grad.shape[1], 1))
        for i in range(0, len(index), step):
            part = slice(i, i + step)
            values = grad[part].to(dtype).masked_fill(padding[part, None], 0)
            if grad.is_cuda:
                total.index_put_((index[part],), values, accumulate=True)  # sorts: unlike index_add_, deterministic
            else:
                total.index_add_(0, index[part], values)
        return total.to(grad.dtype), None


def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Return `rows[index]`, with zeros where `index` is negative.

    The gradient of a row that is taken several times is accumulated in float32, and is the same from run to run.

    Args:
        rows: (N, H).
        index: integers of any shape.
    """
    return _GatherRows.apply(rows, index.flatten()).view(*index.shape, rows.shape[1])
