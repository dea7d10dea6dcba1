"""The public names, signatures and defaults are those of public_api.txt: none changes unnoticed.

python tests/api/test_public_api.py        writes public_api.txt
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_origin

import pytest

LISTED = Path(__file__).with_suffix("").with_name("public_api.txt")
MODULES = (
    "liger_chunked",
    "liger_chunked.losses.surrogates",
    "liger_chunked.testing",
    "liger_chunked.compat",
    "liger_chunked.compat.chunked_loss",
    "liger_chunked.compat.chunked_loss.functional",
    "liger_chunked.compat.transformers",
    "liger_chunked.compat.transformers.functional",
    "liger_chunked.integrations.frameworks.cut_cross_entropy",
    "liger_chunked.integrations.frameworks.megatron",
    "liger_chunked.integrations.frameworks.nemo_rl",
    "liger_chunked.integrations.frameworks.prime_rl",
    "liger_chunked.integrations.frameworks.skyrl",
    "liger_chunked.integrations.transformers",
    "liger_chunked.integrations.trl",
    "liger_chunked.integrations.frameworks.verl",
    "liger_chunked.integrations.frameworks.verl_megatron",
    "liger_chunked.shared_prefix",
)
# Names that a module serves on request and does not list in `__all__`.
ON_REQUEST = {"liger_chunked": ("__version__",), "liger_chunked.testing": ("check_model",)}
CHANGED = """the public API differs from tests/api/public_api.txt:

{}

If you meant to change it, run `python tests/api/test_public_api.py`, and add a line to CHANGELOG.md for the users."""


def public_api() -> list[str]:
    lines = ["# Written by `python tests/api/test_public_api.py`."]
    modules = [import_module(name) for name in MODULES]
    public = {name: {*module.__all__, *ON_REQUEST.get(name, ())} for name, module in zip(MODULES, modules, strict=True)}
    classes = {x for module in modules for name in public[module.__name__] if is_class(x := getattr(module, name))}
    for module in modules:
        lines += ["", f"{module.__name__}:"]
        for name in sorted(public[module.__name__]):
            lines += (f"    {line}" for line in described(name, getattr(module, name), classes))
    return lines


def described(name: str, x: Any, public: set[type]) -> Iterator[str]:
    if is_class(x):
        # Private bases may come and go.
        base = next(base for base in x.__mro__[1:] if base in public or not is_ours(base))
        yield f"class {name}({base.__name__})" + constructor(x)
        yield from (f"    {member}" for member in sorted(members(x, x.__mro__[: x.__mro__.index(base)])))
    else:
        yield name + (signature(x) if inspect.isroutine(x) else "")


def is_class(x: Any) -> bool:
    # An alias such as `Callable[..., Any]` is a class for Python 3.10.
    return inspect.isclass(x) and get_origin(x) is None


def constructor(cls: type) -> str:
    if hasattr(cls, "_fields"):
        return signature(cls.__new__)
    ours = [base for base in cls.__mro__ if is_ours(base) and "__init__" in vars(base)]
    inits = [vars(base)["__init__"] for base in ours]
    if not inits:
        return ""
    if cls.__name__.endswith("Trainer"):  # the keywords of its mixins too
        mixins = [p for init in inits[1:] for p in inspect.signature(init).parameters.values()]
        return signature(inits[0], {p.name: p for p in mixins if p.kind is p.KEYWORD_ONLY})
    return signature(inits[0])


def members(cls: type, bases: tuple[type, ...]) -> Iterator[str]:
    """Yield what users call, set or override. A trainer has TRL's methods."""
    names = {name for base in bases if is_ours(base) for name in vars(base) if not name.startswith("_")}
    of_dataclass = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else ()
    names -= {"extra_repr", *getattr(cls, "_fields", ()), *of_dataclass}
    for name in names if not cls.__name__.endswith("Trainer") else ():
        x = inspect.getattr_static(cls, name)
        x = x.__func__ if isinstance(x, (staticmethod, classmethod)) else x
        if inspect.isfunction(x):
            yield name + signature(x)
        else:
            yield f"{name} = {x!r}" if isinstance(x, (bool, int, float, str, tuple, type(None))) else name


def signature(function: Any, more: Mapping[str, inspect.Parameter] = MappingProxyType({})) -> str:
    """Return the arguments with their defaults. Annotations depend on the version of Python."""
    found = inspect.signature(function).parameters
    parameters = {name: p for name, p in found.items() if name not in ("self", "cls", "_cls")}
    order = sorted({**more, **parameters}.values(), key=lambda p: p.kind)
    return str(inspect.Signature([p.replace(annotation=p.empty, default=named(p.default)) for p in order]))


class named:
    """Represent a default that is a function by its name."""

    def __new__(cls, default: Any) -> Any:
        return super().__new__(cls) if inspect.isfunction(default) else default

    def __init__(self, default: Any) -> None:
        self.name = default.__name__

    def __repr__(self) -> str:
        return self.name


def is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "liger_chunked"


@pytest.mark.filterwarnings("ignore")  # TRL warns of its experimental trainers
def test_the_public_api_is_the_listed_one():
    pytest.importorskip("trl")
    listed, ours = LISTED.read_text().splitlines(), public_api()
    changes = difflib.unified_diff(listed, ours, "listed", "now", n=1, lineterm="")
    assert listed == ours, CHANGED.format("\n".join(changes))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    LISTED.write_text("\n".join(public_api()) + "\n")
