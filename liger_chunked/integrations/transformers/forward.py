"""The one forward that every patched model gets: its own, or a `head_fn`, or its own with head and loss fused."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from liger_chunked.integrations.transformers.head import (
    HeadFn,
    HeadInput,
    arguments,
    backbone_of,
    inner_model,
    run_backbone,
    run_head,
)
from liger_chunked.integrations.transformers.patches import Patches, forward_slot
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss
from liger_chunked.types import Head

_STATE = "_liger_forward"


@dataclass
class ForwardState:
    """What was taught to a model, or to a class of models.

    - `users`: who asked for it; the last one to leave puts the model's own forward back
    - `fused`: the output class of a model whose head and loss are fused in training, otherwise None
    """

    patches: Patches
    users: set[str] = field(default_factory=set)
    fused: type[ModelOutput] | None = None


def _fused_loss(model: PreTrainedModel, output: type[ModelOutput], token_accuracy: bool, **kwargs: Any) -> ModelOutput:
    """What `model.forward` returns for labels, without logits."""
    input = run_backbone(model, **kwargs)

    def cross_entropy(head: Head, input: HeadInput) -> Any:
        options = input.options
        loss = LigerFusedLinearCrossEntropyLoss(
            ignore_index=options.ignore_index,
            softcap=options.softcap,
            logit_scale=options.logit_scale,
            return_token_accuracy=token_accuracy,
        )
        return loss(head.weight, input.hidden_states, input.target, head.bias, num_items=input.num_items_in_batch)

    loss = run_head(model, input, cross_entropy)
    metrics = None
    if token_accuracy:
        loss, metrics = loss
    if input.aux_loss is not None:
        loss = loss + model.config.get_text_config().router_aux_loss_coef * input.aux_loss.to(loss.device)
    shared = {f.name: input.outputs[f.name] for f in fields(output) if f.name in input.outputs}
    if input.aux_loss is not None:
        shared["aux_loss"] = input.aux_loss
    result = output(loss=loss, **shared)
    if metrics is not None:
        result["token_accuracy"] = metrics.token_accuracy
    return result


def _fuses(model: PreTrainedModel, skip_logits: bool | None, kwargs: dict[str, Any]) -> bool:
    labelled = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
    if skip_logits and not labelled:
        raise ValueError("skip_logits=True needs labels= or shift_labels=: there is nothing else to return")
    return labelled and (model.training if skip_logits is None else skip_logits)


def _taught(stock: Callable) -> Callable:
    """`stock`, a `forward` of some class, that also knows `head_fn` and, where the loss is fused, `skip_logits`."""
    if _STATE in vars(stock):
        return stock

    # The signature stays: generate and Trainer read it.
    @functools.wraps(stock)
    def forward(self: PreTrainedModel, *args: Any, head_fn: HeadFn | None = None, **kwargs: Any) -> Any:
        kwargs = arguments(self, args, kwargs)
        if head_fn is not None:
            return run_head(self, run_backbone(self, **kwargs), head_fn)
        state = getattr(self, _STATE, None)
        if state is not None and state.fused is not None:
            skip_logits = kwargs.pop("skip_logits", None)
            token_accuracy = kwargs.pop("return_token_accuracy", False)
            if _fuses(self, skip_logits, kwargs):
                return _fused_loss(self, state.fused, token_accuracy, **kwargs)
        return stock(self, **kwargs)

    vars(forward)[_STATE] = stock
    return forward


def teach(owner: PreTrainedModel | type[PreTrainedModel], user: str) -> ForwardState:
    """Give a model, or every model of a class, the forward that knows `head_fn`, on behalf of `user`."""
    if _STATE not in vars(owner):
        state = ForwardState(Patches())
        if isinstance(owner, type):
            state.patches.set(owner, "forward", _taught(owner.forward))
        else:
            slot = forward_slot(owner)
            own = vars(owner).get(slot)
            stock = type(owner).forward if own is None else own.__func__
            state.patches.set(owner, slot, types.MethodType(_taught(stock), owner))
        state.patches.set(owner, _STATE, state)
    state = vars(owner)[_STATE]
    state.users.add(user)
    return state


def unteach(owner: PreTrainedModel | type[PreTrainedModel], user: str) -> None:
    """Undo `teach` on behalf of `user`; nothing where it was not asked for."""
    state = vars(owner).get(_STATE)
    if state is None:
        return
    state.users.discard(user)
    if not state.users:
        state.patches.undo()


def attach_head(model: nn.Module) -> None:
    """Let `model(..., head_fn=fn)` run `fn(head, input)` in place of head and loss, and return what it returns.

    Calls without `head_fn` stay as they were. `fn` gets `Head` and `HeadInput`, runs inside `model.forward` (and so
    under the hooks of DDP, FSDP, ZeRO and autocast), and may return any nest of tensors. `labels` and `shift_labels`
    given to the call arrive in `HeadInput`, padded where PEFT prepends virtual tokens.

    Args:
        model: a transformers model with an `lm_head`, or what wraps one (PEFT, DDP, FSDP, DeepSpeed).

    Raises:
        TypeError: there is no transformers model in it.
        ValueError: that model has no backbone with an `lm_head`, or an `lm_head` that is more than weight and bias.
    """
    inner = inner_model(model)
    backbone_of(inner)
    teach(inner, "head_fn")


def detach_head(model: nn.Module) -> None:
    """Undo `attach_head`."""
    unteach(inner_model(model), "head_fn")
