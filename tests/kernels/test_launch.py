"""Remembered launches, and the reduction that ends a norm's backward."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conftest import expects_triton
from torch import Tensor

import liger_chunked as lc
from liger_chunked import private
from liger_chunked.engine.surroundings import gemms
from liger_chunked.kernels import launch
from liger_chunked.kernels.backend import INTERPRETED
from liger_chunked.layers import rms_norm
from liger_chunked.layers.norm_rows import sum_partials


class Recorder:
    """Replaces both a jitted function and its compiled kernel; records which of the two was launched, and its
    arguments.
    """

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.received: tuple[Any, ...] = ()

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def jitted(*arguments: Any, num_warps: int, enable_fp_fusion: bool, num_stages: int | None = None) -> Recorder:
            assert enable_fp_fusion
            self.launched.append("jitted")
            self.received = (*grid, *arguments)
            self.num_stages = num_stages
            return self

        return jitted

    def run(self, *received: Any) -> None:
        """Receives grid, stream, function, its metadata, three None for launch hooks, then the kernel's arguments."""
        assert received[3:9] == (STREAM, self.function, self.packed_metadata, None, None, None)
        self.launched.append("compiled")
        self.received = (*received[:3], *received[9:])


STREAM = 11


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> launch.Kernel:
    monkeypatch.setattr(launch, "_REMEMBERS", True)
    monkeypatch.setattr(launch, "_HAS_CURRENT_DEVICE", False)
    monkeypatch.setattr(launch, "jit", lambda _: Recorder())
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: STREAM))
    monkeypatch.setattr(private, "_triton_driver", driver)
    return launch.Kernel(lambda x_ptr, residual_ptr, y_ptr, n, eps, FLAG, BLOCK: None)


class OnDevice(NamedTuple):
    """The methods of a tensor that a launch calls."""

    device: int
    address: int = 16
    dtype: torch.dtype = torch.float32
    is_meta: bool = False

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.device

    def is_contiguous(self) -> bool:
        return True


X, Y = torch.zeros(32), torch.zeros(32)
CALL = {"grid": (4, 1, 1), "tensors": (X, None, Y), "numbers": (32, 1e-6, True, 128), "num_warps": 4}


MOVED = (Y, None, X.clone())


def on(device: int) -> tuple[Any, ...]:
    return OnDevice(device), None, OnDevice(device)


@pytest.mark.parametrize(
    ("first", "change", "remembered"),
    [
        ({}, {}, True),
        ({}, {"grid": (5, 2, 1), "tensors": MOVED}, True),
        ({}, {"numbers": (31, 1e-6, True, 128)}, False),
        ({}, {"numbers": (32, 1e-6, False, 128)}, False),
        ({}, {"num_warps": 8}, False),
        ({}, {"tensors": (X, Y, None)}, False),
        ({}, {"tensors": (X, None, Y.half())}, False),
        ({}, {"tensors": (X, None, Y[1:])}, False),
        ({"tensors": on(0)}, {"tensors": on(1)}, False),
        ({"tensors": on(1)}, {"tensors": on(1)}, True),
    ],
)
def test_equal_launches_are_remembered(
    kernel: launch.Kernel, first: dict[str, Any], change: dict[str, Any], remembered: bool
) -> None:
    """A remembered launch gets addresses."""
    kernel(**CALL | first)
    assert kernel.kernel.received == (4, 1, 1, *(CALL | first)["tensors"], *CALL["numbers"])
    call = CALL | first | change
    kernel(**call)
    assert kernel.kernel.launched == ["jitted", "compiled" if remembered else "jitted"]
    if remembered:
        addresses = [None if x is None else x.data_ptr() for x in call["tensors"]]
        assert kernel.kernel.received == (*call["grid"], *addresses, *call["numbers"])


class Descriptor(NamedTuple):
    """The attributes of a descriptor that a launch reads."""

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
    """Launches are remembered by the properties that Triton compiles for. Descriptors are passed unchanged."""
    kernel = launch.Kernel(lambda x_desc, y_ptr, n, out_desc: None)
    first, second = Descriptor(X, [16, 16]), Descriptor(torch.zeros(16, dtype=dtype), [16, block])
    kernel[(4,)](x_desc=first, y_ptr=Y, n=32, out_desc=None, num_stages=3)
    assert kernel.kernel.num_stages == 3
    kernel[(5,)](x_desc=second, y_ptr=Y, n=32, out_desc=None, num_stages=num_stages)
    assert kernel.kernel.launched == ["jitted", "compiled" if remembered else "jitted"]
    assert kernel.kernel.received == (5, 1, 1, second, Y.data_ptr() if remembered else Y, 32, None)


@pytest.mark.parametrize(("n_tokens", "remembered"), [(33, True), (1, True), (1 << 31, False)])
def test_other_numbers_of_tokens_are(kernel: launch.Kernel, n_tokens: int, remembered: bool) -> None:
    """Triton compiles one variant for all numbers of 32 bits."""
    kernel = launch.Kernel(lambda x_ptr, n, n_tokens, BLOCK: None)
    kernel((4, 1, 1), (X,), (32, 32, 128), 4)
    kernel((4, 1, 1), (X,), (32, n_tokens, 128), 4)
    assert kernel.kernel.launched == ["jitted", "compiled" if remembered else "jitted"]
    assert kernel.kernel.received == (4, 1, 1, X.data_ptr() if remembered else X, 32, n_tokens, 128)
    kernel((4, 1, 1), (X,), (33, n_tokens, 128), 4)
    assert kernel.kernel.launched[-1] == "jitted"


def test_memory_of_launches_ends(kernel: launch.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "REMEMBERED", 2)
    for rows in (1, 2, 3, 3):
        kernel(**{**CALL, "numbers": (rows,)})
    assert kernel.kernel.launched == ["jitted", "jitted", "jitted", "compiled"]
    assert len(kernel.variants) == 1


def test_a_remembered_kernel_stays_loaded(kernel: launch.Kernel) -> None:
    """Triton unloads the code of a compiled kernel that nothing holds, for example once its caches are cleared."""

    class Compiled:
        run, function, packed_metadata = staticmethod(lambda *_: None), 7, (4, 1, 0)

    compiled = Compiled()
    alive, remembered = weakref.ref(compiled), private.launch_again(compiled)
    del compiled
    assert remembered is not None and alive() is not None


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


PERMISSIONS = {
    "allow_bf16_reduced_precision_reduction": torch.bfloat16,
    "allow_fp16_reduced_precision_reduction": torch.float16,
    "allow_fp16_accumulation": torch.float16,
}


@pytest.fixture(params=PERMISSIONS)
def permission(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set one of cuBLAS's flags that allow reduced-precision sums, as a user would."""
    matmul, name = torch.backends.cuda.matmul, request.param
    before = getattr(matmul, name)
    setattr(matmul, name, True)
    yield name
    setattr(matmul, name, before)


def is_given(permission: str) -> bool:
    return getattr(torch.backends.cuda.matmul, permission)


CPU = torch.device("cpu")


def test_products_refuse_to_round_sums(permission: str) -> None:
    dtype = PERMISSIONS[permission]
    with gemms(CPU, dtype, dtype):
        assert not is_given(permission)
        with gemms(CPU, dtype, torch.float64):  # a nested step
            assert not is_given(permission)
        assert not is_given(permission)
    assert is_given(permission)
    with pytest.raises(ValueError, match="a failing step"), gemms(CPU, dtype):
        raise ValueError("a failing step")
    assert is_given(permission)
    with gemms(CPU, torch.float32):
        assert is_given(permission)
    setattr(torch.backends.cuda.matmul, permission, False)
    with gemms(CPU, dtype):
        assert not is_given(permission)
    assert not is_given(permission)  # it was not given before either


@pytest.mark.few(1)
def test_steps_on_many_threads(permission: str) -> None:
    dtype, seen = PERMISSIONS[permission], []

    def steps() -> None:
        for _ in range(300):
            with gemms(CPU, dtype):
                seen.append(is_given(permission))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=steps) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert len(seen) == 1200 and not any(seen)
    assert is_given(permission)


def test_a_permission_given_during_a_step(permission: str) -> None:
    """The next step that enters removes it, and the last one that leaves restores it."""
    dtype = PERMISSIONS[permission]
    setattr(torch.backends.cuda.matmul, permission, False)
    with gemms(CPU, dtype):
        setattr(torch.backends.cuda.matmul, permission, True)
        with gemms(CPU, dtype):
            assert not is_given(permission)
    assert is_given(permission)


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


WIDE = torch.zeros(4, 8, 2)
TURNED = X.view(2, 2, 8).transpose(0, 1)


@pytest.mark.few(5)
@pytest.mark.parametrize("first", [None, (X, Y)], ids=["first", "remembered"])
@pytest.mark.parametrize(
    ("x", "y", "wrong"),
    [
        (X.view(4, 8)[:, ::2], Y, "x"),
        (X.view(4, 8).T, Y, "x"),
        (X[:1].expand(4, 8), Y, "x"),
        (WIDE[..., 0], Y, "x"),
        (X, Y[::2], "y"),
        (X, Y[:1].expand(4), "y"),
        (X, Y.view(4, 8)[:, :4], "y"),
        (X, Y.view(4, 8)[:, 1], "y"),
        (X.view(4, 8)[:, :4], Y, None),
        (TURNED, TURNED, None),
        (X[:8].expand(4, 8), Y[:0], None),
        (X, Y[0], None),
    ],
)
def test_a_layout_that_a_kernel_is_not_told_of_is_refused(
    kernel: launch.Kernel, x: Tensor, y: Tensor, wrong: str | None, first: Any
) -> None:
    told = launch.Kernel(lambda x_ptr, y_ptr, x_row_stride: None)
    if first is not None:
        told((4, 1, 1), first, (8,), 4)
    before = len(told.kernel.launched)
    if wrong is None:
        told((4, 1, 1), (x, y), (8,), 4)
        assert len(told.kernel.launched) == before + 1
        return
    with pytest.raises(ValueError, match=f"{wrong}_ptr has strides"):
        told((4, 1, 1), (x, y), (8,), 4)
    assert len(told.kernel.launched) == before


@pytest.fixture
def no_hooks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    enter, leave = SimpleNamespace(calls=[]), SimpleNamespace(calls=[])
    hooks = SimpleNamespace(launch_enter_hook=enter, launch_exit_hook=leave, debug=False)
    monkeypatch.setattr(private, "_triton_settings", hooks)
    return hooks


@pytest.mark.parametrize("missing", ["_REMEMBERS", "run", "active", "get_current_stream"])
def test_triton_launches_where_its_launch_is_not_known(missing: str, kernel: launch.Kernel, monkeypatch) -> None:
    """`run`: a hook of Triton's cache forbade the compilation, so there is no compiled kernel."""
    owner = {"run": Recorder, "active": private._triton_driver, "get_current_stream": private._triton_driver.active}
    if missing in owner:
        monkeypatch.delattr(owner[missing], missing)
    else:
        monkeypatch.setattr(launch, missing, False)
    for _ in range(3):
        kernel(**CALL)
    assert kernel.kernel.launched == ["jitted"] * 3 and not kernel.variants


@pytest.mark.skipif(not private.KNOWS_TRITON, reason="of this release no launch is remembered: Triton launches")
def test_the_installed_triton_runs_kernels_as_a_remembered_launch_does() -> None:
    """Its own launch passes the same arguments in the same order; in place of None, what hooks want.

    If a new release fails here, read its launch before `_runs_as_we_know` takes it.
    """
    from triton.runtime.jit import JITFunction

    source = " ".join(inspect.getsource(JITFunction.run).split())
    assert (
        "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata, "
        "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())"
    ) in source
    assert "stream = driver.active.get_current_stream(device)" in source


@pytest.mark.parametrize(
    "setting",
    [
        {"debug": True},
        {"add_stages_inspection_hook": print},
        {"launch_enter_hook": print},
        {"launch_enter_hook": SimpleNamespace(calls=[print])},
        {"launch_exit_hook": SimpleNamespace(calls=[print])},
        {"launch_exit_hook": None},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_of_triton_are_heard(setting, kernel, no_hooks) -> None:
    """Triton launches while such a setting is active. A hook may be a function or a chain of functions."""
    before = dict(vars(no_hooks))
    kernel(**CALL)
    vars(no_hooks).update(setting)
    kernel(**CALL)
    vars(no_hooks).clear()
    vars(no_hooks).update(before)
    kernel(**CALL)
    assert kernel.kernel.launched == ["jitted", "jitted", "compiled"]


def test_a_tensor_without_memory_is_refused(kernel) -> None:
    """The address of a DTensor, for example, is 0."""
    nowhere = X.as_subclass(type("Nowhere", (Tensor,), {"data_ptr": lambda _: 0}))
    kernel(**CALL)
    with pytest.raises(
        ValueError, match=r"y_ptr has no memory that a kernel could read: \(32,\) float32 on cpu, a Now"
    ):
        kernel(**{**CALL, "tensors": (X, None, nowhere)})
    assert kernel.kernel.launched == ["jitted"]


def test_an_import_leaves_cuda_alone(fresh_process) -> None:
    """A process that has initialized CUDA cannot fork workers that use CUDA, and cannot select devices."""
    code = "import torch; torch.cuda.is_available = torch.cuda.device_count = None; import liger_chunked"
    fresh_process.run(code)


@pytest.mark.triton
def test_alignment_may_change(device: str) -> None:
    """A kernel compiled for aligned addresses is not launched on unaligned ones."""
    memory = torch.randn(8 * 64 + 1, device=device)
    weight = torch.ones(64, device=device)
    for shift in (0, 1, 0, 1):
        x = memory[shift:][: 8 * 64].view(8, 64)
        y = lc.liger_rms_norm(x, weight)
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))


@pytest.mark.triton
def test_the_installed_triton_launches_as_expected(device: str) -> None:
    """If it does not, launches are still right but take three times as long on the host."""
    if device != "cuda":
        pytest.skip("launches of NVIDIA's GPUs alone are remembered")
    x, weight = torch.randn(8, 96, device=device), torch.ones(96, device=device)
    lc.liger_rms_norm(x, weight)
    n_remembered = len(rms_norm._forward_kernel.variants)
    y = lc.liger_rms_norm(x, weight)
    assert len(rms_norm._forward_kernel.variants) == n_remembered > 0
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (96,), weight, 1e-6))


@pytest.mark.few(3)
@pytest.mark.triton
@pytest.mark.parametrize("n_partials", [0, 1, 255, 300])
def test_partial_sums(n_partials: int, device: str) -> None:
    if not expects_triton(device):
        pytest.skip("of the Triton kernels alone")
    partial = torch.randn(2, n_partials, 33, generator=torch.Generator().manual_seed(n_partials)).to(device)
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
