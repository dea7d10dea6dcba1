"""Decide how a step runs: the only place that looks at options, dtypes, shapes and the GPU, and takes a path.

    for_loss          loss with its gradients in the forward, in chunks
    for_statistics    `linear_token_stats`, whose backward comes later, in one chunk
    for_distillation  two heads, in chunks of the student and tiles of the teacher

Each returns a `Plan`. `pass_of_loss` and `pass_of_statistics` then make what runs it: what is known only once the
gradients are set up, whether dW is float32, decides there.
"""

from __future__ import annotations

import enum
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_chunked.engine import cutting, epilogue
from liger_chunked.engine.batch import Layout, along
from liger_chunked.engine.candidates import Candidates
from liger_chunked.engine.checks import ranks_of
from liger_chunked.engine.cutting import Budget, Chunk, Tiles
from liger_chunked.engine.epilogue import EpiloguePass, StatisticsPass
from liger_chunked.engine.filtered import FilteredPass, SamplingFilter
from liger_chunked.engine.gradients import HeadGradients
from liger_chunked.engine.head import HeadPass, Tokens
from liger_chunked.engine.scattered import ScatteredRows, scatter_rows
from liger_chunked.engine.shard import ShardedPass
from liger_chunked.engine.token_pass import TokenPass
from liger_chunked.types import DIFFERENTIABLE, HeadTensors, LogitOptions, LossHead, VocabShard


class Path(enum.Enum):
    """What computes the logits of a tile and reduces them."""

    LOGITS = "logits"  # a product, then a kernel that reads its logits
    EPILOGUE = "epilogue"  # a product that reduces its logits in its epilogue: Hopper, bfloat16
    FILTERED = "filtered"  # logits of whole rows, of which a sampling filter keeps some
    BY_TOKEN = "by token"  # logits of one token at a time, whose bits do not depend on its neighbours


@dataclass(eq=False)
class Plan:
    """How a step is cut, and what computes it.

    Attributes:
        layout: the tokens with a target, in the order of the chunks' rows.
        chunks: rows of the layout, in order.
        tiles: of each chunk; whole rows with a teacher.
        dtype: of the matrix products.
        n_contributions: how often the step adds to each element of dW.
        path: what computes statistics. A loss leaves `Path.EPILOGUE` for logits if its dW is rounded (`pass_of_loss`).
        outputs, differentiates: the statistics to compute, and those that the gradient may reach.
        class_weight: (V,) weights of `mean_logits`.
        filter: of `Path.FILTERED`.
        candidates: (n_valid, K) ids.
        scattered: which rows each rank holds, if ranks split both vocabulary and hidden states.
    """

    layout: Layout
    chunks: tuple[Chunk, ...]
    tiles: tuple[Tiles, ...]
    dtype: torch.dtype
    n_contributions: int
    options: LogitOptions
    path: Path = Path.LOGITS
    outputs: tuple[str, ...] = ()
    differentiates: tuple[str, ...] = ()
    class_weight: Tensor | None = None
    shard: VocabShard | None = None
    filter: SamplingFilter | None = None
    candidates: Tensor | None = None
    scattered: ScatteredRows | None = None

    def tokens(self, i: int, flat: Tensor, flat_u: Tensor | None) -> Tokens:
        """Return chunk `i` of flattened hidden states (N, H), and of an adapter's `u` (N, r)."""
        rows, temperature = self.chunks[i].rows, self.layout.temperature
        return Tokens(
            x=self._input_rows(flat, rows),
            target=along(self.layout.target, rows),
            rows=rows,
            tiles=self.tiles[i],
            u=None if flat_u is None else self._input_rows(flat_u, rows),
            temperature=None if temperature is None else along(temperature, rows),
        )

    def _input_rows(self, flat: Tensor, rows: slice) -> Tensor:
        if self.scattered is not None:
            return self.scattered.gather(flat, rows, self.dtype)
        return self.layout.input_rows(flat, rows).to(self.dtype)

    def reader(self, input: Tensor, rows: slice, dtype: torch.dtype) -> Callable[[slice], Tensor]:
        """Return a function that reads parts of a chunk's `rows` from another model's hidden states (..., H)."""
        flat = input.reshape(-1, input.shape[-1])
        if self.scattered is None:
            return lambda part: self.layout.input_rows(flat, part).to(dtype)
        chunk = self.scattered.gather(flat, rows, dtype)
        return lambda part: along(chunk, slice(part.start - rows.start, part.stop - rows.start))

    @property
    def most_rows(self) -> int:
        """The most rows of a tile."""
        return max((tile.rows.stop - tile.rows.start for tiles in self.tiles for tile in tiles), default=0)

    @property
    def largest_tile(self) -> int:
        """The most logits of a tile."""
        return max(map(cutting.largest, self.tiles))


def flattened(input: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return hidden states and an adapter's `u` as (N, H) and (N, r)."""
    return input.reshape(-1, input.shape[-1]), None if u is None else u.reshape(-1, u.shape[-1])


def logit_bytes(options: LogitOptions, dtype: torch.dtype) -> int:
    """Return the bytes of a logit, and of its gradient unless that replaces it."""
    if options.logits_dtype in (None, dtype):
        return dtype.itemsize
    if dtype == torch.float64:
        raise ValueError(f"logits_dtype must be None for products in {dtype}, got {options.logits_dtype}")
    assert options.logits_dtype is not None
    return options.logits_dtype.itemsize + dtype.itemsize


def budget_of(head: LossHead, options: LogitOptions, dtype: torch.dtype) -> Budget:
    """Return the budget of a head, or of the rank whose part of it has most rows."""
    rows, hidden_size = head.weight.shape
    vocab_size = rows if head.shard is None else ranks_of(head.shard, rows).columns
    assert options.logits_budget is None or isinstance(options.logits_budget, int)
    return Budget(options.logits_budget, vocab_size, hidden_size, dtype.itemsize)


def _all_ranks_have_wide_tiles(head: LossHead) -> bool:
    return head.shard is None or ranks_of(head.shard, head.weight.shape[0]).wide_tiles


@dataclass(frozen=True)
class _Cut:
    """Chunks, and their tiles of at most `limit` logits on the rank with most columns."""

    chunks: tuple[Chunk, ...]
    limit: int
    tiles: tuple[Tiles, ...]


def _cut_batch(layout: Layout, budget: Budget, n_tokens: int, bytes_per_logit: int, whole_batch: bool) -> _Cut:
    limit = budget.logits(n_tokens, bytes_per_logit)
    tokens = max(1, limit // budget.vocab_size)
    lengths, cut_lengths = layout.group_lengths, layout.cut_lengths
    n_valid, n_groups = layout.n_valid, layout.n_valid if lengths is None else len(lengths)
    if whole_batch or (cut_lengths is not None and sum(cut_lengths) <= tokens):
        chunks: tuple[Chunk, ...] = (Chunk(slice(0, n_valid), slice(0, n_groups)),)
    elif lengths is None or cut_lengths is None:
        chunks = cutting.chunks_of_tokens(n_valid, tokens)
    else:
        chunks = cutting.chunks_of_groups(lengths, cut_lengths, tokens)
    return _Cut(chunks, limit, _tiles(chunks, budget.vocab_size, limit))


def _tiles(chunks: tuple[Chunk, ...], columns: int, limit: int) -> tuple[Tiles, ...]:
    return tuple([cutting.tiles(chunk.length, columns, limit) for chunk in chunks])


def for_loss(
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
    """Plan a loss whose gradients come in the forward.

    Args:
        dtype: of the matrix products.
        whole_batch: whether the objective needs all groups in one chunk.
        wide_tiles: whether the GPU runs the fused epilogue.
        class_weight: (V,) weights of `mean_logits`.
    """
    budget = budget_of(head, options, dtype)
    n_tokens = layout.n_valid if layout.cut_lengths is None else sum(layout.cut_lengths)
    differentiates = tuple(name for name in DIFFERENTIABLE if name in differentiates and name in outputs)
    bytes_per_logit = logit_bytes(options, dtype)
    _warn_of_few_rows(budget, bytes_per_logit, layout.n_valid)

    cut, path = _cut_batch(layout, budget, n_tokens, bytes_per_logit, whole_batch), Path.LOGITS
    if (
        wide_tiles
        and layout.temperature is None
        and epilogue.is_large(layout.n_valid * budget.vocab_size, budget.hidden_size)
        and _all_ranks_have_wide_tiles(head)
    ):
        serves = functools.partial(epilogue.serves, head, dtype, options, class_weight, outputs, differentiates)
        is_one_chunk = len(cut.chunks) == 1
        # Ranks that split sequences must cut the same chunks, but each would judge its own tiles.
        if not layout.ranks_cut_alike and (is_one_chunk or bytes_per_logit > dtype.itemsize):
            # The epilogue keeps exponentials in the products' dtype, never float32 logits, and no whole batch of them.
            # 0 tokens: not in one chunk.
            several = _cut_batch(layout, budget, 0, dtype.itemsize, whole_batch)
            is_better = (
                epilogue.instead_of_one_chunk(several.tiles, budget.hidden_size)
                if is_one_chunk
                else len(several.chunks) > 1
            )
            if is_better and serves(several.tiles):
                cut = several
        path = Path.EPILOGUE if serves(cut.tiles) else Path.LOGITS
    tiles = cut.tiles if head.columns == budget.vocab_size else _tiles(cut.chunks, head.columns, cut.limit)
    layout, scattered = scatter_rows(layout if len(cut.chunks) == 1 else layout.by_group(), cut.chunks, head.shard)
    return Plan(
        layout=layout,
        scattered=scattered,
        chunks=cut.chunks,
        tiles=tiles,
        dtype=dtype,
        n_contributions=sum(map(cutting.row_blocks, tiles)),
        options=options,
        path=path,
        outputs=outputs,
        differentiates=differentiates,
        class_weight=class_weight,
        shard=head.shard,
    )


def for_statistics(
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
    """Plan a forward whose backward comes later, in one chunk.

    Args:
        candidates: (N, K) ids of all positions.
        batch_invariant: whether a token's bits may not depend on the batch.

    Raises:
        ValueError: nothing computes such statistics independently of the batch on this GPU.
    """
    budget, bytes_per_logit = budget_of(head, options, dtype), logit_bytes(options, dtype)
    _warn_of_few_rows(budget, bytes_per_logit, layout.n_valid)
    n_valid, columns = layout.n_valid, head.columns
    path, tiles = Path.LOGITS, None
    if filter is not None:
        path = Path.FILTERED
        tiles = cutting.whole_rows(n_valid, columns, budget.logits(0, bytes_per_logit) // columns)
    elif (
        wide_tiles
        and candidates is None
        and layout.temperature is None
        and (batch_invariant or epilogue.is_large(n_valid * budget.vocab_size, budget.hidden_size))
        and _all_ranks_have_wide_tiles(head)
    ):
        # The epilogue keeps gradients in the products' dtype, never float32 logits.
        limit = budget.logits(0, dtype.itemsize)
        of_epilogue = cutting.tiles(n_valid, budget.vocab_size, limit, square=True)
        if epilogue.serves_statistics(
            head, dtype, options, class_weight, outputs, of_epilogue, needs_grad, at_any_size=batch_invariant
        ):
            path, tiles = Path.EPILOGUE, cutting.tiles(n_valid, columns, limit, square=True)
    if batch_invariant and path is Path.LOGITS:
        path, tiles = Path.BY_TOKEN, cutting.single_rows(n_valid, columns)
        if n_valid and layout.target.device.type != "cpu":
            raise ValueError(
                'deterministic="batch" on a GPU needs Hopper, bfloat16, contiguous weights with H a multiple of 8, '
                'outputs among "logps", "lse", "entropy" and "mean_logits", and no bias, adapter, softcap, '
                "candidates or temperature of tokens; got another call"
            )
    if tiles is None:
        tiles = cutting.tiles(n_valid, columns, budget.logits(0, bytes_per_logit), square=True)
    chunks = (Chunk(slice(0, n_valid), slice(0, n_valid)),)
    layout, scattered = scatter_rows(layout, chunks, head.shard)
    if candidates is not None and layout.slots is not None:
        candidates = candidates[layout.slots]
    return Plan(
        layout=layout,
        scattered=scattered,
        candidates=candidates,
        chunks=chunks,
        tiles=(tiles,),
        dtype=dtype,
        n_contributions=min(1, len(tiles)),
        options=options,
        path=path,
        outputs=outputs,
        class_weight=class_weight,
        shard=head.shard,
        filter=filter,
    )


def for_distillation(
    head: LossHead,
    layout: Layout,
    dtype: torch.dtype,
    *,
    bytes_per_logit: int,
    options: LogitOptions,
    wants_weight: bool,
) -> Plan:
    """Plan a distillation loss. Tiles are whole rows, for which the teacher's logits are computed.

    Args:
        bytes_per_logit: of a student's logit with all that lives beside it for a tile.
        wants_weight: whether dW is computed.
    """
    budget, n_valid = budget_of(head, options, dtype), layout.n_valid
    _warn_of_few_rows(budget, bytes_per_logit, n_valid)
    chunk_tokens, tile_rows = cutting.chunk_and_tile(budget, n_valid, bytes_per_logit, wants_weight)
    chunks = cutting.chunks_of_tokens(n_valid, chunk_tokens)
    layout, scattered = scatter_rows(layout, chunks, head.shard)
    return Plan(
        layout=layout,
        scattered=scattered,
        chunks=chunks,
        tiles=tuple(cutting.whole_rows(chunk.length, head.columns, tile_rows) for chunk in chunks),
        dtype=dtype,
        n_contributions=len(chunks) if n_valid else 0,
        options=options,
        shard=head.shard,
    )


def pass_of_loss(plan: Plan, head: HeadTensors, grads: HeadGradients | None) -> HeadPass | EpiloguePass:
    """Return what runs a loss's chunks. `head` is in the products' dtype; without `grads`, nothing has a gradient."""
    # The epilogue adds rows of targets to dW in float32, and cannot add them to a rounded one.
    if plan.path is Path.EPILOGUE and (grads is None or grads.accumulates):
        epilogue_pass = EpiloguePass(epilogue.readable(head), plan.options, plan.outputs, grads)
        epilogue_pass.reserve(plan.largest_tile)
        return epilogue_pass
    return _pass_of_logits(plan, head, grads)


def pass_of_statistics(plan: Plan, head: HeadTensors, holds: bool = False) -> HeadPass | StatisticsPass:
    """Return what runs `linear_token_stats`. `holds` keeps the last tile in memory for the backward."""
    if plan.path is Path.EPILOGUE:
        return StatisticsPass(epilogue.readable(head), plan.options, plan.outputs, plan.largest_tile, holds)
    return _pass_of_logits(plan, head, None)


def _pass_of_logits(plan: Plan, head: HeadTensors, grads: HeadGradients | None) -> HeadPass:
    logits_pass: HeadPass
    if plan.path is Path.FILTERED:
        assert plan.filter is not None
        logits_pass = FilteredPass(head, plan.options, plan.outputs, grads=grads, filter=plan.filter)
    else:
        kind = TokenPass if plan.path is Path.BY_TOKEN else HeadPass if head.shard is None else ShardedPass
        logits_pass = kind(head, plan.options, plan.outputs, plan.class_weight, grads)
    if plan.candidates is not None:
        logits_pass.candidates = Candidates(plan.candidates)
    logits_pass.reserve(plan.largest_tile)
    return logits_pass


# Products of fewer rows are slow; small vocabularies and few chunks cost little in all.
_FEW_ROWS, _LARGE_VOCAB, _MANY_CHUNKS = 16, 8192, 16


def _warn_of_few_rows(budget: Budget, bytes_per_logit: int, n_valid: int) -> None:
    if budget.given is None or budget.vocab_size < _LARGE_VOCAB:
        return
    row = budget.vocab_size * bytes_per_logit
    rows = budget.given // row
    if rows < _FEW_ROWS and n_valid > _MANY_CHUNKS * max(1, rows):
        _warn_once_of_few_rows(budget.given, budget.vocab_size, row, rows)


@functools.cache
def _warn_once_of_few_rows(budget: int, vocab_size: int, row: int, rows: int) -> None:
    holds = "less than one row" if rows == 0 else f"only {rows} row{'s' if rows > 1 else ''}"
    warnings.warn(
        f"logits_budget={budget} bytes holds {holds} of logits: a row takes {row} bytes for a vocabulary of "
        f"{vocab_size}, and so many small chunks are slow. Pass a larger budget, such as '256MiB', or None to choose "
        "it automatically",
        UserWarning,
        stacklevel=2,
    )
