"""What a step computes and how: what `choose` returns, and what sources, sinks and drivers read."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.engine import cutting
from liger_chunked.engine.cutting import Chunk, Tiles
from liger_chunked.engine.rows import Rows
from liger_chunked.engine.scattered import ScatteredRows
from liger_chunked.kernels.kept import Entries
from liger_chunked.kernels.operands import along
from liger_chunked.types import LogitOptions, VocabShard


class Path(enum.Enum):
    """What computes the logits of a tile and reduces them."""

    LOGITS = "logits"  # a product, then a kernel that reads its logits
    EPILOGUE = "epilogue"  # a product that reduces its logits in its epilogue: Hopper, 16 bits
    BY_TOKEN = "by token"  # logits of one token at a time, whose bits do not depend on its neighbours
    INVARIANT = "invariant"  # a product and kernels that treat each row alike, for the same bits: Hopper, 16 bits


class Tokens(NamedTuple):
    """The tokens of a chunk.

    Attributes:
        x: (n, H) hidden states in the products' dtype.
        target: (n,) int64.
        row_slice: of the step's `Rows`.
        tiles: in which to compute the chunk's logits.
        u: (n, r), an adapter's `down(x)`, in the dtype of `x`.
        side: (n, ...) other inputs, see `Rows`.
    """

    x: Tensor
    target: Tensor
    row_slice: slice
    tiles: Tiles
    u: Tensor | None
    side: dict[str, Tensor]


@dataclass(eq=False)
class Plan:
    """How a step is cut, and what computes it.

    Attributes:
        rows: the tokens that count, in the order of the chunks.
        chunks: consecutive parts of `rows`.
        tiles: of each chunk; whole rows with a teacher.
        dtype: of the matrix products.
        n_contributions: how many sums are added up in each element of dW: of a loss, one for each block of rows of a
            chunk. 1 if the blocks are summed before dW is rounded, as for statistics. 0 without tokens.
        largest_tile: the most logits of a tile.
        path: what computes statistics. `source_of_loss` takes logits instead of `Path.EPILOGUE` if dW is rounded.
        outputs, differentiates: the statistics to compute, and those that the gradient may reach.
        class_weight: (V,) weights of `mean_logits`.
        teacher_dtype: of a teacher's products.
        kept: the ids that statistics are of, if not all. `rows` then have each token's "position" among them.
        scattered: which rows each rank holds, if ranks split both vocabulary and hidden states.
        skips_rows: whether the backward of a chunk counts its rows with a gradient, and leaves the others out.
    """

    rows: Rows
    chunks: tuple[Chunk, ...]
    tiles: tuple[Tiles, ...]
    dtype: torch.dtype
    n_contributions: int
    largest_tile: int
    options: LogitOptions
    path: Path = Path.LOGITS
    outputs: tuple[str, ...] = ()
    differentiates: tuple[str, ...] = ()
    class_weight: Tensor | None = None
    shard: VocabShard | None = None
    teacher_dtype: torch.dtype | None = None
    kept: Entries | None = None
    scattered: ScatteredRows | None = None
    skips_rows: bool = False

    def tokens(self, i: int, flat: Tensor, flat_u: Tensor | None) -> Tokens:
        """Return chunk `i` of flattened hidden states (N, H), and of an adapter's `u` (N, r)."""
        row_slice, target, side = self.chunks[i].row_slice, self.rows.target, self.rows.side
        # Without a target only a teacher's divergence is computed, which reads none.
        return Tokens(
            x=self.take(flat, row_slice),
            target=target if target is None or len(self.chunks) == 1 else target[row_slice],  # type: ignore[arg-type]
            row_slice=row_slice,
            tiles=self.tiles[i],
            u=None if flat_u is None else self.take(flat_u, row_slice),
            side=side and {name: along(x, row_slice) for name, x in side.items()},
        )

    def take(self, flat: Tensor, row_slice: slice) -> Tensor:
        """Return a chunk's rows of (N, ...), in the products' dtype."""
        if self.scattered is not None:
            return self.scattered.gather(flat, row_slice, self.dtype)
        # Not `rows.take` for a batch in one chunk without ignored tokens: small steps are such, and wait for the host.
        all_rows = self.rows.input_index is None and row_slice.stop - row_slice.start == flat.shape[0]
        x = flat if all_rows else self.rows.take(flat, row_slice)
        return x if x.dtype == self.dtype else x.to(self.dtype)

    def reader(self, input: Tensor, row_slice: slice, dtype: torch.dtype) -> Callable[[slice], Tensor]:
        """Return a function that reads parts of a chunk from another model's hidden states (..., H)."""
        flat = input.reshape(-1, input.shape[-1])
        if self.scattered is None:
            return lambda part: self.rows.take(flat, part).to(dtype)
        chunk, start = self.scattered.gather(flat, row_slice, dtype), row_slice.start
        return lambda part: along(chunk, slice(part.start - start, part.stop - start))

    def of_rows(self, index: Tensor) -> Plan:
        """Return the plan of some rows (n,), in chunks of whole rows no longer than these, with tiles no longer."""
        rows = replace(self.rows.reordered(index), n_valid=index.shape[0])
        chunks = cutting.chunks_of_tokens(rows.n_valid, max(1, self.chunks[0].length))
        columns = max(tile.vocab_slice.stop for tiles in self.tiles for tile in tiles)
        tiles = tuple(cutting.whole_rows(chunk.length, columns, self.most_rows) for chunk in chunks)
        return replace(self, rows=rows, chunks=chunks, tiles=tiles, n_contributions=len(chunks) if rows.n_valid else 0)

    @property
    def most_rows(self) -> int:
        """The most rows of a tile."""
        return max((rows.stop - rows.start for tiles in self.tiles for rows, _ in tiles), default=0)


def flattened(input: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return hidden states and an adapter's `u` as (N, H) and (N, r)."""
    return input.reshape(-1, input.shape[-1]), None if u is None else u.reshape(-1, u.shape[-1])
