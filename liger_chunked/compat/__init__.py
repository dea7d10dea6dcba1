"""Liger-Kernel 0.8.5's names and signatures: users change only their imports (docs/compare.md).

`install()` serves imports of `liger_kernel` itself, where Liger-Kernel is not installed.

Arguments that only tune kernels have no effect. Unsupported ones that would change the result raise
NotImplementedError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from liger_chunked.compat.imports import install, uninstall
from liger_chunked.compat.unsupported import missing

__all__ = ["install", "uninstall"]


if not TYPE_CHECKING:  # else every wrong name would pass

    def __getattr__(name: str) -> Any:
        return missing(__name__, name)
