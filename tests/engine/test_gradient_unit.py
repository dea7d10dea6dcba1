"""Test float16 gradients of chunks that differ by many orders of magnitude."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKTOLoss,
)

VOCAB, HIDDEN, SEQUENCES, TOKENS = 97, 16, 4, 6
ONE_SEQUENCE = TOKENS * VOCAB * 2  # bytes of its logits
UPSTREAM = 1024.0

Run = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]


def saturated_pair(w: Tensor, x: Tensor, y: Tensor, budget: int | None) -> Tensor:
    """Return a batch in which the first pair's gradient is 1e-7 of the second's."""
    ref = logps(w, x, y)
    ref[0] -= 160
    return LigerFusedLinearDPOLoss(beta=0.1, logits_budget=budget and 2 * budget)(w, x, y, ref_logps=ref)[0]


def saturated_sequence(w: Tensor, x: Tensor, y: Tensor, budget: int | None) -> Tensor:
    ref = logps(w, x, y)
    ref[0] -= 160
    labels = torch.tensor([True, False, True, False], device=x.device)
    return LigerFusedLinearKTOLoss(logits_budget=budget)(w, x, y, labels, ref_logps=ref, kl=0.0)[0]


def advantages(*values: float) -> Run:
    def run(w: Tensor, x: Tensor, y: Tensor, budget: int | None) -> Tensor:
        given = torch.tensor(values, device=x.device, dtype=torch.float32)
        loss = LigerFusedLinearGRPOLoss(reduction="dapo", logits_budget=budget)
        return loss(w, x, y, advantages=given, num_items=65536)[0]

    return run


def token_weights(w: Tensor, x: Tensor, y: Tensor, budget: int | None) -> Tensor:
    weights = torch.ones(y.shape, device=x.device)
    weights[0] = 1e-7
    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum", logits_budget=budget)
    return loss(w, x, y, token_weights=weights)


def logps(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        log_p = (x.double() @ w.double().t()).log_softmax(-1)
        return log_p.gather(-1, y[..., None])[..., 0].sum(1).float()


RUNS = {
    "dpo": saturated_pair,
    "kto": saturated_sequence,
    "grpo-rising": advantages(1e-6, 1.0, -1.0, 0.5),
    "grpo-none-first": advantages(0.0, 1.0, -1.0, 0.5),
    "grpo-falling": advantages(1.0, 0.5, 1e-6, 0.0),
    "grpo-none": advantages(0.0, 0.0, 0.0, 0.0),
    "cross-entropy": token_weights,
}


def gradients(run: Run, dtype: torch.dtype, budget: int | None, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(VOCAB, HIDDEN, generator=generator).half().to(device, dtype).requires_grad_()
    x = torch.randn(SEQUENCES, TOKENS, HIDDEN, generator=generator).half().to(device, dtype).requires_grad_()
    y = torch.randint(VOCAB, (SEQUENCES, TOKENS), generator=generator).to(device)
    (run(w, x, y, budget) * UPSTREAM).backward()
    return [w.grad.double(), x.grad.double()]


@pytest.mark.sampled(interpreted=True)
@pytest.mark.triton
@pytest.mark.parametrize("budget", [ONE_SEQUENCE, None], ids=["packs", "one"])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_chunks(run, budget, device):
    exact = gradients(run, torch.float64, None, device)
    ours = gradients(run, torch.float16, budget, device)
    for a, b in zip(ours, exact, strict=True):
        assert a.isfinite().all()
        assert (a - b).norm() <= 3e-3 * b.norm()
