"""Gradients in float64, one block of tokens at a time, to fit in GPU memory next to the measured code."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

IGNORE_INDEX = -100
_BLOCK = 1 << 27  # logits; a block holds a few float64 copies of them


def _blocks(n: int, v: int) -> Iterator[slice]:
    rows = max(1, _BLOCK // v)
    return (slice(start, min(start + rows, n)) for start in range(0, n, rows))


@torch.no_grad()
def token_statistics(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the targets and entropies in float64, in nats, shaped as `t`; 0 at ignored tokens.

    Args:
        x: (..., H).
        w: (V, H).
        t: (...).
    """
    valid = t != IGNORE_INDEX
    rows, y, w = x[valid].double(), t[valid], w.double()
    logps, entropy = torch.empty(2, len(y), dtype=torch.float64, device=x.device)
    for block in _blocks(len(y), len(w)):
        log_p = (rows[block] @ w.t()).log_softmax(-1)
        logps[block] = log_p.gather(1, y[block, None])[:, 0]
        entropy[block] = -(log_p.exp() * log_p).sum(-1)
    dense = torch.zeros(t.shape, dtype=torch.float64, device=x.device)
    return dense.masked_scatter(valid, logps), dense.masked_scatter(valid, entropy)


def token_gradients(
    x: Tensor, w: Tensor, t: Tensor, objective: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return the gradients of `objective(logps, entropy)`, both shaped as `t`, by `input` and `weight`.

    With `g` and `e` the objective's gradients by the log-probability and the entropy `S` of a token,

        dz = g (onehot - p) - e p (log p + S)
    """
    statistics = [values.requires_grad_() for values in token_statistics(x, w, t)]
    objective(*statistics).backward()
    valid = t != IGNORE_INDEX
    entropy = statistics[1].detach()[valid]
    g, e = (torch.zeros_like(entropy) if s.grad is None else s.grad[valid] for s in statistics)
    rows, y, w = x.detach()[valid].double(), t[valid], w.detach().double()
    d_rows, dw = torch.empty_like(rows), torch.zeros_like(w)
    for block in _blocks(len(y), len(w)):
        log_p = (rows[block] @ w.t()).log_softmax(-1)
        p = log_p.exp()
        dz = log_p.add_(entropy[block, None]).mul_(-e[block, None]).sub_(g[block, None]).mul_(p)
        dz.scatter_add_(1, y[block, None], g[block, None])
        d_rows[block] = dz @ w
        dw.addmm_(dz.t(), rows[block])
    dx = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    dx[valid] = d_rows
    return {"input": dx, "weight": dw}


def logits_gradients(x: Tensor, w: Tensor, cost: Callable[[Tensor, slice], Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the mean over tokens of `cost(z, rows)`, evaluated per block of tokens.

    Args:
        x: (N, H).
        w: (V, H).
        cost: maps logits (n, V) and the slice of the N tokens that they belong to, to (n,).
    """
    x, w = x.detach().double(), w.detach().double()
    dx, dw = torch.empty_like(x), torch.zeros_like(w)
    for block in _blocks(len(x), len(w)):
        z = (x[block] @ w.t()).requires_grad_()
        (dz,) = torch.autograd.grad(cost(z, block).sum() / len(x), z)
        dx[block] = dz @ w
        dw.addmm_(dz.t(), x[block])
    return {"input": dx, "weight": dw}
