"""Launching a kernel again, at a third of what the first way costs the host."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_chunked.kernels.backend import INTERPRETED, jit

# Where torch.cuda says which device a kernel goes to, NVIDIA's or AMD's. Whether there is one is not asked: that starts
# CUDA, and an import that does keeps its process from forking workers, or from choosing devices.
_HAS_CURRENT_DEVICE = not INTERPRETED and torch.backends.cuda.is_built()
# Where a tensor's dtype and alignment are all of it that Triton compiles for: on AMD's GPUs its size counts too.
_REMEMBERS = torch.version.cuda is not None and not INTERPRETED
_MOST_REMEMBERED = 1 << 10


class Kernel:
    """A Triton kernel that remembers what it was compiled to, and runs on the device of its tensors.

        kernel[grid](x_ptr=x, n=n, BLOCK=128, num_warps=4)      as any kernel of Triton, all arguments by name
        kernel(grid, (x,), (n, 128), num_warps=4)               the same where microseconds count: its signature has the
                                                                tensors, then the numbers

    Triton works out at every launch which of its compiled variants the arguments call for: by the dtypes of tensors, by
    whether their addresses are multiples of 16, and by properties of the numbers (1? a multiple of 16? how wide?). That
    takes the host longer than a small kernel runs. Equal numbers have equal properties, so that a launch whose numbers
    are those of an earlier one, on tensors of the same dtypes and all aligned, takes the variant of that one.

    Parameters named `*_ptr` are tensors, or None for an absent one; the first is always there. Numbers include the
    constants of compilation. Each must always come as the same Python type: 1 equals 1.0 and True.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.kernel = jit(function)
        self.launchers: dict[Any, Callable[..., None]] = {}
        self._names = list(inspect.signature(function).parameters)
        self._tensors = [name for name in self._names if name.endswith("_ptr")]
        self._numbers = [name for name in self._names if not name.endswith("_ptr")]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch_by_name, grid)

    def _launch_by_name(self, grid: tuple[int, ...], *, num_warps: int = 4, **arguments: Any) -> None:
        if arguments.keys() != set(self._names):
            raise TypeError(f"a launch takes {self._names}, got {list(arguments)}")
        tensors, numbers, all_of_them = (
            tuple([arguments[name] for name in names]) for names in (self._tensors, self._numbers, self._names)
        )
        self._launch(grid, tensors, numbers, all_of_them, num_warps)

    def __call__(
        self, grid: tuple[int, ...], tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...], num_warps: int
    ) -> None:
        self._launch(grid, tensors, numbers, (*tensors, *numbers), num_warps)

    def _launch(
        self,
        grid: tuple[int, ...],
        tensors: Sequence[Tensor | None],
        numbers: tuple[Any, ...],
        arguments: Iterable[Any],
        num_warps: int,
    ) -> None:
        """`triton.jit(function)[grid](*arguments, num_warps=num_warps)`."""
        device = tensors[0].get_device()  # type: ignore[union-attr]
        if _HAS_CURRENT_DEVICE and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch(grid, tensors, numbers, arguments, num_warps)
            return
        addresses = 0
        dtypes: list[torch.dtype | None] = []
        for x in tensors if _REMEMBERS else ():
            if x is None:
                dtypes.append(None)
            else:
                addresses |= x.data_ptr()
                dtypes.append(x.dtype)
        if not dtypes or addresses % 16:
            self.kernel[grid](*arguments, num_warps=num_warps)
            return
        key = (device, grid, num_warps, numbers, *dtypes)
        launcher = self.launchers.get(key)
        if launcher is not None:
            launcher(*arguments)
            return
        if len(self.launchers) >= _MOST_REMEMBERED:  # threads of autograd add to it too
            self.launchers.clear()
        compiled = self.kernel[grid](*arguments, num_warps=num_warps)
        self.launchers[key] = compiled[(*grid, 1, 1)[:3]]
