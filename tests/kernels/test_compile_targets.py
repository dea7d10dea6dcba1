"""Every Triton kernel compiles for GPUs that are not here, within their limits (scripts/compile_matrix.py).

Nothing runs: this shows neither results nor speed. By default, the largest variant of each kernel is compiled for the
GPUs with the least shared memory of each vendor, and the fused epilogue for Hopper, which alone has it. That takes a
core about 40 seconds. `--exhaustive` compiles all variants for all targets, in about 20 minutes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from liger_chunked.kernels import backend
from scripts import compile_matrix as matrix

# Cross-compiling needs `driver.set_active`, a target without a device in `warmup`, and cuobjdump in the wheel.
OLDEST = (3, 5)


def why_not() -> str:
    if backend.triton is None:
        return "no Triton"
    if backend.INTERPRETED:
        return "nothing is compiled under TRITON_INTERPRET=1"
    version = tuple(map(int, backend.triton.__version__.split(".")[:2]))
    return "" if version >= OLDEST else f"Triton {backend.triton.__version__} is older than 3.5"


compiles = pytest.mark.skipif(bool(why_not()), reason=why_not() or "compiles")
QUICK = ("sm_89", "gfx942")
# The fused epilogue, what makes results independent of the batch, and kernels that only these launch.
ON_HOPPER = {
    "merge_ranks.merge_ranks",
    "projection.centre",
    "projection.project",
    "projection.reduce",
    "projection.rescue",
    "projection_grad.from_exponentials",
    "projection_grad.project_grad",
    "projection_grad.row_factors",
    "projection_logits.project_logits",
    "target_rows.input",
    "target_rows.scale_rows",
}


def all_kernels() -> set[str]:
    """Return the names of the kernels in the source, as the matrix names them."""
    package, found = Path(backend.__file__).parents[1], set()
    for file in package.rglob("*.py"):
        lines = file.read_text().splitlines()
        names = [after for line, after in pairwise(lines) if re.match(r"@.*\bKernel\b", line)]
        found |= {f"{file.stem}.{name[5:].partition('(')[0].strip('_').removesuffix('_kernel')}" for name in names}
    return found


def check(variants: list[matrix.Variant], on_hopper: bool) -> None:
    """Check that all kernels compile, for Hopper all or those that run there alone."""
    problems = [f"{v.kernel} for {v.target}: {v.problem} ({v.task}: {v.arguments})" for v in variants if v.problem]
    assert not problems
    kernels = all_kernels()
    assert len(kernels) > 30 and kernels > ON_HOPPER
    for target in {variant.target for variant in variants}:
        compiled = {variant.kernel for variant in variants if variant.target == target}
        expected = kernels if on_hopper else ON_HOPPER
        assert compiled == (expected if target == "sm_90" else kernels - ON_HOPPER)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile anew, and leave the user's cache alone."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    yield


@pytest.mark.few(1, "sm_90")
@compiles
@pytest.mark.parametrize("target", [*QUICK, "sm_90"])
def test_the_largest_variant_of_each_kernel(target: str, cold: None) -> None:
    variants = matrix.compile_matrix([target], quick=True, only=ON_HOPPER if target == "sm_90" else ())
    assert {variant.target for variant in variants} == {target}
    check(variants, on_hopper=False)


@compiles
@pytest.mark.exhaustive
def test_all_variants(cold: None) -> None:
    variants = matrix.compile_matrix(matrix.TARGETS, processes=os.cpu_count() or 1)
    assert {variant.target for variant in variants} == {*matrix.TARGETS}
    check(variants, on_hopper=True)
