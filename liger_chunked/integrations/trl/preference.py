"""A loss on pairs in place of a trainer's own: the step through the model, and its metrics."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from liger_chunked.integrations.transformers import HeadInput
from liger_chunked.integrations.trl.mixin import LigerTrainerMixin, fitted
from liger_chunked.losses import LigerFusedLinearPreferenceBase
from liger_chunked.types import Head, PreferenceMetrics


class PreferenceStep(NamedTuple):
    """The loss with its gradient, its metrics, and the load-balancing loss of a mixture of experts."""

    loss: Tensor
    metrics: PreferenceMetrics
    aux_loss: Tensor | None


def preference_step(
    model: nn.Module,
    loss: LigerFusedLinearPreferenceBase,
    inputs: dict[str, Any],
    labels: Tensor,
    *,
    ref_logps: Tensor | None = None,
    nll_labels: Tensor | None = None,
) -> PreferenceStep:
    """Apply `loss` inside the forward of `model`.

    Args:
        model: the policy, wrapped or not.
        loss: a loss; it gets the model's logits transform.
        inputs: keyword arguments of the model for 2 n sequences of T tokens, chosen then rejected.
        labels: (2 n, T) token ids, not shifted, -100 at prompts and padding.
        ref_logps: (2 n, T - 1) for each token, or (2 n,) for each sequence, as the loss takes them.
        nll_labels: (2 n, T) labels of the NLL term, if they differ from `labels`.
    """
    length = labels.shape[1]

    def apply(head: Head, input: HeadInput) -> PreferenceStep:
        # The virtual tokens of prompt learning come first, and the last position predicts nothing.
        positions = slice(-length, -1)
        value, metrics = fitted(loss, input.options)(
            head.weight,
            input.hidden_states[:, positions],
            input.target[:, positions],
            head.bias,
            ref_logps=ref_logps,
            nll_target=None if nll_labels is None else nll_labels[:, 1:],
        )
        return PreferenceStep(value, metrics, input.aux_loss)

    return model(**inputs, labels=labels, head_fn=apply)


def preference_logs(
    trainer: LigerTrainerMixin, loss: LigerFusedLinearPreferenceBase, metrics: PreferenceMetrics, labels: Tensor
) -> dict[str, float]:
    """Return the metrics of a loss on pairs under TRL's names, averaged over the ranks. `labels` are (2 n, T)."""
    of_pairs = {
        "rewards/chosen": metrics.chosen_rewards,
        "rewards/rejected": metrics.rejected_rewards,
        "rewards/accuracies": metrics.reward_accuracies,
        "rewards/margins": metrics.reward_margins,
        "logps/chosen": metrics.chosen_logps,
        "logps/rejected": metrics.rejected_logps,
    }
    of_tokens = {"logits/chosen": metrics.chosen_logits_mean, "logits/rejected": metrics.rejected_logits_mean}
    counts = (labels[:, 1:] != -100).sum(-1).view(2, -1).sum(-1)
    logs = {name: trainer.gathered_mean(value) for name, value in of_pairs.items()}
    for (name, mean), count in zip(of_tokens.items(), counts, strict=True):
        logs[name] = trainer.global_mean(mean, count)
    if loss.compute_nll_loss:
        logs["nll_loss"] = trainer.gathered_mean(metrics.nll_loss)
    return logs
