"""Base kernels and a head as modules, with the parameter names of those that they replace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, overload

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from liger_chunked.calls import typed_like
from liger_chunked.dtensor import any_dtensor
from liger_chunked.engine import linear_token_stats
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
from liger_chunked.private import HOOKS, SHOWS_HOOKS, global_forward_hooks, has_children, hooks_of
from liger_chunked.types import LogitOptions, described, shown

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
        offset: added to the weight, initially `1 - offset`; Gemma uses 1.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, *, offset: float = 0.0, casting: Casting = "llama") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), 1.0 - offset))
        self.variance_epsilon = eps
        self.offset = offset
        self.casting: Casting = casting

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return liger_rms_norm(
            x, self.weight, self.variance_epsilon, offset=self.offset, casting=self.casting, residual=residual
        )

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def extra_repr(self) -> str:
        return (
            f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}, offset={self.offset}, casting={self.casting!r}"
        )


class LigerLayerNorm(nn.Module):
    """LayerNorm; see `liger_layer_norm`."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return liger_layer_norm(x, self.weight, self.bias, self.eps)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, bias={self.bias is not None}"


def unobserved(*projections: nn.Module) -> bool:
    """Whether no forward hook, global or local, can keep outputs."""
    if not SHOWS_HOOKS or global_forward_hooks():
        return False
    for projection in projections:
        # Most projections have no modules inside, and listing one takes as long as a launch.
        for module in projection.modules() if has_children(projection) else (projection,):
            if module._forward_hooks:
                return False
    return True


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
    name = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if name not in known:
        raise ValueError(f"hidden_act must be one of {known}, got {shown(name)}")
    return str(name)


class LigerSwiGLUMLP(_GatedMLP):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`, with the parameters of `LlamaMLP`.

    Args:
        config: has `hidden_size`, `intermediate_size`, `hidden_act` (silu), and optionally `mlp_bias`.
        intermediate_size: overrides the configuration's.
    """

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        _activation_name(config, _SILU)
        super().__init__(config, intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(liger_swiglu(self.gate_proj(x), self.up_proj(x), inplace=self._inplace))

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerGEGLUMLP(_GatedMLP):
    """`down_proj(gelu(gate_proj(x)) * up_proj(x))`, with the parameters of `GemmaMLP`.

    `config` is as in `LigerSwiGLUMLP`, with a gelu; `hidden_activation` may replace `hidden_act`.
    """

    def __init__(self, config: Any) -> None:
        approximate = _GELU[_activation_name(config, tuple(_GELU))]
        super().__init__(config)
        self.approximate: Literal["tanh", "none"] = approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(liger_geglu(self.gate_proj(x), self.up_proj(x), self.approximate, inplace=self._inplace))

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


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

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LigerKLDIVLoss(nn.Module):
    """`nn.KLDivLoss`; see `liger_kl_div`."""

    def __init__(
        self, reduction: Literal["none", "sum", "mean", "batchmean"] = "mean", log_target: bool = False
    ) -> None:
        super().__init__()
        self.reduction: Reduction = reduction
        self.log_target = log_target

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return liger_kl_div(input, target, reduction=self.reduction, log_target=self.log_target)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerJSD(nn.Module):
    """Jensen-Shannon divergence of log-probabilities; see `liger_jsd`."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        self.beta = beta
        self.ignore_index = ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return liger_jsd(log_q, log_p, shift_labels, beta=self.beta, ignore_index=self.ignore_index)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerTVDLoss(nn.Module):
    """Total variation distance of probabilities; see `liger_tvd`."""

    def __init__(
        self, reduction: Literal["none", "sum", "mean", "batchmean"] = "batchmean", ignore_index: int = -100
    ) -> None:
        super().__init__()
        self.reduction: Reduction = reduction
        self.ignore_index = ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return liger_tvd(p, q, shift_labels, reduction=self.reduction, ignore_index=self.ignore_index)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


Reduction: TypeAlias = Literal["none", "sum", "mean", "batchmean"]


class _DivergenceWithLogits(nn.Module):
    def __init__(self, function: Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        self._function = function
        self.options = options

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return self._function(student_logits, teacher_logits, shift_labels, **self.options)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

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


class _HeadOptions(TypedDict, total=False):
    ignore_index: int
    softcap: float | None
    logit_scale: float
    logits_budget: int | float | str | None
    logits_dtype: torch.dtype | None


class ChunkedLMHead(nn.Linear):
    """An `nn.Linear` that returns log-probabilities and entropies if it gets labels, without all logits in memory.

    All runs in its forward, so hooks of FSDP, DDP and ZeRO apply. The options, see `LogitOptions`, do not change
    returned logits.

    >>> head = ChunkedLMHead(4, 11)
    >>> stats = head(torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]]), temperature=0.7)
    >>> stats["logps"].shape, stats["entropy"][1, 2].item()
    (torch.Size([2, 3]), 0.0)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ignore_index: int = -100,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        logits_budget: int | float | str | None = None,
        logits_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.options = LogitOptions(
            ignore_index=ignore_index,
            softcap=softcap,
            logit_scale=logit_scale,
            logits_budget=logits_budget,
            logits_dtype=logits_dtype,
        )

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Unpack[_HeadOptions]) -> Self:
        """Return a head with the parameters of `linear`, the same objects.

        Convert before FSDP or an adapter wraps the model.

        Raises:
            TypeError: `linear` is not plain, but for example quantized or adapted.
            ValueError: `linear` has hooks, which the new head would lose.
        """
        _check_plain_linear(linear)
        head = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta", **options)
        head.weight, head.bias = linear.weight, linear.bias
        return head.train(linear.training)

    @overload
    def forward(self, hidden: Tensor, labels: None = None, temperature: float | Tensor = 1.0) -> Tensor: ...

    @overload
    def forward(self, hidden: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> dict[str, Tensor]: ...

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, temperature: float | Tensor = 1.0
    ) -> Tensor | dict[str, Tensor]:
        """Return {"logps": ..., "entropy": ...} in the labels' shape, differentiable; logits without labels.

        Args:
            hidden: (B, T, H) or (N, H).
            labels: (B, T) or (N,) ids that `hidden` predicts (see `shifted`). Ignored tokens have 0.
            temperature: a number, or a tensor of one value or in the labels' shape.
        """
        if labels is None:
            return super().forward(hidden)
        logps, entropy = logps_and_entropy(self, hidden, labels, temperature, self.options)
        return {"logps": logps, "entropy": entropy}

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.options}"


def _check_plain_linear(linear: Any) -> None:
    kind = type(linear)
    if kind not in (nn.Linear, ChunkedLMHead) or "forward" in vars(linear):
        advice = "dequantize a quantized head, merge an adapter, and convert the head before FSDP or hooks wrap it"
        own = ", with a forward of its own" if kind in (nn.Linear, ChunkedLMHead) else ""
        raise TypeError(f"linear must be an nn.Linear, got a {kind.__module__}.{kind.__qualname__}{own}: {advice}")
    weight = linear.weight
    plain = any_dtensor([weight]) or type(weight) in (nn.Parameter, Tensor)
    if not plain or not weight.is_floating_point():
        raise TypeError(f"linear.weight must be a plain floating-point tensor, got {described(weight)}: dequantize it")
    hooked = [slot for slot in HOOKS if hooks_of(linear, slot)]
    if hooked:
        raise ValueError(f"linear must have no hooks, which the new head would lose, got {', '.join(hooked)}")


def logps_and_entropy(
    head: nn.Linear, hidden: Tensor, labels: Tensor, temperature: float | Tensor, options: LogitOptions
) -> tuple[Tensor, Tensor]:
    """Return both at `temperature`, as in `ChunkedLMHead.forward`, not at that of `options`."""
    if isinstance(temperature, Tensor) and temperature.is_floating_point():
        temperature = temperature.item() if temperature.numel() == 1 else temperature.float()
    settings: dict[str, Any] = asdict(options) | {"temperature": temperature}
    stats = linear_token_stats(head.weight, hidden, labels, head.bias, outputs=("logps", "entropy"), **settings)
    assert stats.logps is not None and stats.entropy is not None
    return stats.logps, stats.entropy
