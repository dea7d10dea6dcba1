"""The quickstarts of the guides run as pasted, with tiny models and rows in place of those of the hub."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import tiny
import transformers
from datasets import Dataset
from test_docs import ROOT, blocks

from liger_chunked import patch_trl, revert_liger_kernel

TURNS = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "a sum"}]
OTHER = [TURNS[0], {"role": "assistant", "content": "no"}]
# The columns of each data set, as its card and TRL's own scripts have them.
ROWS: dict[str, dict[str, Any]] = {
    "trl-lib/Capybara": {"messages": TURNS},
    "trl-lib/ultrafeedback_binarized": {"chosen": TURNS, "rejected": OTHER},
    "trl-lib/tldr": {"prompt": "POST: long\n\nTL;DR:", "completion": " short"},
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Stand in for the hub: every name of a model is a tiny Llama, and every data set has four rows."""
    folder = tmp_path / "model"
    tiny.model(max_position_embeddings=2048).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        load = auto.from_pretrained
        monkeypatch.setattr(auto, "from_pretrained", lambda name, load=load, **options: load(folder, **options))

    def load_dataset(name: str, split: str) -> Dataset:
        assert split == "train"
        return Dataset.from_list([ROWS[name]] * 8)

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # GKD is experimental
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    revert_liger_kernel("llama")


@pytest.mark.parametrize("guide", ["sft", "preferences", "grpo", "distillation"])
def test_a_quickstart_trains_and_saves(guide: str, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = (block.code for block in blocks(ROOT / "docs" / "guides" / f"{guide}.md") if "load_dataset" in block.code)
    # Two steps on this machine; everything else is what a reader pastes.
    of_test = {"max_steps": 2, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    if guide in ("grpo", "distillation"):
        of_test |= {"max_completion_length" if guide == "grpo" else "max_new_tokens": 4}
    code = code.replace("logging_steps=10", f"logging_steps=1, **{of_test}").replace('"bfloat16"', '"float32"')
    scope: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(code, guide, "exec"), scope)
        log = [entry for entry in scope["trainer"].state.log_history if "loss" in entry]
        assert len(log) == 2
        saved = next(hub.glob("Qwen2.5-0.5B-*"))
        assert json.loads((saved / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    finally:
        for patch in list(patch_trl._active):
            patch.undo()
        scope.clear()
        gc.collect()
