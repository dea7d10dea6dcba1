"""Real logits inside `generate`, whatever the model's mode.

A sampler reads the logits of every step, and nothing there is a loss. Trainers that sample (GRPO, RLOO, online DPO,
distillation) leave their model in training mode meanwhile, in which its head would defer.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from liger_chunked.deferred.request import requested
from liger_chunked.integrations.transformers.forward import ModelPatch


@dataclass(frozen=True)
class GeneratingPatch(ModelPatch):
    """The class of a patched model that may sample."""

    def methods(self, cls: Any) -> dict[str, Any]:
        return {**super().methods(cls), **generation_methods(cls)}

    def key(self, cls: Any) -> Hashable:
        return super().key(cls), getattr(cls, "generate", None)


def generation_methods(cls: Any) -> dict[str, Any]:
    """Return the `generate` of a class in which no head defers; nothing if it has none."""
    stock = getattr(cls, "generate", None)
    if stock is None:
        return {}

    @functools.wraps(stock)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training:  # no head defers: a request would only break the graphs of a compiled `generate`
            return stock(self, *args, **kwargs)
        with requested(defer=False):
            return stock(self, *args, **kwargs)

    return {"generate": generate}
