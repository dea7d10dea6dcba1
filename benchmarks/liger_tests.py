"""Run Liger-Kernel's own tests with `liger_chunked.compat` in its place, on a CPU, and count what passes.

python -m benchmarks.liger_tests PATH                        PATH: a checkout of Liger-Kernel, with its test/ directory
python -m benchmarks.liger_tests PATH --only chunked_loss/test_dpo_loss.py transformers/test_rope.py
python -m benchmarks.liger_tests PATH --report FILE          also write each failure and its reason
python -m benchmarks.liger_tests PATH --largest 2e8          without the largest shapes
python -m benchmarks.liger_tests PATH --sample 0.1           of the tests with more than 1e6 logits, one in ten
python -m benchmarks.liger_tests PATH --json FILE            write the counts

The tests are those of the losses, norms, rotary embeddings and gated MLPs. Names that `compat` refuses raise where a
test uses them. Nothing is copied: the tests run from the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import math
import os
import random
import re
import sys
import time
import types
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.before_after import commit_of
from benchmarks.harness import environment
from liger_chunked import compat, linear_token_stats

FILES = (
    *(f"chunked_loss/test_{name}_loss.py" for name in "cosine cpo dpo grpo jsd kto orpo simpo".split()),
    *(
        f"transformers/test_{name}.py"
        for name in (
            "transformers rms_norm fused_add_rms_norm layer_norm cross_entropy fused_linear_cross_entropy jsd "
            "fused_linear_jsd kl_div tvd rope swiglu geglu"
        ).split()
    ),
)


def _of_this_transformers(version: str, before: Callable[..., Any], after: Callable[..., Any], **arguments: Any) -> Any:
    """Call `after`, written for `version` of transformers and later, without the arguments that newer ones removed."""
    known = inspect.signature(after).parameters
    keywords = {name: value for name, value in (arguments.get("after_kwargs") or {}).items() if name in known}
    return after(*arguments.get("after_args", ()), **keywords)


class _PolicyReference:
    """What the tests' own GRPO asks of Liger-Kernel's base class."""

    @staticmethod
    def _compute_dapo_normalizer(attention_mask: Tensor) -> Tensor:
        return attention_mask.sum().clamp(min=1)

    @staticmethod
    def chunk_forward(input: Tensor, weight: Tensor, token_ids: Tensor, **options: Any) -> Tensor | None:
        return linear_token_stats(weight, input, token_ids, **options).logps


def _vespo_weights(
    advantages: Tensor,
    log_ratio_per_token: Tensor,
    mask: Tensor,
    importance_sampling_ratio: Tensor | None,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
) -> Tensor:
    """Return VESPO's `phi(w) = w^k e^(lambda (1 - w))` (2602.10693), (B, 1)."""
    log_w = (log_ratio_per_token * mask).sum(-1, keepdim=True)
    if importance_sampling_ratio is not None:
        log_w = log_w + importance_sampling_ratio.log().sum(-1, keepdim=True)
    positive = advantages[:, None] >= 0
    k, rate = torch.where(positive, k_pos, k_neg), torch.where(positive, lambda_pos, lambda_neg)
    return (rate + k * log_w - rate * log_w.exp()).exp().detach()


# The tests import these helpers. They are not part of the losses and layers.
_HELPERS: dict[str, dict[str, Any]] = {
    "liger_kernel.utils": {
        "infer_device": lambda: "cpu",
        "infer_comm_backend": lambda: "gloo",
        "is_npu_available": lambda: False,
        "transformers_version_dispatch": _of_this_transformers,
    },
    "liger_kernel.ops.utils": {"is_hip": lambda: False},
    "liger_kernel.chunked_loss.fused_linear_ppo": {"LigerFusedLinearPPOBase": _PolicyReference},
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
            source = import_module(module)
        except ImportError:
            sys.modules[module] = source = types.ModuleType(module)
        try:
            getattr(source, name)
        except (ImportError, AttributeError):
            setattr(source, name, _refused(module, name))


def _elements(item: Any) -> int:
    """Return how many logits a test has, or values of a layer."""
    sizes = getattr(item, "callspec", None)
    return math.prod(x for name, x in sizes.params.items() if name in _SIZES and isinstance(x, int)) if sizes else 0


_SIZES = ("B", "T", "V", "bsz", "seq_len", "hidden_size", "bs", "sl", "hd")


_SMALL = 1e6  # logits; smaller tests take milliseconds


class _Results:
    """Outcomes of tests: "passed", "failed", "skipped", "too large" or "not sampled"."""

    def __init__(self, largest: float, sample: float) -> None:
        self.largest = largest
        self.sample = sample
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        sizes = {item.nodeid: _elements(item) for item in items}
        self.outcomes |= {node: "too large" for node, size in sizes.items() if size > self.largest}
        large = [node for node, size in sizes.items() if _SMALL < size <= self.largest]
        left_out = int(len(large) * (1 - self.sample))
        self.outcomes |= {node: "not sampled" for node in random.Random(0).sample(large, left_out)}
        items[:] = [item for item in items if item.nodeid not in self.outcomes]

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

    def counts(self, file: str = "") -> Counter[str]:
        """Count the outcomes of one file, or of all."""
        return Counter(outcome for node, outcome in self.outcomes.items() if node.startswith(file))

    def shown(self, file: str = "") -> str:
        kinds = self.counts(file)
        run = kinds["passed"] + kinds["failed"]
        return (
            f"{kinds['passed']} of {run} passed, {kinds['failed']} failed ({kinds['failed'] / max(1, run):.1%}), "
            f"{kinds['skipped']} skipped by themselves, {kinds['too large']} too large, "
            f"{kinds['not sampled']} not sampled"
        )

    def failures(self) -> list[str]:
        """Describe the reasons, most frequent first."""
        reasons = Counter(
            (node.split("[")[0], re.sub(r"\b[\d.]+(e[-+]?\d+)?\b", "#", why)) for node, why in self.reasons.items()
        )
        return [f"{count:5d}  {test}: {why}" for (test, why), count in reasons.most_common()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a checkout of Liger-Kernel")
    parser.add_argument("--only", nargs="+", default=FILES, metavar="FILE", help="test files, relative to test/")
    parser.add_argument("--select", default="", metavar="EXPRESSION", help="pytest's -k")
    parser.add_argument("--largest", type=float, default=math.inf, help="leave out tests of more logits than this")
    parser.add_argument("--sample", type=float, default=1.0, help="of the tests of more than 1e6 logits, this share")
    parser.add_argument("--bfloat16", action="store_true", help="also tests that Liger-Kernel skips off a GPU")
    parser.add_argument("--report", type=Path, help="write every failure to this file")
    parser.add_argument("--json", type=Path, help="write the counts and reasons to this file")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    tests = (arguments.path / "test").resolve()
    if not tests.is_dir():
        parser.error(f"{arguments.path} has no directory test/")
    compat.install(force=True)
    for module, names in _HELPERS.items():
        sys.modules[module] = types.ModuleType(module)
        vars(sys.modules[module]).update(names)
    vars(import_module("liger_kernel.chunked_loss.grpo_loss"))["get_gamma_weights"] = _vespo_weights
    _serve_missing_names(tests)
    os.chdir(tests.parent)
    sys.path.insert(0, str(tests.parent))
    # Files skip their largest shapes on a device with little memory.
    vars(torch.cpu)["get_device_properties"] = lambda index: types.SimpleNamespace(total_memory=0)
    if arguments.bfloat16:
        vars(import_module("test.utils"))["supports_bfloat16"] = lambda: True
    results = _Results(arguments.largest, arguments.sample)
    # The tests of DTensor are expected to fail on fewer than eight GPUs.
    select = f"not dtensor and ({arguments.select})" if arguments.select else "not dtensor"
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", f"--rootdir={tests.parent}", "-k", select]
    for file in arguments.only:
        start = time.perf_counter()
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            pytest.main([*options, str(tests / file)], plugins=[results])
        print(f"{file}: {results.shown(f'test/{file}')}, {time.perf_counter() - start:.0f} s", flush=True)
    print(f"all: {results.shown()}")
    print("\n".join(results.failures()))
    if arguments.report:
        lines = [f"{node}  {reason}" for node, reason in sorted(results.reasons.items())]
        arguments.report.write_text("\n".join([*lines, ""]))
    if arguments.json:
        options = {
            name: str(value) for name, value in vars(arguments).items() if name in ("select", "largest", "sample")
        }
        found = {
            "family": "liger_tests",
            "environment": {**environment("cpu"), "seconds": round(time.perf_counter() - begin, 1)},
            "settings": {**options, "bfloat16": arguments.bfloat16, "liger_kernel": commit_of(arguments.path)},
            "all": results.counts(),
            "files": {file: results.counts(f"test/{file}") for file in arguments.only},
            "failures": results.failures(),
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
