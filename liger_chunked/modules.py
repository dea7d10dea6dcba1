"""The loss of logits as a module, with the parameter names of those that it replaces. Layers: `layers/`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from liger_chunked.calls import FixedSettings, typed_like
from liger_chunked.kernels.cross_entropy import liger_cross_entropy


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
