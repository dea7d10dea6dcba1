"""The signatures of `liger_kernel.chunked_loss` 0.8.5 over the losses of `liger_chunked`.

docs/migration.md lists the differences of all losses. Errors are those of `liger_chunked`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_chunked import losses
from liger_chunked.compat.unsupported import refuse
from liger_chunked.losses.formulas import log_odds, logistic
from liger_chunked.losses.grpo import LOSS_TYPES, SURROGATES
from liger_chunked.losses.policy import REDUCTIONS
from liger_chunked.types import PreferenceMetrics, UnpairedPreferenceMetrics, shown

__all__ = [
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
]


def _nll_term(compute_nll_loss: bool, alpha: float) -> dict[str, Any]:
    return {"compute_nll_loss": True, "alpha": alpha} if compute_nll_loss else {}


class PairMetrics(NamedTuple):
    """Liger-Kernel's paired metrics: the first fields of `PreferenceMetrics`."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor
    rejected_logits_mean: Tensor
    nll_loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def _as_liger_kernel(loss: Tensor, metrics: PreferenceMetrics) -> tuple[Tensor, PairMetrics]:
    return loss, PairMetrics(*metrics[: len(PairMetrics._fields)])


class LigerFusedLinearDPOLoss(nn.Module):
    """`losses.LigerFusedLinearDPOLoss`, with all its loss types. Unread settings have no effect.

    Raises:
        NotImplementedError: `label_smoothing` with "sigmoid", which Liger-Kernel ignores.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
    ) -> None:
        super().__init__()
        if loss_type == "sigmoid":
            refuse("label_smoothing", label_smoothing, "Liger-Kernel's loss_type 'sigmoid' does not read it")
        tau: dict[str, Any] = {"discopop_tau": discopop_tau} if loss_type == "discopop" else {}
        self.loss = losses.LigerFusedLinearDPOLoss(
            ignore_index=ignore_index,
            beta=beta,
            use_ref_model=use_ref_model,
            average_log_prob=average_log_prob,
            loss_type=loss_type,
            label_smoothing=label_smoothing,
            **_nll_term(compute_nll_loss, alpha),
            **tau,
        )

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> tuple[Tensor, PairMetrics]:
        return _as_liger_kernel(*self.loss(lin_weight, _input, target, bias, ref_input, ref_weight, ref_bias))


class LigerFusedLinearORPOLoss(nn.Module):
    """`losses.LigerFusedLinearORPOLoss`.

    Raises:
        ValueError: `nll_target` without `compute_nll_loss`, or different from `target` where neither is ignored.
            Liger-Kernel reads only its chosen half.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.loss = losses.LigerFusedLinearORPOLoss(ignore_index=ignore_index, beta=beta)
        self.loss.compute_nll_loss = compute_nll_loss

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return `(loss, metrics)`: those of DPO, then the means of `log sigmoid(d)` and `d`.

        `d` is `log odds(chosen) - log odds(rejected)`.
        """
        loss, metrics = _as_liger_kernel(*self.loss(lin_weight, _input, target, bias, nll_target=nll_target))
        difference = log_odds(metrics.chosen_logps) - log_odds(metrics.rejected_logps)
        return loss, (*metrics, -logistic(difference).mean(), difference.mean())


class LigerFusedLinearCPOLoss(nn.Module):
    """`losses.LigerFusedLinearCPOLoss`; without `alpha`, the metric `nll_loss` is 0."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        # "simpo" without a margin is "sigmoid" on means over tokens.
        by_token = {"loss_type": "simpo", "simpo_gamma": 0.0}
        kind: dict[str, Any] = by_token if average_log_prob else {"loss_type": "sigmoid"}
        self.loss = losses.LigerFusedLinearCPOLoss(
            ignore_index=ignore_index,
            beta=beta,
            cpo_alpha=alpha if compute_nll_loss else 0.0,
            label_smoothing=label_smoothing,
            **kind,
        )

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, PairMetrics]:
        return _as_liger_kernel(*self.loss(lin_weight, _input, target, bias))


class LigerFusedLinearSimPOLoss(nn.Module):
    """`losses.LigerFusedLinearSimPOLoss`, with the NLL term by default."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.loss = losses.LigerFusedLinearSimPOLoss(
            ignore_index=ignore_index,
            beta=beta,
            label_smoothing=label_smoothing,
            gamma=gamma,
            **_nll_term(compute_nll_loss, alpha),
        )

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, PairMetrics]:
        return _as_liger_kernel(*self.loss(lin_weight, _input, target, bias))


class LigerFusedLinearKTOLoss(nn.Module):
    """`losses.LigerFusedLinearKTOLoss`. `kl` is 0 by default, and at least 0.

    Raises:
        NotImplementedError: in forward, if `kl` has several values.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.loss = losses.LigerFusedLinearKTOLoss(
            ignore_index=ignore_index, beta=beta, use_ref_model=use_ref_model, average_log_prob=average_log_prob
        )

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return `(loss, sums)` of log-probabilities, logits and rewards, each chosen before rejected."""
        if isinstance(kl, Tensor) and kl.numel() != 1:
            raise NotImplementedError(f"kl of shape {tuple(kl.shape)} is not supported: it is one value for the batch")
        loss, metrics = self.loss(
            lin_weight,
            _input,
            target,
            preference_labels,
            bias,
            ref_input,
            ref_weight,
            ref_bias,
            kl=0.0 if kl is None else kl,
        )
        return loss, _sums(metrics, vocab_size=lin_weight.shape[0])


def _sums(metrics: UnpairedPreferenceMetrics, vocab_size: int) -> tuple[Tensor, ...]:
    m = metrics
    return (
        m.chosen_logps * m.chosen_count,
        m.rejected_logps * m.rejected_count,
        m.chosen_logits_mean * m.chosen_tokens * vocab_size,
        m.rejected_logits_mean * m.rejected_tokens * vocab_size,
        m.chosen_rewards * m.chosen_count,
        m.rejected_rewards * m.rejected_count,
    )


class LigerFusedLinearGRPOLoss(nn.Module):
    """`losses.LigerFusedLinearGRPOLoss`. Unread settings have no effect.

    Across ranks, `dapo`, `cispo` and `vespo` divide by the mean number of tokens per rank. Unlike Liger-Kernel:

    - Without `use_ref_model` the KL is 0; Liger-Kernel uses the policy as reference.
    - Sequence and trajectory level work with every loss type.
    - `luspo` ignores padding.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        super().__init__()
        settings = {
            "epsilon_low": epsilon_low,
            "epsilon_high": epsilon_high,
            "delta": delta,
            "sapo_temperature_pos": sapo_temperature_pos,
            "sapo_temperature_neg": sapo_temperature_neg,
            "vespo_k_pos": vespo_k_pos,
            "vespo_lambda_pos": vespo_lambda_pos,
            "vespo_k_neg": vespo_k_neg,
            "vespo_lambda_neg": vespo_lambda_neg,
        }
        if loss_type not in LOSS_TYPES:
            raise ValueError(f"unknown loss_type {shown(loss_type)}, expected one of {sorted(LOSS_TYPES)}")
        kind = LOSS_TYPES[loss_type]
        read = SURROGATES[kind["surrogate"]].reads
        self.beta = beta
        self.use_ref_model = use_ref_model
        self.reduction = REDUCTIONS[kind["reduction"]]
        self.loss = losses.LigerFusedLinearGRPOLoss.from_loss_type(
            loss_type,
            beta=beta if use_ref_model else 0.0,
            importance_level=importance_sampling_level,
            max_completion_length=max_completion_length if self.reduction.needs_length else None,
            temperature=temperature,
            use_bias_correction_kl=use_bias_correction_kl,
            **{name: value for name, value in settings.items() if name in read},
        )

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return `(loss, (kl, clip_ratio))`, without `kl` if `beta` is 0.

        `clip_ratio` counts sequences at sequence level; Liger-Kernel weights them by length.
        """
        reference = {
            "ref_logps": ref_per_token_logps,
            "ref_input": ref_input,
            "ref_weight": ref_weight,
            "ref_bias": ref_bias,
        }
        unread = [name for name, value in reference.items() if value is not None]
        if unread and not self.use_ref_model:
            raise ValueError(f"use_ref_model=False takes no reference, got {', '.join(unread)}")
        loss, metrics = self.loss(
            lin_weight,
            _input,
            selected_token_ids,
            advantages,
            bias,
            attention_mask=attention_mask,
            old_logps=old_per_token_logps,
            importance_weights=vllm_is_ratio,
            num_items=_items_per_rank(attention_mask, num_items_in_batch) if self.reduction.counts_items else None,
            **reference,
        )
        zero = torch.zeros_like(metrics.entropy)
        clip_ratio = zero if metrics.clip_ratio is None else metrics.clip_ratio
        kl = zero if metrics.kl is None else metrics.kl
        return loss, ((kl, clip_ratio) if self.beta else (clip_ratio,))


def _items_per_rank(attention_mask: Tensor, num_items: float | Tensor | None) -> float | Tensor | None:
    if not (dist.is_available() and dist.is_initialized()):
        return num_items
    if num_items is None:
        num_items = attention_mask.sum()
        dist.all_reduce(num_items)
    return num_items / dist.get_world_size()


class _Distillation(nn.Module):
    """Base of the distillation losses; `scale` multiplies the reported soft loss."""

    def __init__(
        self, loss: losses.LigerFusedLinearDistillationBase, scale: float, return_soft_hard_loss: bool
    ) -> None:
        super().__init__()
        self.loss = loss
        self.scale = scale
        self.return_soft_hard_loss = return_soft_hard_loss

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return the loss, or `(loss, soft_loss, hard_loss)` with unweighted terms.

        Raises:
            NotImplementedError: the teacher has a larger vocabulary, whose logits Liger-Kernel pads with 0.
        """
        check_same_vocabulary(student_weight, teacher_weight)
        loss, metrics = self.loss(
            student_weight, student_input, teacher_weight, teacher_input, true_labels, student_bias, teacher_bias
        )
        return (loss, self.scale * metrics.soft_loss, metrics.hard_loss) if self.return_soft_hard_loss else loss


def check_same_vocabulary(student_weight: Tensor, teacher_weight: Tensor) -> None:
    if teacher_weight.shape[0] > student_weight.shape[0]:
        raise NotImplementedError(
            f"teacher_weight {tuple(teacher_weight.shape)} with more rows than student_weight "
            f"{tuple(student_weight.shape)} is not supported: cut teacher_weight and teacher_bias, or use liger_chunked"
        )


class LigerFusedLinearJSDLoss(_Distillation):
    """`losses.LigerFusedLinearJSDLoss`."""

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:
        loss = losses.LigerFusedLinearJSDLoss(
            weight_hard_loss=weight_hard_loss,
            weight_soft_loss=weight_soft_loss,
            beta=beta,
            ignore_index=ignore_index,
            temperature=temperature,
        )
        super().__init__(loss, 1.0, return_soft_hard_loss)


class LigerFusedLinearCosineSimilarityLoss(_Distillation):
    """`losses.LigerFusedLinearCosineSimilarityLoss` with the soft loss `beta (1 - cos)`."""

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:
        loss = losses.LigerFusedLinearCosineSimilarityLoss(
            weight_hard_loss=weight_hard_loss,
            weight_soft_loss=weight_soft_loss * beta,
            ignore_index=ignore_index,
            temperature=temperature,
        )
        super().__init__(loss, beta, return_soft_hard_loss)
