"""Which logits a sampler keeps: `top_k`, `top_p` and `min_p`.

    filter = SamplingFilter.of(top_k, top_p, min_p, options)    checks them; None if all ids are kept
    bounds = filter.bound(logits, options)                      (n,): a row keeps the logits from its bound on

A bound says enough, because each filter drops the smallest logits of those that the one before it keeps. It is one of
untransformed logits, whose order the transform keeps. Three functions compute it:

    bound            on one rank: the kernel `sampling_bound`, or `smallest_kept` where Triton does not run
    smallest_kept    also of columns that ranks split: the formula, in blocks of rows, which bound its memory
    _bound           the formula for a block of rows
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_chunked.kernels import sampling_bound
from liger_chunked.kernels.backend import use_triton
from liger_chunked.kernels.tuning.generic import SORT_BLOCK
from liger_chunked.sampler import beyond_top_p, mass_from
from liger_chunked.types import LogitOptions, accumulation_dtype, check_sampling

# (rows, m) of this rank -> (rows, ranks * m) of all, in rank order
Gather = Callable[[Tensor], Tensor]


class WholeVocabulary:
    """How a filter reads rows of logits, here (rows, V). `SplitVocabulary` reads those whose columns ranks split."""

    def columns(self, logits: Tensor) -> int:
        """Return the most columns that a rank has."""
        return logits.shape[1]

    def padded(self, z: Tensor) -> Tensor:
        """Return a rank's logits (rows, columns) with as many columns as any rank's."""
        return z

    def in_falling_order(self, z: Tensor, k: int | None) -> Tensor:
        """Return (rows, m), the k largest logits of each row, fewer if it has fewer. k None: all."""
        return z.sort(descending=True).values if k is None else z.topk(min(k, z.shape[1])).values

    def largest(self, z: Tensor) -> Tensor:
        """Return (rows, 1), the largest logit of each row."""
        return z.amax(-1, keepdim=True)

    def total(self, counts: Tensor) -> Tensor:
        """Return (rows, 1) counts of whole rows, from those of a rank's columns."""
        return counts


WHOLE_VOCABULARY = WholeVocabulary()


@dataclass(frozen=True)
class SplitVocabulary(WholeVocabulary):
    """Each rank sends its k largest logits of a row, or all, or its largest alone. All ranks then compute alike.

    Attributes:
        gather: the collective.
        most_columns: of a rank.
    """

    gather: Gather
    most_columns: int

    def columns(self, logits: Tensor) -> int:
        return self.most_columns

    def padded(self, z: Tensor) -> Tensor:
        missing = self.most_columns - z.shape[1]
        return F.pad(z, (0, missing), value=-math.inf) if missing else z

    def in_falling_order(self, z: Tensor, k: int | None) -> Tensor:
        return super().in_falling_order(self.gather(z if k is None else super().in_falling_order(z, k)), k)

    def largest(self, z: Tensor) -> Tensor:
        return super().largest(self.gather(super().largest(z)))

    def total(self, counts: Tensor) -> Tensor:
        return self.gather(counts).sum(-1, keepdim=True)


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
        filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        given = ", ".join(f"{name}={x}" for name, x in filters.items() if x is not None)
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
        # Those that keep all ids are left out.
        filter = cls(top_k, None if top_p == 1 else top_p, None if min_p == 0 else min_p)
        return None if filter == cls() else filter

    def bound(self, logits: Tensor, options: LogitOptions, temperature: Tensor | None = None) -> Tensor:
        """Return (n,), bounds of whole rows: the filters keep the logits from a row's bound on.

        One kernel finds them where Triton runs, in memory of a few bytes for each row. `smallest_kept` is the formula,
        which sorts.

        Args:
            logits: (n, V), whole rows.
            options: of their transform, which scales them.
            temperature: (n,) of the rows, instead of that of `options`.
        """
        if not use_triton(logits):
            return self.smallest_kept(logits, options, temperature)
        of_rows = options.temperature if temperature is None else temperature.to(accumulation_dtype(logits.dtype))
        scale = options.logit_scale / of_rows
        return sampling_bound(logits, scale, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    def smallest_kept(
        self,
        logits: Tensor,
        options: LogitOptions,
        temperature: Tensor | None = None,
        vocabulary: WholeVocabulary = WHOLE_VOCABULARY,
    ) -> Tensor:
        """Return (n,), each row's smallest kept untransformed logit of this rank; infinity if it keeps none.

        Args:
            logits: (n, V), this rank's columns of the rows.
            options: of their transform, which scales them.
            temperature: (n,) of the rows, instead of that of `options`.
            vocabulary: how to read whole rows.
        """
        columns = vocabulary.columns(logits)
        # A sort takes several times the memory of what it sorts, which are the logits or the `top_k` of each row.
        n_rows = max(1, SORT_BLOCK // (columns if self.top_k is None else min(self.top_k, columns)))
        blocks = logits.split(n_rows)
        temperatures: Iterable[float | Tensor] = [options.temperature] * len(blocks)
        if temperature is not None:
            temperatures = temperature[:, None].to(accumulation_dtype(logits.dtype)).split(n_rows)
        bounds = [
            self._bound(vocabulary.padded(block), options.logit_scale / of_rows, vocabulary)[:, 0]
            for block, of_rows in zip(blocks, temperatures, strict=True)
        ]
        return bounds[0] if len(bounds) == 1 else torch.cat(bounds)

    def _bound(self, z: Tensor, scale: float | Tensor, vocabulary: WholeVocabulary) -> Tensor:
        """Return (rows, 1), the smallest logit that all filters keep of untransformed logits `z` (rows, columns)."""
        if self.top_k is None and self.top_p is None:
            # Needs no order, and reads only this rank's columns.
            return self._bound_of_min_p(z, vocabulary.largest(z), scale)
        values = vocabulary.in_falling_order(z, self.top_k)  # what `top_k` keeps, or all
        # Each filter raises the bound, because it drops the smallest of what the one before it keeps.
        bound = values[:, -1:]
        if self.top_p is not None:
            mass = self._mass_from(values, z, scale, vocabulary)
            last = values.shape[1] - 1 - beyond_top_p(mass, self.top_p).sum(-1, keepdim=True)
            bound = values.gather(1, last)
        if self.min_p is not None:
            bound = torch.maximum(bound, self._bound_of_min_p(values, values[:, :1], scale))
        return bound

    def _bound_of_min_p(self, values: Tensor, largest: Tensor, scale: float | Tensor) -> Tensor:
        """Return (rows, 1), the smallest of `values` whose probability is at least `min_p` times the largest one.

        Of logits, whose difference is the logarithm of the ratio: no sum over the vocabulary is needed.
        """
        assert self.min_p is not None
        wide = accumulation_dtype(values.dtype)
        is_near = values.to(wide) * scale >= largest.to(wide) * scale + math.log(self.min_p)
        return values.masked_fill(~is_near, math.inf).amin(-1, keepdim=True)

    def _mass_from(self, values: Tensor, z: Tensor, scale: float | Tensor, vocabulary: WholeVocabulary) -> Tensor:
        """Return (rows, m), the probability from each of the falling `values` on, among all that `top_k` keeps."""
        p = (values.to(accumulation_dtype(values.dtype)) * scale).softmax(-1)
        mass = mass_from(p)
        if self.top_k is None:
            return mass
        # `top_k` also keeps the logits that equal its last, which are not among the k: `others` is their probability.
        last = values[:, -1:]
        n_rows = max(1, SORT_BLOCK // z.shape[1])
        pairs = zip(z.split(n_rows), last.split(n_rows), strict=True)
        n_equal = vocabulary.total(torch.cat([(x == y).sum(-1, keepdim=True) for x, y in pairs]))
        others = p[:, -1:] * (n_equal - (values == last).sum(-1, keepdim=True))
        return (mass + others) / (1 + others)
