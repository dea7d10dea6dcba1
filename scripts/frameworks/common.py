"""Shared by the scripts of this folder: the table of two runs' losses, and stubs of packages that need a GPU."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import NoReturn
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


def compare(framework: str, stock: Sequence[float], ours: Sequence[float], bound: float) -> NoReturn:
    """Print the losses of both runs, and exit: 0 if all differ by at most `bound`, relative to stock, else 1.

    Args:
        framework: the name of its package, of which the version is printed.
        stock, ours: the losses of the steps, of two trainings from equal weights on equal data. At least two steps
            must differ from each other, because a run that does not train shows nothing.
    """
    versions = (f"{name} {importlib.metadata.version(name)}" for name in (framework, *PACKAGES) if _is_installed(name))
    print(", ".join(versions))
    print(f"{'step':>4} {'stock':>12} {'ours':>12} {'difference':>12}")
    errors = [abs(x - e) / max(abs(e), 1e-12) for x, e in zip(ours, stock, strict=True)]
    for i, (e, x, error) in enumerate(zip(stock, ours, errors, strict=True)):
        print(f"{i:>4} {e:>12.7f} {x:>12.7f} {error:>12.1e}")
    trained = len(set(stock)) > 1
    equal = all(error <= bound for error in errors)  # False for nan
    print(f"{len(stock)} steps, the largest difference {max(errors):.1e}, allowed {bound:.0e}", end="")
    print(": equal" if equal and trained else ": NOT equal" if trained else ": the losses do not change")
    sys.exit(0 if equal and trained else 1)


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
