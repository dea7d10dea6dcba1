"""Change the library in small ways, and see which changes a set of tests notices.

    python scripts/mutate.py --count 300 --jobs 16 --out suite.json -- --slow -m "not gpu"
    TRITON_INTERPRET=1 python scripts/mutate.py --alive suite.json --out kernels.json \
        -- --slow -m "triton and not gpu" tests
    python scripts/mutate.py --table suite.json kernels.json

or both suites at the same time, which share the mutants:

    python scripts/mutate.py --count 300 --jobs 8 --beside kernels.json --out suite.json -- --slow -m "not gpu" &
    TRITON_INTERPRET=1 python scripts/mutate.py --count 300 --jobs 8 --beside suite.json --out kernels.json \
        -- --slow -m "triton and not gpu" tests

A mutant is one change of one expression or statement: another comparison, `+` for `-`, a constant plus or minus one, a
dropped `not`, swapped operands, a removed statement, `min` for `max`, another dtype. The script draws `--count` of them
from the folders given by `--modules`; the same seed and sources give the same mutants. Both may be given several
times: the mutants of the first folders run first. What follows `--` goes to
pytest, which runs in copies of the tree, `--jobs` at a time. The tree itself stays as it is.

The result is a list of mutants, each with a file and line, a diff, and one of these states:

    killed      a test failed: `by` names it
    timeout     the tests took longer than several times as long as without a change
    alive       all tests passed that could notice it, or as many of them as fit into `--seconds`: `ran` of `able`

`--alive FILE` takes the mutants that are alive in earlier results, and that none of them killed, instead of drawing new
ones. So two suites are compared at the price of one: the second only runs what the first let live. `--beside FILE`
shares the work with a run at the same time: mutants that the other run has killed so far are left out. Another run with
the same `--out` goes on where this one stopped.

`--killed FILE` takes the mutants that earlier results killed instead: a smaller suite has to kill them again. The test
that killed a mutant there runs first, if it still exists.

A first run without a change measures how long each test takes, and which tests fail anyway: these do not count, nor do
test files that cannot be imported, for instance because a package is missing or warns of something. On
Python 3.12 it also notes which tests run the line of each mutant, in ranks and other child processes too. Only these
run on the mutant, one of each test function first, because the parameters of a function mostly notice the same mutants.
Where that is not known, tests that name the module come first.

`--table` counts the mutants of several results by folder. A mutant that any of them kills is killed. One that changes
nothing that a test could see is equivalent: whoever has read it adds `"equivalent": "why"` to it in the result.
Results are not committed, only the table.

Needs pytest, and pytest-xdist for `--jobs` above 1. As a pytest plugin, this file orders and reports tests.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mutate_lines

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("liger_chunked/engine", "liger_chunked/losses", "liger_chunked/kernels", "liger_chunked/layers")
# Hidden folders hold environments, caches and results. Tests read these.
HIDDEN_AND_COPIED = (".github", ".gitignore", ".pre-commit-config.yaml")

# The file whose tests come first: the values of every loss.
VALUES = "test_values"
# What runs before all other tests takes so many seconds, and comes from so many files: to collect all takes twenty.
FIRST_SECONDS, FIRST_FILES = 30, 6
# A mutant that computes forever, or waits for a rank that died, takes so many seconds to start, and this many times the
# unchanged tests.
STARTUP, PATIENCE = 90, 4


# Mutants


@dataclass(frozen=True)
class Mutant:
    """A replacement of characters `start` to `end` of a file by `text`."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    text: str

    @property
    def id(self) -> str:
        return f"{self.file}:{self.line}:{self.start}-{self.end}:{self.text}"

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def changes(self, source: str) -> bool:
        """Return whether the mutant is another program, rather than the same one or none."""
        try:
            return ast.dump(ast.parse(self.apply(source))) != ast.dump(ast.parse(source))
        except SyntaxError:
            return False

    def diff(self, source: str) -> str:
        lines = [text.splitlines(keepends=True) for text in (source, self.apply(source))]
        return "".join(difflib.unified_diff(*lines, self.file, self.file, n=0))


COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.LShift: ">>",
    ast.RShift: "<<",
}
# Operators whose operands mean different things. `|` is among them for dictionaries, where the right one wins.
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult, ast.LShift, ast.RShift, ast.BitOr)
SWAPPED_NAMES = {
    "min": "max",
    "amin": "amax",
    "argmin": "argmax",
    "minimum": "maximum",
    "any": "all",
    "zeros": "ones",
    "zeros_like": "ones_like",
    "new_zeros": "new_ones",
}
SWAPPED_NAMES |= {other: name for name, other in SWAPPED_NAMES.items()}
DTYPES = {
    "float64": "float32",
    "float32": "bfloat16",
    "bfloat16": "float32",
    "float16": "float32",
    "int64": "int32",
    "int32": "int64",
}
# Methods without arguments that a mutant may leave out.
DROPPED_METHODS = ("abs", "clone", "contiguous", "detach", "double", "exp", "float", "log", "neg", "t")
# Numbers that change a speed and no result. Every mutant of them would live.
OF_SPEED = ("num_warps", "num_stages", "maxnreg", "stacklevel")


class Finder:
    """Finds the mutants of a file: `Finder(file, source).mutants`."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.source = file, source
        self.mutants: list[Mutant] = []
        # Columns of `ast` count bytes.
        self.line_starts = [0]
        for line in source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.lines = source.splitlines(keepends=True)
        self.visit(ast.parse(source))

    def at(self, line: int, column: int) -> int:
        return self.line_starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: Any) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end]

    def add(self, kind: str, node: Any, span: tuple[int, int], text: str) -> None:
        self.mutants.append(Mutant(self.file, node.lineno, kind, *span, text))

    def between(self, left: ast.AST, right: ast.AST) -> tuple[int, int]:
        """Return where the operator between two operands stands, without parentheses, blanks and comments."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = re.sub(r"#[^\n]*", lambda comment: " " * len(comment[0]), self.source[start:end])
        found = re.search(r"[^\s()\\](?:[^()\\]*[^\s()\\])?", gap)
        assert found is not None
        return start + found.start(), start + found.end()

    def visit(self, node: ast.AST) -> None:
        method = getattr(self, f"of_{type(node).__name__}", None)
        if method is not None:
            method(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_params", "decorator_list", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not self.is_skipped(child):
                    self.visit(child)

    @staticmethod
    def is_skipped(node: ast.AST) -> bool:
        """Messages of errors, imports, docstrings and other strings, and what only type checkers read."""
        if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Assert):
            return True
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return True
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return True
        if isinstance(node, ast.Assign) and any(isinstance(x, ast.Name) and x.id == "__all__" for x in node.targets):
            return True
        return isinstance(node, ast.keyword) and node.arg in OF_SPEED

    def of_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            for text in COMPARISONS[type(operator)]:
                self.add("comparison", node, self.between(left, right), text)
            left = right

    def of_BoolOp(self, node: ast.BoolOp) -> None:
        text = "or" if isinstance(node.op, ast.And) else "and"
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.add("and/or", node, self.between(left, right), text)

    def of_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            return  # formats a string
        if type(node.op) in OPERATORS:
            self.add("operator", node, self.between(node.left, node.right), OPERATORS[type(node.op)])
        if isinstance(node.op, ORDERED):
            left, right = self.span(node.left), self.span(node.right)
            middle = self.source[left[1] : right[0]]
            if "(" not in middle and ")" not in middle:
                swapped = f"({self.text(node.right)}){middle}({self.text(node.left)})"
                self.add("operands", node, (left[0], right[1]), swapped)

    def of_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in OPERATORS:
            self.add("operator", node, self.between(node.target, node.value), OPERATORS[type(node.op)] + "=")
        self.add("statement", node, self.span(node), "pass")

    def of_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            kind = "not" if isinstance(node.op, ast.Not) else "sign"
            self.add(kind, node, self.span(node), f"({self.text(node.operand)})")

    def of_If(self, node: ast.If | ast.IfExp | ast.While) -> None:
        # A comparison has mutants of its own.
        if not isinstance(node.test, ast.Compare | ast.UnaryOp | ast.Constant):
            self.add("condition", node.test, self.span(node.test), f"(not ({self.text(node.test)}))")

    of_IfExp = of_If

    def of_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add("constant", node, self.span(node), str(not node.value))
        elif isinstance(node.value, int | float):
            for step in (1, -1):
                text = repr(node.value + step)
                self.add("constant", node, self.span(node), f"({text})" if text.startswith("-") else text)

    def of_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.add("statement", node, self.span(node), "pass")

    def of_Name(self, node: ast.Name) -> None:
        if node.id in ("min", "max", "any", "all"):
            self.add("min/max", node, self.span(node), SWAPPED_NAMES[node.id])

    def of_Attribute(self, node: ast.Attribute) -> None:
        start, end = self.span(node)[1] - len(node.attr), self.span(node)[1]
        if node.attr in SWAPPED_NAMES:
            self.add("min/max", node, (start, end), SWAPPED_NAMES[node.attr])
        if node.attr in DTYPES and isinstance(node.value, ast.Name) and node.value.id in ("torch", "tl"):
            self.add("dtype", node, (start, end), DTYPES[node.attr])

    def of_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in DROPPED_METHODS and not node.args:
            self.add("method", node, self.span(node), self.text(function.value))


def mutants_of(path: Path) -> list[Mutant]:
    """Return all mutants of a file, in the order of its lines."""
    found = Finder(path.relative_to(ROOT).as_posix(), path.read_text()).mutants
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.text))


def draw(modules: list[str], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants of these files and folders, at most one of a kind in each line."""
    sources = [[ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py") for name in modules]
    everything = [mutant for path in sorted({p for paths in sources for p in paths}) for mutant in mutants_of(path)]
    random.Random(seed).shuffle(everything)
    drawn: dict[tuple[str, int, str], Mutant] = {}
    for mutant in everything:
        place = (mutant.file, mutant.line, mutant.kind)
        if len(drawn) < count and place not in drawn and mutant.changes((ROOT / mutant.file).read_text()):
            drawn[place] = mutant
    return [*drawn.values()]


# The plugin

# The files that the plugin writes and reads.
REPORT, PLAN = "MUTATE_REPORT", "MUTATE_PLAN"


def plan_of_run() -> dict[str, Any]:
    return json.loads(Path(os.environ[PLAN]).read_text()) if PLAN in os.environ else {}


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep the tests of the plan, in its order. Without a plan, keep all but those that fail without a mutant."""
    plan = plan_of_run()
    if "tests" in plan:
        place = {nodeid: i for i, nodeid in enumerate(plan["tests"])}
        items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])


def pytest_runtest_logstart(nodeid: str) -> None:
    watch = getattr(sys.modules.get("mutate_lines"), "WATCH", None)
    if watch is not None:
        watch.start(nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    # With pytest-xdist, the main process has the reports of all workers.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ[REPORT], "a") as file:
            file.write(json.dumps([report.nodeid, report.when, report.outcome, report.duration]) + "\n")


def pytest_collectreport(report: Any) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ[REPORT], "a") as file:
            file.write(json.dumps([report.nodeid, "collect", "failed", 0.0]) + "\n")


def file_of(nodeid: str) -> str:
    return nodeid.split("::")[0]


# Runs


@dataclass
class Outcome:
    """Of one run of pytest: the tests that failed, seconds by test, and whether the run was cut off."""

    failed: list[str]
    seconds: dict[str, float]
    timed_out: bool
    status: int
    output: str

    @property
    def killer(self) -> str | None:
        if self.failed:
            return self.failed[0]
        # 5: no test was selected.
        return None if self.status in (0, 5) else f"pytest ended with status {self.status}"


def not_copied(_folder: str, names: list[str]) -> list[str]:
    hidden = [name for name in names if name.startswith(".") and name not in HIDDEN_AND_COPIED]
    return hidden + [name for name in names if name == "__pycache__" or name.endswith(".egg-info")]


class Copy:
    """A copy of the tree, in which one mutant at a time runs."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.temporary, self.start = folder / "tree", folder / "tmp", folder / "start"
        self.temporary.mkdir(parents=True)
        shutil.copytree(ROOT, self.tree, symlinks=True, ignore=not_copied)
        self.report, self.plan, self.lines = folder / "report", folder / "plan", folder / "lines"
        # Python imports this in every process, before the program.
        self.start.mkdir()
        (self.start / "sitecustomize.py").write_text("import mutate_lines\n\nmutate_lines.start()\n")

    def write(self, file: str, source: str) -> None:
        path = self.tree / file
        path.write_text(source)
        # Python compares times in seconds and sizes: another mutant of the same second would run the old bytecode.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def run(
        self,
        arguments: list[str],
        timeout: float | None,
        plan: dict[str, Any],
        watched: dict[str, list[int]] | None = None,
    ) -> Outcome:
        self.report.unlink(missing_ok=True)
        self.report.touch()
        self.plan.write_text(json.dumps(plan))
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        variables = {PLAN: str(self.plan), REPORT: str(self.report), "TMPDIR": str(self.temporary)}
        variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if watched is not None:
            shutil.rmtree(self.lines, ignore_errors=True)
            self.lines.mkdir()
            asked = self.plan.with_name("watched")
            asked.write_text(json.dumps({"root": str(self.tree), "lines": watched, "out": str(self.lines)}))
            variables[mutate_lines.ASKED] = str(asked)
            paths.insert(0, str(self.start))
        # The tree comes first: neither an installed package nor a tree of an outer PYTHONPATH may be tested instead.
        variables["PYTHONPATH"] = os.pathsep.join([str(self.tree), *filter(None, paths)])
        plugins = ["-p", "no:cacheprovider", "-p", "mutate"]
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", *plugins, *arguments]
        output = self.report.with_name("output")
        with output.open("w") as stream:
            process = subprocess.Popen(
                command,
                cwd=self.tree,
                env=os.environ | variables,
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                process.wait(timeout)
                timed_out = False
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                # Ranks and other processes of the tests outlive a pytest that was cut off.
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()
        for left in self.temporary.iterdir():
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
        seconds: dict[str, float] = defaultdict(float)
        failed = []
        for line in self.report.read_text().splitlines():
            nodeid, _when, result, duration = json.loads(line)
            seconds[nodeid] += duration
            if result == "failed" and nodeid not in failed:
                failed.append(nodeid)
        return Outcome(failed, dict(seconds), timed_out, process.returncode, output.read_text()[-4000:])

    def watched(self) -> dict[str, set[str]]:
        """Return the tests that ran each watched line, as `file:line`; `file:0` has those that ran any code of it."""
        found: dict[str, set[str]] = defaultdict(set)
        for path in self.lines.glob("lines-*"):
            for text in path.read_text().splitlines():
                test, file, line = text.split("\t")
                found[f"{file}:{line}"].add(test)
        return found


@dataclass
class Baseline:
    """What the tests do without a change: seconds and lines of each test that passes, the tests that fail, and whether
    the run was cut off.

    `lines` names tests by their place in `seconds`. It is empty where Python is older than 3.12.
    """

    seconds: dict[str, float]
    failing: list[str]
    cut_off: bool
    lines: dict[str, list[int]]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def tests_of(self, mutant: Mutant, source: str) -> tuple[list[str], list[str]]:
        """Return the tests that run the mutated line, and those that may depend on it in another way.

        These are the tests that run any code of the file, if the line runs where a module is imported, where a cache is
        filled, or where nothing can see it, as under torch.compile. An earlier test may have filled the cache.
        """
        tests = [*self.seconds]
        if not self.lines:
            module = re.compile(rf"\b{re.escape(Path(mutant.file).stem)}\b")
            naming = {
                file
                for file in files_of(tests)
                if Path(file).stem == VALUES or module.search((ROOT / file).read_text())
            }
            return [test for test in tests if file_of(test) in naming], [t for t in tests if file_of(t) not in naming]
        running = [tests[i] for i in self.lines.get(f"{mutant.file}:{mutant.line}", ())]
        decorators = decorators_around(source, mutant.line)
        if decorators is not None and not any("cache" in text for text in decorators):
            # Without Triton's interpreter, a kernel does not run on a CPU.
            if running or any("jit" in text for text in decorators):
                return running, []
        known = {*running}
        others = [tests[i] for i in self.lines.get(f"{mutant.file}:0", ()) if tests[i] not in known]
        # A line of an import is seen to run in processes of their own alone, which are slow. What it sets, all may use.
        return ([*others, *running], []) if decorators is None else (running, others)

    def spread(self, tests: list[str]) -> list[str]:
        """Order tests: one of each function first, then some more of each, and so on; within a round by files.

        The parameters of one test function mostly notice the same mutants.
        """
        ordinal: Counter[str] = Counter()
        rounds: dict[str, int] = {}
        for test in tests:
            function = test.split("[")[0]
            rounds[test] = 0 if ordinal[function] == 0 else ordinal[function].bit_length()
            ordinal[function] += 1
        cost: dict[str, float] = defaultdict(float)
        for test in tests:
            if not rounds[test]:
                cost[file_of(test)] += self.seconds[test]
        values = {file for file in cost if Path(file).stem == VALUES}
        return sorted(
            tests, key=lambda t: (rounds[t], file_of(t) not in values, cost[file_of(t)], file_of(t), self.seconds[t])
        )


def decorators_around(source: str, line: int) -> list[str] | None:
    """Return the decorators of the functions around a line. Return None outside of functions: it runs at an import."""
    inside = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line <= (node.end_lineno or line)
    ]
    return [ast.unparse(decorator) for node in inside for decorator in node.decorator_list] if inside else None


def measure_baseline(
    copy: Copy, arguments: list[str], jobs: int, mutants: list[Mutant], timeout: float | None
) -> Baseline:
    """Run all tests, several at a time with pytest-xdist, and note which of the mutants' lines each one runs.

    Where that takes longer than `timeout`, what did not run takes no part.
    """
    watched: dict[str, list[int]] = defaultdict(list)
    for mutant in mutants:
        watched[mutant.file].append(mutant.line)
    workers = ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else []
    # A file that cannot be imported would end the run, with the status of an interrupt.
    options = [*workers, "--continue-on-collection-errors", *arguments]
    outcome = copy.run(options, timeout, {}, watched if hasattr(sys, "monitoring") else None)
    seconds = {test: s for test, s in outcome.seconds.items() if test not in outcome.failed and "::" in test}
    if not seconds:
        sys.exit(f"pytest ended with status {outcome.status} without a mutant:\n{outcome.output}")
    # 1: some tests failed. With any other status but 0, the run ended before all tests had run.
    ended_early = outcome.timed_out or outcome.status not in (0, 1)
    if ended_early:
        print(f"pytest ended with status {outcome.status} without a mutant:\n{outcome.output}", flush=True)
    place = {test: i for i, test in enumerate(seconds)}
    lines = copy.watched() if hasattr(sys, "monitoring") else {}
    return Baseline(
        {test: round(s, 4) for test, s in seconds.items()},
        outcome.failed,
        ended_early,
        {line: sorted(place[test] for test in tests if test in place) for line, tests in lines.items()},
    )


def files_of(tests: list[str]) -> list[str]:
    return [*dict.fromkeys(map(file_of, tests))]


def options_of(copy: Copy, arguments: list[str]) -> list[str]:
    """Return the arguments without paths, which would bring other tests."""
    return [argument for argument in arguments if not (copy.tree / file_of(argument)).exists()]


def in_threads(work: Callable[[Copy], None], copies: list[Copy]) -> None:
    threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def judge(
    copy: Copy,
    mutant: Mutant,
    baseline: Baseline,
    arguments: list[str],
    seconds: float,
    end: float,
    killer: str | None = None,
) -> dict[str, Any] | None:
    """Return the mutant's state, what killed it, and how many tests ran of how many that could notice it.

    Return None where the run had to stop at the time `end`.

    Two runs of pytest: tests of few files first, because to collect a file takes seconds, then the others. A `killer`,
    the test that killed the mutant in another run, has a run of its own before them.
    """
    source = (ROOT / mutant.file).read_text()
    running, others = baseline.tests_of(mutant, source)
    chosen: list[str] = []
    left = seconds
    for test in [*baseline.spread(running), *baseline.spread(others)]:
        if left > 0:
            chosen.append(test)
            left -= baseline.seconds[test]
    tests_by_file = Counter(file_of(test) for test in running or others)
    ranked = sorted(tests_by_file, key=lambda file: (Path(file).stem != VALUES, -tests_by_file[file]))
    first_files = ranked[:FIRST_FILES]
    first: list[str] = []
    left = FIRST_SECONDS
    for test in chosen:
        if left > 0 and file_of(test) in first_files:
            first.append(test)
            left -= baseline.seconds[test]
    known = {*first}
    second = [test for test in chosen if test not in known]
    rounds = [first, second]
    if killer in baseline.seconds:
        rounds = [[killer], *([test for test in tests if test != killer] for tests in rounds)]

    started = time.monotonic()
    state, by, ran = "alive", None, 0
    copy.write(mutant.file, mutant.apply(source))
    try:
        for tests in filter(None, rounds):
            timeout = STARTUP + PATIENCE * sum(baseline.seconds[test] for test in tests)
            timeout = min(timeout, max(1.0, end - time.monotonic()))
            outcome = copy.run(["-x", *options_of(copy, arguments), *files_of(tests)], timeout, {"tests": tests})
            if outcome.timed_out and time.monotonic() >= end:
                return None
            ran += len(outcome.seconds)
            state, by = "timeout" if outcome.timed_out else "killed" if outcome.killer else "alive", outcome.killer
            if state != "alive":
                break
    finally:
        copy.write(mutant.file, source)
    return {
        "state": state,
        "by": by,
        "running": len(running),
        "able": len(running) + len(others),
        "ran": ran,
        "seconds": round(time.monotonic() - started, 1),
    }


def commit() -> str:
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(asked, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def run_all(mutants: list[Mutant], arguments: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the tests on each mutant, and write the result after each."""
    end = time.monotonic() + (options.stop_after or float("inf"))
    earlier = json.loads(options.out.read_text()) if options.out.exists() else {}
    done = {x["id"]: x for x in earlier.get("mutants", ()) if earlier.get("command") == arguments}
    waiting: queue.Queue[Mutant] = queue.Queue()
    for mutant in mutants:
        if mutant.id not in done:
            waiting.put(mutant)
    killers = killers_of(options.killed or [])
    lock = threading.Lock()

    def write(baseline: Baseline) -> None:
        listed = [done[mutant.id] for mutant in mutants if mutant.id in done]
        result = {
            "command": arguments,
            "commit": commit(),
            "tests": len(baseline.seconds),
            "seconds": round(baseline.total),
            "failing": baseline.failing,
            "cut_off": baseline.cut_off,
            "states": Counter(x["state"] for x in listed),
            "mutants": listed,
        }
        partial = options.out.with_suffix(".partial")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(options.out)

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Copy(Path(folder) / str(i)) for i in range(min(options.jobs, max(1, waiting.qsize())))]
        baseline = read_baseline(options, arguments, mutants) or measure_baseline(
            copies[0], arguments, options.jobs, mutants, options.stop_after and options.stop_after * 0.7
        )
        write_baseline(options, arguments, mutants, baseline)
        print(
            f"without a mutant: {len(baseline.seconds)} tests, {baseline.total:.0f} s, {len(baseline.failing)} fail"
            + (", cut off" if baseline.cut_off else ""),
            flush=True,
        )
        write(baseline)

        def work(copy: Copy) -> None:
            while time.monotonic() < end:
                try:
                    mutant = waiting.get_nowait()
                except queue.Empty:
                    return
                if mutant.id in noticed([options.beside] if options.beside and options.beside.exists() else []):
                    continue
                source = (ROOT / mutant.file).read_text()
                killer = killers.get(mutant.id)
                result = judge(copy, mutant, baseline, arguments, options.seconds, end, killer)
                if result is None:
                    return
                known = {"id": mutant.id, **asdict(mutant), "diff": mutant.diff(source)}
                with lock:
                    done[mutant.id] = known | result
                    print(f"{len(done)}/{len(mutants)} {result['state']} {mutant.file}:{mutant.line} {mutant.kind}"
                          f" {result['by'] or ''} {result['seconds']} s", flush=True)  # fmt: skip
                    write(baseline)

        in_threads(work, copies)
    return [done[mutant.id] for mutant in mutants if mutant.id in done]


def baseline_path(options: argparse.Namespace) -> Path:
    return options.out.with_suffix(".baseline.json")


def write_baseline(
    options: argparse.Namespace, arguments: list[str], mutants: list[Mutant], baseline: Baseline
) -> None:
    known = {"command": arguments, "mutants": [mutant.id for mutant in mutants], "baseline": asdict(baseline)}
    baseline_path(options).write_text(json.dumps(known, separators=(",", ":")) + "\n")


def read_baseline(options: argparse.Namespace, arguments: list[str], mutants: list[Mutant]) -> Baseline | None:
    """Return the baseline of an earlier run of the same command and mutants."""
    path = baseline_path(options)
    known = json.loads(path.read_text()) if path.exists() else {}
    if known.get("command") != arguments or known.get("mutants") != [mutant.id for mutant in mutants]:
        return None
    return Baseline(**known["baseline"])


def read(paths: list[Path]) -> list[dict[str, Any]]:
    """Return the mutants of these results, as often as they are in one."""
    return [mutant for path in paths for mutant in json.loads(path.read_text())["mutants"]]


def noticed(paths: list[Path]) -> set[str]:
    """Return the mutants that are not alive in one of these results."""
    return {mutant["id"] for mutant in read(paths) if mutant["state"] != "alive" or "equivalent" in mutant}


def as_mutant(result: dict[str, Any]) -> Mutant:
    return Mutant(**{name: result[name] for name in Mutant.__dataclass_fields__})


def read_alive(paths: list[Path]) -> list[Mutant]:
    """Return the mutants that are alive in each of these results that has them."""
    gone = noticed(paths)
    alive = {mutant["id"]: mutant for mutant in read(paths) if mutant["id"] not in gone}
    return [as_mutant(mutant) for mutant in alive.values()]


def read_killed(paths: list[Path]) -> list[Mutant]:
    """Return the mutants that one of these results killed, by a failure or by taking too long."""
    killed = {mutant["id"]: mutant for mutant in read(paths) if mutant["state"] in ("killed", "timeout")}
    return [as_mutant(mutant) for mutant in killed.values()]


def killers_of(paths: list[Path]) -> dict[str, str]:
    """Return the test that killed each mutant in these results."""
    return {mutant["id"]: mutant["by"] for mutant in read(paths) if mutant["state"] == "killed"}


# The best that any result says of a mutant.
RANKED = ("killed", "timeout", "equivalent", "alive")


def table(paths: list[Path]) -> str:
    """Return a table in Markdown: mutants of these results by folder and state."""
    states: dict[str, str] = {}
    for mutant in read(paths):
        state = "equivalent" if "equivalent" in mutant else mutant["state"]
        states[mutant["id"]] = min(state, states.get(mutant["id"], state), key=RANKED.index)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for id, state in states.items():
        counts[str(Path(id.split(":")[0]).parent)][state] += 1
    lines = ["| folder | mutants | killed | timeout | equivalent | alive |", "|---|---|---|---|---|---|"]
    for folder, count in sorted(counts.items()):
        lines.append(f"| `{folder}` | {count.total()} | " + " | ".join(str(count[state]) for state in RANKED) + " |")
    return "\n".join(lines)


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return what is before `--`, and pytest's arguments behind it."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def main() -> int:
    own, arguments = split_arguments(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, action="append", help="number of mutants, by default 300")
    parser.add_argument("--seed", type=int, default=0, help="draws other mutants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at the same time")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the result, in JSON")
    parser.add_argument("--modules", nargs="+", action="append", metavar="PATH", help="files or folders to mutate")
    parser.add_argument("--alive", type=Path, nargs="+", metavar="FILE", help="take what is alive in these results")
    parser.add_argument("--killed", type=Path, nargs="+", metavar="FILE", help="take what these results killed")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="leave out what this result has killed by then")
    parser.add_argument("--seconds", type=float, default=120, help="of tests for a mutant, as they take without it")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="stop then, as if interrupted")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print the counts of these results")
    options = parser.parse_args(own)
    if options.table:
        print(table(options.table))
        return 0
    modules, counts = options.modules or [[*FOLDERS]], options.count or [300]
    if len(modules) != len(counts):
        parser.error("as many --count as --modules")
    drawn = (draw(folders, count, options.seed) for folders, count in zip(modules, counts, strict=True))
    if options.alive or options.killed:
        mutants = read_alive(options.alive) if options.alive else read_killed(options.killed)
    else:
        mutants = [mutant for part in drawn for mutant in part]
    if options.list:
        for mutant in mutants:
            print(mutant.diff((ROOT / mutant.file).read_text()))
        return 0
    if options.out is None:
        parser.error("--out is missing")
    results = run_all(mutants, arguments, options)
    print(dict(Counter(result["state"] for result in results)))
    for result in results:
        if result["state"] == "alive":
            print(result["diff"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
