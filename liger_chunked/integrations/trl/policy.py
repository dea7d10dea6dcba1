"""The trainers of GRPO and RLOO, which take `loss=`, kept ids and sequences without an advantage that are skipped."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from liger_chunked.integrations.transformers.head_input import fitted
from liger_chunked.integrations.trl.losses import Step, loss_step, rollout_inputs
from liger_chunked.integrations.trl.rollouts import RolloutsMixin, positions_of
from liger_chunked.losses import LigerFusedLinearGRPOLoss, LigerFusedLinearPolicyBase
from liger_chunked.losses.policy import REDUCTIONS, extreme
from liger_chunked.losses.rollouts import IMPORTANCE_LEVELS
from liger_chunked.losses.surrogates import CISPO, REAL, SURROGATES
from liger_chunked.types import LogitOptions

# TRL's names of the metrics, and how ranks' values become one. "token" and "ratio" are means: over tokens, or over
# ratios, of which there is one a token or one a sequence.
_LOGGED = {
    "entropy": ("entropy", "token"),
    "kl": ("kl", "token"),
    "clip_ratio/low_mean": ("clip_ratio_low", "ratio"),
    "clip_ratio/low_min": ("clip_ratio_low_min", "min"),
    "clip_ratio/high_mean": ("clip_ratio_high", "ratio"),
    "clip_ratio/high_max": ("clip_ratio_high_max", "max"),
    "clip_ratio/region_mean": ("clip_ratio", "ratio"),
}
# TRL logs one share for CISPO, which has one bound. Our lower bound keeps the names above.
_OF_CISPO = {
    **{name: of for name, of in _LOGGED.items() if "high" not in name and "region" not in name},
    "cispo_clip_ratio": ("clip_ratio_high", "ratio"),
}


class LigerGRPOTrainer(RolloutsMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` with `loss=`, `kept_ids` and `skip_zero_advantage`.

    `loss` is a `LigerFusedLinearPolicyBase`, at the config's `temperature`. For a KL term, set `beta` in the config
    too, or TRL keeps no reference. For a loss that needs a reference without a KL term, such as A*-PO, set any other
    `beta` than 0 in the config: only the loss's is read. With TRL's default divisor:

        loss = LigerFusedLinearGRPOLoss(reduction="dapo")
        LigerGRPOTrainer(model, reward_funcs=reward, train_dataset=prompts, loss=loss)
    """

    loss_kind = LigerFusedLinearPolicyBase
    replaced_fields: ClassVar = {
        "loss_type": None,
        "beta": "beta",
        "epsilon": None,  # TRL's sets both bounds, unless epsilon_high is given
        "epsilon_high": "surrogate.epsilon_high",
        "delta": "surrogate.delta",
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
        "sapo_temperature_pos": "surrogate.sapo_temperature_pos",
        "sapo_temperature_neg": "surrogate.sapo_temperature_neg",
        "vespo_k_pos": "surrogate.vespo_k_pos",
        "vespo_lambda_pos": "surrogate.vespo_lambda_pos",
        "vespo_k_neg": "surrogate.vespo_k_neg",
        "vespo_lambda_neg": "surrogate.vespo_lambda_neg",
        "cast_lm_head_to_fp32": None,
    }

    def _check_made(self) -> None:
        super()._check_made()
        loss = self.loss_override
        if loss is None or self.beta:
            return
        if loss.beta:
            raise ValueError(f"the loss has beta={loss.beta}: set GRPOConfig(beta=...) too, or TRL keeps no reference")
        if loss.needs_reference:
            raise ValueError(
                "the loss needs a reference, and TRL keeps one only if beta is not 0: set GRPOConfig(beta=1.0). The "
                f"loss does not read it, but its own, {loss.beta}"
            )

    @classmethod
    def _check_loss(cls, loss: Any) -> None:
        super()._check_loss(loss)
        if isinstance(surrogate := getattr(loss, "surrogate", None), REAL):
            size = surrogate.group_size
            raise ValueError(
                f"surrogate 'real' compares the group_size={size} completions of a prompt, but TRL "
                "shuffles the completions of all prompts over the micro-batches: call the loss in a loop of your own"
            )

    @classmethod
    def _check_config(cls, loss: Any, config: Any) -> None:
        if config is not None and loss.needs_reference and not loss.beta:
            config = copy.copy(config)
            config.beta = loss.beta  # TRL's has another purpose, to keep a reference
        super()._check_config(loss, config)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        loss = self.loss_override
        if loss is None:
            return super()._compute_loss(model, inputs)
        model_inputs, labels = rollout_inputs(inputs)
        if self.aux_loss_enabled:
            model_inputs["output_router_logits"] = True
        batch, length = self._batch, inputs["completion_ids"].shape[1]
        kept, part = batch.kept, batch.part
        of_tokens = {
            "advantages": inputs["advantages"],
            "old_logps": inputs.get("old_per_token_logps"),
            "ref_logps": inputs.get("ref_per_token_logps"),
            "importance_weights": (
                inputs["importance_sampling_ratio"]
                if self.use_vllm and self.vllm_importance_sampling_correction
                else None
            ),
        }
        if part is not None:
            model_inputs = {name: part.of_sequences(x, length) for name, x in model_inputs.items()}
            labels = part.of_sequences(labels, length)
            if not batch.n_live:
                labels = torch.full_like(labels, -100)
            of_tokens = {name: None if x is None else part.of_completions(x) for name, x in of_tokens.items()}
            kept = None if kept is None else kept.take(positions_of(part, length))
            length = part.length
        training = self.model.training
        window = self.current_gradient_accumulation_steps if training else 1
        # TRL counts all ranks.
        items = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        items = items * window / self.args.steps_per_generation if training else items
        counts_items = REDUCTIONS[loss.reduction].counts_items
        arguments: dict[str, Any] = {"num_items": items if counts_items else None, **of_tokens}
        if counts_items and loss.entropy_coef:
            arguments["accumulation_steps"] = window
        if kept is not None:
            arguments["kept"] = kept
        own = fitted(loss, LogitOptions(temperature=self.temperature), ("temperature",))
        with self.accelerator.autocast():
            step = loss_step(model, own, model_inputs, labels, length=length, **arguments)
        self._log_metrics(step, inputs["advantages"])
        self.log_own_metrics(step.metrics, of_nothing=batch.n_live == 0)
        value = step.loss if counts_items else step.loss / window
        if part is not None and not counts_items:
            value = value * self._share(step)
        if step.aux_loss is not None:
            self._liger_metrics["aux_loss"].append(self.gathered_mean(step.aux_loss))
        return self._with_aux_loss(step, value, window)

    def _share(self, step: Step) -> float | Tensor:
        """Return the loss's denominator, of the part that was computed, over that of the whole batch."""
        mask = self._batch.mask
        assert mask is not None
        if self.loss_override.reduction == "bnpo":
            return (step.target != -100).sum() / mask.sum().clamp(min=1)
        return len(step.target) / len(mask)

    def _old_logps(self, inputs: dict[str, Any]) -> Tensor | None:
        return inputs.get("old_per_token_logps")

    def _why_not_skipped(self) -> str | None:
        loss = self.loss_override
        terms = self.args if loss is None else loss
        reasons = {
            "a KL term": self.beta or (loss is not None and (loss.beta or loss.sampler_kl_coef)),
            "an entropy bonus": terms.entropy_coef or (loss is None and self.args.use_adaptive_entropy),
            "a choice of tokens by their entropy": terms.top_entropy_quantile < 1,
            "a choice of tokens in the batch": loss is not None and loss.scope == "batch",
            # True says that its policy_loss is zero where advantages are.
            "a loss of your own": (
                loss is not None
                and self.skip_zero_advantage is not True
                and not (
                    getattr(loss.policy_loss, "__func__", None) is LigerFusedLinearGRPOLoss.policy_loss
                    and type(loss.surrogate) in SURROGATES.values()
                )
            ),
        }
        found = [name for name, given in reasons.items() if given]
        if found:
            return f"{' and '.join(found)} may have a gradient there"
        return super()._why_not_skipped()

    def _log_metrics(self, step: Step, advantages: Tensor) -> None:
        """Log the loss's metrics under TRL's names, as TRL averages them over tokens, sequences and ranks."""
        loss, batch = self.loss_override, self._batch
        tokens, sequences = (step.target != -100).sum(), torch.tensor(len(step.target), device=step.target.device)
        unseen: Tensor | float = 0.0
        all_tokens, all_sequences = tokens, sequences
        if batch.mask is not None and batch.entropies is not None:
            all_tokens, all_sequences = batch.mask.sum(), torch.full_like(sequences, len(batch.mask))
            unseen = torch.where(batch.mask, batch.entropies, 0.0).sum()  # values at padding do not count
        # Advantages per token, of a trainer's subclass, make the clipping per token at every level.
        one_advantage = advantages.ndim == 1 or advantages.shape[1] == 1
        per_sequence = IMPORTANCE_LEVELS[loss.importance_level].per_sequence and one_advantage
        # Skipped sequences clip nothing.
        skips = batch.skips(with_empty=per_sequence)
        for name, (field, over) in (
            _OF_CISPO if isinstance(getattr(loss, "surrogate", None), CISPO) else _LOGGED
        ).items():
            metric = getattr(step.metrics, field)
            if metric is None:
                continue
            # GRPO's metrics include repeated samples, unlike other trainers'.
            if over in ("min", "max"):
                if skips:
                    metric = (torch.fmin if over == "min" else torch.fmax)(metric, torch.zeros_like(metric))
                of_ranks = self.accelerator.gather(metric.detach()[None])
                value = extreme(of_ranks, -1 if over == "min" else 1).item()
            else:
                by_sequence = over == "ratio" and per_sequence
                n, n_all = (sequences, all_sequences) if by_sequence else (tokens, all_tokens)
                total = metric.detach() * n + (unseen if field == "entropy" else 0.0)
                sums = self.accelerator.gather(torch.stack([total, n_all.to(metric.dtype)])[None]).sum(0)
                value = (sums[0] / sums[1].clamp(min=1)).item()
            self._liger_metrics[name].append(value)


class LigerRLOOTrainer(RolloutsMixin, RLOOTrainer):
    """TRL's `RLOOTrainer` with `kept_ids` and `skip_zero_advantage`; it takes no `loss`."""

    def _old_logps(self, inputs: dict[str, Any]) -> Tensor:
        # TRL has one sum a sequence. A first token that is not read belongs to a sequence without tokens, of sum 0.
        sums = inputs["old_logps"]
        rest = sums.new_zeros(len(sums), inputs["completion_ids"].shape[1] - 1)
        return torch.cat([sums[:, None], rest], 1)
