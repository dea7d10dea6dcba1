"""What the engine knows of `estimate_memory`, which runs a step on the meta device and counts bytes."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch

Part = Literal["logits", "weight_grad", "input_grad", "hidden", "other"]

# The part of `MemoryEstimate` to which the next tensor counts, set just before it is made. Counting it resets this.
# Set and not entered, because every step comes by: 0.1 microseconds, where a context manager takes 2.
part_of_next: ContextVar[Part] = ContextVar("part_of_next", default="other")


@dataclass(frozen=True)
class Estimated:
    """The device that tensors on the meta device stand for.

    Attributes:
        wide_tiles: whether it is a GPU that runs the fused epilogue.
        autocast: its dtype, None if off. `torch.autocast` does not know the meta device.
    """

    wide_tiles: bool
    autocast: torch.dtype | None


# Set while an estimate runs; otherwise tensors without values are an error.
estimated: ContextVar[Estimated | None] = ContextVar("estimated", default=None)
