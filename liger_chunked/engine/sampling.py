"""Which logits a sampler keeps: `top_k`, `top_p` and `min_p`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_chunked.kernels.tuning.generic import SORT_BLOCK
from liger_chunked.types import LogitOptions, accumulation_dtype, check_sampling

# (rows, m) of this rank -> (rows, ranks * m) of all, in rank order
Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SamplingFilter:
    """A sampler's `top_k`, then `top_p`, then `min_p`, after the temperature; equal logits stay or go together.

    This is the order of transformers' `generate`. vLLM takes `min_p` first: that differs where `top_p` is
    given too, because the sum of probabilities is then of fewer ids. `min_p` alone, or with `top_k`, has one meaning:
    it compares with the largest probability, which every other filter keeps.
    """

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    @classmethod
    def of(
        cls,
        top_k: int | None,
        top_p: float | None,
        min_p: float | None,
        options: LogitOptions,
        outputs: tuple[str, ...] = (),
    ) -> SamplingFilter | None:
        """Return the filter, or None if it keeps all ids.

        Raises:
            TypeError, ValueError: an option is out of range, or does not go with the other options or the outputs.
        """
        options_given = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        given = ", ".join(f"{name}={x}" for name, x in options_given.items() if x is not None)
        if not given:
            return None
        check_sampling(top_k, top_p, min_p)
        if options.softcap is not None or options.logit_scale <= 0:
            raise ValueError(
                f"a filter needs no softcap and a positive logit_scale, got {given} with softcap={options.softcap} and "
                f"logit_scale={options.logit_scale}"
            )
        if "mean_logits" in outputs:
            raise ValueError(f"outputs ['mean_logits'] are infinite for filtered logits, got {given}")
        found = cls(top_k, None if top_p == 1 else top_p, None if min_p == 0 else min_p)
        return None if found == cls() else found

    def smallest_kept(
        self,
        logits: Tensor,
        options: LogitOptions,
        temperature: Tensor | None = None,
        gather: Gather | None = None,
        most_columns: int | None = None,
    ) -> Tensor:
        """Return (n,), each row's smallest kept untransformed logit of this rank; infinity if it keeps none.

        Args:
            logits: (n, V), this rank's columns of the rows.
            temperature: (n,) of the rows, instead of that of `options`.
            gather: if ranks split the vocabulary. Each sends its `top_k` largest logits of a row, or all for `top_p`
                without `top_k`, or its largest for `min_p` alone; all ranks then compute alike.
            most_columns: of a rank, with `gather`.
        """
        width = logits.shape[1] if most_columns is None else most_columns
        k = width if self.top_k is None else min(self.top_k, width)  # of one rank
        if self.top_p is None and self.min_p is None and gather is None:
            return logits.topk(k).values[:, -1]
        found = []
        size, wide = max(1, SORT_BLOCK // k), accumulation_dtype(logits.dtype)
        for i, block in enumerate(logits.split(size)):
            of_rows: float | Tensor = options.temperature
            if temperature is not None:
                of_rows = temperature[i * size : (i + 1) * size, None].to(wide)
            scale = options.logit_scale / of_rows
            if gather is not None and block.shape[1] < width:
                block = F.pad(block, (0, width - block.shape[1]), value=-math.inf)
            bound = None
            values = block
            if self.top_k is not None or self.top_p is not None:
                values = self._largest(block, k, gather)
                bound = values[:, -1:]
            if self.top_p is not None:
                left = self._left(values.to(wide) * scale, block, values, gather)
                n_kept = (left > 1 - self.top_p).sum(-1, keepdim=True).clamp(min=1)
                bound = values.gather(1, n_kept - 1)
            if self.min_p is not None:
                top = values.amax(-1, keepdim=True)
                if bound is None and gather is not None:
                    top = gather(top).amax(-1, keepdim=True)
                near = values.to(wide) * scale >= top.to(wide) * scale + math.log(self.min_p)
                smallest = values.masked_fill(~near, math.inf).amin(-1, keepdim=True)
                bound = smallest if bound is None else torch.maximum(bound, smallest)
            assert bound is not None
            found.append(bound[:, 0])
        return torch.cat(found)

    def _largest(self, block: Tensor, k: int, gather: Gather | None) -> Tensor:
        """Return (rows, k or fewer), the logits of all ranks that `top_k` keeps, or all, in falling order."""
        if self.top_k is None:
            return (block if gather is None else gather(block)).sort(descending=True).values
        largest = block.topk(k).values
        if gather is None:
            return largest
        of_ranks = gather(largest)
        return of_ranks.topk(min(self.top_k, of_ranks.shape[1])).values

    def _left(self, z: Tensor, block: Tensor, values: Tensor, gather: Gather | None) -> Tensor:
        """Return the probability from each of the falling logits on, among all that `top_k` keeps."""
        # From the smallest: a sum from the largest reaches 1 too early.
        p = z.softmax(-1)
        left = p.flip(-1).cumsum(-1).flip(-1)
        if self.top_k is None:
            return left
        # `top_k` also keeps the logits that equal its last, which are not among the k.
        last = values[:, -1:]
        rows = max(1, SORT_BLOCK // block.shape[1])
        equal = torch.cat(
            [(x == y).sum(-1, keepdim=True) for x, y in zip(block.split(rows), last.split(rows), strict=True)]
        )
        equal = equal if gather is None else gather(equal).sum(-1, keepdim=True)
        others = p[:, -1:] * (equal - (values == last).sum(-1, keepdim=True))
        return (left + others) / (1 + others)
