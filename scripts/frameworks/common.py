"""Shared by the scripts of this folder: the table of two runs' losses, and stubs of packages that need a GPU."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn
from unittest.mock import MagicMock

PACKAGES = ("torch", "transformers", "trl")


def stub(*modules: str) -> None:
    """Let `import` find modules that are not installed. Their attributes are mocks.

    Name each submodule too, after its package: `stub("vllm", "vllm.lora")`.
    """
    for name in modules:
        module = MagicMock(name=name, __path__=[], __spec__=ModuleSpec(name, None))
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def count_calls(owner: Any, name: str) -> Counter[str]:
    """Replace the function `owner.name` by itself with a counter, which shows that a framework really calls it."""
    function, calls = getattr(owner, name), Counter[str]()

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    setattr(owner, name, counted)
    return calls


def compare(
    framework: str, stock: Sequence[float], ours: Sequence[float], bound: float, calls: Counter[str] | None = None
) -> NoReturn:
    """Print the losses of both runs, and exit: 0 if all differ by at most `bound`, relative to stock, else 1.

    Args:
        framework: the name of its package, of which the version is printed.
        stock, ours: the losses of the steps, of two trainings from equal weights on equal data. At least two steps
            must differ from each other, because a run that does not train shows nothing.
        calls: of `count_calls`. Without a call, the exit code is 1 too: both runs would be stock.
    """
    versions = (f"{name} {importlib.metadata.version(name)}" for name in (framework, *PACKAGES) if _is_installed(name))
    print(", ".join(versions))
    print(f"{'step':>4} {'stock':>12} {'ours':>12} {'difference':>12}")
    errors = [abs(x - e) / max(abs(e), 1e-12) for x, e in zip(ours, stock, strict=True)]
    for i, (e, x, error) in enumerate(zip(stock, ours, errors, strict=True)):
        print(f"{i:>4} {e:>12.7f} {x:>12.7f} {error:>12.1e}")
    trained = len(set(stock)) > 1
    equal = all(error <= bound for error in errors)  # False for nan
    if calls is not None:
        print(f"calls of this library: {dict(calls)}")
        trained = trained and calls.total() > 0
    print(f"{len(stock)} steps, the largest difference {max(errors):.1e}, allowed {bound:.0e}", end="")
    print(": equal" if equal and trained else ": NOT equal" if trained else ": nothing was compared")
    sys.exit(0 if equal and trained else 1)


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
