from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

OUTPUTS = ("logps", "lse", "entropy", "mean_logits", "argmax", "is_top1", "log_sum_sq_probs", "candidate_logps")


def logits(
    weight: Any,
    input: Tensor,
    bias: Tensor | None = None,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """Return the transformed logits (..., V): the product in the inputs' dtype, the rest in float32 or float64.

    `weight` may have an adapter: a function `down`, a matrix `up`, and the `weight` below. `temperature` may be (...,).
    """
    if callable(getattr(weight, "down", None)):
        z = F.linear(input, weight.weight, bias) + F.linear(weight.down(input), weight.up)
    else:
        z = F.linear(input, weight, bias)
    z = z if z.dtype == torch.float64 else z.float()
    if logit_scale != 1:
        z = logit_scale * z
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if isinstance(temperature, Tensor):
        return z / temperature[..., None]
    return z if temperature == 1 else z / temperature


def token_stats(
    weight: Any,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    candidates: Tensor | None = None,
    *,
    outputs: tuple[str, ...] = ("logps",),
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    kept: Tensor | None = None,
    ignore_index: int = -100,
) -> dict[str, Tensor]:
    """Return `outputs`, fields of `TokenStats`, shaped like `target`, 0 at `ignore_index` (argmax: -1).

    `kept` (..., V) is true at the ids over which the softmax is. `candidate_logps` are of `candidates`, if there are.

    >>> weight, input = torch.randn(11, 4), torch.randn(2, 3, 4)
    >>> stats = token_stats(weight, input, torch.tensor([[1, 2, 3], [4, 5, -100]]), outputs=("logps", "argmax"))
    >>> stats["logps"].shape, stats["argmax"][1, 2].item()
    (torch.Size([2, 3]), -1)
    """
    valid = target != ignore_index
    if isinstance(temperature, Tensor):
        temperature = temperature.where(valid, 1.0)
    z = logits(weight, input, bias, softcap=softcap, logit_scale=logit_scale, temperature=temperature)
    z = z if kept is None else z.masked_fill(~kept, -torch.inf)
    y = target.long().where(valid, 0)
    log_p = z.log_softmax(-1)

    def entropy() -> Tensor:
        p = log_p.exp()
        return -(p * log_p.masked_fill(p == 0, 0)).sum(-1)  # p log p is 0 at p = 0, not NaN

    stats: dict[str, Callable[[], Tensor]] = {
        "logps": lambda: log_p.gather(-1, y[..., None])[..., 0],
        "lse": lambda: z.logsumexp(-1),
        "entropy": entropy,
        "mean_logits": lambda: z.mean(-1),
        "argmax": lambda: z.argmax(-1),
        "is_top1": lambda: z.argmax(-1) == y,
        "log_sum_sq_probs": lambda: (2 * log_p).logsumexp(-1),
    }
    if candidates is not None:
        stats["candidate_logps"] = lambda: log_p.gather(-1, candidates)
    values = {name: stats[name]() for name in outputs if name in stats}
    return {
        name: torch.where(valid if x.ndim == valid.ndim else valid[..., None], x, -1 if name == "argmax" else 0).to(
            x.dtype
        )
        for name, x in values.items()
    }
