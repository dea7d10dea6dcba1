"""Losses of single sequences whose gradient a kernel knows, as `pairs` has them of pairs."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.objective import GroupKernel
from liger_chunked.engine.rows import Rows
from liger_chunked.kernels import ExampleLoss, ExampleSums, example_loss
from liger_chunked.types import TokenStats, UnpairedPreferenceMetrics


@dataclass(eq=False)
class ExampleKernel(GroupKernel):
    """The mean of an `ExampleLoss` over the sequences of a batch, and its metrics.

        objective = ExampleKernel(formula, desirable, point, reference)
        share = objective.evaluate(stats, rows, chunk, with_gradient)      for each chunk
        metrics = objective.metrics()

    Attributes:
        formula: the loss, apart from tensors.
        desirable: (n,) bool.
        point: () float64, the reference point.
        reference: as in `example_loss`.
    """

    formula: ExampleLoss
    desirable: Tensor
    point: Tensor
    reference: Tensor | None
    _sums: ExampleSums | None = field(default=None, init=False)

    def launch(
        self, stats: TokenStats, rows: Rows, chunk: Chunk, with_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        logps, mean_logits, groups = stats.logps, stats.mean_logits, rows.groups
        assert logps is not None and mean_logits is not None and groups is not None
        if self._sums is None:
            self._sums = ExampleSums.of(len(groups.host_counts), logps.device)
        return example_loss(
            self.formula,
            self._sums,
            logps,
            mean_logits,
            token_counts=groups.token_counts,
            desirable=self.desirable,
            point=self.point,
            examples=chunk.group_slice,
            reference=self.reference,
            with_gradient=with_gradient,
        )

    def metrics(self) -> UnpairedPreferenceMetrics:
        """Return views of what the kernels wrote."""
        assert self._sums is not None
        means, totals = self._sums.means.unbind(), self._sums.totals.unbind()
        return UnpairedPreferenceMetrics(*means, *totals)
