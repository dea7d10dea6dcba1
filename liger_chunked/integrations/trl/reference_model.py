"""The reference model of a trainer. A loss that rejects one has none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from liger_chunked.integrations.trl.mixin import LigerTrainerMixin

# Config fields that only apply to a reference model.
_SETTINGS = ("precompute_ref_log_probs", "sync_ref_model")
# Passed as the reference model, it keeps a trainer from loading one.
_NONE: Any = object()


class ReferenceMixin(LigerTrainerMixin):
    """For a trainer with a reference model: loads none if the loss rejects one.

    Raises:
        ValueError: there is a reference model, or a setting for one, and the loss rejects one.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        ref_model: PreTrainedModel | None = None,
        args: Any = None,
        *others: Any,
        loss: Any = None,
        **kwargs: Any,
    ) -> None:
        # `LigerTrainerMixin` rejects a loss of another class.
        if self.loss_kind is not None and isinstance(loss, self.loss_kind) and loss.use_ref_model is False:
            given = ["a ref_model"] if ref_model is not None else []
            given += [f"{name}=True" for name in _SETTINGS if getattr(args, name, False)]
            if given:
                raise ValueError(f"{type(loss).__name__} takes no reference, got {' and '.join(given)}")
            ref_model = _NONE
        super().__init__(model, ref_model, args, *others, loss=loss, **kwargs)

    @property
    def ref_model(self) -> Any:
        return self._ref_model

    @ref_model.setter
    def ref_model(self, model: Any) -> None:
        self._ref_model = None if model is _NONE else model


@contextmanager
def reference_of(trainer: Any) -> Iterator[nn.Module]:
    """Yield the reference model, or the policy with the adapter "ref" if it exists, and without adapters otherwise."""
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    policy = trainer.accelerator.unwrap_model(trainer.model)
    with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
        yield trainer.model


@torch.no_grad()
def reference_logps(trainer: Any, inputs: dict[str, Any], labels: Tensor) -> Tensor:
    """(B, T - 1) the reference's log-probability of each label in nats, zero where the label is -100."""
    args = trainer.args.gradient_checkpointing_kwargs
    with disable_gradient_checkpointing(trainer.model, args), reference_of(trainer) as reference:
        logps = reference(**inputs, labels=labels, fused_lm_head=True).log_probs
    return logps[:, 1 - labels.shape[1] :]
