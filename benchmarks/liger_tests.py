"""Run Liger-Kernel's own tests with `liger_chunked.compat` in its place, on a CPU, and count what passes.

python -m benchmarks.liger_tests PATH                        PATH: a checkout of Liger-Kernel, with its test/ directory
python -m benchmarks.liger_tests PATH --only chunked_loss/test_dpo_loss.py transformers/test_rope.py
python -m benchmarks.liger_tests PATH --report FILE          also write each failure and its reason

The tests are those of the losses, norms, rotary embeddings and gated MLPs. Names that `compat` refuses raise where a
test uses them. Nothing is copied: the tests run from the checkout.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_chunked import compat

FILES = (
    *(f"chunked_loss/test_{name}_loss.py" for name in "cosine cpo dpo grpo jsd kto orpo simpo".split()),
    *(
        f"transformers/test_{name}.py"
        for name in (
            "rms_norm layer_norm cross_entropy fused_linear_cross_entropy jsd fused_linear_jsd kl_div tvd rope swiglu "
            "geglu"
        ).split()
    ),
)
# The tests ask for these; they are no part of the losses and layers.
_HELPERS: dict[str, dict[str, Any]] = {
    "liger_kernel.utils": {
        "infer_device": lambda: "cpu",
        "infer_comm_backend": lambda: "gloo",
        "is_npu_available": lambda: False,
        "transformers_version_dispatch": lambda version, before, after, before_args=(), after_args=(): after(
            *after_args
        ),
    },
    "liger_kernel.ops.utils": {"is_hip": lambda: False},
}


def _refused(module: str, name: str) -> Any:
    """Return a stand-in for a name that is not served. It raises when it is called or read."""

    class Refused:
        def _refuse(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"not served: {module}.{name}")

        __call__ = __getitem__ = _refuse

        def __getattr__(self, attribute: str) -> Any:
            self._refuse()

    return Refused()


def _serve_missing_names(tests: Path) -> None:
    """Let a test file's imports succeed, so that its other tests run."""
    imports = re.compile(r"^\s*from (liger_kernel[\w.]*) import (\w+)", re.MULTILINE)
    for module, name in sorted({found for path in tests.rglob("*.py") for found in imports.findall(path.read_text())}):
        if module in _HELPERS:
            continue
        try:
            source = __import__(module, fromlist=[name])
        except ImportError:
            sys.modules[module] = source = types.ModuleType(module)
        try:
            getattr(source, name)
        except (ImportError, AttributeError):
            setattr(source, name, _refused(module, name))


class _Results:
    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.reasons[report.nodeid] = (crash.message if crash else str(report.longrepr)).splitlines()[0][:160]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
            self.reasons[report.nodeid] = f"does not load: {str(report.longrepr).strip().splitlines()[-1]}"[:160]


def _without_digits(reason: str) -> str:
    return re.sub(r"[\d.]+(e[-+]?\d+)?", "#", reason)


def _print(results: _Results, show: Callable[[str], None]) -> None:
    files = Counter((node.split("::")[0], outcome) for node, outcome in results.outcomes.items())
    for file in sorted({file for file, _ in files}):
        counts = ", ".join(f"{files[file, kind]} {kind}" for kind in ("passed", "failed", "skipped"))
        show(f"{file}: {counts}")
    total = Counter(results.outcomes.values())
    run = total["passed"] + total["failed"]
    show(f"all: {total['passed']} of {run} passed ({total['failed'] / max(1, run):.1%} failed, {total['skipped']} skipped)")
    for (file, reason), count in Counter(
        (node.split("::")[0], _without_digits(reason)) for node, reason in results.reasons.items()
    ).most_common():
        show(f"{count:5d}  {file}: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a checkout of Liger-Kernel")
    parser.add_argument("--only", nargs="+", default=FILES, metavar="FILE", help="test files, relative to test/")
    parser.add_argument("--select", default="", metavar="EXPRESSION", help="pytest's -k")
    parser.add_argument("--report", type=Path, help="write every failure to this file")
    arguments = parser.parse_args()
    tests = (arguments.path / "test").resolve()
    if not tests.is_dir():
        parser.error(f"{arguments.path} has no directory test/")
    compat.install(force=True)
    for module, names in _HELPERS.items():
        sys.modules[module] = types.ModuleType(module)
        vars(sys.modules[module]).update(names)
    _serve_missing_names(tests)
    os.chdir(tests.parent)
    sys.path.insert(0, str(tests.parent))
    results = _Results()
    # Files skip their largest shapes on a device with little memory.
    vars(torch.cpu)["get_device_properties"] = lambda index: types.SimpleNamespace(total_memory=0)
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-W", "ignore"]
    options.append(f"--rootdir={tests.parent}")
    if arguments.select:
        options += ["-k", arguments.select]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or torch.get_num_threads())
    sys.stdout.flush()
    with open(os.devnull, "w") as nowhere:
        stdout, sys.stdout = sys.stdout, nowhere
        try:
            pytest.main([*options, *(str(tests / file) for file in arguments.only)], plugins=[results])
        finally:
            sys.stdout = stdout
    _print(results, print)
    if arguments.report:
        lines = [f"{node}  {reason}" for node, reason in sorted(results.reasons.items())]
        arguments.report.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
