"""Hide a step's inner graphs from hooks on saved tensors, and its operations from selective checkpoints."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

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
