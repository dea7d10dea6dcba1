"""Functions of the package have types. `typed_calls.py`, of `make lint`, compares them with mypy and pyright."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import liger_chunked


def test_only_device_functions_of_the_kernels_have_no_types() -> None:
    package = Path(liger_chunked.__file__).parent
    untyped = []
    for path in sorted((*(package / "kernels").rglob("*.py"), *(package / "layers").rglob("*.py"))):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            on_device = any(re.search(r"\b(jit|Kernel)\b", ast.unparse(x)) for x in function.decorator_list)
            if not on_device and (function.returns is None or any(map(lacks_type, function.args.args))):
                untyped.append(f"{path.name}:{function.lineno} {function.name}")
    assert not untyped


def lacks_type(arg: ast.arg) -> bool:
    return arg.annotation is None and arg.arg not in ("self", "cls")
