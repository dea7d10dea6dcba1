"""`LigerGKDTrainer`: TRL's GKD without the logits of either model."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from trl.experimental.gkd import GKDTrainer

from liger_chunked.integrations.trl.generalized import GeneralizedMixin


class LigerGKDTrainer(GeneralizedMixin, GKDTrainer):
    """TRL's `GKDTrainer` without logits.

    Args:
        *args, **kwargs: see TRL.
        loss: a `LigerFusedLinearDistillationBase`.
        logits_budget: see `LigerTrainerMixin`.

    Raises:
        ValueError: a config field contradicts the loss (`replaced_fields`).
    """

    replaced_fields = MappingProxyType({"beta": "beta"})

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: int | Tensor | None = None,
    ) -> Any:
        model_inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        # TRL uses its temperature for sampling only.
        return self._distil(model, model_inputs, inputs["labels"], 1.0, return_outputs, num_items_in_batch)
