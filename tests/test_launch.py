"""Remembered launches, and the reduction that ends a norm's backward."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from conftest import expects_triton

import liger_chunked as lc
from liger_chunked.kernels import launch
from liger_chunked.kernels.backend import INTERPRETED
from liger_chunked.kernels.partial_sums import sum_partials


class Recorder:
    """In the place of a jitted function and of what it compiles to: says which of the two was launched."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def jitted(*args: Any, **options: Any) -> Recorder:
            self.launched.append("jitted" if options else "compiled")
            return self

        return jitted


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> launch.Kernel:
    monkeypatch.setattr(launch, "_REMEMBERS", True)
    monkeypatch.setattr(launch, "_HAS_CURRENT_DEVICE", False)
    monkeypatch.setattr(launch, "jit", lambda _: Recorder())
    return launch.Kernel(lambda x_ptr, residual_ptr, y_ptr, n, eps, FLAG, BLOCK: None)


class OnDevice(NamedTuple):
    """What a launch asks of a tensor."""

    device: int
    address: int = 0
    dtype: torch.dtype = torch.float32

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.device


X, Y = torch.zeros(32), torch.zeros(32)
CALL = {"grid": (4, 1, 1), "tensors": (X, None, Y), "numbers": (32, 1e-6, True, 128), "num_warps": 4}


def test_equal_launches_are_remembered(kernel: launch.Kernel) -> None:
    kernel(**CALL)
    kernel(**CALL)
    kernel(**{**CALL, "tensors": (Y, None, X.clone())})
    assert kernel.kernel.launched == ["jitted", "compiled", "compiled"]


@pytest.mark.parametrize(
    "change",
    [
        {"grid": (5, 1, 1)},
        {"numbers": (31, 1e-6, True, 128)},
        {"numbers": (32, 1e-6, False, 128)},
        {"num_warps": 8},
        {"tensors": (X, Y, None)},
        {"tensors": (X, None, Y.half())},
        {"tensors": (X, None, Y[1:])},
    ],
    ids=lambda change: "-".join(change),
)
def test_other_launches_are_not(kernel: launch.Kernel, change: dict[str, Any]) -> None:
    kernel(**CALL)
    kernel(**{**CALL, **change})
    assert kernel.kernel.launched == ["jitted", "jitted"]


def test_other_devices_are_not(kernel: launch.Kernel) -> None:
    for device in (0, 1, 1):
        kernel(**{**CALL, "tensors": (OnDevice(device), None, OnDevice(device))})
    assert kernel.kernel.launched == ["jitted", "jitted", "compiled"]


def test_runs_on_the_device_of_its_tensors(kernel: launch.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    current = 0

    @contextmanager
    def on(device: int) -> Iterator[None]:
        nonlocal current
        saved, current = current, device
        yield
        current = saved

    launched: list[int] = []
    monkeypatch.setattr(launch, "_HAS_CURRENT_DEVICE", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(kernel, "kernel", {(4, 1, 1): lambda *_, **__: launched.append(current)})
    unaligned = OnDevice(1, address=8)
    kernel(**{**CALL, "tensors": (unaligned, None, unaligned)})
    assert (launched, current) == ([1], 0)


def test_by_name_is_by_position(kernel: launch.Kernel) -> None:
    named = {"x_ptr": X, "residual_ptr": None, "n": 32, "y_ptr": Y, "FLAG": True, "BLOCK": 128, "eps": 1e-6}
    kernel[(4, 1, 1)](**named, num_warps=4)
    kernel[(4, 1, 1)](**named)
    kernel(**CALL)
    assert kernel.kernel.launched == ["jitted", "compiled", "compiled"]
    with pytest.raises(TypeError, match="a launch takes"):
        kernel[(4, 1, 1)](**{name: value for name, value in named.items() if name != "eps"})


def test_memory_of_launches_ends(kernel: launch.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST_REMEMBERED", 2)
    for rows in (1, 2, 3, 3):
        kernel(**{**CALL, "numbers": (rows,)})
    assert kernel.kernel.launched == ["jitted", "jitted", "jitted", "compiled"]
    assert len(kernel.launchers) == 1


def test_an_import_leaves_cuda_alone() -> None:
    """A process that has started CUDA can neither fork workers that use it nor choose its devices."""
    code = "import torch; torch.cuda.is_available = torch.cuda.device_count = None; import liger_chunked"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.triton
def test_alignment_may_change(device: str) -> None:
    """What was compiled for aligned addresses is not launched on others."""
    memory = torch.randn(8 * 64 + 1, device=device)
    weight = torch.ones(64, device=device)
    for shift in (0, 1, 0, 1):
        x = memory[shift:][: 8 * 64].view(8, 64)
        y = lc.liger_rms_norm(x, weight)
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))


@pytest.mark.triton
@pytest.mark.parametrize("n_partials", [0, 1, 255, 300])
def test_partial_sums(n_partials: int, device: str) -> None:
    if not expects_triton(device):
        pytest.skip("of the Triton kernels alone")
    partial = torch.randn(2, n_partials, 33, device=device)
    first, second = sum_partials(partial, (torch.float32, torch.bfloat16))
    expected = partial.double().sum(1)
    torch.testing.assert_close(first.double(), expected[0], rtol=1e-6, atol=1e-5)
    # Triton's interpreter truncates.
    torch.testing.assert_close(second.double(), expected[1], rtol=2 ** -(7 if INTERPRETED else 8), atol=1e-5)
    (alone,) = sum_partials(partial[:1], (torch.float32,))
    assert torch.equal(alone, first)
    assert first.dtype == torch.float32 and second.dtype == torch.bfloat16
