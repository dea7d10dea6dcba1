"""`LigerDPOTrainer`: TRL's DPO on a chunked head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from trl import DPOTrainer

from liger_chunked.integrations.trl.preference import preference_logs, preference_step
from liger_chunked.integrations.trl.reference_model import ReferenceMixin, reference_logps
from liger_chunked.losses import LigerFusedLinearPreferenceBase

_NOT_OF_THE_MODEL = {"completion_mask", "ref_chosen_logps", "ref_rejected_logps"}


class LigerDPOTrainer(ReferenceMixin, DPOTrainer):
    """TRL's `DPOTrainer` on a chunked head.

    With `loss`, what TRL's config says of the loss (`loss_type`, `beta`, `label_smoothing`, ...) is not read. One that
    refuses a reference (SimPO, CPO, ORPO) loads none.

        LigerDPOTrainer(model, args=DPOConfig(...), train_dataset=pairs, loss=LigerFusedLinearSimPOLoss(beta=2.0))

    Args:
        *args, **kwargs: TRL's.
        loss: a `LigerFusedLinearPreferenceBase`.
        logits_budget: see `LigerTrainerMixin`.

    Raises:
        ValueError: a reference for a loss that refuses one.
    """

    loss_kind = LigerFusedLinearPreferenceBase

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        loss = self.loss_override
        if loss is None:
            return super()._compute_loss(model, inputs, return_outputs)
        model_inputs = {name: value for name, value in inputs.items() if name not in _NOT_OF_THE_MODEL}
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        ref_logps = None if loss.use_ref_model is False else self._ref_logps(model_inputs, inputs, labels)
        aux = {"output_router_logits": True} if self.aux_loss_enabled else {}
        step = preference_step(model, loss, {**model_inputs, **aux}, labels, ref_logps=ref_logps)

        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, metric in preference_logs(self, loss, step.metrics, labels).items():
            metrics[name].append(metric)
        value = step.loss
        if step.aux_loss is not None:
            value = value + self.router_aux_loss_coef * step.aux_loss
            metrics["aux_loss"].append(self.accelerator.gather_for_metrics(step.aux_loss.detach()).mean().item())
        if self.model.training:
            tokens = self.accelerator.gather_for_metrics(inputs["attention_mask"].sum()).sum().item()
            self._total_train_tokens += tokens // self._tp_size
        metrics["num_tokens"] = [self._total_train_tokens]
        if not return_outputs:
            return value
        with torch.no_grad():
            return value, model(**model_inputs)

    def _ref_logps(self, model_inputs: dict[str, Any], inputs: dict[str, Any], labels: Tensor) -> Tensor:
        """Of each token, or, precomputed, of each sequence."""
        if not self.precompute_ref_logps:
            return reference_logps(self, model_inputs, labels)
        sums = torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])
        if not self.loss_override.average_log_prob:
            return sums
        return sums / (labels[:, 1:] != -100).sum(-1).clamp(min=1)
