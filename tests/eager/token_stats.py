from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

OUTPUTS = ("logps", "lse", "entropy", "mean_logits", "argmax", "is_top1", "log_sum_sq_probs")


def logits(
    weight: Tensor,
    input: Tensor,
    bias: Tensor | None = None,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
) -> Tensor:
    """Return the transformed logits (..., V): the product in the inputs' dtype, the rest in float32 or float64."""
    z = F.linear(input, weight, bias)
    z = z if z.dtype == torch.float64 else z.float()
    if logit_scale != 1:
        z = logit_scale * z
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z if temperature == 1 else z / temperature


def _kept_ids(z: Tensor, top_k: int | None, top_p: float | None, min_p: float | None) -> list[int]:
    """Return the ids that a sampler keeps of a row's logits `z` (V,), the likeliest first."""
    p = z.detach().double().softmax(-1).tolist()
    ids = sorted(range(len(p)), key=lambda i: -p[i])
    if top_k is not None:
        ids = [i for i in ids if p[i] >= p[ids[min(top_k, len(ids)) - 1]]]
    if top_p is not None:
        sum_, count = 0.0, 0
        while sum_ < top_p * sum(p[i] for i in ids) and count < len(ids):
            sum_, count = sum_ + p[ids[count]], count + 1
        ids = [i for i in ids if p[i] >= p[ids[count - 1]]]
    if min_p is not None:
        ids = [i for i in ids if p[i] >= min_p * p[ids[0]]]
    return ids


def filtered(z: Tensor, *, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None) -> Tensor:
    """Return logits (..., V) with -inf where a sampler's filters drop an id: `top_k`, of these `top_p`, then `min_p`.

    >>> filtered(torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log(), top_p=0.8).exp()
    tensor([[0.5000, 0.3000, 0.0000, 0.0000]])
    """
    if top_k is None and top_p is None and min_p is None:
        return z
    dropped = torch.ones_like(z, dtype=torch.bool).view(-1, z.shape[-1])
    for row, logits_ in zip(dropped, z.reshape(-1, z.shape[-1]), strict=True):
        row[_kept_ids(logits_, top_k, top_p, min_p)] = False
    return z.masked_fill(dropped.view(z.shape), -torch.inf)


def token_stats(
    weight: Tensor,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    outputs: tuple[str, ...] = ("logps",),
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    ignore_index: int = -100,
) -> dict[str, Tensor]:
    """Return `outputs`, fields of `TokenStats`, shaped like `target`, 0 at `ignore_index` (argmax: -1).

    `top_k`, `top_p` and `min_p` are those of `filtered`; `logps` is then -inf where the target is dropped.

    >>> weight, input = torch.randn(11, 4), torch.randn(2, 3, 4)
    >>> stats = token_stats(weight, input, torch.tensor([[1, 2, 3], [4, 5, -100]]), outputs=("logps", "argmax"))
    >>> stats["logps"].shape, stats["argmax"][1, 2].item()
    (torch.Size([2, 3]), -1)
    """
    z = logits(weight, input, bias, softcap=softcap, logit_scale=logit_scale, temperature=temperature)
    z = filtered(z, top_k=top_k, top_p=top_p, min_p=min_p)
    valid = target != ignore_index
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
    values = {name: stats[name]() for name in outputs}
    return {name: torch.where(valid, x, -1 if name == "argmax" else 0).to(x.dtype) for name, x in values.items()}
