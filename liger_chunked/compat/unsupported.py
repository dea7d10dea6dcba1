"""Refuses Liger-Kernel's unsupported arguments."""

from __future__ import annotations

from torch import Tensor

from liger_chunked.types import shown


def refuse(name: str, value: object, reason: str) -> None:
    """Raise NotImplementedError unless the value is None, False or zero."""
    if isinstance(value, Tensor) or value:
        raise NotImplementedError(f"{name}={shown(value)} is not supported: {reason}")
