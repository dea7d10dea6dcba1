"""Base kernels and a head as modules, with the parameter names of those that they replace."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from liger_chunked.calls import FixedSettings, typed_like
from liger_chunked.dtensor import any_dtensor
from liger_chunked.engine import linear_token_stats
from liger_chunked.kept_ids import KeptIds
from liger_chunked.kernels.cross_entropy import liger_cross_entropy
from liger_chunked.kernels.glu import liger_geglu, liger_swiglu
from liger_chunked.kernels.layer_norm import liger_layer_norm
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
    """RMSNorm with a trainable weight (Zhang and Sennrich 2019, equation 4), computed in float32.

        x/rms(x) * (offset + weight),    rms(x) = sqrt(mean(x**2) + eps)

    Args:
        hidden_size: D, the columns of a row; `weight` is a float32 parameter (D,), initially `1 - offset`.
        eps: added to the mean square of each row.
        offset: added to the weight in float32; Gemma uses 1.
        casting: "llama" rounds `x / rms(x)` to the dtype of `x` before it multiplies by the weight. "gemma" and
            "olmo2", which mean the same here, round only the product.

    >>> norm = LigerRMSNorm(64)
    >>> y, total = norm(torch.randn(2, 5, 64), residual=torch.randn(2, 5, 64))
    >>> y.shape, total.shape
    (torch.Size([2, 5, 64]), torch.Size([2, 5, 64]))
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
        """Return the norm of `x`, or `(norm, sum)` of `x + residual`.

        Args:
            x: (..., D), floating-point, rows in any layout.
            residual: (..., D), with the dtype and device of `x`. None: the norm of `x` alone.

        Returns:
            The norm (..., D). Its dtype is that of `x`; with casting "llama", the wider dtype of `x` and the weight.
            With `residual` the tuple (norm, sum), where the sum `x + residual` has the dtype of `x`.

        Raises:
            TypeError: `x` is no plain floating-point tensor, or `residual` has another dtype.
            ValueError: `x` has another number of columns than D, `residual` another shape than `x`, or a device
                differs.
            NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode
                autograd.
        """
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
    """LayerNorm with trainable weight and bias: `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, in float32.

    Args:
        hidden_size: D, the columns of a row; `weight` and `bias` are float32 parameters (D,), initially 1 and 0.
        eps: added to the variance of each row.
        bias: False leaves out the bias.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the LayerNorm of the rows of `x`.

        Args:
            x: (..., D), floating-point, rows in any layout.

        Returns:
            (..., D), contiguous, in the dtype of `x`.

        Raises:
            TypeError: `x` is no plain floating-point tensor.
            ValueError: `x` has another number of columns than D, or is on another device than the weight.
            NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode
                autograd.
        """
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
        config: an object with `hidden_size` (H), `intermediate_size` (I), `hidden_act` or else `hidden_activation`
            ("silu" or "swish"), and optionally `mlp_bias` (whether the three projections have a bias; False).
        intermediate_size: I, instead of the configuration's. None: the configuration's.
    """

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        _activation_name(config, _SILU)
        super().__init__(config, intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer.

        Unless forward hooks may keep them, the backward overwrites the outputs of `gate_proj` and `up_proj`.

        Args:
            x: (..., H), in the dtype of the projections, or in any under autocast.

        Returns:
            (..., H), in the dtype that `down_proj` returns.

        Raises:
            TypeError: a projection returns no plain floating-point tensor, such as a DTensor.
            ValueError: the projections' outputs differ in shape or device.
            NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode
                autograd.
        """
        return self.down_proj(liger_swiglu(self.gate_proj(x), self.up_proj(x), inplace=self._inplace))

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerGEGLUMLP(_GatedMLP):
    """`down_proj(gelu(gate_proj(x)) * up_proj(x))`, with the parameters of `GemmaMLP`.

    Args:
        config: an object with `hidden_size` (H), `intermediate_size` (I), `hidden_act` or else `hidden_activation`
            ("gelu", the error function; "gelu_new", "gelu_pytorch_tanh" or "gelu_python_tanh", its tanh approximation),
            and optionally `mlp_bias` (whether the three projections have a bias; False).
    """

    def __init__(self, config: Any) -> None:
        approximate = _GELU[_activation_name(config, tuple(_GELU))]
        super().__init__(config)
        self.approximate: Literal["tanh", "none"] = approximate

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer.

        Unless forward hooks may keep them, the backward overwrites the outputs of `gate_proj` and `up_proj`.

        Args:
            x: (..., H), in the dtype of the projections, or in any under autocast.

        Returns:
            (..., H), in the dtype that `down_proj` returns.

        Raises:
            TypeError: a projection returns no plain floating-point tensor, such as a DTensor.
            ValueError: the projections' outputs differ in shape or device.
            NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode
                autograd.
        """
        return self.down_proj(liger_geglu(self.gate_proj(x), self.up_proj(x), self.approximate, inplace=self._inplace))

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerCrossEntropyLoss(FixedSettings):
    """Cross entropy of logits in nats: `F.cross_entropy` in float32, without a float32 copy of the logits.

    With target `y`, transformed logits `z`, `lse = logsumexp(z)` and `s = label_smoothing`, a token's loss is

        (1 - s) w_y (lse - z_y) + s/V sum_v w_v (lse - z_v) + lse_square_scale lse**2

    Args:
        weight: (V,), floating-point class weights `w`, without gradient; kept as a buffer outside of checkpoints. None:
            1.
        ignore_index: the target of rows that add nothing to the loss and have no gradient.
        reduction: "mean" divides the cross entropy by the sum of `w_y`, the last term (z-loss) by the valid tokens; 0
            without any. "sum" divides by nothing. "none" returns one loss a token, 0 at ignored ones.
        label_smoothing: `s`, the share of the target that is spread over all classes, in [0, 1].
        lse_square_scale: weight of the z-loss (PaLM, https://arxiv.org/abs/2204.02311, section 5), finite and not
            negative; 0: none.
        softcap: positive `c` of the transform `z = c tanh(logit_scale x / c)` of logits `x`. None: `z = logit_scale x`.
        logit_scale: finite factor of the logits, before the softcap.
        inplace: let the backward write its gradient over `logits`, unless they are expanded or the call is compiled. A
            second backward raises.

    The call checks the options, not the constructor.
    """

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
        self._fixed = frozenset((*self.options, "options"))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the cross entropy of `logits` and `target`.

        Args:
            logits: (..., V), floating-point, at least two dimensions. Rows without a uniform stride are copied.
            target: (...), integer class indices in [0, V), or `ignore_index`. On a CPU others raise. On a GPU nothing
                checks them: the loss is infinite, or with class weights the device may assert.

        Returns:
            The loss, (), or (...) with reduction "none"; float32, or float64 for float64 logits. It is differentiable
            by `logits`.

        Raises:
            TypeError: `logits` or the class weights are no plain floating-point tensor, `target` holds no integers, or
                an option is no number.
            ValueError: shapes or devices do not fit, the class weights require a gradient, an option is out of range,
                or on a CPU a target is.
            NotImplementedError: a tensor is under a transform of `torch.func`, or has a tangent of forward-mode
                autograd.
        """
        return liger_cross_entropy(logits, target, self.weight, **self.options)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class _HeadOptions(TypedDict, total=False):
    ignore_index: int
    softcap: float | None
    logit_scale: float
    logits_budget: int | float | str | None
    logits_dtype: torch.dtype | None


class ChunkedLMHead(nn.Linear):
    """An `nn.Linear` that returns log-probabilities and entropies if it gets labels, without all logits in memory.

    All runs in its forward, so hooks of FSDP, DDP and ZeRO apply. With labels, the logits are `x` transformed to
    `softcap * tanh(logit_scale * x / softcap) / temperature`, or without a softcap to `logit_scale * x / temperature`.
    The options do not change logits that a call without labels returns.

    Args:
        in_features: H, the columns of hidden states.
        out_features: V, the size of the vocabulary; `weight` is (V, H).
        bias: whether there is a bias (V,).
        device: of the parameters. None: torch's default.
        dtype: of the parameters. None: torch's default.
        ignore_index: the label of tokens to skip.
        softcap: positive, Gemma's `final_logit_softcapping`. None: no softcap.
        logit_scale: Cohere's `logit_scale`, Granite's `1 / logits_scaling`.
        logits_budget: most bytes of logits in memory: a number, or a string such as "512MiB". None: automatic.
        logits_dtype: torch.float32 keeps the float32 sums of 16-bit products. None: they are rounded to the products'
            dtype.

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

        Args:
            linear: an `nn.Linear` with a floating-point weight (V, H).
            **options: `ignore_index`, `softcap`, `logit_scale`, `logits_budget` and `logits_dtype` of the constructor.

        Returns:
            A `ChunkedLMHead` in the mode, training or evaluation, of `linear`.

        Raises:
            TypeError: `linear` is not plain, but for example quantized or adapted.
            ValueError: `linear` has hooks, which the new head would lose, or an option is out of range.
        """
        _check_plain_linear(linear)
        head = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta", **options)
        head.weight, head.bias = linear.weight, linear.bias
        return head.train(linear.training)

    @overload
    def forward(
        self, input: Tensor, labels: None = None, temperature: float | Tensor = 1.0, *, kept: KeptIds | None = None
    ) -> Tensor: ...

    @overload
    def forward(
        self, input: Tensor, labels: Tensor, temperature: float | Tensor = 1.0, *, kept: KeptIds | None = None
    ) -> dict[str, Tensor]: ...

    def forward(
        self,
        input: Tensor,
        labels: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        *,
        kept: KeptIds | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Return log-probabilities of the labels, and entropies; without labels, the logits.

        Args:
            input: (B, T, H) or (N, H), hidden states in the dtype of `weight`, or in any under autocast.
            labels: (B, T) or (N,), integer ids that `input` predicts (shift them, see `shifted`), or `ignore_index`.
                None: the call is that of `nn.Linear`.
            temperature: positive divisor of the logits: a number, a floating-point tensor of one value, which is read
                and so waits for the device, or one in the shape of `labels`. Not read without labels.
            kept: the ids that a sampler kept at each position of `labels`, see `KeptIds`: both statistics are of the
                softmax over these. Not read without labels. None: the whole vocabulary.

        Returns:
            {"logps": ..., "entropy": ...}, each in the shape of `labels`, in nats, 0 at ignored tokens, differentiable
            by `input` and the parameters; float32, or float64 for float64 hidden states. Without labels the logits
            (B, T, V) or (N, V), in the dtype that `nn.Linear` returns.

        Raises:
            TypeError: `input` or `labels` has the wrong type or dtype, or `temperature` is a tensor of integers.
            ValueError: shapes or devices do not fit, a label is outside of the vocabulary, or `temperature` is not
                positive.
        """
        if labels is None:
            return super().forward(input)
        logps, entropy = logps_and_entropy(self, input, labels, temperature, self.options, kept)
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
    head: nn.Linear,
    hidden: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    options: LogitOptions,
    kept: KeptIds | None = None,
) -> tuple[Tensor, Tensor]:
    """Return both at `temperature`, as in `ChunkedLMHead.forward`, not at that of `options`."""
    if isinstance(temperature, Tensor) and temperature.is_floating_point():
        temperature = temperature.item() if temperature.numel() == 1 else temperature.float()
    settings: dict[str, Any] = asdict(options) | {"temperature": temperature, "kept": kept}
    stats = linear_token_stats(head.weight, hidden, labels, head.bias, outputs=("logps", "entropy"), **settings)
    assert stats.logps is not None and stats.entropy is not None
    return stats.logps, stats.entropy
