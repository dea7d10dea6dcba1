"""Settings of all tests: the device, deterministic operations, and NaN in uninitialized memory.

python -m pytest -n 2                               the suite, on the CPU
TRITON_INTERPRET=1 python -m pytest -m triton       the Triton kernels, in Triton's interpreter
python -m pytest -m gpu                             the suite, on a CUDA device
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

# Deterministic mode requires this setting before cuBLAS starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from liger_chunked.engine import step
from liger_chunked.kernels import backend


def pytest_configure(config: pytest.Config) -> None:
    # The shapes are small, and the workers of pytest-xdist share the cores.
    torch.set_num_threads(1)
    if backend.INTERPRETED:
        # tl.where computes both sides, and NumPy warns about the side that is not used.
        config.addinivalue_line("filterwarnings", "ignore:.* encountered in .*:RuntimeWarning")
    config.addinivalue_line("markers", "triton: reaches the Triton kernels wherever they run")
    config.addinivalue_line("markers", "ordinary_memory: runs outside deterministic mode")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_cuda])])


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill the result of `torch.empty` with NaN, and reject nondeterministic operations."""
    if request.node.get_closest_marker("ordinary_memory"):
        yield
        return
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def expects_triton(device: str) -> bool:
    """Whether this process uses the Triton kernels for float32 tensors on `device`."""
    return device == "cuda" or backend.INTERPRETED


@pytest.fixture
def path(device: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield "triton" or "torch": the kernels that the test must run. Fails if it ran the others, or none."""
    ran: set[str] = set()

    def watched(module_name: str, name: str, path: str) -> None:
        module = importlib.import_module(f"liger_chunked.kernels.{module_name}")
        function = getattr(module, name)

        def watch(*args, **kwargs):
            ran.add(path)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, watch)

    watched("logits_stats", "_logits_stats_triton", "triton")
    watched("logits_grad", "_logits_grad_triton_", "triton")
    watched("divergence_sums", "_sums_triton", "triton")
    watched("divergence_grad", "_divergence_grad_triton_", "triton")
    watched("divergence_sums", "_sums_torch", "torch")
    watched("divergence_grad", "_divergence_grad_torch_", "torch")
    watched("logits_stats", "_logits_stats_torch", "torch")
    watched("logits_grad", "_logits_grad_torch_", "torch")
    expected = "triton" if expects_triton(device) else "torch"
    yield expected
    row = request.node.callspec.params.get("row")
    assert ran == ({expected} if row is None or row.kernels else set())


@pytest.fixture
def by_epilogue(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make supported steps use the fused epilogue, on a device that has one or in the interpreter."""
    if device == "cpu" and not backend.INTERPRETED:
        pytest.skip("no torch path: runs with TRITON_INTERPRET=1")
    if device == "cuda" and not backend.has_wide_tiles(torch.device("cuda")):
        pytest.skip("no tensor memory accelerator")
    monkeypatch.setattr(step, "has_wide_tiles", lambda device: True)
