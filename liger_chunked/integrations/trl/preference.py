from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_chunked.integrations.transformers import HeadInput
from liger_chunked.integrations.trl.base import (
    LigerTrainerMixin,
    ReferenceMixin,
    SharedPromptsMixin,
    Step,
    apply_loss,
    config_in,
)
from liger_chunked.integrations.trl.heads import head_stats
from liger_chunked.losses import LigerFusedLinearPreferenceBase
from liger_chunked.losses.formulas import CERTAIN
from liger_chunked.losses.reference_model import warn_reference_free
from liger_chunked.types import AdaptedWeight, Head


def pair_logs(trainer: LigerTrainerMixin, step: Step) -> dict[str, float]:
    """Return what TRL's trainers of pairs log alike, from the metrics of a loss."""
    metrics = step.metrics
    of_pairs = {
        "rewards/chosen": metrics.chosen_rewards,
        "rewards/rejected": metrics.rejected_rewards,
        "rewards/accuracies": metrics.reward_accuracies,
        "rewards/margins": metrics.reward_margins,
        "logps/chosen": metrics.chosen_logps,
        "logps/rejected": metrics.rejected_logps,
    }
    return {name: trainer.gathered_mean(value) for name, value in of_pairs.items()}


class DPOMixin(ReferenceMixin, SharedPromptsMixin):
    """TRL's `DPOTrainer` on a chunked head.

    `loss` is a `LigerFusedLinearPreferenceBase`; if it rejects a reference, none is loaded.

        LigerDPOTrainer(model, args=DPOConfig(...), train_dataset=pairs, loss=LigerFusedLinearSimPOLoss(beta=2.0))
    """

    loss_kind = LigerFusedLinearPreferenceBase
    replaced_fields: ClassVar = {
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
    ref_columns = ("ref_chosen_logps", "ref_rejected_logps")
    logged_stats = ("entropy", "is_top1")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config: Any = config_in(args, kwargs)
        ld_alpha, loss_type = (getattr(config, name, None) for name in ("ld_alpha", "loss_type"))
        if ld_alpha is not None and kwargs.get("loss") is None and loss_type in ("sft", ["sft"]):
            raise ValueError(
                f"ld_alpha={ld_alpha} of DPOConfig has no effect with loss_type='sft', which compares no sequences: "
                "leave it out"
            )
        super().__init__(*args, **kwargs)

    def _log_metrics(self, step: Step) -> None:
        metrics = step.metrics
        logs = pair_logs(self, step)
        chosen, rejected = (step.target != -100).sum(-1).view(2, -1).sum(-1)
        logs["logits/chosen"] = self.global_mean(metrics.chosen_logits_mean, chosen)
        logs["logits/rejected"] = self.global_mean(metrics.rejected_logits_mean, rejected)
        if self.loss_override.compute_nll_loss:
            logs["nll_loss"] = self.gathered_mean(metrics.nll_loss)
        for name, metric in logs.items():
            self.mode_metrics[name].append(metric)
        n = len(step.target) // 2
        self.log_token_mean("mean_token_accuracy", step.logged.is_top1[:n], step.target[:n])


class Scores(NamedTuple):
    """(2 n, T) log-probability and mean logit of token t + 1 at position t; auxiliary loss."""

    logps: Tensor
    mean_logits: Tensor
    aux_loss: tuple[Tensor, ...]


@torch.no_grad()
def mean_logits(head: Head, input: HeadInput, logits_budget: int | float | str | None = None) -> Tensor:
    """Return mean logits (B, T): without softcap, adapter or shards, `mean(W) @ h + mean(b)`."""
    if input.options.softcap is not None or isinstance(head.weight, (AdaptedWeight, DTensor)):
        everywhere = dataclasses.replace(input, shift_labels=torch.zeros_like(input.target))
        stats = head_stats(head, everywhere, ("mean_logits",), logits_budget=logits_budget)
        assert stats.mean_logits is not None
        return stats.mean_logits
    # Autocast would round a matmul.
    mean = (input.hidden_states.float() * head.weight.mean(0, dtype=torch.float32)).sum(-1)
    bias = 0.0 if head.bias is None else head.bias.float().mean()
    return input.options.logit_scale * (mean + bias)


class ConcatenatedMixin(SharedPromptsMixin):
    loss_kind = LigerFusedLinearPreferenceBase
    models_without_head = ("model",)
    padding_attribute: ClassVar[str]
    # The positions whose mean logits TRL logs, those of prompts and padding too.
    logged_positions: ClassVar[slice] = slice(None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_encoder_decoder:
            raise ValueError(f"{type(self).__name__} is for decoders, got the encoder-decoder {type(self.model)}")

    @classmethod
    def _check_loss(cls, loss: Any) -> None:
        super()._check_loss(loss)
        if loss.use_ref_model:
            raise ValueError(
                f"{type(loss).__name__} needs a reference, and {cls.__name__} keeps none: see LigerDPOTrainer"
            )
        if loss._expects_reference:
            warn_reference_free(loss)  # once: every step runs on a copy

    def _concatenated(self, batch: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
        padding_value = getattr(self, self.padding_attribute)
        batch = self.concatenated_inputs(batch, padding_value=padding_value, device=self.accelerator.device)
        inputs = {name: batch[f"concatenated_{name}"] for name in ("input_ids", "attention_mask")}
        return inputs | self._aux_inputs, batch["concatenated_labels"]

    def _score(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> Scores:
        def scores(head: Head, input: HeadInput) -> Scores:
            logps = head_stats(head, input, ("logps",), logits_budget=self.logits_budget).logps
            assert logps is not None
            aux_loss = () if input.aux_loss is None else (input.aux_loss,)
            return Scores(logps[:, -length:], self._logged_logits(head, input, length), aux_loss)

        length = labels.shape[1]  # without the virtual tokens that prompt tuning puts before a sequence
        # Logged mean logits include padding.
        return model(**inputs, labels=labels, head_fn=scores, reads_padding=True)

    def _logged_logits(self, head: Head, input: HeadInput, length: int) -> Tensor:
        return mean_logits(head, input, self.logits_budget)[:, -length:][:, self.logged_positions]

    def get_batch_loss_metrics(self, model: nn.Module, batch: dict[str, Any], train_eval: str = "train") -> Any:
        loss = self.loss_override
        if loss is None:
            return super().get_batch_loss_metrics(model, batch, train_eval)
        inputs, labels = self._concatenated(batch)
        nll_target = self._nll_target(inputs) if loss.compute_nll_loss else None
        length = labels.shape[1]

        def apply(head: Head, input: HeadInput) -> Step:
            step = apply_loss(head, input, loss=loss, length=length - 1, nll_target=nll_target)
            return step._replace(logged=self._logged_logits(head, input, length))

        step = model(**inputs, labels=labels, head_fn=apply, reads_padding=True)
        prefix = "eval_" if train_eval == "eval" else ""
        # Unlike other trainers, these do not log this loss.
        value = step.loss if step.aux_loss is None else step.loss + self.aux_loss_coef * step.aux_loss
        logs = {**self._logs(step), **self.own_metrics(step.metrics)}
        return value, {f"{prefix}{name}": metric for name, metric in logs.items()}

    def _logs(self, step: Step) -> dict[str, float]:
        chosen, rejected = step.logged.chunk(2)
        of_batch = {
            "logits/chosen": chosen.mean(),
            "logits/rejected": rejected.mean(),
            "nll_loss": step.metrics.nll_loss,
        }
        return pair_logs(self, step) | {name: self.gathered_mean(value) for name, value in of_batch.items()}

    def _nll_target(self, inputs: dict[str, Any]) -> Tensor | None:
        return None


class ORPOMixin(ConcatenatedMixin):
    """TRL's `ORPOTrainer` without logits, for decoder-only models.

    `loss` is a `LigerFusedLinearPreferenceBase` without a reference. Its NLL includes the prompt.
    """

    replaced_fields: ClassVar = {"beta": "beta"}
    padding_attribute = "padding_value"
    logged_positions = slice(-1)

    def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        n = batch["chosen_labels"].shape[0]
        inputs, labels = self._concatenated(batch)
        prompt_and_response = self._whole_sequences(inputs)[:n]
        scores = self._score(model, inputs, torch.cat([prompt_and_response, labels[n:]]))
        mask = labels[:, 1:] != -100
        lengths = mask.sum(-1)
        logps = torch.where(mask, scores.logps[:, :-1], 0.0).sum(-1) / lengths.clamp(min=1)
        # An empty response has probability 1, as in `LigerFusedLinearORPOLoss`, with the same finite log-odds.
        logps = torch.where(lengths > 0, logps, -CERTAIN)
        nll = -scores.logps[:n].sum() / (prompt_and_response[:, 1:] != -100).sum().clamp(min=1)
        return logps[:n], logps[n:], scores.mean_logits[:n], scores.mean_logits[n:], nll, *scores.aux_loss

    def _logs(self, step: Step) -> dict[str, float]:
        logps = torch.cat([step.metrics.chosen_logps, step.metrics.rejected_logps])
        if not self.loss_override.average_log_prob:
            logps = logps / (step.target != -100).sum(-1).clamp(min=1)
        *_, log_ratio, log_odds = self.odds_ratio_loss(*logps.clamp(max=-CERTAIN).chunk(2))
        logs = {"log_odds_ratio": self.gathered_mean(log_ratio), "log_odds_chosen": self.gathered_mean(log_odds)}
        return super()._logs(step) | logs

    def _nll_target(self, inputs: dict[str, Any]) -> Tensor:
        return self._whole_sequences(inputs)[:, 1:]

    @staticmethod
    def _whole_sequences(inputs: dict[str, Any]) -> Tensor:
        return inputs["input_ids"].where(inputs["attention_mask"] == 1, -100)


class CPOMixin(ConcatenatedMixin):
    """TRL's `CPOTrainer` (SimPO with `loss_type="simpo"`) without logits, for decoder-only models.

    `loss` is a `LigerFusedLinearPreferenceBase` without a reference.
    """

    replaced_fields: ClassVar = {
        "beta": "beta",
        "loss_type": "loss_type",
        "label_smoothing": "settings.label_smoothing",
        "cpo_alpha": "cpo_alpha",
        "simpo_gamma": "settings.simpo_gamma",
        "alpha": None,
    }
    padding_attribute = "pad_token_id"

    def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        n = batch["chosen_labels"].shape[0]
        inputs, labels = self._concatenated(batch)
        scores = self._score(model, inputs, labels)
        lengths = (labels[:, 1:] != -100).sum(-1)
        sums = scores.logps.sum(-1)
        # An empty response has probability 1, as in `LigerFusedLinearCPOLoss`.
        logps = sums / lengths.clamp(min=1) if self.loss_type in ("ipo", "simpo") else sums
        nll = sums.new_zeros(()) if self.cpo_alpha == 0 else -sums[:n].sum() / lengths[:n].sum().clamp(min=1)
        return logps[:n], logps[n:], scores.mean_logits[:n], scores.mean_logits[n:], nll, *scores.aux_loss


class OnlineDPOMixin(SharedPromptsMixin):
    """TRL's `OnlineDPOTrainer` without logits; it takes no `loss`."""

    models_without_head = ("model", "ref_model")
    always_replaced: ClassVar = ("_forward",)

    def _forward(
        self,
        model: nn.Module,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        vision_inputs: dict[str, Tensor] | None = None,
    ) -> Tensor:
        if vision_inputs is None:
            # Truncate prompts without images on the left.
            too_long = max(prompt_ids.shape[1] + completion_ids.shape[1] - self.max_length, 0)
            prompt_ids, prompt_mask = prompt_ids[:, too_long:], prompt_mask[:, too_long:]
        names = ("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw")
        # TRL's mean entropy and KL count padding too. Without a prompt, position t scores token t.
        first = max(prompt_ids.shape[1] - 1, 0)
        input_ids = torch.cat([prompt_ids, completion_ids], dim=1)
        shift_labels = torch.full_like(input_ids, -100)
        scored = slice(first, first + completion_ids.shape[1])
        shift_labels[:, scored] = completion_ids
        return model(
            input_ids,
            attention_mask=torch.cat([prompt_mask, completion_mask], dim=1),
            **{name: x for name, x in (vision_inputs or {}).items() if name in names},
            shift_labels=shift_labels,
            fused_lm_head=True,
            reads_padding=True,
        ).log_probs[:, scored]
