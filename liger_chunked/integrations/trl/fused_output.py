"""TRL's fused head, `model(..., labels=labels, fused_lm_head=True)`, on `linear_token_stats`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput

from liger_chunked.engine import linear_token_stats
from liger_chunked.integrations.transformers import HeadFn, HeadInput, attach_head
from liger_chunked.types import Head, TokenStats

# Names of the statistics: TRL's and ours.
STATISTICS = {
    "log_probs": "logps",
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logits",
    "is_top1": "is_top1",
}


def add_chunked_lm_head(
    model: PreTrainedModel,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
    *,
    logits_budget: int | float | str | None = None,
) -> None:
    """Give `model` the head of TRL's `add_fused_lm_head`, computed by `linear_token_stats`.

    Afterwards `model(..., labels=labels, fused_lm_head=True)` returns TRL's `FusedCausalLMOutput`, and `model(...,
    labels=labels, head_fn=fn)` returns `fn(head, input)`. Other calls do not change.

    Args:
        model: a causal language model; under PEFT its base model.
        temperature: divides the logits.
        cast_lm_head_to_fp32: project in float32, outside autocast.
        outputs: fields of `FusedCausalLMOutput` to compute in addition to `log_probs` and `loss`: `STATISTICS`.
        logits_budget: see `LogitOptions`.

    Raises:
        ValueError: a field is unknown.
    """
    unknown = [name for name in outputs if name not in STATISTICS]
    if unknown:
        raise ValueError(f"outputs must be among {tuple(STATISTICS)}, got {unknown}")
    attach_head(model)
    statistics = functools.partial(
        fused_output,
        outputs=("log_probs", *(name for name in outputs if name != "log_probs")),
        temperature=temperature,
        float32=cast_lm_head_to_fp32,
        logits_budget=logits_budget,
    )

    # A copied partial runs on the copy's weights. `generate` and `Trainer` read the signature of the wrapped function.
    model.forward = functools.update_wrapper(functools.partial(_forward, model.forward, statistics), model.forward)


def _forward(
    inner: Callable[..., Any], statistics: HeadFn, /, *args: Any, fused_lm_head: bool = False, **kwargs: Any
) -> Any:
    if fused_lm_head:
        kwargs["head_fn"] = statistics
    return inner(*args, **kwargs)


def head_stats(
    head: Head,
    input: HeadInput,
    outputs: tuple[str, ...],
    *,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
) -> TokenStats:
    """Compute `linear_token_stats` with the head, hidden states and logits transform of a model."""
    return linear_token_stats(
        head.weight,
        input.hidden_states,
        input.target,
        head.bias,
        outputs=outputs,
        softcap=input.options.softcap,
        logit_scale=input.options.logit_scale,
        temperature=temperature,
        logits_budget=logits_budget,
    )


def fused_output(
    head: Head,
    input: HeadInput,
    *,
    outputs: tuple[str, ...],
    temperature: float,
    float32: bool,
    logits_budget: int | float | str | None,
) -> FusedCausalLMOutput:
    """Compute TRL's `FusedCausalLMOutput`: the fields `outputs`, and the mean negative log-likelihood.

    `loss = -log_probs.sum() / n`, plus the auxiliary loss of a mixture of experts times the model's coefficient. `n` is
    `num_items_in_batch` of the call, or else the number of valid tokens. `log_probs` and `entropy` are differentiable.
    Fields are (B, T - 1), or (B, T) if the call had `shift_labels`.
    """
    autocast: Any = nullcontext()
    if float32:
        head = Head(head.weight.float(), None if head.bias is None else head.bias.float())
        input = dataclasses.replace(input, hidden_states=input.hidden_states.float())
        autocast = torch.autocast(input.hidden_states.device.type, enabled=False)
    with autocast:
        names = tuple(STATISTICS[name] for name in outputs)
        stats = head_stats(head, input, names, temperature=temperature, logits_budget=logits_budget)
    # The last position predicts nothing, so TRL drops it.
    end = None if input.shift_labels is not None else -1
    fields = {name: getattr(stats, STATISTICS[name])[:, :end] for name in outputs}
    if "mean_logits" in fields:
        fields["mean_logits"] = fields["mean_logits"].detach()
    label_mask = input.target[:, :end] != -100
    num_items = input.num_items_in_batch
    if isinstance(num_items, torch.Tensor):
        num_items = num_items.clamp(min=1)
    loss = -fields["log_probs"].sum() / (label_mask.sum().clamp(min=1) if num_items is None else num_items)
    if input.aux_loss is not None:
        loss = loss + input.aux_loss_coef * input.aux_loss
    return FusedCausalLMOutput(loss=loss, label_mask=label_mask, aux_loss=input.aux_loss, **fields)
