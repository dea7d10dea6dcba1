"""`LigerORPOTrainer`: TRL's ORPO without logits."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from trl.experimental.orpo import ORPOTrainer

from liger_chunked.integrations.trl.concatenated import ConcatenatedMixin


class LigerORPOTrainer(ConcatenatedMixin, ORPOTrainer):
    """TRL's `ORPOTrainer` without logits, for decoder-only models.

    Args:
        *args, **kwargs: see TRL.
        loss: a `LigerFusedLinearPreferenceBase`. Its NLL term, if any, spans prompt and response, as in ORPO.
        logits_budget: see `LigerTrainerMixin`.

    Raises:
        ValueError: the model is an encoder-decoder, the loss needs a reference, or a config field contradicts the loss
            (`replaced_fields`).
    """

    replaced_fields = MappingProxyType({"beta": "beta"})

    def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        n = batch["chosen_labels"].shape[0]
        inputs, labels = self._concatenated(batch, self.padding_value)
        prompt_and_response = self._whole_sequences(inputs)[:n]
        scores = self._score(model, inputs, torch.cat([prompt_and_response, labels[n:]]))
        mask = labels[:, 1:] != -100
        logps = torch.where(mask, scores.logps[:, :-1], 0.0).sum(-1) / mask.sum(-1)
        nll = -scores.logps[:n].sum() / (prompt_and_response[:, 1:] != -100).sum()
        mean_logits = scores.mean_logits[:, :-1]
        aux = () if scores.aux_loss is None else (scores.aux_loss,)
        return logps[:n], logps[n:], mean_logits[:n], mean_logits[n:], nll, *aux

    def get_batch_loss_metrics(self, model: nn.Module, batch: dict[str, Any], train_eval: str = "train") -> Any:
        if self.loss_override is None:
            return super().get_batch_loss_metrics(model, batch, train_eval)
        inputs, labels = self._concatenated(batch, self.padding_value)
        return self._override(model, inputs, labels, self._whole_sequences(inputs), train_eval)

    @staticmethod
    def _whole_sequences(inputs: dict[str, Any]) -> Tensor:
        return inputs["input_ids"].where(inputs["attention_mask"] == 1, -100)
