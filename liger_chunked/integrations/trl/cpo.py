"""`LigerCPOTrainer`: TRL's CPO and SimPO, without logits."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from trl.experimental.cpo import CPOTrainer

from liger_chunked.integrations.trl.concatenated import ConcatenatedMixin


class LigerCPOTrainer(ConcatenatedMixin, CPOTrainer):
    """TRL's `CPOTrainer` (SimPO with `loss_type="simpo"`) without logits, for decoder-only models.

    Args:
        *args, **kwargs: see TRL.
        loss: a `LigerFusedLinearPreferenceBase`.
        logits_budget: see `LigerTrainerMixin`.

    Raises:
        ValueError: the model is an encoder-decoder, the loss needs a reference, or a config field contradicts the loss
            (`replaced_fields`).
    """

    replaced_fields = MappingProxyType(
        {
            "beta": "beta",
            "loss_type": "loss_type",
            "label_smoothing": "settings.label_smoothing",
            "cpo_alpha": "cpo_alpha",
            "simpo_gamma": "settings.simpo_gamma",
            "alpha": None,
        }
    )

    def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        n = batch["chosen_labels"].shape[0]
        inputs, labels = self._concatenated(batch, self.pad_token_id)
        scores = self._score(model, inputs, labels)
        lengths = (labels[:, 1:] != -100).sum(-1)
        logps = sums = scores.logps.sum(-1)
        if self.loss_type in ("ipo", "simpo"):
            logps = sums / lengths
        nll = sums.new_zeros(()) if self.cpo_alpha == 0 else -sums[:n].sum() / lengths[:n].sum()
        aux = () if scores.aux_loss is None else (scores.aux_loss,)
        return logps[:n], logps[n:], scores.mean_logits[:n], scores.mean_logits[n:], nll, *aux

    def get_batch_loss_metrics(self, model: nn.Module, batch: dict[str, Any], train_eval: str = "train") -> Any:
        if self.loss_override is None:
            return super().get_batch_loss_metrics(model, batch, train_eval)
        inputs, labels = self._concatenated(batch, self.pad_token_id)
        return self._override(model, inputs, labels, None, train_eval)
