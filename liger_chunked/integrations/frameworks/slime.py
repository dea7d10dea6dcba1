"""slime 0.3 with Megatron.

Run with slime 0.3.1.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from slime.backends.megatron_utils import actor, loss, model
from torch import Tensor

from liger_chunked.engine import linear_token_stats
from liger_chunked.integrations.frameworks.megatron import OutputProcessor
from liger_chunked.kept_ids import KeptIds

__all__ = ["install"]


def install(args: Any) -> None:
    """Replace the head of policies, and `get_log_probs_and_entropy`. Pass it as `--custom-megatron-init-path`.

    `GPTModel` then returns both statistics of each token, (b, s, 2), not logits. Critics keep their head.

    With `--rollout-top-p`, the head takes the softmax over the ids that SGLang kept of each response token, which it
    gets from slime's `get_batch`. Entropies are of these ids too; slime's are of the whole vocabulary.

    Raises ValueError for context parallelism, multi-token prediction, or a replayed top-p with sequence parallelism.
    """
    if parallel_state.get_context_parallel_world_size() > 1:
        raise ValueError("context_parallel_size must be 1: a rank's last token needs the next rank's first label")
    if getattr(args, "enable_mtp_training", False):
        raise ValueError("enable_mtp_training must be off: multi-token prediction calls the head on its own")
    if getattr(args, "rollout_top_p", 1.0) != 1.0 and getattr(args, "sequence_parallel", False):
        raise ValueError("sequence_parallel must be off with rollout_top_p: kept ids need whole sequences on each rank")
    stock = GPTModel.forward

    @functools.wraps(stock)
    def forward(self: Any, input_ids: Tensor, *rest: Any, **kwargs: Any) -> Any:
        head: Any = getattr(self, "output_layer", None)
        if not isinstance(head, ColumnParallelLinear):  # a critic, or not the last stage
            return stock(self, input_ids, *rest, **kwargs)
        # slime does not read the last token's label, of the next sequence.
        labels, kept = input_ids.roll(-1, 1), _kept_of_batch(latest["batch"], input_ids)
        head.forward = functools.partial(_statistics, head, labels, args.rollout_temperature, kept)
        try:
            return stock(self, input_ids, *rest, **kwargs)
        finally:
            del head.forward

    # The batch that slime's forward step has taken; the model's forward comes next.
    latest: dict[str, Any] = {"batch": None}

    def get_batch(*rest: Any, **kwargs: Any) -> Any:
        latest["batch"] = stock_batch(*rest, **kwargs)
        return latest["batch"]

    stock_batch = model.get_batch
    model.get_batch = get_batch
    GPTModel.forward = forward
    loss.get_log_probs_and_entropy = actor.get_log_probs_and_entropy = of_responses


def _kept_of_batch(batch: dict[str, Any] | None, tokens: Tensor) -> KeptIds | None:
    """Return the kept ids at the positions of `tokens` (1, T), or None without a replayed top-p.

    Prompts, whose statistics slime does not read, and padding have one id, their label: no product.
    """
    ids = None if batch is None else batch.get("rollout_top_p_token_ids")
    if batch is None or ids is None:
        return None
    if batch["tokens"].shape != tokens.shape:
        raise ValueError(
            f"the model must run on the tokens of slime's get_batch, {tuple(batch['tokens'].shape)}, whose kept ids it "
            f"replays, got {tuple(tokens.shape)}"
        )
    n, device = tokens.shape[1], tokens.device
    labels = KeptIds(tokens.roll(-1, 1).flatten().long(), torch.arange(n + 1, device=device))
    offsets = batch["rollout_top_p_token_offsets"]
    parts = [
        KeptIds(torch.as_tensor(x, device=device).long(), torch.as_tensor(of_ids, device=device).long())
        for x, of_ids in zip(ids, offsets, strict=True)
    ]
    places, start = torch.arange(n, device=device), n
    ends = accumulate(batch["total_lengths"])
    for end, length, part in zip(ends, batch["response_lengths"], parts, strict=True):
        places[end - length - 1 : end - 1] = torch.arange(start, start + part.positions, device=device)
        start += part.positions
    return KeptIds.cat([labels, *parts]).take(places)


def _statistics(
    head: Any,
    labels: Tensor,
    temperature: float,
    kept: KeptIds | None,
    hidden: Tensor,
    weight: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    stats = OutputProcessor(linear_token_stats)(
        hidden_states=hidden,
        output_layer=head,
        output_weight=weight,
        labels=labels,
        context={"outputs": ("logps", "entropy"), "temperature": temperature, "kept": kept},
    )
    return torch.stack([stats.logps, stats.entropy], -1).transpose(0, 1), None


def of_responses(
    statistics: Tensor,
    *,
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    **_unused: Any,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return the responses' parts of `statistics` (1, T, 2), as slime's `get_log_probs_and_entropy`."""
    ends = zip(accumulate(total_lengths), response_lengths, strict=True)
    logps, entropies = zip(*(statistics[0, end - n - 1 : end - 1].unbind(-1) for end, n in ends), strict=True)
    found = {"log_probs": list(logps)}
    if with_entropy:
        found["entropy"] = list(entropies)
    return statistics.new_empty(0), found
