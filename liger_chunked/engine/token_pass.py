from __future__ import annotations

import torch
from torch import Tensor

from liger_chunked.engine.batch import Tile, along
from liger_chunked.engine.head import HeadPass, Tokens
from liger_chunked.kernels import PartialStats


class TokenPass(HeadPass):
    """A `HeadPass` on tiles of one token and all columns.

    Products and sums of several rows may add in an order that follows their number and place.
    """

    def project(self, x: Tensor, tile: Tile, u: Tensor | None = None) -> Tensor:
        # Contiguous copies: a product may follow alignment and strides.
        one = None if u is None else along(u, tile.rows).clone(memory_format=torch.contiguous_format)
        own = along(x, tile.rows).clone(memory_format=torch.contiguous_format)
        return super().project(own, Tile(slice(0, 1), tile.vocab), one)

    def _unround(self, logps: Tensor, tokens: Tokens, partial: PartialStats) -> Tensor:
        factors = []
        for tile in tokens.tiles:
            rows = tile.rows
            x, target, _, _, u, temperature = tokens
            one = Tokens(
                x[rows].clone(memory_format=torch.contiguous_format),
                target[rows],
                slice(0, 1),
                [tile],
                None if u is None else u[rows].clone(memory_format=torch.contiguous_format),
                None if temperature is None else temperature[rows],
            )
            of_row = partial._replace(max=partial.max[rows], sum_exp=partial.sum_exp[rows])
            factors.append(super()._unround(logps[rows], one, of_row))
        return torch.cat(factors)
