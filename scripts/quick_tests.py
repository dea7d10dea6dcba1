"""Choose the tests that `make test` runs in a few minutes, so that nearly every line of the library still runs.

    python scripts/quick_tests.py record --jobs 16 --out suite.json -- -m "not gpu"
    python scripts/quick_tests.py choose suite.json --seconds 300 --out tests/quick/suite.json \
        --keep tests/losses/test_values.py::test_float64_matches_oracle --leave-out \
        tests/docs/test_benchmarks.py::test_training_steps_on_two_ranks \
        tests/docs/test_convergence.py::test_three_steps_agree tests/docs/test_convergence.py::test_figure_and_table

    TRITON_INTERPRET=1 python scripts/quick_tests.py record --out kernels.json -- -m "triton and not gpu" tests
    python scripts/quick_tests.py choose kernels.json --seconds 130 --out tests/quick/interpreter.json

`record` runs the tests, and notes how long each takes. On Python 3.12 it also notes which lines of the library each one
runs, in ranks and other child processes too. `choose` keeps, in this order:

1. the tests named by `--keep`, and those that killed a mutant (tests/quick/killers.txt), if they take less than two
   seconds;
2. of each test function the fastest case, if it takes less than `--fastest-seconds`;
3. of the other cases of a function as many as fit into a time, at equal distances in their order;
4. tests that run lines which no kept test runs, the most lines a second first, down to two lines a second.

It leaves out the tests named by `--leave-out`: those that share a slow fixture look fast, because the record charges it
to the first of them. The time of a function is the longest with which all of them fit into `--seconds`. The result
names each test function that loses cases, and the cases that it keeps: `pytest --quick` reads it. A function that it
does not name runs whole, so that a new one needs no entry.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import mutate

ROOT = Path(__file__).resolve().parents[1]
FUNCTION_SECONDS = (8.0, 4.0, 2.0, 1.5, 1.0, 0.8, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0)
# A test that killed a mutant is kept if it is faster than this.
KILLER_SECONDS = 2.0
LINES_PER_SECOND = 2.0
# Of pytest and pytest-xdist, for each test.
OVERHEAD_SECONDS = 0.008

Lines = dict[str, int]  # for each test, a number with a bit for each line of the library that the test runs


def record(arguments: list[str], jobs: int, out: Path) -> None:
    """Run the tests once, and write their seconds and lines."""
    sources = sorted((ROOT / "liger_chunked").rglob("*.py"))
    every_line = {str(path.relative_to(ROOT)): [*range(1, len(path.read_text().splitlines()) + 1)] for path in sources}
    workers = ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else []
    watched = every_line if hasattr(sys, "monitoring") else None
    with tempfile.TemporaryDirectory(prefix="quick-tests-") as folder:
        copy = mutate.Copy(Path(folder) / "copy")
        outcome = copy.run([*workers, "--continue-on-collection-errors", *arguments], None, {}, watched)
        seconds = {test: round(s, 4) for test, s in outcome.seconds.items() if "::" in test}
        place = {test: i for i, test in enumerate(seconds)}
        lines = {
            line: sorted(place[test] for test in tests if test in place)
            for line, tests in (copy.watched() if watched else {}).items()
            if not line.endswith(":0")  # any code of the file
        }
    print(f"{len(seconds)} tests, {sum(seconds.values()):.0f} s, {len(lines)} lines, {len(outcome.failed)} failed")
    print(*(f"failed: {test}" for test in outcome.failed), sep="\n")
    result = {"command": arguments, "commit": mutate.commit(), "seconds": seconds, "lines": lines}
    out.write_text(json.dumps(result) + "\n")


def function_of(test: str) -> str:
    return test.split("[")[0]


def killers() -> set[str]:
    """Return the tests that killed a mutant, as `mutate.py --killers` prints them."""
    return set((ROOT / "tests" / "quick" / "killers.txt").read_text().splitlines())


def some_cases(tests: list[str], seconds: dict[str, float], allowed: float) -> list[str]:
    """Return the cases of one function that fit into `allowed` seconds, at equal distances in their order.

    Neighbouring cases mostly differ in the last parameter alone, so distant ones differ in more.
    """
    total = sum(seconds[test] for test in tests)
    if total <= allowed:
        return tests
    n = int(len(tests) * allowed / total)
    return [tests[i * len(tests) // n] for i in range(n)]


def kept_tests(
    seconds: dict[str, float], lines: Lines, always: set[str], fastest_seconds: float, function_seconds: float
) -> set[str]:
    """Return the tests that `choose` keeps with this time of a function. See the top of this file."""
    kept = {test for test in seconds if test in always}
    cases: dict[str, list[str]] = defaultdict(list)
    for test in seconds:
        cases[function_of(test)].append(test)
    for tests in cases.values():
        fastest = min(tests, key=seconds.__getitem__)
        if seconds[fastest] < fastest_seconds:
            kept.add(fastest)
        kept.update(some_cases([test for test in tests if seconds[test] < function_seconds], seconds, function_seconds))

    covered = 0
    for test in kept:
        covered |= lines.get(test, 0)
    others = [test for test in seconds if test not in kept]
    while others:

        def new_lines_per_second(test: str, covered: int = covered) -> float:
            return (lines.get(test, 0) & ~covered).bit_count() / max(seconds[test], 0.01)

        # All but a few of the tests run no line of their own, and never will.
        rates = {test: new_lines_per_second(test) for test in others}
        others = [test for test in others if rates[test] >= LINES_PER_SECOND]
        if others:
            best = max(others, key=lambda test: rates[test])
            kept.add(best)
            covered |= lines.get(best, 0)
    return kept


def choose(
    record: dict, keep: Iterable[str], leave_out: Iterable[str], total: float, fastest_seconds: float
) -> set[str]:
    """Return the tests that stay."""
    seconds: dict[str, float] = {test: s + OVERHEAD_SECONDS for test, s in record["seconds"].items()}
    tests = [*seconds]
    lines: Lines = Counter()
    for bit, running in enumerate(record["lines"].values()):
        for i in running:
            lines[tests[i]] |= 1 << bit
    for test in [test for test in tests if test.startswith(tuple(leave_out))]:
        del seconds[test]
    killed = killers()
    always = {test for test in seconds if any(test.startswith(name) for name in keep)}
    always |= {test for test in seconds if test in killed and seconds[test] < KILLER_SECONDS}
    for function_seconds in FUNCTION_SECONDS:
        kept = kept_tests(seconds, lines, always, fastest_seconds, function_seconds)
        taken = sum(seconds[test] for test in kept)
        whole = sum(seconds.values())
        print(f"{function_seconds} s a function: {len(kept)} of {len(seconds)} tests, {taken:.0f} of {whole:.0f} s")
        if taken <= total:
            break
    everything, covered = 0, 0
    for test in tests:
        everything |= lines.get(test, 0)
        covered |= lines.get(test, 0) if test in kept else 0
    print(f"lines that only tests left out run: {(everything & ~covered).bit_count()} of {everything.bit_count()}")
    functions, left = {function_of(test) for test in tests}, {function_of(test) for test in kept}
    print(f"functions of which no case is kept: {len(functions - left)} of {len(functions)}")
    return kept


def as_json(tests: Iterable[str], kept: set[str]) -> str:
    """Return the kept cases of each function that loses some: `["[a]", "[b]"]`, and `[]` for one that does not run."""
    cases: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        cases[function_of(test)].append(test)
    fewer = {
        function: [test[len(function) :] for test in tests if test in kept]
        for function, tests in sorted(cases.items())
        if not kept.issuperset(tests)
    }
    rows = (f"  {json.dumps(function)}: {json.dumps(ids)}" for function, ids in fewer.items())
    return "{\n" + ",\n".join(rows) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--jobs", type=int, default=os.cpu_count())
    recording.add_argument("--out", type=Path, required=True)
    recording.add_argument("arguments", nargs="*", help="of pytest")
    choosing = commands.add_parser("choose")
    choosing.add_argument("record", type=Path)
    choosing.add_argument("--seconds", type=float, required=True, help="of the tests that stay, on one core")
    choosing.add_argument("--fastest-seconds", type=float, default=1.0)
    choosing.add_argument("--keep", nargs="*", default=[], help="tests that stay: beginnings of their names")
    choosing.add_argument("--leave-out", nargs="*", default=[], help="tests that do not: beginnings of their names")
    choosing.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.command == "record":
        record(given.arguments, given.jobs, given.out)
    else:
        asked = json.loads(given.record.read_text())
        kept = choose(asked, given.keep, given.leave_out, given.seconds, given.fastest_seconds)
        given.out.parent.mkdir(exist_ok=True)
        given.out.write_text(as_json(asked["seconds"], kept))


if __name__ == "__main__":
    main()
