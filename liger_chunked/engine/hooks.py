"""Hide a step's inner graphs from hooks on saved tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from liger_chunked.private import HAS_VERSIONS, version_of
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


_NOTHING_TO_HIDE = nullcontext()


def isolated() -> AbstractContextManager[object]:
    """Save tensors without outer hooks: autograd calls only the innermost pair, which checks versions."""
    return saved_tensors_hooks(_pack, _unpack) if hooks_active() else _NOTHING_TO_HIDE
