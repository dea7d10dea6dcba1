"""Run a chunk with the fused epilogue: losses whose gradient reaches only logps and lse, and statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_chunked.engine.collectives import gather_tensor
from liger_chunked.engine.cutting import Tile, Tiles, largest
from liger_chunked.engine.live_rows import LiveCount
from liger_chunked.engine.plan import Tokens
from liger_chunked.engine.side_stream import SideStream
from liger_chunked.engine.sink import Sink, accumulate
from liger_chunked.kernels import (
    Exponentials,
    RowScales,
    add_target_rows_of_weight,
    grad_from_exponentials_,
    merge_ranks,
    project_exp,
    project_grad,
    project_sums,
    row_factors,
    scale_rows,
    slopes_of_stats,
)
from liger_chunked.kernels.operands import along, joined
from liger_chunked.kernels.tuning.hopper import (
    FEWEST_TILES,
    FEWEST_TILES_OF_ENTROPY,
    FEWEST_TOKENS,
    LARGE,
    PRODUCT,
    SMALLEST,
    WIDEST,
    WIDEST_CUT,
    Tiling,
)
from liger_chunked.types import AdaptedWeight, HeadTensors, LogitOptions, LossHead, Slopes, TokenStats

# Tensor descriptors need rows aligned to 16 bytes.
_DESCRIPTOR_BYTES = 16
_DESCRIPTOR_ELEMENTS = _DESCRIPTOR_BYTES // torch.bfloat16.itemsize
_DTYPES = (torch.bfloat16, torch.float16)
# The kernels count places of partial sums in int32.
_MOST_PLACES = 2**31
# The epilogue has no registers for an argmax or a sum of squares. A fourth sum, of the logits, made the product a
# quarter slower, so their mean is a dot product with the sum of the weights.
_COMPUTABLE = {"logps", "lse", "entropy", "mean_logits"}


def _fits_descriptor(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % _DESCRIPTOR_BYTES == 0


def for_descriptor(x: Tensor) -> Tensor:
    """Return a tensor that a descriptor can read, a copy if this is not aligned and contiguous."""
    return x if _fits_descriptor(x) else x.clone(memory_format=torch.contiguous_format)


def padded(columns: int) -> int:
    """Return the stride of rows of so many logits that a descriptor can write."""
    return -(-columns // _DESCRIPTOR_ELEMENTS) * _DESCRIPTOR_ELEMENTS


def tile_buffer(weight: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate tiles whose rows are padded for descriptors, by default in the dtype of `weight`.

    oneDNN's bfloat16 products on AMX read that padding too, as a factor of zero: NaN there would reach the result.
    """
    new = weight.new_zeros if weight.device.type == "cpu" else weight.new_empty
    return new(shape, dtype=dtype)


def _extent(tile: Tile) -> tuple[int, int]:
    rows, columns = tile
    return rows.stop - rows.start, columns.stop - columns.start


def _too_wide(hidden_size: int, options: LogitOptions) -> bool:
    """Whether a backward is faster with logits. Float32 logits never are."""
    return hidden_size > WIDEST and options.logits_dtype is None


def _scale(options: LogitOptions) -> float:
    return options.logit_scale / options.temperature


def can_hold(dtype: torch.dtype) -> bool:
    """Whether exponentials, centred at the target's logit, fit a dtype.

    float16 ends at exp(11), which a logit above the target's soon reaches, and 1/sum, which dW's product takes of each
    row, is zero there for a target of a probability below 2^-25.
    """
    return dtype == torch.bfloat16


def is_large(logits: int, hidden_size: int) -> bool:
    """Whether a product takes the GPU longer than its launches take the host."""
    return logits * hidden_size >= SMALLEST


def serves(hidden_size: int, options: LogitOptions, differentiates: tuple[str, ...], chunks: tuple[Tiles, ...]) -> bool:
    """Whether `EpilogueSource` can replace `LogitsSource`, and is faster, if the fused product `computes` them."""
    return (
        not _too_wide(hidden_size, options)
        and set(EpilogueSource.differentiable).issuperset(differentiates)
        and all(len(tiles) == 1 for tiles in chunks)
        and is_large(max(map(largest, chunks)), hidden_size)
    )


def serves_statistics(
    head: LossHead,
    dtype: torch.dtype,
    options: LogitOptions,
    class_weight: Tensor | None,
    outputs: tuple[str, ...],
    tiles: Tiles,
    needs_grad: bool,
    at_any_size: bool = False,
) -> bool:
    """Whether `EpilogueStatistics` can replace `LogitsSource` on a large head, and is faster."""
    if not computes(head, dtype, options, class_weight, outputs):
        return False
    if at_any_size:
        return bool(tiles)
    if not needs_grad:
        return True
    if "entropy" in outputs or not can_hold(dtype):  # the backward projects the last tile again
        return len(tiles) >= FEWEST_TILES_OF_ENTROPY and not _too_wide(head.weight.shape[1], options)
    return len(tiles) >= FEWEST_TILES


def computes(
    head: LossHead, dtype: torch.dtype, options: LogitOptions, class_weight: Tensor | None, outputs: tuple[str, ...]
) -> bool:
    """Whether the fused product can read this head, and computes these statistics."""
    return (
        reads(head, dtype)
        and head.bias is None
        and options.softcap is None
        and options.logit_scale != 0
        and class_weight is None
        and _COMPUTABLE.issuperset(outputs)
    )


def reads(head: LossHead, dtype: torch.dtype) -> bool:
    """Whether products with tensor descriptors, in `dtype`, can read this head."""
    if isinstance(head.weight, AdaptedWeight):
        return False
    if head.shard is not None:
        fits = True  # `readable` copies: all ranks must choose the same source
    elif head.weight.dtype == dtype:
        fits = _fits_descriptor(head.weight)
    else:  # a cast makes an aligned copy
        fits = head.weight.is_contiguous()
    return dtype in _DTYPES and head.weight.shape[1] % _DESCRIPTOR_ELEMENTS == 0 and fits


def readable(head: HeadTensors) -> HeadTensors:
    """Return a head that descriptors can read. Copies a rank's rows if they do not fit."""
    return head if head.shard is None else head._replace(weight=for_descriptor(head.weight))


def _rows_of(target: Tensor, head: HeadTensors) -> Tensor:
    """Return the targets' rows in `head.weight`, negative if another rank has them."""
    if head.shard is None:
        return target
    row = target - head.shard.start
    return row.masked_fill_(row >= head.weight.shape[0], -1)


class _Block(NamedTuple):
    rows: slice
    out: Tensor | None = None  # for exponentials
    out_start: tuple[int, int] = (0, 0)  # in the block


def _project(
    head: HeadTensors,
    x: Tensor,
    target: Tensor,
    weight_sum: Tensor | None,
    scale: float,
    outputs: tuple[str, ...],
    blocks: list[_Block],
    tiling: Tiling | None = None,
) -> tuple[Exponentials, TokenStats]:
    """Run the fused product on blocks of rows. Ranks gather their sums once."""
    shard, found, sums = head.shard, [], []
    for rows, out, out_start in blocks:
        given = along(x, rows), head.weight, along(target, rows), weight_sum, out, scale, outputs
        if shard is None:
            found.append(project_exp(*given, tiling, out_start))
        else:
            sums.append(project_sums(*given, shard.vocab_size, tiling, out_start))
    if shard is None:
        if len(found) == 1:
            return found[0]
        exponentials = joined([of_block._replace(values=None) for of_block, _ in found])
        return exponentials, joined([stats for _, stats in found])
    gathered = gather_tensor(sums[0] if len(sums) == 1 else torch.cat(sums, 1), shard.group)
    return merge_ranks(gathered, x.shape[0], dist.get_rank(shard.group), blocks[0].out, outputs)


def instead_of_one_chunk(chunks: tuple[Tiles, ...], hidden_size: int) -> bool:
    """Whether chunks with the fused epilogue need less memory than one without, in about the same time.

    One chunk of N tokens holds 2 V (N + H) bytes of logits and dW. Chunks of n hold 2 V (n + 2 H), with float32 dW.
    """
    return (
        len(chunks) > 1
        and hidden_size <= WIDEST_CUT
        and sum(tiles[-1].row_slice.stop for tiles in chunks) >= FEWEST_TOKENS * len(chunks)
        and all(largest(tiles) * hidden_size >= LARGE for tiles in chunks)
    )


@dataclass
class EpilogueSource:
    """A `Source` with the fused epilogue, for chunks of one tile.

    dX and dW are products of the exponentials E (`kernels/projection.py`), plus the target's rows in float32
    (`kernels/target_rows.py`), which cannot be added to a rounded dW: it must be float32, or not needed. No logits are
    rounded, so `logits_dtype` has no effect.

    dX and dW overlap on two streams (docs/tuning.md, "Products and chunks"). If ranks sum dX, it is float32, on the
    side stream, and sent while dW is computed.

    Bytes for a chunk of n tokens, beyond the step's gradients:

        E              2 n V         none without a backward
        s x            2 n H         during backward, in the memory of dX if there is one that no ranks sum
        E W            4 n H         while dX is formed, in its memory if float32; at most 32 MiB
        a x            n H / 2       sums of the target's rows, while dW is formed
    """

    head: HeadTensors
    options: LogitOptions
    outputs: tuple[str, ...]
    sink: Sink | None = None
    skips_rows: bool = False  # whether rows without a gradient take no part in the backward's products
    differentiable: ClassVar[tuple[str, ...]] = ("logps", "lse")
    _buffer: Tensor | None = field(default=None, init=False, repr=False)

    @property
    def columns(self) -> int:
        return self.head.weight.shape[0]

    def reserve(self, elements: int) -> None:
        if self.sink is not None and self.columns:
            self._buffer = tile_buffer(self.head.weight, elements // self.columns, padded(self.columns))

    def release(self) -> None:
        self._buffer = None

    # The mean logit is a product with this sum. Another sum in the epilogue made the product a quarter slower.
    @functools.cached_property
    def _weight_sum(self) -> Tensor:
        return self.head.weight.sum(0, dtype=torch.float32)

    def statistics(self, tokens: Tokens) -> tuple[TokenStats, Exponentials]:
        x, target, _, tiles, *_ = tokens
        assert len(tiles) == 1
        x, target = for_descriptor(x), _rows_of(target, self.head)
        out = None if self._buffer is None else self._buffer[: x.shape[0], : self.columns]
        weight_sum = self._weight_sum if "mean_logits" in self.outputs else None
        every = [_Block(slice(0, x.shape[0]), out)]
        exponentials, stats = _project(self.head, x, target, weight_sum, _scale(self.options), self.outputs, every)
        return stats, exponentials

    def backward(self, tokens: Tokens, memo: Exponentials, gradients: dict[str, Tensor]) -> None:
        exponentials, target = memo, _rows_of(tokens.target, self.head)
        assert self.sink is not None
        gradients = gradients or {"logps": torch.zeros_like(exponentials.centre)}
        count = LiveCount.start(gradients) if self.skips_rows else None
        live = None if count is None else count.read()
        if live is not None:
            values = None if exponentials.values is None else live.compact_(exponentials.values)
            of_rows = (None if f is None else f[live.rows] for f in exponentials[1:])
            exponentials, target = Exponentials(values, *of_rows), target[live.rows]  # type: ignore[arg-type]
            gradients = {name: g[live.rows] for name, g in gradients.items()}
            tokens = live.tokens(tokens)
        x, values, index = tokens.x.contiguous(), exponentials.values, None if live is None else live.rows
        d_input, d_weight = self.sink.input, self.sink.weight
        dx = self.sink.open_chunk(self.head, x, tokens.row_slice, tokens.tiles, live=index)
        if not x.shape[0]:
            self.sink.close_chunk()
            return
        ranks_sum = d_input is not None and self.head.shard is not None
        scaled: Tensor | None = None
        if d_weight is not None:
            d_weight.allocate()  # on this stream, not on the side stream that writes it
            scaled = torch.empty_like(x) if dx is None or ranks_sum else dx
        scales = scale_rows(x, exponentials, gradients.get("logps"), gradients.get("lse"), _scale(self.options), scaled)
        with SideStream(x.device) as aside:
            if d_input is not None and dx is not None and ranks_sum:
                with aside.stream() if scaled is not None else nullcontext():
                    self._form_input_gradient(dx, values, target, scales)
                    d_input.start_sum()
            if d_weight is not None and scaled is not None and values is not None:
                with nullcontext() if dx is None or ranks_sum else aside.stream():
                    d_weight.add_exponentials(values, scaled, target, scales.target, x)
            if dx is not None and not ranks_sum:
                self._form_input_gradient(dx, values, target, scales, before_writing=aside.join)
        self.sink.close_chunk()

    def _form_input_gradient(
        self,
        dx: Tensor,
        exponentials: Tensor | None,
        target: Tensor,
        scales: RowScales,
        before_writing: Callable[[], None] | None = None,
    ) -> None:
        """Compute dX (n, H), unless float32 in blocks of rows."""
        if exponentials is None:
            dx.zero_()
            return
        n, hidden = dx.shape
        if dx.dtype == torch.float32:
            accumulate(dx, exponentials, self.head.weight, first=True)
            add_target_rows_of_weight(dx, self.head.weight, target, scales, out=dx)
            return
        assert before_writing is not None
        rows = -(-n // max(1, dx.numel() // PRODUCT))
        product = dx.new_empty(rows, hidden, dtype=torch.float32)
        for start in range(0, n, rows):
            block = slice(start, min(start + rows, n))
            part = along(product, slice(0, block.stop - start))
            accumulate(part, along(exponentials, block), self.head.weight, first=True)
            # `scaled` may be in the memory of dX, and dW's product on the side stream still reads it.
            before_writing()
            add_target_rows_of_weight(
                part,
                self.head.weight,
                along(target, block),
                RowScales(*(along(s, block) for s in scales)),
                out=along(dx, block),
            )


class _Rows(NamedTuple):
    """What the backward of `EpilogueStatistics` reads of all rows: sums without exponentials, and their entropy."""

    sums: Exponentials
    entropy: Tensor | None


@dataclass
class EpilogueStatistics:
    """Statistics with the fused epilogue, whose backward comes later.

    The forward keeps the last tile's exponentials, but none in float16 (`can_hold`); the backward projects the others
    again. Without the kept tile a step of one tile takes 1.32 of the time (docs/tuning.md, "Fused epilogue"). Bytes: a
    tile, and in the forward partial sums, at most as large.
    """

    head: HeadTensors
    options: LogitOptions
    outputs: tuple[str, ...]
    tile_size: int  # most logits of a tile
    holds: bool = False  # the last tile for the backward
    sink: Sink | None = None
    skips_rows: bool = False  # whether rows without a gradient take no part in the backward's products
    _buffer: Tensor | None = field(default=None, init=False, repr=False)
    _held: Tensor | None = field(default=None, init=False, repr=False)  # exponentials of the last tile

    def statistics(self, tokens: Tokens) -> tuple[TokenStats, _Rows]:
        x, target, _, tiles, *_ = tokens
        x, weight = for_descriptor(x), self.head.weight
        weight_sum = weight.sum(0, dtype=torch.float32) if "mean_logits" in self.outputs else None
        target = _rows_of(target, self.head)
        tiling = Tiling.of(x.shape[1])
        if self.holds:
            self._hold_last(tiles, tiling)
        blocks = self._blocks(x.shape[0], tiles, tiling)
        rows, stats = _project(self.head, x, target, weight_sum, _scale(self.options), self.outputs, blocks, tiling)
        return stats, _Rows(rows._replace(values=None), stats.entropy)

    def _hold_last(self, tiles: Tiles, tiling: Tiling) -> None:
        """Allocate the last tile if the kernel's blocks can start there."""
        if tiles and tiles[-1].row_slice.start % tiling.rows == tiles[-1].vocab_slice.start % tiling.cols == 0:
            self.reserve(tiles)
            self._held = self._view(tiles[-1])

    def _blocks(self, n: int, tiles: Tiles, tiling: Tiling) -> list[_Block]:
        """Cut rows so that float32 partial sums fit a tile of 2 bytes a logit, and their places 32 bits."""
        parts = max(1, -(-self.head.weight.shape[0] // tiling.cols))
        partial_sums = parts * (1 + ("entropy" in self.outputs))
        row_blocks = min(self.tile_size // (2 * partial_sums), _MOST_PLACES // parts) // tiling.rows
        most = max(1, row_blocks) * tiling.rows
        blocks = [_Block(slice(start, min(start + most, n))) for start in range(0, n, most)]
        if self._held is None:
            return blocks
        row, col = (part.start for part in tiles[-1])
        for i, (rows, *_) in enumerate(blocks):
            if rows.stop > row:
                part = self._held[max(0, rows.start - row) : rows.stop - row]
                blocks[i] = _Block(rows, part, (max(0, row - rows.start), col))
        return blocks

    def backward(self, tokens: Tokens, memo: _Rows, gradients: dict[str, Tensor]) -> None:
        x, target, row_slice, tiles, *_ = tokens
        rows, entropy = memo
        assert self.sink is not None
        x, weight = for_descriptor(x), self.head.weight
        target = _rows_of(target, self.head)
        count = LiveCount.start(gradients) if self.skips_rows else None
        gradients = self.sink.normalize(gradients, self._slopes)
        factors = row_factors(rows, entropy, gradients, _scale(self.options), self.head.vocab_size)
        # With a gradient of the entropy, the last tile is projected again: log p + entropy cancels near certainty, and
        # from rounded exponentials its error was up to 3 times eager code's.
        if factors.slope is not None:
            self._held = None
        last: Tensor | None = None  # the gradient of the held tile, before the host waits for the count of live rows
        if self._held is not None:
            part, scale = tiles[-1].row_slice, rows.values_scale
            scale = None if scale is None else along(scale, part)
            of_held = along(target, part), factors.at(part), scale, tiles[-1].vocab_slice.start
            last, self._held = grad_from_exponentials_(self._held, *of_held), None
        live = None if count is None else count.read()
        if live is not None:
            last = None  # of all rows
            x, target, factors = x.index_select(0, live.rows), target[live.rows], factors.at(live.rows)
            tiles = live.tiles(tiles)
        index = None if live is None else live.rows
        self.sink.open_chunk(self.head, x, row_slice, tiles, live=index)
        if tiles:
            self.reserve(tiles)
        for tile in reversed(tiles):
            of_tile = along(target, tile.row_slice), factors.at(tile.row_slice)
            if last is not None:
                dz, last = last, None
            else:
                dz = project_grad(
                    along(x, tile.row_slice),
                    along(weight, tile.vocab_slice),
                    *of_tile,
                    self._view(tile),
                    _scale(self.options),
                    tile.vocab_slice.start,
                )
            self.sink.add(tile, dz)
        self.sink.close_chunk()

    def _slopes(self) -> Slopes:
        return slopes_of_stats(self.options, self.head.vocab_size)

    def reserve(self, tiles: Tiles) -> None:
        if self._buffer is None:
            extents = map(_extent, tiles)
            self._buffer = tile_buffer(self.head.weight, max(n * padded(columns) for n, columns in extents))

    def _view(self, tile: Tile) -> Tensor:
        assert self._buffer is not None
        n, columns = _extent(tile)
        stride = padded(columns)
        return along(self._buffer, slice(0, n * stride)).view(n, stride)[:, :columns]

    def release(self) -> None:
        self._buffer = self._held = None
