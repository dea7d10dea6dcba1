"""scripts/measure.py: which jobs run when, what a cut leaves, and what the end says is missing."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def measure() -> Any:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module("measure")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def sleeper(seconds: float) -> Callable[..., subprocess.Popen[bytes]]:
    """Return a start that notes what runs where; each job takes the time."""

    def start(job: Any, gpus: tuple[int, ...]) -> subprocess.Popen[bytes]:
        spans.append((job, gpus, time.monotonic()))
        return subprocess.Popen(["sleep", str(seconds)], start_new_session=True)

    spans: list[tuple[Any, tuple[int, ...], float]] = []
    start.spans = spans  # type: ignore[attr-defined]
    return start


@pytest.mark.slow
def test_rounds(measure: Any) -> None:
    """One GPU has one job at a time, a job of two GPUs has both, and a job of the host has the machine."""
    jobs = [
        measure.Job("host", 0.2, (), alone=True),
        measure.Job("both", 0.2, (), gpus=2),
        *(measure.Job(f"one {i}", 0.2, ()) for i in range(3)),
        measure.Job("four", 0.2, (), gpus=4),
    ]
    start = sleeper(0.2)
    outcomes = {o.job.family: o for o in measure.Machine([0, 1], start, 60).measure(jobs)}
    assert {family: o.reason for family, o in outcomes.items() if o.reason} == {"four": "needs 4 GPUs"}
    assert [job.family for job, *_ in start.spans] == ["one 0", "one 1", "one 2", "both", "host"]
    gpus = {job.family: on for job, on, _ in start.spans}
    assert gpus["both"] == (0, 1) and gpus["host"] == (0,)
    for (a, on_a, begin_a), (b, on_b, begin_b) in combinations(start.spans, 2):
        apart = abs(begin_a - begin_b) >= 0.2
        assert apart or not (set(on_a) & set(on_b) or a.alone or b.alone), (a, b)
    assert abs(start.spans[0][2] - start.spans[1][2]) < 0.15, "two GPUs work side by side"


def test_a_job_that_takes_too_long_is_cut_with_its_children(measure: Any, tmp_path: Path) -> None:
    def start(job: Any, gpus: tuple[int, ...]) -> subprocess.Popen[bytes]:
        child = f"(sleep 30; echo alive) > {tmp_path / 'child'} & wait"
        return subprocess.Popen(["bash", "-c", child], start_new_session=True)

    begin = time.monotonic()
    (outcome,) = measure.Machine([0], start, 60).measure([measure.Job("slow", 0.1, ())])
    assert outcome.reason.startswith("cut after") and time.monotonic() - begin < 5
    assert subprocess.run(["pgrep", "-f", str(tmp_path / "child")], capture_output=True, check=False).stdout == b""


def test_the_end_says_what_is_missing(
    measure: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"failure": None}, {"failure": "out of memory"}, {"failure": "out of memory"}]
    result = json.dumps({"family": "good", "rows": rows})
    write = f"import os, pathlib; pathlib.Path({str(tmp_path)!r}, 'good-0123456.json').write_text({result!r}); "
    seen = "print('on GPU', os.environ['CUDA_VISIBLE_DEVICES'], 'commit', os.environ['BENCH_COMMIT'])"
    monkeypatch.setattr(
        measure,
        "JOBS",
        (
            measure.Job("good", 20, ("-c", write + seen)),
            measure.Job("bad", 20, ("-c", "raise SystemExit('broken')")),
            measure.Job("silent", 20, ("-c", "pass")),
        ),
    )
    monkeypatch.setenv("BENCH_COMMIT", "0123456")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert measure.main(["--out", str(tmp_path), "--seconds", "100"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "good-0123456.json, 3 rows; 2 × out of memory" in lines[0]
    assert lines[1].endswith("EXIT CODE 1") and "broken" in (tmp_path / "logs" / "bad.txt").read_text()
    assert lines[-1] == "missing: bad, silent"
    assert (tmp_path / "logs" / "good.txt").read_text() == "on GPU 3 commit 0123456\n"
