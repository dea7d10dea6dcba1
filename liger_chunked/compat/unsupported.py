"""Arguments of Liger-Kernel that would change the result, and cannot here."""

from __future__ import annotations


def refuse(name: str, value: object, reason: str) -> None:
    """Raise for an argument that is set.

    Raises:
        NotImplementedError: `value` is neither None nor False nor zero.
    """
    if value:
        raise NotImplementedError(f"{name}={value!r} is not supported: {reason}")
