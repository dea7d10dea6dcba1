"""Run code in a new Python process, or a worker in each of several ranks, with a limit of time."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from liger_chunked.kernels.backend import INTERPRETED

ROOT = Path(__file__).parents[1]
SECONDS = 540  # below the limit of a test, so that the error has the output of the process


class FreshProcesses:
    """What the fixture `fresh_process` yields. Its ranks stay until the last test of the file."""

    def __init__(self) -> None:
        self._ranks: list[tuple[multiprocessing.Process, Connection]] = []

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
        """Run `worker(rank, *arguments)` in `nprocs` processes. Raises the first error of a rank, and then ends all."""
        while len(self._ranks) < nprocs:
            self._ranks.append(started(len(self._ranks), [connection for _, connection in self._ranks]))
        end = time.monotonic() + SECONDS
        waiting = {connection: process for process, connection in self._ranks[:nprocs]}
        try:
            for connection in waiting:
                connection.send((worker, arguments))
            while waiting:
                ready = wait(waiting, end - time.monotonic())
                assert ready, f"after {SECONDS} s, {len(waiting)} ranks still run {worker.__name__}"
                for connection in ready:
                    error = connection.recv()
                    assert not error, error
                    del waiting[connection]
        except EOFError:  # a rank has ended
            for process in [*waiting.values()]:
                process.join(end - time.monotonic())
            codes = [process.exitcode for process in waiting.values()]
            self.close()
            assert not any(codes), f"exit codes of ranks: {codes}"
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for process, _ in self._ranks:
            process.kill()
        self._ranks = []


def started(rank: int, others: list[Connection]) -> tuple[Any, Connection]:
    """Start a rank; `others` are the connections to those that run, which a fork must not keep open."""
    # A fork has the imports that take a new process five seconds. CUDA does not work in a fork.
    is_fork = sys.platform == "linux" and not torch.cuda.is_available()
    context = multiprocessing.get_context("fork" if is_fork else "spawn")
    ours, its = context.Pipe()
    process = context.Process(target=serve, args=(rank, its, [ours, *others] if is_fork else []), daemon=True)
    with warnings.catch_warnings():
        # Of Python 3.12, in a worker of pytest-xdist: its second thread only waits for messages.
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        process.start()
    its.close()
    return process, ours


def serve(rank: int, connection: Connection, others: list[Connection]) -> None:
    """Run workers, one after another, until the connection ends."""
    for other in others:
        other.close()
    # Before autograd's threads: in a fork, the first call of this replaces the thread pool.
    torch.set_num_threads(1)
    if INTERPRETED:
        import interpreted

        interpreted.mend()
    environment = {**os.environ}
    while True:
        try:
            worker, arguments = connection.recv()
        except EOFError:
            return
        watch = getattr(sys.modules.get("mutate_lines"), "WATCH", None)
        if watch is not None:  # scripts/mutate.py notes the lines of each test
            watch.join()
        if "accelerate" in sys.modules:
            sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
        try:
            worker(rank, *arguments)
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
