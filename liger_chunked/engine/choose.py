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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from liger_chunked.engine import cutting, epilogue
from liger_chunked.engine.cutting import Budget, Chunk, Tiles
from liger_chunked.engine.epilogue import EpiloguePass, StatisticsPass
from liger_chunked.engine.filtered import FilteredPass, SamplingFilter
from liger_chunked.engine.gradients import HeadGradients
from liger_chunked.engine.head import HeadPass, Tokens
from liger_chunked.engine.rows import Rows
from liger_chunked.engine.scattered import ScatteredRows, scatter_rows
from liger_chunked.engine.shard import ShardedPass
from liger_chunked.engine.token_pass import TokenPass
from liger_chunked.kernels.operands import along
from liger_chunked.kernels.tuning.generic import SMALLEST_OF_LIVE_ROWS
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
        rows: the tokens that count, in the order of the chunks.
        chunks: consecutive parts of `rows`.
        tiles: of each chunk; whole rows with a teacher.
        dtype: of the matrix products.
        n_contributions: how often the step adds to each element of dW.
        path: what computes statistics. A loss leaves `Path.EPILOGUE` for logits if its dW is rounded (`pass_of_loss`).
        outputs, differentiates: the statistics to compute, and those that the gradient may reach.
        class_weight: (V,) weights of `mean_logits`.
        filter: of `Path.FILTERED`.
        scattered: which rows each rank holds, if ranks split both vocabulary and hidden states.
        skips_rows: whether the backward of a chunk counts its rows with a gradient, and leaves the others out.
    """

    rows: Rows
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
    scattered: ScatteredRows | None = None
    skips_rows: bool = False

    def tokens(self, i: int, flat: Tensor, flat_u: Tensor | None) -> Tokens:
        """Return chunk `i` of flattened hidden states (N, H), and of an adapter's `u` (N, r)."""
        row_slice, target, side = self.chunks[i].row_slice, self.rows.target, self.rows.side
        assert target is not None
        return Tokens(
            x=self.take(flat, row_slice),
            target=along(target, row_slice),
            row_slice=row_slice,
            tiles=self.tiles[i],
            u=None if flat_u is None else self.take(flat_u, row_slice),
            side=side and {name: along(x, row_slice) for name, x in side.items()},
        )

    def take(self, flat: Tensor, row_slice: slice) -> Tensor:
        """Return a chunk's rows of (N, ...), in the products' dtype."""
        if self.scattered is not None:
            return self.scattered.gather(flat, row_slice, self.dtype)
        return self.rows.take(flat, row_slice).to(self.dtype)

    def reader(self, input: Tensor, row_slice: slice, dtype: torch.dtype) -> Callable[[slice], Tensor]:
        """Return a function that reads parts of a chunk from another model's hidden states (..., H)."""
        flat = input.reshape(-1, input.shape[-1])
        if self.scattered is None:
            return lambda part: self.rows.take(flat, part).to(dtype)
        chunk, start = self.scattered.gather(flat, row_slice, dtype), row_slice.start
        return lambda part: along(chunk, slice(part.start - start, part.stop - start))

    def tensors(self) -> dict[str, Tensor | None]:
        """Return, by name, what a later backward reads of the plan."""
        return {"class_weight": self.class_weight, **self.rows.tensors()}

    def without_tensors(self) -> Plan:
        """Return a plan that holds none of `tensors`; `with_tensors` gives them back."""
        return replace(self, rows=self.rows.without_tensors(), class_weight=None)

    def with_tensors(self, tensors: Mapping[str, Tensor | None]) -> Plan:
        of_rows = dict(tensors)
        return replace(self, class_weight=of_rows.pop("class_weight"), rows=self.rows.with_tensors(of_rows))

    @property
    def most_rows(self) -> int:
        """The most rows of a tile."""
        return max((rows.stop - rows.start for tiles in self.tiles for rows, _ in tiles), default=0)

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
    vocab_size, hidden_size = head.weight.shape
    if head.shard is not None:
        assert head.rank_facts is not None  # `check_projection` asked them
        vocab_size = head.rank_facts.most_columns
    assert options.logits_budget is None or isinstance(options.logits_budget, int)
    return Budget(options.logits_budget, vocab_size, hidden_size, dtype.itemsize)


def _all_ranks_have_wide_tiles(head: LossHead) -> bool:
    return head.rank_facts is None or head.rank_facts.have_wide_tiles


@dataclass(frozen=True)
class _Cut:
    """Chunks, and their tiles of at most `limit` logits on the rank with most columns."""

    chunks: tuple[Chunk, ...]
    limit: int
    tiles: tuple[Tiles, ...]


def _cut_batch(rows: Rows, budget: Budget, n_tokens: int, bytes_per_logit: int, whole_batch: bool) -> _Cut:
    limit = budget.logits(n_tokens, bytes_per_logit)
    tokens = max(1, limit // budget.vocab_size)
    n_valid, groups = rows.n_valid, rows.groups
    if whole_batch or (groups is not None and sum(groups.cut_counts) <= tokens):
        n_groups = n_valid if groups is None else len(groups.host_counts)
        chunks: tuple[Chunk, ...] = (Chunk(slice(0, n_valid), slice(0, n_groups)),)
    elif groups is None:
        chunks = cutting.chunks_of_tokens(n_valid, tokens)
    else:
        chunks = cutting.chunks_of_groups(groups.host_counts, groups.cut_counts, tokens)
    return _Cut(chunks, limit, _tiles(chunks, budget.vocab_size, limit))


def _tiles(chunks: tuple[Chunk, ...], columns: int, limit: int) -> tuple[Tiles, ...]:
    return tuple([cutting.tiles(chunk.length, columns, limit) for chunk in chunks])


def for_loss(
    head: LossHead,
    rows: Rows,
    dtype: torch.dtype,
    *,
    outputs: tuple[str, ...],
    differentiates: tuple[str, ...],
    options: LogitOptions,
    whole_batch: bool,
    wide_tiles: bool,
    class_weight: Tensor | None = None,
    skips_rows: bool = False,
) -> Plan:
    """Plan a loss whose gradients come in the forward.

    Args:
        dtype: of the matrix products.
        whole_batch: whether the objective needs all groups in one chunk.
        wide_tiles: whether the GPU runs the fused epilogue.
        class_weight: (V,) weights of `mean_logits`.
        skips_rows: whether to look for rows without a gradient, where that pays.
    """
    budget = budget_of(head, options, dtype)
    n_tokens = rows.n_valid if rows.groups is None else sum(rows.groups.cut_counts)
    differentiates = tuple([name for name in DIFFERENTIABLE if name in differentiates and name in outputs])
    bytes_per_logit = logit_bytes(options, dtype)
    _warn_of_few_rows(budget, bytes_per_logit, rows.n_valid)

    cut, path = _cut_batch(rows, budget, n_tokens, bytes_per_logit, whole_batch), Path.LOGITS
    if (
        wide_tiles
        and not rows.side
        and epilogue.is_large(rows.n_valid * budget.vocab_size, budget.hidden_size)
        and _all_ranks_have_wide_tiles(head)
    ):
        serves = functools.partial(epilogue.serves, head, dtype, options, class_weight, outputs, differentiates)
        is_one_chunk = len(cut.chunks) == 1
        # Ranks that split sequences must cut the same chunks, but each would judge its own tiles.
        if not rows.ranks_cut_alike and (is_one_chunk or bytes_per_logit > dtype.itemsize):
            # The epilogue keeps exponentials in the products' dtype, never float32 logits, and no whole batch of them.
            # 0 tokens: not in one chunk.
            several = _cut_batch(rows, budget, 0, dtype.itemsize, whole_batch)
            is_better = (
                epilogue.instead_of_one_chunk(several.tiles, budget.hidden_size)
                if is_one_chunk
                else len(several.chunks) > 1
            )
            if is_better and serves(several.tiles):
                cut = several
        path = Path.EPILOGUE if serves(cut.tiles) else Path.LOGITS
    tiles = cut.tiles if head.columns == budget.vocab_size else _tiles(cut.chunks, head.columns, cut.limit)
    rows, scattered = scatter_rows(rows if len(cut.chunks) == 1 else rows.in_group_order(), cut.chunks, head)
    return Plan(
        rows=rows,
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
        skips_rows=skips_rows and _pays_to_skip_rows(rows, scattered, budget, len(cut.chunks)),
    )


def _pays_to_skip_rows(rows: Rows, scattered: ScatteredRows | None, budget: Budget, n_chunks: int) -> bool:
    """Whether a chunk's products take much longer than counting its rows with a gradient, and the host may wait.

    Ranks that split hidden states each send a fixed number of rows. Candidates have gradients of their own.
    """
    product = rows.n_valid // n_chunks * budget.vocab_size * budget.hidden_size
    return (
        rows.host_may_sync and scattered is None and "candidates" not in rows.side and product >= SMALLEST_OF_LIVE_ROWS
    )


def for_statistics(
    head: LossHead,
    rows: Rows,
    dtype: torch.dtype,
    *,
    outputs: tuple[str, ...],
    options: LogitOptions,
    class_weight: Tensor | None = None,
    filter: SamplingFilter | None = None,
    needs_grad: bool = True,
    wide_tiles: bool = False,
    batch_invariant: bool = False,
) -> Plan:
    """Plan a forward whose backward comes later, in one chunk.

    Args:
        batch_invariant: whether a token's bits may not depend on the batch.

    Raises:
        ValueError: nothing computes such statistics independently of the batch on this GPU.
    """
    budget, bytes_per_logit = budget_of(head, options, dtype), logit_bytes(options, dtype)
    _warn_of_few_rows(budget, bytes_per_logit, rows.n_valid)
    n_valid, columns = rows.n_valid, head.columns
    path, tiles = Path.LOGITS, None
    if filter is not None:
        path = Path.FILTERED
        tiles = cutting.whole_rows(n_valid, columns, budget.logits(0, bytes_per_logit) // columns)
    elif (
        wide_tiles
        and not rows.side
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
        if n_valid and head.weight.device.type != "cpu":
            raise ValueError(
                'deterministic="batch" on a GPU needs Hopper, bfloat16, contiguous weights with H a multiple of 8, '
                'outputs among "logps", "lse", "entropy" and "mean_logits", and no bias, adapter, softcap, '
                "candidates or temperature of tokens; got another call"
            )
    if tiles is None:
        tiles = cutting.tiles(n_valid, columns, budget.logits(0, bytes_per_logit), square=True)
    chunks = (Chunk(slice(0, n_valid), slice(0, n_valid)),)
    rows, scattered = scatter_rows(rows, chunks, head)
    return Plan(
        rows=rows,
        scattered=scattered,
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
        skips_rows=needs_grad and filter is None and _pays_to_skip_rows(rows, scattered, budget, 1),
    )


def for_distillation(
    head: LossHead,
    rows: Rows,
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
    budget, n_valid = budget_of(head, options, dtype), rows.n_valid
    _warn_of_few_rows(budget, bytes_per_logit, n_valid)
    chunk_tokens, tile_rows = cutting.chunk_and_tile(budget, n_valid, bytes_per_logit, wants_weight)
    chunks = cutting.chunks_of_tokens(n_valid, chunk_tokens)
    rows, scattered = scatter_rows(rows, chunks, head)
    return Plan(
        rows=rows,
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
        epilogue_pass = EpiloguePass(epilogue.readable(head), plan.options, plan.outputs, grads, plan.skips_rows)
        epilogue_pass.reserve(plan.largest_tile)
        return epilogue_pass
    return _pass_of_logits(plan, head, grads)


def pass_of_statistics(plan: Plan, head: HeadTensors, holds: bool = False) -> HeadPass | StatisticsPass:
    """Return what runs `linear_token_stats`. `holds` keeps the last tile in memory for the backward."""
    if plan.path is Path.EPILOGUE:
        readable, tile = epilogue.readable(head), plan.largest_tile
        return StatisticsPass(readable, plan.options, plan.outputs, tile, holds, skips_rows=plan.skips_rows)
    return _pass_of_logits(plan, head, None)


def _pass_of_logits(plan: Plan, head: HeadTensors, grads: HeadGradients | None) -> HeadPass:
    logits_pass: HeadPass
    if plan.path is Path.FILTERED:
        assert plan.filter is not None
        logits_pass = FilteredPass(head, plan.options, plan.outputs, grads=grads, filter=plan.filter)
    else:
        kind = TokenPass if plan.path is Path.BY_TOKEN else HeadPass if head.shard is None else ShardedPass
        logits_pass = kind(head, plan.options, plan.outputs, plan.class_weight, grads, plan.skips_rows)
    logits_pass.reserve(plan.largest_tile)
    return logits_pass


# Products of fewer rows are slow; small vocabularies and few chunks cost little in all.
_FEW_ROWS, _LARGE_VOCAB, _MANY_CHUNKS = 16, 8192, 16


def _warn_of_few_rows(budget: Budget, bytes_per_logit: int, n_valid: int) -> None:
    if budget.given is None or budget.vocab_size < _LARGE_VOCAB:
        return
    row = budget.vocab_size * bytes_per_logit
    n_rows = budget.given // row
    if n_rows < _FEW_ROWS and n_valid > _MANY_CHUNKS * max(1, n_rows):
        _warn_once_of_few_rows(budget.given, budget.vocab_size, row, n_rows)


@functools.cache
def _warn_once_of_few_rows(budget: int, vocab_size: int, row: int, n_rows: int) -> None:
    holds = "less than one row" if n_rows == 0 else f"only {n_rows} row{'s' if n_rows > 1 else ''}"
    warnings.warn(
        f"logits_budget={budget} bytes holds {holds} of logits: a row takes {row} bytes for a vocabulary of "
        f"{vocab_size}, and so many small chunks are slow. Pass a larger budget, such as '256MiB', or None to choose "
        "it automatically",
        UserWarning,
        stacklevel=2,
    )
