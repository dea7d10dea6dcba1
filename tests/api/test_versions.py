"""What the library says of other packages that are missing, too old, moved or broken."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liger_chunked import versions
from liger_chunked.kernels import backend

# Lets imports of Triton raise ERROR.
BLOCK = """
import sys
from importlib.abc import MetaPathFinder

class Block(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ERROR

sys.modules.pop("triton", None)
sys.meta_path.insert(0, Block())
"""
ABSENT = """ModuleNotFoundError("No module named 'triton'", name="triton")"""
BROKEN = (
    """OSError("libcuda.so.1: cannot open shared object file")""",
    """RuntimeError("0 active drivers")""",
)
# Installed versions, by package; the others are those that are here.
FOUND = """
import sys
from importlib import metadata
found, real = dict(pair.split("=") for pair in sys.argv[1:]), metadata.version
def version(name):
    if found.get(name) == "none":
        raise metadata.PackageNotFoundError(name)
    return found.get(name) or real(name)
metadata.version = version
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("error", [ABSENT, """ImportError("libtriton.so: undefined symbol")""", *BROKEN])
def test_losses_run_on_a_cpu_without_triton(fresh_process: Any, error: str) -> None:
    code = """
import torch
from liger_chunked import LigerRMSNorm
from liger_chunked import LigerFusedLinearCrossEntropyLoss
from liger_chunked.kernels import backend
weight, hidden = (torch.randn(n, 8, requires_grad=True) for n in (32, 5))
target = torch.arange(5)
loss = LigerFusedLinearCrossEntropyLoss(weight, LigerRMSNorm(8)(hidden), target)
loss.backward()
assert weight.grad is not None and hidden.grad is not None
print(backend.TRITON_ERROR, backend.TRITON_IS_BROKEN)
"""
    printed = fresh_process.run(BLOCK.replace("ERROR", error) + code).strip()
    assert printed == f"{type(eval(error)).__name__}: {eval(error)} {error in BROKEN}"


def a_tensor_of_a_gpu() -> Any:
    return SimpleNamespace(dtype=torch.float32, is_meta=False, is_cuda=True, is_xpu=False, device=torch.device("cuda"))


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(backend, "triton", None)
    monkeypatch.setattr(backend, "TRITON_ERROR", "ModuleNotFoundError: No module named 'triton'")
    backend.say_what_triton_lacks.cache_clear()
    return monkeypatch


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("requirements", "install"),
    [
        (["filelock", "triton==3.5.1; platform_system == 'Linux'"], "triton==3.5.1, which torch"),
        (["pytorch-triton-rocm==3.5.1"], "pytorch-triton-rocm==3.5.1, which torch"),
        (["triton-xpu==3.7.0; platform_system == 'Linux'"], "triton-xpu==3.7.0, which torch"),
        ([], "the Triton of your torch"),  # a CUDA build of torch 2.9 for another processor than x86_64
        (None, "the Triton of your torch"),
    ],
)
def test_a_gpu_without_triton_warns_once(
    without_triton: pytest.MonkeyPatch, requirements: list[str] | None, install: str
) -> None:
    without_triton.setattr(backend, "requires", lambda package: requirements)
    with pytest.warns(RuntimeWarning, match=rf"PyTorch code on cuda.*No module named 'triton'\. Install {install}"):
        assert not backend.use_triton(a_tensor_of_a_gpu())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not backend.use_triton(a_tensor_of_a_gpu())
        assert not backend.use_triton(torch.ones(1))


def test_a_gpu_with_a_broken_triton_raises(without_triton: pytest.MonkeyPatch) -> None:
    without_triton.setattr(backend, "TRITON_ERROR", "OSError: libcuda.so.1: cannot open shared object file")
    without_triton.setattr(backend, "TRITON_IS_BROKEN", True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"`import triton` fails with OSError: libcuda.*need it on cuda: repair"):
            backend.use_triton(a_tensor_of_a_gpu())
    assert not backend.use_triton(torch.ones(1))


def test_no_install_brings_a_triton_beside_torchs() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for user, packages in {"": project["dependencies"], **extras}.items():
        assert user == "dev" or not any("triton" in package for package in packages)
    floors = [*project["dependencies"], *extras["transformers"], *extras["trl"]]
    found = dict(re.findall(r"^(\w+)>=([\d.]+)$", "\n".join(floors), re.MULTILINE))
    assert found.items() >= versions.OLDEST.items()


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("found", "oldest", "expected"),
    [
        ("2.9.0.dev20250901+cu128", "2.9", True),
        ("2.9.0rc1", "2.9", True),
        ("5.5", "5.5.0", True),
        ("3", "2.9", True),
        ("2.8.0+cpu", "2.9", False),
        ("5.4.9", "5.5", False),
        ("4.56.0.dev0", "5.5", False),
    ],
)
def test_builds_of_the_oldest_release(monkeypatch: pytest.MonkeyPatch, found: str, oldest: str, expected: bool) -> None:
    monkeypatch.setattr(versions, "version", lambda package: found)
    monkeypatch.setattr(versions, "OLDEST", {"torch": oldest})
    assert versions.suffices("torch") == expected


def test_a_folder_with_the_name_of_a_package_is_not_that_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "no_distribution").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(versions.OLDEST, "no_distribution", "1.0")
    assert not versions.suffices("no_distribution")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("code", "found", "error"),
    [
        (
            "from liger_chunked import apply_liger_kernel",
            "transformers=4.56.0",
            r"liger_chunked.integrations.transformers needs transformers >= 5.5, found 4.56.0: "
            r"pip install 'transformers>=5.5'",
        ),
        (
            "import liger_chunked; liger_chunked.attach_head",
            "transformers=4.56.0",
            "needs transformers >= 5.5, found 4",
        ),
        (
            "from liger_chunked.compat.transformers import apply_liger_kernel_to_llama as f; f()",
            "transformers=4.56.0",
            "needs transformers >= 5.5, found 4",
        ),
        ("from liger_chunked.integrations.trl import LigerDPOTrainer", "transformers=5.4.0", "transformers >= 5.5"),
        (
            "from liger_chunked.integrations.trl import LigerDPOTrainer",
            "trl=1.14.2",
            "liger_chunked.integrations.trl needs trl >= 1.15, found 1.14.2: pip install 'trl>=1.15'",
        ),
        ("from liger_chunked import LigerFusedLinearDPOLoss", "torch=2.8.0", "needs torch >= 2.9, found 2.8.0"),
    ],
)
def test_what_is_too_old_is_named(fresh_process: Any, code: str, found: str, error: str) -> None:
    pytest.importorskip("trl")
    with pytest.raises(AssertionError, match=error):
        fresh_process.run(FOUND + code, found)


def test_nothing_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "OLDEST", {"not_installed_at_all": "1.13"})
    with pytest.raises(ImportError, match=r"here needs not_installed_at_all >= 1.13, found none: pip install"):
        versions.require("here", "not_installed_at_all")
