"""Shared by all benchmarks: timer, memory peak, GEMM floor, float64 error, and a table that is saved as JSON.

A row is one contender at one task. For the forward and backward of a loss or a kernel it has:

    ms        median of CUDA-event times after warm-up
    x floor   ms over the time of the task's matrix products alone, through cuBLAS, repeated back to back, counted on
              the tokens that have a target
    MiB       peak memory above the inputs, including gradients
    err       norm of the difference to float64 over the norm of float64, for each gradient

A task starts with eager code; the errors of the others are compared with its errors. `steps.py` defines the rows of
whole training steps. Compare ratios within one run only; absolute times drift with the card's clocks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import which
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
RESULTS = Path(__file__).parent / "results"
OURS = "liger_chunked"
OURS_SHARED = f"{OURS}, share_prefix=auto"
BASELINE = "eager"
STOCK = "stock"  # a model or a trainer as its own library builds it

Loss = Callable[..., Tensor]
# Each contender imports its library when it runs, so that a peer may be missing.
Contenders = Mapping[str, Callable[[], Loss]]


class Skipped(Exception):
    """The reason why a contender is not measured here."""


def check_triton() -> None:
    """Skip a contender whose Triton kernels cannot run here."""
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise Skipped("Triton kernels on a GPU alone")


def is_out_of_memory(failure: Exception) -> bool:
    """Return whether the device ran out of memory: torch, cuBLAS and Triton raise different errors."""
    return isinstance(failure, torch.OutOfMemoryError) or (
        isinstance(failure, RuntimeError) and ("out of memory" in str(failure) or "ALLOC_FAILED" in str(failure))
    )


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def median_ms(run: Callable[[], object], repeats: int = 9, warmup: int = 3) -> float:
    """Return the median time of `run` in milliseconds, by CUDA events on a GPU."""
    for _ in range(warmup):
        run()
    synchronize()
    times = []
    for _ in range(repeats):
        if DEVICE == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e3)
    return sorted(times)[len(times) // 2]


def kernels_of(run: Callable[[], object], repeats: int = 4) -> tuple[float, float]:
    """Return the milliseconds of a step's kernels, however long the host takes, and their number; 0 on a CPU."""
    if DEVICE == "cpu":
        return 0.0, 0.0
    run()
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        synchronize()
    kernels = [e.time_range for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.end - e.start for e in kernels) / repeats / 1e3, len(kernels) / repeats


def graphed(run: Callable[[], object]) -> Callable[[], object]:
    """Return `run` as a CUDA graph, to time its kernels without their launches; on a CPU, `run` unchanged."""
    if DEVICE == "cpu":
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


# Milliseconds of a short step's timed repeats, and of those before.
TIMED_MS, WARM_MS = 400, 100


def step_ms(run: Callable[[], object]) -> float:
    """Return the median time of a warm step: many repeats of a short step, three of one above 200 ms.

    A short step is repeated before it is timed, because the host is slow after other work. For the same reason the
    first estimate is measured twice.
    """
    estimate = median_ms(run, repeats=1, warmup=0)
    if estimate > 200:
        return median_ms(run, repeats=3, warmup=0)
    estimate = median_ms(run, repeats=5, warmup=0)
    repeats, warmup = min(201, max(9, int(TIMED_MS / estimate))), min(50, max(3, int(WARM_MS / estimate)))
    return median_ms(run, repeats, warmup)


def peak_mib(run: Callable[[], object], leaves: Sequence[Tensor]) -> float | None:
    """Return the peak memory of `run` above the start, including gradients of `leaves`; None on a CPU."""
    if DEVICE == "cpu":
        return None
    for leaf in leaves:
        leaf.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


@dataclass(frozen=True)
class Floor:
    """Milliseconds of a head's three matrix products on N tokens: logits, dX and dW."""

    logits: float
    dx: float
    dw: float

    @property
    def all(self) -> float:
        return self.logits + self.dx + self.dw


def gemm_floor(n: int, h: int, v: int) -> Floor:
    """Time the products together, in the order of a loss; each alone would run at higher clocks."""
    rows = min(n, 8192)
    x = torch.randn(rows, h, device=DEVICE, dtype=DTYPE)
    w = torch.randn(v, h, device=DEVICE, dtype=DTYPE)
    z = torch.randn(rows, v, device=DEVICE, dtype=DTYPE)
    out, dx, dw = torch.empty_like(z), torch.empty_like(x), torch.empty_like(w)
    products = (
        lambda: torch.mm(x, w.t(), out=out),
        lambda: torch.mm(z, w, out=dx),
        lambda: torch.mm(z.t(), x, out=dw),
    )
    alone = [median_ms(product) for product in products]
    together = median_ms(lambda: [product() for product in products], 15, 8)
    return Floor(*(part / sum(alone) * together * n / rows for part in alone))


def hidden_states(*shape: int) -> Tensor:
    """Return (..., H) standard normal values."""
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def head_weight(v: int, h: int) -> Tensor:
    """Return a (V, H) weight that gives logits of variance 1."""
    return (torch.randn(v, h, device=DEVICE) / h**0.5).to(DTYPE)


def compiled(loss: Loss) -> Callable[[], Loss]:
    def build() -> Loss:
        if DEVICE == "cpu":
            raise Skipped("torch.compile is only measured on a GPU")
        return torch.compile(loss, dynamic=False)

    return build


def copy_tb_per_s() -> float:
    n_bytes = 1 << (32 if DEVICE == "cuda" else 24)
    source = torch.empty(n_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * n_bytes / median_ms(lambda: target.copy_(source)) / 1e9


PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "trl",
    "liger-kernel",
    "cut-cross-entropy",
    "quack-kernels",
    "nvidia-cutlass-dsl",  # of Liger-Kernel's CuTe kernels, and of QuACK
)


def driver() -> str | None:
    """Return the version of NVIDIA's driver; None where `nvidia-smi` does not tell it."""
    if which("nvidia-smi") is None:
        return None
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(ask, capture_output=True, text=True, check=False, timeout=30)
    return found.stdout.split()[0] if found.returncode == 0 and found.stdout.split() else None


def environment(device: str = DEVICE) -> dict[str, object]:
    """Return hardware, driver, versions, commit and date where known.

    `BENCH_COMMIT` gives the commit if git is unavailable. "saved" orders the runs of a day. Runs of before 2026-11-28
    did not record it: theirs is the time of the commit that brought the file.
    """

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    commit = os.environ.get("BENCH_COMMIT", "")
    if not commit:
        git = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() if which("git") else ""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "device_type": device,
        "driver": driver() if device == "cuda" else None,
        "cores": os.cpu_count(),
        "versions": {name: found for name in PACKAGES if (found := installed(name))},
        "python": platform.python_version(),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@dataclass
class Row:
    """One contender at one task; `failure` says why it has no measurements, `seconds` is the total time it took.

    - `ms`: median time
    - `mib`: peak memory above the start; None on a CPU
    """

    task: str
    name: str
    ms: float | None = None
    mib: float | None = None
    failure: str | None = None
    seconds: float = 0.0

    def line(self, first: Row) -> str:
        return f"  {self.name:42s} " + (self.failure or self.measured(first))

    def measured(self, first: Any) -> str:
        raise NotImplementedError


@dataclass
class LossRow(Row):
    """Forward and backward of a loss or a kernel, with its floor and the `errors` of its gradients."""

    times_floor: float | None = None
    errors: dict[str, float] = field(default_factory=dict)

    def measured(self, first: LossRow) -> str:
        baseline = first.errors if first.name == BASELINE else {}
        errors = "".join(
            f"  {name} {value:.2e}" + (f" ({value / baseline[name]:.2f} x eager)" if name in baseline else "")
            for name, value in self.errors.items()
        )
        memory = "" if self.mib is None else f"  {self.mib:8.0f} MiB"
        return f"{self.ms:9.3f} ms  x{self.times_floor:.3f}{memory}{errors}"


def parser(description: str, peer_seconds: float) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark; `peer_seconds` is the default of that option."""
    parse = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--only", default="", help=f"contenders whose name contains this; ours: {OURS} alone")
    parse.add_argument("--task", default="", help="tasks whose name contains this")
    parse.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parse.add_argument("--no-errors", action="store_true", help="skip the comparison with float64")
    parse.add_argument(
        "--peer-seconds",
        type=float,
        default=peer_seconds,
        help="after which peers are passed over (%(default)s); -1: none runs",
    )
    return parse


class Table:
    """The rows of one benchmark, printed and saved as JSON as they are measured."""

    def __init__(self, family: str, args: argparse.Namespace, whole: bool = True) -> None:
        """`whole`: the run has the default shapes. Filters and a peer timeout clear it; figures use whole runs."""
        self.family, self.args = family, args
        self.whole = whole and not (args.only or args.task)
        self.finished = False
        scale = {"dtype": str(DTYPE).removeprefix("torch."), "copy_tb_per_s": round(copy_tb_per_s(), 3)}
        self.environment = {**environment(), **scale}
        self.tasks: dict[str, dict[str, object]] = {}
        self.rows: list[Row] = []
        self.peer_seconds = 0.0
        self.path = new_file(args.out, family, self.environment)
        print(json.dumps(self.environment, indent=1), flush=True)
        if DEVICE == "cpu":
            print("no GPU: small shapes in float32, which say nothing about a GPU")

    def measure(
        self,
        task: str,
        floor_ms: float,
        shape: Mapping[str, float | str],
        contenders: Contenders,
        inputs: Sequence[Tensor],
        leaves: Mapping[str, Tensor],
        expected: Callable[[], Mapping[str, Tensor]] | None = None,
        graph: bool = False,
    ) -> None:
        """Time `loss(*inputs).backward()` of each contender, and compare the gradients of `leaves` with `expected()`.

        Args:
            task: name and shape.
            floor_ms: time of its matrix products alone, or of a copy of the bytes that it must move.
            shape: the shape as numbers, for the figures.
            contenders: in the order of running.
            inputs: arguments of every contender's loss.
            leaves: the inputs that get a gradient.
            expected: computes the gradients in float64; None to skip the errors.
            graph: time the step as a CUDA graph, without its launches.
        """
        if not self.wanted(task, contenders):
            return
        gradients = None if expected is None or self.args.no_errors else expected()

        def filled_by(build: Callable[[], Loss]) -> Callable[[LossRow], None]:
            return lambda row: fill_loss(row, build, floor_ms, inputs, leaves, gradients, graph)

        fills = {name: filled_by(build) for name, build in contenders.items()}
        self.compare(task, {"floor_ms": floor_ms, **shape}, fills, LossRow, f"floor {floor_ms:.2f} ms")

    def compare(
        self,
        task: str,
        facts: Mapping[str, float | str],
        fills: Mapping[str, Callable[[Any], None]],
        kind: type[Row],
        note: str = "",
    ) -> None:
        """Add a row for every selected contender.

        Args:
            task: name and shape.
            facts: facts about the task for the figures.
            fills: for each contender, in the order of running, a function that measures it and fills its row; an
                exception becomes the row's failure.
            kind: class of the rows.
            note: text to print.
        """
        wanted = self.wanted(task, fills)
        if not wanted:
            return
        self.tasks[task] = dict(facts)
        print(f"\n{task}{note and ': '}{note}", flush=True)
        first = None
        for name in wanted:
            row = kind(task, name)
            self._measure(row, fills[name])
            if first is None and row.failure is None:
                first = row
            self.rows.append(row)
            print(row.line(first or row), flush=True)
            self.save()

    def wanted(self, task: str, names: Iterable[str]) -> list[str]:
        only = self.args.only
        names = [name for name in names if (name.startswith(OURS) if only == "ours" else only in name)]
        return names if self.args.task in task else []

    def _measure(self, row: Row, fill: Callable[[Any], None]) -> None:
        is_peer = not row.name.startswith((OURS, BASELINE, STOCK))
        begin = time.perf_counter()
        try:
            if is_peer and self.peer_seconds > self.args.peer_seconds:
                self.whole &= self.args.peer_seconds < 0  # unless no peer was to be measured
                raise Skipped(f"the peers' {self.args.peer_seconds:g} seconds are over")
            fill(row)
        except Skipped as skipped:
            row.failure = f"skipped: {skipped}"
        except ModuleNotFoundError as missing:
            row.failure = f"skipped: {missing.name} is not installed"
        except Exception as failure:
            reason = f"failed: {type(failure).__name__}: {str(failure).strip().split(chr(10))[0][:160]}"
            row.failure = "out of memory" if is_out_of_memory(failure) else reason
        self._clean_up(row)
        seconds = time.perf_counter() - begin
        row.seconds = round(seconds, 2)
        if is_peer:
            self.peer_seconds += seconds  # not rounded: many short rows add up

    def _clean_up(self, row: Row) -> None:
        """Free memory, and reset torch.compile, which would otherwise treat the next shape as dynamic."""
        if DEVICE == "cpu":
            return
        try:
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
            synchronize()
        except RuntimeError as lost:
            self.rows.append(row)
            self.save()
            raise SystemExit(f"{row.name} at {row.task} left the device unusable: {row.failure or lost}") from lost

    def finish(self) -> Path:
        """Save the run as whole, if it is, and print where.

        Raises:
            SystemExit: there are no rows.
        """
        if not self.rows:
            raise SystemExit(f"nothing is called --task {self.args.task!r} --only {self.args.only!r}")
        self.finished = True
        self.save()
        print(f"\nwrote {self.path}")
        return self.path

    def save(self) -> None:
        """Write the rows so far. A run that is cut leaves a file that is not whole."""
        content = {
            "family": self.family,
            "whole": self.whole and self.finished,
            "environment": self.environment,
            "tasks": self.tasks,
            "rows": [asdict(row) for row in self.rows],
        }
        write_json(self.path, content)


def fill_loss(
    row: LossRow,
    build: Callable[[], Loss],
    floor_ms: float,
    inputs: Sequence[Tensor],
    leaves: Mapping[str, Tensor],
    expected: Mapping[str, Tensor] | None,
    graph: bool = False,
) -> None:
    """Measure `build()(*inputs).backward()`, see `Table.measure`."""

    def forget() -> None:
        for leaf in leaves.values():
            leaf.grad = None

    def run() -> None:
        forget()
        loss(*inputs).backward()

    try:
        loss = build()
        run()
        synchronize()
        if expected is not None:
            row.errors = {key: error(leaf.grad, expected[key]) for key, leaf in leaves.items()}
        row.mib = peak_mib(run, list(leaves.values()))
        row.ms = round(step_ms(graphed(run) if graph else run), 4)
        row.times_floor = round(row.ms / floor_ms, 4)
    finally:
        forget()


def new_file(folder: Path, family: str, about: Mapping[str, Any]) -> Path:
    """Return `<family>-<commit>.json`, with `cpu-` before the commit of a run without a GPU.

    A number follows if that file exists, so that no run overwrites another.

    Args:
        about: the run's `environment`.
    """
    commit, *dirty = str(about["commit"]).split("-")
    stem = "-".join([family, *(["cpu"] if about["device_type"] == "cpu" else []), commit[:7] or "unknown", *dirty])
    path, n = folder / f"{stem}.json", 1
    while path.exists():
        n += 1
        path = folder / f"{stem}-{n}.json"
    return path


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result in one step: a process that is killed meanwhile leaves the former file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(path)


class RowsFile:
    """Rows of a benchmark without a `Table`, written with the environment after each: a run that is cut keeps them.

    Use::

        kept = RowsFile(args.out, "kept_ids")
        kept.add({"shape": "8192:4096:151936", "step_ms": 1.9})
    """

    def __init__(self, folder: Path, family: str) -> None:
        self.content: dict[str, Any] = {"family": family, "environment": environment(), "rows": []}
        self.path = new_file(folder, family, self.content["environment"])

    def add(self, row: Mapping[str, Any]) -> None:
        self.content["rows"].append(dict(row))
        write_json(self.path, self.content)


def benchmark(
    family: str,
    description: str,
    sizes: str,
    on_gpu: Sequence[str],
    on_cpu: Sequence[str],
    measure: Callable[..., None],
    peer_seconds: float,
    arguments: Sequence[str] | None,
) -> Path:
    """Run the command line of a family: `measure(table, *sizes)` at each given shape, or at the default shapes.

    Args:
        sizes: names of the parts of a shape, separated by colons.
        on_gpu, on_cpu: the default shapes.
        peer_seconds: default limit on the time to compile and run all peers.
        arguments: None for those of the command line.
    """
    parse = parser(description, peer_seconds)
    parse.add_argument("shapes", nargs="*", help=f"{sizes}; default: {' '.join(on_gpu)}")
    args = parse.parse_args(arguments)
    table = Table(family, args, whole=not args.shapes)
    for shape in args.shapes or (on_gpu if DEVICE == "cuda" else on_cpu):
        torch.manual_seed(0)
        measure(table, *map(_parsed, shape.split(":")))
    return table.finish()


def _parsed(text: str) -> float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def error(value: Tensor | None, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of `expected`, in slices, without a float64 copy of `value`."""
    assert value is not None
    value, expected = value.reshape(-1, value.shape[-1]), expected.reshape(-1, expected.shape[-1])
    squares = [(v.double() - e).square().sum() for v, e in zip(value.split(8192), expected.split(8192), strict=True)]
    return float(torch.stack(squares).sum().sqrt() / expected.norm())
