"""Run code in a new Python process, or a worker in each of several ranks, with a limit of time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from liger_chunked.kernels.backend import INTERPRETED

ROOT = Path(__file__).parents[1]
SECONDS = 240  # below the limit of a test, so that the error has the output of the process


class FreshProcesses:
    """What the fixture `fresh_process` yields."""

    def run(self, code: str, *arguments: str) -> str:
        """Run `code` with `arguments` as `sys.argv[1:]`, and return what it prints. Raises if the code fails."""
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def spawn(self, worker: Callable[..., Any], nprocs: int, *arguments: str) -> None:
        """Run `worker(rank, *arguments)` in `nprocs` processes. Raises the first error of a rank, and ends all."""
        ranks = torch.multiprocessing.start_processes(
            work, (worker, arguments), nprocs, join=False, start_method="spawn"
        )
        end = time.monotonic() + SECONDS
        try:
            while not ranks.join(timeout=1):
                assert time.monotonic() < end, f"after {SECONDS} s, not all ranks of {worker.__name__} have ended"
        finally:
            for process in ranks.processes:
                process.kill()


def work(rank: int, worker: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    if INTERPRETED:
        import interpreted

        interpreted.mend()
    worker(rank, *arguments)
