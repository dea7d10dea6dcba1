"""`LigerKTOTrainer`: TRL's KTO on a chunked head."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from trl import KTOTrainer
from trl.models.utils import disable_gradient_checkpointing

from liger_chunked.integrations.transformers import HeadInput
from liger_chunked.integrations.trl.mixin import fitted
from liger_chunked.integrations.trl.reference_model import ReferenceMixin, reference_logps, reference_of
from liger_chunked.losses import LigerFusedLinearUnpairedPreferenceBase
from liger_chunked.types import Head, UnpairedPreferenceMetrics

_NOT_OF_THE_MODEL = {"completion_mask", "label", "ref_logps", "ref_KL_logps"}


class LigerKTOTrainer(ReferenceMixin, KTOTrainer):
    """TRL's `KTOTrainer` on a chunked head.

    With `loss`, the config fields in `replaced_fields` (`beta`, `desirable_weight`, `undesirable_weight`) must have
    their defaults or agree with it. TRL still reads `loss_type`: "kto" prepares the mismatched completions that a loss
    with the reference point "kl" needs.

    Args:
        *args, **kwargs: see TRL.
        loss: a `LigerFusedLinearUnpairedPreferenceBase` whose reference point is "kl" or none. The trainer loads no
            reference model for a loss that rejects one.
        logits_budget: see `LigerTrainerMixin`.

    Raises:
        ValueError: the trainer cannot estimate the loss's reference point, there is a reference model and the loss
            rejects one, or a config field contradicts the loss.
    """

    loss_kind = LigerFusedLinearUnpairedPreferenceBase
    replaced_fields = MappingProxyType(
        {"beta": "beta", "desirable_weight": "desirable_weight", "undesirable_weight": "undesirable_weight"}
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        loss = self.loss_override
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

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        loss = self.loss_override
        if loss is None:
            return super()._compute_loss(model, inputs, return_outputs)
        device = self.accelerator.device
        batch = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        model_inputs = {
            name: x for name, x in batch.items() if name not in _NOT_OF_THE_MODEL and not name.startswith("KL_")
        }
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
        desirable = torch.as_tensor(batch["label"], dtype=torch.bool, device=device)
        kl = self._kl(model, batch) if loss.reference_point == "kl" else None
        ref_logps = None if loss.use_ref_model is False else self._ref_logps(model_inputs, batch, labels)
        length = labels.shape[1]

        def apply(head: Head, input: HeadInput) -> tuple[Tensor, UnpairedPreferenceMetrics, Tensor | None]:
            positions = slice(-length, -1)
            value, metrics = fitted(loss, input.options)(
                head.weight,
                input.hidden_states[:, positions],
                input.target[:, positions],
                desirable,
                head.bias,
                ref_logps=ref_logps,
                kl=kl,
            )
            return value, metrics, input.aux_loss

        value, metrics, aux_loss = model(**model_inputs, **self._aux_inputs, labels=labels, head_fn=apply)
        self._log_sides(metrics)
        if kl is not None:
            self.mode_metrics["kl"].append(metrics.reference_point.item())
        value = self._with_aux_loss(value, aux_loss)
        self._count_tokens(batch)
        return self._with_outputs(value, model, model_inputs, return_outputs)

    def _in_units_of(self, sums: Tensor, mask: Tensor) -> Tensor:
        """Return sums over completions, or their means if the loss uses means."""
        return sums / mask[:, 1:].sum(-1).clamp(min=1) if self.loss_override.average_log_prob else sums

    def _ref_logps(self, model_inputs: dict[str, Any], batch: dict[str, Any], labels: Tensor) -> Tensor:
        """Return the reference's log-probability of each token, or of each sequence if precomputed."""
        if self.precompute_ref_logps:
            return self._in_units_of(batch["ref_logps"], batch["completion_mask"])
        return reference_logps(self, model_inputs, labels)

    @torch.no_grad()
    def _kl(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """Estimate KTO's KL on mismatched completions: the mean over all ranks."""
        logps = self._compute_kl_logps(model, batch)
        if self.loss_override.use_ref_model is False:
            reference = torch.zeros_like(logps)
        elif self.precompute_ref_logps:
            reference = batch["ref_KL_logps"]
        else:
            args = self.args.gradient_checkpointing_kwargs
            with disable_gradient_checkpointing(self.model, args), reference_of(self) as reference_model:
                reference = self._compute_kl_logps(reference_model, batch)
        kl = self._in_units_of(logps - reference, batch["KL_completion_mask"]).mean()
        return self.accelerator.gather_for_metrics(kl).mean()

    def _log_sides(self, metrics: UnpairedPreferenceMetrics) -> None:
        """Log means over the desirable and the undesirable sequences of all ranks. Skips a side without sequences."""
        logs = self.mode_metrics
        n = {
            side: self.accelerator.gather_for_metrics(getattr(metrics, f"{side}_count")).sum().item()
            for side in ("chosen", "rejected")
        }
        for side in (side for side in n if n[side]):
            for name, field, items in (
                ("rewards", "rewards", "count"),
                ("logps", "logps", "count"),
                ("logits", "logits_mean", "tokens"),
            ):
                mean, count = getattr(metrics, f"{side}_{field}"), getattr(metrics, f"{side}_{items}")
                logs[f"{name}/{side}"].append(self.global_mean(mean, count))
        if all(n.values()):
            logs["rewards/margins"].append(logs["rewards/chosen"][-1] - logs["rewards/rejected"][-1])
