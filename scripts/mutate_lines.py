"""Which test runs which of some lines: a part of mutate.py, which Python imports in each process of the tests.

Needs Python 3.12, whose monitoring costs next to nothing. An older one records nothing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

# The file that names the lines, and the process of pytest, to whose test forks and other children belong.
ASKED, MAIN = "MUTATE_LINES", "MUTATE_MAIN"


class Watch:
    """Appends to a file which test runs which of the lines, in this process and in those that it starts.

    Every line of the result is `test<tab>file<tab>line`; line 0 stands for any code of the file. Lines that run while
    modules are imported belong to no test. Code that torch.compile reads instead of running it is not seen.
    """

    def __init__(self, root: Path, lines: dict[str, list[int]], out: Path) -> None:
        self.lines = {str(root / file): (file, frozenset(numbers)) for file, numbers in lines.items()}
        self.out = out
        self.test, self.written = "", set[tuple[str, int]]()
        # Forks share it. The system appends what each of them writes.
        self.stream = os.open(out / f"lines-{os.getpid()}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        events, tool = sys.monitoring.events, sys.monitoring.COVERAGE_ID
        sys.monitoring.use_tool_id(tool, "mutate")
        sys.monitoring.register_callback(tool, events.PY_START, self.on_start)
        sys.monitoring.register_callback(tool, events.LINE, self.on_line)
        sys.monitoring.set_events(tool, events.PY_START)
        os.register_at_fork(after_in_child=self.join)
        self.join()

    def join(self) -> None:
        """Take the test that the process of pytest runs now, in a process that a test starts."""
        if MAIN in os.environ:
            self.begin((self.out / f"test-{os.environ[MAIN]}").read_text())

    def start(self, test: str) -> None:
        """Start a test in the process of pytest."""
        os.environ[MAIN] = str(os.getpid())
        (self.out / f"test-{os.getpid()}").write_text(test)
        self.begin(test)

    def begin(self, test: str) -> None:
        self.test, self.written = test, set()
        sys.monitoring.restart_events()

    def on_start(self, code: CodeType, _offset: int) -> Any:
        watched = self.lines.get(code.co_filename)
        if watched is not None:
            self.write(watched[0], 0)
            if any(line in watched[1] for _, _, line in code.co_lines()):
                sys.monitoring.set_local_events(sys.monitoring.COVERAGE_ID, code, sys.monitoring.events.LINE)
        return sys.monitoring.DISABLE

    def on_line(self, code: CodeType, line: int) -> Any:
        file, numbers = self.lines[code.co_filename]
        if line in numbers:
            self.write(file, line)
        return sys.monitoring.DISABLE

    def write(self, file: str, line: int) -> None:
        if self.test and (file, line) not in self.written:
            self.written.add((file, line))
            os.write(self.stream, f"{self.test}\t{file}\t{line}\n".encode())


WATCH: Watch | None = None


def start() -> None:
    """Watch lines, if this run asks for it. Each process of the tests calls this before anything else."""
    global WATCH
    if ASKED in os.environ and WATCH is None and hasattr(sys, "monitoring"):
        asked = json.loads(Path(os.environ[ASKED]).read_text())
        WATCH = Watch(Path(asked["root"]), asked["lines"], Path(asked["out"]))
