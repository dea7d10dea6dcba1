"""slime 0.3 with Megatron."""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from slime.backends.megatron_utils import actor, loss
from torch import Tensor

from liger_chunked.functional import linear_token_stats
from liger_chunked.integrations.megatron import OutputProcessor

__all__ = ["install"]


def install(args: Any) -> None:
    """Replace the head of policies, and `get_log_probs_and_entropy`. Pass it as `--custom-megatron-init-path`.

    `GPTModel` then returns both statistics of each token, (b, s, 2), not logits. Critics keep their head.

    Raises ValueError for context parallelism, multi-token prediction or replayed top-p.
    """
    if parallel_state.get_context_parallel_world_size() > 1:
        raise ValueError("context_parallel_size must be 1: a rank's last token needs the next rank's first label")
    if getattr(args, "enable_mtp_training", False):
        raise ValueError("enable_mtp_training must be off: multi-token prediction calls the head on its own")
    stock = GPTModel.forward

    @functools.wraps(stock)
    def forward(self: Any, input_ids: Tensor, *rest: Any, **kwargs: Any) -> Any:
        head: Any = getattr(self, "output_layer", None)
        if not isinstance(head, ColumnParallelLinear):  # a critic, or not the last stage
            return stock(self, input_ids, *rest, **kwargs)
        # slime does not read the last token's label, of the next sequence.
        head.forward = functools.partial(_statistics, head, input_ids.roll(-1, 1), args.rollout_temperature)
        try:
            return stock(self, input_ids, *rest, **kwargs)
        finally:
            del head.forward

    GPTModel.forward = forward
    loss.get_log_probs_and_entropy = actor.get_log_probs_and_entropy = of_responses


def _statistics(
    head: Any, labels: Tensor, temperature: float, hidden: Tensor, weight: Tensor | None = None, **_unused: Any
) -> tuple[Tensor, None]:
    stats = OutputProcessor(linear_token_stats)(
        hidden_states=hidden,
        output_layer=head,
        output_weight=weight,
        labels=labels,
        context={"outputs": ("logps", "entropy"), "temperature": temperature},
    )
    return torch.stack([stats.logps, stats.entropy], -1).transpose(0, 1), None


def of_responses(
    statistics: Tensor,
    *,
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    top_p_token_ids: Any = None,
    **_unused: Any,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return the responses' parts of `statistics` (1, T, 2), as slime's `get_log_probs_and_entropy`."""
    if top_p_token_ids is not None:
        raise ValueError("rollout top-p replay must be off: it needs logits")
    ends = zip(accumulate(total_lengths), response_lengths, strict=True)
    logps, entropies = zip(*(statistics[0, end - n - 1 : end - 1].unbind(-1) for end, n in ends), strict=True)
    found = {"log_probs": list(logps)}
    if with_entropy:
        found["entropy"] = list(entropies)
    return statistics.new_empty(0), found
