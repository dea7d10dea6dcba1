"""Requests of a caller to the heads of its model, in this thread and until the call returns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Request:
    """A request: whether heads defer, and how their losses run.

    - `defer`: True, also outside of training; False, never; None, as the head is set
    - `withhold`: cross entropies return 0, so that the loss of a forward is the sum of its other terms
    - `accuracies`: a list that gets the token accuracy of each fused cross entropy
    - `sources`: a list that gets the `Source` of each call of a head that defers
    - `waiting`: the call that made the request, until the forward of its model takes it (an integration's object)
    """

    defer: bool | None = None
    withhold: bool = False
    accuracies: list[Any] | None = None
    sources: list[Any] | None = None
    waiting: Any = None


_CURRENT = threading.local()
# The number of active requests, of all threads. Dynamo can read it, and cannot trace the thread-local.
ACTIVE = 0
_COUNT = threading.Lock()


def current() -> Request:
    return getattr(_CURRENT, "request", _NONE)


_NONE = Request()


def accuracy() -> list[Any] | None:
    return current().accuracies


# Attribute of a head while a compiled graph may call it: what is asked of it, and the answers. `Request` is in a
# thread-local, which Dynamo cannot trace.
ASKED = "_liger_asked"


class Asked:
    """What a request says to a head inside a compiled graph.

    - `defer`, `withhold`: as in `Request`; `accuracy`: whether cross entropies add to `accuracies`
    - `gave_zero`: whether a cross entropy was withheld
    """

    def __init__(self, request: Request) -> None:
        self.defer, self.withhold, self.accuracy = request.defer, request.withhold, request.accuracies is not None
        self.accuracies: list[Any] = []
        self.gave_zero = False


@contextlib.contextmanager
def requested(**changes: Any) -> Iterator[Request]:
    """Change the current request inside the block."""
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
