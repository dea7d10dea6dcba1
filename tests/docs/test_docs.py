"""The Python blocks of README.md and docs/*.md run, relative links point to files, README quotes measured figures.

All blocks of a page run in one test, in order, and share one scope. `fresh_names` are set again before each block.
The comment `<!-- not run: reason -->` in the line above a block skips it.
"""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import TrainingArguments

import liger_chunked
from liger_chunked import revert_liger_kernel
from liger_chunked.deferred import DeferredLogits
from liger_chunked.integrations.transformers import overrides

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:^<!-- (not run): [^>]*-->\n)?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    line: int  # number of the first line of code, from 1
    mark: str | None  # "not run" or None
    code: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(text.count("\n", 0, m.start(2)) + 1, m[1], m[2]) for m in BLOCK.finditer(text)]


WITH_CODE = [page for page in PAGES if any(block.mark != "not run" for block in blocks(page))]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import toy

    return toy


def fresh_names(toy: ModuleType, folder: Path) -> dict[str, Any]:
    """Return the names for a block: a tiny model, its batch, random hidden states and heads, arguments of a Trainer."""
    tokenizer, rows = toy.byte_tokenizer(), toy.sums(2)
    sequences = [toy.encode(tokenizer, row["prompt"], row[kind]) for kind in ("chosen", "rejected") for row in rows]
    batch = toy.collate(sequences)
    model, ref_model = toy.tiny_model().train(), toy.tiny_model(seed=1)
    torch.manual_seed(0)
    B, T, H, V = 4, 6, 16, 97
    target = torch.randint(V, (B, T))
    target[:, :2] = -100  # the prompt
    return {
        "__name__": "__main__",
        "model": model,
        "ref_model": ref_model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batch": batch,
        **batch,  # input_ids, labels, attention_mask
        "weight": (torch.randn(V, H) / 4).requires_grad_(),
        "hidden": torch.randn(B, T, H).requires_grad_(),
        "target": target,
        "ref_weight": torch.randn(V, H) / 4,
        "ref_hidden": torch.randn(B, T, H),
        "teacher_weight": torch.randn(V + 31, 24) / 5,  # the vocabulary is padded
        "teacher_hidden": torch.randn(B, T, 24),
        "advantages": torch.tensor([1.0, -1.0, 0.5, 0.0]),
        "old_logps": torch.randn(B, T) - 5,
        "preference_labels": torch.tensor([True, False, False, True]),
        "tokenizer": tokenizer,
        "data": [toy.encode(tokenizer, row["prompt"], row["chosen"]) for row in toy.sums(8)],
        "collate": toy.collate,
        "args": TrainingArguments(str(folder), max_steps=1, use_cpu=True, report_to="none", save_strategy="no"),
    }


def fake_module(name: str, **contents: Any) -> dict[str, ModuleType]:
    """Return a fake of a module that is not installed, and its parent packages."""
    parts = name.split(".")
    modules = {".".join(parts[:i]): ModuleType(".".join(parts[:i])) for i in range(1, len(parts) + 1)}
    vars(modules[name]).update(contents)
    return modules


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record calls of functions of frameworks that are not installed."""
    made: list[str] = []
    for name, fake in {
        **fake_module("axolotl.integrations.base", BasePlugin=type("BasePlugin", (), {})),
        **fake_module("llamafactory.train.tuner", run_exp=lambda: made.append("run_exp")),
    }.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return made


@pytest.fixture
def only_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the layers that a block registers."""
    monkeypatch.setattr(overrides, "_REGISTERED", dict(overrides._REGISTERED))


def run(block: Block, page: Path, scope: dict[str, Any], toy: ModuleType, calls: list[str]) -> None:
    calls.clear()
    try:
        # Empty lines before the code give a traceback the line numbers of the page.
        exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), scope)
        if trainer := scope.pop("trainer", None):
            trainer.train()
        if plugin := scope.pop("LigerChunkedPlugin", None):
            plugin().post_model_build({}, scope["model"])
        assert calls == (["run_exp"] if "run_exp" in block.code else [])
        if page.name == "frameworks.md" and "apply_liger_kernel" in block.code and "qwen3" not in block.code:
            logits = scope["model"].train()(**toy.collate(scope["data"])).logits
            assert isinstance(logits, DeferredLogits) and not logits.is_computed
    finally:
        for family in ("llama", "qwen3"):
            revert_liger_kernel(family)


@pytest.mark.usefixtures("only_own_layers")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_blocks_run(page, toy, calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the tutorial draws a figure
    scope: dict[str, Any] = {}
    try:
        for block in blocks(page):
            if block.mark is None:
                scope.update(fresh_names(toy, tmp_path))
                run(block, page, scope, toy, calls)
    finally:
        # A class of the page keeps its globals. A patched model among them would keep the rotary function patched.
        scope.clear()
        gc.collect()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_point_to_files(page):
    links = [link for link in LINK.findall(page.read_text()) if not re.match(r"[a-z]+:|#", link)]
    missing = [link for link in links if not (page.parent / link.partition("#")[0]).exists()]
    assert not missing


def table_rows(page: Path) -> dict[str, list[str]]:
    """Return the cells of every table row, by its first cell."""
    lines = [line.strip("| \n").split("|") for line in page.read_text().splitlines() if line.startswith("| ")]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines}


def test_readme_quotes_the_benchmarks():
    measured = table_rows(ROOT / "docs" / "benchmarks.md")
    quoted = {task: cells for task, cells in table_rows(ROOT / "README.md").items() if task in measured}
    quoted = {task: cells for task, cells in quoted.items() if re.search(r"\d", task)}  # not the headers
    assert len(quoted) >= 5
    for task, cells in quoted.items():
        assert set(cells) - {""} <= set(measured[task]), task


def test_every_public_name_is_in_the_index():
    text = (ROOT / "docs" / "api.md").read_text()
    names = [*liger_chunked.__all__, *liger_chunked._OF_TRANSFORMERS, *trl_trainers()]
    assert [name for name in names if f"`{name}`" not in text] == []


def trl_trainers() -> list[str]:
    pytest.importorskip("trl")
    from liger_chunked.integrations import trl

    return trl.__all__


def test_readme_is_read_in_one_sitting():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
