"""Divergences of a draft from its teacher: the draft may lack tokens, and several of its steps share a teacher's row.

    shared, order = SharedRows.of(index)      the teacher's row of each row of the step
    rows = rows.reordered(order)              rows that share a teacher's row follow each other

A tile then projects each of its teacher's rows once (`distillation`), and `DraftDivergence` compares.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.engine.cutting import Tile, Tiles
from liger_chunked.engine.divergences import Measured, slopes_of_divergence, steepest_of
from liger_chunked.kernels import (
    DivergenceStats,
    PartialStats,
    Sums,
    divergence_grad_,
    divergence_stats,
    logits_stats,
    sums,
)
from liger_chunked.types import Divergence, LogitOptions, Slopes

_TVD = Divergence("tvd")


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The teacher's row of each row of a step, whose rows are in the order of the teacher's.

    Attributes:
        used: (m,) int64, the teacher's rows that any row of the step is compared with, ascending.
        place: (n_valid,) int64, the place in `used` of each row of the step, ascending.
        ends: the rows of the step up to and with each of `used`; known to the host.
        most: the most rows of the step that share one of `used`.
    """

    used: Tensor
    place: Tensor
    ends: list[int]
    most: int

    @classmethod
    def of(cls, index: Tensor) -> tuple[SharedRows, Tensor]:
        """Return the rows in the teacher's order, and that order (n_valid,). Waits for the device.

        Args:
            index: (n_valid,) int64, the teacher's row of each row of the step.
        """
        used, place, counts = torch.unique(index, return_inverse=True, return_counts=True)
        order = place.argsort(stable=True)
        host_counts = counts.tolist()
        return cls(used, place[order], list(itertools.accumulate(host_counts)), max(host_counts, default=0)), order

    @property
    def per_row(self) -> float:
        """Rows of the teacher for each row of the step, at most 1."""
        return len(self.ends) / max(1, self.place.shape[0])

    def reader(self, flat: Tensor, dtype: torch.dtype) -> Callable[[slice], Tensor]:
        """Return a function from rows of the step to those of a teacher's hidden states (M, H) that they share."""
        return lambda part: flat.index_select(0, self.used[self.used_by(part)]).to(dtype)

    def used_by(self, row_slice: slice) -> slice:
        """Return the places in `used` of some rows of the step."""
        if row_slice.start == row_slice.stop:
            return slice(0, 0)
        return slice(bisect.bisect_right(self.ends, row_slice.start), bisect.bisect_left(self.ends, row_slice.stop) + 1)

    def pieces(self, row_slice: slice, limit: int) -> list[slice]:
        """Cut rows of the step into pieces of at most `limit`, and of as many rows of the teacher as their share.

        A cut between two rows that share a row of the teacher projects it twice. So cuts are after these, unless pieces
        are so short that a single row of the teacher may fill half of one.
        """
        n = row_slice.stop - row_slice.start
        # Pieces end with the next row of the teacher, which exceeds `size` by less than `most`.
        size = limit - self.most + 1 if 2 * self.most <= limit else limit
        size = -(-n // -(-n // size)) if n else 1
        most_used = math.ceil(size * self.per_row) + 1
        cut, start = [], row_slice.start
        while start < row_slice.stop:
            stop, first = min(start + size, row_slice.stop), bisect.bisect_right(self.ends, start)
            end = self.ends[bisect.bisect_left(self.ends, stop)]
            if end - start <= limit:
                stop = min(end, row_slice.stop)
            stop = min(stop, self.ends[min(first + most_used, len(self.ends)) - 1])
            cut.append(slice(start, stop))
            start = stop
        return cut

    def tiles(self, row_slice: slice, columns: int, limit: int) -> Tiles:
        """Cut a chunk's rows into tiles of all columns."""
        first, parts = row_slice.start, self.pieces(row_slice, limit)
        return tuple(Tile(slice(rows.start - first, rows.stop - first), slice(0, columns)) for rows in parts)


class _TeacherTile(NamedTuple):
    """What a tile's rows are compared with: logits (n, V_draft), and of the teacher's whole vocabulary (n,) each."""

    logits: Tensor
    max: Tensor  # of the transformed logits
    sum_exp: Tensor  # sum exp(t - max)
    argmax: Tensor  # int64


@dataclass(frozen=True, eq=False)
class DraftDivergence:
    """A `Route` of `Distillation`: with a draft's `q = softmax(z)` and a teacher's `p`, in nats per row.

    The divergence's `p` and `q` of `types.Divergence` are the draft's and the teacher's.

    Attributes:
        divergence: of the tokens of the draft.
        takes_log: whether the value is the negative logarithm of the accepted mass; the divergence is then TVD.
        draft_ids: (V_draft,) int64, the teacher's token of each of the draft's. None: the same tokens.
        in_draft: (V_teacher,) bool. Rows whose most likely token of the teacher is not in the draft have a divergence
            of 0. None: all rows count.
        renormalizes: whether `p` sums to 1 over the draft's tokens, and not over the teacher's.
        draft_columns, teacher_columns: the tokens of each.
        shared: None: the teacher has a row for each row of the step.
    """

    divergence: Divergence
    takes_log: bool
    options: LogitOptions
    teacher_options: LogitOptions
    draft_ids: Tensor | None
    in_draft: Tensor | None
    renormalizes: bool
    draft_columns: int
    teacher_columns: int
    shared: SharedRows | None

    def bytes_per_logit(self, student: torch.dtype, teacher: torch.dtype | None) -> int:
        assert teacher is not None
        columns = self.teacher_columns / self.draft_columns + (self.draft_ids is not None)  # a copy of the draft's
        copies = self.shared is not None  # of these, for each row
        return student.itemsize + math.ceil(teacher.itemsize * (self._per_row * columns + copies))

    @property
    def _per_row(self) -> float:
        return 1.0 if self.shared is None else self.shared.per_row

    @property
    def teacher_columns_per_row(self) -> int:
        """The teacher's logits for each row of the draft."""
        return max(1, math.ceil(self.teacher_columns * self._per_row))

    def slopes(self) -> Slopes:
        # The gradient of log(accepted mass) is at most 1 too: the mass is at least that of `below`.
        return slopes_of_divergence(self.options, steepest_of(self.divergence, self.options.temperature))

    def measure(
        self, student: Tensor, teacher: Tensor | None, target: Tensor | None, rows: slice, with_gradient: bool
    ) -> Measured:
        assert teacher is not None and target is None
        tile = self._teacher_tile(teacher, rows)
        best = _largest(student, self.options).argmax
        assert best is not None
        agrees = (best if self.draft_ids is None else self.draft_ids[best]) == tile.argmax
        own = sums(student, tile.logits, None, self.divergence.kind, self.options, self.teacher_options)
        whole, log_share = self._of_all_tokens(own, tile)
        # The KL divergences of both are a shift and a factor apart, so that their sums over the draft's tokens serve.
        is_kl = self.divergence.kind in ("forward_kl", "reverse_kl")
        stats = self._compare(student, tile.logits, self.divergence, own if is_kl or self.renormalizes else whole)
        of_whole = stats
        if self.divergence.kind != "tvd" or (self.renormalizes and self.draft_ids is not None):
            of_whole = self._compare(student, tile.logits, _TVD, whole)
        value, factor = self._value(stats, None if self.renormalizes else log_share)
        if self.in_draft is not None:
            counts = self.in_draft[tile.argmax].to(value.dtype)
            value, factor = value * counts, counts if factor is None else factor * counts

        def backward(g_divergence: Tensor, g_logps: Tensor | None) -> Tensor:
            g = g_divergence if factor is None else g_divergence * factor
            how = self.divergence, self.options, self.teacher_options
            return divergence_grad_(student, tile.logits, None, stats, g, None, *how)

        return Measured(value, None, backward, accepted=of_whole.overlap, agrees=agrees)

    def _teacher_tile(self, teacher: Tensor, rows: slice) -> _TeacherTile:
        largest = _largest(teacher, self.teacher_options)
        assert largest.argmax is not None
        logits = teacher if self.draft_ids is None else teacher.index_select(1, self.draft_ids)
        tile = _TeacherTile(logits, largest.max, largest.sum_exp, largest.argmax)
        if self.shared is None or teacher.shape[0] == rows.stop - rows.start:  # a row for each
            return tile
        place = self.shared.place[rows] - self.shared.used_by(rows).start
        return _TeacherTile(*[x.index_select(0, place) for x in tile])

    def _of_all_tokens(self, own: Sums, tile: _TeacherTile) -> tuple[Sums, Tensor | None]:
        """Return sums with the teacher's over all its tokens, and the log of the share that the draft's tokens have.

        Args:
            own: sums over the draft's tokens.
        """
        if self.draft_ids is None:
            return own, None
        assert own.teacher_centre is not None and own.teacher_log_sum is not None
        temperature, log_sum = self.teacher_options.temperature, tile.sum_exp.log()
        whole = own._replace(
            teacher_centre=tile.max * temperature, teacher_sum_exp=tile.sum_exp, teacher_log_sum=log_sum
        )
        log_share = (own.teacher_centre / temperature - tile.max) + (own.teacher_log_sum - log_sum)
        return whole, log_share.clamp(max=0.0)

    def _compare(self, student: Tensor, teacher: Tensor, divergence: Divergence, normalisers: Sums) -> DivergenceStats:
        return divergence_stats(
            student,
            teacher,
            None,
            divergence,
            self.options,
            self.teacher_options,
            normalisers=normalisers,
            with_overlap=divergence.kind == "tvd",
        )

    def _value(self, stats: DivergenceStats, log_share: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the values (n,), and the factor (n,) of the gradient that `stats` have. None: 1.

        Args:
            log_share: of the teacher's mass on the draft's tokens, if `p` sums to 1 over all tokens.
        """
        value, kind, factor = stats.divergence, self.divergence.kind, None
        if self.takes_log:
            assert stats.overlap is not None
            mass = stats.overlap.clamp(min=_LEAST_MASS)
            return -mass.log(), mass.reciprocal()
        if log_share is None:
            return value, None
        if kind == "forward_kl":  # p is `share` times the renormalised one
            factor = log_share.exp()
            return factor * (value + log_share), factor
        if kind == "reverse_kl":
            return value - log_share, None
        missing = -torch.expm1(log_share)  # where the draft's probability is 0
        if kind == "tvd":
            return value + 0.5 * missing, None
        return value - self.divergence.on_teacher * math.log(self.divergence.beta) * missing, None


# The mass below which its logarithm has no gradient.
_LEAST_MASS = 1e-30


def _largest(logits: Tensor, options: LogitOptions) -> PartialStats:
    """Return the largest transformed logit of each row, the sum relative to it, and its first column."""
    no_target = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    return logits_stats(logits, no_target, options, ("argmax",))
