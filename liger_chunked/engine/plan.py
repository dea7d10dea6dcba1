"""Cut a batch to the logits budget: into chunks of whole groups, and each chunk into tiles."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_chunked.engine import epilogue
from liger_chunked.engine.batch import Chunk, Layout, Tile, along, largest, row_blocks
from liger_chunked.engine.candidates import Candidates
from liger_chunked.engine.checks import ranks_of
from liger_chunked.engine.epilogue import EpiloguePass
from liger_chunked.engine.filtered import FilteredPass, SamplingFilter
from liger_chunked.engine.gradients import HeadGradients
from liger_chunked.engine.head import HeadPass, Tokens
from liger_chunked.engine.scattered import ScatteredRows, scatter_rows
from liger_chunked.engine.shard import ShardedPass
from liger_chunked.engine.token_pass import TokenPass
from liger_chunked.kernels.tuning.generic import (
    CHUNK_TOKENS,
    FEWEST_TEACHER_TOKENS,
    MIN_TILE_COLUMNS,
    ONE_CHUNK,
    ROUND,
    TEACHER_TOKENS,
    TEACHER_VOCAB,
)
from liger_chunked.types import DIFFERENTIABLE, HeadTensors, LogitOptions, LossHead, VocabShard


@dataclass(eq=False)
class Plan:
    """How a step is cut, and what its head computes."""

    layout: Layout
    chunks: list[Chunk]
    tiles: list[list[Tile]]  # per chunk; whole rows with a teacher
    dtype: torch.dtype  # of the matrix products
    n_contributions: int  # products per element of dW
    options: LogitOptions
    outputs: tuple[str, ...] = ()
    differentiates: tuple[str, ...] = ()
    class_weight: Tensor | None = None
    shard: VocabShard | None = None
    by_epilogue: bool = False  # `EpiloguePass` runs the step, if `make_pass` allows it, or `StatisticsPass`
    by_token: bool = False
    filter: SamplingFilter | None = None
    candidates: Tensor | None = None  # (n_valid, K) ids
    scattered: ScatteredRows | None = None  # if ranks split vocabulary and hidden states

    @classmethod
    def of_loss(
        cls,
        head: LossHead,
        layout: Layout,
        dtype: torch.dtype,
        *,
        outputs: tuple[str, ...],
        differentiates: tuple[str, ...],
        options: LogitOptions,
        whole_batch: bool,
        wide_tiles: bool,
        class_weight: Tensor | None = None,
    ) -> Plan:
        vocab_size, hidden_size = shape = shape_to_cut(head)
        wide_tiles = wide_tiles and layout.temperature is None and all_have_wide_tiles(head)
        wide_tiles = wide_tiles and epilogue.is_large(layout.n_valid * vocab_size, hidden_size)
        differentiates = tuple(name for name in DIFFERENTIABLE if name in differentiates and name in outputs)
        of_logit = logit_bytes(options, dtype)
        warn_of_few_rows(options, vocab_size, of_logit, layout.n_valid)

        def cut(n_valid: int, of_logit: int) -> tuple[list[Chunk], list[list[Tile]], int]:
            elements = budget_elements(options, shape, dtype, n_valid, of_logit)
            found = chunks(layout, vocab_size, elements, whole_batch)
            return found, [tiles(_length(chunk), vocab_size, elements) for chunk in found], elements

        def served(tiles: list[list[Tile]]) -> bool:
            return wide_tiles and epilogue.serves(head, dtype, options, class_weight, outputs, differentiates, tiles)

        lengths = layout.cut_lengths
        chosen = cut(layout.n_valid if lengths is None else sum(lengths), of_logit)
        is_one = len(chosen[0]) == 1
        # Not if ranks must cut the same chunks: their tiles differ.
        if wide_tiles and lengths is layout.group_lengths and (is_one or of_logit > dtype.itemsize):
            several = cut(0, dtype.itemsize)  # of exponentials, never of float32 logits
            better = epilogue.instead_of_one_chunk(several[1], hidden_size) if is_one else len(several[0]) > 1
            if better and served(several[1]):
                chosen = several
        found, of_chunks, elements = chosen
        by_epilogue = served(of_chunks)
        if head.columns != vocab_size:
            of_chunks = [tiles(_length(chunk), head.columns, elements) for chunk in found]
        layout, scattered = scatter_rows(layout if len(found) == 1 else layout.by_group(), found, head.shard)
        return cls(
            layout=layout,
            scattered=scattered,
            chunks=found,
            tiles=of_chunks,
            dtype=dtype,
            n_contributions=sum(map(row_blocks, of_chunks)),
            options=options,
            outputs=outputs,
            differentiates=differentiates,
            class_weight=class_weight,
            shard=head.shard,
            by_epilogue=by_epilogue,
        )

    @classmethod
    def of_statistics(
        cls,
        head: LossHead,
        layout: Layout,
        dtype: torch.dtype,
        *,
        outputs: tuple[str, ...],
        options: LogitOptions,
        class_weight: Tensor | None = None,
        filter: SamplingFilter | None = None,
        candidates: Tensor | None = None,
        needs_grad: bool = True,
        wide_tiles: bool = False,
        batch_invariant: bool = False,
    ) -> Plan:
        """Plan a forward whose backward comes later. `candidates` are (N, K)."""
        of_logit = logit_bytes(options, dtype)
        shape = shape_to_cut(head)
        warn_of_few_rows(options, shape[0], of_logit, layout.n_valid)
        n_valid, columns = layout.n_valid, head.columns

        def elements(bytes_per_logit: int) -> int:
            return budget_elements(options, shape, dtype, 0, bytes_per_logit)

        by_epilogue = False
        wide_tiles = wide_tiles and (batch_invariant or epilogue.is_large(n_valid * shape[0], shape[1]))
        if (
            wide_tiles
            and filter is None
            and candidates is None
            and layout.temperature is None
            and all_have_wide_tiles(head)
        ):
            cut = tiles(n_valid, shape[0], elements(dtype.itemsize), square=True)  # of gradients, never of logits
            by_epilogue = epilogue.serves_statistics(
                head, dtype, options, class_weight, outputs, cut, needs_grad, at_any_size=batch_invariant
            )
            if by_epilogue and columns != shape[0]:
                cut = tiles(n_valid, columns, elements(dtype.itemsize), square=True)
        by_token = batch_invariant and not by_epilogue
        if filter is not None:
            whole_rows = pieces(n_valid, max(1, elements(of_logit) // columns))
            cut = [Tile(rows, slice(0, columns)) for rows in whole_rows]
        elif by_token:
            cut = [Tile(slice(i, i + 1), slice(0, columns)) for i in range(n_valid)]
            if cut and layout.target.device.type != "cpu":
                raise ValueError(
                    'deterministic="batch" on a GPU needs Hopper, bfloat16, contiguous weights with H a multiple of 8, '
                    'outputs among "logps", "lse", "entropy" and "mean_logits", and no bias, adapter, softcap, '
                    "candidates or temperature of tokens; got another call"
                )
        elif not by_epilogue:
            cut = tiles(n_valid, columns, elements(of_logit), square=True)
        every = slice(0, n_valid)
        chunks = [Chunk(every, every)]
        layout, scattered = scatter_rows(layout, chunks, head.shard)
        if candidates is not None and layout.slots is not None:
            candidates = candidates[layout.slots]
        return cls(
            layout=layout,
            scattered=scattered,
            candidates=candidates,
            chunks=chunks,
            tiles=[cut],
            dtype=dtype,
            n_contributions=min(1, len(cut)),
            options=options,
            outputs=outputs,
            class_weight=class_weight,
            shard=head.shard,
            filter=filter,
            by_epilogue=by_epilogue,
            by_token=by_token,
        )

    @classmethod
    def of_distillation(
        cls,
        head: LossHead,
        layout: Layout,
        dtype: torch.dtype,
        *,
        bytes_per_logit: int,
        options: LogitOptions,
        wants_weight: bool,
    ) -> Plan:
        shape = shape_to_cut(head)
        vocab_size, n_valid = shape[0], layout.n_valid
        warn_of_few_rows(options, vocab_size, bytes_per_logit, n_valid)
        tokens, tile = chunk_and_tile(options, shape, dtype, n_valid, bytes_per_logit, wants_weight)
        found = chunks(layout, vocab_size, tokens * vocab_size)
        every = slice(0, head.columns)
        layout, scattered = scatter_rows(layout, found, head.shard)
        return cls(
            layout=layout,
            scattered=scattered,
            chunks=found,
            tiles=[[Tile(rows, every) for rows in pieces(_length(chunk), tile)] for chunk in found],
            dtype=dtype,
            n_contributions=len(found) if n_valid else 0,
            options=options,
            shard=head.shard,
        )

    def tokens(self, i: int, flat: Tensor, flat_u: Tensor | None) -> Tokens:
        """Return chunk `i` of flattened hidden states."""
        rows, temperature = self.chunks[i].rows, self.layout.temperature
        x = self._input_rows(flat, rows)
        u = None if flat_u is None else self._input_rows(flat_u, rows)
        temperature = None if temperature is None else along(temperature, rows)
        return Tokens(x, along(self.layout.target, rows), rows, self.tiles[i], u, temperature)

    def _input_rows(self, flat: Tensor, rows: slice) -> Tensor:
        if self.scattered is not None:
            return self.scattered.gather(flat, rows, self.dtype)
        return self.layout.input_rows(flat, rows).to(self.dtype)

    def reader(self, input: Tensor, rows: slice, dtype: torch.dtype) -> Callable[[slice], Tensor]:
        flat = input.reshape(-1, input.shape[-1])
        if self.scattered is None:
            return lambda part: self.layout.input_rows(flat, part).to(dtype)
        chunk = self.scattered.gather(flat, rows, dtype)
        return lambda part: along(chunk, slice(part.start - rows.start, part.stop - rows.start))

    @property
    def most_rows(self) -> int:
        """Of a tile."""
        return max((tile.rows.stop - tile.rows.start for tiles in self.tiles for tile in tiles), default=0)

    @property
    def largest_tile(self) -> int:
        """In logits."""
        return max(map(largest, self.tiles))

    def make_pass(self, head: HeadTensors, grads: HeadGradients | None) -> HeadPass | EpiloguePass:
        if not (self.by_epilogue and (grads is None or grads.accumulates)):
            return self.make_head_pass(head, grads)
        made = EpiloguePass(epilogue.readable(head), self.options, self.outputs, grads)
        made.reserve(self.largest_tile)
        return made

    def make_head_pass(self, head: HeadTensors, grads: HeadGradients | None) -> HeadPass:
        made: HeadPass
        if self.filter is not None:
            made = FilteredPass(head, self.options, self.outputs, grads=grads, filter=self.filter)
        else:
            kind = TokenPass if self.by_token else HeadPass if head.shard is None else ShardedPass
            made = kind(head, self.options, self.outputs, self.class_weight, grads)
        if self.candidates is not None:
            made.candidates = Candidates(self.candidates)
        made.reserve(self.largest_tile)
        return made


def flattened(input: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return input.reshape(-1, input.shape[-1]), None if u is None else u.reshape(-1, u.shape[-1])


def _length(chunk: Chunk) -> int:
    return chunk.rows.stop - chunk.rows.start


def shape_to_cut(head: LossHead) -> tuple[int, int]:
    """Return (V, H) of the head, or of the rank with most rows, so that all ranks cut the same chunks."""
    rows, hidden_size = head.weight.shape
    return rows if head.shard is None else ranks_of(head.shard, rows).columns, hidden_size


def all_have_wide_tiles(head: LossHead) -> bool:
    return head.shard is None or ranks_of(head.shard, head.weight.shape[0]).wide_tiles


def logit_bytes(options: LogitOptions, dtype: torch.dtype) -> int:
    """Return the bytes of a logit, and of its gradient unless that replaces it."""
    if options.logits_dtype in (None, dtype):
        return dtype.itemsize
    if dtype == torch.float64:
        raise ValueError(f"logits_dtype must be None for products in {dtype}, got {options.logits_dtype}")
    assert options.logits_dtype is not None
    return options.logits_dtype.itemsize + dtype.itemsize


def budget_elements(
    options: LogitOptions, head_shape: Sequence[int], dtype: torch.dtype, n_valid: int, bytes_per_logit: int
) -> int:
    """Return how many logits may be in memory at once; docs/memory.md has the automatic budget.

    `n_valid` is 0 if one chunk is impossible. `bytes_per_logit` counts copies and a teacher.
    """
    vocab_size, hidden_size = head_shape
    if options.logits_budget is not None:
        assert isinstance(options.logits_budget, int)
        return max(1, options.logits_budget // bytes_per_logit)
    accumulator = 2 * hidden_size * dtype.itemsize // bytes_per_logit
    tokens = max(accumulator, CHUNK_TOKENS * 2 * dtype.itemsize // max(bytes_per_logit, 2 * dtype.itemsize))
    if n_valid * vocab_size * bytes_per_logit <= ONE_CHUNK:
        tokens = max(tokens, n_valid)
    return tokens * vocab_size


def chunk_and_tile(
    options: LogitOptions,
    head_shape: Sequence[int],
    dtype: torch.dtype,
    n_valid: int,
    bytes_per_logit: int,
    wants_weight: bool,
) -> tuple[int, int]:
    """Return the tokens of a distillation chunk, and of a tile of teacher logits.

    dW takes one product per chunk, so long chunks are better than long tiles.
    """
    vocab_size, logit = head_shape[0], dtype.itemsize
    tokens = max(1, budget_elements(options, head_shape, dtype, n_valid, bytes_per_logit) // vocab_size)
    beside = max(0, bytes_per_logit - logit)
    if not (beside and wants_weight):
        return tokens, tokens
    more = max(1, TEACHER_VOCAB // vocab_size)
    if options.logits_budget is None and n_valid * vocab_size * logit <= ONE_CHUNK:
        tile = max(1, min(n_valid, more * TEACHER_TOKENS))
        if 2 * tile * beside <= n_valid * logit:
            return max(tokens, n_valid), tile
    tile = max(min(tokens, more * FEWEST_TEACHER_TOKENS), min(tokens // 2, more * TEACHER_TOKENS))
    return (tokens * bytes_per_logit - tile * beside) // logit, tile


# Products of few rows are slow.
_FEW_ROWS, _LARGE_VOCAB, _MANY_CHUNKS = 16, 8192, 16


def warn_of_few_rows(options: LogitOptions, vocab_size: int, bytes_per_logit: int, n_valid: int) -> None:
    budget = options.logits_budget
    if budget is None or vocab_size < _LARGE_VOCAB:
        return
    assert isinstance(budget, int)
    row = vocab_size * bytes_per_logit
    rows = budget // row
    if rows < _FEW_ROWS and n_valid > _MANY_CHUNKS * max(1, rows):
        _warn_of_few_rows(budget, vocab_size, row, rows)


@functools.cache
def _warn_of_few_rows(budget: int, vocab_size: int, row: int, rows: int) -> None:
    holds = "less than one row" if rows == 0 else f"only {rows} row{'s' if rows > 1 else ''}"
    warnings.warn(
        f"logits_budget={budget} bytes holds {holds} of logits: a row takes {row} bytes for a vocabulary of "
        f"{vocab_size}, and so many small chunks are slow. Pass a larger budget, such as '256MiB', or None to choose "
        "it automatically",
        UserWarning,
        stacklevel=2,
    )


def _even(n: int, limit: int) -> int:
    """Return the size of the fewest nearly equal pieces of at most `limit`."""
    size = -(-n // -(-n // limit))
    return min(limit, -(-size // ROUND) * ROUND)


def pieces(n: int, limit: int) -> list[slice]:
    size = _even(n, limit) if n else 1
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def chunks(layout: Layout, vocab_size: int, elements: int, whole_batch: bool = False) -> list[Chunk]:
    """Cut the batch into chunks of whole groups within `elements` logits, or of one larger group."""
    limit, n_valid, cut_lengths = max(1, elements // vocab_size), layout.n_valid, layout.cut_lengths
    total, n_groups = (n_valid, n_valid) if cut_lengths is None else (sum(cut_lengths), len(cut_lengths))
    if whole_batch or total <= limit:
        return [Chunk(slice(0, n_valid), slice(0, n_groups))]
    if cut_lengths is None or layout.group_lengths is None:
        # Short chunks take as long as long ones.
        return [Chunk(rows, rows) for rows in pieces(n_valid, limit)]
    result = []
    first_row = first_group = row = held = 0
    for group, (length, longest) in enumerate(zip(layout.group_lengths, cut_lengths, strict=True)):
        if held and held + longest > limit:
            result.append(Chunk(slice(first_row, row), slice(first_group, group)))
            first_row, first_group, held = row, group, 0
        row += length
        held += longest
    result.append(Chunk(slice(first_row, n_valid), slice(first_group, n_groups)))
    return result


def tiles(n_rows: int, vocab_size: int, elements: int, square: bool = False) -> list[Tile]:
    """Cut a chunk into tiles within `elements` logits: along the vocabulary, then rows if slices get narrow.

    Each slice of dW is written once, unless rows are cut. `square` tiles (docs/tuning.md) need a dW that sums a slice's
    blocks apart.
    """
    if n_rows == 0:
        return []
    if vocab_size == 0:  # only padding
        return [Tile(slice(0, n_rows), slice(0, 0))]
    columns = elements // n_rows
    rows = n_rows
    side = math.isqrt(elements)
    if columns >= vocab_size:
        columns = vocab_size
    elif square and MIN_TILE_COLUMNS <= side < n_rows // 2:
        columns = _even(vocab_size, side // ROUND * ROUND)
        rows = _even(n_rows, elements // columns // ROUND * ROUND)
    elif columns < min(MIN_TILE_COLUMNS, vocab_size):
        columns = min(MIN_TILE_COLUMNS, vocab_size, elements)
        rows = min(n_rows, max(1, elements // columns))
    else:
        # Only the last slice is kept; a short one saves little.
        columns = _even(vocab_size, columns // ROUND * ROUND or columns)
    return [
        Tile(slice(r, min(r + rows, n_rows)), slice(v, min(v + columns, vocab_size)))
        for v in range(0, vocab_size, columns)
        for r in range(0, n_rows, rows)
    ]
