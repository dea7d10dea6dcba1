"""Megatron-Core, from 0.18: the `output_processor` of `GPTModel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_chunked.functional import cross_entropy_loss
from liger_chunked.integrations.tensor_parallel import even_shard

__all__ = ["OutputProcessor"]

IGNORE_INDEX = -100


class OutputProcessor:
    """Computes a loss where `GPTModel` would compute logits.

    Args:
        fn: called with `(weight, hidden, target, bias, vocab_shard=...)`: a function of `liger_chunked.functional`, or
            a loss module. `hidden` is (b, s, h), or the rank's part of s, `target` (b, s). None: the cross entropy of
            each token, (b, s).
        vocab_size: without padding. None: padded rows are in the softmax, as in Megatron.

    `output_processor_context` may be a dict of more keywords of `fn` (docs/frameworks.md).

    Labels are shifted already; -100, and those where `loss_mask` is zero, are ignored. Ranks hold equally many rows of
    the head. MuP's output multiplier is passed as `logit_scale`, which modules take in their constructor only.

    Raises ValueError without labels, or if the head is not plain rows of the vocabulary.
    """

    def __init__(self, fn: Callable[..., Any] | None = None, *, vocab_size: int | None = None) -> None:
        self.fn = partial(cross_entropy_loss, reduction="none") if fn is None else fn
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
        return self.fn(weight, hidden_states.transpose(0, 1), target, output_layer.bias, vocab_shard=shard, **options)


def _check_head(output_layer: Any, config: Any) -> None:
    if getattr(config, "defer_embedding_wgrad_compute", False):
        raise ValueError("defer_embedding_wgrad_compute must be False: the loss computes the head's gradient at once")
    if getattr(output_layer, "gtp_remat_size", 1) > 1:
        raise ValueError("the head's weight must hold this rank's rows, but generalized tensor parallelism cuts it too")
