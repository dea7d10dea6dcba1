"""Launching a kernel again, at a quarter of what the first way costs the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_chunked.kernels.backend import INTERPRETED, jit

# Where a tensor's dtype and alignment are all of it that Triton compiles for: on AMD's GPUs its size counts too.
_REMEMBERS = torch.version.cuda is not None and not INTERPRETED
_MOST_REMEMBERED = 1 << 10


class Kernel:
    """A Triton kernel of tensors, then numbers, that remembers what it was compiled to.

    Triton works out at every launch which of its compiled variants the arguments call for: by the dtypes of tensors, by
    whether their addresses are multiples of 16, and by properties of the numbers (1? a multiple of 16? how wide?). That
    takes the host longer than a small kernel runs. Equal numbers have equal properties, so that a launch whose numbers
    are those of an earlier one, on tensors of the same dtypes and all aligned, takes the variant of that one.

    Numbers include the constants of compilation. Each must always come as the same Python type: 1 equals 1.0 and True.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.kernel = jit(function)
        self.launchers: dict[Any, Callable[..., None]] = {}

    def __call__(
        self, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...], num_warps: int
    ) -> None:
        """`triton.jit(function)[grid](*tensors, *numbers, num_warps=num_warps)`; None stands for an absent tensor."""
        addresses = 0
        dtypes: list[torch.dtype | None] = []
        for x in tensors if _REMEMBERS else ():
            if x is None:
                dtypes.append(None)
            else:
                addresses |= x.data_ptr()
                dtypes.append(x.dtype)
        if not dtypes or addresses % 16:
            self.kernel[grid](*tensors, *numbers, num_warps=num_warps)
            return
        key = (torch.cuda.current_device(), grid, num_warps, numbers, *dtypes)
        launcher = self.launchers.get(key)
        if launcher is not None:
            launcher(*tensors, *numbers)
            return
        if len(self.launchers) == _MOST_REMEMBERED:
            self.launchers.clear()
        self.launchers[key] = self.kernel[grid](*tensors, *numbers, num_warps=num_warps)[grid]
