"""`LigerDPOTrainer`: TRL's DPO on a chunked head."""

from __future__ import annotations

from types import MappingProxyType
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

    With `loss`, the config fields in `replaced_fields` (`loss_type`, `beta`, `label_smoothing`, ...) must have their
    defaults or agree with it. The trainer loads no reference model for a loss that rejects one (SimPO, CPO, ORPO).

        LigerDPOTrainer(model, args=DPOConfig(...), train_dataset=pairs, loss=LigerFusedLinearSimPOLoss(beta=2.0))

    Args:
        *args, **kwargs: see TRL.
        loss: a `LigerFusedLinearPreferenceBase`.
        logits_budget: see `LigerTrainerMixin`.

    Raises:
        ValueError: there is a reference model and the loss rejects one, or a config field contradicts the loss.
    """

    loss_kind = LigerFusedLinearPreferenceBase
    replaced_fields = MappingProxyType(
        {
            "beta": "beta",
            "loss_type": "loss_types",
            "loss_weights": "loss_weights",
            "label_smoothing": "settings.label_smoothing",
            "ld_alpha": "ld_alpha",
            "f_divergence_type": "settings.f_divergence_type",
            "f_alpha_divergence_coef": "settings.f_alpha_divergence_coef",
            "discopop_tau": "settings.discopop_tau",
            "use_weighting": "use_weighting",
        }
    )

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        loss = self.loss_override
        if loss is None:
            return super()._compute_loss(model, inputs, return_outputs)
        model_inputs = {name: value for name, value in inputs.items() if name not in _NOT_OF_THE_MODEL}
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        ref_logps = None if loss.use_ref_model is False else self._ref_logps(model_inputs, inputs, labels)
        step = preference_step(model, loss, {**model_inputs, **self._aux_inputs}, labels, ref_logps=ref_logps)
        for name, metric in preference_logs(self, loss, step.metrics, labels).items():
            self.mode_metrics[name].append(metric)
        value = self._with_aux_loss(step.loss, step.aux_loss)
        self._count_tokens(inputs)
        return self._with_outputs(value, model, model_inputs, return_outputs)

    def _ref_logps(self, model_inputs: dict[str, Any], inputs: dict[str, Any], labels: Tensor) -> Tensor:
        """Return the reference's log-probability of each token, or of each sequence if precomputed."""
        if not self.precompute_ref_logps:
            return reference_logps(self, model_inputs, labels)
        sums = torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])
        if not self.loss_override.average_log_prob:
            return sums
        return sums / (labels[:, 1:] != -100).sum(-1).clamp(min=1)
