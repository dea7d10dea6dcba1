"""Which tests run without an option, and without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import conftest
import pytest
import torch

FILE = """
import pytest

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.few(3, "b-1")
@pytest.mark.parametrize("n", range(3))
@pytest.mark.parametrize("x", ["a", "b", pytest.param("c", marks=pytest.mark.slow), "d"])
def test_few(x, n): pass

@pytest.mark.few(20)
@pytest.mark.parametrize("n", range(3))
def test_fewer_than_few(n): pass

@pytest.mark.few(2, "b-0")  # which is not on the diagonal
@pytest.mark.sampled
@pytest.mark.parametrize("n", range(3))
@pytest.mark.parametrize("x", ["a", "b", "c"])
def test_sampled(x, n): pass
"""
QUICK = ["test_few[a-0]", "test_few[b-1]", "test_few[b-2]", *(f"test_fewer_than_few[{n}]" for n in range(3))]
SAMPLED = [f"test_sampled[{case}]" for case in ("a-0", "b-0", "b-1", "c-2")]

NEEDS_A_GPU = """
import pytest, torch

@pytest.mark.gpu
def test_gpu(): assert torch.cuda.is_available()

def test_device(device): assert device == "cpu" or torch.cuda.is_available()
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what pytest prints with each list of options."""
    folder = tmp_path_factory.mktemp("marks")
    file = folder / "test_marked.py"
    wrong = folder / "test_wrong.py"
    gpu = folder / "test_gpu.py"
    file.write_text(FILE)
    gpu.write_text(NEEDS_A_GPU)
    wrong.write_text(FILE.replace('"b-1"', '"b-9"'))
    code = f"""
import pytest
for arguments in (["{file}"], ["--slow", "{file}"], ["{file}::test_slow"], ["{wrong}"], ["--slow", "{wrong}"]):
    print("*", flush=True)
    pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "conftest", *arguments])
print("*", flush=True)
pytest.main(["-q", "-p", "no:cacheprovider", "-p", "conftest", "{gpu}"])
"""
    tests = Path(conftest.__file__).parent
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tests).stdout
    return dict(zip(("quick", "slow", "named", "wrong", "all", "gpu"), printed.split("*\n")[1:], strict=True))


def names(printed: str) -> list[str]:
    return [line.partition("::")[2] for line in printed.splitlines() if "::test_" in line and " " not in line]


def test_slow_and_few(shown: dict[str, str]) -> None:
    assert names(shown["quick"]) == [*QUICK, "test_sampled[a-0]", "test_sampled[b-0]"]
    assert len(names(shown["slow"])) == 16 + len(SAMPLED)
    assert names(shown["named"]) == ["test_slow"]


def test_a_case_that_few_names_must_exist(shown: dict[str, str]) -> None:
    assert "`few` names cases that do not exist: ['b-9']" in shown["wrong"]
    assert len(names(shown["all"])) == 16 + len(SAMPLED)


def test_a_sample_keeps_the_case_that_few_names(shown: dict[str, str]) -> None:
    assert [name for name in names(shown["slow"]) if "sampled" in name] == SAMPLED


def test_the_mark_gpu_needs_a_cuda_device(shown: dict[str, str]) -> None:
    assert ("3 passed" if torch.cuda.is_available() else "1 passed, 1 skipped") in shown["gpu"]
