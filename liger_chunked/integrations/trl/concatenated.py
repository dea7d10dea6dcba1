"""Code shared by ORPO and CPO: one forward on both sequences of each pair, without logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_chunked.integrations.transformers import HeadInput
from liger_chunked.integrations.trl.fused_output import head_stats
from liger_chunked.integrations.trl.mixin import LigerTrainerMixin
from liger_chunked.integrations.trl.preference import preference_logs, preference_step
from liger_chunked.losses import LigerFusedLinearPreferenceBase
from liger_chunked.losses.reference import warn_reference_free
from liger_chunked.types import Head


class Scores(NamedTuple):
    """2 n sequences of T tokens, chosen then rejected; position t predicts token t + 1.

    - `logps` (2 n, T): log-probability of each label in nats, zero where there is none
    - `mean_logits` (2 n, T): mean over the vocabulary at every position, with or without a label; no gradient
    - `aux_loss` (): load-balancing loss of a mixture of experts
    """

    logps: Tensor
    mean_logits: Tensor
    aux_loss: Tensor | None


@torch.no_grad()
def mean_logits(head: Head, input: HeadInput, logits_budget: int | float | str | None = None) -> Tensor:
    """(B, T) mean logit over the vocabulary at every position, with or without a target.

    Without a softcap this needs no logits: it is a product with the mean row of the head, `mean(W) @ h + mean(b)`.
    """
    if input.options.softcap is not None:
        everywhere = dataclasses.replace(input, shift_labels=torch.zeros_like(input.target))
        stats = head_stats(head, everywhere, ("mean_logits",), logits_budget=logits_budget)
        assert stats.mean_logits is not None
        return stats.mean_logits
    # Not a matmul, because autocast would round it to half precision.
    mean = (input.hidden_states.float() * head.weight.mean(0, dtype=torch.float32)).sum(-1)
    bias = 0.0 if head.bias is None else head.bias.float().mean()
    return input.options.logit_scale * (mean + bias)


class ConcatenatedMixin(LigerTrainerMixin):
    """For a trainer whose `concatenated_forward` scores pairs."""

    # Set by TRL's trainer.
    aux_loss_coef: float
    concatenated_inputs: Callable[..., dict[str, Tensor]]
    is_encoder_decoder: bool

    loss_kind = LigerFusedLinearPreferenceBase
    models_without_head = ("model",)

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
            warn_reference_free(loss)  # here, as every step runs on a copy of the loss, and each copy would warn

    def _concatenated(self, batch: dict[str, Any], padding_value: int) -> tuple[dict[str, Any], Tensor]:
        """Return the model's arguments, and the labels of the completions, (2 n, T)."""
        batch = self.concatenated_inputs(batch, padding_value=padding_value, device=self.accelerator.device)
        inputs: dict[str, Any] = {
            "input_ids": batch["concatenated_input_ids"],
            "attention_mask": batch["concatenated_attention_mask"],
            **self._aux_inputs,
        }
        return inputs, batch["concatenated_labels"]

    def _score(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> Scores:
        def scores(head: Head, input: HeadInput) -> Scores:
            stats = head_stats(head, input, ("logps",), logits_budget=self.logits_budget)
            assert stats.logps is not None
            return Scores(stats.logps, mean_logits(head, input, self.logits_budget), input.aux_loss)

        return model(**inputs, labels=labels, head_fn=scores)

    def _override(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        labels: Tensor,
        nll_labels: Tensor | None,
        train_eval: str,
    ) -> tuple[Tensor, dict[str, float]]:
        """Compute `get_batch_loss_metrics` with the loss that replaces the trainer's."""
        loss = self.loss_override
        step = preference_step(model, loss, inputs, labels, nll_labels=nll_labels if loss.compute_nll_loss else None)
        logs = preference_logs(self, loss, step.metrics, labels)
        prefix = "eval_" if train_eval == "eval" else ""
        # ORPO and CPO, unlike other trainers, use a coefficient of this name and do not log this loss.
        value = step.loss if step.aux_loss is None else step.loss + self.aux_loss_coef * step.aux_loss
        return value, {f"{prefix}{name}": metric for name, metric in logs.items()}
