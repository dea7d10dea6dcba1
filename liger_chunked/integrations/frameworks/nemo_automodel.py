"""NeMo-Automodel, from 0.7: its loss on hidden states.

Run with NeMo-Automodel 0.7.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy
from torch import Tensor

from liger_chunked.calls import typed_like
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss

__all__ = ["FusedLinearCrossEntropy"]


class FusedLinearCrossEntropy(LinearCrossEntropy):
    """Replaces NeMo-Automodel's class of this name; needs no `cut_cross_entropy`.

    A DTensor weight is gathered. `impl` is not used.
    """

    def __init__(
        self, ignore_index: int = -100, logit_softcapping: float = 0, reduction: str = "sum", impl: str = "cce"
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.logit_softcapping = logit_softcapping
        self.reduction = reduction

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        lm_weight: Tensor,
        num_label_tokens: int | None = None,
        grad_reduce_group: Any = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of hidden states (B, T, H) and shifted labels (B, T).

        `num_label_tokens` and `loss_weights` need the reduction "sum".
        """
        for name, value in (("num_label_tokens", num_label_tokens), ("loss_weights", loss_weights)):
            if value is not None and self.reduction != "sum":
                raise ValueError(f"reduction must be 'sum' with {name}, got {self.reduction!r}")
        settings: Any = {"reduction": self.reduction, "ignore_index": self.ignore_index}
        loss = LigerFusedLinearCrossEntropyLoss(**settings, softcap=self.logit_softcapping or None)(
            self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group),
            hidden_states,
            labels,
            token_weights=loss_weights,
        )
        assert isinstance(loss, Tensor)
        return loss if num_label_tokens is None else loss / max(num_label_tokens, 1)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
