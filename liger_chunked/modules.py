"""Losses of logits and a head as modules, with the parameter names of those that they replace. Layers: `layers/`."""

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
from liger_chunked.private import HOOKS, hooks_of
from liger_chunked.types import LogitOptions, described


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
