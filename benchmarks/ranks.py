"""One process for each rank. All ranks answer a request together, and a failure of one ends all.

A rank that raises an error has left the collectives of the others, which may wait for it. So after a failure the
processes are killed, and the next request starts new ones. A rank that does not answer costs at most the time limit.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import DEVICE, Skipped, is_out_of_memory

PATIENCE = 15.0  # seconds for the other ranks to answer, once one has failed
START = 240.0  # seconds to import, and to make a process group
COLLECTIVE = timedelta(seconds=90)  # timeout of the process group

Request = dict[str, Any]
Answer = dict[str, Any]


class RankFailure(Exception):
    """What a rank raised, or how its process ended."""


def serve(handle: Callable[[Request], Answer]) -> None:
    """Answer the requests on stdin, as one rank of the process group that `Ranks` describes in the environment."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed goes to the log
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, os.environ["RENDEZVOUS"], COLLECTIVE, rank=rank, world_size=world)
    for line in sys.stdin:
        try:
            answer = handle(json.loads(line))
        except Skipped as skipped:
            answer = {"skipped": str(skipped)}
        except Exception as failure:
            reason = f"{type(failure).__name__}: {str(failure).strip().split(chr(10))[0][:200]}"
            answer = {"failure": reason, "out_of_memory": is_out_of_memory(failure)}
        print(json.dumps(answer), file=answers, flush=True)
    dist.destroy_process_group()


class Ranks:
    """`world` processes of `python -m module --rank`, which call `serve`. They start with the first request."""

    def __init__(self, module: str, world: int) -> None:
        self.module, self.world = module, world
        self._processes: list[subprocess.Popen[str]] = []
        self._lines: queue.Queue[tuple[int, str]] = queue.Queue()
        self._folder = tempfile.TemporaryDirectory()
        self._starts = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    def ask(self, request: Request, seconds: float) -> list[Answer]:
        """Return each rank's answer.

        Raises:
            Skipped: a rank has skipped the request.
            torch.OutOfMemoryError: a rank has too little memory.
            RankFailure: a rank raised another error, died, or did not answer within `seconds`.
        """
        if not self._processes:
            self._start()
            self._answers({"what": "start"}, START)
        return self._answers(request, seconds)

    def _answers(self, request: Request, seconds: float) -> list[Answer]:
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it has died: its output has ended too
        found: dict[int, Answer] = {}
        end = time.monotonic() + seconds
        while len(found) < self.world:
            try:
                rank, line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            found[rank] = json.loads(line) if line else self._death(rank)
            if "failure" in found[rank]:
                end = min(end, time.monotonic() + PATIENCE)
        failed = {rank: answer for rank, answer in sorted(found.items()) if "failure" in answer}
        if len(found) == self.world and not failed:
            answers = [found[rank] for rank in range(self.world)]
            for answer in answers:
                if "skipped" in answer:
                    raise Skipped(answer["skipped"])
            return answers
        self.stop()
        if not failed:
            missing = sorted(set(range(self.world)) - found.keys())
            raise RankFailure(f"ranks {missing} did not answer within {seconds:.0f} s")
        if any(answer.get("out_of_memory") for answer in failed.values()):
            raise torch.OutOfMemoryError("of a rank")
        of_ranks: dict[str, list[int]] = {}
        for rank, answer in failed.items():
            of_ranks.setdefault(answer["failure"], []).append(rank)
        raise RankFailure("; ".join(f"ranks {ranks}: {reason}" for reason, ranks in of_ranks.items()))

    def _death(self, rank: int) -> Answer:
        code = self._processes[rank].wait()
        lines = self._log(rank).read_text(errors="replace").strip().splitlines()
        return {"failure": f"exit code {code}: {lines[-1][:200] if lines else 'no output'}"}

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name, f"log-{self._starts}-{rank}")

    def _start(self) -> None:
        self._starts += 1
        lines: queue.Queue[tuple[int, str]] = queue.Queue()
        self._lines = lines
        for rank in range(self.world):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world),
                "RENDEZVOUS": f"file://{self._folder.name}/rendezvous-{self._starts}",
            }
            with self._log(rank).open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", self.module, "--rank"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment,
                )
            self._processes.append(process)
            threading.Thread(target=_read, args=(rank, process, lines), daemon=True).start()

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self._processes = []


def _read(rank: int, process: subprocess.Popen[str], lines: queue.Queue[tuple[int, str]]) -> None:
    """Put the lines of a process on the queue, then an empty one."""
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            lines.put((rank, line))
    lines.put((rank, ""))


def agreed(value: float) -> float:
    """Return the largest of the ranks' values. A collective."""
    x = torch.tensor([value], dtype=torch.float64, device=DEVICE)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()
