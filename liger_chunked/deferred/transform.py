"""The transform of logits that a loss takes: a scale and a softcap."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from liger_chunked.types import LogitOptions


@dataclass(frozen=True)
class Transform:
    """`outer * tanh(inner * z)`, or `inner * z` without `outer`, of logits z."""

    inner: float = 1.0
    outer: float | None = None

    def times(self, factor: float) -> Transform | None:
        """None: a loss cannot express the product."""
        if not math.isfinite(factor) or factor == 0:
            return None
        if self.outer is None:
            return Transform(self.inner * factor)
        return Transform(self.inner, self.outer * factor) if factor > 0 else None

    def tanh(self) -> Transform | None:
        return Transform(self.inner, 1.0) if self.outer is None else None

    def options(self, **options: Any) -> LogitOptions:
        """Return it as softcap and scale: `softcap * tanh(logit_scale * z / softcap)`."""
        return _options(self, **options)


@functools.lru_cache(maxsize=64)
def _options(transform: Transform, **options: Any) -> LogitOptions:
    if transform.outer is None:
        return LogitOptions(logit_scale=transform.inner, **options)
    return LogitOptions(softcap=transform.outer, logit_scale=transform.inner * transform.outer, **options)
