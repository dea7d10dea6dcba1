"""Run code in processes that have imported torch and nothing else, or workers in processes that have imported more.

All are forks of servers, because imports take seconds. The servers are forks of the first one, which imports torch.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import torch

ROOT = Path(__file__).parents[1]


SPAWN = """
import sys
from importlib import import_module
import torch
module, name, nprocs, *arguments = sys.argv[1:]
worker = getattr(import_module(module), name)

def work(rank, *arguments):
    # A fork replaces its thread pool in the first call of this. If that comes from autograd's threads, several at once,
    # one of them can find no pool, which ends the process.
    torch.set_num_threads(1)
    worker(rank, *arguments)

torch.multiprocessing.start_processes(work, arguments, int(nprocs), start_method="fork")
"""


# What sharded parameters import at their first use: more than a second of each rank of each test.
FOR_RANKS = ["torch._dynamo"]
if torch.distributed.is_available():
    FOR_RANKS += ["torch.distributed.fsdp", "torch.distributed.tensor.parallel"]


class FreshProcesses:
    def __init__(self) -> None:
        self._first: subprocess.Popen[str] | None = None

    def run(self, code: str, *arguments: str) -> str:
        """Run `code` with `arguments` as `sys.argv[1:]`, and return its output. Raises if the code fails."""
        return self._ask("", code, arguments)

    def run_after(self, module: str, code: str, *arguments: str) -> str:
        """Run `code` as `run` does, in a process that has imported `module` too. A server keeps it."""
        return self._ask(module, code, arguments, module)

    def spawn(self, worker: Callable[..., Any], nprocs: int, *arguments: str) -> None:
        """Run `worker(rank, *arguments)` in `nprocs` processes. The server keeps the modules of all workers."""
        module = worker.__module__
        self._ask("spawn", SPAWN, (module, worker.__name__, str(nprocs), *arguments), module)

    def _ask(self, server: str, code: str, arguments: tuple[str, ...], module: str = "") -> str:
        if self._first is None:
            # Modules of tests ask whether there is a GPU when they are imported. If CUDA answers, forks of the process
            # have no device. NVML answers without it.
            environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
            self._first = subprocess.Popen(
                [sys.executable, __file__],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        print(json.dumps([server, code, arguments, module]), file=self._first.stdin, flush=True)
        status, printed = json.loads(self._first.stdout.readline())
        assert status == 0, printed
        return printed

    def close(self) -> None:
        if self._first is not None:
            self._first.communicate()


def serve_first() -> None:
    """Answer requests on stdin: those of another server by a fork that becomes this server."""
    sys.path[0] = str(ROOT)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    others: dict[str, TextIO] = {}
    for line in sys.stdin:
        server = json.loads(line)[0]
        if not server:
            serve([line], answers)
            continue
        if server not in others:
            others[server] = forked_server(FOR_RANKS if server == "spawn" else ())
        print(line, end="", file=others[server], flush=True)
        print(others[server].readline(), end="", file=answers, flush=True)


def forked_server(modules: Iterable[str]) -> TextIO:
    """Fork a server that imports `modules`, and return our end of the connection. It ends when that is closed."""
    ours, its = socket.socketpair()
    if os.fork():
        its.close()
        return ours.makefile("rw")
    ours.close()
    torch.set_num_threads(1)  # a fork cannot use its parent's threads
    sys.path.insert(0, str(ROOT / "tests"))
    import_module("folders")
    import_module("spared")
    if os.environ.get("TRITON_INTERPRET") == "1":
        import_module("interpreted").mend()
    for module in modules:
        import_module(module)
    serve(its.makefile("r"), its.makefile("w"))
    os._exit(0)


def serve(requests: Iterable[str], answers: TextIO) -> None:
    for line in requests:
        _, code, arguments, module = json.loads(line)
        if module:
            with contextlib.suppress(BaseException):  # the fork imports it again, and reports the error
                import_module(module)
        gc.freeze()
        with tempfile.TemporaryFile("w+") as printed:
            child = os.fork()
            if child == 0:
                os.dup2(printed.fileno(), 1)
                os.dup2(printed.fileno(), 2)
                gc.enable()
                sys.argv[1:] = arguments
                exit_code = 1
                try:
                    exec(code, {"__name__": "__main__"})
                    exit_code = 0
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(exit_code)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            printed.seek(0)
            print(json.dumps([status, printed.read()]), file=answers, flush=True)


if __name__ == "__main__":
    gc.disable()
    serve_first()
