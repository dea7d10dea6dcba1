"""A side stream, for two products that do not fill the GPU alone (docs/tuning.md, "Products and chunks").

Work inside `with side.stream()` starts after work enqueued before, and overlaps later work until `side.join()`.
Memory allocated inside is the side stream's: create tensors that outlive the block before.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from liger_chunked.device import current_stream, is_accelerator, on_stream, priority_stream


@functools.cache
def _other_stream(device: torch.device) -> Any:
    return priority_stream(device)


class SideStream:
    def __init__(self, device: torch.device) -> None:
        self._other = _other_stream(device) if is_accelerator(device) else None
        self._forked = False

    def __enter__(self) -> SideStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.join()

    def stream(self) -> AbstractContextManager[object]:
        if self._other is None:
            return nullcontext()
        self._forked = True
        self._other.wait_stream(current_stream())
        return on_stream(self._other)

    def join(self) -> None:
        if self._other is not None and self._forked:
            self._forked = False
            current_stream().wait_stream(self._other)
