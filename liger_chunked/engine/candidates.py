from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_chunked.engine.cutting import Tile
from liger_chunked.engine.known import Counts, assert_later, check_ids, host_may_sync
from liger_chunked.kernels import LogitsCotangents, logits_grad_
from liger_chunked.kernels.operands import along
from liger_chunked.kernels.transform import transform, transform_and_slope
from liger_chunked.types import LogitOptions, accumulation_dtype, described


@dataclass
class Candidates:
    """The candidates of a chunk's tokens.

        candidates = Candidates(ids, dtype)
        candidates.read(logits, tile, vocab_start)       for each tile
        logps = candidates.logps(maximum, sum_exp, options)
        write = candidates.gradient(logits, ...)         in the backward, for each tile; needs only the ids

    Attributes:
        ids: (n, K), distinct for each token.
        dtype: of the logits.
        logits: (n, K) untransformed logits of the tiles that were read; zero for others.
    """

    ids: Tensor
    dtype: torch.dtype

    @functools.cached_property
    def logits(self) -> Tensor:
        return self.ids.new_zeros(self.ids.shape, dtype=self.dtype)

    def _columns(self, tile: Tile, vocab_start: int) -> tuple[Tensor, Tensor]:
        columns = along(self.ids, tile.row_slice) - (vocab_start + tile.vocab_slice.start)
        inside = (columns >= 0) & (columns < tile.vocab_slice.stop - tile.vocab_slice.start)
        return columns, inside

    def read(self, logits: Tensor, tile: Tile, vocab_start: int) -> None:
        if not logits.shape[1]:
            return
        columns, inside = self._columns(tile, vocab_start)
        found = logits.gather(1, columns.clamp(0, logits.shape[1] - 1))
        along(self.logits, tile.row_slice).copy_(torch.where(inside, found, along(self.logits, tile.row_slice)))

    def logps(
        self, maximum: Tensor, sum_exp: Tensor, options: LogitOptions, temperature: Tensor | None = None
    ) -> Tensor:
        z = self.logits.to(accumulation_dtype(self.logits.dtype))
        of_rows = options.temperature if temperature is None else temperature[:, None]
        z = transform(z, options.logit_scale, options.softcap, of_rows)
        return z - (maximum + sum_exp.log())[:, None]

    def gradient(
        self,
        logits: Tensor,
        target: Tensor,
        tile: Tile,
        vocab_start: int,
        vocab_size: int,
        cotangents: LogitsCotangents,
        upstream: Tensor,
        options: LogitOptions,
    ) -> Callable[[Tensor], object]:
        """Return a function that writes the candidates' entries of a tile's gradient.

        They are computed before the tile's kernel overwrites the logits. `upstream` (n, K) cannot be added to its
        result, which is rounded.
        """
        columns, inside = self._columns(tile, vocab_start)
        if not logits.shape[1]:
            return lambda dz: None
        # An id outside the tile repeats the row's first id inside it, if any.
        first = inside.int().argmax(1, keepdim=True)
        columns = torch.where(inside, columns, columns.gather(1, first)).clamp(0, logits.shape[1] - 1)
        any_inside = inside.gather(1, first)
        raw = logits.gather(1, columns).to(accumulation_dtype(logits.dtype))
        matches = inside & (along(self.ids, tile.row_slice) == target[:, None])
        position = torch.where(matches.any(1), matches.int().argmax(1), -1)
        temperature: float | Tensor = options.temperature
        if cotangents.temperature is not None:
            temperature = cotangents.temperature[:, None].to(raw.dtype)
        _, slope = transform_and_slope(raw, options.logit_scale, options.softcap, temperature)
        direct = upstream * (options.logit_scale / temperature)
        direct = direct if slope is None else direct * slope
        values = logits_grad_(raw, position, cotangents, options, vocab_size) + direct
        values = torch.where(inside, values, values.gather(1, first))

        def write(dz: Tensor) -> None:
            dz.scatter_(1, columns, torch.where(any_inside, values.to(dz.dtype), dz.gather(1, columns)))

        return write


def check_candidates(candidates: Any, target: Tensor, vocab_size: int, n_valid: Counts = None) -> Tensor:
    whole = isinstance(candidates, Tensor) and not (candidates.is_floating_point() or candidates.is_complex())
    if not whole or candidates.dtype == torch.bool:
        raise TypeError(f"candidates must be a tensor of token ids (int64), got {described(candidates)}")
    if candidates.shape[:-1] != target.shape or candidates.shape[-1] == 0 or candidates.device != target.device:
        raise ValueError(
            f"candidates must be {(*target.shape, 'K')} on {target.device}, K ids for each target, got "
            f"{described(candidates)}"
        )
    ids = candidates.reshape(-1, candidates.shape[-1]).long()
    if not ids.numel():
        return ids
    ordered = ids.sort(-1).values
    distinct = (ordered[:, 1:] != ordered[:, :-1]).all()
    if host_may_sync(ids, n_valid):
        low, high = (int(x) for x in ids.aminmax())
        check_ids("candidates", low, high, vocab_size)
        if not distinct:
            raise ValueError("candidates holds an id twice for one target, expected distinct ids")
    else:
        within = ((ids >= 0) & (ids < vocab_size)).all()
        assert_later(within, f"candidates must be indices into the vocabulary of weight, 0 to {vocab_size - 1}")
        assert_later(distinct, "candidates holds an id twice for one target")
    return ids
