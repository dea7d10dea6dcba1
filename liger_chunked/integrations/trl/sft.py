"""`LigerSFTTrainer`: TRL's SFT on a chunked head."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from trl import SFTTrainer

from liger_chunked.integrations.transformers import HeadInput
from liger_chunked.integrations.trl.fused_output import head_stats
from liger_chunked.integrations.trl.mixin import HEAD_BUDGET, LigerTrainerMixin, fitted
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss
from liger_chunked.types import Head


class LigerSFTTrainer(LigerTrainerMixin, SFTTrainer):
    """TRL's `SFTTrainer` on a chunked head.

    TRL builds logits for `label_smoothing_factor`. This trainer computes that loss from the head's statistics.

    With `loss`, the `loss_type` of the config must be at its default, and `label_smoothing_factor` at its default or
    equal to that of `loss`.

        LigerSFTTrainer(model, train_dataset=texts, loss=LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-4))

    Args:
        *args, **kwargs: see TRL.
        loss: a `LigerFusedLinearCrossEntropyLoss` with `reduction="mean"`. The trainer logs the metrics that it
            returns: `mean_token_accuracy`, `z_loss`.
        logits_budget: see `LigerTrainerMixin`.

    Raises:
        ValueError: the loss has another reduction; both `loss` and `compute_loss_func` are given; or a config field
            contradicts the loss.
    """

    loss_kind = LigerFusedLinearCrossEntropyLoss
    replaced_fields = MappingProxyType({"loss_type": None, "label_smoothing_factor": "label_smoothing"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.loss_override is not None and self.compute_loss_func is not None:
            raise ValueError("loss= and compute_loss_func both take the place of TRL's loss: pass one of them")

    @classmethod
    def _check_loss(cls, loss: Any) -> None:
        super()._check_loss(loss)
        if loss.reduction != "mean":
            raise ValueError(f"{cls.__name__} trains on a mean over tokens, got reduction={loss.reduction!r}")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: int | Tensor | None = None,
    ) -> Any:
        loss = self.loss_override
        if loss is None:
            if self.label_smoother is not None and self.compute_loss_func is None and self.args.loss_type == "nll":
                return self._with_label_smoothing(model, inputs, return_outputs, num_items_in_batch)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        def apply(head: Head, input: HeadInput) -> Any:
            result = fitted(loss, input.options)(
                head.weight, input.hidden_states, input.target, head.bias, num_items=num_items_in_batch
            )
            value, metrics = result if isinstance(result, tuple) else (result, None)
            n_tokens = (input.target != loss.options.ignore_index).sum()
            return value, metrics, input.aux_loss, n_tokens

        value, metrics, aux_loss, n_tokens = model(**inputs, **self._aux_inputs, head_fn=apply)
        # Trainer's conventions: num_items_in_batch counts all ranks, whose gradients are averaged. Trainer then leaves
        # the accumulation to the loss, but an auxiliary loss is a mean over one micro-batch.
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            value = value * (self.accelerator.num_processes // self.get_tp_size())
        value = self._with_aux_loss(value, aux_loss, accumulates=num_items_in_batch is not None)
        if metrics is not None and metrics.token_accuracy is not None:
            self.mode_metrics["mean_token_accuracy"].append(self.global_mean(metrics.token_accuracy, n_tokens))
        if metrics is not None and metrics.z_loss is not None:
            self.mode_metrics["z_loss"].append(self.gathered_mean(metrics.z_loss))
        self._count_tokens(inputs)
        unlabelled = {name: x for name, x in inputs.items() if name != "labels"}
        return self._with_outputs(value, model, unlabelled, return_outputs)

    def _with_label_smoothing(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool, num_items_in_batch: int | Tensor | None
    ) -> Any:
        """Compute the loss that TRL computes with `label_smoothing_factor`, in one forward and without logits.

        Each token costs `(1 - eps) * nll + eps * mean(-log p)`; the mean over the vocabulary is `lse - mean_logits`.
        Like TRL, this logs the load-balancing loss of a mixture of experts but does not add it.
        """
        eps = self.args.label_smoothing_factor
        budget = HEAD_BUDGET if self.logits_budget is None else self.logits_budget

        def apply(head: Head, input: HeadInput) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
            outputs = ("logps", "lse", "mean_logits", "entropy", "is_top1")
            stats = head_stats(head, input, outputs, logits_budget=budget)
            logps, lse, mean_logits, entropy, is_top1 = (getattr(stats, name) for name in outputs)
            total = eps * (lse - mean_logits).sum() - (1 - eps) * logps.sum()
            n_tokens = (input.target != -100).sum()
            count = n_tokens.clamp(min=1)
            return total, n_tokens, entropy.detach().sum() / count, is_top1.sum() / count, input.aux_loss

        total, n_tokens, entropy, accuracy, aux_loss = model(**inputs, **self._aux_inputs, head_fn=apply)
        items = n_tokens.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        value = total / (items.to(total.device) if isinstance(items, Tensor) else items)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            value = value * (self.accelerator.num_processes // self.get_tp_size())
        self.mode_metrics["entropy"].append(self.global_mean(entropy, n_tokens))
        self.mode_metrics["mean_token_accuracy"].append(self.global_mean(accuracy, n_tokens))
        if aux_loss is not None:
            self.mode_metrics["aux_loss"].append(self.gathered_mean(aux_loss))
        self._count_tokens(inputs)
        unlabelled = {name: x for name, x in inputs.items() if name != "labels"}
        return self._with_outputs(value, model, unlabelled, return_outputs)
