from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from liger_chunked.device import is_elsewhere, matmul_settings, on_device
from liger_chunked.engine.checks import autocast_dtype


class Refused:
    """A setting of matrix products that allows rounded sums, off while any step runs on any thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._inside = 0  # counted, because the setting is the process's, and another thread's step may end first
        self._was_given = False

    def __enter__(self) -> None:
        with self._lock:
            if getattr(matmul_settings, self.name):
                setattr(matmul_settings, self.name, False)
                self._was_given = True
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._was_given:
                self._was_given = False
                setattr(matmul_settings, self.name, True)


# cuBLAS may add parts of a sum in the product's dtype: in one shape the error was 1.17 times eager code's
# (docs/tuning.md). TF32 is the user's choice.
_OF_DTYPE: dict[torch.dtype | None, tuple[Refused, ...]] = {
    torch.bfloat16: (Refused("allow_bf16_reduced_precision_reduction"),),
    torch.float16: (Refused("allow_fp16_reduced_precision_reduction"), Refused("allow_fp16_accumulation")),
}


@functools.cache
def refused(dtypes: tuple[torch.dtype | None, ...]) -> tuple[Refused, ...]:
    return tuple(permission for dtype in dict.fromkeys(dtypes) for permission in _OF_DTYPE.get(dtype, ()))


def gemms(device: torch.device, *dtypes: torch.dtype | None) -> AbstractContextManager[None]:
    """Run a block on `device`, without autocast; products accumulate in float32."""
    permissions, autocast = refused(dtypes), autocast_dtype(device.type) is not None
    elsewhere = is_elsewhere(device)
    if len(permissions) == 1 and not (autocast or elsewhere):
        return permissions[0]
    if not (permissions or autocast or elsewhere):
        return _NOTHING_TO_CHANGE
    return _changed(device, permissions, autocast, elsewhere)


_NOTHING_TO_CHANGE = nullcontext()


@contextmanager
def _changed(device: torch.device, permissions: tuple[Refused, ...], autocast: bool, elsewhere: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for permission in permissions:
            stack.enter_context(permission)
        if elsewhere:
            stack.enter_context(on_device(device))
        if autocast:
            # The step asked autocast for the dtype of its products, and casts to it itself.
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield
