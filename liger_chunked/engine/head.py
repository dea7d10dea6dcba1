"""Run a chunk of tokens through the head.

statistics   for each tile: project, reduce to PartialStats, merge                one matrix product
backward     for each tile, last first: project again unless in memory,
             logits -> gradient in place, dX, dW, db                              two products, three if recomputed
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from liger_chunked.engine.batch import along
from liger_chunked.engine.gradients import Gradients, accumulate
from liger_chunked.engine.plan import Tile, row_blocks
from liger_chunked.kernels import (
    LogitsCotangents,
    PartialStats,
    finish,
    logits_grad_,
    logits_stats,
    merge,
    row_stats,
    unround_logps_,
)
from liger_chunked.kernels.logits_stats import concatenate
from liger_chunked.types import DIFFERENTIABLE, Head, LogitOptions, TokenStats


@dataclass
class HeadPass:
    """The head of one step, in the products' dtype, and one buffer for all tiles.

    Call `backward` after the chunk's `statistics`: it starts from the last tile, still in the buffer.
    """

    head: Head
    options: LogitOptions
    class_weight: Tensor | None = None  # (V,) weights of TokenStats.mean_logits
    logps_grad_scale: Tensor | None = field(default=None, repr=False)  # from `unround_logps_`
    _buffer: Tensor | None = field(default=None, init=False, repr=False)
    _held: Tensor | None = field(default=None, init=False, repr=False)

    @property
    def vocab_size(self) -> int:
        return self.head.weight.shape[0]

    def reserve(self, elements: int) -> None:
        """Allocate the buffer."""
        if self._buffer is None or self._buffer.numel() < elements:
            self._buffer = self.head.weight.new_empty(elements)

    def release(self) -> None:
        """Free the buffer."""
        self._buffer = self._held = None

    def project(self, x: Tensor, tile: Tile) -> Tensor:
        """Return a tile's logits (rows, columns) in the buffer, before the logit transform."""
        assert self._buffer is not None
        x, weight = along(x, tile.rows), along(self.head.weight, tile.vocab)
        logits = along(self._buffer, slice(0, x.shape[0] * weight.shape[0])).view(x.shape[0], weight.shape[0])
        if self.head.bias is None:
            return torch.mm(x, weight.t(), out=logits)
        return torch.addmm(along(self.head.bias, tile.vocab), x, weight.t(), out=logits)

    def _class_weight(self, tile: Tile) -> Tensor | None:
        return None if self.class_weight is None else along(self.class_weight, tile.vocab)

    def statistics(
        self, x: Tensor, target: Tensor, tiles: list[Tile], outputs: tuple[str, ...]
    ) -> tuple[PartialStats, TokenStats]:
        """Return the statistics of a chunk `x` (n, H), `target` (n,), with logps corrected for rounding."""
        partial, stats = self._reduce(x, target, tiles, outputs)
        if stats.logps is not None and x.dtype in (torch.bfloat16, torch.float16):
            self.logps_grad_scale = unround_logps_(
                stats.logps, x, self.head, target, partial.max, partial.sum_exp, self.options
            )
        return partial, stats

    def _reduce(
        self, x: Tensor, target: Tensor, tiles: list[Tile], outputs: tuple[str, ...]
    ) -> tuple[PartialStats, TokenStats]:
        """Return the statistics of the rounded logits."""
        if len(tiles) == 1:
            self._held = self.project(x, tiles[0])
            return row_stats(self._held, target, self.options, outputs, self.class_weight)
        by_rows: dict[int, PartialStats] = {}
        for tile in tiles:
            self._held = self.project(x, tile)
            part = logits_stats(
                logits=self._held,
                target=along(target, tile.rows),
                options=self.options,
                outputs=outputs,
                vocab_start=tile.vocab.start,
                class_weight=self._class_weight(tile),
            )
            earlier = by_rows.get(tile.rows.start)
            by_rows[tile.rows.start] = part if earlier is None else merge(earlier, part)
        if by_rows:
            stats = concatenate(list(by_rows.values()))
        else:
            stats = logits_stats(x.new_empty(0, self.vocab_size), target, self.options, outputs)
        return stats, finish(stats, target, self.vocab_size, outputs)

    def backward(
        self, x: Tensor, target: Tensor, tiles: list[Tile], cotangents: LogitsCotangents, grads: Gradients,
        chunk_rows: slice,
    ) -> None:  # fmt: skip
        """Add a chunk's dX, dW and db to `grads`; `chunk_rows` are its tokens in the layout."""
        given = {name: g for name in DIFFERENTIABLE if (g := getattr(cotangents, name)) is not None}
        if self.logps_grad_scale is not None and cotangents.logps is not None:
            given["logps"] = cotangents.logps * self.logps_grad_scale
        cotangents = cotangents._replace(**grads.normalize(given))
        dx = grads.open_input(x, chunk_rows, one_slice=len(tiles) == row_blocks(tiles))
        for tile in reversed(tiles):
            logits = self.project(x, tile) if self._held is None else self._held
            self._held = None
            dz = logits_grad_(
                logits=logits,
                target=along(target, tile.rows),
                cotangents=cotangents if logits.shape[0] == x.shape[0] else cotangents.at(tile.rows),
                options=self.options,
                vocab_size=self.vocab_size,
                vocab_start=tile.vocab.start,
                class_weight=self._class_weight(tile),
            )
            if dx is not None:
                last_slice = tile.vocab.stop == self.vocab_size
                accumulate(along(dx, tile.rows), dz, along(self.head.weight, tile.vocab), first=last_slice)
            grads.add(tile.vocab, dz, along(x, tile.rows), first=tile.rows.stop == x.shape[0])
        grads.close_chunk(dx, chunk_rows)

    def backward_from(self, x: Tensor, dz: Tensor, grads: Gradients, chunk_rows: slice) -> None:
        """Add a chunk's dX, dW and db, given its logits' gradient `dz` (n, V)."""
        dx = grads.open_input(x, chunk_rows, one_slice=True)
        if dx is not None:
            accumulate(dx, dz, self.head.weight, first=True)
        grads.add(slice(0, self.vocab_size), dz, x, first=True)
        grads.close_chunk(dx, chunk_rows)
