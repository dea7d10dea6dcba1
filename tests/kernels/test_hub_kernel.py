"""The package as a repository of the kernel hub: it is imported from a path, under other names, beside itself."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

IMPORT = """
import importlib.util, json, sys
from pathlib import Path
import torch

loaded = []
for variant in map(Path, sys.argv[1:]):
    id = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(id, variant / "__init__.py")
    module = sys.modules[id] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loaded.append(module)
    old = importlib.util.spec_from_file_location(f"{id}_old", variant / "liger_chunked" / "__init__.py")
    of_old = importlib.util.module_from_spec(old)
    old.loader.exec_module(of_old)
    assert of_old.LigerFusedLinearDPOLoss.__name__ == "LigerFusedLinearDPOLoss"

torch.manual_seed(0)
weight, x = torch.randn(50, 8), torch.randn(4, 6, 8, requires_grad=True)
target = torch.randint(50, (4, 6))
for module in loaded:
    loss, _ = module.LigerFusedLinearDPOLoss(use_ref_model=False)(weight, x, target)
    loss.backward()
    names = [name for name in module.__all__ if name not in (*module._OF_TRANSFORMERS, *module._OF_TRL)]
    assert all(hasattr(module, name) for name in names) and len(names) > 30
    normed = torch.compile(module.liger_rms_norm, backend="eager", fullgraph=True)(x, torch.ones(8), 1e-6)
    print("loss", loss.item())
assert "liger_chunked" not in sys.modules
"""


def script():
    spec = importlib.util.spec_from_file_location("hub_kernel", ROOT / "scripts" / "hub_kernel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_two_copies_in_one_process(tmp_path, fresh_process):
    variants = script().write(tmp_path)
    assert [variant.name for variant in variants] == ["torch-cuda", "torch-rocm", "torch-xpu", "torch-cpu"]
    output = fresh_process.run(IMPORT, *map(str, variants[::3]))  # with warnings: torch 2.14 has one for Python 3.13.0
    losses = [line for line in output.splitlines() if line.startswith("loss ")]
    assert len(losses) == 2 and len(set(losses)) == 1


@pytest.mark.slow
def test_what_is_in_it(tmp_path):
    (variant, *_) = script().write(tmp_path)
    texts = {path.relative_to(variant): path.read_text() for path in variant.rglob("*.py")}
    code = "\n".join(texts.values())
    assert not re.search(r"^\s*(from|import) (liger_chunked|transformers|trl)\b", code, re.MULTILINE)
    assert not re.search(r"liger_chunked::", code)
    assert {path.parts[0] for path in texts} & {"integrations", "compat", "cli"} == set()
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["name"] == "liger-chunked" and metadata["backend"] == {"type": "cuda"}
