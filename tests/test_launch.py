"""Remembered launches, and the reduction that ends a norm's backward."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conftest import expects_triton
from torch import Tensor

import liger_chunked as lc
from liger_chunked.engine.passes import gemms
from liger_chunked.kernels import launch
from liger_chunked.kernels.backend import INTERPRETED
from liger_chunked.kernels.partial_sums import sum_partials


class Recorder:
    """In the place of a jitted function and of what it compiles to: says which of the two was launched, on what."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.received: tuple[Any, ...] = ()

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def jitted(*arguments: Any, num_warps: int, num_stages: int | None = None) -> Recorder:
            self.launched.append("jitted")
            self.received = (*grid, *arguments)
            self.num_stages = num_stages
            return self

        return jitted

    def run(self, *received: Any) -> None:
        """The grid, stream, function, its metadata, three times nothing of launch hooks, the kernel's arguments."""
        assert received[3:9] == (STREAM, self.function, self.packed_metadata, None, None, None)
        self.launched.append("compiled")
        self.received = (*received[:3], *received[9:])


STREAM = 11


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> launch.Kernel:
    monkeypatch.setattr(launch, "_REMEMBERS", True)
    monkeypatch.setattr(launch, "_HAS_CURRENT_DEVICE", False)
    monkeypatch.setattr(launch, "jit", lambda _: Recorder())
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: STREAM)))
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

    def is_contiguous(self) -> bool:
        return True


X, Y = torch.zeros(32), torch.zeros(32)
CALL = {"grid": (4, 1, 1), "tensors": (X, None, Y), "numbers": (32, 1e-6, True, 128), "num_warps": 4}


def test_equal_launches_are_remembered(kernel: launch.Kernel) -> None:
    kernel(**CALL)
    kernel(**CALL)
    kernel(**{**CALL, "tensors": (Y, None, X.clone())})
    assert kernel.kernel.launched == ["jitted", "compiled", "compiled"]


def test_a_remembered_launch_gets_addresses(kernel: launch.Kernel) -> None:
    kernel(**CALL)
    assert kernel.kernel.received == (4, 1, 1, X, None, Y, *CALL["numbers"])
    kernel(**{**CALL, "grid": (5, 2, 1)})
    assert kernel.kernel.received == (5, 2, 1, X.data_ptr(), None, Y.data_ptr(), *CALL["numbers"])


class Descriptor(NamedTuple):
    """What a launch asks of a descriptor."""

    base: Tensor
    block_shape: list[int]


@pytest.mark.parametrize(
    ("block", "dtype", "num_stages", "remembered"),
    [
        (16, torch.float32, 3, True),
        (8, torch.float32, 3, False),
        (16, torch.half, 3, False),
        (16, torch.float32, 4, False),
    ],
)
def test_launches_with_descriptors(kernel, block, dtype, num_stages, remembered) -> None:
    """They are remembered by what Triton compiles for, and handed over as they are."""
    kernel = launch.Kernel(lambda x_desc, y_ptr, n, out_desc: None)
    first, second = Descriptor(X, [16, 16]), Descriptor(torch.zeros(16, dtype=dtype), [16, block])
    kernel[(4,)](x_desc=first, y_ptr=Y, n=32, out_desc=None, num_stages=3)
    assert kernel.kernel.num_stages == 3
    kernel[(5,)](x_desc=second, y_ptr=Y, n=32, out_desc=None, num_stages=num_stages)
    assert kernel.kernel.launched == ["jitted", "compiled" if remembered else "jitted"]
    assert kernel.kernel.received == (5, 1, 1, second, Y.data_ptr() if remembered else Y, 32, None)


def test_hooks_see_every_launch(kernel: launch.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton calls them, of a profiler for one: such launches go through it."""
    kernel(**CALL)
    nothing, something = SimpleNamespace(calls=[]), SimpleNamespace(calls=[print])
    for enter, leave in ((something, nothing), (nothing, something), (nothing, nothing)):
        hooks = SimpleNamespace(launch_enter_hook=enter, launch_exit_hook=leave)
        monkeypatch.setattr(launch, "hooks", hooks)
        kernel(**CALL)
    assert kernel.kernel.launched == ["jitted", "jitted", "jitted", "compiled"]


@pytest.mark.parametrize(
    "change",
    [
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


@pytest.mark.parametrize("index", [0, 1])
def test_products_run_on_the_device_of_their_tensors(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    @contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", enter)
    device = torch.device("cuda", index)
    with gemms(device, torch.float32):
        assert entered == ([device] if index else [])


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
    kernel[4, 1, 1](**named, num_warps=4)
    kernel[(4,)](**named)
    kernel(**CALL)
    assert kernel.kernel.launched == ["jitted", "compiled", "compiled"]
    for wrong in ({name: value for name, value in named.items() if name != "eps"}, {**named, "epsilon": 1e-6}):
        with pytest.raises(TypeError, match=r"a launch takes .*'eps'.*eps"):
            kernel[(4,)](**wrong)


def test_arguments_in_the_order_of_the_signature(kernel: launch.Kernel) -> None:
    """By name, tensors need not come first in it."""
    mixed = launch.Kernel(lambda x_ptr, x_stride, y_ptr, y_stride, n: None)
    named = {"x_ptr": X, "y_ptr": Y, "n": 3, "x_stride": 1, "y_stride": 2}
    mixed[(4,)](**named)
    assert mixed.kernel.received == (4, 1, 1, X, 1, Y, 2, 3)
    mixed[(4,)](**named)
    assert mixed.kernel.received == (4, 1, 1, X.data_ptr(), 1, Y.data_ptr(), 2, 3)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (X.view(4, 8)[:, ::2], Y),
        (X.view(4, 8).T, Y),
        (X[:1].expand(4, 8), Y),
        (X, Y[::2]),
        (X, Y[:1].expand(4)),
        (X, Y.view(4, 8)[:, :4]),
        (X, Y.view(4, 8)[:, 1]),
    ],
)
def test_a_layout_that_a_kernel_is_not_told_of_is_refused(kernel: launch.Kernel, x: Tensor, y: Tensor) -> None:
    told = launch.Kernel(lambda x_ptr, y_ptr, x_row_stride: None)
    with pytest.raises(ValueError, match=f"{'y' if y is not Y else 'x'}_ptr lies in memory by strides"):
        told((4, 1, 1), (x, y), (8,), 4)
    assert told.kernel.launched == []


def test_a_remembered_launch_asks_for_layouts_too(kernel: launch.Kernel) -> None:
    told = launch.Kernel(lambda x_ptr, y_ptr, x_row_stride: None)
    wide = torch.zeros(4, 8, 2)

    def launched(x: Tensor, y: Tensor) -> list[str]:
        told.kernel.launched.clear()
        told((4, 1, 1), (x, y), (8,), 4)
        return told.kernel.launched

    assert launched(wide[..., 0].contiguous(), Y) == ["jitted"]
    assert launched(X.view(4, 8)[:, :4], Y) == ["compiled"]
    for x, y in ((wide[..., 0], Y), (X, wide[0, :, 0]), (X, Y[:1].expand(4))):
        with pytest.raises(ValueError, match="_ptr lies in memory by strides"):
            launched(x, y)
    assert launched(X.view(2, 2, 8).transpose(0, 1), Y.view(2, 2, 8).transpose(0, 1)) == ["jitted"]


@pytest.mark.parametrize("x", [X.view(4, 8)[:, :4], X.view(2, 2, 8).transpose(0, 1), X[:8].expand(4, 8)])
@pytest.mark.parametrize("y", [Y, Y.view(2, 2, 8).transpose(0, 1), Y[:0], Y[0]])
def test_other_layouts_are_read(kernel: launch.Kernel, x: Tensor, y: Tensor) -> None:
    told = launch.Kernel(lambda x_ptr, y_ptr, x_row_stride: None)
    told((4, 1, 1), (x, y), (8,), 4)
    assert told.kernel.launched == ["jitted"]


def test_memory_of_launches_ends(kernel: launch.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST_REMEMBERED", 2)
    for rows in (1, 2, 3, 3):
        kernel(**{**CALL, "numbers": (rows,)})
    assert kernel.kernel.launched == ["jitted", "jitted", "jitted", "compiled"]
    assert len(kernel.variants) == 1


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
    first, second, alone = (
        torch.empty(33, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16, torch.float32)
    )
    sum_partials(partial, first, second)
    expected = partial.double().sum(1)
    torch.testing.assert_close(first.double(), expected[0], rtol=1e-6, atol=1e-5)
    # Triton's interpreter truncates.
    torch.testing.assert_close(second.double(), expected[1], rtol=2 ** -(7 if INTERPRETED else 8), atol=1e-5)
    sum_partials(partial[:1], alone)
    assert torch.equal(alone, first)
