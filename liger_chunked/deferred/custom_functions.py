"""Real logits for `torch.autograd.Function.apply`, which does not ask `__torch_function__`.

A stand-in would reach a custom function, such as another library's Triton cross entropy, as a constant: its forward
would compute with the right logits, and their gradient would be lost without a word. The first head that defers wraps
`apply`, once.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from liger_chunked.deferred.logits import DeferredLogits


def _class_to_wrap() -> Any:
    """Return the class whose `apply` all calls go through.

    Before torch 2.14, the `apply` of `Function` calls that of its base class, also if code kept `MyFunction.apply`
    before. Since then it is a method of C, and a stand-in that reaches one that was kept raises an error when the
    function reads it.
    """
    is_python = isinstance(vars(torch.autograd.Function).get("apply"), classmethod)
    base = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)
    return base if is_python else torch.autograd.Function


_BASE = _class_to_wrap()


@functools.cache
def give_real_logits_to_custom_functions() -> None:
    stock = vars(_BASE).get("apply")

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Functions of torch, such as DDP's, return unknown objects as they are.
        if any(type(x) is DeferredLogits for x in args) and not cls.__module__.startswith("torch."):
            args = tuple(x.asked(cls.__name__) if type(x) is DeferredLogits else x for x in args)
        if isinstance(stock, classmethod):
            result = stock.__func__(cls, *args, **kwargs)
        else:  # a method of C, which belongs to the class above
            result = super(_BASE, cls).apply(*args, **kwargs)
        if type(result) is DeferredLogits and cls is CheckpointFunction:
            raise RuntimeError(
                "a reentrant checkpoint returned the logits of a head that defers them, and would lose their gradient: "
                "checkpoint with use_reentrant=False, or leave the head outside of the checkpoint"
            )
        return result

    # Dynamo traces custom functions itself. This frame it skips, as it skips torch's own `apply`.
    _BASE.apply = classmethod(torch.compiler.disable(apply, recursive=False))
