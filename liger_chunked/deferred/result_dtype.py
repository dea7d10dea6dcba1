"""The dtypes of losses on real logits, which autocast may widen: asked of torch, once for each case."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "nll_loss": F.nll_loss,
    "log_softmax": lambda logits, target: F.log_softmax(logits, -1),
    "logsumexp": lambda logits, target: logits.logsumexp(-1),
    "mean": lambda logits, target: logits.mean(-1),
    "sum": lambda logits, target: logits.sum(-1),
}


def result_dtype(function: str, dtype: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype of a function of `_FUNCTIONS` on logits of `dtype`, under the current autocast."""
    enabled = torch.is_autocast_enabled(device)
    if not enabled and dtype in (torch.float32, torch.float64):
        return dtype
    return _asked(function, dtype, device, torch.get_autocast_dtype(device) if enabled else None)


@functools.lru_cache(maxsize=128)
def _asked(function: str, dtype: torch.dtype, device: str, autocast: torch.dtype | None) -> torch.dtype:
    with torch.no_grad():
        logits = torch.zeros(1, 2, dtype=dtype, device=device)
        return _FUNCTIONS[function](logits, torch.zeros(1, dtype=torch.long, device=device)).dtype
