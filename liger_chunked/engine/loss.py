"""What the engine asks of a loss of token statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from liger_chunked.engine.compile import FusedLoss
from liger_chunked.engine.fused import BatchObjective, NegativeLogLikelihood, fused_loss
from liger_chunked.engine.schedule import Group, Layout
from liger_chunked.types import Head, LogitOptions, TokenStats


class StatsLoss(FusedLoss):
    """A loss module that reaches logits through the statistics of tokens alone: all but the distillations.

    What a subclass says here, by a class attribute or a property, is all that the engine knows of it, and
    `estimate_memory` too.
    """

    options: LogitOptions

    @property
    def _group(self) -> Group:
        """What no pack may split: a token, a sequence, a pair."""
        raise NotImplementedError

    @property
    def _whole_batch(self) -> bool:
        """Whether its objective wants all groups at once."""
        return False

    @property
    def _outputs(self) -> tuple[str, ...]:
        """The statistics that the loss and its metrics read."""
        raise NotImplementedError

    @property
    def _differentiates(self) -> tuple[str, ...]:
        """Those that its gradient reaches, as far as is known."""
        raise NotImplementedError

    def _fuse(
        self,
        head: Head,
        input: Tensor,
        layout: Layout,
        objective: Callable[[Any, TokenStats, slice | Tensor], Tensor] | NegativeLogLikelihood,
        batch: Any = None,
        class_weight: Tensor | None = None,
    ) -> tuple[Tensor, TokenStats]:
        """`fused_loss` of this loss; the objective is called with `batch`, see `BatchObjective`."""
        return fused_loss(
            head,
            input,
            layout,
            objective if isinstance(objective, NegativeLogLikelihood) else BatchObjective(self, objective, batch),
            outputs=self._outputs,
            differentiates=self._differentiates,
            options=self.options,
            whole_batch=self._whole_batch,
            class_weight=class_weight,
        )
