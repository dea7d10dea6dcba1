"""The functions of `liger_kernel.transformers.functional`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from liger_chunked import layers
from liger_chunked.compat import transformers as modules
from liger_chunked.compat.transformers.layers import fused_add_rms_norm, rms_norm
from liger_chunked.compat.transformers.losses import Reduction
from liger_chunked.compat.unsupported import missing

__all__ = [
    "CrossEntropyOutput",
    "liger_cross_entropy",
    "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy",
    "liger_fused_linear_jsd",
    "liger_geglu",
    "liger_jsd",
    "liger_kl_div",
    "liger_layer_norm",
    "liger_rms_norm",
    "liger_rope",
    "liger_swiglu",
    "liger_tvd",
]

CrossEntropyOutput = modules.CrossEntropyOutput


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    """`size_average` and `reduce` are not read."""
    loss = modules.LigerCrossEntropyLoss(
        weight,
        ignore_index,
        lse_square_scale,
        label_smoothing,
        reduction,
        softcap,
        return_z_loss,
        return_token_accuracy,
        return_predicted_tokens,
    )
    return loss(input, target)


def liger_fused_linear_cross_entropy(
    input: Tensor,
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
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:
    loss = modules.LigerFusedLinearCrossEntropyLoss(
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
    return loss(weight, input, target, bias)


def liger_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    loss = modules.LigerFusedLinearJSD(jsd_beta, ignore_index, temperature, accum_dtype)
    return loss(student_input, student_weight, teacher_input, teacher_weight, shift_labels)


def liger_jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    return modules.LigerJSD(beta, ignore_index)(input, target, shift_labels)


def liger_kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool = True,
    reduce: bool = True,
    reduction: Reduction = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> Tensor:
    """`size_average` and `reduce` are not read."""
    return modules.LigerKLDIVLoss(eps, reduction=reduction, log_target=log_target)(input, target)


def liger_tvd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
) -> Tensor:
    return modules.LigerTVDLoss(reduction, ignore_index)(input, target, shift_labels)


def liger_layer_norm(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
    return layers.liger_layer_norm(X, W, B, eps)


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    return rms_norm(X, W, eps, offset, casting_mode)


def liger_fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:
    return fused_add_rms_norm(X, R, W, eps, offset, casting_mode)


liger_rope = modules.liger_rotary_pos_emb


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    return layers.liger_geglu(a, b)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    return layers.liger_swiglu(a, b)


if not TYPE_CHECKING:  # else every wrong name would pass

    def __getattr__(name: str) -> Any:
        return missing(__name__, name)
