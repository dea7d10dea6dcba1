"""Parts of a model, and what its code reads."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from liger_chunked.deferred.swap import STOCK as STOCK


def inner_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside wrappers (DDP, PEFT)."""
    while not isinstance(model, PreTrainedModel):
        if isinstance(inner := getattr(model, "module", None), nn.Module):
            model = inner
        elif type(model).__name__ == "OptimizedModule":  # of torch.compile
            (model,) = model.children()
        elif callable(get_base_model := getattr(model, "get_base_model", None)):
            wrapped: Any = get_base_model()
            model = wrapped
        elif type(model).__module__.startswith("peft.") and isinstance(inner := _wrapped_by_peft(model), nn.Module):
            model = inner
        else:
            raise TypeError(
                f"model must be, or wrap, a transformers PreTrainedModel, got {type(model).__name__}; "
                "liger_chunked.defer_logits(model.lm_head) serves any model"
            )
    return model


def _wrapped_by_peft(model: Any) -> Any:
    """Return what a PeftMixedModel, or a tuner inside it, wraps."""
    children = dict(model.named_children())
    return children.get("base_model") or children.get("model")


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the lm_head of a model, or of the one model inside it that has one (Blip)."""
    head = model.get_output_embeddings()
    if head is not None:
        return head
    inside = (child for child in model.children() if isinstance(child, PreTrainedModel))
    heads = [head for child in inside if (head := head_of(child)) is not None]
    return heads[0] if len(heads) == 1 else None


def parsed(function: Any) -> ast.stmt:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return tree


def runs_code_of(found: type[nn.Module], cls: type[nn.Module], method: str) -> bool:
    return all(getattr(found, name, None) is getattr(cls, name, None) for name in ("forward", method))


def calls_loss_function(cls: type) -> bool:
    """Whether a model's code reads its `loss_function`. Others compute their loss themselves (Bart, older Gemma 3)."""
    bases = set(cls.__mro__) - set(PreTrainedModel.__mro__)
    methods = (x for base in bases for x in vars(base).values() if inspect.isfunction(x))
    return any(_reads_loss_function(getattr(inspect.unwrap(method), "__code__", None)) for method in methods)


def _reads_loss_function(code: Any) -> bool:
    """Whether a code object, or a function inside it, names `loss_function`: as an attribute, or for `getattr`."""
    if not isinstance(code, types.CodeType):
        return False
    return (
        "loss_function" in code.co_names
        or "loss_function" in code.co_consts
        or any(map(_reads_loss_function, code.co_consts))
    )
