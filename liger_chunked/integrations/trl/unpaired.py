from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_chunked.integrations.trl.base import ReferenceMixin, Step
from liger_chunked.integrations.trl.heads import check_has_methods
from liger_chunked.losses import LigerFusedLinearUnpairedPreferenceBase


class KTOMixin(ReferenceMixin):
    """TRL's `KTOTrainer` on a chunked head.

    `loss` is a `LigerFusedLinearUnpairedPreferenceBase` without a reference point, or with "kl", which needs
    `KTOConfig(loss_type="kto")` for mismatched completions.
    """

    loss_kind = LigerFusedLinearUnpairedPreferenceBase
    replaced_fields: ClassVar = {
        "beta": "beta",
        "desirable_weight": "desirable_weight",
        "undesirable_weight": "undesirable_weight",
    }
    ref_columns = ("ref_logps",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        loss = self.loss_override
        if loss is not None and loss.reference_point == "kl":
            check_has_methods(type(self), ("_compute_kl_logps",))
        if loss is not None and loss.reference_point == "kl" and not self.calculate_KL:
            raise ValueError(
                f"{type(loss).__name__} asks for the reference point 'kl'; {type(self).__name__} needs "
                "KTOConfig(loss_type='kto') for it"
            )

    @classmethod
    def _check_loss(cls, loss: Any) -> None:
        super()._check_loss(loss)
        if loss.reference_point == "delta":
            raise ValueError(
                f"{type(loss).__name__} asks for the reference point 'delta'; {cls.__name__} estimates none"
            )

    def _loss_arguments(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        desirable = torch.as_tensor(inputs["label"], dtype=torch.bool, device=self.accelerator.device)
        kl = self._kl(model, inputs) if self.loss_override.reference_point == "kl" else None
        return {"preference_labels": desirable, "kl": kl}

    @torch.no_grad()
    def _kl(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        logps = self._compute_kl_logps(model, inputs)
        if self.loss_override.use_ref_model is False:
            reference = torch.zeros_like(logps)
        elif self.precompute_ref_logps:
            reference = inputs["ref_KL_logps"]
        else:
            with self._reference() as reference_model:
                reference = self._compute_kl_logps(reference_model, inputs)
        kl = self._of_sequences(logps - reference, inputs["KL_completion_mask"]).mean()
        return self.accelerator.gather_for_metrics(kl).mean()

    def _log_metrics(self, step: Step) -> None:
        logs, metrics = self.mode_metrics, step.metrics
        sides = []
        for side in ("chosen", "rejected"):
            count, tokens = getattr(metrics, f"{side}_count"), getattr(metrics, f"{side}_tokens")
            if self.accelerator.gather_for_metrics(count).sum().item():
                sides.append(side)
                for name, field, items in (
                    ("rewards", "rewards", count),
                    ("logps", "logps", count),
                    ("logits", "logits_mean", tokens),
                ):
                    logs[f"{name}/{side}"].append(self.global_mean(getattr(metrics, f"{side}_{field}"), items))
        if len(sides) == 2:
            logs["rewards/margins"].append(logs["rewards/chosen"][-1] - logs["rewards/rejected"][-1])
        if self.loss_override.reference_point == "kl":
            logs["kl"].append(metrics.reference_point.item())
