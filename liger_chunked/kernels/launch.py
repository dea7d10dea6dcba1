"""A cache of compiled Triton kernels: cached launches take a third of the host's time."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from liger_chunked.device import HAS_ACCELERATOR, IS_NVIDIA, accelerator, on_device
from liger_chunked.kernels.backend import INTERPRETED, UNSPECIALIZED, TensorDescriptor, has_own_memory, jit
from liger_chunked.kernels.tuning.generic import REMEMBERED
from liger_chunked.types import described

# Not ImportError alone: a broken Triton raises its own error again (see backend.py).
try:
    from triton.knobs import runtime as hooks
    from triton.runtime import driver
except Exception:
    hooks = driver = None
_HAS_CURRENT_DEVICE = not INTERPRETED and HAS_ACCELERATOR
# AMD's variants depend on a tensor's size too.
_REMEMBERS = IS_NVIDIA and not INTERPRETED and hooks is not None
_MOST_REMEMBERED = REMEMBERED
# Run function, handle, launch options, getter of a stream.
_Variant = tuple[Callable[..., None], int, Any, Callable[[int], int]]


# A kernel, and its call without values: grid, dtypes, numbers, warps, stages, descriptors.
Launch = tuple["Kernel", tuple[Any, ...]]
# Where `collected_launches` puts them, a list in a tuple, which is true as long as it is set.
_collected: ContextVar[tuple[list[Launch]] | None] = ContextVar("_collected", default=None)
# Whether launches are collected. No Python function, because every product asks.
is_collecting: Callable[[], object] = _collected.get


@contextmanager
def collected_launches() -> Iterator[list[Launch]]:
    """Collect what the block would launch. Nothing runs: results are not set, and tensors may be on the meta device."""
    launches: list[Launch] = []
    token = _collected.set((launches,))
    try:
        yield launches
    finally:
        _collected.reset(token)


def _readable(x: Tensor, strided: bool) -> bool:
    if x.is_contiguous():
        return True
    if strided:
        return x.stride(-1) == 1 or x.shape[-1] == 1
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return span == x.numel() and has_own_memory(x)


def _same(received: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    return len(received) == len(expected) and all(
        a is b or (isinstance(b, (int, float, tuple, str)) and type(a) is type(b) and a == b)
        for a, b in zip(received, expected, strict=True)
    )


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

    Equal dtypes and numbers except these, with 16-byte aligned tensors, share a variant. Cached launches use
    Triton's private interface, after a check in the second launch. Otherwise, or with a hook or
    `triton.knobs.runtime.debug`, Triton launches.
    """

    _is_proven = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self.kernel = jit(function)
        self.variants: dict[Any, _Variant] = {}
        self._unproven: dict[Any, tuple[_Variant, Any]] = {}
        self._remembers = _REMEMBERS
        names = list(inspect.signature(function).parameters)
        self._tensors = [name for name in names if name.endswith("_ptr")]
        self._descriptors = [name for name in names if name.endswith("_desc")]
        self._numbers = [name for name in names if not name.endswith(("_ptr", "_desc"))]
        self._unspecialized = [self._numbers.index(name) for name in UNSPECIALIZED if name in names]
        annotations = {name: str(p.annotation) for name, p in inspect.signature(function).parameters.items()}
        self._doubles = [i for i, name in enumerate(self._numbers) if annotations[name].endswith("float64")]
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
        call = grid, tensors, numbers, num_warps, num_stages, descriptors
        collected = _collected.get()
        if collected is not None:
            collected[0].append((self, _without_values(call)))
            return
        device = tensors[0].get_device()  # type: ignore[union-attr]
        if _HAS_CURRENT_DEVICE and device != accelerator.current_device():
            with on_device(device):
                self(*call)
            return
        try:
            by_triton = (
                not self._remembers
                or hooks.launch_enter_hook.calls
                or hooks.launch_exit_hook.calls
                or hooks.debug
                or getattr(hooks, "add_stages_inspection_hook", None)
            )
        except AttributeError:
            by_triton = True
        if by_triton:
            self._launch(*call)
            return
        bits = 0
        addresses: list[int | None] = []
        dtypes: list[torch.dtype | None] = []
        for x, strided in zip(tensors, self._strided, strict=True):
            if x is None:
                addresses.append(None)
                dtypes.append(None)
            elif not (x.is_contiguous() or (strided and x.stride(-1) == 1)):
                self._launch(*call)
                return
            else:
                address = x.data_ptr()
                if not address:  # empty, or an error
                    self._launch(*call)
                    return
                bits |= address
                addresses.append(address)
                dtypes.append(x.dtype)
        if bits % 16:
            self._launch(*call)
            return
        blocks = [None if x is None else (x.base.dtype, *x.block_shape) for x in descriptors]
        constants = numbers
        if self._unspecialized or self._doubles:
            of_key = list(numbers)
            for i in self._unspecialized:
                of_key[i] >>= 31  # one variant for all of 32 bits
            for i in self._doubles:
                of_key[i] = 0.0
            constants = tuple(of_key)
        key = (device, num_warps, num_stages, constants, *dtypes, *blocks)
        variant = self.variants.get(key)
        if variant is None:
            self._launch_and_remember(key, call, device)
            return
        run, function, options, stream = variant
        arguments = self._in_order((*addresses, *numbers, *descriptors))
        run(*grid, stream(device), function, options, None, None, None, *arguments)

    def _launch_and_remember(self, key: Any, call: tuple[Any, ...], device: int) -> None:
        for remembered in (self.variants, self._unproven):
            if len(remembered) >= _MOST_REMEMBERED:  # threads may add several
                remembered.clear()
        unproven = self._unproven.pop(key, None)
        if unproven is not None:
            self._prove(*unproven, call, device)
            if self._is_proven:
                self.variants[key] = unproven[0]
            return
        compiled = self._launch(*call)
        if compiled is None:  # a compilation hook launched
            return
        try:
            variant = compiled.run, compiled.function, compiled.packed_metadata, driver.active.get_current_stream
        except AttributeError:
            self._remembers = False
            return
        if self._is_proven:
            self.variants[key] = variant
            self._unproven.clear()
        else:
            self._unproven[key] = variant, compiled

    def _prove(self, variant: _Variant, compiled: Any, call: tuple[Any, ...], device: int) -> None:
        run, function, options, stream = variant
        grid, tensors, numbers, _, _, descriptors = call
        by_tensor = self._in_order((*tensors, *numbers, *descriptors))
        addresses = (None if x is None else x.data_ptr() for x in tensors)
        by_address = self._in_order((*addresses, *numbers, *descriptors))

        def observe(*received: Any, **named: Any) -> Any:
            start = (*grid, stream(device), function, options)
            end = (hooks.launch_enter_hook, hooks.launch_exit_hook, *by_tensor)
            if named or not (_same(received[:6], start) and _same(received[7:], end)):
                return run(*received, **named)
            try:
                result = run(*start, None, None, None, *by_address)
            except TypeError:
                return run(*received, **named)
            self._is_proven = True
            return result

        try:
            compiled._run = observe
            observed = compiled.run is observe
        except AttributeError:
            observed = False
        try:
            self._launch(*call)
        finally:
            if observed:
                compiled._run = run
        self._remembers = self._is_proven

    def _launch(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor | None],
        numbers: tuple[Any, ...],
        num_warps: int,
        num_stages: int | None,
        descriptors: tuple[TensorDescriptor | None, ...],
    ) -> Any:
        for name, strided, x in zip(self._tensors, self._strided, tensors, strict=True):
            if x is None:
                continue
            if not x.data_ptr() and x.numel():
                raise ValueError(f"{name} has no memory that a kernel could read: {described(x)}")
            if not _readable(x, strided):
                raise ValueError(f"{name} has strides {x.stride()}, which the kernel does not support")
        arguments = self._in_order((*tensors, *numbers, *descriptors))
        return self.kernel[grid](*arguments, **_options(num_warps, num_stages))

    def compile(
        self,
        grid: tuple[int, int, int],
        dtypes: tuple[torch.dtype | None, ...],
        numbers: tuple[Any, ...],
        num_warps: int,
        num_stages: int | None,
        descriptors: tuple[TensorDescriptor | None, ...],
    ) -> Any:
        """Return Triton's compiled variant of a collected launch on aligned tensors, for the active target."""
        arguments = self._in_order((*dtypes, *numbers, *descriptors))
        return self.kernel.warmup(*arguments, grid=grid, **_options(num_warps, num_stages))


def _without_values(call: tuple[Any, ...]) -> tuple[Any, ...]:
    return call[0], tuple(None if x is None else x.dtype for x in call[1]), *call[2:]


def _options(num_warps: int, num_stages: int | None) -> dict[str, Any]:
    """Return the options of launches and of compilations ahead.

    Fused multiply-adds are asked for: bits of results rely on them, and Triton 3.10 will not fuse by default
    (docs/numerics.md). All launches have this option, so it is no part of a variant's key.
    """
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    return options if num_stages is None else {**options, "num_stages": num_stages}
