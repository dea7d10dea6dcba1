"""Arguments of Liger-Kernel that would change the result, and cannot here."""

from __future__ import annotations

from torch import Tensor

from liger_chunked.types import shown


def refuse(name: str, value: object, reason: str) -> None:
    """Raise for an argument that is set.

    Raises:
        NotImplementedError: `value` is neither None nor False nor zero.
    """
    if isinstance(value, Tensor) or value:
        raise NotImplementedError(f"{name}={shown(value)} is not supported: {reason}")
