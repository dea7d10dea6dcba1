"""Decide how a step runs: the only place that looks at options, dtypes, shapes and the GPU, and takes a path.

    for_loss          loss with its gradients in the forward, in chunks
    for_statistics    `linear_token_stats`, whose backward comes later, in one chunk
    for_distillation  two heads, in chunks of the student and tiles of the teacher

Each returns a `Plan`. `source_of_loss` and `source_of_statistics` then make what runs it. They come later, because
whether dW is float32 is known only then.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.engine import cutting, epilogue
from liger_chunked.engine.cutting import Budget, Chunk, Tiles
from liger_chunked.engine.epilogue import EpilogueSource, EpilogueStatistics
from liger_chunked.engine.invariant import ByTokenSource, InvariantSource
from liger_chunked.engine.kept_products import KeptProducts
from liger_chunked.engine.plan import Path, Plan
from liger_chunked.engine.rank_rows import on_this_rank
from liger_chunked.engine.rows import Rows
from liger_chunked.engine.scattered import scatter_rows
from liger_chunked.engine.sink import Sink
from liger_chunked.engine.source import LogitsSource, ShardedSource, Source
from liger_chunked.kernels.backend import has_wide_tiles, torch_on_host
from liger_chunked.kernels.kept import Entries
from liger_chunked.kernels.tuning.generic import KEPT_OF_VOCAB, SMALLEST_OF_KEPT, SMALLEST_OF_LIVE_ROWS
from liger_chunked.shapes import shapes_only
from liger_chunked.types import DIFFERENTIABLE, HeadTensors, LogitOptions, LossHead, accumulation_dtype, caller_outside
from liger_chunked.what_ran import noted


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


def _runs_epilogue(head: LossHead) -> bool:
    """Whether the GPU, or the GPUs of all ranks, run the fused epilogue."""
    return has_wide_tiles(head.weight.device) and (head.rank_facts is None or head.rank_facts.have_wide_tiles)


class Counts(NamedTuple):
    """The numbers of tokens that decide where chunks end: those of `Groups`, or None if groups are tokens."""

    n_valid: int
    host_counts: tuple[int, ...] | None = None
    cut_counts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class _Cut:
    """Chunks, and their tiles of at most `limit` logits on the rank with most columns."""

    chunks: tuple[Chunk, ...]
    limit: int
    tiles: tuple[Tiles, ...]


def _cut_batch(counts: Counts, budget: Budget, n_tokens: int, bytes_per_logit: int, whole_batch: bool) -> _Cut:
    limit = budget.logits(n_tokens, bytes_per_logit)
    tokens = max(1, limit // budget.vocab_size)
    n_valid, host_counts, cut_counts = counts
    if whole_batch or (cut_counts is not None and sum(cut_counts) <= tokens):
        n_groups = n_valid if host_counts is None else len(host_counts)
        chunks: tuple[Chunk, ...] = (Chunk(slice(0, n_valid), slice(0, n_groups)),)
    elif host_counts is None or cut_counts is None:
        chunks = cutting.chunks_of_tokens(n_valid, tokens)
    else:
        chunks = cutting.chunks_of_groups(host_counts, cut_counts, tokens)
    return _Cut(chunks, limit, _tiles(chunks, budget.vocab_size, limit))


def _tiles(chunks: tuple[Chunk, ...], columns: int, limit: int) -> tuple[Tiles, ...]:
    return tuple([cutting.tiles(chunk.length, columns, limit) for chunk in chunks])


class _Layout(NamedTuple):
    """What of a loss's plan follows from numbers and options. The fields are those of `Plan`."""

    chunks: tuple[Chunk, ...]
    tiles: tuple[Tiles, ...]
    n_contributions: int
    largest_tile: int
    path: Path
    differentiates: tuple[str, ...]


def layout_of_loss(
    counts: Counts,
    budget: Budget,
    columns: int,
    bytes_per_logit: int,
    options: LogitOptions,
    outputs: tuple[str, ...],
    differentiates: tuple[str, ...],
    whole_batch: bool,
    ranks_cut_alike: bool,
    may_use_epilogue: bool,
) -> _Layout:
    """Cut a batch and choose what runs its chunks.

    Args:
        columns: of this rank, at most `budget.vocab_size`.
        may_use_epilogue: whether the fused epilogue computes the statistics of this head at all.
    """
    n_tokens = counts.n_valid if counts.cut_counts is None else sum(counts.cut_counts)
    differentiates = tuple([name for name in DIFFERENTIABLE if name in differentiates and name in outputs])
    cut, path = _cut_batch(counts, budget, n_tokens, bytes_per_logit, whole_batch), Path.LOGITS
    if may_use_epilogue:
        serves = functools.partial(epilogue.serves, budget.hidden_size, options, differentiates)
        is_one_chunk = len(cut.chunks) == 1
        # Ranks that split sequences must cut the same chunks. What follows decides by the sizes of this rank's tiles,
        # which differ between ranks: one might cut again, and another not.
        if not ranks_cut_alike and (is_one_chunk or bytes_per_logit > budget.itemsize):
            # The epilogue keeps exponentials in the products' dtype, never float32 logits, and no whole batch of them.
            # 0 tokens: not in one chunk.
            several = _cut_batch(counts, budget, 0, budget.itemsize, whole_batch)
            is_better = (
                epilogue.instead_of_one_chunk(several.tiles, budget.hidden_size)
                if is_one_chunk
                else len(several.chunks) > 1
            )
            if is_better and serves(several.tiles):
                cut = several
        path = Path.EPILOGUE if serves(cut.tiles) else Path.LOGITS
    tiles = cut.tiles if columns == budget.vocab_size else _tiles(cut.chunks, columns, cut.limit)
    return _Layout(
        chunks=cut.chunks,
        tiles=tiles,
        n_contributions=sum(map(cutting.row_blocks, tiles)),
        largest_tile=max(map(cutting.largest, tiles)),
        path=path,
        differentiates=differentiates,
    )


# For steps on which the GPU waits for the host. Batches of one size are common.
_remembered_layout = functools.lru_cache(maxsize=cutting.REMEMBERED)(layout_of_loss)


def for_loss(
    head: LossHead,
    rows: Rows,
    dtype: torch.dtype,
    *,
    outputs: tuple[str, ...],
    differentiates: tuple[str, ...],
    options: LogitOptions,
    whole_batch: bool,
    class_weight: Tensor | None = None,
    skips_rows: bool = False,
) -> Plan:
    """Plan a loss whose gradients come in the forward.

    Args:
        dtype: of the matrix products.
        whole_batch: whether the objective needs all groups in one chunk.
        class_weight: (V,) weights of `mean_logits`.
        skips_rows: whether to look for rows without a gradient on a GPU, where that pays. A CPU always does.
    """
    if shapes_only():
        return _of_shapes(rows, dtype, options, outputs)
    rows = on_this_rank(rows, whole_batch)
    budget, bytes_per_logit = budget_of(head, options, dtype), logit_bytes(options, dtype)
    _warn_of_few_rows(budget, bytes_per_logit, rows.n_valid)
    may_use_epilogue = (
        not rows.side
        and epilogue.is_large(rows.n_valid * budget.vocab_size, budget.hidden_size)
        and _runs_epilogue(head)
        and epilogue.can_hold(dtype)
        and epilogue.computes(head, dtype, options, class_weight, outputs)
    )
    groups = rows.groups
    layout = (layout_of_loss if may_use_epilogue else _remembered_layout)(
        Counts(rows.n_valid) if groups is None else Counts(rows.n_valid, groups.host_counts, groups.cut_counts),
        budget,
        budget.vocab_size if head.shard is None else head.columns,
        bytes_per_logit,
        options,
        outputs,
        differentiates,
        whole_batch,
        rows.ranks_cut_alike,
        may_use_epilogue,
    )
    rows, scattered = scatter_rows(rows, layout.chunks, head)
    plan = Plan(
        rows=rows,
        dtype=dtype,
        options=options,
        outputs=outputs,
        class_weight=class_weight,
        shard=head.shard,
        scattered=scattered,
        **layout._asdict(),
        skips_rows=_skips_rows(head, rows, budget, len(layout.chunks), on_gpu=skips_rows),
    )
    return noted(plan, head)


def _of_shapes(rows: Rows, dtype: torch.dtype, options: LogitOptions, outputs: tuple[str, ...] = ()) -> Plan:
    """Plan a call that computes shapes alone, which may be symbols: in one chunk, without tiles."""
    return Plan(rows, (rows.every,), ((),), dtype, 0, 0, options, outputs=outputs)


def _skips_rows(head: LossHead, rows: Rows, budget: Budget, n_chunks: int, on_gpu: bool) -> bool:
    """Whether the backward of a chunk counts its rows with a gradient, and leaves the others out.

    A CPU always does, because it has the number at once. A GPU does where a chunk's products take much longer than the
    launches of the count, and where the host may wait for the number.

    Args:
        on_gpu: whether rows without a gradient are common enough for a GPU, and its source leaves them out.
    """
    if rows.counted is not None:
        return False
    if torch_on_host(head.weight):
        return True
    is_scattered = head.shard is not None and head.shard.input_grad == "reduce_scatter"
    product = rows.n_valid // n_chunks * budget.vocab_size * budget.hidden_size
    return on_gpu and not is_scattered and product >= SMALLEST_OF_LIVE_ROWS


def for_statistics(
    head: LossHead,
    rows: Rows,
    dtype: torch.dtype,
    *,
    outputs: tuple[str, ...],
    options: LogitOptions,
    class_weight: Tensor | None = None,
    needs_grad: bool = True,
    batch_invariant: bool = False,
) -> Plan:
    """Plan a forward whose backward comes later, in one chunk.

    Args:
        batch_invariant: whether a token's bits may not depend on the batch.

    Raises:
        ValueError: nothing computes such statistics independently of the batch on this GPU.
    """
    if shapes_only():
        return _of_shapes(rows, dtype, options, outputs)
    rows = on_this_rank(rows)
    budget, bytes_per_logit = budget_of(head, options, dtype), logit_bytes(options, dtype)
    _warn_of_few_rows(budget, bytes_per_logit, rows.n_valid)
    n_valid, columns = rows.n_valid, head.columns
    path, tiles = Path.LOGITS, None
    if (
        not rows.side
        and (batch_invariant or epilogue.is_large(n_valid * budget.vocab_size, budget.hidden_size))
        and _runs_epilogue(head)
    ):
        # The epilogue keeps gradients in the products' dtype, never float32 logits.
        limit = budget.logits(0, dtype.itemsize)
        of_epilogue = cutting.tiles(n_valid, budget.vocab_size, limit, square=True)
        if epilogue.serves_statistics(
            head, dtype, options, class_weight, outputs, of_epilogue, needs_grad, at_any_size=batch_invariant
        ):
            path, tiles = Path.EPILOGUE, cutting.tiles(n_valid, columns, limit, square=True)
    if batch_invariant and path is Path.LOGITS:
        path, tiles = _batch_invariant(head, n_valid, dtype, budget.logits(0, bytes_per_logit) // budget.vocab_size)
    if tiles is None:
        tiles = cutting.tiles(n_valid, columns, budget.logits(0, bytes_per_logit), square=True)
    chunks = (Chunk(slice(0, n_valid), slice(0, n_valid)),)
    rows, scattered = scatter_rows(rows, chunks, head)
    plan = Plan(
        rows=rows,
        scattered=scattered,
        chunks=chunks,
        tiles=(tiles,),
        dtype=dtype,
        n_contributions=min(1, len(tiles)),
        largest_tile=cutting.largest(tiles),
        options=options,
        path=path,
        outputs=outputs,
        class_weight=class_weight,
        shard=head.shard,
        skips_rows=needs_grad and _skips_rows(head, rows, budget, 1, on_gpu=True),
    )
    return noted(plan, head)


def _batch_invariant(head: LossHead, n_valid: int, dtype: torch.dtype, most_rows: int) -> tuple[Path, Tiles]:
    """Return what computes statistics that the epilogue does not, independently of the batch, and its tiles.

    Args:
        most_rows: of logits within the budget.
    """
    assert head.shard is None  # `linear_token_stats` refuses: a sum over ranks adds parts of rows
    if _runs_epilogue(head) and epilogue.reads(head, dtype):
        return Path.INVARIANT, cutting.whole_rows(n_valid, head.columns, most_rows)
    if n_valid and not torch_on_host(head.weight):
        raise ValueError(
            'deterministic="batch" on a GPU needs Hopper, bfloat16 or float16, a contiguous weight with H a multiple '
            "of 8, and no adapter; got another call"
        )
    return Path.BY_TOKEN, cutting.single_rows(n_valid, head.columns)


def kept_ids_take_products(
    n_ids: int,
    n_tokens: int,
    head: LossHead,
    dtype: torch.dtype,
    *,
    one_of: int = KEPT_OF_VOCAB,
    smallest: int = SMALLEST_OF_KEPT,
) -> bool:
    """Whether kept ids are so many that three products of whole rows take less time than reading rows for each token.

    On an H200 in bfloat16 (`benchmarks/results/kept_ids-663f166.json`), with V = 151936, both take equally long at 916
    ids a token with H = 4096, 1011 with 2048 and 892 with 896, where lines through two measured lengths cross: V / 166,
    V / 150, V / 170; on an H100 V / 207, V / 175, V / 168.
    Other dtypes are not measured: products of float32 without TF32 take about 14 times as long, and rows twice.

    Args:
        n_ids: of all tokens.
        n_tokens: that have a target, and ids.
        one_of: products pay from one id of this many of the vocabulary on.
        smallest: multiplications of a product, fewer of which never pay.
    """
    hidden_size, vocab_size = head.weight.shape[1], head.vocab_size
    is_measured = dtype in (torch.bfloat16, torch.float16)
    is_large = n_tokens * vocab_size * hidden_size >= smallest
    return is_measured and is_large and n_ids * one_of >= n_tokens * vocab_size


def for_kept(
    head: LossHead, rows: Rows, dtype: torch.dtype, kept: Entries, outputs: tuple[str, ...], options: LogitOptions
) -> Plan:
    """Plan statistics of kept ids by products of whole rows, whose backward comes later, in one chunk.

    Args:
        rows: of the tokens that have ids, with each one's "position".
    """
    budget, bytes_per_logit = budget_of(head, options, dtype), accumulation_dtype(dtype).itemsize
    _warn_of_few_rows(budget, bytes_per_logit, rows.n_valid)
    tiles = cutting.tiles(rows.n_valid, head.columns, budget.logits(0, bytes_per_logit), square=True)
    plan = Plan(
        rows=rows,
        chunks=(Chunk(slice(0, rows.n_valid), slice(0, rows.n_valid)),),
        tiles=(tiles,),
        dtype=dtype,
        n_contributions=min(1, len(tiles)),
        largest_tile=cutting.largest(tiles),
        options=options,
        outputs=outputs,
        shard=head.shard,
        kept=kept,
        skips_rows=_skips_rows(head, rows, budget, 1, on_gpu=False),
    )
    return noted(plan, head)


def for_distillation(
    head: LossHead,
    rows: Rows,
    dtype: torch.dtype,
    *,
    bytes_per_logit: int,
    options: LogitOptions,
    wants_weight: bool,
    teacher_dtype: torch.dtype | None = None,
) -> Plan:
    """Plan a distillation loss. Tiles are whole rows, for which the teacher's logits are computed.

    Args:
        bytes_per_logit: of a student's logit with all that lives beside it for a tile.
        wants_weight: whether dW is computed.
    """
    if shapes_only():
        return _of_shapes(rows, dtype, options)
    rows = on_this_rank(rows)
    budget, n_valid = budget_of(head, options, dtype), rows.n_valid
    _warn_of_few_rows(budget, bytes_per_logit, n_valid)
    chunk_tokens, tile_rows = cutting.chunk_and_tile(budget, n_valid, bytes_per_logit, wants_weight)
    chunks = cutting.chunks_of_tokens(n_valid, chunk_tokens)
    tiles = tuple(cutting.whole_rows(chunk.length, head.columns, tile_rows) for chunk in chunks)
    rows, scattered = scatter_rows(rows, chunks, head)
    plan = Plan(
        rows=rows,
        scattered=scattered,
        chunks=chunks,
        tiles=tiles,
        largest_tile=max(map(cutting.largest, tiles)),
        dtype=dtype,
        n_contributions=len(chunks) if n_valid else 0,
        options=options,
        shard=head.shard,
        teacher_dtype=teacher_dtype,
    )
    return noted(plan, head)


def source_of_loss(plan: Plan, head: HeadTensors, sink: Sink | None) -> Source:
    """Return what computes a loss's chunks.

    Args:
        head: in the products' dtype.
        sink: None: nothing has a gradient.
    """
    # The epilogue adds rows of targets to dW in float32, and cannot add them to a rounded one.
    if plan.path is Path.EPILOGUE and (sink is None or sink.weight is None or sink.weight.is_wide):
        source = EpilogueSource(epilogue.readable(head), plan.options, plan.outputs, sink, plan.skips_rows)
        source.reserve(plan.largest_tile)
        return source
    return _source_of_logits(plan, head, sink)


def source_of_statistics(plan: Plan, head: HeadTensors, holds: bool = False) -> LogitsSource | EpilogueStatistics:
    """Return what computes `linear_token_stats`. `holds` keeps the last tile in memory for the backward."""
    if plan.path is Path.EPILOGUE:
        readable, tile = epilogue.readable(head), plan.largest_tile
        holds = holds and epilogue.can_hold(plan.dtype)
        return EpilogueStatistics(readable, plan.options, plan.outputs, tile, holds, skips_rows=plan.skips_rows)
    return _source_of_logits(plan, head, None)


_BATCH_INVARIANT: Mapping[Path, type[LogitsSource]] = {Path.BY_TOKEN: ByTokenSource, Path.INVARIANT: InvariantSource}


def _source_of_logits(plan: Plan, head: HeadTensors, sink: Sink | None) -> LogitsSource:
    if plan.kept is not None:
        source: LogitsSource = KeptProducts(
            head, plan.options, plan.outputs, sink=sink, skips_rows=plan.skips_rows, entries=plan.kept
        )
    else:
        kind = _BATCH_INVARIANT.get(plan.path, LogitsSource if head.shard is None else ShardedSource)
        source = kind(head, plan.options, plan.outputs, plan.class_weight, sink, plan.skips_rows)
    source.reserve(plan.largest_tile)
    return source


# Products of fewer rows are slow; few pieces, and small steps, cost little in all.
_FEW_ROWS, _MANY_PIECES, _MANY_LOGITS = 16, 64, 2**17
# What may be between a loss and the code of the user.
_BETWEEN = ("liger_chunked", "torch", "transformers", "trl", "accelerate", "peft")


def _warn_of_few_rows(budget: Budget, bytes_per_logit: int, n_valid: int) -> None:
    if budget.given is None or n_valid * budget.vocab_size < _MANY_LOGITS:
        return
    row = budget.vocab_size * bytes_per_logit
    n_rows = budget.given // row
    if n_rows < _FEW_ROWS and n_valid * row > _MANY_PIECES * budget.given:
        _warn_once_of_few_rows(budget.given, budget.vocab_size, row, n_rows)


@functools.cache
def _warn_once_of_few_rows(budget: int, vocab_size: int, row: int, n_rows: int) -> None:
    holds = "less than one row" if n_rows == 0 else f"only {n_rows} row{'s' if n_rows > 1 else ''}"
    frame = caller_outside(*_BETWEEN)
    warnings.warn_explicit(
        f"logits_budget={budget} bytes holds {holds} of logits: a row takes {row} bytes for a vocabulary of "
        f"{vocab_size}, and so many small chunks are slow. Pass a larger budget, such as '256MiB', or None to choose "
        "it automatically",
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__", "__main__"),
    )
