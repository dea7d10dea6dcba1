"""What every benchmark shares: a clock, a scale for memory, the GEMM floor, float64 error, and a table kept as JSON.

A row is one contender at one task, forward and backward:

    ms        median of CUDA-event times after warm-up
    x floor   ms over the time that the task's matrix products alone take, through cuBLAS, one after the other for a
              while, counted on tokens that have a target
    MiB       most memory above the inputs, gradients included
    err       norm of the difference to float64 over the norm of float64, of each gradient

Ratios count within one run; absolute times drift with the card's clocks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESULTS = Path(__file__).parent / "results"


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    parse = argparse.ArgumentParser(description=description)
    parse.add_argument("--only", default="", help="run contenders whose name contains this")
    parse.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parse.add_argument("--no-errors", action="store_true", help="skip the float64 comparison")
    return parse


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def median_ms(run: Callable[[], object], repeats: int = 9, warmup: int = 3) -> float:
    """Median time of `run` in milliseconds, by CUDA events where there is a GPU."""
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


def graphed(run: Callable[[], object]) -> Callable[[], object]:
    """`run` as a CUDA graph, so that its kernels are timed without their launches; as it is where there is no GPU."""
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


def peak_mib(run: Callable[[], object], leaves: Sequence[Tensor]) -> float:
    """Most memory that `run` takes above what is there before it, gradients of `leaves` included. 0 on a CPU."""
    for leaf in leaves:
        leaf.grad = None
    gc.collect()
    if DEVICE == "cpu":
        run()
        return 0.0
    torch.cuda.empty_cache()
    synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


@dataclass(frozen=True)
class Floor:
    """Milliseconds of the three products of a head on N tokens: logits, dX and dW."""

    logits: float
    dx: float
    dw: float

    @property
    def all(self) -> float:
        return self.logits + self.dx + self.dw


def gemm_floor(n: int, h: int, v: int, dtype: torch.dtype) -> Floor:
    """Time the products together, as they follow one another in a loss: alone they would run at higher clocks."""
    rows = min(n, 8192)
    x = torch.randn(rows, h, device=DEVICE, dtype=dtype)
    w = torch.randn(v, h, device=DEVICE, dtype=dtype)
    z = torch.randn(rows, v, device=DEVICE, dtype=dtype)
    out, dx, dw = torch.empty_like(z), torch.empty_like(x), torch.empty_like(w)
    products = (
        lambda: torch.mm(x, w.t(), out=out),
        lambda: torch.mm(z, w, out=dx),
        lambda: torch.mm(z.t(), x, out=dw),
    )
    alone = [median_ms(product) for product in products]
    together = median_ms(lambda: [product() for product in products], 15, 8)
    return Floor(*(part / sum(alone) * together * n / rows for part in alone))


def copy_tb_per_s(n_bytes: int = 1 << 32) -> float:
    """Device-to-device copy, bytes read plus bytes written."""
    if DEVICE == "cpu":
        n_bytes = 1 << 26
    source = torch.empty(n_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * n_bytes / median_ms(lambda: target.copy_(source)) / 1e9


def environment() -> dict[str, object]:
    """Hardware and versions, as far as they can be told."""

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    commit = os.environ.get("BENCH_COMMIT", "")
    if not commit:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = asked.stdout.strip()
    packages = ("torch", "triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy", "quack-kernels")
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or platform.machine(),
        "copy_tb_per_s": round(copy_tb_per_s(), 3),
        "versions": {name: found for name in packages if (found := installed(name))},
        "python": platform.python_version(),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


@dataclass
class Row:
    """One contender's measurements at one task; `failure` says why there are none."""

    task: str
    name: str
    ms: float | None = None
    times_floor: float | None = None
    mib: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    failure: str | None = None

    def __str__(self) -> str:
        if self.failure:
            return f"  {self.name:42s} {self.failure}"
        errors = "  ".join(f"{name} {value:.2e}" for name, value in self.errors.items())
        return f"  {self.name:42s} {self.ms:9.3f} ms  x{self.times_floor:.3f}  {self.mib:8.0f} MiB  {errors}"


class Table:
    """The rows of one benchmark, printed as they come and written as JSON at the end."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.only, self.out, self.with_errors = name, args.only, args.out, not args.no_errors
        self.environment = environment()
        self.floors: dict[str, dict[str, float]] = {}
        self.rows: list[Row] = []
        print(json.dumps(self.environment, indent=1), flush=True)

    def task(self, name: str, floor_ms: float, **parts: float) -> None:
        """Start a task; the rows that follow are measured against `floor_ms`."""
        self._task, self._floor = name, floor_ms
        self.floors[name] = {"ms": floor_ms, **parts}
        print(f"\n{name}: floor {floor_ms:.3f} ms", flush=True)

    def measure(
        self,
        name: str,
        loss: Callable[[], Tensor],
        leaves: dict[str, Tensor],
        expected: dict[str, Tensor] | None = None,
        repeats: int = 9,
        graph: bool = False,
    ) -> None:
        """Time `loss().backward()`, as a CUDA graph if asked, and compare the gradients of `leaves` with `expected`."""
        if self.only and self.only not in name:
            return
        row = Row(self._task, name)

        def run() -> None:
            for leaf in leaves.values():
                leaf.grad = None
            loss().backward()

        try:
            run()
            synchronize()
            if expected is not None and self.with_errors:
                row.errors = {key: error(leaf.grad, expected[key]) for key, leaf in leaves.items()}
            row.mib = round(peak_mib(run, list(leaves.values())), 1)
            row.ms = round(median_ms(graphed(run) if graph else run, repeats), 4)
            row.times_floor = round(row.ms / self._floor, 4)
        except Exception as failure:
            row.failure = f"{type(failure).__name__}: {str(failure).splitlines()[0][:160] if str(failure) else ''}"
        for leaf in leaves.values():
            leaf.grad = None
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        self.rows.append(row)
        print(row, flush=True)

    def save(self) -> None:
        """Write `<out>/<name>-<device>.json`."""
        self.out.mkdir(parents=True, exist_ok=True)
        device = str(self.environment["device"]).lower().replace(" ", "-")
        path = self.out / f"{self.name}-{device}.json"
        content = {"environment": self.environment, "floors": self.floors, "rows": [asdict(row) for row in self.rows]}
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"\nwrote {path}")


def error(value: Tensor | None, expected: Tensor) -> float:
    """Norm of the difference over the norm of `expected`, in slices so that no float64 copy of `value` is made."""
    assert value is not None
    value, expected = value.reshape(-1, value.shape[-1]), expected.reshape(-1, expected.shape[-1])
    squares = [(v.double() - e).square().sum() for v, e in zip(value.split(8192), expected.split(8192), strict=True)]
    return float(torch.stack(squares).sum().sqrt() / expected.norm())
