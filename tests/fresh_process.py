"""Run code in processes that have imported torch and nothing else: forks of one process, because `import torch` takes
seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


SPAWN = """
import sys
from importlib import import_module
import torch
sys.path.insert(0, "tests")
module, name, nprocs, *arguments = sys.argv[1:]
worker = getattr(import_module(module), name)
torch.multiprocessing.start_processes(worker, arguments, int(nprocs), start_method="fork")
"""


class FreshProcesses:
    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, code: str, *arguments: str) -> str:
        """Run `code` with `arguments` as `sys.argv[1:]`, and return its output. Raises if the code fails."""
        print(json.dumps([code, arguments]), file=self._server.stdin, flush=True)
        status, printed = json.loads(self._server.stdout.readline())
        assert status == 0, printed
        return printed

    def spawn(self, worker: Callable[..., Any], nprocs: int, *arguments: str) -> None:
        """Run `worker(rank, *arguments)` in `nprocs` processes, which share one import of its module."""
        self.run(SPAWN, worker.__module__, worker.__name__, str(nprocs), *arguments)

    def close(self) -> None:
        self._server.communicate()


def serve() -> None:
    import torch  # noqa: F401

    sys.path[0] = str(ROOT)
    for line in sys.stdin:
        code, arguments = json.loads(line)
        with tempfile.TemporaryFile("w+") as printed:
            child = os.fork()
            if child == 0:
                os.dup2(printed.fileno(), 1)
                os.dup2(printed.fileno(), 2)
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
            print(json.dumps([status, printed.read()]), flush=True)


if __name__ == "__main__":
    serve()
