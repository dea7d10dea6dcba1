"""Measure the benchmarks that README and docs show, on all GPUs of a machine, within a given time.

    python scripts/measure.py --seconds 3600                  all of them
    python scripts/measure.py --only trainers preference      these families
    python scripts/measure.py --list                          what there is, and how long it takes

Each job is one benchmark in its own process. Jobs start in the order of the list, most important first, each as soon as
as many GPUs are free as it needs, unless it would not end in time. There are three rounds: jobs on one GPU, jobs on
several, and jobs that measure the host, with nothing beside them. A later round keeps time for those of its jobs that
fit after all more important ones.

Every benchmark writes its rows as they come, into `<family>-<commit>.json` in the folder `--out`, with card, driver,
versions and commit. Its output is in `logs/<family>.txt` there. The end says which families are whole, which were cut,
and which did not start. A family that was cut leaves a file that is not whole: no figure is drawn from it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Job:
    """A benchmark.

    - `family`: of its result file
    - `seconds`: what it takes on an H100 with empty caches, imports included; it is cut after twice as long
    - `command`: arguments of `python`
    - `gpus`: how many it needs
    - `alone`: the host is what it measures, so nothing runs beside it
    """

    family: str
    seconds: float
    command: tuple[str, ...]
    gpus: int = 1
    alone: bool = False

    @property
    def round(self) -> int:
        return 2 if self.alone else 1 if self.gpus > 1 else 0


def job(family: str, seconds: float, *arguments: str, module: str = "", gpus: int = 1, alone: bool = False) -> Job:
    return Job(family, seconds, ("-m", f"benchmarks.{module or family}", *arguments), gpus, alone)


# Peers may take as long as they take: without them a run is not whole, and the job's own time bounds them.
ALL_PEERS = ("--peer-seconds", "3600")
# A step of a trainer takes 0.1 to 0.8 s: two more would cost 40 s, and change a median by less than two runs differ.
THRICE = ("--repeats", "3")
JOBS = (
    # README and home page.
    job("trainers", 300, *ALL_PEERS, *THRICE),
    job("preference", 185, *ALL_PEERS),
    job("trainers_shared", 110, *ALL_PEERS, *THRICE, "--share", module="trainers"),
    # The tables of docs/benchmarks.md, from the top.
    job("cross_entropy", 215, *ALL_PEERS),
    job("distillation", 125, *ALL_PEERS),
    job("policy", 90, *ALL_PEERS),
    job("token_stats", 165, *ALL_PEERS),
    job("base_kernels", 130, *ALL_PEERS),
    job("sweep", 130, *ALL_PEERS),
    job("lora_head", 40, *ALL_PEERS),
    job("base_kernels_variants", 85, *ALL_PEERS, "--variants", module="base_kernels"),
    job("experts", 265, *ALL_PEERS),
    job("sft", 180, *ALL_PEERS),
    job("sft_families", 460, *ALL_PEERS, "--families", module="sft"),
    job("long_context", 650, *ALL_PEERS),
    # Other pages.
    job("grpo", 160, *ALL_PEERS),
    job("grpo_compiled", 55, *ALL_PEERS, "--compiled", "--no-old-policy", "--zero-advantage", "0",
        "qwen2.5-0.5b:2:2048:512", module="grpo"),
    job("kept_ids", 60),
    job("shared_prefix", 75, *ALL_PEERS),
    job("vocab_shard", 100, *ALL_PEERS),
    job("parts", 30),
    job("live_rows", 60),
    job("sft_compiled", 75, "--compile-layers", "llama-3.2-1b:8:2048", "qwen2.5-0.5b:16:4096", module="sft"),
    job("trainers_offloading", 65, "--offload-activations", "--no-checkpointing", "DPO:llama-3.2-1b:4:2048",
        "GRPO:llama-3.2-1b:4:2048", module="trainers"),
    # Several GPUs.
    job("distributed", 300, *ALL_PEERS, "--ranks", "2", gpus=2),
    # The host.
    job("host_time", 150, alone=True),
)  # fmt: skip


@dataclass
class Run:
    """A job that has started."""

    job: Job
    gpus: tuple[int, ...]
    process: subprocess.Popen[bytes]
    start: float
    end: float  # when it is cut


@dataclass(frozen=True)
class Outcome:
    """What became of a job: `reason` is empty if it ended well."""

    job: Job
    seconds: float = 0.0
    reason: str = ""


class Machine:
    """The GPUs of a machine, and what runs on them.

    Args:
        gpus: their indices.
        start: starts a job on some of them.
        seconds: for everything.
    """

    def __init__(self, gpus: Sequence[int], start: Callable[[Job, tuple[int, ...]], subprocess.Popen[bytes]],
                 seconds: float) -> None:  # fmt: skip
        self.all, self.free, self.start = tuple(gpus), list(gpus), start
        self.end = time.monotonic() + seconds
        self.running: list[Run] = []

    def measure(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Run the jobs, round after round; yield each outcome as it is known."""
        fitting = self.fitting(jobs)
        rounds = [[job for job in jobs if job.round == number] for number in range(3)]
        try:
            for number, waiting in enumerate(rounds):
                later = [[job for job in of_round if job in fitting] for of_round in rounds[number + 1 :]]
                yield from self.one_round(waiting, self.end - sum(map(self.time_of, later)))
        finally:
            for run in self.running:
                stop(run.process)

    def fitting(self, jobs: Sequence[Job]) -> set[Job]:
        """Return the jobs that there is time for, when the more important ones run."""
        found: set[Job] = set()
        left = self.end - time.monotonic()
        for job in jobs:
            if job.gpus <= len(self.all) and self.share(job) <= left:
                left -= self.share(job)
                found.add(job)
        return found

    def time_of(self, jobs: Sequence[Job]) -> float:
        """Return how long a round takes."""
        return max([sum(map(self.share, jobs)), *(job.seconds for job in jobs)])

    def share(self, job: Job) -> float:
        """Return the seconds of the whole machine that a job takes."""
        return job.seconds * self.needed(job) / len(self.all)

    def needed(self, job: Job) -> int:
        return len(self.all) if job.alone else job.gpus

    def one_round(self, waiting: list[Job], end: float) -> Iterator[Outcome]:
        waiting = list(waiting)
        for job in [job for job in waiting if job.gpus > len(self.all)]:
            waiting.remove(job)
            yield Outcome(job, reason=f"needs {job.gpus} GPUs")
        while waiting or self.running:
            now = time.monotonic()
            for job in list(waiting):
                if now + job.seconds > end:
                    waiting.remove(job)
                    yield Outcome(job, reason="did not start: the time was over")
                elif self.needed(job) <= len(self.free):
                    waiting.remove(job)
                    self.begin(job, end)
            for run in list(self.running):
                if run.process.poll() is not None or time.monotonic() > run.end:
                    yield self.ended(run)
            time.sleep(0.05)

    def begin(self, job: Job, end: float) -> None:
        taken = tuple(self.free[: self.needed(job)])
        self.free = self.free[len(taken) :]
        now = time.monotonic()
        self.running.append(Run(job, taken, self.start(job, taken[: job.gpus]), now, min(end, now + 2 * job.seconds)))

    def ended(self, run: Run) -> Outcome:
        code = run.process.poll()
        if code is None:
            stop(run.process)
        self.running.remove(run)
        self.free = sorted([*self.free, *run.gpus])
        seconds = time.monotonic() - run.start
        reason = f"cut after {seconds:.0f} s" if code is None else f"exit code {code}" if code else ""
        return Outcome(run.job, seconds, reason)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a job with all processes that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(3)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def commit() -> str:
    """Return the commit of the tree; `BENCH_COMMIT` where git is not there to ask."""
    given = os.environ.get("BENCH_COMMIT", "")
    ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return given or subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as failure:
        raise SystemExit("git does not tell the commit: set BENCH_COMMIT") from failure


def starter(out: Path, machine_gpus: int, logs: ExitStack) -> Callable[[Job, tuple[int, ...]], subprocess.Popen[bytes]]:
    """Return a function that starts a job whose results go to `out`."""
    threads = str(max(1, min(8, (os.cpu_count() or 1) // max(1, machine_gpus))))
    shared = {
        "BENCH_COMMIT": commit(),
        "PYTHONUNBUFFERED": "1",
        # Jobs beside each other share the cores.
        "OMP_NUM_THREADS": threads,
        "TORCHINDUCTOR_COMPILE_THREADS": threads,
        # Models are built from their configs: nothing is fetched.
        "HF_HUB_OFFLINE": "1",
    }

    def start(job: Job, gpus: tuple[int, ...]) -> subprocess.Popen[bytes]:
        log: IO[bytes] = logs.enter_context(open(out / "logs" / f"{job.family}.txt", "wb"))
        return subprocess.Popen(
            [sys.executable, *job.command, "--out", str(out)],
            cwd=ROOT,
            env={**os.environ, **shared, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that a cut reaches its children
        )

    return start


def newest(out: Path, family: str, since: float) -> Path | None:
    """Return the file that a family has written since a time."""
    found = [path for path in out.glob(f"{family}-*.json") if path.stat().st_mtime >= since]
    found = [path for path in found if json.loads(path.read_text())["family"] == family]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def summary(outcome: Outcome, path: Path | None) -> str:
    """Return a line about a job: its time, its file, its rows, and why some of them have no measurement."""
    parts = [f"{outcome.job.family:22s} {outcome.seconds:5.0f} s"]
    if path is not None:
        rows = json.loads(path.read_text())["rows"]
        parts.append(f"{path.name}, {len(rows)} rows")
        for reason, times in Counter(row["failure"] for row in rows if row.get("failure")).items():
            parts.append(f"{times} × {reason[:90]}")
    if outcome.reason:
        parts.append(outcome.reason.upper())
    return "; ".join(parts)


def selected(only: Sequence[str]) -> list[Job]:
    """Return the jobs of the families, in the order of the list; all if none is given."""
    unknown = set(only) - {job.family for job in JOBS}
    if unknown:
        raise SystemExit(f"no family is called {', '.join(sorted(unknown))}: {', '.join(job.family for job in JOBS)}")
    return [job for job in JOBS if job.family in only or not only]


def visible_gpus() -> list[int]:
    """Return the indices of the GPUs; one index where there is none: small shapes run on the CPU then."""
    if given := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return [int(index) for index in given.split(",")]
    try:
        ask = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        found = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        found = []
    return [int(index) for index in found] or [0]


def main(arguments: Sequence[str] | None = None) -> int:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--only", nargs="+", default=[], metavar="FAMILY", help="these families; default: all")
    parse.add_argument("--seconds", type=float, default=7200, help="after which everything ends (%(default)g)")
    parse.add_argument("--out", type=Path, default=ROOT / "build" / "measured", help="folder of results and logs")
    parse.add_argument("--list", action="store_true", help="list the families, and stop")
    args = parse.parse_args(arguments)
    jobs = selected(args.only)
    if args.list:
        for job in jobs:
            where = "alone on the machine" if job.alone else f"{job.gpus} GPU{'s' * (job.gpus > 1)}"
            print(f"{job.family:22s} {job.seconds:5.0f} s, {where}: python {' '.join(job.command)}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the jobs end too
    out = args.out.resolve()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    gpus, begin, missing = visible_gpus(), time.time(), []
    with ExitStack() as logs:
        machine = Machine(gpus, starter(out, len(gpus), logs), args.seconds)
        for outcome in machine.measure(jobs):
            path = newest(out, outcome.job.family, begin)
            print(f"{time.time() - begin:5.0f} s  {summary(outcome, path)}", flush=True)
            # A job may be cut after its last row.
            if path is None or (outcome.reason and not json.loads(path.read_text()).get("whole")):
                missing.append(outcome.job.family)
    order = [job.family for job in JOBS]
    print(f"missing: {', '.join(sorted(missing, key=order.index)) or 'nothing'}")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
