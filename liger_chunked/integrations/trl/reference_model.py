"""Log-probabilities of the reference, from whichever model a trainer has for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter


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
