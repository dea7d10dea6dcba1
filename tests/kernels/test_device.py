"""Accelerators other than CUDA's: all that the package asks of one goes through `liger_chunked/device.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liger_chunked import device
from liger_chunked.kernels import backend, tuning
from liger_chunked.kernels.tuning.generic import GENERIC
from liger_chunked.kernels.tuning.hopper import HOPPER

FAKE = """
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
import torch

name, log = sys.argv[1], []

class Stream:
    def __init__(self, device=None, priority=0):
        self.name = "current" if device is None else f"of {device}, priority {priority}"
    def wait_stream(self, other):
        log.append(f"{self.name} waits for {other.name}")
    def synchronize(self):
        log.append(f"{self.name} synchronizes")

@contextmanager
def block(what):
    log.append(f"enter {what}")
    yield
    log.append(f"leave {what}")

fake = ModuleType(f"torch.{name}")
fake.Stream, fake.current_device, fake.device_count = Stream, lambda: 0, lambda: 2
fake.current_stream = lambda device=None: Stream()
fake.stream = lambda stream: block(stream.name)
fake.device = lambda device: block(device)
fake.is_current_stream_capturing = lambda: log.append("capturing?") or True
fake.get_device_properties = lambda device: SimpleNamespace(**{sys.argv[2]: 24})
fake.is_available = fake.is_initialized = lambda: True
fake.get_amp_supported_dtype = lambda: [torch.bfloat16]
if name == "npu":
    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, fake)
else:
    torch.xpu = fake
torch.accelerator.current_accelerator = lambda check_available=False: torch.device(name)
torch.get_device_module.cache_clear()

from liger_chunked import device
from liger_chunked.engine.surroundings import gemms
from liger_chunked.engine.side_stream import SideStream
from liger_chunked.kernels import backend, launch, tuning

second = torch.device(name, 1)
assert device.accelerator is launch.accelerator is fake and device.HAS_ACCELERATOR
assert device.processors(second) == 24
assert device.is_accelerator(second) and not device.is_gpu(second)
assert device.capability(second) is None and device.architecture(second) is None
assert not backend.has_wide_tiles(second) and tuning.TUNING[second] is tuning.GENERIC
assert device.is_capturing() and log.pop() == "capturing?"
with gemms(second, torch.float32):
    assert log == [f"enter {second}"]
assert log.pop() == f"leave {second}"
log.clear()
with gemms(torch.device(name, 0), torch.float32):
    assert not log
with SideStream(second) as side, side.stream():
    pass
other = f"of {second}, priority -1"
assert log == [f"{other} waits for current", f"enter {other}", f"leave {other}", f"current waits for {other}"], log
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "count"), [("xpu", "max_compute_units"), ("npu", "vector_core_num")])
def test_another_accelerator_is_asked_by_its_own_module(name: str, count: str, fresh_process: Any) -> None:
    """Streams, the current device, properties and captures come from a fake `torch.xpu` or `torch.npu`."""
    fresh_process.run(FAKE, name, count)


def test_a_cpu_has_no_accelerator() -> None:
    cpu = torch.device("cpu")
    assert not (device.is_accelerator(cpu) or device.is_gpu(cpu) or device.is_elsewhere(cpu))
    assert device.architecture(cpu) is None and tuning.TUNING[cpu] is GENERIC


def test_ascend_takes_torch_and_intel_takes_triton() -> None:
    kinds = {"cuda": (True, False), "xpu": (False, True), "npu": (False, False)}
    runs = {name: device.runs_triton(SimpleNamespace(is_cuda=cuda, is_xpu=xpu)) for name, (cuda, xpu) in kinds.items()}
    assert runs == {"cuda": True, "xpu": True, "npu": False}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a device look like a GPU of NVIDIA, by its capability, or of AMD, by its name."""

    def pretend(found: tuple[int, int] | str, index: int) -> torch.device:
        is_nvidia = not isinstance(found, str)
        monkeypatch.setattr(device, "IS_NVIDIA", is_nvidia)
        monkeypatch.setattr(backend, "INTERPRETED", False)
        properties = SimpleNamespace(gcnArchName=found)
        # ROCm has a capability too: (9, 4) for gfx942.
        capability = found if is_nvidia else (9, 4)
        fake = SimpleNamespace(get_device_capability=lambda _: capability, get_device_properties=lambda _: properties)
        monkeypatch.setattr(device, "accelerator", fake)
        for function in (device.capability, device.architecture, backend.has_wide_tiles):
            function.cache_clear()
        return torch.device("cuda", index)

    yield pretend
    for function in (device.capability, device.architecture, backend.has_wide_tiles):
        function.cache_clear()


GPUS = {
    "sm_80": (8, 0),
    "sm_89": (8, 9),
    "sm_90": (9, 0),
    "sm_100": (10, 0),
    "sm_120": (12, 0),
    "gfx942": "gfx942:sramecc+:xnack-",
    "gfx950": "gfx950:sramecc+:xnack-",
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", GPUS)
def test_what_needs_hopper_is_off_elsewhere(name: str, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused epilogue, its wide tiles and Hopper's constants: each architecture has its table by its name."""
    if backend.triton is None:
        pytest.skip("no Triton")
    monkeypatch.setattr(backend, "WIDE_TILES", backend.wide_tiles_setting(None))
    here = gpu(GPUS[name], 90 + list(GPUS).index(name))
    assert device.architecture(here) == name
    assert backend.has_wide_tiles(here) == (name == "sm_90")
    assert tuning.table_of(name) is (HOPPER if name == "sm_90" else GENERIC)
    fresh = type(tuning.TUNING)()
    assert fresh[here] is tuning.table_of(name)
