"""Test that a chunk's dW on the side stream and its dX wait for each other where they must."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps

import pytest
import torch

from liger_chunked import LigerFusedLinearCrossEntropyLoss
from liger_chunked.engine import epilogue, sink
from liger_chunked.engine.side_stream import SideStream
from liger_chunked.engine.sink import WeightGradient

TOKENS, HIDDEN, VOCAB = 16, 72, 603
BUDGET = 8 * VOCAB * 2  # two chunks


class Recorded:
    """CPU stand-ins for streams, which record the work that they get."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Recorded) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(device: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the order of work on the current stream and on the side stream."""
    if device == "cuda":
        pytest.skip("recorded on a CPU")
    entries: list[str] = []
    current, other = Recorded("current", entries), Recorded("other", entries)
    stack = [current]

    @contextmanager
    def stream(chosen: Recorded):
        stack.append(chosen)
        try:
            yield
        finally:
            stack.pop()

    def begin(self: SideStream, device: torch.device) -> None:
        self._other, self._forked = other, False

    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stack[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(SideStream, "__init__", begin)

    def watch(module: object, name: str, label: str) -> None:
        function = getattr(module, name)

        @wraps(function)
        def watched(*args, **kwargs):
            entries.append(f"{stack[-1].name}: {label}")
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)

    watch(sink, "accumulate", "dW")
    watch(sink, "add_rows_", "targets of dW")
    watch(epilogue, "accumulate", "product of dX")
    watch(epilogue, "add_target_rows_of_weight", "write dX")
    watch(epilogue, "scale_rows", "scale")
    watch(sink, "sorted_rows", "order of targets")
    watch(epilogue, "project_exp", "exponentials")
    return entries


def step(device: str, weight: bool = True, input: bool = True) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def made(rows: int, grad: bool) -> torch.Tensor:
        return torch.randn(rows, HIDDEN, generator=generator).to(device, torch.bfloat16).requires_grad_(grad)

    w, x = made(VOCAB, weight), made(TOKENS, input)
    target = torch.randint(VOCAB, (TOKENS,), generator=generator).to(device)
    loss = LigerFusedLinearCrossEntropyLoss(logits_budget=BUDGET)(w, x, target)
    return torch.autograd.grad(loss, [p for p in (w, x) if p.requires_grad])


@pytest.fixture(autouse=True)
def small_chunks(by_epilogue: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small chunks use the fused epilogue too."""
    monkeypatch.setattr(epilogue, "SMALLEST", 0)


FORK, JOIN = "other waits for current", "current waits for other"


@pytest.mark.few(1)
@pytest.mark.triton
@pytest.mark.parametrize("blocks", [1, 2])
def test_dx_is_written_when_dw_is_done(blocks, device, log, monkeypatch):
    monkeypatch.setattr(epilogue, "PRODUCT", 8 * HIDDEN // blocks)
    step(device)
    begin = ["current: exponentials", "current: scale", FORK, "other: order of targets"]
    end = ["current: product of dX", JOIN, "current: write dX"]
    end += (blocks - 1) * ["current: product of dX", "current: write dX"]
    product, targets = "other: dW", "other: targets of dW"
    # If there is a dW already, the small kernels come first.
    assert log == [*begin, product, targets, *end, *begin, targets, product, *end]


@pytest.mark.few(1)
@pytest.mark.triton
@pytest.mark.parametrize("trainable", ["weight", "input"])
def test_one_gradient_stays_on_its_stream(trainable, device, log):
    step(device, **{"weight": False, "input": False, trainable: True})
    assert not any("other" in entry for entry in log)


@pytest.mark.triton
def test_a_failure_joins(device, log, monkeypatch):
    """After an error the streams must join: memory that the exception frees may be reused."""

    def fail(*_args, **_kwargs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(epilogue, "add_target_rows_of_weight", fail)  # fails after a join
    with pytest.raises(torch.OutOfMemoryError):
        step(device)
    assert log.count(FORK) == log.count(JOIN) == 1
    log.clear()
    monkeypatch.setattr(WeightGradient, "add_exponentials", fail)  # fails before a join
    with pytest.raises(torch.OutOfMemoryError):
        step(device)
    assert log[-1] == JOIN


@pytest.mark.triton
def test_a_late_dw(device, monkeypatch):
    """A late dW: the next chunk's exponentials, the dX that overwrites dW's factor, and later work wait for it."""
    if device == "cpu":
        pytest.skip("a CPU has one stream")
    in_time = step(device)
    add = WeightGradient.add_exponentials

    def late(*args, **kwargs):
        torch.cuda._sleep(100_000_000)
        add(*args, **kwargs)

    monkeypatch.setattr(WeightGradient, "add_exponentials", late)
    for expected, got in zip(in_time, step(device), strict=True):
        assert torch.equal(expected, got)
