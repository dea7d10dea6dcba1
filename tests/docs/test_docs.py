"""The Python blocks of README.md and docs/*.md run, links point to files, README and home page have measured numbers.

A block of the pages in `PASTED` runs as a reader pastes it, in a fresh process. All blocks of another page run in one
test, in order, and share one scope, in which `fresh_names` are set again before each block. The comment
`<!-- not run: reason -->` in the line above a block skips it.
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


# Whether a block needs the blocks above it: a page to read from top to bottom is one script.
PASTED = {
    ROOT / "README.md": False,
    ROOT / "docs" / "index.md": False,
    ROOT / "docs" / "getting-started.md": True,
    ROOT / "docs" / "writing-a-loss.md": True,
    **dict.fromkeys(sorted((ROOT / "docs" / "guides").glob("*.md")), True),
}
WITH_CODE = [page for page in PAGES if page not in PASTED and any(block.mark != "not run" for block in blocks(page))]


def scripts(page: Path, needs_above: bool) -> dict[str, str]:
    """Return what a reader pastes: each block, or all blocks of a page together."""
    run = [block for block in blocks(page) if block.mark is None]
    if needs_above:
        return {page.name: "".join(block.code for block in run)}
    return {f"{page.name}:{block.line}": block.code for block in run}


SCRIPTS = {name: code for page, needs in PASTED.items() for name, code in scripts(page, needs).items()}


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
            model = toy.tiny_model() if "_to_llama" in block.code else scope["model"]  # those that are built later
            logits = model.train()(**toy.collate(scope["data"])).logits
            assert isinstance(logits, DeferredLogits) and not logits.is_computed
    finally:
        for family in ("llama", "qwen3"):
            revert_liger_kernel(family)


@pytest.mark.few(4, "distributed.md", "models.md")
@pytest.mark.usefixtures("only_own_layers")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_blocks_run(page, toy, calls, tmp_path, monkeypatch):
    if page.name == "trainers.md":
        pytest.importorskip("trl")
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


@pytest.mark.few(1, "writing-a-loss.md")
@pytest.mark.parametrize("name", SCRIPTS)
def test_pasted_blocks_run(name, fresh_process, tmp_path):
    # The fork has imported torch and transformers, and nothing else has run in it.
    code = f"import os; os.chdir({str(tmp_path)!r})\n{SCRIPTS[name]}"
    fresh_process.run(code)


# For each guide, the log-probabilities or divergences that its own functions compute, with the labels' positions.
OF_GUIDE = {
    "preferences.md": "ref_model(**batch, head_fn=ref_fn)",
    "grpo.md": "model(input_ids=input_ids, labels=labels, head_fn=logps_fn)",
    "sft.md": "model(input_ids=input_ids, labels=labels, head_fn=logps)",
    "distillation.md": "student(input_ids=input_ids, labels=labels, head_fn=per_token)",
}


@pytest.mark.parametrize("name", OF_GUIDE)
def test_guides_compute_with_the_scale_of_the_models_logits(name):
    if name == "sft.md":
        pytest.importorskip("peft")
    (code,) = scripts(ROOT / "docs" / "guides" / name, needs_above=True).values()
    code = code.replace("LlamaConfig(", "GraniteConfig(logits_scaling=0.125, ").replace("Llama", "Granite")
    scope: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(code, scope)
        with torch.no_grad():
            values = eval(OF_GUIDE[name], scope)[:, :-1]
            ids, labels = scope["input_ids"], scope["labels"][:, 1:]
            model = scope["ref_model" if name == "preferences.md" else "student" if "student" in scope else "model"]
            logps = model.eval()(ids).logits[:, :-1]
            if name == "distillation.md":
                q, p = ((x / 2).log_softmax(-1) for x in (scope["teacher"](ids).logits[:, :-1, :4096], logps))
                expected = (q.exp() * (q - p)).sum(-1)
            else:
                expected = logps.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        torch.testing.assert_close(values, expected.masked_fill(labels == -100, 0))
    finally:
        scope.clear()
        gc.collect()


def test_no_block_of_the_first_pages_is_left_out():
    for page in list(PASTED)[:3]:
        assert blocks(page) and all(block.mark is None for block in blocks(page)), page


@pytest.mark.few(4)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_point_to_files(page):
    links = [link for link in LINK.findall(page.read_text()) if not re.match(r"[a-z]+:|#", link)]
    missing = [link for link in links if not (page.parent / link.partition("#")[0]).exists()]
    assert not missing


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "index.md"], ids=lambda page: page.name)
def test_leading_numbers_are_the_measured_ones(page):
    """The table is what the generator makes of the kept runs, and the figure has its numbers."""
    pytest.importorskip("matplotlib")
    from benchmarks import figures, harness, headline

    between = page.read_text().partition(figures.HEADLINE_BEGIN)[2].partition(figures.HEADLINE_END)[0]
    assert between.strip() == headline.markdown(harness.RESULTS)
    for name in (figures.HEADLINE, figures.HEADLINE_DARK):
        drawn = (figures.DOCS / name).read_text()
        assert [step.you_run for step in headline.steps(harness.RESULTS) if f">{step.over(0)}<" not in drawn] == []


def test_the_leading_table_is_no_selection():
    """It has a row for every trainer that was measured on its model, and the slowest one of all models."""
    from benchmarks import harness, headline

    shown = {(gain.family, gain.task) for gain in headline.GAINS}
    run = headline.whole_run(harness.RESULTS, "trainers")
    times = {task: run.measured(task) for task in run.cells}
    slowest = max(times, key=lambda task: times[task][harness.OURS]["ms"] / times[task][harness.STOCK]["ms"])
    for task in times:
        assert ("trainers", task) in shown or not ("llama-3.2-1b" in task or task == slowest), task


@pytest.mark.parametrize("name", ["README.md", "docs/index.md", "docs/getting-started.md"])
def test_the_address_of_a_clone_is_the_one_of_pyproject(name):
    (address,) = re.findall(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(re.findall(r"git clone (\S+)", (ROOT / name).read_text())) == {address}


def test_every_public_name_is_in_the_index():
    text = (ROOT / "docs" / "reference" / "index.md").read_text()
    names = [*liger_chunked.__all__, *liger_chunked._OF_TRANSFORMERS, *liger_chunked._OF_TRL, *trl_trainers()]
    assert [name for name in names if f"`{name}`" not in text] == []


def trl_trainers() -> list[str]:
    pytest.importorskip("trl")
    from liger_chunked.integrations import trl

    return trl.__all__


def test_the_map_of_the_engine_has_every_file():
    listed = re.findall(r"\w+", liger_chunked.engine.__doc__)
    files = {path.stem for path in (ROOT / "liger_chunked/engine").glob("*.py")} - {"__init__"}
    assert files <= set(listed), files - set(listed)
