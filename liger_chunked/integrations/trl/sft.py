"""`LigerSFTTrainer`: TRL's SFT on a chunked head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from trl import SFTTrainer

from liger_chunked.integrations.transformers import HeadInput
from liger_chunked.integrations.trl.mixin import LigerTrainerMixin, fitted
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss
from liger_chunked.types import Head


class LigerSFTTrainer(LigerTrainerMixin, SFTTrainer):
    """TRL's `SFTTrainer` on a chunked head.

    With `loss`, what TRL's config says of the loss (`loss_type`, `label_smoothing_factor`) is not read.

        LigerSFTTrainer(model, train_dataset=texts, loss=LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-4))

    Args:
        *args, **kwargs: TRL's.
        loss: a `LigerFusedLinearCrossEntropyLoss` that reduces to a mean; what it is asked to return beside the loss is
            logged: `mean_token_accuracy`, `z_loss`.
        logits_budget: see `LigerTrainerMixin`.

    Raises:
        ValueError: a loss of another reduction.
    """

    loss_kind = LigerFusedLinearCrossEntropyLoss

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
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        def apply(head: Head, input: HeadInput) -> Any:
            result = fitted(loss, input.options)(
                head.weight, input.hidden_states, input.target, head.bias, num_items=num_items_in_batch
            )
            value, metrics = result if isinstance(result, tuple) else (result, None)
            n_tokens = (input.target != loss.options.ignore_index).sum()
            return value, metrics, input.aux_loss, n_tokens

        value, metrics, aux_loss, n_tokens = model(**inputs, **self._aux_inputs, head_fn=apply)
        # Trainer's conventions: a count of items is of all ranks, whose gradients are averaged; it leaves accumulation
        # to the loss, which the mean over a micro-batch of an auxiliary loss does not know.
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
