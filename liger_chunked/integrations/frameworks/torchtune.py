"""torchtune, from 0.7.

Run with torchtune, commit bd2a0fc.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torchtune.modules.loss import SFTLoss

from liger_chunked.calls import typed_like
from liger_chunked.integrations.tensor_parallel import call_in_forward
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss

__all__ = ["FusedLinearCrossEntropyLoss"]


class FusedLinearCrossEntropyLoss(SFTLoss, nn.Module):
    """The mean cross entropy of tokens, in place of torchtune's `LinearCrossEntropyLoss`.

    It runs inside the forward of the output layer, or of the embedding that a `TiedLinear` names, with FSDP's hooks.
    Raises ValueError under tensor parallelism.
    """

    def __init__(self, ignore_index: int = -100, logits_budget: int | str | None = None) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.logits_budget = logits_budget
        self._owner: tuple[nn.Module, ...] = ()  # a tuple, not a submodule

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> FusedLinearCrossEntropyLoss:
        return self

    def set_model_output(self, model: Any) -> None:
        model.skip_output_layer = True
        self._owner = (getattr(model.output, "tied_module", model.output),)

    def patch_tp_plan(self, tp_plan: Any) -> Any:
        raise ValueError("tensor_parallel_dim must be 1: this loss needs whole rows of hidden states and labels")

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not self._owner:
            raise ValueError("the model must be set before the first call: call set_model_output")
        (owner,) = self._owner
        return call_in_forward(owner, self._mean_of_tokens, outputs, targets)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def _mean_of_tokens(self, outputs: Tensor, targets: Tensor) -> Tensor:
        (head,) = self._owner
        weight: Any = head.weight
        bias: Any = getattr(head, "bias", None)
        settings: Any = {"ignore_index": self.ignore_index, "logits_budget": self.logits_budget}
        loss = LigerFusedLinearCrossEntropyLoss(**settings)(weight, outputs, targets, bias)
        assert isinstance(loss, Tensor)
        return loss
