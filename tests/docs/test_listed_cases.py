"""tests/hard_cases.md names tests that exist, and a few random cases of the soak test pass."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import soak

TESTS = Path(__file__).parents[1]
PAGE = (TESTS / "hard_cases.md").read_text()
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
CASES = 32  # the rows of interruptions have no number


def source(file: str) -> str:
    """Return the source of a file of tests, in whichever folder it is."""
    (path,) = TESTS.rglob(file)
    return path.read_text()


def functions(file: str) -> set[str]:
    return {node.name for node in ast.parse(source(file)).body if isinstance(node, ast.FunctionDef)}


def rows() -> list[str]:
    """Return the rows of the tables of cases, without their headers."""
    return [
        line
        for line in PAGE.partition("## What only")[0].splitlines()
        if line.startswith("|") and not re.match(r"\|( \|)? case \||\|-", line)
    ]


@pytest.mark.slow
def test_each_named_test_exists():
    named = NAMED.findall(PAGE)
    assert len(named) > 100
    assert [f"{file}::{name}" for file, name in named if name not in functions(file)] == []
    assert "test_" not in NAMED.sub("", PAGE.partition("## One process")[2].partition("## What only")[0])


def test_each_case_names_a_test():
    assert [row for row in rows() if not NAMED.search(row)] == []
    numbers = [int(row.split("|")[1]) for row in rows() if row.split("|")[1].strip().isdigit()]
    assert numbers == list(range(1, CASES + 1))


def test_what_needs_a_gpu_is_marked():
    """A test after **GPU** has the mark, or its file has."""
    for row in rows():
        for file, name in NAMED.findall(row.partition("**GPU**")[2]):
            code = source(file)
            marks = code.partition(f"\ndef {name}(")[0].rpartition("\n\n\n")[2]
            whole_file = re.search(r"^pytestmark = .*?^\]", code, re.MULTILINE | re.DOTALL)
            assert (
                "gpu" in marks
                or "device" in code.partition(f"def {name}(")[2][:80]
                or (whole_file and "mark.gpu" in whole_file[0])
            ), name


def test_a_short_soak(capsys):
    """These cases have 13 of the 15 losses. A budget of one logit of a large vocabulary would take seconds."""
    failed = soak.main(["--cases", "40", "--seed", "408"])
    out = capsys.readouterr().out
    assert not failed and "40 cases on cpu" in out, out


@pytest.mark.gpu
def test_a_short_soak_on_a_gpu(capsys):
    assert soak.main(["--cases", "200", "--seed", "7", "--device", "cuda"]) == 0, capsys.readouterr().out
