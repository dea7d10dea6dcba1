"""Launches of Triton kernels. A launch like an earlier one takes a third of the host's time of Triton's own."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_chunked.device import HAS_ACCELERATOR, IS_NVIDIA, accelerator, on_device
from liger_chunked.kernels.backend import INTERPRETED, UNSPECIALIZED, TensorDescriptor, has_own_memory, jit
from liger_chunked.kernels.tuning.generic import REMEMBERED
from liger_chunked.private import KNOWS_TRITON, launch_again, someone_watches_launches
from liger_chunked.types import described

_HAS_CURRENT_DEVICE = not INTERPRETED and HAS_ACCELERATOR
# AMD's variants depend on a tensor's size too.
_REMEMBERS = IS_NVIDIA and not INTERPRETED and KNOWS_TRITON


class Kernel:
    """A Triton kernel with cached variants, run on its tensors' device.

        kernel[grid](x_ptr=x, n=n, BLOCK=128, num_warps=4)      all arguments by name
        kernel(grid, (x,), (n, 128), num_warps=4)               faster: tensors, then numbers, in order

    - `*_ptr`: tensors on one device or in pinned memory, or None (not the first), without gaps or repetitions. With a
      parameter `<name>_stride` or `<name>_<dimension>_stride`, only the last dimension must be contiguous.
    - `*_desc`: tensor descriptors or None.
    - Numbers, also compile-time constants, each of one Python type, because 1 equals 1.0 and True. Triton compiles
      variants for 1 and for multiples of 16, but not of numbers named in `UNSPECIALIZED`. Floats are rounded to
      float32, except those annotated as `tl.float64`, of which there are no variants either.

    Equal dtypes and numbers except these, with 16-byte aligned tensors, share a variant: its first launch is Triton's,
    and the later ones are `private.launch_again`. Triton launches everything else: unaligned and empty tensors, under a
    hook or `triton.knobs.runtime.debug`, for GPUs that are not NVIDIA's, and in releases with another launch.

    Raises:
        ValueError: a launch would read outside of a tensor: it has no memory, or strides that the kernel is not told.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.kernel = jit(function)
        self.variants: dict[Any, Callable[..., None]] = {}
        # Fused multiply-adds are asked for: bits of results rely on them, and Triton 3.10 will not fuse by default
        # (docs/numerics.md).
        self._options: dict[str, Any] = {"enable_fp_fusion": True}
        parameters = inspect.signature(function).parameters
        names = list(parameters)
        self._tensors = [name for name in names if name.endswith("_ptr")]
        self._descriptors = [name for name in names if name.endswith("_desc")]
        self._numbers = [name for name in names if not name.endswith(("_ptr", "_desc"))]
        self._unspecialized = [i for i, name in enumerate(self._numbers) if name in UNSPECIALIZED]
        self._doubles = [
            i for i, name in enumerate(self._numbers) if str(parameters[name].annotation).endswith("float64")
        ]
        strides = [name for name in self._numbers if name.endswith("_stride")]
        self._strided = [any(s.startswith(name.removesuffix("ptr")) for s in strides) for name in self._tensors]
        given = self._given = self._tensors + self._numbers + self._descriptors
        self._in_order: Callable[[tuple[Any, ...]], tuple[Any, ...]] = (
            tuple if given == names else operator.itemgetter(*map(given.index, names))
        )

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        x, y, z, *_ = (*grid, 1, 1)
        return functools.partial(self._launch_by_name, (x, y, z))

    def _launch_by_name(
        self, grid: tuple[int, int, int], *, num_warps: int = 4, num_stages: int | None = None, **arguments: Any
    ) -> None:
        try:
            tensors = tuple(map(arguments.pop, self._tensors))
            numbers = tuple(map(arguments.pop, self._numbers))
            descriptors = tuple(map(arguments.pop, self._descriptors))
        except KeyError as missing:
            raise TypeError(f"a launch takes {self._given}, not found: {missing}") from None
        if arguments:
            raise TypeError(f"a launch takes {self._given}, and not {list(arguments)}")
        self(grid, tensors, numbers, num_warps, num_stages, descriptors)

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
        num_warps: int,
        num_stages: int | None = None,
        descriptors: tuple[TensorDescriptor | None, ...] = (),
    ) -> None:
        device = tensors[0].get_device()  # type: ignore[union-attr]
        if _HAS_CURRENT_DEVICE and device != accelerator.current_device():
            with on_device(device):
                self(grid, tensors, numbers, num_warps, num_stages, descriptors)
            return
        if not _REMEMBERS or someone_watches_launches():
            self._launch_by_triton(grid, tensors, numbers, num_warps, num_stages, descriptors)
            return
        address_bits = 0
        addresses: list[int | None] = []
        dtypes: list[torch.dtype | None] = []
        for x, strided in zip(tensors, self._strided, strict=True):
            if x is None:
                addresses.append(None)
                dtypes.append(None)
                continue
            address = x.data_ptr() if x.is_contiguous() or (strided and x.stride(-1) == 1) else 0
            # No address, or other strides: such a launch takes Triton's way, as unaligned ones do, and its checks.
            address_bits |= address or 1
            addresses.append(address)
            dtypes.append(x.dtype)
        if address_bits % 16:
            self._launch_by_triton(grid, tensors, numbers, num_warps, num_stages, descriptors)
            return
        constants = numbers
        if self._unspecialized or self._doubles:
            rounded = list(numbers)
            for i in self._unspecialized:
                rounded[i] >>= 31  # one variant for all of 32 bits
            for i in self._doubles:
                rounded[i] = 0.0
            constants = tuple(rounded)
        blocks = [None if x is None else (x.base.dtype, *x.block_shape) for x in descriptors]
        key = (device, num_warps, num_stages, constants, *dtypes, *blocks)
        variant = self.variants.get(key)
        if variant is not None:
            variant(grid, device, self._in_order((*addresses, *numbers, *descriptors)))
            return
        variant = launch_again(self._launch_by_triton(grid, tensors, numbers, num_warps, num_stages, descriptors))
        if variant is not None:
            if len(self.variants) >= REMEMBERED:  # threads may add several
                self.variants.clear()
            self.variants[key] = variant

    def _launch_by_triton(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
        num_warps: int,
        num_stages: int | None,
        descriptors: tuple[TensorDescriptor | None, ...],
    ) -> Any:
        """Check the tensors, launch, and return Triton's compiled kernel."""
        for name, strided, x in zip(self._tensors, self._strided, tensors, strict=True):
            if x is not None and not x.data_ptr() and x.numel():
                raise ValueError(f"{name} has no memory that a kernel could read: {described(x)}")
            if x is not None and not _readable(x, strided):
                raise ValueError(f"{name} has strides {x.stride()}, which the kernel does not support")
        arguments = self._in_order((*tensors, *numbers, *descriptors))
        return self.kernel[grid](*arguments, **self.options(num_warps, num_stages))

    def options(self, num_warps: int, num_stages: int | None) -> dict[str, Any]:
        """Return Triton's options of a launch. What does not depend on the arguments is no part of a variant's key."""
        stages = {} if num_stages is None else {"num_stages": num_stages}
        return {"num_warps": num_warps, **stages, **self._options}


def _readable(x: Tensor, strided: bool) -> bool:
    """Whether a kernel reads the elements of `x`, and nothing else, by its address and the strides that it is told."""
    if x.is_contiguous():
        return True
    if strided:
        return x.stride(-1) == 1 or x.shape[-1] == 1
    # In any order, but without gaps or repetitions.
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return span == x.numel() and has_own_memory(x)
