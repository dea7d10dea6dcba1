from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160, soft_wrap=False)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """Print a title in one line, a table, and what its words mean, a line each."""
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    printer = console()
    printer.print(title, style="bold", soft_wrap=True, highlight=False, markup=False)
    printer.print(table)
    for note in notes:
        print(note)
