"""Give the forward of `head.py` to a model, or to all models of a class."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from liger_chunked.integrations.transformers import detect, head
from liger_chunked.integrations.transformers.detect import STOCK, forward_slot, inner_model, own_forward
from liger_chunked.integrations.transformers.head import STATE, Fusion
from liger_chunked.integrations.transformers.head_facts import forget_facts, head_facts
from liger_chunked.integrations.transformers.head_input import HeadFn, HeadInput
from liger_chunked.integrations.transformers.patched_class import (
    Patch,
    class_forward,
    patch_of,
    patched_class,
    set_patch,
    stock_class,
)
from liger_chunked.integrations.transformers.replaced import Patches
from liger_chunked.types import Head


@dataclass(frozen=True)
class ForwardState:
    """Why a model or class has our forward. Shallow copies share it."""

    head_fn: bool = False
    fusion: Fusion | None = None
    patches: Patches = field(default_factory=Patches)


def _update(owner: PreTrainedModel | type[PreTrainedModel], **reasons: Any) -> None:
    """Install our forward for the first reason, and restore the original after the last."""
    before = vars(owner).get(STATE)
    state = dataclasses.replace(ForwardState() if before is None else before, **reasons)
    if state.head_fn or state.fusion is not None:
        if before is None:
            if isinstance(owner, type):
                state.patches.set(owner, "forward", class_forward(owner.forward))
            else:
                _install(owner)
        setattr(owner, STATE, state)
    elif before is not None:
        state.patches.undo()
        if not isinstance(owner, type):
            _uninstall(owner)
        delattr(owner, STATE)
        forget_facts(owner)


def _install(model: PreTrainedModel) -> None:
    own = forward_to_wrap(model)
    if own is None:
        set_patch(model, Patch())
        return
    # Partials can be pickled.
    forward = functools.update_wrapper(functools.partial(head.forward, model, own), own)
    vars(forward)[STOCK] = own
    vars(model)[forward_slot(model)] = forward


def _uninstall(model: PreTrainedModel) -> None:
    if patch_of(model) == Patch():
        set_patch(model, None)
    slot = forward_slot(model)
    forward = vars(model).get(slot)
    if isinstance(forward, functools.partial) and forward.func is head.forward:
        vars(model)[slot] = vars(forward)[STOCK]


def _calls_ours(own: Callable[..., Any]) -> bool:
    return any(hasattr(function, STOCK) for function in detect.unwrapped(own))


def forward_to_wrap(model: PreTrainedModel) -> Callable[..., Any] | None:
    """Return a framework's forward on this instance; None if the class can be patched; or raise a ValueError."""
    own = own_forward(model)
    if own is None or _calls_ours(own):
        patched_class(stock_class(type(model)), Patch())
        return None
    if (code := detect.foreign_code(own, stock_class(type(model)))) is not None:
        name = f"{getattr(code, '__module__', None)}.{getattr(code, '__qualname__', type(code).__qualname__)}"
        raise ValueError(
            f"the forward of this {type(model).__name__} was set on the instance, to {name}, and a fused head would "
            "not call it. Set it after patching, so that it calls the patched forward, or define it in a subclass; or "
            "leave the head alone (apply_liger_kernel: fused_linear_cross_entropy=False)"
        )
    return own


def fuse(owner: PreTrainedModel | type[PreTrainedModel], fusion: Fusion | None) -> None:
    """Make a model or class train without logits; None undoes this. A class's models are checked when they run."""
    if fusion is not None and not isinstance(owner, type):
        head_facts(owner, causal_loss=True)
    _update(owner, fusion=fusion)


def attach_head(model: nn.Module) -> None:
    """Make `model(..., head_fn=fn)` return `fn(head, input)`, computed in place of head and loss.

    `fn` gets `Head` and `HeadInput`, and returns a tensor, or tensors in a tuple, dict or `ModelOutput`. It runs inside
    `model.forward`, with its autocast and hooks.

    Raises:
        TypeError: `model` contains no transformers model.
        ValueError: the logits are not `transform(lm_head(hidden_states))`, the `lm_head` is more than weight and bias,
            or this instance has another forward.

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
    try:
        head_facts(inner)
        _update(inner, head_fn=True)
    finally:
        if STATE not in vars(inner):
            forget_facts(inner)


def run_head(model: nn.Module, head_fn: HeadFn, /, **inputs: Any) -> Any:
    """Return `model(**inputs, head_fn=head_fn)`; RuntimeError if `head_fn` is ignored."""
    called = False

    def noted(head: Head, input: HeadInput) -> Any:
        nonlocal called
        called = True
        return head_fn(head, input)

    result = model(**inputs, head_fn=noted)
    if not called:
        raise RuntimeError(
            f"{type(model).__name__} ignored head_fn: call attach_head(model) first, and let a forward that replaces "
            "the model's pass on its keywords"
        )
    return result


def detach_head(model: nn.Module) -> None:
    _update(inner_model(model), head_fn=False)
