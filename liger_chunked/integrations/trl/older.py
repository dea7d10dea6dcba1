"""Trainers of TRL 1.13 and 1.14, which compute log-probabilities and metrics from logits.

From 1.15 on, TRL's trainers ask their model for log-probabilities, and `heads.py` computes these. Before, they read
`output.logits` and call a few functions of TRL on it. So here the heads defer (docs/deferred-logits.md),
and these functions take a stand-in for logits too: one pass gives log-probabilities and what the metrics need later.
Everything else stays TRL's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput
from trl.trainer import sft_trainer, utils
from trl.trainer.sft_config import SFTConfig

from liger_chunked.deferred import DeferredLogits
from liger_chunked.deferred.request import requested
from liger_chunked.private import tree_map_only

HAS_FUSED_HEAD = hasattr(utils, "add_fused_lm_head")


@dataclass
class FusedCausalLMOutput(ModelOutput):
    """What a model with `add_chunked_lm_head` returns, with the fields of the class of this name in TRL 1.15."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


# What the metrics of a trainer read of the logits that gave the log-probabilities of a loss.
_METRICS = ("entropy", "mean_logits", "argmax")


def _log_probs(logits: Any, index: Tensor) -> Tensor:
    outputs = ("logps", *_METRICS) if torch.is_grad_enabled() else ("logps",)
    # A copy, because TRL writes zeros into it, and this may be a view that a hook of the head made.
    return logits.statistics(index, *outputs)["logps"].clone()


def _reads_rows(logits: Any, index: Tensor | None = None) -> bool:
    """Whether `logits` is a stand-in, with one id for each row in `index`."""
    if not isinstance(logits, DeferredLogits) or logits.is_computed:
        return False
    return index is None or index.shape == logits.shape[:-1]


def _selective_log_softmax(
    logits: Any, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    log_probs = _log_probs(logits if temperature == 1.0 else logits / temperature, index)
    return log_probs if row_mask is None else log_probs.masked_fill(row_mask == 0, 0.0)


def _entropy_from_logits(logits: DeferredLogits, chunk_size: int = 128) -> Tensor:
    return logits.statistic("entropy")


def _selective_log_softmax_and_entropy(
    logits: Any,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if temperature != 1.0:
        logits = logits / temperature
    log_probs = _selective_log_softmax(logits, index, row_mask=row_mask)
    entropy = logits.statistic("entropy")  # of the same pass
    if not entropy_requires_grad:
        entropy = entropy.detach()
    return log_probs, entropy if row_mask is None else entropy.masked_fill(row_mask == 0, 0.0)


# Functions of TRL, and what takes their place if the logits are a stand-in.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "selective_log_softmax": _selective_log_softmax,
    "entropy_from_logits": _entropy_from_logits,
    "selective_log_softmax_and_entropy": _selective_log_softmax_and_entropy,
}


def _taking_stand_ins(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def function(logits: Any, *args: Any, **kwargs: Any) -> Any:
        index = next((x for x in (*args, kwargs.get("index")) if isinstance(x, Tensor)), None)
        return (ours if _reads_rows(logits, index) else theirs)(logits, *args, **kwargs)

    return function


def let_functions_take_stand_ins(trainer: type[Any]) -> None:
    """Replace, in the modules of a trainer's classes, the functions of TRL that read logits. Tensors go to TRL's."""
    for module in {sys.modules[cls.__module__] for cls in trainer.__mro__ if cls.__module__.startswith("trl.")}:
        for name, ours in _FUNCTIONS.items():
            theirs = vars(module).get(name)
            if theirs is not None and not hasattr(theirs, "__wrapped__"):  # replaced for another trainer
                setattr(module, name, _taking_stand_ins(theirs, ours))


def _deferring() -> AbstractContextManager[Any]:
    return requested(defer=True)


@contextmanager
def _without_chunked_forward() -> Iterator[None]:
    """Let no constructor of TRL replace a model's forward by one that reads the weight of the head.

    SFT's loss "chunked_nll" does so, TRL's default before 1.15.
    """
    name = "_patch_chunked_ce_lm_head"
    theirs = vars(sft_trainer).get(name)
    if theirs is None:
        yield
        return
    setattr(sft_trainer, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        setattr(sft_trainer, name, theirs)


_Trainer: Any = object


class ReadsLogitsMixin(_Trainer):
    """Lets a trainer of TRL 1.13 or 1.14 get stand-ins where it reads logits: in its loss and for its reference."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for config in (x for x in (*args, kwargs.get("args")) if isinstance(x, SFTConfig)):
            if config.loss_type == "chunked_nll":
                config.loss_type = "nll"  # the same loss, and TRL takes an adapter on the head with it
        with _without_chunked_forward():
            super().__init__(*args, **kwargs)
        if getattr(self.args, "loss_type", None) == "chunked_nll":
            self.args.loss_type = "nll"  # a trainer without a config makes its own

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with _deferring():
            return super().compute_loss(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        # Metrics of the user get tensors. If there are none, nothing computes the logits.
        return tree_map_only(DeferredLogits, DeferredLogits.tensor, super().prediction_step(*args, **kwargs))

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with _deferring():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        self.add_heads()  # TRL's constructor calls this
        with _deferring():
            return super()._precompute_ref_logps(*args, **kwargs)
