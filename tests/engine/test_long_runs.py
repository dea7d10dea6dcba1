"""Memory is flat over thousands of training steps.

python -m pytest --exhaustive tests/engine/test_long_runs.py     5,000 steps of each kind
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    apply_liger_kernel,
)

Step = Callable[[int], None]
HIDDEN, VOCAB = 8, 40
STEPS, LENGTHS = 5000, 7  # lengths repeat after so many steps
STATM = Path("/proc/self/statm")


class Growth(NamedTuple):
    """From a fifth of the steps to their end: live tensors, and bytes of Python and of the process."""

    tensors: int
    traced: int
    resident: int


def growth(step: Step, steps: int) -> Growth:
    def moment() -> Growth:
        gc.collect()
        alive = sum(issubclass(type(x), Tensor) for x in gc.get_objects())
        resident = int(STATM.read_text().split()[1]) * 4096 if STATM.exists() else 0
        return Growth(alive, tracemalloc.get_traced_memory()[0], resident)

    first = None
    tracemalloc.start()
    try:
        for i in range(steps):
            if i == steps // 5:
                moment()  # allocates itself
                first = moment()
            step(i)
        last = moment()
    finally:
        tracemalloc.stop()
    assert first is not None
    return Growth(*(y - x for x, y in zip(first, last, strict=True)))


def trained(loss: Callable[[nn.Parameter, Tensor, Tensor, Tensor], Tensor], sequences: int) -> Step:
    """Return a step of SGD on a linear body and a head, with another length and other ignored tokens each time."""
    body, head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)

    def step(i: int) -> None:
        length = 5 + i % LENGTHS
        input = body(torch.randn(sequences, length, HIDDEN))
        target = torch.randint(VOCAB, (sequences, length))
        target[:, : i % 3] = -100
        loss(head.weight, input, target, -torch.rand(sequences, length)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sft() -> Step:
    loss = LigerFusedLinearCrossEntropyLoss(logits_budget=8 * VOCAB * 4)
    return trained(lambda w, x, t, _: loss(w, x, t), sequences=4)


def dpo() -> Step:
    loss = LigerFusedLinearDPOLoss(logits_budget=24 * VOCAB * 4)
    return trained(lambda w, x, t, logps: loss(w, x, t, ref_logps=logps)[0], sequences=4)


def grpo() -> Step:
    loss = LigerFusedLinearGRPOLoss(beta=0.04, logits_budget=8 * VOCAB * 4)

    def value(weight: nn.Parameter, input: Tensor, target: Tensor, logps: Tensor) -> Tensor:
        return loss(weight, input, target, torch.randn(4), old_logps=logps, ref_logps=logps)[0]

    return trained(value, sequences=4)


def patched_model() -> Step:
    tiny = pytest.importorskip("tiny")
    model = tiny.model()
    apply_liger_kernel(model, logits_budget=1 << 14)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(i: int) -> None:
        ids = torch.randint(10, 90, (2, 5 + i % LENGTHS))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


KINDS: dict[str, Callable[[], Step]] = {"SFT": sft, "DPO": dpo, "GRPO": grpo, "patched Llama": patched_model}


@pytest.mark.exhaustive
@pytest.mark.ordinary_memory
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_flat_over_5000_steps(kind: str) -> None:
    torch.manual_seed(0)
    found = growth(KINDS[kind](), STEPS)
    assert found.tensors == 0, found
    # The smallest object that a step could keep takes 16 bytes; a tensor that C++ keeps takes more than 512.
    assert found.traced < 16 * 4 / 5 * STEPS, found
    assert found.resident < 512 * 4 / 5 * STEPS, found
