"""Run tests of TRL and of transformers on this library's head, and on their own.

    python scripts/upstream_tests.py trl TRL/tests/test_kernels.py         of TRL's fused head, on `fused_lm_head`
    python scripts/upstream_tests.py transformers SDIST llama gemma2       of models, after `apply_liger_kernel_to_*`
    python scripts/upstream_tests.py transformers SDIST llama --hub HUB    with `defer_logits` of a copy for the hub

The files are those of a checkout of TRL, whose sdist has no tests, and of an unpacked sdist of transformers. Nothing in
them is changed. Each suite runs twice; the end names the tests that differ. Arguments after `--` are pytest's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The suite of a model's class; transformers keeps the classes of its models apart from the sdist.
SUITE = """
import unittest
from transformers import AutoConfig, AutoModelForCausalLM
from tests.test_modeling_common import ModelTesterMixin, ids_tensor
from tests.test_training_mixin import TrainingTesterMixin

SIZES = dict(vocab_size=99, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
             eos_token_id=2)

class Tester:
    is_training, batch_size, seq_length, num_hidden_layers, hidden_size = True, 3, 7, 2, 32
    vocab_size, num_attention_heads = 99, 2

    def get_config(self):
        return AutoConfig.for_model("{family}", **SIZES)

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], 99)
        return self.get_config(), dict(input_ids=ids, attention_mask=ids.ne(-1).long())

class ModelTest(ModelTesterMixin, TrainingTesterMixin, unittest.TestCase):
    all_model_classes = (AutoModelForCausalLM._model_mapping[type(Tester().get_config())],)
    all_generative_model_classes, test_torch_exportable = (), False

    def setUp(self):
        self.model_tester = Tester()
"""


class Missing(MetaPathFinder, Loader):
    """Gives empty mixins for the test modules that an sdist of transformers leaves out."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("tests.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        class Module(ModuleType):
            def __getattr__(self, name: str) -> type:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {})

        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Plugin:
    """Puts this library's head in place, and keeps the outcome of each test."""

    def __init__(self, kind: str, families: list[str], hub: str | None, ours: bool) -> None:
        self.outcomes: dict[str, str] = {}
        if not ours:
            return
        if kind == "trl":
            import trl.kernels

            trl.kernels.ChunkedLogProbFunction = Head
        elif hub is not None:
            self._defer(hub)
        else:
            import liger_chunked

            for family in families:
                getattr(liger_chunked, f"apply_liger_kernel_to_{family}")()

    def _defer(self, hub: str) -> None:
        """Let each model that is built defer the logits of its head, by a copy of the library for the kernel hub."""
        from transformers import PreTrainedModel

        variant = Path(hub) / "build" / "torch-cpu"
        name = json.loads((variant / "metadata.json").read_text())["id"]
        spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
        assert spec is not None and spec.loader is not None
        kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernel)
        stock = PreTrainedModel.post_init

        def post_init(model: Any) -> None:
            stock(model)
            if model.get_output_embeddings() is not None:
                kernel.defer_logits(model.get_output_embeddings())

        PreTrainedModel.post_init = post_init

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome


class Head:
    """TRL's `ChunkedLogProbFunction` by `fused_lm_head`."""

    @staticmethod
    def apply(
        hidden: Any,
        weight: Any,
        bias: Any,
        labels: Any,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> tuple[Any, ...]:
        from liger_chunked.fused_head import FIELDS, fused_lm_head

        fields = fused_lm_head(
            hidden,
            weight,
            bias,
            labels,
            temperature=temperature,
            final_logit_softcapping=final_logit_softcapping,
            logit_scale=logit_scale,
            outputs=outputs,
        )
        return tuple(fields.get(name) for name in FIELDS)


def outcomes(given: argparse.Namespace, folder: Path, options: list[str]) -> dict[str, str]:
    """Run the suites in this process, and return the outcome of each test."""
    plugin = Plugin(given.suite, given.families, given.hub, given.side == "ours")
    if given.suite == "trl":
        files, root = [given.path], given.path.parent.parent
    else:
        sys.meta_path.append(Missing())
        root, files = folder, [folder / f"test_{family}.py" for family in given.families]
        for family, file in zip(given.families, files, strict=True):
            file.write_text(SUITE.replace("{family}", family))
    sys.path[:0] = [str(root), str(given.path)]
    common = ["-q", "-p", "no:cacheprovider", f"--rootdir={root}"]
    status = pytest.main([*map(str, files), *common, *options], plugins=[plugin])
    if status > pytest.ExitCode.TESTS_FAILED or not plugin.outcomes:
        raise SystemExit(f"pytest ended with {status!r} and {len(plugin.outcomes)} outcomes")
    return plugin.outcomes


def main() -> None:
    own, options = sys.argv[1:], []
    if "--" in own:
        own, options = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=["trl", "transformers"])
    parser.add_argument("path", type=lambda path: Path(path).resolve())
    parser.add_argument("families", nargs="*")
    parser.add_argument("--hub", help="folder that scripts/hub_kernel.py wrote")
    parser.add_argument("--side", choices=["stock", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--kept", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(own)
    if given.side is not None:
        given.kept.write_text(json.dumps(outcomes(given, given.kept.parent, options)))
        return
    found = {}
    for side in ("stock", "ours"):  # each in its own process, because one patches classes
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder) / "outcomes.json"
            command = [sys.executable, __file__, *own, "--side", side, "--kept", str(kept), "--", *options]
            path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)
            found[side] = json.loads(kept.read_text())
    stock, ours = found["stock"], found["ours"]
    for side, results in found.items():
        counts = {kind: [*results.values()].count(kind) for kind in ("passed", "failed", "skipped")}
        print(side, counts)
    different = [name for name in sorted(stock.keys() | ours.keys()) if stock.get(name) != ours.get(name)]
    for name in different:
        print(f"{name}: stock {stock.get(name)}, ours {ours.get(name)}")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
