"""Losses of pairs whose gradient a kernel knows, so that a chunk needs no dense statistics and no autograd."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.objective import GroupKernel, has_group_kernel
from liger_chunked.engine.rows import Rows
from liger_chunked.kernels import MOST_TERMS, PairLoss, PairSums, pair_loss
from liger_chunked.types import LossHead, PairTerm, PreferenceMetrics, TokenStats


def has_pair_kernel(head: LossHead, input: Tensor, terms: tuple[PairTerm, ...] | None, rows: Rows) -> bool:
    """Whether `PairKernel` computes a loss of these terms, None for a loss of another form, on the input's device."""
    return terms is not None and 0 < len(terms) <= MOST_TERMS and has_group_kernel(head, input, rows)


@dataclass(eq=False)
class PairKernel(GroupKernel):
    """The mean of a `PairLoss` over the pairs of a batch, and its metrics.

        kernel = PairKernel(formula, reference)
        share = kernel.evaluate(stats, rows, chunk, with_gradient)      for each chunk
        metrics = kernel.metrics()

    Attributes:
        formula: the loss, apart from tensors.
        reference: as in `pair_loss`.
    """

    formula: PairLoss
    reference: Tensor | None
    _sums: PairSums | None = field(default=None, init=False)

    def launch(
        self, stats: TokenStats, rows: Rows, chunk: Chunk, with_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        logps, mean_logits, groups = stats.logps, stats.mean_logits, rows.groups
        assert logps is not None and mean_logits is not None and groups is not None
        if self._sums is None:
            self._sums = PairSums.of(len(groups.host_counts), logps.device)
        return pair_loss(
            self.formula,
            self._sums,
            logps,
            mean_logits,
            token_counts=groups.token_counts,
            pairs=chunk.group_slice,
            stacked=groups.stacked,
            reference=self.reference,
            with_gradient=with_gradient,
        )

    def metrics(self) -> PreferenceMetrics:
        """Return views of what the kernels wrote."""
        assert self._sums is not None
        chosen_logps, rejected_logps, chosen_rewards, rejected_rewards = self._sums.of_pairs.unbind()
        chosen_logits_mean, rejected_logits_mean, nll_loss = self._sums.means.unbind()
        return PreferenceMetrics(
            chosen_logps=chosen_logps,
            rejected_logps=rejected_logps,
            chosen_logits_mean=chosen_logits_mean,
            rejected_logits_mean=rejected_logits_mean,
            nll_loss=nll_loss,
            chosen_rewards=chosen_rewards,
            rejected_rewards=rejected_rewards,
        )
