from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from liger_chunked.integrations.transformers import detect
from liger_chunked.integrations.transformers.balance import balance_of
from liger_chunked.integrations.transformers.detect import STOCK
from liger_chunked.integrations.transformers.head_facts import head_facts, with_ignore_index
from liger_chunked.integrations.transformers.head_input import HeadInput
from liger_chunked.integrations.transformers.lm_head import lock_of


def run_backbone(model: PreTrainedModel, forward: Callable[..., Any] | None = None, /, **kwargs: Any) -> HeadInput:
    """Run the backbone as `forward` would, by default the class's."""
    facts = head_facts(model, forward)
    if facts.foreign and (used := [name for name in facts.of_forward if kwargs.get(name) is not None]):
        raise ValueError(
            f"head_fn cannot take {', '.join(used)}: only the forward of {type(model).__name__} reads this, and "
            "head_fn replaces the end of that forward"
        )
    labels, shift_labels = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
    num_items = kwargs.pop("num_items_in_batch", None)
    if isinstance(num_items, int):  # the losses clamp a tensor without a synchronization
        num_items = max(num_items, 1)
    logits_to_keep = kwargs.pop("logits_to_keep", 0)
    options = with_ignore_index(facts.options, kwargs.pop("ignore_index", -100))
    balance = balance_of(model)
    if balance is not None and not balance.asked(model, kwargs.get("output_router_logits")):
        balance = None
    if balance is not None:
        if balance.refusal is not None:
            raise ValueError(
                f"the load-balancing loss of {type(model).__name__} cannot be computed: {balance.refusal}; pass "
                "output_router_logits=False, or set it so in the config, to train without it"
            )
        kwargs["output_router_logits"] = True
    kwargs.setdefault("use_cache", False)
    kwargs["return_dict"] = True
    if facts.nested:
        outputs = _without_head(model, forward or type(model).forward, kwargs)
    else:
        for name in facts.dropped:
            kwargs.pop(name, None)
        for name, value in facts.constants:
            kwargs.setdefault(name, value)
        if facts.backbone_takes_labels:
            kwargs["labels"] = labels
        outputs = detect.backbone_of(model)(**kwargs)
    aux_loss: Any = None
    aux_loss_coef = 0.0
    if balance is not None:
        aux_loss, aux_loss_coef = balance.loss(model, outputs, kwargs.get("attention_mask")), balance.coefficient(model)
    hidden_states = kept(outputs.last_hidden_state, logits_to_keep)
    return HeadInput(hidden_states, options, outputs, labels, shift_labels, num_items, aux_loss, aux_loss_coef)


class _Recorder(nn.Module):
    """Replaces `lm_head`: records and returns its input, but computes logits in other threads."""

    def __init__(self, lm_head: nn.Module) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.reached: list[Tensor] = []
        self.real = (lm_head,)  # a tuple, not a submodule

    @property
    def weight(self) -> Any:  # some forwards read its dtype
        return self.real[0].weight

    def forward(self, hidden_states: Tensor) -> Tensor:
        if threading.get_ident() != self.thread:
            return self.real[0](hidden_states)
        self.reached.append(hidden_states)
        return hidden_states


@torch.compiler.disable(reason="the head is in a model inside this one")
def _without_head(model: PreTrainedModel, forward: Callable[..., Any], kwargs: dict[str, Any]) -> ModelOutput:
    """Return the hidden states, if the head is in a causal model inside this one."""
    lm_head = model.get_output_embeddings()
    owner, name = next((m, n) for m in model.modules() for n, child in m._modules.items() if child is lm_head)
    with lock_of(lm_head):
        owner._modules[name] = recorder = _Recorder(lm_head)
        try:
            outputs = getattr(forward, STOCK, forward)(model, **kwargs)
        finally:
            owner._modules[name] = lm_head
    fields = {name: x for name, x in outputs.items() if name not in ("loss", "logits")}
    (hidden_states,) = recorder.reached
    return ModelOutput(last_hidden_state=hidden_states, **fields)


def kept(hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Select the last positions (int; 0: all), (K,) for all samples, (B, K), or a mask (B, T)."""
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:] if logits_to_keep else hidden_states
    if logits_to_keep.ndim < 2:
        return hidden_states[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    return hidden_states.take_along_dim(logits_to_keep[..., None], dim=1)
