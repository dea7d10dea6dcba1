"""The reference: none for a loss that refuses one, otherwise whichever model a trainer has for it."""

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

# What a trainer makes of its reference.
_SETTINGS = ("precompute_ref_log_probs", "sync_ref_model")
# Given for a reference model, it keeps a trainer from loading one.
_NONE: Any = object()


class ReferenceMixin(LigerTrainerMixin):
    """Over a trainer that keeps a reference model: it loads none for a loss that refuses one.

    Raises:
        ValueError: a reference model, or a setting of one, for such a loss.
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
        # A loss of another kind is refused by the mixin above.
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
    """The trainer's reference model, or its policy with the adapter "ref" where there is one and none otherwise."""
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    policy = trainer.accelerator.unwrap_model(trainer.model)
    with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
        yield trainer.model


@torch.no_grad()
def reference_logps(trainer: Any, inputs: dict[str, Any], labels: Tensor) -> Tensor:
    """(B, T - 1) log-probability under the reference of each label, in nats, zero where it is -100."""
    args = trainer.args.gradient_checkpointing_kwargs
    with disable_gradient_checkpointing(trainer.model, args), reference_of(trainer) as reference:
        logps = reference(**inputs, labels=labels, fused_lm_head=True).log_probs
    return logps[:, 1 - labels.shape[1] :]
