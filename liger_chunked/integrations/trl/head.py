"""The head inside its model."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from liger_chunked.types import Head, LogitOptions


@dataclass(frozen=True)
class HeadInput:
    hidden_states: Tensor
    options: LogitOptions
    labels: Tensor | None = None
    shift_labels: Tensor | None = None
    num_items_in_batch: int | Tensor | None = None
    aux_loss: Tensor | None = None

    @property
    def target(self) -> Tensor:
        if self.shift_labels is not None:
            return self.shift_labels
        assert self.labels is not None
        return F.pad(self.labels[..., 1:], (0, 1), value=-100)


HeadFn = Callable[[Head, HeadInput], Any]


def logit_options(model: Any) -> LogitOptions:
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None)
    scaling = getattr(config, "logits_scaling", None)
    if scale is None and scaling is not None:
        scale = 1 / scaling
    return LogitOptions(softcap=softcap, logit_scale=1.0 if scale is None else scale)


def inner_model(model: Any) -> PreTrainedModel:
    while not isinstance(model, PreTrainedModel):
        if isinstance(inner := getattr(model, "module", None), nn.Module):
            model = inner
        else:
            model = model.get_base_model()
    return model


def _head(model: PreTrainedModel) -> Head:
    head = model.get_output_embeddings()
    if getattr(head, "lora_A", {}):
        raise ValueError("lm_head is computed by LoRA")
    weight, bias = head.weight, head.bias
    if isinstance(weight, DTensor):
        weight, bias = weight.full_tensor(), None if bias is None else bias.full_tensor()
    return Head(weight, bias)


def attach_head(model: PreTrainedModel) -> None:
    original_forward = model.forward
    text_config = model.config.get_text_config()
    options = logit_options(model)

    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, head_fn: HeadFn | None = None, **kwargs: Any) -> Any:
        if head_fn is None:
            return original_forward(*args, **kwargs)
        names = ("labels", "shift_labels", "num_items_in_batch")
        given = {name: kwargs.pop(name, None) for name in names}
        kwargs["use_cache"] = False
        if getattr(text_config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        outputs = self.base_model(*args, **kwargs)
        aux_loss = None
        if kwargs.get("output_router_logits"):
            aux_loss = load_balancing_loss_func(
                outputs.router_logits,
                text_config.num_experts,
                text_config.num_experts_per_tok,
                kwargs.get("attention_mask"),
            )
        return head_fn(_head(self), HeadInput(outputs.last_hidden_state, options, aux_loss=aux_loss, **given))

    model.forward = types.MethodType(forward, model)
