"""Memory is flat over thousands of training steps.

python -m pytest --exhaustive tests/engine/test_long_runs.py     5,000 steps of each kind
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from liger_chunked import LigerFusedLinearCrossEntropyLoss, LigerFusedLinearGRPOLoss, apply_liger_kernel

Step = Callable[[int], None]
HIDDEN, VOCAB = 8, 40
STEPS, LENGTHS = 5000, 7  # lengths repeat after so many steps
STATM = Path("/proc/self/statm")


def held() -> tuple[int, int, int]:
    """Return the live tensors, and the bytes of Python and of the process."""
    gc.collect()
    alive = sum(issubclass(type(x), Tensor) for x in gc.get_objects())
    resident = int(STATM.read_text().split()[1]) * 4096 if STATM.exists() else 0
    return alive, tracemalloc.get_traced_memory()[0], resident


def trained(loss: Callable[..., Tensor]) -> Step:
    """Return a step of SGD on a linear body and a head, with another length and other ignored tokens each time."""
    body, head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)

    def step(i: int) -> None:
        length = 5 + i % LENGTHS
        target = torch.randint(VOCAB, (4, length))
        target[:, : i % 3] = -100
        loss(head.weight, body(torch.randn(4, length, HIDDEN)), target, -torch.rand(4, length)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sft() -> Step:
    loss = LigerFusedLinearCrossEntropyLoss(logits_budget=8 * VOCAB * 4)
    return trained(lambda w, x, t, _: loss(w, x, t))


def grpo() -> Step:
    loss = LigerFusedLinearGRPOLoss(beta=0.04, logits_budget=8 * VOCAB * 4)
    return trained(lambda w, x, t, logps: loss(w, x, t, torch.randn(4), old_logps=logps, ref_logps=logps)[0])


def patched_model() -> Step:
    model = pytest.importorskip("tiny").model()
    apply_liger_kernel(model, logits_budget=1 << 14)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(i: int) -> None:
        ids = torch.randint(10, 90, (2, 5 + i % LENGTHS))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.exhaustive
@pytest.mark.ordinary_memory
@pytest.mark.parametrize("kind", [sft, grpo, patched_model])
def test_memory_is_flat_over_5000_steps(kind: Callable[[], Step]) -> None:
    torch.manual_seed(0)
    step = kind()
    tracemalloc.start()
    try:
        for i in range(STEPS // 5):
            step(i)
        held()  # allocates itself
        before = held()
        for i in range(STEPS // 5, STEPS):
            step(i)
        tensors, traced, resident = (y - x for x, y in zip(before, held(), strict=True))
    finally:
        tracemalloc.stop()
    assert tensors == 0
    # The smallest object that a step could keep takes 16 bytes; a tensor that C++ keeps takes more than 512.
    assert traced < 16 * 4 / 5 * STEPS
    assert resident < 512 * 4 / 5 * STEPS
