"""The fused forward of a model: its backbone, then our code in place of `lm_head` and loss."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput, can_return_tuple

from liger_chunked.integrations.transformers.backbone import run_backbone
from liger_chunked.integrations.transformers.detect import TRIAL
from liger_chunked.integrations.transformers.head_facts import head_facts
from liger_chunked.integrations.transformers.head_input import HeadFn, HeadInput
from liger_chunked.integrations.transformers.layers import causal_lm_loss
from liger_chunked.integrations.transformers.lm_head import run_lm_head
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss
from liger_chunked.types import Head

_LOGGER = logging.getLogger(__name__)

_LEFT = "_liger_left"  # attribute of a model of a patched class with an unfit head
STATE = "_liger_forward"  # attribute of a model or class


@dataclass(frozen=True)
class Fusion:
    """Settings of the fused loss. If `required`, an unfit model raises; otherwise it runs its own forward."""

    logits_budget: int | None = None
    required: bool = True


def forward(
    model: PreTrainedModel, stock: Callable[..., Any], *args: Any, head_fn: HeadFn | None = None, **kwargs: Any
) -> Any:
    """Run `stock`, the model's forward, or instead `head_fn` or the fused loss."""
    if TRIAL in vars(model):
        return stock(*args, **kwargs)
    if args:  # the backbone's order may differ
        _, *names = inspect.signature(type(model).forward).parameters
        kwargs = dict(zip(names, args, strict=False)) | kwargs
    if head_fn is not None:
        return run_lm_head(model, run_backbone(model, **kwargs), head_fn)
    states = (vars(model).get(STATE), getattr(type(model), STATE, None))
    fusion = next((state.fusion for state in states if state is not None and state.fusion is not None), None)
    if fusion is not None:
        skip_logits = kwargs.pop("skip_logits", None)
        token_accuracy = kwargs.pop("return_token_accuracy", False)
        if _fuses(model, skip_logits, kwargs):
            # A subclass may call a patched forward.
            of_class = stock.func if isinstance(stock, functools.partial) else None
            if _serves(model, of_class, fusion, skip_logits, kwargs):
                return _without_logits(model, of_class, fusion, token_accuracy, **kwargs)
    return stock(**kwargs)


def _serves(model: Any, forward: Any, fusion: Fusion, skip_logits: bool | None, kwargs: dict[str, Any]) -> bool:
    required = fusion.required or bool(skip_logits)
    if not required and vars(model).get(_LEFT):
        return False
    try:
        facts = head_facts(model, forward, causal_loss=True)
    except ValueError as refusal:
        if required:
            raise
        _leave_alone(model, str(refusal))
        return False
    used = [name for name in facts.of_forward if kwargs.get(name) is not None]
    if used and skip_logits:
        raise ValueError(
            f"skip_logits=True cannot take {', '.join(used)}: the forward of {type(model).__name__} may use this after "
            "its backbone. Leave skip_logits out, and the model's own forward runs"
        )
    return not used


@torch.compiler.disable
def _leave_alone(model: PreTrainedModel, reason: str) -> None:
    vars(model)[_LEFT] = True
    _LOGGER.warning("%s trains with logits: %s", type(model).__name__, reason)


def has_causal_loss(model: PreTrainedModel) -> bool:
    return model.loss_function in (ForCausalLMLoss, causal_lm_loss)


def _fuses(model: PreTrainedModel, skip_logits: bool | None, kwargs: dict[str, Any]) -> bool:
    labelled = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
    if skip_logits and not labelled:
        raise ValueError("skip_logits=True needs labels= or shift_labels=: there is nothing else to return")
    wanted = model.training if skip_logits is None else skip_logits
    if labelled and skip_logits and not has_causal_loss(model):
        raise ValueError(
            f"skip_logits=True is the causal loss, but the loss_function of this model is {model.loss_function}: leave "
            "skip_logits out, and that function gets its logits"
        )
    return bool(labelled and wanted and has_causal_loss(model))


@can_return_tuple
def _without_logits(
    model: PreTrainedModel, forward: Callable[..., Any] | None, fusion: Fusion, token_accuracy: bool, **kwargs: Any
) -> ModelOutput:
    input = run_backbone(model, forward, **kwargs)

    loss, accuracy = run_lm_head(model, input, _CrossEntropy(fusion.logits_budget, bool(token_accuracy)))
    output: Any = head_facts(model, forward).output
    shared = {name: x for name, x in input.outputs.items() if name in output.__dataclass_fields__}
    if input.aux_loss is not None:
        loss = loss + input.aux_loss_coef * input.aux_loss.to(loss.device)
        shared["aux_loss"] = input.aux_loss
    result = output(loss=loss, **shared)
    if accuracy is not None:
        result["token_accuracy"] = accuracy
    return result


@dataclass(frozen=True)
class _CrossEntropy:
    logits_budget: int | None
    token_accuracy: bool

    def __call__(self, head: Head, input: HeadInput) -> tuple[Tensor, Tensor | None]:
        options = input.options
        loss = LigerFusedLinearCrossEntropyLoss(
            ignore_index=options.ignore_index,
            softcap=options.softcap,
            logit_scale=options.logit_scale,
            logits_budget=self.logits_budget,
            return_token_accuracy=self.token_accuracy,
        )
        result = loss(head.weight, input.hidden_states, input.target, head.bias, num_items=input.num_items_in_batch)
        if isinstance(result, Tensor):
            return result, None
        value, metrics = result
        return value, metrics.token_accuracy
