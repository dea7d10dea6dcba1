"""What an editor shows of a public name is complete: every argument, the result, and the errors.

The rules read the entries of the sections `Args:`, `Returns:` and `Raises:`. A name that is merely mentioned somewhere
is not described, an entry for an argument that does not exist is an error, and the errors listed are those that the
function raises.
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

import liger_chunked
from liger_chunked.losses.surrogates import SURROGATES

_PACKED = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

# Sizes have one letter and maybe a suffix: (), (...), (V,), (2 n, T), (B or 1, T), (V_teacher, H_teacher), (m, T').
_SIZE = r"(?:\.\.\.|(?:\d+ )?[A-Za-z](?:_\w+)?'?(?: or 1| [+-] 1)?|\d+|heads|positions)"
_SHAPE = re.compile(rf"\(\)|\({_SIZE}(?:, {_SIZE})*,?\)|(?:shaped like|the shape of|in their shapes)\b")
_DTYPE = re.compile(r"\b(?:float32|float64|int64|bool|dtypes?)\b")
# A class of the library, in which the reader finds shapes and dtypes.
_NAMED = re.compile(r"`(?:TokenStats|\w+Metrics)`")
_ONLY_A_REFERENCE = re.compile(r"(?:see|as in|like)\b[^;.:]*[.]?")


def _public() -> Iterator[tuple[str, Any]]:
    for name in sorted(liger_chunked.__all__):
        yield name, getattr(liger_chunked, name)
    for kind in SURROGATES.values():
        yield kind.__name__, kind


def _is_described_by_fields(x: Any) -> bool:
    return inspect.isclass(x) and (dataclasses.is_dataclass(x) or hasattr(x, "_fields"))


def _has_forward(x: Any) -> bool:
    return inspect.isclass(x) and issubclass(x, nn.Module) and x.forward is not nn.Module.forward


FUNCTIONS = {name: x for name, x in _public() if inspect.isroutine(x)}
FORWARDS = {f"{name}.forward": x.forward for name, x in _public() if _has_forward(x)}
CALLS = FUNCTIONS | FORWARDS
CONSTRUCTORS = {name: x for name, x in _public() if _has_forward(x)}
RECORDS = {name: x for name, x in _public() if _is_described_by_fields(x)}


def section(doc: str, title: str) -> str:
    found = re.search(rf"^{title}:\n((?:(?: .*)?\n)*)", doc + "\n", re.M)
    return found[1] if found else ""


def entries(doc: str, title: str) -> dict[str, str]:
    """Return what a section says of each name; `a, b: text` is an entry of both."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section(doc, title).splitlines():
        start = re.fullmatch(r" {4}(\**\w+(?:, \**\w+)*):(.*)", line)
        if start:
            names = start[1].replace("*", "").split(", ")
            found |= dict.fromkeys(names, start[2].strip())
        elif names and line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def parameters(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(call).parameters.items() if name != "self"}


def flaws(doc: str, call: Callable[..., Any]) -> list[str]:
    """Return what is wrong with the descriptions of a call's arguments."""
    known, described = parameters(call), entries(doc, "Args")
    found = [f"{name} does not exist" for name in described.keys() - known.keys()]
    for name, parameter in known.items():
        text, annotation = described.get(name, ""), str(parameter.annotation)
        if not text:
            found.append(f"{name} is not described")
        elif _ONLY_A_REFERENCE.fullmatch(text):
            found.append(f"{name} is only a reference: {text}")
        elif parameter.kind in _PACKED:
            continue
        elif re.search(r"\b(?:Tensor|Weight)\b", annotation) and "Callable" not in annotation:
            if not _SHAPE.search(text):
                found.append(f"{name} is a tensor without a shape: {text}")
        if text and parameter.default is None and "None" not in text:
            found.append(f"{name} does not say what None means: {text}")
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_describes_its_arguments(name: str) -> None:
    found = flaws(inspect.getdoc(CALLS[name]) or "", CALLS[name])
    assert not found, f"{name}: " + "; ".join(found)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_class_describes_the_arguments_of_its_constructor(name: str) -> None:
    cls = CONSTRUCTORS[name]
    # Of the class itself: an editor does not show what a base class says.
    found = flaws(inspect.cleandoc(vars(cls).get("__doc__") or ""), cls)
    assert not found, f"{name}: " + "; ".join(found)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_describes_its_result(name: str) -> None:
    returned = str(inspect.signature(CALLS[name]).return_annotation)
    if returned == "None":
        return
    text = section(inspect.getdoc(CALLS[name]) or "", "Returns")
    assert text.strip(), f"{name} does not say what it returns"
    if re.search(r"\b(?:Tensor|Result|TokenStats)\b", returned):
        assert _SHAPE.search(text) or _NAMED.search(text), f"{name} returns tensors without a shape: {text}"
        assert _DTYPE.search(text), f"{name} returns tensors without a dtype: {text}"


def errors(doc: str) -> dict[str, type[Exception]]:
    return {name: getattr(builtins, name, type(None)) for name in entries(doc, "Raises")}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_lists_errors_that_exist(name: str) -> None:
    listed = errors(inspect.getdoc(CALLS[name]) or "")
    assert listed, f"{name} says no errors"
    assert all(issubclass(error, Exception) for error in listed.values()), f"{name} lists {list(listed)}"


@pytest.mark.few(4)
@pytest.mark.parametrize("name", RECORDS)
def test_a_record_describes_its_fields(name: str) -> None:
    cls = RECORDS[name]
    doc = inspect.cleandoc(vars(cls).get("__doc__") or "")
    fields = getattr(cls, "_fields", None) or [field.name for field in dataclasses.fields(cls)]
    described = set(entries(doc, "Args"))
    # Bullets: - `name`, `other` (n, T): text
    for bullet in re.findall(r"^- (`\w+`[^:]*):", doc, re.M):
        described |= set(re.findall(r"`(\w+)`", bullet))
    missing = [field for field in fields if field not in described]
    assert not missing, f"{name} does not describe {missing}"
