"""Hide a step's inner graphs from hooks on saved tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks


def _any_hooks() -> bool:
    """Whether hooks are active."""
    try:
        with disable_saved_tensors_hooks(""):
            return False
    except RuntimeError:
        return True


_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009, because type checkers do not know it
_top_hooks = getattr(_autograd, "_top_saved_tensors_default_hooks", None)


def hooks_active() -> bool:
    """Whether the caller's hooks, such as a checkpoint's, see saved tensors."""
    if _top_hooks is None:
        return _any_hooks()
    hooks = _top_hooks(False)
    return hooks is not None and hooks[0] is not _pack


def _pack(x: Tensor) -> tuple[Tensor, int]:
    return x.detach(), x._version  # detached: a result holding its own node is never freed


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    x, version = packed
    if x._version != version:  # torch does not check versions with hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(x.shape)} is at version {x._version}; expected version {version} instead"
        )
    return x


_NOTHING_TO_HIDE = nullcontext()


def isolated() -> AbstractContextManager[object]:
    """Save tensors without outer hooks: autograd calls only the innermost pair, which checks versions."""
    return saved_tensors_hooks(_pack, _unpack) if hooks_active() else _NOTHING_TO_HIDE
