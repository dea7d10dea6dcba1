from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.table import Table

T = TypeVar("T")


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160, soft_wrap=False)


def counted(rows: Iterable[T], total: int, title: str, name: Callable[[T], str]) -> list[T]:
    """Return the rows, with a bar that says how many of `total` are done, and the `name` of the last one."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    done: list[T] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console(), transient=True) as progress:
        task = progress.add_task(title, total=total)
        for row in rows:
            done.append(row)
            progress.update(task, advance=1, description=f"{title}: {name(row)}")
    return done


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
