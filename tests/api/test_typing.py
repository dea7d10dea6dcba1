"""The stubs have the arguments that functions and trainers made at run time really take.

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

trl = pytest.importorskip("trl")

from liger_chunked.compat.chunked_loss import functional  # noqa: E402
from liger_chunked.integrations import trl as trainers  # noqa: E402


def stub_of(module: ModuleType) -> ast.Module:
    assert module.__file__ is not None
    return ast.parse(Path(module.__file__).with_suffix(".pyi").read_text())


STUB = stub_of(trainers)
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
WRITTEN_FOR = "1.16"  # the stub's version of TRL


def stub_arguments(cls: ast.ClassDef) -> dict[str, tuple[bool, bool]]:
    """Return, by name, whether an argument of `__init__` is for keywords only, and whether it has a default."""
    init = next(node for node in cls.body if isinstance(node, ast.FunctionDef))
    positional = init.args.args[1:]
    required = len(positional) - len(init.args.defaults)
    arguments = {arg.arg: (False, i >= required) for i, arg in enumerate(positional)}
    return arguments | {
        arg.arg: (True, default is not None)
        for arg, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
    }


def real_arguments(trainer: Any) -> tuple[dict[str, tuple[bool, bool]], dict[str, tuple[bool, bool]]]:
    """Return the arguments of TRL's trainer, and those that our classes over it add."""
    of_trl = next(cls for cls in trainer.__mro__ if cls.__module__.split(".")[0] == "trl")
    theirs = list(inspect.signature(of_trl.__init__).parameters.values())[1:]
    mixins = trainer.__mro__[: trainer.__mro__.index(of_trl)]
    added = [
        p for cls in mixins if "__init__" in vars(cls) for p in inspect.signature(cls.__init__).parameters.values()
    ]
    return (
        {p.name: (p.kind is p.KEYWORD_ONLY, p.default is not p.empty) for p in theirs},
        {p.name: (True, p.default is not p.empty) for p in added if p.kind is p.KEYWORD_ONLY},
    )


def test_every_public_name_is_in_the_stub() -> None:
    functions = {node.name for node in STUB.body if isinstance(node, ast.FunctionDef)}
    assert set(trainers.__all__) <= {*CLASSES, *functions}


@pytest.mark.filterwarnings("ignore")  # TRL warns of its experimental trainers
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_trainer_of_the_stub_takes_what_the_real_one_takes(name: str) -> None:
    trainer = getattr(trainers, name)
    theirs, ours = real_arguments(trainer)
    listed = stub_arguments(CLASSES[name])
    assert {argument: x for argument, x in listed.items() if argument in ours} == ours
    assert ast.unparse(CLASSES[name].bases[0]) in {cls.__name__ for cls in trainer.__mro__}
    if trl.__version__.startswith(f"{WRITTEN_FOR}."):
        of_trl = {argument: x for argument, x in listed.items() if argument not in ours}
        assert list(of_trl.items()) == list(theirs.items())


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
    package = Path(trainers.__file__).parents[2]
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
