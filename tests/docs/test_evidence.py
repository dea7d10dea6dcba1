"""Training runs of a real model: the kept ones agree with each other, and a tiny run is recorded."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("matplotlib")

from benchmarks import evidence_report as report
from benchmarks.harness import OURS, STOCK


@pytest.fixture(scope="module")
def kept() -> dict[str, report.Evidence]:
    return report.kept()


def test_the_kept_runs_are_of_one_commit(kept: dict[str, report.Evidence]) -> None:
    """A test of the pages' tables compares them with the page."""
    assert list(kept) == list(report.TITLES)
    commits = {evidence.content["environment"]["commit"] for evidence in kept.values()}
    assert len(commits) == 1
    for evidence in kept.values():
        assert len(evidence.seeds) >= 2 and STOCK in evidence.contenders


def test_no_difference_is_beyond_the_spread_of_the_seeds(kept: dict[str, report.Evidence]) -> None:
    for method, evidence in kept.items():
        if method in report.OTHER_ALGORITHM:
            continue
        for contender in evidence.contenders:
            for metric in report.METRICS[method]:
                found = (method, contender, metric.key)
                assert contender == STOCK or not evidence.is_resolved(contender, metric.key), found


def test_the_model_has_learned(kept: dict[str, report.Evidence]) -> None:
    """Runs that change nothing would agree too."""
    for method, evidence in kept.items():
        metric = report.METRICS[method][0]
        before = evidence.content["untrained"][metric.key]["value"]
        better = -1 if metric.name.startswith("held-out loss") or metric.key == "kl" else 1
        for contender in evidence.contenders:
            scores = evidence.scores(contender, metric.key)
            # Each run gains more than seeds differ: as on the page, what is within their spread is no difference.
            assert min(better * (score - before) for score in scores) > evidence.spread(contender, metric.key)


def _evidence(**scores: list[float]) -> report.Evidence:
    trained = [
        {"contender": name, "seed": seed, "scores": {"nll": {"value": value, "n": 10}}, "curves": {}}
        for name, values in scores.items()
        for seed, value in enumerate(values)
    ]
    return report.Evidence("sft", {"trained": trained, "timed": [], "untrained": None}, Path("x.json"))


def test_a_difference_is_compared_with_the_spread_of_seeds() -> None:
    evidence = _evidence(stock=[1.0, 1.2, 1.1], near=[1.05, 1.25, 1.15], far=[1.3, 1.5, 1.4, 9.0])
    assert evidence.seeds == [0, 1, 2], "a seed counts if every contender has it"
    assert evidence.spread(STOCK, "nll") == pytest.approx(0.2)
    assert _evidence(stock=[1.0, 1.0], far=[9.0, 9.0]).is_resolved("far", "nll") is None, "two seeds tell no spread"
    assert not evidence.is_resolved("near", "nll") and evidence.is_resolved("far", "nll")
    mean = report.Mean.of(evidence.differences("far", "nll"))
    assert mean.value == pytest.approx(0.3) and mean.half == pytest.approx(0, abs=1e-12)
    # Student's quantile for three values is 4.303: 4.303 x 0.1 / sqrt(3).
    assert report.Mean.of(evidence.scores(STOCK, "nll")).half == pytest.approx(4.303 * 0.1 / math.sqrt(3))


@pytest.mark.slow
def test_a_run_is_recorded(tmp_path: Path) -> None:
    """Stock and ours on a tiny model: the same curve and held-out loss, and one file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks import evidence
    from examples.align_data import train_tokenizer

    torch.manual_seed(0)
    tokenizer = train_tokenizer(["Which word has the most letters?"], 300)
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes, tie_word_embeddings=True)).save_pretrained(tmp_path / "model")
    bench = evidence.Bench(str(tmp_path / "model"), small=True)
    rows = [bench.run(evidence.Job("sft", name, 0, False)) for name in (STOCK, OURS)]
    stock, ours = rows
    for name in ("loss", "entropy"):
        assert ours["curves"][name] == pytest.approx(stock["curves"][name], rel=1e-4)
    assert ours["scores"]["nll"]["value"] == pytest.approx(stock["scores"]["nll"]["value"], rel=1e-5)
    assert stock["scores"]["nll"]["value"] < bench.untrained("sft")["nll"].value
    lines = [{"environment": bench.environment}, *rows, {"method": "sft", "untrained": {}}]
    (tmp_path / "process-0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (path,) = evidence.collect([tmp_path], tmp_path)
    read = report.load(path)
    assert read.contenders == [STOCK, OURS] and read.seeds == [0]
    assert read.curve(OURS, "loss")[0] == pytest.approx(ours["curves"]["loss"], rel=1e-5)
