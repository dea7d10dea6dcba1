"""What every trainer shares: where its heads come from, and whose loss it trains with."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_chunked.integrations.transformers.head import inner_model
from liger_chunked.integrations.trl.fused_output import add_chunked_lm_head
from liger_chunked.types import LogitOptions

Loss = TypeVar("Loss", bound=nn.Module)

# What of the logit options is the model's.
TRANSFORM = ("softcap", "logit_scale")


class NoReference(nn.Module):
    """Stands for the reference model while a trainer is built whose loss has none, so that none is loaded."""


class LigerTrainerMixin:
    """Over a trainer of TRL: chunked heads, and a loss of one's own.

    Args:
        *args, **kwargs: the trainer's own.
        loss: takes the place of the trainer's loss; of the kind that the trainer names.
        logits_budget: the most bytes of logits alive at once, see `LogitOptions`; None for an automatic choice.

    Raises:
        TypeError: a loss of another kind.
    """

    # Of the trainer beneath.
    accelerator: Any
    args: Any
    model: Any

    # What `loss` must be an instance of; None for a trainer that takes none.
    loss_kind: ClassVar[type[nn.Module] | None] = None
    # The models that TRL gives no fused head.
    models_without_head: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, *args: Any, loss: nn.Module | None = None, logits_budget: int | None = None, **kwargs: Any
    ) -> None:
        self._check_loss(loss)
        self.loss_override: Any = loss
        self.logits_budget = logits_budget
        with _chunked_heads(type(self), logits_budget):
            super().__init__(*args, **kwargs)
        for name in self.models_without_head:
            model = getattr(self, name)
            if model is not None:
                add_chunked_lm_head(inner_model(model), logits_budget=logits_budget)

    def global_mean(self, mean: Tensor, count: Tensor) -> float:
        """The mean over the ranks' items, of which this one has `count` and their `mean`; 0 of none."""
        sums = self.accelerator.gather(torch.stack([mean.detach() * count, count.to(mean.dtype)])[None]).sum(0)
        return (sums[0] / sums[1].clamp(min=1)).item()

    def _check_loss(self, loss: nn.Module | None) -> None:
        if loss is None or (self.loss_kind is not None and isinstance(loss, self.loss_kind)):
            return
        expected = "no loss" if self.loss_kind is None else f"a {self.loss_kind.__name__}"
        raise TypeError(f"{type(self).__name__} takes {expected}, got loss={type(loss).__name__}")


@contextmanager
def _chunked_heads(trainer: type, logits_budget: int | None) -> Iterator[None]:
    """While a trainer is built, the function that its TRL modules call to add fused heads is ours.

    They call it with the temperature, precision and statistics that they need, and may score a reference before they
    are done: whoever came later would have to guess the one and be late for the other.
    """

    def add(model: PreTrainedModel | NoReference, *args: Any, **kwargs: Any) -> None:
        if not isinstance(model, NoReference):
            add_chunked_lm_head(model, *args, logits_budget=logits_budget, **kwargs)

    modules: list[Any] = [sys.modules[cls.__module__] for cls in trainer.__mro__]
    theirs = [(module, module.add_fused_lm_head) for module in modules if "add_fused_lm_head" in vars(module)]
    try:
        for module, function in theirs:
            module.add_fused_lm_head = functools.wraps(function)(add)
        yield
    finally:
        for module, function in theirs:
            module.add_fused_lm_head = function


def with_transform(own: LogitOptions, model: LogitOptions, names: tuple[str, ...] = TRANSFORM) -> LogitOptions:
    """The options `own` of a loss, with the transform of the model it is applied to.

    Raises:
        ValueError: the loss was given a transform of its own, and it is another one.
    """
    plain = LogitOptions()
    for name in names:
        given, of_model = getattr(own, name), getattr(model, name)
        if given not in (getattr(plain, name), of_model):
            raise ValueError(f"the loss has {name}={given}, but the model is trained with {name}={of_model}")
    return dataclasses.replace(own, **{name: getattr(model, name) for name in names})


def fitted(loss: Loss, options: LogitOptions, names: tuple[str, ...] = TRANSFORM) -> Loss:
    """A copy of `loss` with the transform of the model it is applied to, see `with_transform`."""
    fitted: Any = copy.copy(loss)
    fitted.options = with_transform(fitted.options, options, names)
    return fitted
