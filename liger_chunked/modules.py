"""The base kernels as modules, with the parameter names of those that they replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from liger_chunked.kernels.cross_entropy import liger_cross_entropy
from liger_chunked.kernels.glu import liger_geglu, liger_swiglu
from liger_chunked.kernels.layer_norm import liger_layer_norm
from liger_chunked.kernels.logits_divergence import (
    liger_jsd_with_logits,
    liger_kl_div_with_logits,
    liger_tvd_with_logits,
)
from liger_chunked.kernels.pointwise_divergence import liger_jsd, liger_kl_div, liger_tvd
from liger_chunked.kernels.rms_norm import Casting, liger_rms_norm
from liger_chunked.types import shown

_SILU = ("silu", "swish")
_GELU: dict[str, Literal["tanh", "none"]] = {
    "gelu": "none",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
}


class LigerRMSNorm(nn.Module):
    """RMSNorm with a weight; see `liger_rms_norm`.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the mean square.
        offset: added to the weight, initially `1 - offset`; Gemma uses 1.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, offset: float = 0.0, casting: Casting = "llama") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), 1.0 - offset))
        self.variance_epsilon = eps
        self.offset = offset
        self.casting: Casting = casting

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return the norm of `x`, or the norm of `x + residual` and this sum."""
        return liger_rms_norm(
            x, self.weight, self.variance_epsilon, offset=self.offset, casting=self.casting, residual=residual
        )

    def extra_repr(self) -> str:
        return (
            f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}, offset={self.offset}, casting={self.casting!r}"
        )


class LigerLayerNorm(nn.Module):
    """LayerNorm over the last dimension; see `liger_layer_norm`."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return liger_layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, bias={self.bias is not None}"


def unobserved(*projections: nn.Module) -> bool:
    """Whether no forward hook, global or local, can keep outputs."""
    if global_hooks._global_forward_hooks:
        return False
    return not any(module._forward_hooks for projection in projections for module in projection.modules())


class _GatedMLP(nn.Module):
    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        width = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=bias)

    @property
    def _inplace(self) -> bool:
        return unobserved(self.gate_proj, self.up_proj)


def _activation_name(config: Any, known: tuple[str, ...]) -> str:
    # Gemma's configurations use the second name.
    name = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if name not in known:
        raise ValueError(f"hidden_act must be one of {known}, got {shown(name)}")
    return str(name)


class LigerSwiGLUMLP(_GatedMLP):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`, with the parameters of `LlamaMLP`.

    Args:
        config: has `hidden_size`, `intermediate_size`, `hidden_act`, and optionally `mlp_bias`.
        intermediate_size: overrides the configuration's.

    Raises:
        ValueError: the activation is not silu.
    """

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        _activation_name(config, _SILU)
        super().__init__(config, intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(liger_swiglu(self.gate_proj(x), self.up_proj(x), inplace=self._inplace))


class LigerGEGLUMLP(_GatedMLP):
    """`down_proj(gelu(gate_proj(x)) * up_proj(x))`, with the parameters of `GemmaMLP`.

    Args:
        config: as in `LigerSwiGLUMLP`; `hidden_activation` may replace `hidden_act`.

    Raises:
        ValueError: the activation is not a gelu.
    """

    def __init__(self, config: Any) -> None:
        approximate = _GELU[_activation_name(config, tuple(_GELU))]
        super().__init__(config)
        self.approximate: Literal["tanh", "none"] = approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(liger_geglu(self.gate_proj(x), self.up_proj(x), self.approximate, inplace=self._inplace))


class LigerCrossEntropyLoss(nn.Module):
    """Cross entropy of logits; see `liger_cross_entropy`."""

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum", "none"] = "mean",
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        inplace: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "lse_square_scale": lse_square_scale,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "inplace": inplace,
        }

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return liger_cross_entropy(logits, target, self.weight, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LigerKLDIVLoss(nn.Module):
    """`nn.KLDivLoss`; see `liger_kl_div`."""

    def __init__(
        self, reduction: Literal["none", "sum", "mean", "batchmean"] = "mean", log_target: bool = False
    ) -> None:
        super().__init__()
        self.reduction = reduction
        self.log_target = log_target

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return liger_kl_div(input, target, reduction=self.reduction, log_target=self.log_target)


class LigerJSD(nn.Module):
    """Jensen-Shannon divergence of log-probabilities; see `liger_jsd`."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        self.beta = beta
        self.ignore_index = ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return liger_jsd(log_q, log_p, shift_labels, beta=self.beta, ignore_index=self.ignore_index)


class LigerTVDLoss(nn.Module):
    """Total variation distance of probabilities; see `liger_tvd`."""

    def __init__(
        self, reduction: Literal["none", "sum", "mean", "batchmean"] = "batchmean", ignore_index: int = -100
    ) -> None:
        super().__init__()
        self.reduction = reduction
        self.ignore_index = ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return liger_tvd(p, q, shift_labels, reduction=self.reduction, ignore_index=self.ignore_index)


Reduction = Literal["none", "sum", "mean", "batchmean"]


class _DivergenceWithLogits(nn.Module):
    def __init__(self, function: Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        self._function = function
        self.options = options

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return self._function(student_logits, teacher_logits, shift_labels, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LigerKLDIVWithLogitsLoss(_DivergenceWithLogits):
    """Kullback-Leibler divergence of logits; see `liger_kl_div_with_logits`."""

    def __init__(
        self,
        reduction: Reduction = "batchmean",
        *,
        reverse: bool = False,
        temperature: float = 1.0,
        ignore_index: int = -100,
        inplace: bool = False,
    ) -> None:
        super().__init__(
            liger_kl_div_with_logits,
            reduction=reduction,
            reverse=reverse,
            temperature=temperature,
            ignore_index=ignore_index,
            inplace=inplace,
        )


class LigerJSDWithLogits(_DivergenceWithLogits):
    """Jensen-Shannon divergence of logits; see `liger_jsd_with_logits`."""

    def __init__(
        self,
        beta: float = 0.5,
        ignore_index: int = -100,
        *,
        reduction: Reduction = "batchmean",
        temperature: float = 1.0,
        inplace: bool = False,
    ) -> None:
        super().__init__(
            liger_jsd_with_logits,
            beta=beta,
            reduction=reduction,
            temperature=temperature,
            ignore_index=ignore_index,
            inplace=inplace,
        )


class LigerTVDWithLogitsLoss(_DivergenceWithLogits):
    """Total variation distance of logits; see `liger_tvd_with_logits`."""

    def __init__(
        self,
        reduction: Reduction = "batchmean",
        ignore_index: int = -100,
        *,
        temperature: float = 1.0,
        inplace: bool = False,
    ) -> None:
        super().__init__(
            liger_tvd_with_logits,
            reduction=reduction,
            temperature=temperature,
            ignore_index=ignore_index,
            inplace=inplace,
        )
