"""An extension of griffe for the reference pages: docstrings as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))  # griffe imports this file by its path
from docs_markdown import docstring_markdown

# Pages of some losses have their tables already.
_TABLES_ABOVE = tuple(f"liger_chunked.losses.{name}." for name in ("dpo", "cpo", "kto", "grpo"))


class ReferencePages(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **others: Any) -> None:
        for documented in objects(pkg):
            if documented.is_function:
                # Docstrings tell shapes, dtypes and units: `Tensor | None` in each line says less.
                for parameter in documented.parameters:
                    parameter.annotation = None
            if documented.docstring is not None:
                path = documented.path
                documented.docstring.value = docstring_markdown(
                    documented.docstring.value,
                    tables=not path.startswith(_TABLES_ABOVE),
                    of_all_calls=not (path.startswith("liger_chunked.losses.") and path.endswith(".forward")),
                )


def objects(parent: Any) -> Iterator[Any]:
    """Yield an object and everything that is defined in it."""
    yield parent
    for member in parent.members.values():
        if not member.is_alias:
            yield from objects(member)
