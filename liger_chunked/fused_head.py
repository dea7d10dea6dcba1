"""The head in the signature of TRL's fused one: `add_fused_lm_head` with a backend computes its fields by this."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_chunked.engine import linear_token_stats
from liger_chunked.types import TokenStats

# Fields of TRL's `FusedCausalLMOutput`, and of `TokenStats`.
FIELDS = {
    "log_probs": "logps",
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logits",
    "is_top1": "is_top1",
}


def check_fields(outputs: tuple[str, ...]) -> None:
    unknown = [name for name in outputs if name not in FIELDS]
    if unknown:
        raise ValueError(f"outputs must be among {tuple(FIELDS)}, got {unknown}")


def statistics_of(outputs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the statistics of the fields `outputs`, and of "log_probs"."""
    return tuple(FIELDS[name] for name in dict.fromkeys(("log_probs", *outputs)))


def fields_of(stats: TokenStats, outputs: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the fields `outputs`, and "log_probs". TRL's mean logits have no gradient."""
    fields = {name: getattr(stats, FIELDS[name]) for name in dict.fromkeys(("log_probs", *outputs))}
    return {name: x.detach() if name == "mean_logits" else x for name, x in fields.items()}


def fused_lm_head(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = ("log_probs",),
    **options: Any,
) -> dict[str, Tensor]:
    """Return TRL's fields of tokens from the input of a head, without all logits in memory.

    The logits are `hidden_states @ weight.T + bias`, multiplied by `logit_scale`, softcapped and divided by
    `temperature`; `p` is their softmax, `y` the label.

    Args:
        hidden_states: (N, H). The product has its dtype, unless autocast has another.
        weight: (V, H), gathered; cast to the dtype of `hidden_states` if it has another.
        bias: (V,), or None.
        labels: (N,), ids of the tokens that the hidden states predict; -100 has fields of 0 without a gradient.
        temperature: positive divisor.
        final_logit_softcapping: positive, Gemma's. None: none.
        logit_scale: factor of the logits.
        outputs: fields to compute beside "log_probs": "entropy", "log_sum_sq_probs", "mean_logits", "is_top1".
        **options: more arguments of `linear_token_stats`, such as `logits_budget` and `logits_dtype`.

    Returns:
        Fields (N,) by name, in nats: "log_probs" `log(p_y)`, "entropy" `-sum(p * log(p))`, "log_sum_sq_probs"
        `log(sum(p ** 2))`, "mean_logits" `sum(z) / V`, "is_top1" bool. The first two are differentiable.

    Raises:
        ValueError: an output that is not among these, or what `linear_token_stats` refuses.

    >>> import torch
    >>> weight, hidden, labels = torch.randn(11, 4), torch.randn(3, 4), torch.tensor([1, 0, 7])
    >>> sorted(fused_lm_head(hidden, weight, None, labels, outputs=("entropy",)))
    ['entropy', 'log_probs']
    """
    check_fields(outputs)
    dtype = hidden_states.dtype
    stats = linear_token_stats(
        weight.to(dtype),
        hidden_states,
        labels,
        None if bias is None else bias.to(dtype),
        outputs=statistics_of(outputs),
        softcap=final_logit_softcapping,
        logit_scale=logit_scale,
        temperature=temperature,
        **options,
    )
    return fields_of(stats, outputs)
