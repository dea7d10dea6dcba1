"""Patch a model for `head_fn` or a fused loss, and undo it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from liger_chunked.deferred import set_deferral
from liger_chunked.deferred.projection import projections_in
from liger_chunked.deferred.swap import patched_class, set_patch, stock_class
from liger_chunked.integrations.transformers.detect import head_of, inner_model
from liger_chunked.integrations.transformers.forward import (
    STATE,
    ForwardState,
    Fusion,
    ModelPatch,
)
from liger_chunked.integrations.transformers.head_input import HeadInput
from liger_chunked.private import hooks_of
from liger_chunked.types import Head

T = TypeVar("T")


def update(model: PreTrainedModel, **reasons: Any) -> None:
    """Patch a model for the first reason, and restore its class and its head after the last."""
    state = dataclasses.replace(vars(model).get(STATE) or ForwardState(), **reasons)
    if state.head_fn or state.fusion is not None:
        vars(model)[STATE] = state
        set_patch(model, ModelPatch())
    elif STATE in vars(model):
        del vars(model)[STATE]
        set_patch(model, None)
    else:
        return
    head = head_of(model)
    if head is not None:
        set_deferral(head, state.deferral if STATE in vars(model) else None, model)


def fuse(model: PreTrainedModel, fusion: Fusion | None) -> None:
    """Make a model train on chunks of logits; None undoes this."""
    update(model, fusion=fusion)


def attach_head(model: nn.Module) -> None:
    """Make `model(..., head_fn=fn)` return `fn(head, input)`, computed in place of the logits and the loss.

    The model's own forward runs, with its autocast, hooks and wrappers. Its `lm_head` computes nothing; `fn` gets the
    `Head` and a `HeadInput` inside the head's call, where FSDP and ZeRO have gathered its parameters. It returns a
    tensor, or tensors in a tuple, dict or `ModelOutput`. A model that is neither attached nor patched drops the
    keyword, as transformers does with any that it does not know: call `run_head`, which raises then.

    Args:
        model: a transformers model, maybe wrapped (DDP, PEFT).

    Raises:
        TypeError: `model` contains no transformers model.
        ValueError: it has no `lm_head`, one that computes more than a Linear with plain LoRA does or of which each rank
            has a part, or Python cannot make a subclass of its class.

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
    check_head(inner)
    update(inner, head_fn=True)
    rebind(model, inner)


def rebind(model: nn.Module, inner: PreTrainedModel) -> None:
    """Let wrappers that keep a bound forward of the inner model, as PEFT's AdaptionPrompt, call its current one."""
    for wrapper in model.modules():
        if wrapper is inner:
            return
        bound = vars(wrapper).get("forward")
        if isinstance(bound, types.MethodType) and bound.__self__ is inner:
            vars(wrapper)["forward"] = inner.forward


def check_head(model: PreTrainedModel) -> None:
    """Raise a ValueError that says why no fused loss can compute a model's `lm_head`, or why it cannot be patched."""
    head = head_of(model)
    if head is None:
        raise ValueError(f"{type(model).__name__} is not a backbone under an lm_head: pass the model that has the head")
    projections_in(head)
    if any(map(_is_part, head.modules())):
        raise ValueError(
            "each rank has a plain tensor with its part of lm_head's weight, whose outputs a hook of transformers "
            "gathers: leave lm_head out of tp_plan, or load the model with a transformers that shards DTensors"
        )
    patched_class(stock_class(type(model)), ModelPatch())  # raises if Python cannot make the subclass


def _is_part(module: nn.Module) -> bool:
    """Whether a `tp_plan` of older transformers, such as 5.5, splits this module."""
    hooks = hooks_of(module, "_forward_pre_hooks")
    names = [getattr(hook, "__globals__", {}).get("__name__") for hook in hooks]
    weight = getattr(module, "weight", None)
    return "transformers.integrations.tensor_parallel" in names and not isinstance(weight, DTensor)


def run_head(model: nn.Module, head_fn: Callable[[Head, HeadInput], T], /, **inputs: Any) -> T:
    """Return `model(**inputs, head_fn=head_fn)`, and make sure that the model called `head_fn`.

    Args:
        model: a transformers model, maybe wrapped (DDP, PEFT), after `attach_head(model)`.
        head_fn: a function of the `Head` (`weight` (V, H) and `bias`) and of a `HeadInput` (hidden states (B, T, H),
            labels, the model's outputs), called inside of the head's call in place of it. It returns a tensor, or
            tensors in a tuple, dict or `ModelOutput`.
        **inputs: arguments of the model's forward, such as `input_ids` and `labels`.

    Returns:
        What `head_fn` returned.

    Raises:
        TypeError: `model` cannot be called, or not with these inputs.
        RuntimeError: the model did not call `head_fn`: it has no attached head, or a forward that replaces its own
            drops the keyword.
    """
    called = False

    def noted(head: Head, input: HeadInput) -> T:
        nonlocal called
        called = True
        return head_fn(head, input)

    result: T = model(**inputs, head_fn=noted)
    if not called:
        raise RuntimeError(
            f"{type(model).__name__} ignored head_fn: call attach_head(model) first, and let a forward that replaces "
            "the model's pass on its keywords"
        )
    return result


def detach_head(model: nn.Module) -> None:
    """Undo `attach_head`. Patches of `apply_liger_kernel` stay.

    Args:
        model: a transformers model, maybe wrapped (DDP, PEFT). Without an attached head, nothing happens.

    Raises:
        TypeError: `model` contains no transformers model.
    """
    update(inner_model(model), **NO_HEAD)


NO_HEAD: dict[str, Any] = {"head_fn": False, "rewrite": None, "logits_budget": None, "always": False}


def remove_trainers_head(model: PreTrainedModel) -> None:
    """Undo `attach_head` if it was a trainer that added keywords of its own."""
    state = vars(model).get(STATE)
    if state is not None and state.rewrite is not None:
        update(model, **NO_HEAD)
