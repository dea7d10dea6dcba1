from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from liger_chunked.engine.cutting import Tile
from liger_chunked.engine.head import HeadPass, Tokens
from liger_chunked.kernels import LogitsCotangents
from liger_chunked.kernels.operands import along
from liger_chunked.kernels.tuning.generic import SORT_BLOCK
from liger_chunked.types import LogitOptions, TokenStats, accumulation_dtype, check_sampling


@dataclass(frozen=True)
class SamplingFilter:
    """`top_k` and `top_p` of `linear_token_stats`."""

    top_k: int | None = None
    top_p: float | None = None

    @classmethod
    def of(
        cls, top_k: int | None, top_p: float | None, options: LogitOptions, outputs: tuple[str, ...], sharded: bool
    ) -> SamplingFilter | None:
        if top_k is None and top_p is None:
            return None
        given = f"top_k={top_k}" if top_p is None else f"top_p={top_p}"
        check_sampling(top_k, top_p)
        if options.softcap is not None or options.logit_scale <= 0:
            raise ValueError(
                f"a filter needs no softcap and a positive logit_scale, got {given} with softcap={options.softcap} and "
                f"logit_scale={options.logit_scale}"
            )
        if "mean_logits" in outputs:
            raise ValueError(f"outputs ['mean_logits'] are infinite for filtered logits, got {given}")
        if sharded:
            raise ValueError(f"a filter needs whole rows of logits, got {given} and vocab_shard")
        return None if top_k is None and top_p == 1 else cls(top_k, None if top_p == 1 else top_p)

    def smallest_kept(self, logits: Tensor, options: LogitOptions, temperature: Tensor | None = None) -> Tensor:
        """Return (n,), each row's smallest kept untransformed logit."""
        k = logits.shape[1] if self.top_k is None else min(self.top_k, logits.shape[1])
        if self.top_p is None:
            return logits.topk(k).values[:, -1]
        found = []
        size, wide = max(1, SORT_BLOCK // k), accumulation_dtype(logits.dtype)
        for i, block in enumerate(logits.split(size)):
            largest = block.sort(descending=True).values if self.top_k is None else block.topk(k).values
            of_rows: float | Tensor = options.temperature
            if temperature is not None:
                of_rows = temperature[i * size : (i + 1) * size, None].to(wide)
            z = largest.to(wide) * (options.logit_scale / of_rows)
            # From the smallest: a sum from the largest reaches 1 too early.
            left = z.softmax(-1).flip(-1).cumsum(-1).flip(-1)
            n_kept = (left > 1 - self.top_p).sum(-1, keepdim=True).clamp(min=1)
            found.append(largest.gather(1, n_kept - 1)[:, 0])
        return torch.cat(found)


@dataclass
class FilteredPass(HeadPass):
    """`HeadPass` on the logits that a filter keeps. Tiles are whole rows."""

    filter: SamplingFilter = SamplingFilter()
    smallest_kept: Tensor | None = field(default=None, init=False, repr=False)  # (n,) logit of each row
    _measures: bool = field(default=False, init=False, repr=False)
    _temperature: Tensor | None = field(default=None, init=False, repr=False)

    def statistics(self, tokens: Tokens) -> TokenStats:
        self.smallest_kept = tokens.x.new_empty(tokens.x.shape[0], dtype=self.logits_dtype)
        self._measures, self._temperature = True, tokens.side.get("temperature")
        stats = super().statistics(tokens)
        self._measures, self._temperature = False, None
        return stats

    def project(self, x: Tensor, tile: Tile, u: Tensor | None = None) -> Tensor:
        logits = super().project(x, tile, u)
        assert self.smallest_kept is not None
        kept = along(self.smallest_kept, tile.row_slice)
        if self._measures:
            temperature = None if self._temperature is None else along(self._temperature, tile.row_slice)
            kept.copy_(self.filter.smallest_kept(logits, self.options, temperature))
        return logits.masked_fill_(logits < kept[:, None], -math.inf)

    def pop_tensors(self) -> dict[str, Tensor | None]:
        tensors = {**super().pop_tensors(), "smallest_kept": self.smallest_kept}
        self.smallest_kept = None
        return tensors

    def restore(self, tensors: Mapping[str, Tensor | None]) -> None:
        super().restore(tensors)
        self.smallest_kept = tensors["smallest_kept"]

    def _gradient(self, logits: Tensor, target: Tensor, tile: Tile, cotangents: LogitsCotangents) -> Tensor:
        dropped = logits.gather(1, target[:, None])[:, 0] == -math.inf
        return super()._gradient(logits, target.masked_fill(dropped, -1), tile, cotangents)
