"""The committed results: every file that a page names exists, tells where it is from, and is used."""

import json
import re

from benchmarks import convergence_kinds, figures, report
from benchmarks.harness import RESULTS

ROOT = RESULTS.parent.parent
NAMED = re.compile(
    r"(?<![\w/.*])(?:benchmarks/)?(?:results/)?((?:versions/)?[a-z_]+(?:-cpu)?-[0-9a-f]{7}(?:-dirty)?(?:-\d+)?\.json)"
)
TEXTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(p for folder in ("benchmarks", "liger_chunked", "scripts") for p in sorted((ROOT / folder).rglob("*.py"))),
]


def names_of_results() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in TEXTS:
        for name in NAMED.findall(path.read_text()):
            found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return found


def test_every_result_that_a_page_names_is_there() -> None:
    named = names_of_results()
    assert len(named) > 20, "the pattern finds the citations"
    absent = {name: pages for name, pages in named.items() if not (RESULTS / name).exists()}
    assert not absent


def test_names_tell_the_family_and_the_commit() -> None:
    for path in RESULTS.glob("*.json"):
        assert NAMED.fullmatch(path.name), path.name
        about = json.loads(path.read_text())["environment"]
        assert {"device", "device_type", "versions", "commit", "date", "saved"} <= about.keys(), path.name
        assert about["device"] and about["versions"]["torch"], path.name
        assert path.stem.split("-cpu")[-1].split("-")[1] == about["commit"][:7], path.name


def drawn() -> set[str]:
    """Return the names of the files that figures and tables are made of."""
    found = set()
    for family in (*report.FAMILIES, *figures.ALL_STEPS, "sweep", "base_kernels", "base_kernels_variants"):
        if run := report.newest(RESULTS, family):
            found |= {path.name for path in run.files}
    for family in ("convergence", convergence_kinds.STEM):
        if path := report.newest_file(RESULTS, family):
            found.add(path.name)
    return found


def test_every_result_is_used() -> None:
    """A file that no page names and no figure shows is not evidence of anything."""
    unused = {path.name for path in RESULTS.glob("*.json")} - names_of_results().keys() - drawn()
    assert not unused
