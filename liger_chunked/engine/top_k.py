from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_chunked.engine.collectives import gather, sum_disjoint_
from liger_chunked.engine.divergences import (
    DivergenceFunction,
    Measured,
    measured_by,
    slopes_of_divergence,
    tempered,
    transformed,
    vector_jacobian,
)
from liger_chunked.kernels import tail_grad_, tail_stats
from liger_chunked.types import LogitOptions, Slopes, VocabShard, accumulation_dtype

# Least probability of the teacher's tail, as in TRL.
LEAST_LEFT = 1e-7


@dataclass(frozen=True)
class TopK:
    """Computes a divergence over k + 1 bins: the teacher's k tokens, and the tail of all others.

    A sweep over the logits, with the k at -inf, computes the tail's logsumexp without cancellation. Autograd does the
    rest, k + 2 numbers per token.
    """

    function: DivergenceFunction
    options: LogitOptions
    logps: Tensor  # (n_valid, k) in nats, -inf if missing
    ids: Tensor  # (n_valid, k) int64, distinct where present
    shard: VocabShard | None = None

    def bytes_per_logit(self, student: torch.dtype, teacher: torch.dtype | None) -> int:
        return student.itemsize

    def slopes(self) -> Slopes:
        return slopes_of_divergence(self.options)

    def measure(
        self, student: Tensor, teacher: Tensor | None, target: Tensor | None, rows: slice, with_gradient: bool
    ) -> Measured:
        wide = accumulation_dtype(student.dtype)
        columns = _Columns.of(self.ids[rows], self.logps[rows], target)
        raw = self._read(student, columns.index).to(wide)
        self._write(student, columns.index, torch.full_like(raw, -torch.inf))
        of_ranks = None if self.shard is None else functools.partial(gather, group=self.shard.group)
        stats = tail_stats(student, self.options, hard=target is not None, gather=of_ranks)
        hard = None if stats.hard_sum_exp is None else stats.hard_sum_exp.log()
        leaves = [raw, stats.log_sum] if hard is None else [raw, stats.log_sum, hard]
        leaves = [leaf.detach().requires_grad_(with_gradient) for leaf in leaves]
        with torch.set_grad_enabled(with_gradient):
            z, tail, hard_tail = columns.centred(leaves, stats.centre, self.options)
            student_bins = columns.bins(tempered(z, self.options), tail)
            teacher_bins = columns.teacher_bins(self.logps[rows].to(wide), student_bins)
            divergence = measured_by(self.function, student_bins, teacher_bins)
            logps = None if target is None else columns.log_prob_of_target(z, hard_tail)

        def backward(g_divergence: Tensor, g_logps: Tensor | None) -> Tensor:
            g_raw, g_log_sum, *g_hard = vector_jacobian({divergence: g_divergence, logps: g_logps}, leaves)
            dz = tail_grad_(student, stats, g_log_sum, g_hard[0] if g_hard else None, self.options)
            # Gradients of unrounded values replace the sweep's.
            return self._write(dz, columns.index, columns.joined(g_raw))

        return Measured(divergence.detach(), None if logps is None else logps.detach(), backward)

    def _read(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the ids' logits (n, k), from all ranks."""
        if self.shard is None:
            return logits.gather(1, ids)
        found = logits.new_zeros(ids.shape)
        rows, k, columns = self._own(ids, logits.shape[1])
        found[rows, k] = logits[rows, columns]
        return sum_disjoint_(found, self.shard.group)

    def _write(self, logits: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """Write `values` (n, k) at the ids of this rank."""
        values = values.to(logits.dtype)
        if self.shard is None:
            return logits.scatter_(1, ids, values)
        rows, k, columns = self._own(ids, logits.shape[1])
        logits[rows, columns] = values[rows, k]
        return logits

    def _own(self, ids: Tensor, n_columns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return row, position and column of this rank's ids. Waits for the device."""
        assert self.shard is not None
        columns = ids - self.shard.start
        rows, k = ((columns >= 0) & (columns < n_columns)).nonzero(as_tuple=True)
        return rows, k, columns[rows, k]


@dataclass(frozen=True)
class _Columns:
    """The columns outside the tail: the teacher's k, then any target, perhaps one of the k.

    Missing entries repeat `first`.
    """

    index: Tensor  # (n, k or k + 1)
    present: Tensor  # (n, k)
    first: Tensor  # (n, 1) first present entry
    is_target: Tensor | None  # (n, k) present and the target

    @classmethod
    def of(cls, ids: Tensor, logps: Tensor, target: Tensor | None) -> _Columns:
        present = logps > -torch.inf
        first = present.int().argmax(1, keepdim=True)
        index = torch.where(present, ids, ids.gather(1, first))
        if target is None:
            return cls(index, present, first, None)
        return cls(torch.cat([index, target[:, None]], 1), present, first, present & (index == target[:, None]))

    def centred(
        self, leaves: list[Tensor], tail_centre: Tensor, options: LogitOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits before the temperature, and the tail's logsumexp at the temperature and at 1.

        All are relative to the row's largest logit.
        """
        z = transformed(leaves[0], options)
        largest = torch.maximum(z.detach().amax(1), tail_centre)
        shift = torch.where(tail_centre == -torch.inf, 0.0, tail_centre - largest)
        tail = leaves[1] + tempered(shift, options)
        return z - largest[:, None], tail, leaves[2] + shift if len(leaves) > 2 else tail

    def bins(self, z: Tensor, tail: Tensor) -> Tensor:
        k = self.present.shape[1]
        if self.is_target is not None:
            # A target outside the k belongs to the tail.
            tail = _log_add(tail, z[:, k].masked_fill(self.is_target.any(1), -torch.inf))
        return torch.cat([z[:, :k].masked_fill(~self.present, -torch.inf), tail[:, None]], 1)

    def teacher_bins(self, logps: Tensor, student_bins: Tensor) -> Tensor:
        """Return the teacher's log-probabilities (n, k + 1).

        The tail is -inf if the k are the whole vocabulary, else at least `log(LEAST_LEFT)`: finite.
        """
        left = torch.log1p(-logps.double().exp().sum(1, keepdim=True).clamp(max=1.0 - LEAST_LEFT)).to(logps.dtype)
        nothing = student_bins.detach()[:, -1:] == -torch.inf
        return torch.cat([logps, left.masked_fill(nothing, -torch.inf)], 1)

    def log_prob_of_target(self, z: Tensor, tail: Tensor) -> Tensor:
        return z[:, -1] - self.bins(z, tail).logsumexp(1)

    def joined(self, gradient: Tensor) -> Tensor:
        k = self.present.shape[1]
        position = torch.where(self.present, torch.arange(k, device=gradient.device), self.first)
        if self.is_target is None:
            return gradient.gather(1, position)
        of_target = gradient[:, k:]
        entries = gradient[:, :k] + torch.where(self.is_target, of_target, 0.0)
        repeated = torch.where(self.is_target, entries, 0.0).sum(1, keepdim=True)
        of_target = torch.where(self.is_target.any(1, keepdim=True), repeated, of_target)
        return torch.cat([entries.gather(1, position), of_target], 1)


def _log_add(a: Tensor, b: Tensor) -> Tensor:
    """Return `logaddexp`, with a finite gradient for two -inf."""
    both = torch.stack([a, b])
    nothing = (both == -torch.inf).all(0)
    return torch.where(nothing, -torch.inf, torch.where(nothing, 0.0, both).logsumexp(0))
