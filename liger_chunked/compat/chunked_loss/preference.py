"""Losses of pairs, and KTO."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from liger_chunked import losses
from liger_chunked.calls import altered, typed_like
from liger_chunked.compat.settings import Loss
from liger_chunked.losses import dpo
from liger_chunked.losses.formulas import log_odds, logistic
from liger_chunked.types import PreferenceMetrics, accumulation_dtype, shown


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
        loss = losses.LigerFusedLinearORPOLoss(ignore_index=ignore_index, beta=beta)
        self.loss = altered(loss, compute_nll_loss=compute_nll_loss)
        self.preference = altered(loss, compute_nll_loss=False)
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
        return loss, (*metrics, -logistic(difference).mean(), difference.mean())

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class _WithoutReference(Loss):
    """A loss of pairs that compares with no reference."""

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, PairMetrics]:
        return _as_liger_kernel(self.loss(lin_weight, _input, target, bias), lin_weight, _input, bias)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerFusedLinearCPOLoss(_WithoutReference):
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


class LigerFusedLinearSimPOLoss(_WithoutReference):
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
