"""The benchmarks at small shapes: they run, their numbers are right, and figures can be drawn from the results."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks import (
    cross_entropy,
    distillation,
    distributed,
    figures,
    harness,
    pages,
    policy,
    preference,
    report,
    same_bits,
    sampler_gap,
    steps,
    sweep,
    token_stats,
)
from benchmarks.drawing import style

FAMILIES = {
    "cross_entropy": cross_entropy,
    "preference": preference,
    "distillation": distillation,
    "policy": policy,
    "sweep": sweep,
    "token_stats": token_stats,
}
# Compiling takes seconds, and a peer's speed on a CPU says nothing about this library.
pytestmark = [
    pytest.mark.ordinary_memory,
    pytest.mark.skipif(harness.DEVICE != "cpu", reason="measured by make bench"),
    # Warnings of TRL and transformers about transformers.
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
]


def run(family: str, out: Path, *arguments: str) -> dict:
    return json.loads(FAMILIES[family].main(["--out", str(out), *arguments]).read_text())


@pytest.fixture(scope="module", autouse=True)
def briefly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "TIMED_MS", 0)
        patch.setattr(harness, "WARM_MS", 0)
        yield


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every family once, without peers."""
    folder = tmp_path_factory.mktemp("results")
    for family in FAMILIES:
        run(family, folder, "--peer-seconds=-1")
    return folder


@pytest.mark.few(4, "preference", "distillation", "policy", "sweep")
@pytest.mark.parametrize("family", FAMILIES)
def test_rows(results: Path, family: str) -> None:
    (path,) = results.glob(f"{family}-cpu-*.json")
    content = json.loads(path.read_text())
    assert content["family"] == family
    assert content["whole"]
    assert {"device", "dtype", "versions", "commit", "date"} <= content["environment"].keys()
    assert {row["task"] for row in content["rows"]} == content["tasks"].keys()
    for row in content["rows"]:
        if not row["name"].startswith((harness.OURS, harness.BASELINE)):
            assert row["failure"].startswith("skipped: the peers'"), row
            continue
        assert row["failure"] is None, row
        assert row["ms"] > 0
        assert row["times_floor"] == pytest.approx(row["ms"] / content["tasks"][row["task"]]["floor_ms"], rel=0.02)
        if family != "sweep" and "forward" not in row["task"]:
            # The float64 gradients belong to the loss that our code and eager code compute.
            assert row["errors"].keys() == {"input", "weight"}
            assert max(row["errors"].values()) < 1e-4, row


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict:
    pytest.importorskip("transformers")
    arguments = ["--ranks", "2", "--out", str(tmp_path_factory.mktemp("ranks"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "TIMED_MS", 0)
        return json.loads(distributed.main([*arguments, "64:32:1024", *distributed.SMALL[1::3]]).read_text())


@pytest.mark.slow
def test_losses_on_two_ranks(on_ranks: dict) -> None:
    tasks = [task for task in on_ranks["tasks"] if "64x32x1024" in task]
    assert [task.split(" 64x")[0] for task in tasks] == list(distributed.LOSSES)
    for task in tasks:
        rows = {row["name"]: row for row in on_ranks["rows"] if row["task"] == task}
        ours = rows[harness.OURS]
        for name, row in rows.items():
            if name.startswith("liger-kernel"):
                assert row["failure"] == "skipped: Triton kernels on a GPU alone"
                continue
            assert row["failure"] is None and row["times_floor"] > 0, row
            for key in ("loss", "input_norm", "weight_norm"):
                if name != distributed.SILENT:
                    assert row[key] == pytest.approx(ours[key], rel=1e-4, abs=1e-7), (task, name, key)


def test_training_steps_on_two_ranks(on_ranks: dict) -> None:
    tasks = [task for task in on_ranks["tasks"] if "tiny" in task]
    assert [task.split(" tiny")[0] for task in tasks] == ["TP SFT", "FSDP DPO"]
    for task in tasks:
        stock, ours, *liger = (row for row in on_ranks["rows"] if row["task"] == task)
        assert {row["failure"] for row in liger} == {"skipped: Triton kernels on a GPU alone"}
        for row in (stock, ours):
            assert row["failure"] is None and row["tokens_per_s"] > 0, row
            assert row["loss"] == pytest.approx(stock["loss"], rel=1e-5)
            assert row["grad_norm"] == pytest.approx(stock["grad_norm"], rel=1e-4)


# Scripts of one table, their arguments, and how many tasks it has.
SCRIPTS: dict[str, tuple[list[str], int]] = {
    "vocab_shard": ([], 12),
    "experts": ([], 3),
    "sft": (["--families", "--repeats", "1"], 6),
    "long_context": (["SFT:tiny-llama:2:64", "GRPO-shared:tiny-llama:2:64"], 4),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script(script: str, tmp_path: Path) -> None:
    """Its rows have a time or say why not; those of one task have one loss, and errors that rounding explains."""
    pytest.importorskip("trl")
    arguments, n_tasks = SCRIPTS[script]
    module = importlib.import_module(f"benchmarks.{script}")
    content = json.loads(module.main([*arguments, "--out", str(tmp_path)]).read_text())
    assert len(content["tasks"]) == n_tasks
    for task in content["tasks"]:
        rows = [row for row in content["rows"] if row["task"] == task]
        measured = [row for row in rows if row["failure"] is None]
        assert measured or "longest" in task  # memory is only measured on a GPU
        assert all(row["failure"].startswith("skipped: ") for row in rows if row not in measured)
        for row in measured:
            assert max((row.get("errors") or {"none": 0.0}).values()) < 1e-5, row
            for name in ("loss", "grad_norm"):
                if row.get(name) is not None:
                    assert row[name] == pytest.approx(measured[0][name], rel=1e-4), (task, name)


@pytest.mark.slow
def test_float32_logits_close_the_heads_part_of_the_gap(tmp_path: Path) -> None:
    content = json.loads(sampler_gap.main(["--out", str(tmp_path), "--steps", "2"]).read_text())
    for run, part in zip(content["runs"], (0.3, 1e-3), strict=True):
        ours, eager = run["means"].values()
        assert ours["of_head"] < part * eager["of_head"], run


def test_a_failure_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> harness.Loss:
        raise ImportError("no such peer\nand a second line")

    monkeypatch.setattr(cross_entropy, "trl", broken)
    rows = {row["name"]: row for row in run("cross_entropy", tmp_path)["rows"]}
    assert rows["trl"]["failure"] == "failed: ImportError: no such peer"
    assert rows["torch.compile"]["failure"].startswith("skipped: ")
    assert rows["liger_chunked"]["failure"] is None


def test_tables_and_numbers_of_other_pages_are_those_of_the_kept_results() -> None:
    root, marked = figures.DOCS.parent, "".join(page.read_text() for page in figures.DOCS.rglob("*.md"))
    for name in pages.TABLES:
        assert marked.count(f"<!-- {name}: begin -->") == 1, name
    for page, text in pages.written(root, harness.RESULTS).items():
        assert page.read_text() == text, f"{page}: run `make figures`"


@pytest.mark.slow
def test_pages_and_figures_are_those_of_the_kept_results(tmp_path: Path) -> None:
    """`make figures` changes nothing: tables and the text of figures. Positions depend on matplotlib's version."""
    page = tmp_path / "benchmarks.md"
    shutil.copy(figures.DOCS / page.name, page)
    drawn = figures.main(["--out", str(tmp_path), "--table", str(page), "--convergence", str(page)])
    text = page.read_text()
    assert text == (figures.DOCS / page.name).read_text()
    for path in drawn:
        kept, again = (re.findall(r"<text[^>]*>([^<]*)<", p.read_text()) for p in (figures.DOCS / path.name, path))
        assert len(kept) > 10 and kept == again, path.name
    assert "| RMSNorm 16384 × 4096 | " in text and "| x + residual, RMSNorm" in text
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert all(len({line.count("|") for line in lines}) == 1 for lines in tables)


STEPS = {"sft": ["tiny-llama:1:16", "tiny-qwen2:1:16"], "trainers": ["KTO:tiny-qwen2:2:16", "GRPO:tiny-llama:2:16"]}


@pytest.fixture(scope="module")
def whole_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("trl")
    from benchmarks import sft, trainers

    folder = tmp_path_factory.mktemp("steps")
    for module, shapes in ((sft, STEPS["sft"]), (trainers, STEPS["trainers"])):
        module.main([*shapes, "--repeats", "1", "--out", str(folder)])
    return folder


@pytest.mark.few(1, "trainers")
@pytest.mark.parametrize("family", STEPS)
def test_steps_of_models(whole_steps: Path, family: str) -> None:
    (path,) = whole_steps.glob(f"{family}-cpu-*.json")  # not those of trainers_shared
    content = json.loads(path.read_text())
    assert len(content["tasks"]) == len(STEPS[family])
    for task in content["tasks"]:
        stock, *ours, liger = (row for row in content["rows"] if row["task"] == task)
        assert [stock["name"], ours[0]["name"]] == [harness.STOCK, harness.OURS]
        assert [row["name"] for row in ours[1:]] == ([f"{harness.OURS}, loss="] if family == "trainers" else [])
        assert liger["failure"] == "skipped: Triton kernels on a GPU alone"
        for row in (stock, *ours):
            assert row["failure"] is None, row
            assert row["loss"] == pytest.approx(stock["loss"], rel=1e-5)
            assert row["grad_norm"] == pytest.approx(stock["grad_norm"], rel=1e-4)
            assert row["tokens_per_s"] == pytest.approx(1e3 * tokens(task) / row["ms"], rel=1e-2)


def test_a_head_with_lora(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from benchmarks import lora_head

    content = json.loads(lora_head.main(["--out", str(tmp_path)]).read_text())
    for task, facts in content["tasks"].items():
        eager, *ours, compiled = (row for row in content["rows"] if row["task"] == task)
        assert compiled["failure"].startswith("skipped: ")
        for row in (eager, *ours):
            assert row["failure"] is None, row
            assert row["errors"].keys() == {"input", "down", "up"} and max(row["errors"].values()) < 1e-5, row
        # The adapter has three products with its `up` and three with its `down`, which prompts also reach.
        rank, hidden, vocab = facts["rank"], facts["hidden"], facts["vocabulary"]
        products, positions = {"SFT": (2, 1), "DPO": (3, 2)}[task.split()[0]]
        expected = products + 3 * rank / hidden + 3 * positions * rank / vocab
        automatic, small = ours
        assert automatic["products"] == pytest.approx(expected), task
        assert small["products"] <= expected + 1 + rank / hidden, task


def tokens(task: str) -> int:
    n, length = task.rpartition(" ")[2].split("x")
    return int(n) * int(length)


@pytest.mark.few(1)
@pytest.mark.parametrize("module", [figures, style, report, same_bits, steps])
def test_examples(module) -> None:
    assert doctest.testmod(module).failed == 0
