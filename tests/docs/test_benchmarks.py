"""The benchmarks at small shapes: they run, their numbers are right, and figures can be drawn from the results."""

from __future__ import annotations

import doctest
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

from benchmarks import (
    cross_entropy,
    distillation,
    distributed,
    figures,
    harness,
    oracle,
    pages,
    parts,
    policy,
    preference,
    ranks,
    report,
    same_bits,
    sampler_gap,
    steps,
    sweep,
    token_stats,
    vocab_shard,
)
from benchmarks.drawing import floor, style
from benchmarks.harness import new_file

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


def test_a_rank_of_a_split_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(vocab_shard.main(["--out", str(tmp_path)]).read_text())
    assert "COMMUNICATION IS NOT IN THESE TIMES" in capsys.readouterr().out
    assert {task["ranks"] for task in content["tasks"].values()} == {2, 4}
    assert all("no communication" in task for task in content["tasks"])
    for row in content["rows"]:
        assert row["failure"] is None and row["ms"] > 0, row


@pytest.mark.exhaustive  # it starts ten processes
def test_ranks_fail_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that raises, dies or hangs while the others wait for it ends all; the next request starts new ones."""
    monkeypatch.setattr(ranks, "PATIENCE", 1.0)
    fine = [{"rank": rank, "agreed": 1.0} for rank in (0, 1)]
    with ranks.Ranks("tests.failing_ranks", 2) as asked:
        assert asked.ask({"what": "fine"}, 60) == fine
        with pytest.raises(harness.Skipped, match="not here"):
            asked.ask({"what": "skip"}, 60)
        assert asked._starts == 1, "nothing has failed yet"
        with pytest.raises(ranks.RankFailure, match=r"ranks \[1\]: ValueError: of one"):
            asked.ask({"what": "one"}, 60)
        with pytest.raises(ranks.RankFailure, match=r"ranks \[1\]: exit code 3: last words"):
            asked.ask({"what": "dies"}, 60)
        with pytest.raises(ranks.RankFailure, match=r"ranks \[0, 1\] did not answer within 1 s"):
            asked.ask({"what": "hangs"}, 1)
        with pytest.raises(torch.OutOfMemoryError):
            asked.ask({"what": "no memory"}, 60)
        assert asked.ask({"what": "fine"}, 60) == fine
        assert asked._starts == 5


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict:
    pytest.importorskip("transformers")
    arguments = ["--ranks", "2", "--out", str(tmp_path_factory.mktemp("ranks"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "TIMED_MS", 0)
        return json.loads(distributed.main([*arguments, "64:32:1024", *distributed.SMALL[1::3]]).read_text())


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


def test_ranks_that_cannot_split_a_batch_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    for n, v in ((64, 1022), (72, 1024)):
        with pytest.raises(harness.Skipped, match="8 ranks cannot split 8 sequences"):
            distributed.batch_of_rank(n, 32, v)
    batch = distributed.batch_of_rank(64, 32, 1024)
    assert len(distributed.gathered_weight_in_torch("GRPO", batch).batch.t) == 1
    with pytest.raises(harness.Skipped, match="8 ranks cannot share 4 pairs"):
        distributed.gathered_weight_in_torch("DPO", batch)


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


def test_no_row_starts_after_the_minutes(tmp_path: Path) -> None:
    arguments = ["--minutes=-1", "--ranks", "2", "--out", str(tmp_path), "TP:SFT:tiny-llama-tp:2:32"]
    content = json.loads(distributed.main(arguments).read_text())
    assert {row["failure"] for row in content["rows"]} == {"skipped: the -1 minutes are over"}
    assert not content["whole"]


def test_float32_logits_close_the_heads_part_of_the_gap(tmp_path: Path) -> None:
    content = json.loads(sampler_gap.main(["--out", str(tmp_path), "--steps", "2"]).read_text())
    for run, part in zip(content["runs"], (0.3, 1e-3), strict=True):
        ours, eager = run["means"].values()
        assert ours["of_head"] < part * eager["of_head"], run


def test_token_oracle() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True), torch.randn(9, 5, dtype=torch.float64)
    w.requires_grad_()
    t = torch.randint(9, (2, 4))
    t[0, :2] = oracle.IGNORE_INDEX
    mask = t != oracle.IGNORE_INDEX

    def objective(logps: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return (logps.exp() * entropy).sum() + entropy.square().sum()

    log_p = (x @ w.t()).log_softmax(-1)
    logps = log_p.gather(2, t.clamp(min=0)[..., None])[..., 0] * mask
    objective(logps, -(log_p.exp() * log_p).sum(-1) * mask).backward()
    found = oracle.token_gradients(x, w, t, objective)
    assert torch.allclose(found["input"], x.grad)
    assert torch.allclose(found["weight"], w.grad)


def test_blocks_do_not_change_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, t = torch.randn(7, 5), torch.randn(9, 5), torch.randint(9, (7,))

    def both() -> list[torch.Tensor]:
        of_tokens = oracle.token_gradients(x, w, t, lambda logps, entropy: (logps * entropy).sum())
        of_logits = oracle.logits_gradients(x, w, lambda z, rows: z.square().sum(-1) * x[rows, 0])
        return [*of_tokens.values(), *of_logits.values()]

    whole = both()
    monkeypatch.setattr(oracle, "_BLOCK", 27)
    assert all(torch.allclose(a, b) for a, b in zip(whole, both(), strict=True))


def test_a_failure_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> harness.Loss:
        raise ImportError("no such peer\nand a second line")

    monkeypatch.setattr(cross_entropy, "trl", broken)
    rows = {row["name"]: row for row in run("cross_entropy", tmp_path)["rows"]}
    assert rows["trl"]["failure"] == "failed: ImportError: no such peer"
    assert rows["torch.compile"]["failure"].startswith("skipped: ")
    assert rows["liger_chunked"]["failure"] is None


def test_parts(tmp_path: Path) -> None:
    content = json.loads(parts.main(["--out", str(tmp_path)]).read_text())
    by_task = {task: [row for row in content["rows"] if row["task"] == task] for task in content["tasks"]}
    assert [len(rows) for rows in by_task.values()] == [5, 1], "the epilogue's are for a GPU"
    for rows in by_task.values():
        assert rows[0]["name"] == parts.FLOOR and rows[0]["times_floor"] == 1.0
        assert all(row["failure"] is None and row["ms"] > 0 for row in rows)


def test_only_ours_and_a_second_run(tmp_path: Path) -> None:
    first = run("cross_entropy", tmp_path, "--only", "ours", "16:8:64")
    assert {row["name"].split(",")[0] for row in first["rows"]} == {"liger_chunked", "liger_chunked.linear_token_stats"}
    assert list(first["tasks"]) == ["cross entropy 16x8x64"]
    run("cross_entropy", tmp_path, "--only", "eager")
    run("cross_entropy", tmp_path, "--peer-seconds=-1", "16:8:64")
    assert report.newest(tmp_path, "cross_entropy") is None, "figures need whole runs"
    assert len(list(tmp_path.glob("cross_entropy-cpu-*.json"))) == 3
    with pytest.raises(SystemExit, match="nothing is called --task 'no such task'"):
        run("cross_entropy", tmp_path, "--task", "no such task")


def test_a_run_that_ran_out_of_time_is_not_whole(tmp_path: Path) -> None:
    content = run("cross_entropy", tmp_path, "--peer-seconds=0")
    assert any(row["failure"] == "skipped: the peers' 0 seconds are over" for row in content["rows"])
    assert not content["whole"]


def test_figures_and_table(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{figures.BEGIN}\nold\n{figures.END}\nafter\n")
    drawn = figures.main(["--results", str(results), "--out", str(tmp_path / "drawn"), "--table", str(page)])
    assert [path.name for path in drawn] == [figures.FLOOR, figures.SCALING]
    assert all("liger_chunked" in path.read_text() for path in drawn)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "\nold\n" not in text
    assert "](drawn/benchmarks-floor.svg)" in text
    assert "| JSD, 32 × (32, 48) × 1024 |" in text
    tables = [part.splitlines() for part in text.split("\n\n") if part.lstrip("-> benchmrgi!<:\n").startswith("|")]
    assert [len({line.count("|") for line in lines if line.startswith("|")}) for lines in tables] == [1, 1]
    again = figures.main(["--results", str(results), "--out", str(tmp_path / "again"), "--table", str(page)])
    assert [a.read_text() for a in drawn] == [b.read_text() for b in again], "the same data make the same files"


def test_a_page_without_markers(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("nothing to replace\n")
    with pytest.raises(ValueError, match="expected the markers"):
        figures.write_between(tmp_path / "page.md", "text")


def test_tables_and_numbers_of_other_pages_are_those_of_the_kept_results() -> None:
    root, marked = figures.DOCS.parent, "".join(page.read_text() for page in figures.DOCS.rglob("*.md"))
    for name in pages.TABLES:
        assert marked.count(f"<!-- {name}: begin -->") == 1, name
    for page, text in pages.written(root, harness.RESULTS).items():
        assert page.read_text() == text, f"{page}: run `make figures`"


def test_a_sentence_takes_its_numbers_and_keeps_its_words(tmp_path: Path) -> None:
    sentence = pages.Sentence("a.md", "takes {ms:.1f} ms ({file}) and {mib:,.0f} MiB.", lambda folder: dict(values))
    values = {"ms": 2.345, "mib": 1234.5, "file": "new"}
    page = "It takes\n1.2 ms (old one) and 999\nMiB. So takes 3 s."
    assert sentence.written(page, tmp_path) == "It takes\n2.3 ms (new) and 1,234\nMiB. So takes 3 s."
    with pytest.raises(ValueError, match="has 2 times, not once"):
        sentence.written(page + page, tmp_path)
    with pytest.raises(ValueError, match="has 0 times, not once"):
        sentence.written("It takes long.", tmp_path)


def test_pages_and_figures_are_those_of_the_kept_results(tmp_path: Path) -> None:
    """`make figures` changes nothing: tables and the text of figures. Positions depend on matplotlib's version."""
    copies = [tmp_path / name for name in ("benchmarks.md", "evidence.md")]
    for page in copies:
        shutil.copy(figures.DOCS / page.name, page)
    drawn = figures.main(["--out", str(tmp_path), "--table", str(copies[0]), "--convergence", str(copies[1])])
    for page in copies:
        assert page.read_text() == (figures.DOCS / page.name).read_text()
    for path in drawn:
        kept, again = (re.findall(r"<text[^>]*>([^<]*)<", p.read_text()) for p in (figures.DOCS / path.name, path))
        assert len(kept) > 10 and kept == again, path.name
    text = copies[0].read_text()
    assert "| RMSNorm 16384 × 4096 | " in text and "| x + residual, RMSNorm" in text
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert all(len({line.count("|") for line in lines}) == 1 for lines in tables)


def test_the_newest_run_is_of_a_gpu(tmp_path: Path) -> None:
    """The order is that of the times, not of the names, which are those of commits."""

    def keep(commit: str, kind: str, saved: str) -> None:
        about = {"device": commit, "device_type": kind, "commit": commit, "saved": saved}
        content = {"whole": True, "environment": about, "tasks": {}, "rows": []}
        new_file(tmp_path, "policy", about).write_text(json.dumps(content))

    keep("c" * 40, "cuda", "2026-11-20T08:00:00Z")
    keep("b" * 40, "cuda", "2026-11-21T08:00:00Z")
    keep("a" * 40, "cuda", "2026-11-21T09:00:00Z")
    keep("d" * 40, "cpu", "2026-11-22T08:00:00Z")
    newest = report.newest(tmp_path, "policy")
    assert newest is not None and newest.environment["device"] == "a" * 40
    assert newest.files == {tmp_path / "policy-aaaaaaa.json"}


def test_names_of_results(tmp_path: Path) -> None:
    about = {"device_type": "cuda", "commit": "0123456789abcdef", "saved": ""}
    for name in ("policy-0123456.json", "policy-0123456-2.json"):
        path = new_file(tmp_path, "policy", about)
        assert path.name == name
        path.touch()
    assert new_file(tmp_path, "policy", about | {"device_type": "cpu"}).name == "policy-cpu-0123456.json"
    assert (
        new_file(tmp_path, "policy", about | {"commit": "0123456789abcdef-dirty"}).name == "policy-0123456-dirty.json"
    )
    assert new_file(tmp_path, "policy", about | {"commit": ""}).name == "policy-unknown.json"


def test_a_task_that_was_measured_again(tmp_path: Path) -> None:
    """A new measurement of a task replaces the one in the last complete run, which has all implementations."""

    def keep(run: str, device: str, whole: bool, **tasks: dict[str, str | None]) -> None:
        environment = {
            "device": device,
            "device_type": "cuda",
            "date": run[:10],
            "saved": run,
            "commit": run,
            "versions": {},
        }
        rows = [
            {"task": task, "name": name, "failure": failure, "run": run}
            for task, contenders in tasks.items()
            for name, failure in contenders.items()
        ]
        content = {"whole": whole, "environment": environment | {"dtype": "bfloat16"}, "tasks": dict.fromkeys(tasks)}
        (tmp_path / f"policy-{run}.json").write_text(json.dumps(content | {"rows": rows}))

    everyone: dict[str, str | None] = {"ours": None, "theirs": None, "absent": "failed"}
    keep("2026-11-20", "H200", False, a=everyone)
    keep("2026-11-21", "H200", True, a=everyone, b=everyone, c=everyone, d=everyone)
    keep("2026-11-21-2", "H200", False, b=everyone, c={"ours": None}, e=everyone)
    keep("2026-11-21-3", "H200", False, c={"ours": None, "theirs": "skipped"})
    keep("2026-11-22", "H100", False, d=everyone)
    newest = report.newest(tmp_path, "policy")
    assert newest is not None and list(newest.cells) == list("abcd")
    found = {task: rows["ours"]["run"] for task, rows in newest.cells.items()}
    assert found == {"a": "2026-11-21", "b": "2026-11-21-2", "c": "2026-11-21", "d": "2026-11-21"}
    assert newest.source.endswith("commit 2026-11-21; b: 2026-11-21, commit 2026-11-21-2")


def test_labels_do_not_overlap() -> None:
    starts, widths = [0.0, 3.0, 4.0, 40.0, 44.0, 100.0], [30.0, 50.0, 10.0, 20.0, 20.0, 10.0]
    heights = floor.levels(starts, widths)
    for i in range(len(starts)):
        for j in range(i + 1, len(starts)):
            assert heights[i] > heights[j] or starts[i] + widths[i] < starts[j], (i, j)


def test_prompts_of_an_odd_number_of_sequences() -> None:
    pytest.importorskip("trl")
    from benchmarks.trainers import Completions

    ids = Completions.random(3, 8, 4, 100).ids
    assert ids.shape == (3, 8) and torch.equal(ids[0, :4], ids[2, :4]) and not torch.equal(ids[0, 4:], ids[2, 4:])


STEPS = {"sft": ["tiny-llama:1:16", "tiny-qwen2:1:16"], "trainers": ["KTO:tiny-qwen2:2:16", "GRPO:tiny-llama:2:16"]}

SHARED_STEPS = ["--share", "ORPO:tiny-llama:4:16:8"]


@pytest.fixture(scope="module")
def whole_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("trl")
    from benchmarks import sft, trainers

    folder = tmp_path_factory.mktemp("steps")
    for module, shapes in ((sft, STEPS["sft"]), (trainers, STEPS["trainers"]), (trainers, SHARED_STEPS)):
        module.main([*shapes, "--repeats", "1", "--out", str(folder)])
    return folder


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


def test_steps_of_newer_families(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from benchmarks import sft

    content = json.loads(sft.main(["--families", "--repeats", "1", "--out", str(tmp_path)]).read_text())
    assert content["family"] == "sft_families" and content["whole"]
    assert len(content["tasks"]) == len(sft.SMALL_FAMILIES) == 6
    for task in content["tasks"]:
        stock, ours, liger = (row for row in content["rows"] if row["task"] == task)
        assert stock["failure"] is ours["failure"] is None, (stock, ours)
        assert liger["failure"] == "skipped: Triton kernels on a GPU alone"
        assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-5), task
        assert ours["grad_norm"] == pytest.approx(stock["grad_norm"], rel=1e-4), task
        switches = {line.split(":")[0].strip() for line in ours["kernels"][1:]}
        assert {"rms_norm", "rope", "fused_linear_cross_entropy"} < switches and switches & {"swiglu", "geglu"}
        assert "Left alone" not in switches, ours["kernels"]


def test_experts_of_a_layer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from benchmarks import experts

    content = json.loads(experts.main(["--out", str(tmp_path)]).read_text())
    assert len(content["tasks"]) == len(experts.SMALL) == 3
    for row in content["rows"]:
        if "torch.compile" in row["name"] or row["name"] == "liger-kernel":
            assert row["failure"].startswith("skipped: "), row
            continue
        assert row["failure"] is None and row["ms"] > 0, row
        assert {"input", "routing", "gate_up_proj", "down_proj"} <= row["errors"].keys()
        assert max(row["errors"].values()) < 1e-5, row


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


def test_the_shapes_are_those_of_the_models() -> None:
    pytest.importorskip("transformers")
    from benchmarks import models

    billions = {"llama-3-8b": 8.03, "llama-3.2-1b": 1.236, "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.544}
    for name, expected in billions.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(models, "DEVICE", "meta")
            model = models.build(name, checkpointing=False)
        assert model.num_parameters() / 1e9 == pytest.approx(expected, rel=1e-3), name


def test_the_layers_of_newer_families_are_those_of_the_models() -> None:
    """With all of their layers, the models have the published number of parameters."""
    pytest.importorskip("transformers")
    from benchmarks import models

    whole = {
        "qwen3-30b-a3b-4l": (30.5, {"num_hidden_layers": 48}),
        "gpt-oss-20b-4l": (20.9, {"num_hidden_layers": 24}),
        "qwen3-next-80b-a3b-2l-hybrid": (79.7, {"num_hidden_layers": 48, "layer_types": None}),
        "glm-4.5-air-2l": (106.9, {"num_hidden_layers": 46}),
    }
    for name, (billions, depth) in whole.items():
        family, sizes = models.SHAPES[name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(models, "DEVICE", "meta")
            patch.setitem(models.SHAPES, name, (family, {**sizes, **depth}))
            model = models.build(name, checkpointing=False)
        assert model.num_parameters() / 1e9 == pytest.approx(billions, rel=2e-3), name


def test_a_step_leaves_the_weights() -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    before = weight.detach().clone()

    def backward() -> torch.Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss.detach()

    step = steps.TrainingStep(backward, torch.optim.AdamW([weight], lr=0.0))
    loss, norm = step.first()
    step()
    assert loss == pytest.approx(before.square().sum().item())
    assert norm == pytest.approx(2 * before.norm().item())
    assert torch.equal(weight, before) and weight.grad is None


@pytest.mark.parametrize("limit", [0, 5, 12, 83, 84, 1000])
@pytest.mark.parametrize("capacity", [50.0, 180.0, 900.0])  # also far from the actual capacity
def test_longest(limit: int, capacity: float) -> None:
    tried = []

    def peak_at(n: int) -> float | None:
        tried.append(n)
        return 10 + 2 * n if n <= limit else None

    fits, too_long, peaks = steps.longest(peak_at, 8, 4, capacity, seconds=60)
    assert (fits, too_long) == (limit // 4 * 4, limit // 4 * 4 + 4)
    assert peaks[-1:] == ([(fits, 10 + 2 * fits)] if fits else [])
    assert len(tried) == len(set(tried)) <= 20, "none twice, and not many more than doubling and halving take"


def test_longest_stops_in_time() -> None:
    assert steps.longest(lambda n: 2.0 * n, 8, 4, 1e9, seconds=0.0) == (8, None, [(8, 16.0)])
    assert steps.length_at([(4, 8.0), (8, 16.0)], 40.0) == 20.0


def test_out_of_memory_is_a_row(tmp_path: Path) -> None:
    def full(row: harness.Row) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    table = harness.Table("sft", steps.steps_parser("", "", 1, 1.0).parse_args(["--out", str(tmp_path)]))
    table.compare("task", {}, {"stock": full}, steps.StepRow)
    (row,) = json.loads(table.path.read_text())["rows"]
    assert row["failure"] == "out of memory"


def test_figures_and_tables_of_steps(whole_steps: Path, tmp_path: Path) -> None:
    for path in whole_steps.glob("*.json"):
        content = json.loads(path.read_text())
        memory = {"mib": 2048.0, "resident_mib": 1024.0}
        rows = [{**row, **memory} for row in content["rows"]]
        (tmp_path / path.name).write_text(json.dumps({**content, "whole": True, "rows": rows}))
    (tmp_path / "page.md").write_text(f"{figures.BEGIN}\n{figures.END}\n")
    drawn = figures.main(
        ["--results", str(tmp_path), "--out", str(tmp_path / "drawn"), "--table", str(tmp_path / "page.md")]
    )
    assert [path.name for path in drawn] == list(figures.STEP_FIGURES.values())
    text = (tmp_path / "page.md").read_text()
    assert "| tiny-llama 1 × 16 |" in text and "| KTO tiny-qwen2 2 × 16 |" in text
    assert "| 3.0 (2.0) |" in text
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert [len({line.count("|") for line in lines}) for lines in tables] == [1] * 6
    assert "| × liger_chunked |" in text and "| … `share_prefix=auto` |" in text


def test_steps_with_shared_prompts(whole_steps: Path) -> None:
    (path,) = whole_steps.glob("trainers_shared-cpu-*.json")
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows)[:2] == [harness.STOCK, harness.OURS] and harness.OURS_SHARED in rows
    for name in (harness.OURS, harness.OURS_SHARED):
        assert rows[name]["loss"] == pytest.approx(rows[harness.STOCK]["loss"], rel=1e-5)
        assert rows[name]["grad_norm"] == pytest.approx(rows[harness.STOCK]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("module", [figures, style, report, same_bits, steps])
def test_examples(module) -> None:
    assert doctest.testmod(module).failed == 0


def test_error_is_relative() -> None:
    expected = torch.full((3, 4), 2.0, dtype=torch.float64)
    assert math.isclose(harness.error(expected.float() + 0.5, expected), 0.25)


def test_same_bits_reports_every_difference() -> None:
    one, other = (same_bits.digest(torch.tensor(x)) for x in (1.0, 1.0000001))
    before = {
        "ce, equal": {"loss": one, "weight": one},
        "ce, other bits": {"loss": one, "weight": one},
        "ce, other metrics": {"loss": one, "metrics.old": one},
        "kto, fails after": {"loss": one},
        "kto, fails otherwise": "ValueError: old",
        "kto, fails alike": "ValueError: same",
        "kto, gone": {"loss": one},
    }
    after = {
        "ce, equal": {"loss": one, "weight": one},
        "ce, other bits": {"loss": one, "weight": other},
        "ce, other metrics": {"loss": one, "metrics.new": one},
        "kto, fails after": "TypeError: new",
        "kto, fails otherwise": "ValueError: new",
        "kto, fails alike": "ValueError: same",
        "kto, added": {"loss": one},
    }
    found = same_bits.compare(before, after)
    assert {name: found[name] for name in ("cases", "equal_cases", "tensors", "equal_tensors")} == {
        "cases": 8,
        "equal_cases": 1,
        "tensors": 7,
        "equal_tensors": 4,
    }
    assert found["differing"] == {"ce, other bits": ["weight"], "ce, other metrics": ["metrics.old", "metrics.new"]}
    assert found["failing"] == {
        "kto, fails after": {"before": None, "after": "TypeError: new"},
        "kto, fails otherwise": {"before": "ValueError: old", "after": "ValueError: new"},
    }
    assert found["failing_alike"] == {"kto, fails alike": "ValueError: same"}
    assert (found["only_before"], found["only_after"]) == (["kto, gone"], ["kto, added"])

    found["differing"] = [
        {
            "case": case,
            "repeatable": True,
            "tensors": {name: same_bits.difference(torch.tensor([2.0]), torch.tensor([4.0])) for name in names},
        }
        for case, names in found["differing"].items()
    ]
    lines = same_bits.report({**found, "public_names": {"only_before": ["reference"], "only_after": []}})
    for expected in (
        "1 of 8 cases and 4 of 7 tensors have equal bits",
        "  differs: ce, 2 cases, 0 not repeatable: largest difference 2.0e+00, relative 5.0e-01, "
        "of weight, metrics.old, metrics.new",
        "  fails, after: kto, 1 cases: TypeError: new",
        "  fails, both: kto, 1 cases: ValueError: same",
        "  only before: kto, 1 cases",
        "  public name only before: reference",
    ):
        assert expected in lines


def test_same_bits_hashes_dtype_and_shape() -> None:
    x = torch.zeros(2, 3)
    assert same_bits.digest(x) == same_bits.digest(torch.zeros(3, 2).T)
    for y in (x.int(), x.view(3, 2), -x):
        assert same_bits.digest(x) != same_bits.digest(y)
    assert same_bits.difference(x, None) == {"missing": "after"}
    assert same_bits.difference(x, x.view(3, 2)) == {"before": "float32 (2, 3)", "after": "float32 (3, 2)"}


def test_long_contexts(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from benchmarks import long_context

    shapes = ["SFT:tiny-llama:2:64", "GRPO-shared:tiny-llama:2:64"]
    content = json.loads(long_context.main([*shapes, "--out", str(tmp_path)]).read_text())
    rows = {task: {r["name"]: r for r in content["rows"] if r["task"] == task} for task in content["tasks"]}
    steps, longest = [*rows.values()][: len(shapes)], [*rows.values()][len(shapes) :]
    assert steps[0].keys() == long_context.CONTENDERS.keys() and all(len(shared) == 3 for shared in steps[1:])
    assert len(longest) == len(shapes)
    for of_row in steps:
        ours = [row for name, row in of_row.items() if name.startswith(long_context.OURS)]
        assert all(row["failure"] is None for row in ours)
        assert {round(row["loss"], 5) for row in ours} == {round(ours[0]["loss"], 5)}


def test_the_search_of_a_long_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    from benchmarks import long_context
    from benchmarks.steps import TrainingStep

    training = long_context.training_of("SFT:tiny-llama:2:64")

    def search(guess: float, fits: int, seconds: float = 60.0) -> Any:
        def peak_at(n: int) -> float | None:
            return None if n > fits else 10.0 + n

        monkeypatch.setattr(long_context, "capacity_mib", lambda: 12.0 + fits)
        monkeypatch.setattr(long_context, "peak_of", lambda step: peak_at(step.backward()))
        row = long_context.LongRow("task", "name")
        limits = long_context.Limits(seconds, start=None, host_gib=96.0)
        step_of = lambda n: TrainingStep(lambda: n, None)  # noqa: E731
        long_context.search(training, long_context.CONTENDERS[long_context.TILED], step_of, guess, limits, row)
        return row

    for guess in (400, 1000, 1040, 3000):
        row = search(guess, fits=1008)
        assert row.length <= 1008 < row.too_long <= row.length * long_context.PRECISION + long_context.GRID
        assert len(row.trials) <= 10
    short, first = search(400, fits=1008, seconds=0.0).trials
    assert (short[0], first[0]) == (16, 400)
