"""Training runs of a real model: the kept ones agree with each other, and a tiny run is recorded."""

from __future__ import annotations

import pytest

pytest.importorskip("trl")
pytest.importorskip("matplotlib")

from benchmarks import evidence_report as report
from benchmarks.harness import STOCK


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
