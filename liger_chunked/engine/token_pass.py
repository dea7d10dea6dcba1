from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_chunked.engine.cutting import Tile
from liger_chunked.engine.head import HeadPass
from liger_chunked.engine.plan import Tokens
from liger_chunked.kernels import PartialStats


def _copy(x: Any, rows: slice) -> Any:
    """Copy rows, unless None: products may depend on alignment and strides."""
    return None if x is None else x[rows].clone(memory_format=torch.contiguous_format)


class TokenPass(HeadPass):
    """A `HeadPass` on tiles of one token and all columns.

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
