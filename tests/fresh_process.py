"""Run code in processes that have imported torch and nothing else: forks of one process, because `import torch` takes
seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


class FreshProcesses:
    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, code: str, *arguments: str) -> str:
        """Run `code`, with `arguments` as `sys.argv[1:]`, and return what it printed. Raises if it fails."""
        print(json.dumps([code, arguments]), file=self._server.stdin, flush=True)
        status, printed = json.loads(self._server.stdout.readline())
        assert status == 0, printed
        return printed

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
