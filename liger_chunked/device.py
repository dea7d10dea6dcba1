"""What the package assumes of an accelerator by its name in torch; no other file names one.

| torch calls it | GPU | Triton kernels |
|---|---|---|
| `cuda` | NVIDIA, and AMD with ROCm | yes |
| `xpu` | Intel | yes |
| `npu` | Ascend, with torch_npu | no: PyTorch code runs |

A build of torch serves one of them. Its module, such as `torch.cuda`, has streams, the current device and properties
under the same names for all three. The module is bound once, at import, which does not initialize the device: launches
ask it for the current device hundreds of times in a step.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from liger_chunked import versions

versions.require("liger_chunked", "torch")

_KNOWN = ("cuda", "xpu", "npu")


def _type_of_build() -> str | None:
    """Return the type of the accelerator that this torch was built for, or whose extension it loaded."""
    device = torch.accelerator.current_accelerator()
    return device.type if device is not None and device.type in _KNOWN else None


_TYPE = _type_of_build()
HAS_ACCELERATOR = _TYPE is not None
# A CPU build has torch.cuda too, whose functions raise.
ACCELERATOR = _TYPE or "cuda"
accelerator: ModuleType = torch.get_device_module(ACCELERATOR)
# NVIDIA's compiler, PTX and driver, unlike ROCm under the same name.
IS_NVIDIA = torch.version.cuda is not None
# Settings of matrix products. ROCm's library reads them too; others do not.
matmul_settings: Any = torch.backends.cuda.matmul
_can_capture = hasattr(accelerator, "is_current_stream_capturing")


def is_gpu(device: torch.device) -> bool:
    """Whether `device` is a GPU of NVIDIA or AMD, where torch has products with `out_dtype` and pinned memory maps."""
    return device.type == "cuda"


def is_on_gpu(x: Tensor) -> bool:
    """Return `is_gpu` of a tensor's device, faster."""
    return x.is_cuda


def runs_triton(x: Tensor) -> bool:
    """Whether the kernels run on the tensor's device. Ascend's Triton has not been tried, so `npu` takes torch."""
    return x.is_cuda or x.is_xpu


def is_accelerator(device: torch.device) -> bool:
    """Whether `device` has streams: work on it overlaps the host's."""
    return device.type in _KNOWN


def is_elsewhere(device: torch.device) -> bool:
    """Whether `device` is an accelerator other than the current one, on which products would run."""
    return device.type in _KNOWN and device.index != accelerator.current_device()


def on_device(device: torch.device | int) -> AbstractContextManager[Any]:
    """Make `device` the current one within a block."""
    return accelerator.device(device)


def current_stream(device: torch.device | None = None) -> Any:
    return accelerator.current_stream() if device is None else accelerator.current_stream(device)


def priority_stream(device: torch.device) -> Any:
    """Return a new stream whose blocks free multiprocessors take first."""
    return accelerator.Stream(device, priority=-1)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Enqueue the block's work on `stream`."""
    return accelerator.stream(stream)


def is_capturing() -> bool:
    """Whether the current stream is captured into a graph, so that the host must not wait for the device."""
    return _can_capture and accelerator.is_current_stream_capturing()


@functools.cache
def processors(device: torch.device) -> int:
    """Return the multiprocessors or compute units of `device`."""
    if device.type not in _KNOWN:
        return 2  # to test sweeps
    properties = accelerator.get_device_properties(device)
    names = ("multi_processor_count", "max_compute_units", "vector_core_num")
    return next((n for name in names if (n := getattr(properties, name, None))), 1)


@functools.cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU, (9, 0) for Hopper, or None. Initializes the device."""
    return accelerator.get_device_capability(device) if IS_NVIDIA and is_gpu(device) else None


@functools.cache
def architecture(device: torch.device) -> str | None:
    """Return what Triton compiles for, "sm_90" or "gfx942", or None elsewhere. Initializes the device."""
    found = capability(device)
    if found is not None:
        return f"sm_{found[0]}{found[1]}"
    if not is_gpu(device):
        return None
    # AMD appends features, as in gfx942:sramecc+:xnack-.
    return accelerator.get_device_properties(device).gcnArchName.partition(":")[0]
