"""Write `liger_chunked/functional.pyi`: what type checkers and editors see of functions that are made of the losses.

    python -m scripts.functional_stub

tests/test_typing.py fails if the file is not what this writes.
"""

from __future__ import annotations

import inspect
import math
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from liger_chunked import functional
from liger_chunked.functional import signature_of

PATH = Path(functional.__file__).with_suffix(".pyi")
HEADER = '''"""Written by scripts/functional_stub.py."""

import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from liger_chunked.engine import linear_token_stats
from liger_chunked.kept_ids import KeptIds
from liger_chunked.losses.cross_entropy import WithMetrics
from liger_chunked.losses.dpo import LossOfPairs
from liger_chunked.losses.draft import DraftDivergenceName
from liger_chunked.losses.surrogates import Surrogate
from liger_chunked.teachers import TopK as TeacherTopK
from liger_chunked.types import (
    DistillationMetrics,
    DraftMetrics,
    LogitOptions,
    PolicyMetrics,
    PreferenceMetrics,
    ProcessGroup,
    UnpairedPreferenceMetrics,
    VocabShard,
    Weight,
)

'''


def signatures(cls: Any) -> Iterator[inspect.Signature]:
    """Yield one signature, or one for each result that settings choose: for each overload of the constructor."""
    plain = signature_of(cls, as_text=True)
    overloads = typing.get_overloads(cls.__init__)  # type: ignore[attr-defined]  # Python 3.11
    if not overloads:
        yield plain
    for overload in overloads:
        of_result, *settings = inspect.signature(overload).parameters.values()
        chosen = {p.name: p for p in settings if p.kind is p.KEYWORD_ONLY}
        returned = of_result.annotation.partition("[")[2].removesuffix("]")
        yield plain.replace(
            parameters=[chosen.get(name, p) for name, p in plain.parameters.items()], return_annotation=returned
        )


def definition(name: str, signature: inspect.Signature) -> str:
    lines, has_star = [], False
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not has_star:
            has_star = True
            lines.append("*")
        default = "" if p.default is p.empty else f" = {'math.inf' if p.default == math.inf else literal(p.default)}"
        lines.append(f"{p.name}: {p.annotation}{default}")
    listed = "".join(f"    {line},\n" for line in lines)
    return f"def {name}(\n{listed}) -> {signature.return_annotation}:"


def literal(x: Any) -> str:
    return f'"{x}"' if isinstance(x, str) else repr(x)


def stub() -> str:
    names = "".join(f'    "{name}",\n' for name in functional.__all__)
    text = f"{HEADER}__all__ = [\n{names}]\n\n"
    for name in functional.__all__:
        function = getattr(functional, name)
        if function is functional.linear_token_stats:
            continue
        doc = textwrap.indent(f'"""{inspect.getdoc(function)}\n"""', "    ")
        found = list(signatures(function.loss))
        for signature in found:
            overload = "@overload\n" if len(found) > 1 else ""
            text += f"{overload}{definition(name, signature)}\n{doc}\n\n"
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().split("\n"))


if __name__ == "__main__":
    PATH.write_text(stub())
