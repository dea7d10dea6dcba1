"""What a caller asks of the heads that its model calls, in this thread and until the call returns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Request:
    """Which heads defer, and what their losses return.

    - `defer`: True, also outside of training; False, never; None, as the head is set
    - `withhold`: cross entropies return 0, so that a loss shows what the model adds to it
    - `returns_loss`: the model returns its loss, so that a wrapper finds the graph in what it returns
    - `accuracies`: a list that gets the token accuracy of each fused cross entropy
    """

    defer: bool | None = None
    withhold: bool = False
    returns_loss: bool = False
    accuracies: list[Any] | None = None


_CURRENT = threading.local()
# How many requests are active in any thread: without one, a head asks no thread-local, which Dynamo cannot trace.
ACTIVE = 0
_COUNT = threading.Lock()


def current() -> Request:
    return getattr(_CURRENT, "request", _NONE)


_NONE = Request()


def accuracy() -> list[Any] | None:
    return current().accuracies


@contextlib.contextmanager
def requested(**changes: Any) -> Iterator[Request]:
    """Ask for `changes` to the current request inside the block."""
    global ACTIVE
    before = current()
    _CURRENT.request = now = replace(before, **changes)
    with _COUNT:
        ACTIVE += 1
    try:
        yield now
    finally:
        _CURRENT.request = before
        with _COUNT:
            ACTIVE -= 1
