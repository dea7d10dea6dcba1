"""Run a chunk through the head with logits in memory, so that a token's bits do not depend on the batch."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_chunked.engine.cutting import Tile
from liger_chunked.engine.epilogue import for_descriptor, padded, tile_buffer
from liger_chunked.engine.plan import Tokens
from liger_chunked.engine.source import LogitsSource
from liger_chunked.kernels import (
    ExactTarget,
    LogitsCotangents,
    PartialStats,
    project_logits,
    row_stats,
    row_stats_are_exact,
)
from liger_chunked.kernels.operands import along, joined
from liger_chunked.types import TokenStats


def _alike(x: Tensor) -> Tensor:
    """Copy a tensor unless it is aligned and contiguous, and give one row the stride that it has among others.

    Triton compiles variants by alignment and by divisors of strides, and their sums may add in other orders.
    """
    return for_descriptor(x).view(-1).view(x.shape)


def _alike_tokens(tokens: Tokens) -> Tokens:
    return tokens._replace(x=_alike(tokens.x))


class InvariantSource(LogitsSource):
    """A `LogitsSource` on tiles of whole rows, whose product and reductions treat each row alike.

    Where a step of `LogitsSource` follows the batch, this does not:

        product      `project_logits` has one tile size and one order of sums; a matrix library picks them by rows
        statistics   one launch reduces whole rows, also if tiles are several
        variants     operands have one alignment and one stride for a row

    The backward's products are those of `LogitsSource`: gradients may depend on the batch.

    Bytes: a tile of logits, whose rows are padded to a multiple of 16 bytes.
    """

    def reserve(self, elements: int) -> None:
        rows = elements // self.columns
        self._buffer = tile_buffer(self.head.weight, rows * padded(self.columns), dtype=self.logits_dtype)

    def statistics(self, tokens: Tokens) -> tuple[TokenStats, LogitsCotangents]:
        return super().statistics(_alike_tokens(tokens))

    def backward(self, tokens: Tokens, memo: LogitsCotangents, gradients: dict[str, Tensor]) -> None:
        super().backward(_alike_tokens(tokens), memo, gradients)

    def project(self, x: Tensor, tile: Tile, u: Tensor | None = None) -> Tensor:
        buffer, (rows, _), stride = self._buffer, tile, padded(self.columns)
        assert buffer is not None and u is None
        n = rows.stop - rows.start
        logits = along(buffer, slice(0, n * stride)).view(n, stride)[:, : self.columns]
        return project_logits(x if x.shape[0] == n else x[rows], self.head.weight, self.head.bias, logits)

    def _reduce(self, tokens: Tokens) -> tuple[PartialStats, TokenStats, Tensor | None]:
        x, target, _, tiles, _, side = tokens
        if not tiles:
            return super()._reduce(tokens)
        temperature, bias = side.get("temperature"), self.head.bias
        found: list[tuple[PartialStats, TokenStats]] = []
        factors: list[Tensor] = []
        for tile in tiles:
            rows = tile.row_slice
            logits, of_x = self._project_and_hold(x, tile, None), along(x, rows)
            exact = None
            if row_stats_are_exact(logits, self.outputs, of_x, self.head.weight):
                factors.append(torch.empty(of_x.shape[0], dtype=torch.float32, device=x.device))
                contiguous = None if bias is None else bias.contiguous()
                exact = ExactTarget(of_x, self.head.weight, contiguous, factors[-1])
            of_rows = None if temperature is None else _alike(along(temperature, rows))
            given: tuple[Any, ...] = (self.options, self.outputs, self.class_weight, of_rows, exact)
            found.append(row_stats(logits, _alike(along(target, rows)), *given))
        partial, stats = (joined(list(parts)) for parts in zip(*found, strict=True))
        return partial, stats, torch.cat(factors) if factors else None


def _copy(x: Any, rows: slice) -> Any:
    """Copy rows, unless None: products may depend on alignment and strides."""
    return None if x is None else x[rows].clone(memory_format=torch.contiguous_format)


class ByTokenSource(LogitsSource):
    """A `LogitsSource` on tiles of one token and all columns.

    Products and sums of several rows may add in an order that follows their number and place.
    """

    unrounds_at_once: ClassVar[bool] = False

    def project(self, x: Tensor, tile: Tile, u: Tensor | None = None) -> Tensor:
        return super().project(_copy(x, tile.row_slice), Tile(slice(0, 1), tile.vocab_slice), _copy(u, tile.row_slice))

    def _unround(self, logps: Tensor, tokens: Tokens, partial: PartialStats) -> Tensor:
        if not tokens.tiles:
            return super()._unround(logps, tokens, partial)
        factors = []
        for rows, _ in tokens.tiles:
            one = tokens._replace(
                x=_copy(tokens.x, rows),
                target=_copy(tokens.target, rows),
                u=_copy(tokens.u, rows),
                side={name: _copy(x, rows) for name, x in tokens.side.items()},
            )
            of_row = partial._replace(max=partial.max[rows], sum_exp=partial.sum_exp[rows])
            factors.append(super()._unround(logps[rows], one, of_row))
        return torch.cat(factors)
