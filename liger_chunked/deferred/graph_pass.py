"""A pass over a finished graph of Dynamo: logits that leave it unread, and changes in place that no loss would see."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from liger_chunked.private import aten
from liger_chunked.whole_graph import is_fused

MARK = aten.alias.default  # of the logits of a head, which may leave the graph without values

_WRITES = {"setitem", "__setitem__", "__set__"}
for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split():
    _WRITES |= {f"i{_name}", f"__i{_name}__"}  # of `operator`, and methods


def is_write(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


@functools.cache
def inplace_at(function: Any) -> int:
    """Return the place of the argument `inplace` of a function; -1 without it."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of C++, where such functions have another name
        return -1
    return names.index("inplace") if "inplace" in names else -1


def is_inplace(at: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call sets `inplace`, by its name or at its place `at`."""
    return bool(kwargs.get("inplace") or (0 <= at < len(args) and args[at]))


@functools.cache
def written_arguments(operator: Any) -> list[tuple[int, str]]:
    """Return places and names of the arguments that an operator of `torch.ops` changes, of any of its overloads."""
    overloads = [operator] if isinstance(operator, type(MARK)) else [getattr(operator, x) for x in operator.overloads()]
    return [
        (i, x.name)
        for overload in overloads
        for i, x in enumerate(overload._schema.arguments)
        if x.alias_info is not None and x.alias_info.is_write
    ]


def drop_unread(module: GraphModule) -> None:
    """Let logits that no operation of a graph reads leave it without values: `TracedLogits._leave` replaces them.

    Those of a head in a graph inside leave that graph with values, and so do all that share their memory.
    """
    graph = _Graph(list(module.graph.nodes))
    graph.check_losses()
    output = graph.nodes[-1]
    results = [x for x in output.all_input_nodes if x.op != "placeholder"]
    leaving = [] if graph.changes_what_a_head_read() else [x for x in results if x.target is MARK]
    read = _ancestors([*(x for x in results if x not in leaving), *graph.writes])
    for z in leaving:
        if not any(x in read for x in _ancestors([z]) for y in (x, *_nodes_inside(x)) if y.target is MARK):
            with module.graph.inserting_before(output):
                nothing = module.graph.call_function(torch.empty, (0,), {"device": "meta"})
            output.replace_input_with(z, nothing)
    module.recompile()


class _Graph:
    """The nodes of a graph in order, its heads, and the storages that each writing operation changes.

    A function that a checkpoint calls, say, is a graph inside: its nodes come before the call. It has other names for
    the same tensors, which their storages tell.
    """

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = [x for node in nodes for x in (*_nodes_inside(node), node)]
        self.places = {node: i for i, node in enumerate(self.nodes)}
        self.heads = {x for x in self.nodes if any(y.target is MARK for y in x.users)}
        self.writes: dict[Node, set[Any]] = {}
        for node in self.nodes:
            inside = [self.writes.get(x, set()) for x in _nodes_inside(node)]
            if changed := set(map(_storage, _written_by(node))).union(*inside):
                self.writes[node] = changed

    def changes_what_a_head_read(self) -> bool:
        """Whether hidden states or a weight change after a head: logits that leave are then computed before."""
        return any(
            self.places[head] < self.places[write] and not changed.isdisjoint(_read_by(head))
            for write, changed in self.writes.items()
            for head in self.heads
        )

    def check_losses(self) -> None:
        """Raise RuntimeError if a graph changes in place what an operator reads, between a head and the operator.

        These are hidden states, a weight, or logits through a tensor without an expression. Eager code raises in its
        backward, or gets real logits.
        """
        for loss in self.nodes if self.writes else ():
            for read in _read_by(loss) if is_fused(loss.target) else ():
                for head in self.heads:
                    if read in _read_by(head) and self._changes_between(head, loss, {read, *self._logits_of(head)}):
                        raise RuntimeError(
                            "deferred logits, their hidden states or their weight are changed in place before a loss "
                            "of these logits, in a compiled graph: change a copy, or compute the loss before"
                        )

    def _logits_of(self, head: Node) -> set[Any]:
        """Return the storages of the logits of a head, and of those that steps of them made."""
        reached, logits = {_storage(head)}, {_storage(head)}
        for node in self.nodes[self.places[head] + 1 :]:
            if not reached.isdisjoint(_read_by(node)):
                reached.add(_storage(node))
                if node.target is MARK:
                    logits.add(_storage(node))
        return logits

    def _changes_between(self, first: Node, last: Node, storages: set[Any]) -> bool:
        return any(
            self.places[first] < self.places[write] < self.places[last] and not changed.isdisjoint(storages)
            for write, changed in self.writes.items()
        )


def _nodes_inside(node: Node) -> list[Node]:
    """Return the nodes of the graphs that an operation calls, and of those inside them."""
    root = node.graph.owning_module
    attributes = [getattr(root, str(x.target), None) for x in node.all_input_nodes if x.op == "get_attr"]
    nodes = [x for graph in attributes if isinstance(graph, GraphModule) for x in graph.graph.nodes]
    return [y for x in nodes for y in (*_nodes_inside(x), x)]


def _read_by(node: Node) -> set[Any]:
    return set(map(_storage, node.all_input_nodes))


def _storage(node: Node) -> Any:
    value = node.meta.get("example_value")
    return StorageWeakRef(value.untyped_storage()) if isinstance(value, Tensor) else node


def _written_by(node: Node) -> list[Node]:
    """Return the arguments that an operation of a graph changes in place."""
    if isinstance(node.target, (type(MARK), type(aten.alias))):
        schemas = written_arguments(node.target)
        written: Any = [_argument(node, i, name) for i, name in schemas]
    else:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        at = inplace_at(node.target) if callable(node.target) else -1
        first = is_write(name) or is_inplace(at, node.args, node.kwargs)
        written = [node.kwargs.get("out"), node.args[0] if first and node.args else None]
        if name in ("embedding", "embedding_bag") and _argument(node, 3, "max_norm") is not None:
            written.append(_argument(node, 1, "weight"))
    tensors = [y for x in written for y in (x if isinstance(x, (list, tuple)) else (x,))]
    return [x for x in tensors if isinstance(x, Node)]


def _argument(node: Node, index: int, name: str) -> Any:
    return node.args[index] if index < len(node.args) else node.kwargs.get(name)


def _ancestors(nodes: list[Node]) -> set[Node]:
    """Return nodes, and all whose results they read."""
    found: set[Node] = set()
    while nodes:
        node = nodes.pop()
        if node not in found:
            found.add(node)
            nodes.extend(node.all_input_nodes)
    return found
