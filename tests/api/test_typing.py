"""The stub has the arguments that functions made at run time really take.

`make lint` checks the types themselves: `typed_calls.py` with mypy and pyright.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import liger_chunked
from liger_chunked.compat.chunked_loss import functional


def stub_of(module: ModuleType) -> ast.Module:
    assert module.__file__ is not None
    return ast.parse(Path(module.__file__).with_suffix(".pyi").read_text())


def test_the_stub_of_the_functions_by_position() -> None:
    nodes = stub_of(functional).body
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    classes = {node.name: ast.unparse(node.body[0]) for node in nodes if isinstance(node, ast.ClassDef)}
    assert set(functional.__all__) <= {*functions, *classes}
    for name in functional.__all__:
        real = getattr(functional, name)
        if not name.startswith("liger"):
            assert classes[name] == f"apply = staticmethod({function_name(real.apply)})"
            continue
        parameters = inspect.signature(real).parameters.values()
        args = functions[name].args
        assert [arg.arg for arg in args.args] == [p.name for p in parameters]
        assert [ast.literal_eval(default) for default in args.defaults] == [
            p.default for p in parameters if p.default is not p.empty
        ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="overloads are known since Python 3.11")
def test_the_stub_of_the_functions_is_written_from_the_losses() -> None:
    from scripts import functional_stub

    assert functional_stub.PATH.read_text() == functional_stub.stub(), "run python -m scripts.functional_stub"


def function_name(function: Any) -> str:
    return next(name for name, x in vars(functional).items() if x is function)


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
