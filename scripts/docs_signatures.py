"""An extension of griffe, by which the documentation shows the functions of losses with the signatures of their stub.

Griffe reads code without running it, and takes only types from stubs: of `def dpo_loss(*args, **kwargs)` it would show
just that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe


class StubSignatures(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **others: Any) -> None:
        module = pkg.members.get("functional")
        if module is None:
            return
        path = Path(str(module.filepath)).with_suffix(".pyi")
        stub = griffe.visit(module.name, filepath=path, code=path.read_text(), parent=pkg)
        for name, function in module.functions.items():
            written = (stub.overloads.get(name) or [stub.functions.get(name)])[-1]
            if written is not None:
                function.parameters, function.returns = written.parameters, written.returns
