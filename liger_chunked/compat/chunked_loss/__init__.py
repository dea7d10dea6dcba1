"""The signatures of `liger_kernel.chunked_loss` over our losses, with its errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from liger_chunked import losses
from liger_chunked.calls import typed_like
from liger_chunked.compat.settings import Loss
from liger_chunked.engine import linear_token_stats
from liger_chunked.losses import dpo
from liger_chunked.losses.formulas import at, log_odds, logistic
from liger_chunked.losses.grpo import LOSS_TYPES, SURROGATES
from liger_chunked.losses.policy import REDUCTIONS
from liger_chunked.types import Clipped, PreferenceMetrics, Rollouts, accumulation_dtype, shown

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
    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor
    rejected_logits_mean: Tensor
    nll_loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


@torch.no_grad()
def _logits_sums(weight: Tensor, input: Tensor, bias: Tensor | None) -> Tensor:
    """Return each sequence's sum of logits (n,), over all tokens: `sum_t h_t @ sum_v W_v`."""
    dtype = accumulation_dtype(weight.dtype)
    sums = input.sum(1, dtype=dtype) @ weight.sum(0, dtype=dtype)
    return sums if bias is None else sums + input.shape[1] * bias.sum(dtype=dtype)


def _as_liger_kernel(
    result: tuple[Tensor, PreferenceMetrics], weight: Tensor, input: Tensor, bias: Tensor | None
) -> tuple[Tensor, PairMetrics]:
    """Return loss and metrics, with means of logits over ignored tokens too."""
    loss, metrics = result
    pairs = input.shape[0] // 2
    chosen, rejected = _logits_sums(weight, input, bias).split((pairs, pairs))
    logits = max(1, pairs * input.shape[1]) * weight.shape[0]
    pair = PairMetrics(*metrics[: len(PairMetrics._fields)])
    return loss, pair._replace(chosen_logits_mean=chosen.sum() / logits, rejected_logits_mean=rejected.sum() / logits)


# Loss types that do not read `label_smoothing`.
_LIGER_DPO = ("sigmoid", "hinge", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")


class LigerFusedLinearDPOLoss(Loss):
    """`losses.LigerFusedLinearDPOLoss`, with all its loss types. Unread settings have no effect.

    As in Liger-Kernel, only "exo_pair" and "robust" read `label_smoothing`; others warn.
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
        if loss_type not in dpo.LOSS_TYPES:
            raise ValueError(f"Unsupported loss_type {shown(loss_type)}, expected one of {sorted(dpo.LOSS_TYPES)}")
        if loss_type == "exo_pair" and label_smoothing <= 0:
            raise ValueError(f"label_smoothing must be > 0 for loss_type='exo_pair', got {label_smoothing}")
        if loss_type == "robust" and not 0 <= label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must lie in [0.0, 0.5) for loss_type='robust', got {label_smoothing}")
        if loss_type in _LIGER_DPO and label_smoothing:
            warnings.warn(f"loss_type={loss_type!r} does not read label_smoothing", UserWarning, stacklevel=2)
            label_smoothing = 0.0
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
        reference = (ref_input, ref_weight, ref_bias) if self.use_ref_model else ()
        return _as_liger_kernel(self.loss(lin_weight, _input, target, bias, *reference), lin_weight, _input, bias)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerFusedLinearORPOLoss(Loss):
    """`losses.LigerFusedLinearORPOLoss`.

    If the chosen half of `nll_target` differs from `target`, its NLL takes another pass.
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
        self.preference = losses.LigerFusedLinearORPOLoss(ignore_index=ignore_index, beta=beta)
        self.preference.compute_nll_loss = False
        self.nll = losses.LigerFusedLinearCrossEntropyLoss(ignore_index=ignore_index)

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
        pairs = target.shape[0] // 2
        apart = None  # the NLL's target, where it differs
        if nll_target is not None and self.loss.compute_nll_loss:
            chosen, nll_chosen = target[:pairs], nll_target[:pairs]
            both = (chosen != self.ignore_index) & (nll_chosen != self.ignore_index)
            if bool((both & (chosen != nll_chosen)).any()):
                apart = nll_chosen
            nll_target = torch.cat([nll_chosen, torch.full_like(target[pairs:], self.ignore_index)])
        else:
            nll_target = None
        if apart is None:
            result = self.loss(lin_weight, _input, target, bias, nll_target=nll_target)
        else:
            result = self.preference(lin_weight, _input, target, bias)
        loss, metrics = _as_liger_kernel(result, lin_weight, _input, bias)
        if apart is not None:
            nll: Any = self.nll(lin_weight, _input[:pairs], apart, bias)
            loss, metrics = loss + nll, metrics._replace(nll_loss=nll.detach())
        difference = log_odds(metrics.chosen_logps) - log_odds(metrics.rejected_logps)
        return loss, (*metrics, -at(difference, *logistic()).mean(), difference.mean())

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerFusedLinearCPOLoss(Loss):
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
        # "simpo" without margin is "sigmoid" on means over tokens.
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
        return _as_liger_kernel(self.loss(lin_weight, _input, target, bias), lin_weight, _input, bias)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerFusedLinearSimPOLoss(Loss):
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
        return _as_liger_kernel(self.loss(lin_weight, _input, target, bias), lin_weight, _input, bias)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerFusedLinearKTOLoss(Loss):
    """`losses.LigerFusedLinearKTOLoss`. `kl` is 0 by default, and may be negative."""

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
        self.loss: Any = losses.LigerFusedLinearKTOLoss(
            ignore_index=ignore_index, beta=beta, use_ref_model=use_ref_model, average_log_prob=average_log_prob
        )
        self.loss.reference_point = "delta"  # not clamped

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
        """Return `(loss, sums)` of log-probabilities, logits and rewards, each chosen before rejected.

        The sums of logits cover ignored tokens.
        """
        if isinstance(kl, Tensor) and kl.numel() != 1:
            raise NotImplementedError(f"kl of shape {tuple(kl.shape)} is not supported: it is one value for the batch")
        reference = (ref_input, ref_weight, ref_bias) if self.use_ref_model else ()
        loss, m = self.loss(
            lin_weight, _input, target, preference_labels, bias, *reference, delta=0.0 if kl is None else kl
        )
        assert preference_labels is not None
        desirable, logits = preference_labels.bool(), _logits_sums(lin_weight, _input, bias)
        return loss, (
            m.chosen_logps * m.chosen_count,
            m.rejected_logps * m.rejected_count,
            torch.where(desirable, logits, 0).sum(),
            torch.where(desirable, 0, logits).sum(),
            m.chosen_rewards * m.chosen_count,
            m.rejected_rewards * m.rejected_count,
        )

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


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
        read = SURROGATES[kind["surrogate"]].reads
        self.reduction = REDUCTIONS[kind["reduction"]]
        self.loss: Any = losses.LigerFusedLinearGRPOLoss.from_loss_type(
            loss_type,
            beta=beta if use_ref_model else 0.0,
            importance_level=importance_sampling_level,
            max_completion_length=max_completion_length if self.reduction.needs_length else None,
            temperature=float(temperature),
            use_bias_correction_kl=use_bias_correction_kl,
            **{name: value for name, value in settings.items() if name in read},
        )
        self.loss.clipped = _by_token(self.loss.clipped)

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


def _by_token(clipped: Callable[[Rollouts], Clipped] | None) -> Callable[[Rollouts], Clipped] | None:
    if clipped is None:
        return None

    def by_token(rollouts: Rollouts) -> Clipped:
        low, high = clipped(rollouts)
        return Clipped(None if low is None else low.expand_as(rollouts.mask), high.expand_as(rollouts.mask))

    return by_token


def _items_per_rank(attention_mask: Tensor, num_items: float | Tensor | None) -> float | Tensor | None:
    if not (dist.is_available() and dist.is_initialized()):
        return num_items
    if num_items is None:
        num_items = attention_mask.sum()
        dist.all_reduce(num_items)
    return num_items / dist.get_world_size()


class _Distillation(Loss):
    """`_scale` multiplies the reported soft loss.

    Tokens that only the teacher has get student logits of 0 in the soft loss.
    """

    _scale = 1.0
    ignore_index: int
    weight_hard_loss: float
    return_soft_hard_loss: bool

    def _build(self, kind: Callable[..., nn.Module], weight_hard_loss: float, **settings: Any) -> None:
        self.loss = kind(weight_hard_loss=weight_hard_loss, **settings)
        self.soft = kind(weight_hard_loss=0.0, **settings)
        self.hard: Any = losses.LigerFusedLinearCrossEntropyLoss(ignore_index=settings["ignore_index"])

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
        """Return the loss, or `(loss, soft_loss, hard_loss)` with unweighted terms."""
        teacher = (teacher_weight, teacher_input, true_labels)
        added = teacher_weight.shape[0] - student_weight.shape[0]
        if added <= 0:
            loss, metrics = self.loss(student_weight, student_input, *teacher, student_bias, teacher_bias)
            hard = metrics.hard_loss
        else:
            hard = self.hard(student_weight, student_input, true_labels, student_bias)
            weight = F.pad(student_weight, (0, 0, 0, added))
            bias = None if student_bias is None else F.pad(student_bias, (0, added))
            soft, metrics = self.soft(weight, student_input, *teacher, bias, teacher_bias)
            loss = soft + self.weight_hard_loss * hard
        return (loss, self._scale * metrics.soft_loss, hard.detach()) if self.return_soft_hard_loss else loss

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


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
        super().__init__()
        self._build(
            losses.LigerFusedLinearJSDLoss,
            weight_hard_loss,
            weight_soft_loss=weight_soft_loss,
            beta=beta,
            ignore_index=ignore_index,
            temperature=temperature,
        )


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
        super().__init__()
        self._scale = beta
        self._build(
            losses.LigerFusedLinearCosineSimilarityLoss,
            weight_hard_loss,
            weight_soft_loss=weight_soft_loss * beta,
            ignore_index=ignore_index,
            temperature=temperature,
        )
