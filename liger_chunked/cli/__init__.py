"""Shell commands. They need the extra `cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. Errors that name an argument become a message and status 2."""
    try:
        from liger_chunked.cli.app import run
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich", "click"):
            raise
        print("liger-chunked needs: pip install 'liger_chunked[cli]'", file=sys.stderr)
        return 2
    return run(sys.argv[1:] if arguments is None else arguments)
