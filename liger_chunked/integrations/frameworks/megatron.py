"""Megatron-Core, from 0.18: the `output_processor` of `GPTModel`, and the heads of multi-token prediction.

Run with Megatron-Core 0.19.2.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_chunked.engine import linear_token_stats
from liger_chunked.integrations.tensor_parallel import even_shard
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss

__all__ = ["OutputProcessor", "chunked_heads"]

IGNORE_INDEX = -100


class OutputProcessor:
    """Computes a loss where `GPTModel` would compute logits.

    Args:
        fn: called with `(weight, hidden, target=..., bias=..., vocab_shard=...)`: a class of losses, or a
            loss. `hidden` is (b, s, h), or the rank's part of s, `target`
            (b, s). None: the cross entropy of each token, (b, s).
        vocab_size: without padding. None: padded rows are in the softmax, as in Megatron.

    `output_processor_context` may be a dict of more keywords of `fn` (docs/frameworks.md).

    Labels are shifted already; -100, and those where `loss_mask` is zero, are ignored. Ranks hold equally many rows of
    the head. MuP's output multiplier is passed as `logit_scale`, which modules take in their constructor only.

    Raises ValueError without labels, or if the head is not plain rows of the vocabulary.
    """

    def __init__(self, fn: Callable[..., Any] | None = None, *, vocab_size: int | None = None) -> None:
        self.fn = partial(LigerFusedLinearCrossEntropyLoss, reduction="none") if fn is None else fn
        self.vocab_size = vocab_size

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        context: Mapping[str, Any] | None = None,
        config: Any = None,
        scale_logits: Callable[[Tensor], Tensor] | None = None,
        **_unused: Any,
    ) -> Any:
        if labels is None:
            raise ValueError("labels must be given: call the model without output_processor to get logits")
        if not isinstance(context, Mapping | None):
            raise TypeError(
                f"output_processor_context must be a dict of keywords or None, got {type(context).__name__}"
            )
        _check_head(output_layer, config)
        weight = output_layer.weight if output_weight is None else output_weight
        target = labels if loss_mask is None else labels.masked_fill(loss_mask == 0, IGNORE_INDEX)
        options = dict(context or {})
        scale = 1.0 if scale_logits is None else float(scale_logits(torch.ones(())))
        if scale != 1.0:
            options["logit_scale"] = scale
        shard = even_shard(
            weight,
            output_layer.tp_group,
            "reduce_scatter" if output_layer.sequence_parallel else "all_reduce",
            vocab_size=self.vocab_size,
        )
        # By name: the teacher of a distillation loss comes before its target.
        return self.fn(
            weight, hidden_states.transpose(0, 1), target=target, bias=output_layer.bias, vocab_shard=shard, **options
        )


@dataclass
class _MTPLogits:
    """What a head of multi-token prediction returns in place of the logits `scale * (hidden @ weight.T + bias)`.

    Megatron scales them, computes the loss of each token, and counts the tokens that are the most likely ones. The loss
    and the most likely tokens are of one pass, which waits for the labels.
    """

    statistics: Callable[..., Any]  # of (labels, scale)
    scale: float = 1.0
    argmax: Tensor | None = field(default=None, init=False)  # (b, s)

    def __mul__(self, factor: float) -> _MTPLogits:
        return replace(self, scale=self.scale * factor)

    def loss_of_tokens(self, labels: Tensor) -> Tensor:
        stats = self.statistics(labels, self.scale)
        self.argmax = stats.argmax
        return -stats.logps


class _MTPHead:
    """An output layer that returns `_MTPLogits`. Its other attributes are those of Megatron's."""

    def __init__(self, head: Any, config: Any, vocab_size: int | None, logits_budget: int | float | str | None) -> None:
        self._head, self._config, self._budget = head, config, logits_budget
        self._process = OutputProcessor(linear_token_stats, vocab_size=vocab_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def __call__(self, hidden: Tensor, weight: Tensor | None = None, **_unused: Any) -> tuple[_MTPLogits, None]:
        def statistics(labels: Tensor, scale: float) -> Any:
            context = {"outputs": ("logps", "argmax"), "logit_scale": scale, "logits_budget": self._budget}
            return self._process(
                hidden_states=hidden,
                output_layer=self._head,
                output_weight=weight,
                labels=labels,
                context=context,
                config=self._config,
            )

        return _MTPLogits(statistics), None


@contextmanager
def chunked_heads(*, vocab_size: int | None = None, logits_budget: int | float | str | None = None) -> Iterator[None]:
    """Compute losses of multi-token prediction (MTP, arXiv 2412.19437) on chunks of logits, in models run in the block.

        with chunked_heads():
            pretrain(...)

    Megatron's `process_mtp_loss` runs as it is, with its shifts, masks, scale and logs. The cross entropy of a token at
    each depth, and whether the most likely token is right, come from one pass over the hidden states. The block must
    hold the models' forwards. `GPTModel` and `HybridModel` are served; the main loss is not part of it, see
    `OutputProcessor`. Labels of -100 give 0; those that `loss_mask` leaves out are computed, as in Megatron.

    Args:
        vocab_size: without padding. None: padded rows are in the softmax, as in Megatron.
        logits_budget: see `LogitOptions`. None: automatic.

    Raises ImportError without Megatron-Core. A forward in the block raises ValueError for a head that is not plain rows
    of the vocabulary.
    """
    from megatron.core.transformer import multi_token_prediction as mtp

    theirs: dict[str, Any] = {"process_mtp_loss": mtp.process_mtp_loss}
    counts = getattr(mtp, "_compute_mtp_acceptance_counts", None)  # since 0.19
    if counts is not None:
        theirs["_compute_mtp_acceptance_counts"] = counts
    signature = inspect.signature(mtp.process_mtp_loss)

    @functools.wraps(mtp.process_mtp_loss)
    def process_mtp_loss(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs)
        of_model = given.arguments
        of_model["output_layer"] = _MTPHead(of_model["output_layer"], of_model["config"], vocab_size, logits_budget)
        of_model["compute_language_model_loss"] = lambda labels, logits: logits.loss_of_tokens(labels)
        return theirs["process_mtp_loss"](*given.args, **given.kwargs)

    def acceptance_counts(logits: Any, labels: Tensor, loss_mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(logits, _MTPLogits):
            return counts(logits, labels, loss_mask, *args, **kwargs)  # type: ignore[misc]
        valid = loss_mask.bool()
        return ((logits.argmax == labels) & valid).sum().float(), valid.sum().float()

    ours = {"process_mtp_loss": process_mtp_loss, "_compute_mtp_acceptance_counts": acceptance_counts}
    try:
        for name, function in theirs.items():
            _rebind(name, function, ours[name])
        yield
    finally:
        for name, function in theirs.items():
            _rebind(name, ours[name], function)


def _rebind(name: str, old: Any, new: Any) -> None:
    """Replace a function in every module that holds it under its name."""
    for module in [*sys.modules.values()]:
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def _check_head(output_layer: Any, config: Any) -> None:
    if getattr(config, "defer_embedding_wgrad_compute", False):
        raise ValueError("defer_embedding_wgrad_compute must be False: the loss computes the head's gradient at once")
    if getattr(output_layer, "gtp_remat_size", 1) > 1:
        raise ValueError("the head's weight must hold this rank's rows, but generalized tensor parallelism cuts it too")
