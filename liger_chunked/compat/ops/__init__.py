"""The autograd functions of `liger_kernel.ops`: `apply`, by position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from liger_chunked import layers
from liger_chunked.compat.chunked_loss.functional import applied
from liger_chunked.compat.transformers import CrossEntropyOutput, functional
from liger_chunked.compat.transformers.losses import Reduction
from liger_chunked.compat.transformers.mlp import apply_tiled_mlp
from liger_chunked.compat.unsupported import missing


def _four(result: Tensor | CrossEntropyOutput) -> tuple[Tensor | None, ...]:
    if isinstance(result, Tensor):
        return result, None, None, None
    return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens


def _cross_entropy(
    _input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return `(loss, z_loss, token_accuracy, predicted_tokens)`, None if not requested."""
    return _four(
        functional.liger_cross_entropy(
            _input,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            lse_square_scale=lse_square_scale,
            softcap=softcap,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )
    )


def _fused_linear_cross_entropy(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    ce_impl: str | None = None,
    ce_mode: str | None = None,
    chunk_mem_const: int = 1,
) -> tuple[Tensor | None, ...]:
    return _four(
        functional.liger_fused_linear_cross_entropy(
            _input,
            weight,
            target,
            bias,
            ce_weight,
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss,
            accum_dtype,
            use_token_scaling,
            return_token_accuracy,
            return_predicted_tokens,
        )
    )


def _fused_linear_jsd(*args: Any) -> Tensor:
    return functional.liger_fused_linear_jsd(*args[:9])  # the others choose a kernel


def _jsd(*args: Any) -> Tensor:
    return functional.liger_jsd(*args[:5])


def _kl_div(
    y_pred: Tensor, y_true: Tensor, reduction: Reduction = "batchmean", log_target: bool = False, eps: float = 1e-10
) -> Tensor:
    return functional.liger_kl_div(y_pred, y_true, reduction=reduction, log_target=log_target, eps=eps)


def _tvd(
    p: Tensor,
    q: Tensor,
    shift_labels: Tensor | None = None,
    reduction: Reduction = "batchmean",
    ignore_index: int = -100,
) -> Tensor:
    return functional.liger_tvd(p, q, shift_labels, reduction, ignore_index)


def _rms_norm(*args: Any) -> Tensor:
    return functional.liger_rms_norm(*args[:6])


def _fused_add_rms_norm(*args: Any) -> tuple[Tensor, Tensor]:
    return functional.liger_fused_add_rms_norm(*args[:7])


def _fused_gate_up(y: Tensor, in_place: bool = False) -> Tensor:
    return layers.liger_swiglu(y)


def _silu_mul(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    gate = a if gate_multiplier == 1.0 else a * gate_multiplier
    product = layers.liger_swiglu(gate, b)
    return product if down_multiplier == 1.0 else product * down_multiplier


LigerCrossEntropyFunction = applied("LigerCrossEntropyFunction", __name__, _cross_entropy)
LigerFusedAddRMSNormFunction = applied("LigerFusedAddRMSNormFunction", __name__, _fused_add_rms_norm)
LigerFusedGateUpSiLUMulFunction = applied("LigerFusedGateUpSiLUMulFunction", __name__, _fused_gate_up)
LigerFusedLinearCrossEntropyFunction = applied(
    "LigerFusedLinearCrossEntropyFunction", __name__, _fused_linear_cross_entropy
)
LigerFusedLinearJSDFunction = applied("LigerFusedLinearJSDFunction", __name__, _fused_linear_jsd)
LigerGELUMulFunction = applied("LigerGELUMulFunction", __name__, functional.liger_geglu)
LigerJSDFunction = applied("LigerJSDFunction", __name__, _jsd)
LigerKLDivLossFunction = applied("LigerKLDivLossFunction", __name__, _kl_div)
LigerLayerNormFunction = applied("LigerLayerNormFunction", __name__, functional.liger_layer_norm)
LigerRMSNormFunction = applied("LigerRMSNormFunction", __name__, _rms_norm)
LigerRopeFunction = applied("LigerRopeFunction", __name__, functional.liger_rope)
LigerSiLUMulFunction = applied("LigerSiLUMulFunction", __name__, _silu_mul)
LigerTiledMLPFunction = applied("LigerTiledMLPFunction", __name__, apply_tiled_mlp)
LigerTVDLossFunction = applied("LigerTVDLossFunction", __name__, _tvd)


if not TYPE_CHECKING:  # else every wrong name would pass

    def __getattr__(name: str) -> Any:
        return missing(__name__, name)
