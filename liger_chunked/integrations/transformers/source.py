"""Whether functions are the same code apart from names."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torch import nn

from liger_chunked.deferred.code import foreign_code, unwrapped
from liger_chunked.integrations.transformers.detect import parsed

_READ: dict[int, Any] = {}  # objects that texts refer to by id

Source = tuple[str, tuple[str, ...]]
Lookup = tuple[Callable[..., Any], tuple[Any, ...], Any]  # function, arguments and result

_SOURCES: dict[Any, tuple[Source | None, list[Lookup]]] = {}


def source_of(function: Any, cls: Any = None) -> Source | None:
    """Return a function's syntax tree without names, and the attributes of `cls` that it reads.

    Functions with equal trees do the same with their arguments and, in order, these attributes. None without source.
    Cached until a name that the function or its callees use refers to another object.
    """
    return _read(function, cls)[0]


def _read(function: Any, cls: Any, within: tuple[Any, ...] = ()) -> tuple[Source | None, list[Lookup]]:
    """Read a function that the last of `within` refers to."""
    known = _SOURCES.get((function, cls))
    if known is None or any(look(*arguments) is not found for look, arguments, found in known[1]):
        reader, result = _Reader(cls, (*within, function)), None
        with contextlib.suppress(OSError, TypeError, ValueError, SyntaxError, RecursionError):
            result = reader.read(function), tuple(reader.attributes)
        known = _SOURCES[function, cls] = result, reader.lookups
    return known


def _global(names: dict[str, Any], name: str) -> Any:
    return names.get(name, vars(builtins).get(name, _ABSENT))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _ABSENT


_ABSENT = object()


class _Reader:
    def __init__(self, cls: type | None, reading: tuple[Any, ...]) -> None:
        self.cls, self.reading = cls, reading
        self.attributes: dict[str, int] = {}
        self.lookups: list[Lookup] = []

    def look(self, function: Callable[..., Any], *arguments: Any) -> Any:
        found = function(*arguments)
        self.lookups.append((function, arguments, found))
        return found

    def read(self, function: Any) -> str:
        *wrappers, function = unwrapped(function)
        if any(foreign_code(wrapper) is wrapper for wrapper in wrappers):
            raise TypeError(f"{function} is wrapped in other code")
        tree = parsed(function)
        if not isinstance(tree, ast.FunctionDef):
            raise TypeError(f"{function} is not defined by def")
        if ast.get_docstring(tree) is not None:
            del tree.body[0]
        # Decorators change results, except those of hub kernels.
        kept = [x for x in tree.decorator_list if not ast.unparse(x).startswith("use_kernel")]
        tree.name, tree.returns, tree.decorator_list = "", None, kept
        return ast.dump(_Renamed(self, function, tree).visit(tree))

    def attribute(self, name: str) -> str:
        value = self.look(inspect.getattr_static, self.cls, name, None)
        if _has_text(value):
            return f"method {_Reader.read(self, value)}"
        return f"attribute {self.attributes.setdefault(name, len(self.attributes))}"


def _has_text(value: Any) -> bool:
    return inspect.isfunction(value) and (value.__module__ or "").partition(".")[0] != "torch"


class _Renamed(ast.NodeTransformer):
    """Replaces a function's names by their order or their objects."""

    def __init__(self, reader: _Reader, function: Any, tree: ast.AST) -> None:
        self.reader, self.globals = reader, function.__globals__
        self.cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        nodes = list(ast.walk(tree))
        arguments = [n.arg for n in nodes if isinstance(n, ast.arg)]
        local = arguments + [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        self.local = {name: f"local {i}" for i, name in enumerate(dict.fromkeys(local))}
        self.self = local[0] if reader.cls is not None and local else None

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self.local[node.arg])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        return self.visit(ast.Assign([node.target], node.value)) if node.value is not None else None

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.local.get(node.id) or self.referred(node) or node.id, ast.Load())

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == self.self:
            return ast.Name(self.reader.attribute(node.attr), ast.Load())
        found = self.referred(node)
        return self.generic_visit(node) if found is None else ast.Name(found, ast.Load())

    def referred(self, node: ast.expr) -> str | None:
        first, *names = ast.unparse(node).split(".")
        if not all(map(str.isidentifier, (first, *names))) or first in self.local:
            return None
        look = self.reader.look
        value = look(_content, self.cells[first]) if first in self.cells else look(_global, self.globals, first)
        for name in names:
            value = look(getattr, value, name, _ABSENT) if isinstance(value, ModuleType) else _ABSENT
        if value is _ABSENT:
            if first in self.cells:
                raise ValueError(f"{first} has no value yet")
            return None
        function = value if _has_text(value) else None
        if function is not None and function not in self.reader.reading:
            text, lookups = _read(function, None, self.reader.reading)
            self.reader.lookups += lookups
            if text:
                return f"function {text[0]}"
        if isinstance(value, (bool, int, float, str)):
            return repr(value)
        _READ[id(value)] = value
        return f"object {id(value)}"


@functools.cache
def rotary_methods(cls: type) -> dict[str, frozenset[tuple[str, str]]]:
    """Return the methods of a class that call rotary functions: the modules and names of these functions."""
    members = {name: x for base in reversed(cls.__mro__) for name, x in vars(base).items()}
    found = {name: _rotary_functions(method) for name, method in members.items() if inspect.isfunction(method)}
    return {name: functions for name, functions in found.items() if functions}


def rotary_functions(cls: type) -> frozenset[tuple[str, str]]:
    return frozenset().union(*rotary_methods(cls).values())


def _rotary_functions(method: Any) -> frozenset[tuple[str, str]]:
    method = inspect.unwrap(method)
    names = [name for name in method.__code__.co_names if re.match(r"_?\w*apply\w*(rotary|rope)", name)]
    theirs = method.__globals__
    return frozenset((theirs["__name__"], name) for name in names if inspect.isfunction(theirs.get(name)))


def with_other_globals(function: Any, names: Mapping[str, str]) -> Any:
    """Return a copy of a function that reads other global variables: `names` maps a name to the other's.

    The functions that it wraps are copied too.
    """
    cells = [_other_cell(cell, names) for cell in function.__closure__ or ()]
    code = _with_names(function.__code__, names)
    arguments = function.__globals__, function.__name__, function.__defaults__
    copied: Any = types.FunctionType(code, *arguments, tuple(cells))
    functools.update_wrapper(copied, function)
    copied.__kwdefaults__ = function.__kwdefaults__
    if "__wrapped__" in vars(function):
        copied.__wrapped__ = with_other_globals(vars(function)["__wrapped__"], names)
    else:
        del copied.__wrapped__  # set by update_wrapper
    return copied


def _other_cell(cell: Any, names: Mapping[str, str]) -> Any:
    content = _content(cell)
    wrapped = inspect.isfunction(content) and _rotary_functions(content)
    return types.CellType(with_other_globals(content, names)) if wrapped else cell


def _with_names(code: types.CodeType, names: Mapping[str, str]) -> types.CodeType:
    constants = tuple(_with_names(x, names) if isinstance(x, types.CodeType) else x for x in code.co_consts)
    return code.replace(co_names=tuple(names.get(name, name) for name in code.co_names), co_consts=constants)


_TWICE = re.compile(r"elts=\[(Name\(id='[^']*', ctx=Load\(\)\)), \1[],]")


def repeats_angles(cls: Any) -> bool:
    """Whether a rotary embedding's code gives each angle twice, as `cat((x, x), -1)` or by `repeat_interleave`."""
    read = source_of(cls.forward, cls)
    names = getattr(inspect.unwrap(cls.forward), "__code__", None)
    repeats = names is not None and "repeat_interleave" in names.co_names
    return repeats or (read is not None and _TWICE.search(read[0]) is not None)


def looks_like_norm(module: nn.Module, cls: Any) -> bool:
    """Whether a module without parts and buffers has "norm" in its name, an inverse root in its code, or torch's norms.

    For norms of other names than `looks_like_layer` knows. Blocks have parts, and frozen batch norms have buffers.
    """
    if cls.__module__.partition(".")[0] == "torch" or module._modules or module._buffers:
        return False
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    called = code.co_names if code is not None else ()
    methods = [getattr(inspect.getattr_static(cls, name, None), "__code__", None) for name in called]
    names = {*called, *(name for method in methods if method is not None for name in method.co_names)}
    return "norm" in cls.__name__.lower() or not names.isdisjoint(("rsqrt", "rms_norm", "layer_norm"))


def looks_like_layer(cls: Any) -> bool:
    """Whether a class has a norm's name, or that of a gated MLP or experts and a product."""
    if cls.__module__.partition(".")[0] == "torch":
        return False
    if re.search(r"(RMS|Layer|L2)Norm", cls.__name__):
        return True
    named = re.search(r"(MLP|Mlp|FeedForward|GLU|Experts)$", cls.__name__)
    read = source_of(cls.forward, cls) if named else None
    return read is not None and ("Mult()" in read[0] or cls.__name__.endswith("Experts"))
