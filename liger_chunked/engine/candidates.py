from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_chunked.engine.checks import check_ids, host_may_sync
from liger_chunked.engine.cutting import Tile
from liger_chunked.kernels.operands import along
from liger_chunked.kernels.transform import transform
from liger_chunked.types import LogitOptions, accumulation_dtype, described


@dataclass
class Candidates:
    """Log-probabilities of ids that the caller names for each token of a chunk, such as a teacher's top k. No gradient.

        candidates = Candidates(ids, dtype)
        candidates.read(logits, tile, vocab_start)       for each tile
        logps = candidates.logps(maximum, sum_exp, options)

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


def check_candidates(candidates: Any, target: Tensor, vocab_size: int) -> Tensor:
    whole = isinstance(candidates, Tensor) and not (candidates.is_floating_point() or candidates.is_complex())
    if not whole or candidates.dtype == torch.bool:
        raise TypeError(f"candidates must be a tensor of token ids (int64), got {described(candidates)}")
    if candidates.shape[:-1] != target.shape or candidates.shape[-1] == 0 or candidates.device != target.device:
        raise ValueError(
            f"candidates must be {(*target.shape, 'K')} on {target.device}, K ids for each target, got "
            f"{described(candidates)}"
        )
    ids = candidates.reshape(-1, candidates.shape[-1]).long()
    if not ids.numel() or not host_may_sync(ids):
        return ids
    low, high = (int(x) for x in ids.aminmax())
    check_ids("candidates", low, high, vocab_size)
    ordered = ids.sort(-1).values
    if not (ordered[:, 1:] != ordered[:, :-1]).all():
        raise ValueError("candidates holds an id twice for one target, expected distinct ids")
    return ids
