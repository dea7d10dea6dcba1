"""`LigerGOLDTrainer`: TRL's GOLD, without logits if both models share a vocabulary."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from trl.experimental.gold import GOLDTrainer

from liger_chunked.integrations.trl.generalized import GeneralizedMixin


class LigerGOLDTrainer(GeneralizedMixin, GOLDTrainer):
    """TRL's `GOLDTrainer` without logits.

    With a teacher that has another tokenizer (`use_uld_loss`), TRL's loss sorts and merges whole rows of probabilities.
    This trainer then uses TRL's code, with logits.

    Args:
        *args, **kwargs: see TRL.
        loss: a `LigerFusedLinearDistillationBase`; not with a teacher that has another tokenizer.
        logits_budget: see `LigerTrainerMixin`.

    Raises:
        ValueError: there is a loss and a teacher with another tokenizer, or a config field contradicts the loss
            (`replaced_fields`).
    """

    replaced_fields = MappingProxyType({"beta": "beta", "temperature": "options.temperature"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._across_tokenizers and self.loss_override is not None:
            raise ValueError("a loss on one vocabulary cannot compare tokenizers: use_uld_loss takes no loss")

    @property
    def _across_tokenizers(self) -> bool:
        return self.use_uld_loss and self.teacher_tokenizer is not None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: int | Tensor | None = None,
    ) -> Any:
        if self._across_tokenizers:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        model_inputs = {
            "input_ids": inputs["input_ids"],
            "attention_mask": inputs["attention_mask"],
            **self._get_model_forward_kwargs(inputs),
        }
        return self._distil(model, model_inputs, inputs["labels"], self.temperature, return_outputs, num_items_in_batch)
