from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eager.token_stats import logits

DIVERGENCES = ("kl", "reverse_kl", "skew_kl", "skew_reverse_kl", "jsd", "tvd", "cosine", "squared_error")


def _relative_entropy(a: Tensor, b: Tensor) -> Tensor:
    """Return `sum a log(a/b)`, with `0 log 0` as 0."""
    there = a > 0
    return (a * (torch.where(there, a, 1) / torch.where(there, b, 1)).log()).sum(-1)


def divergence(name: str, z: Tensor, t: Tensor, parameter: float = 0.5) -> Tensor:
    """Return the divergence of student and teacher logits `z` and `t`, (..., V) to (...).

    >>> z, t = torch.randn(3, 7), torch.randn(3, 7)
    >>> bool(torch.allclose(divergence("jsd", z, t), divergence("jsd", t, z)))
    True
    """
    if name == "cosine":
        return 1 - (z * t).sum(-1) / (z.norm(dim=-1) * t.norm(dim=-1))
    if name == "squared_error":
        return (z - t).square().mean(-1)
    log_p, log_q = z.log_softmax(-1), t.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    match name:
        case "kl":
            return F.kl_div(log_p, q, reduction="none").sum(-1)
        case "reverse_kl":
            return (p * (log_p - log_q).masked_fill(p == 0, 0)).sum(-1)
        case "skew_kl":
            return _relative_entropy(q, parameter * q + (1 - parameter) * p)
        case "skew_reverse_kl":
            return _relative_entropy(p, parameter * p + (1 - parameter) * q)
        case "jsd" if parameter in (0, 1):
            return divergence("reverse_kl" if parameter else "kl", z, t)
        case "jsd":
            m = (1 - parameter) * p + parameter * q
            return parameter * _relative_entropy(q, m) + (1 - parameter) * _relative_entropy(p, m)
        case "tvd":
            return (p - q).abs().sum(-1) / 2
    raise ValueError(f"unknown divergence {name!r}, expected one of {DIVERGENCES}")


def _bins(log_p: Tensor, ids: Tensor, present: Tensor) -> Tensor:
    """Return log-probabilities of the present `ids`, and of all others together."""
    chosen = torch.zeros_like(log_p, dtype=torch.int).scatter_add(-1, ids, present.int()) > 0
    others = log_p.masked_fill(chosen, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, ids).masked_fill(~present, -torch.inf), others], -1)


def distillation(
    weight: Tensor,
    input: Tensor,
    teacher_weight: Tensor | None = None,
    teacher_input: Tensor | None = None,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    teacher_logps: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    mask: Tensor | None = None,
    num_items: int | Tensor | None = None,
    name: str = "jsd",
    parameter: float = 0.5,
    reduction: str = "mean",
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float | None = None,
    teacher_temperature: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of `LigerFusedLinearDistillationBase` with `divergence(name, ...)`, and its two terms.

    >>> weight, input, teacher = torch.randn(11, 4), torch.randn(3, 4), torch.randn(11, 4)
    >>> loss, metrics = distillation(weight, input, weight, input)
    >>> round(metrics["soft_loss"].item(), 6)
    0.0
    """
    vocab = weight.shape[0]
    s = logits(weight, input, bias, softcap=softcap, logit_scale=logit_scale)
    z = s / temperature
    counts = torch.ones(input.shape[:-1], dtype=torch.bool, device=input.device) if mask is None else mask
    if target is not None:
        counts = counts & (target != ignore_index)
    s, z = s[counts], z[counts]

    if teacher_logps is not None and teacher_ids is not None:
        # Clamped, because absent bins of -inf would give NaN.
        given = teacher_logps[counts].detach().to(z.dtype)
        log_p = z.log_softmax(-1)
        student = _bins(log_p, teacher_ids[counts], given > -torch.inf)
        rest = torch.log1p(-given.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-7)).where(
            student[:, -1:] > -torch.inf, -torch.inf
        )
        teacher = torch.cat([given, rest], -1)
        soft = divergence(name, student.clamp(min=-1e3), teacher.clamp(min=-1e3), parameter)
    else:
        assert teacher_weight is not None and teacher_input is not None
        with torch.no_grad():
            t = logits(
                teacher_weight[:vocab],
                teacher_input,
                None if teacher_bias is None else teacher_bias[:vocab],
                softcap=softcap if teacher_softcap is None else teacher_softcap,
                logit_scale=logit_scale if teacher_logit_scale is None else teacher_logit_scale,
                temperature=temperature if teacher_temperature is None else teacher_temperature,
            )
        soft = divergence(name, z, t[counts], parameter)

    hard = torch.zeros_like(soft)
    if target is not None:
        hard = F.cross_entropy(s, target[counts].long(), reduction="none")
    if reduction == "none":
        soft_loss, hard_loss = (x.new_zeros(counts.shape).masked_scatter(counts, x) for x in (soft, hard))
    else:
        n = max(1, int(counts.sum())) if num_items is None else num_items or 1
        soft_loss, hard_loss = soft.sum() / n, hard.sum() / n
    loss = weight_soft_loss * soft_loss + weight_hard_loss * hard_loss
    return loss, {"soft_loss": soft_loss.detach(), "hard_loss": hard_loss.detach()}
