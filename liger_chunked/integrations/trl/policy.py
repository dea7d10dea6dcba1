from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from liger_chunked.integrations.transformers.head_input import fitted
from liger_chunked.integrations.trl.base import SharedPromptsMixin, Step, loss_step, rollout_inputs
from liger_chunked.losses import LigerFusedLinearPolicyBase
from liger_chunked.losses.policy import REDUCTIONS
from liger_chunked.losses.rollouts import IMPORTANCE_LEVELS
from liger_chunked.types import LogitOptions

_LOGGED = {
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio/low_mean": "clip_ratio_low",
    "clip_ratio/high_mean": "clip_ratio_high",
    "clip_ratio/region_mean": "clip_ratio",
}


class GRPOMixin(SharedPromptsMixin):
    """TRL's `GRPOTrainer` on a chunked head.

    `loss` is a `LigerFusedLinearPolicyBase`, at the config's `temperature`. For a KL term, set `beta` in the config
    too, or TRL keeps no reference. With TRL's default divisor:

        loss = LigerFusedLinearGRPOLoss(reduction="dapo")
        LigerGRPOTrainer(model, reward_funcs=reward, train_dataset=prompts, loss=loss)
    """

    loss_kind = LigerFusedLinearPolicyBase
    replaced_fields: ClassVar = {
        "loss_type": None,
        "beta": "beta",
        "epsilon": None,  # TRL's sets both bounds, unless epsilon_high is given
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        loss = self.loss_override
        if loss is not None and loss.beta and not self.beta:
            raise ValueError(f"the loss has beta={loss.beta}: set GRPOConfig(beta=...) too, or TRL keeps no reference")

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        loss = self.loss_override
        if loss is None:
            return super()._compute_loss(model, inputs)
        model_inputs, labels = rollout_inputs(inputs)
        corrected = self.use_vllm and self.vllm_importance_sampling_correction
        training = self.model.training
        window = self.current_gradient_accumulation_steps if training else 1
        # TRL counts all ranks.
        items = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        items = items * window / self.args.steps_per_generation if training else items
        counts_items = REDUCTIONS[loss.reduction].counts_items
        with self.accelerator.autocast():
            step = loss_step(
                model,
                fitted(loss, LogitOptions(temperature=self.temperature), ("temperature",)),
                model_inputs | self._aux_inputs,
                labels,
                length=inputs["completion_ids"].shape[1],
                advantages=inputs["advantages"],
                old_logps=inputs.get("old_per_token_logps"),
                ref_logps=inputs.get("ref_per_token_logps"),
                importance_weights=inputs["importance_sampling_ratio"] if corrected else None,
                num_items=items if counts_items else None,
            )
        self._log_metrics(step)
        value = step.loss if counts_items else step.loss / window
        return self._with_aux_loss(value, step.aux_loss, accumulates=training)

    def _log_metrics(self, step: Step) -> None:
        mask = step.target != -100
        tokens, sequences = mask.sum(), mask.any(-1).sum()
        per_sequence = IMPORTANCE_LEVELS[self.loss_override.importance_level].per_sequence
        for name, field in _LOGGED.items():
            metric = getattr(step.metrics, field)
            if metric is not None:
                one_a_sequence = name.startswith("clip_ratio") and per_sequence
                # GRPO's metrics include repeated samples, unlike other trainers'.
                mean = self.global_mean(metric, sequences if one_a_sequence else tokens, with_repeated=True)
                self.mode_metrics[name].append(mean)


class RLOOMixin(SharedPromptsMixin):
    """TRL's `RLOOTrainer` on a chunked head; it takes no `loss`."""
