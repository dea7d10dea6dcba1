"""An extension of griffe for the reference pages: signatures of stubs, and docstrings as Markdown.

Griffe reads code without running it. Of `def dpo_loss(*args, **kwargs)` it would show just that. Trainers, which are
made on first use, are known to their stub alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))  # griffe imports this file by its path
from docs_markdown import docstring_markdown

TRAINERS = "integrations.trl"


class ReferencePages(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **others: Any) -> None:
        if "functional" in pkg.members:
            take_signatures_of_stub(pkg["functional"])
        if "integrations" in pkg.members:
            describe_trainers(pkg[TRAINERS])
        for documented in objects(pkg):
            if documented.docstring is not None:
                documented.docstring.value = docstring_markdown(documented.docstring.value)


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


def describe_trainers(package: griffe.Module) -> None:
    """Give a trainer the docstring of its mixin, with what its stub says of arguments."""
    mixins = {x.name: x for x in objects(package) if x.is_class and x.name.endswith("Mixin")}
    for name, trainer in package.classes.items():
        mixin = mixins.get(name.removeprefix("Liger").replace("Trainer", "Mixin"))
        if mixin is None or mixin.docstring is None or trainer.docstring is None:
            continue
        what_it_is, _, more = mixin.docstring.value.partition("\n\n")
        of_arguments = trainer.docstring.value.partition("\n\n")[2]
        # `more` comes last: a section such as "Args:" would take the text behind it.
        trainer.docstring.value = "\n\n".join(filter(None, [what_it_is, of_arguments, more]))
