"""Work beside that of the current stream, for products that do not fill a GPU to their end.

    with Aside(device) as aside:
        with aside.stream():
            ...                 after all that came before
        ...                     beside it
        aside.join()
        ...                     after both

Tensors that outlive the block are made outside of `stream()`: the memory of those that are made in it belongs to the
other stream.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch


@functools.cache
def _other_stream(device: torch.device) -> torch.cuda.Stream:
    # Of high priority: its blocks go to a multiprocessor that is free before those of the current stream do.
    return torch.cuda.Stream(device, priority=-1)


class Aside:
    """A second stream of a GPU, joined at the latest where the block ends, whatever ends it; nothing elsewhere.

    Args:
        device: the current one, where it is a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._other = _other_stream(device) if device.type == "cuda" else None
        self._forked = False

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.join()

    def stream(self) -> AbstractContextManager[object]:
        """What is enqueued inside waits for what the current stream was given until now."""
        if self._other is None:
            return nullcontext()
        self._forked = True
        self._other.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._other)

    def join(self) -> None:
        """What the current stream is given from now on waits for the other."""
        if self._other is not None and self._forked:
            self._forked = False
            torch.cuda.current_stream().wait_stream(self._other)
