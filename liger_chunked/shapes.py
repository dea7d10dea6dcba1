"""A call that computes shapes alone, for `torch.compile`: tensors have none of their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_wanted: ContextVar[bool] = ContextVar("_wanted", default=False)
# Whether the running call computes shapes alone. No Python function, because every step asks.
shapes_only: Callable[[], bool] = _wanted.get


@contextmanager
def computing_shapes() -> Iterator[None]:
    """Let the calls of the block return tensors of the right shape and dtype without computing them."""
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)
