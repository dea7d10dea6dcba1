"""Losses of rollouts whose gradient a kernel knows, as `pairs` has them of pairs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.objective import GroupKernel
from liger_chunked.engine.rows import Rows
from liger_chunked.kernels import PolicyLoss, PolicySides, PolicySums, policy_loss
from liger_chunked.types import PolicyMetrics, TokenStats


@dataclass(eq=False)
class PolicyKernel(GroupKernel):
    """A `PolicyLoss` of a batch, and its metrics. Groups are tokens or sequences.

        objective = PolicyKernel(formula, sides, n_sequences)
        share = objective.evaluate(stats, rows, chunk, with_gradient)      for each chunk
        metrics = objective.metrics()

    Attributes:
        formula: the loss, apart from tensors of tokens.
        sides: what the call gave of its tokens and sequences.
        n_sequences: B.
    """

    statistics: ClassVar[tuple[str, ...]] = ("logps", "entropy")

    formula: PolicyLoss
    sides: PolicySides
    n_sequences: int
    _sums: PolicySums | None = field(default=None, init=False)
    _token_counts: Tensor | None = field(default=None, init=False)  # (B,)

    def launch(
        self, stats: TokenStats, rows: Rows, chunk: Chunk, with_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        assert stats.logps is not None and stats.entropy is not None
        if self._sums is None or self._token_counts is None:
            self._sums = PolicySums.of(self.n_sequences, stats.logps.device)
            self._token_counts = self._counts(rows)
        return policy_loss(
            self.formula,
            self._sums,
            stats.logps,
            stats.entropy,
            self.sides,
            token_counts=self._token_counts,
            index=rows.dense_index,
            tokens=chunk.row_slice,
            with_gradient=with_gradient,
        )

    def _counts(self, rows: Rows) -> Tensor:
        if rows.groups is not None:
            return rows.groups.token_counts
        assert rows.token_counts is not None
        return rows.token_counts

    def metrics(self) -> PolicyMetrics:
        """Return views of what the kernels wrote."""
        assert self._sums is not None
        means, term = self._sums.means.unbind(), self.formula.term
        has_ref, has_old = self.sides.ref_logps is not None, self.sides.old_logps is not None
        return PolicyMetrics(
            entropy=means[0],
            kl=means[1] if has_ref else None,
            clip_ratio_low=means[2] if term.counts_low else None,
            clip_ratio_high=means[3] if term.counts_high else None,
            clip_ratio=means[4] if term.counts_high else None,
            clip_ratio_low_min=means[5] if term.counts_low else None,
            clip_ratio_high_max=means[6] if term.counts_high else None,
            ratio_mean=means[7] if has_old else None,
            ratio_min=means[8] if has_old else None,
            ratio_max=means[9] if has_old else None,
        )
