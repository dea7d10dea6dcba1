"""An extension of griffe for the reference pages: signatures of stubs, and docstrings as Markdown.

Griffe reads code without running it. Of `def dpo_loss(*args, **kwargs)` it would show just that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))  # griffe imports this file by its path
from docs_markdown import docstring_markdown

# Their pages have examples already, and of some losses the tables too.
_EXAMPLES_ABOVE = ("liger_chunked.losses.", "liger_chunked.engine.")
_TABLES_ABOVE = tuple(f"liger_chunked.losses.{name}." for name in ("dpo", "cpo", "kto", "grpo"))


class ReferencePages(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **others: Any) -> None:
        if "functional" in pkg.members:
            take_signatures_of_stub(pkg["functional"])
        for documented in objects(pkg):
            if documented.docstring is not None:
                path = documented.path
                documented.docstring.value = docstring_markdown(
                    documented.docstring.value,
                    examples=not path.startswith(_EXAMPLES_ABOVE),
                    tables=not path.startswith(_TABLES_ABOVE),
                )


def objects(parent: Any) -> Iterator[Any]:
    """Yield an object and everything that is defined in it."""
    yield parent
    for member in parent.members.values():
        if not member.is_alias:
            yield from objects(member)


def take_signatures_of_stub(module: griffe.Module) -> None:
    path = Path(str(module.filepath)).with_suffix(".pyi")
    stub = griffe.visit(module.name, filepath=path, code=path.read_text(), parent=module.parent)
    for name, function in module.functions.items():
        written = (stub.overloads.get(name) or [stub.functions.get(name)])[-1]
        if written is not None:
            function.parameters, function.returns = written.parameters, written.returns
