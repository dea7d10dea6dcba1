"""Compute the load-balancing loss of a mixture of experts, as the model's own forward does.

Model families name their settings differently (`num_experts`, `num_local_experts`, `n_routed_experts`, ...), and some
have no such loss. The source of the forward says which. This module takes two expressions from that source and
evaluates them on the model: the call of `load_balancing_loss_func`, and the factor in `loss += factor * aux_loss`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_FUNCTION = "load_balancing_loss_func"
_SWITCH = "output_router_logits"


@dataclass(frozen=True)
class Balance:
    """The parts of a forward that compute the load-balancing loss. `self` is the model.

    - `asked(self, output_router_logits)`: whether this call computes the loss
    - `loss(self, outputs, attention_mask)`: the load-balancing loss from the backbone's outputs
    - `coefficient(self)`: the factor of the load-balancing loss in the model's loss
    - `refusal`: why the load-balancing loss cannot be computed outside of that forward, or None
    """

    asked: Callable[..., Any]
    loss: Callable[..., Any]
    coefficient: Callable[..., Any]
    refusal: str | None = None


def _refused(reason: str) -> Balance:
    return Balance(lambda self, asked: asked, lambda *_: None, lambda _: 0.0, reason)


_READ: dict[type, Balance | None] = {}


def balance_of(model: Any) -> Balance | None:
    """Return how a model's forward computes the load-balancing loss, or None if it has none."""
    model_class = type(model)
    _read(model_class)
    return _READ[model_class]


@torch.compiler.assume_constant_result  # Dynamo runs it during tracing
def _read(model_class: type) -> None:
    if model_class not in _READ:
        _READ[model_class] = _balance_of_class(model_class)


def _balance_of_class(model_class: type) -> Balance | None:
    forwards = [vars(cls)["forward"] for cls in model_class.__mro__ if "forward" in vars(cls)]
    for forward in dict.fromkeys(map(inspect.unwrap, forwards)):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
        except (OSError, TypeError):
            return _refused(f"the source of {forward.__qualname__} is not available")
        calls = [node for node in ast.walk(tree) if _calls(node, _FUNCTION)]
        if calls:
            return _of_calls(forward, tree, calls)
        if "super().forward" not in ast.unparse(tree):
            return None
    return None


def _calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _of_calls(forward: Any, tree: ast.AST, calls: list[Any]) -> Balance:
    compiled = functools.partial(_compiled, forward)
    factors = [
        node.value.left
        for node in ast.walk(tree)
        if isinstance(node, ast.AugAssign)
        and ast.unparse(node.target) == "loss"
        and isinstance(node.value, ast.BinOp)
        and isinstance(node.value.op, ast.Mult)
        and ast.unparse(node.value.right).startswith("aux_loss")
    ]
    asked = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [_SWITCH]
    ]
    try:
        ((call,), (factor,)) = calls, factors
        return Balance(
            compiled(asked[0] if asked else ast.Name(_SWITCH, ast.Load()), "self", _SWITCH),
            compiled(call, "self", "outputs", "attention_mask"),
            compiled(factor, "self"),
        )
    except (ValueError, NameError) as failure:
        return _refused(f"{forward.__qualname__} computes it in another way than other models do ({failure})")


def _compiled(forward: Any, expression: Any, *names: str) -> Callable[..., Any]:
    """Return a function of `names` that evaluates an expression of `forward` with the globals of `forward`.

    Raises:
        NameError: the expression needs another local variable.
    """
    local = set(forward.__code__.co_varnames) - set(names)
    if missing := sorted(n.id for n in ast.walk(expression) if isinstance(n, ast.Name) and n.id in local):
        raise NameError(f"it needs {', '.join(missing)}")
    namespace: dict[str, Any] = {}
    code = f"def evaluated({', '.join(names)}):\n    return {ast.unparse(expression)}"
    exec(compile(code, inspect.getfile(forward), "exec"), forward.__globals__, namespace)
    return namespace["evaluated"]
