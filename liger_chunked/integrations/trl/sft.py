from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from liger_chunked.integrations.transformers import HeadInput
from liger_chunked.integrations.trl.base import LigerTrainerMixin, Step, loss_step
from liger_chunked.integrations.trl.heads import HEAD_BUDGET, head_stats
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss
from liger_chunked.losses.settings import checked_items
from liger_chunked.types import Head, TokenStats


class SFTMixin(LigerTrainerMixin):
    """TRL's `SFTTrainer` on a chunked head.

    Replaces TRL's label smoothing too. `loss` is a `LigerFusedLinearCrossEntropyLoss` with `reduction="mean"`, and
    excludes `compute_loss_func`.

        LigerSFTTrainer(model, train_dataset=texts, loss=LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-4))
    """

    loss_kind = LigerFusedLinearCrossEntropyLoss
    replaced_fields: ClassVar = {"loss_type": None, "label_smoothing_factor": "label_smoothing"}

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
        smoothed = self.label_smoother is not None and self.compute_loss_func is None and self.args.loss_type == "nll"
        if loss is None and not smoothed:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        unlabelled = {name: x for name, x in inputs.items() if name != "labels"}
        model_inputs, labels = unlabelled | self._aux_inputs, inputs.get("labels")
        if loss is None:
            value, aux_loss = self._label_smoothing(model, model_inputs, labels, num_items_in_batch), None
        else:
            logged = ("entropy", "is_top1")
            step = loss_step(model, loss, model_inputs, labels, num_items=num_items_in_batch, logged=logged)
            self._log_metrics(step)
            self.log_own_metrics(step.metrics)
            value, aux_loss = step.loss, step.aux_loss
        # num_items_in_batch counts all ranks; gradients are averaged.
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            value = value * (self.accelerator.num_processes // self.get_tp_size())
        value = self._with_aux_loss(value, aux_loss, accumulates=num_items_in_batch is not None)
        return self._finished(value, model, unlabelled, return_outputs)

    def _log_metrics(self, step: Step) -> None:
        metrics = step.metrics
        self._log_stats(step.logged, step.target)
        if metrics is not None and metrics.z_loss is not None:
            self.mode_metrics["z_loss"].append(self.gathered_mean(metrics.z_loss))

    def _log_stats(self, stats: TokenStats, target: Tensor) -> None:
        assert stats.entropy is not None and stats.is_top1 is not None
        self.log_token_mean("entropy", stats.entropy, target)
        self.log_token_mean("mean_token_accuracy", stats.is_top1, target)

    def _label_smoothing(
        self, model: nn.Module, inputs: dict[str, Any], labels: Tensor | None, num_items: int | Tensor | None
    ) -> Tensor:
        """Return TRL's smoothed loss; log its metrics.

        A token costs `(1 - eps) * nll + eps * (lse - mean_logits)`. Like TRL, does not add the auxiliary loss.
        """
        eps = self.args.label_smoothing_factor
        budget = HEAD_BUDGET if self.logits_budget is None else self.logits_budget

        def apply(head: Head, input: HeadInput) -> tuple[TokenStats, Tensor, Tensor | None]:
            outputs = ("logps", "lse", "mean_logits", "entropy", "is_top1")
            return head_stats(head, input, outputs, logits_budget=budget), input.target, input.aux_loss

        stats, target, aux_loss = model(**inputs, labels=labels, head_fn=apply)
        total = eps * (stats.lse - stats.mean_logits).sum() - (1 - eps) * stats.logps.sum()
        count = (target != -100).sum().clamp(min=1)
        self._log_stats(stats, target)
        if aux_loss is not None:
            self.mode_metrics["aux_loss"].append(self.gathered_mean(aux_loss))
        return total / (count if num_items is None else checked_items(num_items, total, total.dtype))
