"""The mean negative log-likelihood of tokens and its gradient, a constant, in one launch.

    loss = -sum(logps) / divisor,    dloss/dlogps = -1 / divisor

Bytes: log-probabilities read once, gradients written once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_chunked.kernels.backend import tl, use_triton
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.tuning.generic import NLL


@Kernel
def _nll_kernel(
    logps_ptr, divisor_ptr, grad_ptr, loss_ptr, rounded_ptr, n_tokens, divisor: tl.float64, BLOCK: tl.constexpr
):  # fmt: skip
    # float64, like a Python float: as a float32 argument the divisor would be rounded before the gradient is.
    if divisor_ptr is not None:
        divisor = tl.load(divisor_ptr).to(tl.float64)
    part = tl.program_id(0).to(tl.int64)
    if grad_ptr is not None:
        places = part * BLOCK + tl.arange(0, BLOCK)
        gradient = tl.full([BLOCK], 0.0, tl.float64) - 1.0 / divisor
        tl.store(grad_ptr + places, gradient.to(tl.float32), mask=places < n_tokens)
    # One program adds all tokens, in one order: atomics would change bits from run to run, and one more launch takes
    # longer than this loop.
    if part == 0:
        total = tl.zeros([BLOCK], tl.float64)
        for start in range(0, n_tokens, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            total -= tl.load(logps_ptr + cols, mask=cols < n_tokens, other=0.0).to(tl.float64)
        loss = tl.sum(total, axis=0) / divisor
        tl.store(loss_ptr, loss)
        tl.store(rounded_ptr, loss.to(tl.float32))


def nll_has_kernel(logps: Tensor) -> bool:
    """Whether `nll` runs on these log-probabilities."""
    return use_triton(logps) and logps.numel() > 0


def nll(logps: Tensor, divisor: float | Tensor, with_gradient: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the loss (), in float64 and in float32, and its gradient (N,), or None.

    Args:
        logps: (N,) float32, contiguous.
        divisor: a number, or a tensor () on the device of `logps`.
    """
    device, n_tokens = logps.device, logps.shape[0]
    loss = torch.empty((), dtype=torch.float64, device=device)
    rounded = torch.empty((), dtype=torch.float32, device=device)
    grad = torch.empty_like(logps) if with_gradient else None
    on_device, number = (divisor, 1.0) if isinstance(divisor, Tensor) else (None, float(divisor))
    block, num_warps = NLL
    _nll_kernel(
        (-(-n_tokens // block) if with_gradient else 1, 1, 1),
        (logps, on_device, grad, loss, rounded),
        (n_tokens, number, block),
        num_warps,
    )
    return loss, rounded, grad
