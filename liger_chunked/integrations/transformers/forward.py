"""The one forward that every patched model gets: its own, or a `head_fn`, or its own with head and loss fused."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput, can_return_tuple

from liger_chunked.integrations.transformers.head import (
    HeadFn,
    HeadInput,
    arguments,
    backbone_of,
    inner_model,
    projections,
    run_backbone,
    run_head,
)
from liger_chunked.integrations.transformers.patches import Patches, forward_slot
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss
from liger_chunked.types import Head

_STATE = "_liger_forward"


@dataclass(frozen=True)
class FusedLoss:
    """How head and loss are fused: what `model.forward` returns, and the most bytes of logits alive at once."""

    output: type[Any]
    logits_budget: int | None = None


@dataclass
class ForwardState:
    """Why a model, or a class of models, has our forward, and how to put its own back.

    - `head_fn`: it was asked to know that keyword
    - `fused`: how head and loss are fused in training; None for not at all
    """

    patches: Patches
    head_fn: bool = False
    fused: FusedLoss | None = None


@can_return_tuple
def _without_logits(model: PreTrainedModel, fused: FusedLoss, token_accuracy: bool, **kwargs: Any) -> ModelOutput:
    """What `model.forward` returns for labels, without logits."""
    input = run_backbone(model, **kwargs)

    def cross_entropy(head: Head, input: HeadInput) -> Any:
        options = input.options
        loss = LigerFusedLinearCrossEntropyLoss(
            ignore_index=options.ignore_index,
            softcap=options.softcap,
            logit_scale=options.logit_scale,
            logits_budget=fused.logits_budget,
            return_token_accuracy=token_accuracy,
        )
        return loss(head.weight, input.hidden_states, input.target, head.bias, num_items=input.num_items_in_batch)

    loss = run_head(model, input, cross_entropy)
    metrics = None
    if token_accuracy:
        loss, metrics = loss
    if input.aux_loss is not None:
        loss = loss + model.config.get_text_config().router_aux_loss_coef * input.aux_loss.to(loss.device)
    shared = {name: x for name, x in input.outputs.items() if name in fused.output.__dataclass_fields__}
    if input.aux_loss is not None:
        shared["aux_loss"] = input.aux_loss
    result = fused.output(loss=loss, **shared)
    if metrics is not None:
        result["token_accuracy"] = metrics.token_accuracy
    return result


def output_of(model_class: type[PreTrainedModel]) -> type[ModelOutput]:
    """What `forward` returns, by its annotation: the class has changed with the versions of transformers."""
    returned = typing.get_type_hints(inspect.unwrap(model_class.forward))["return"]
    return next(t for t in typing.get_args(returned) or (returned,) if issubclass(t, ModelOutput))


def _fused_loss(model: PreTrainedModel) -> FusedLoss | None:
    """Of the model, otherwise of its class."""
    states = (vars(model).get(_STATE), getattr(type(model), _STATE, None))
    return next((state.fused for state in states if state is not None and state.fused is not None), None)


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
        fused = _fused_loss(self)
        if fused is not None:
            skip_logits = kwargs.pop("skip_logits", None)
            token_accuracy = kwargs.pop("return_token_accuracy", False)
            if _fuses(self, skip_logits, kwargs):
                return _without_logits(self, fused, token_accuracy, **kwargs)
        return stock(self, **kwargs)

    vars(forward)[_STATE] = stock
    return forward


def unbound(own: Callable) -> Callable:
    """The forward of one model as a function of the model, so that a copy of the model runs on its own weights."""
    if isinstance(own, types.MethodType):
        return own.__func__

    @functools.wraps(own)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return forward


def _teach(owner: PreTrainedModel | type[PreTrainedModel]) -> ForwardState:
    if _STATE not in vars(owner):
        state = ForwardState(Patches())
        if isinstance(owner, type):
            state.patches.set(owner, "forward", _taught(owner.forward))
        else:
            slot = forward_slot(owner)
            stock = unbound(vars(owner)[slot]) if slot in vars(owner) else type(owner).forward
            state.patches.set(owner, slot, types.MethodType(_taught(stock), owner))
        state.patches.set(owner, _STATE, state)
    return vars(owner)[_STATE]


def _forget(owner: PreTrainedModel | type[PreTrainedModel], **wish: Any) -> None:
    """Withdraw one wish; without any left, the owner gets its own forward back."""
    state = vars(owner).get(_STATE)
    if state is None:
        return
    vars(state).update(wish)
    if not state.head_fn and state.fused is None:
        state.patches.undo()


def fuse(owner: PreTrainedModel | type[PreTrainedModel], fused: FusedLoss) -> None:
    """Let a model, or every model of a class, train without logits."""
    _teach(owner).fused = fused


def unfuse(owner: PreTrainedModel | type[PreTrainedModel]) -> None:
    """Undo `fuse`."""
    _forget(owner, fused=None)


def attach_head(model: nn.Module) -> None:
    """Let `model(..., head_fn=fn)` run `fn(head, input)` in place of head and loss, and return what it returns.

    Calls without `head_fn` stay as they were. `fn` gets `Head` and `HeadInput`, runs inside `model.forward` (and so
    under the hooks of DDP, FSDP, ZeRO and autocast), and returns tensors, in tuples, dicts or a `ModelOutput` if they
    are several: in containers of other kinds FSDP and ZeRO do not find them. `labels` and `shift_labels` given to the
    call arrive in `HeadInput`, padded where PEFT prepends virtual tokens.

    Args:
        model: a transformers model with an `lm_head`, or what wraps one (PEFT, DDP, FSDP, DeepSpeed).

    Raises:
        TypeError: there is no transformers model in it.
        ValueError: that model has no backbone with an `lm_head`, or an `lm_head` that is more than weight and bias.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from liger_chunked import linear_token_stats
    >>> sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
    >>> attach_head(model)
    >>> def logps(head, input):
    ...     return linear_token_stats(head.weight, input.hidden_states, input.target, head.bias).logps
    >>> ids = torch.randint(64, (1, 8))
    >>> model(ids, labels=ids, head_fn=logps).shape
    torch.Size([1, 8])
    """
    inner = inner_model(model)
    backbone_of(inner)
    projections(inner)
    _teach(inner).head_fn = True


def detach_head(model: nn.Module) -> None:
    """Undo `attach_head`."""
    _forget(inner_model(model), head_fn=False)
