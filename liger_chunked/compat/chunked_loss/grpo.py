"""GRPO and its variants."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_chunked import losses
from liger_chunked.calls import altered, typed_like
from liger_chunked.compat.settings import Loss
from liger_chunked.engine import linear_token_stats
from liger_chunked.losses.grpo import LOSS_TYPES
from liger_chunked.losses.policy import REDUCTIONS
from liger_chunked.losses.surrogates import SURROGATES, Surrogate, settings_of
from liger_chunked.types import Clipped, Rollouts, shown


class LigerFusedLinearGRPOLoss(Loss):
    """`losses.LigerFusedLinearGRPOLoss`. Unread settings have no effect.

    Across ranks, `dapo`, `cispo` and `vespo` divide by the mean number of tokens per rank.
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
        surrogate = SURROGATES[kind["surrogate"]]
        self.reduction = REDUCTIONS[kind["reduction"]]
        beta = beta if use_ref_model else 0.0
        # Liger-Kernel takes options that it does not read.
        corrects_kl = use_bias_correction_kl if beta else True
        if not (surrogate.reads_ratio or (beta and use_bias_correction_kl)):
            importance_sampling_level = "token"
        self.loss: Any = losses.LigerFusedLinearGRPOLoss.from_loss_type(
            loss_type,
            beta=beta,
            importance_level=importance_sampling_level,
            max_completion_length=max_completion_length if self.reduction.needs_length else None,
            temperature=float(temperature),
            use_bias_correction_kl=corrects_kl,
            **{name: value for name, value in settings.items() if name in settings_of(surrogate)},
        )
        if importance_sampling_level == "sequence":
            self.loss = altered(self.loss, clipped=_by_token(self.loss.surrogate))

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
        """Return `(loss, (kl, clip_ratio))`, without `kl` if `beta` is 0. Both are means over tokens.

        A reference is not read without `use_ref_model`; of two, `ref_per_token_logps` is read.
        """
        if self.importance_sampling_level == "sequence" and self.loss_type in ("cispo", "sapo", "vespo"):
            raise ValueError(
                f"Sequence-level importance sampling is not supported for loss_type={self.loss_type!r}: use "
                'importance_sampling_level="token", or liger_chunked.LigerFusedLinearGRPOLoss'
            )
        reference: dict[str, Tensor | None] = {}
        if self.use_ref_model and ref_per_token_logps is not None:
            if ref_input is not None:
                warnings.warn("ref_per_token_logps is read, ref_input is not", UserWarning, stacklevel=2)
            reference = {"ref_logps": ref_per_token_logps}
        elif self.use_ref_model:
            reference = {"ref_input": ref_input, "ref_weight": ref_weight, "ref_bias": ref_bias}
        if self.loss_type == "luspo":
            head = (lin_weight, _input, selected_token_ids, bias)
            loss, kl, clip_ratio = self._luspo(
                head, attention_mask, advantages, old_per_token_logps, vllm_is_ratio, **reference
            )
        else:
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

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def _luspo(
        self,
        head: tuple[Tensor, Tensor, Tensor, Tensor | None],
        attention_mask: Tensor,
        advantages: Tensor,
        old_logps: Tensor | None,
        importance_weights: Tensor | None,
        ref_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, KL and clip ratio.

        The loss is the mean over all (B, T), ignored tokens too, of a sequence's length times the token's `clip` cost
        and KL.
        """
        weight, input, token_ids, bias = head
        temperature = self.loss.options.temperature
        logps = linear_token_stats(weight, input, token_ids, bias, temperature=temperature).logps
        assert logps is not None
        if ref_input is not None and ref_weight is not None:
            with torch.no_grad():
                ref_logps = linear_token_stats(
                    ref_weight, ref_input, token_ids, ref_bias, temperature=temperature
                ).logps
        mask = attention_mask.to(logps.dtype)
        lengths = mask.sum(-1, keepdim=True)
        log_ratio = logps - (logps if old_logps is None else old_logps).detach()
        if self.importance_sampling_level == "sequence":
            log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / lengths.clamp(min=1)
        ratio, advantages = log_ratio.exp(), advantages[:, None]
        low, high = 1 - self.epsilon_low, 1 + self.epsilon_high
        bounded = ratio if self.delta is None else ratio.clamp(max=self.delta)
        cost = -torch.min(bounded * advantages, ratio.clamp(low, high) * advantages)
        if importance_weights is not None:
            cost = cost * (importance_weights[:, None] if importance_weights.ndim == 1 else importance_weights)
        kl = torch.zeros_like(logps)
        if self.beta and ref_logps is not None:
            difference = ref_logps.detach() - logps
            kl = torch.expm1(difference) - difference
            kl = kl * ratio if self.use_bias_correction_kl else kl
            cost = cost + self.beta * kl
        clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
        tokens = mask.sum().clamp(min=1)
        return (cost * lengths).mean(), (kl * mask).sum().detach() / tokens, (clipped * mask).sum() / tokens


def _by_token(surrogate: Surrogate) -> Callable[[Rollouts], Clipped | None]:
    def by_token(rollouts: Rollouts) -> Clipped | None:
        clipped = surrogate.clipped(rollouts)
        if clipped is None:
            return None
        low, high = clipped
        return Clipped(None if low is None else low.expand_as(rollouts.mask), high.expand_as(rollouts.mask))

    return by_token


def _items_per_rank(attention_mask: Tensor, num_items: float | Tensor | None) -> float | Tensor | None:
    if not (dist.is_available() and dist.is_initialized()):
        return num_items
    if num_items is None:
        num_items = attention_mask.sum()
        dist.all_reduce(num_items)
    return num_items / dist.get_world_size()
