"""Hide a step's inner graphs from hooks on saved tensors, and its operations from selective checkpoints."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from liger_chunked.device import is_elsewhere, matmul_settings, on_device
from liger_chunked.engine.checks import autocast_dtype
from liger_chunked.private import HAS_VERSIONS, version_of, without_modes_of
from liger_chunked.private import top_saved_tensors_hooks as _top_hooks


def _any_hooks() -> bool:
    """Whether hooks are active."""
    try:
        with disable_saved_tensors_hooks(""):
            return False
    except RuntimeError:
        return True


def hooks_active() -> bool:
    """Whether the caller's hooks, such as a checkpoint's, see saved tensors."""
    if _top_hooks is None:
        return _any_hooks()
    hooks = _top_hooks(False)
    return hooks is not None and hooks[0] is not _pack


def in_checkpoint() -> bool:
    """Whether a non-reentrant checkpoint of torch sees saved tensors; False if torch does not show its hooks."""
    hooks = None if _top_hooks is None else _top_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__


def _pack(x: Tensor) -> tuple[Tensor, int]:
    saved = x.detach()  # a result holding its own node is never freed
    return (saved, version_of(x)) if HAS_VERSIONS else (saved.clone(), 0)  # a copy, which nothing else changes


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    x, version = packed
    if version_of(x) != version:  # torch does not check versions with hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(x.shape)} is at version {version_of(x)}; expected version {version} instead"
        )
    return x


def outside_selective_checkpoints() -> AbstractContextManager[object]:
    """Compute without selective checkpoints, which keep results of operations that a step later changes in place."""
    return without_modes_of("torch.utils.checkpoint")


def isolated() -> AbstractContextManager[object]:
    """Compute without selective checkpoints, and save tensors without outer hooks.

    Autograd calls only the innermost pair of hooks, which checks versions.
    """
    stack = ExitStack()
    stack.enter_context(outside_selective_checkpoints())
    if hooks_active():
        stack.enter_context(saved_tensors_hooks(_pack, _unpack))
    return stack


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


# cuBLAS may add parts of a sum in the product's dtype: in one shape the error was 1.17 times eager code's. TF32 is the
# user's choice.
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
