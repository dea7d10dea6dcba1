"""`LigerGRPOTrainer`: TRL's GRPO on a chunked head."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from trl import GRPOTrainer

from liger_chunked.integrations.transformers import HeadInput
from liger_chunked.integrations.trl.mixin import TRANSFORM, LigerTrainerMixin, fitted
from liger_chunked.integrations.trl.rollouts import model_inputs_and_labels
from liger_chunked.losses import LigerFusedLinearPolicyBase
from liger_chunked.losses.reductions import REDUCTIONS
from liger_chunked.types import Head, PolicyMetrics

_LOGGED = {
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio/low_mean": "clip_ratio_low",
    "clip_ratio/high_mean": "clip_ratio_high",
    "clip_ratio/region_mean": "clip_ratio",
}


class LigerGRPOTrainer(LigerTrainerMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` on a chunked head.

    With `loss`, the fields of the config that TRL reads for its own loss (`replaced_fields`: `epsilon_high`, `delta`,
    `importance_sampling_level`, ...) must be at their defaults, or agree with `loss`; `loss_type`, `epsilon` and others
    that no attribute of a loss equals must be at their defaults. `temperature` is still read, for sampling and for the
    loss. `beta` is too: it must be the loss's, and keeps the reference where it is not 0.

    TRL's default `loss_type` is "dapo", and this library's default reduction is "grpo": as given here, the loss divides
    as TRL's default does.

        loss = LigerFusedLinearGRPOLoss(reduction="dapo")
        LigerGRPOTrainer(model, reward_funcs=reward, train_dataset=prompts, loss=loss)

    Args:
        *args, **kwargs: TRL's.
        loss: a `LigerFusedLinearPolicyBase`.
        logits_budget: see `LigerTrainerMixin`.

    Raises:
        ValueError: a loss with a KL term and a config without; with a loss, a field of the config that it replaces.
    """

    loss_kind = LigerFusedLinearPolicyBase
    replaced_fields = MappingProxyType(
        {
            "loss_type": None,
            "beta": "beta",
            "epsilon": None,  # TRL's epsilon is the upper bound too, unless epsilon_high is given
            "epsilon_high": "settings.epsilon_high",
            "delta": "settings.delta",
            "importance_sampling_level": "importance_level",
            "use_bias_correction_kl": "use_bias_correction_kl",
            "top_entropy_quantile": "top_entropy_quantile",
            "entropy_coef": "entropy_coef",
            "use_adaptive_entropy": None,
            "entropy_coef_min": None,
            "entropy_coef_max": None,
            "entropy_coef_delta": None,
            "entropy_target": None,
            "off_policy_mask_threshold": None,
            "sapo_temperature_pos": "settings.sapo_temperature_pos",
            "sapo_temperature_neg": "settings.sapo_temperature_neg",
            "vespo_k_pos": "settings.vespo_k_pos",
            "vespo_lambda_pos": "settings.vespo_lambda_pos",
            "vespo_k_neg": "settings.vespo_k_neg",
            "vespo_lambda_neg": "settings.vespo_lambda_neg",
            "cast_lm_head_to_fp32": None,
        }
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        loss = self.loss_override
        if loss is not None and loss.beta and not self.beta:
            raise ValueError(f"the loss has beta={loss.beta}: set GRPOConfig(beta=...) too, or TRL keeps no reference")

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        loss = self.loss_override
        if loss is None:
            return super()._compute_loss(model, inputs)
        model_inputs, labels = model_inputs_and_labels(inputs)
        length = inputs["completion_ids"].shape[1]
        corrected = self.use_vllm and self.vllm_importance_sampling_correction
        window = self.current_gradient_accumulation_steps if self.model.training else 1
        # TRL's count is of the generation batch, on all ranks.
        items = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        items = items * window / self.args.steps_per_generation if self.model.training else items
        counts_items = REDUCTIONS[loss.reduction].counts_items

        def apply(head: Head, input: HeadInput) -> tuple[Tensor, PolicyMetrics, Tensor | None]:
            options = dataclasses.replace(input.options, temperature=self.temperature)
            positions = slice(-length - 1, -1)
            value, metrics = fitted(loss, options, (*TRANSFORM, "temperature"))(
                head.weight,
                input.hidden_states[:, positions],
                input.target[:, positions],
                inputs["advantages"],
                head.bias,
                old_logps=inputs.get("old_per_token_logps"),
                ref_logps=inputs.get("ref_per_token_logps"),
                importance_weights=inputs["importance_sampling_ratio"] if corrected else None,
                num_items=items if counts_items else None,
            )
            return value, metrics, input.aux_loss

        with self.accelerator.autocast():
            value, metrics, aux_loss = model(**model_inputs, **self._aux_inputs, labels=labels, head_fn=apply)
        if not counts_items:
            value = value / window
        mask = labels[:, 1:] != -100
        tokens, sequences = mask.sum(), mask.any(-1).sum()
        for name, field in _LOGGED.items():
            metric = getattr(metrics, field)
            if metric is not None:
                one_a_sequence = name.startswith("clip_ratio") and loss.importance_level != "token"
                # As GRPO's own metrics, and unlike those of other trainers: of every rank, repeated samples and all.
                mean = self.global_mean(metric, sequences if one_a_sequence else tokens, with_repeated=True)
                self.mode_metrics[name].append(mean)
        return self._with_aux_loss(value, aux_loss, accumulates=self.model.training)
