"""Whether a training step ran without logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from liger_chunked.deferred import DeferredLogits
from liger_chunked.deferred import logits as deferred_logits


def is_deferred(logits: Any) -> bool:
    """Whether `logits` stand for real ones that nothing has computed."""
    return isinstance(logits, DeferredLogits) and not logits.is_computed


def real(logits: Any) -> Tensor:
    """Return the real logits that `logits` are or stand for."""
    return logits.tensor() if isinstance(logits, DeferredLogits) else logits


def assert_fused(output: Any) -> None:
    """Check that a step returned a loss, and that nothing asked for its logits."""
    assert isinstance(output.loss, Tensor)
    assert is_deferred(output.logits), f"the step has logits, a {type(output.logits).__name__}"


def assert_real_logits(output: Any) -> None:
    """Check that a step returned a loss and ordinary logits, or that something in it asked for them."""
    assert isinstance(output.loss, Tensor)
    logits = output.logits
    assert isinstance(logits, Tensor) or (isinstance(logits, DeferredLogits) and logits.is_computed), repr(logits)


@contextlib.contextmanager
def asked_logits() -> Iterator[list[str]]:
    """Yield a list of what needs real logits of a stand-in inside the block."""
    asked: list[str] = []
    log_use = deferred_logits._log_use

    def noted(stand_in: DeferredLogits, name: str) -> str:
        asked.append(name)
        return log_use(stand_in, name)

    deferred_logits._log_use = noted
    try:
        yield asked
    finally:
        deferred_logits._log_use = log_use
