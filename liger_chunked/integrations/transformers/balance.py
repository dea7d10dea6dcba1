"""The load-balancing loss of experts.

Names of its settings vary: evaluate the source's expressions.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from liger_chunked.integrations.transformers.detect import parsed

_SWITCH = "output_router_logits"


@dataclass(frozen=True)
class Balance:
    """How a forward computes the load-balancing loss, or why this is unknown."""

    asked: Callable[..., Any] = lambda model, output_router_logits: output_router_logits
    loss: Callable[..., Any] = lambda model, outputs, attention_mask: None
    coefficient: Callable[..., Any] = lambda model: 0.0
    refusal: str | None = None


_BALANCES: dict[type, Balance | None] = {}


def balance_of(model: Any) -> Balance | None:
    model_class = type(model)
    _read_balance(model_class)
    return _BALANCES[model_class]


@torch.compiler.assume_constant_result  # Dynamo runs it during tracing
def _read_balance(model_class: type) -> None:
    if model_class not in _BALANCES:
        _BALANCES[model_class] = _balance_of_class(model_class)


def _balance_of_class(model_class: type) -> Balance | None:
    forwards = [vars(cls)["forward"] for cls in model_class.__mro__ if "forward" in vars(cls)]
    for forward in dict.fromkeys(map(inspect.unwrap, forwards)):
        try:
            tree = parsed(forward)
        except (OSError, TypeError):
            return Balance(refusal=f"the source of {forward.__qualname__} is not available")
        nodes = list(ast.walk(tree))
        calls = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "load_balancing_loss_func"]
        if calls:
            return _balance_of_calls(forward, nodes, calls)
        if "super().forward" not in ast.unparse(tree):
            return None
    return None


def _balance_of_calls(forward: Any, nodes: list[ast.AST], calls: list[ast.Call]) -> Balance:
    sums = [n.value for n in nodes if isinstance(n, ast.AugAssign) and ast.unparse(n.target) == "loss"]
    products = [x for x in sums if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Mult)]
    factors = [x.left for x in products if ast.unparse(x.right).startswith("aux_loss")]
    asked = [n.value for n in nodes if isinstance(n, ast.Assign) and list(map(ast.unparse, n.targets)) == [_SWITCH]]
    try:
        ((call,), (factor,)) = calls, factors
        return Balance(
            _evaluator(forward, asked[0] if asked else ast.Name(_SWITCH, ast.Load()), "self", _SWITCH),
            _evaluator(forward, call, "self", "outputs", "attention_mask"),
            _evaluator(forward, factor, "self"),
        )
    except (ValueError, NameError) as failure:
        return Balance(refusal=f"{forward.__qualname__} computes it in another way than other models do ({failure})")


def _evaluator(forward: Any, expression: ast.expr, *names: str) -> Callable[..., Any]:
    local = set(forward.__code__.co_varnames) - set(names)
    if missing := sorted(n.id for n in ast.walk(expression) if isinstance(n, ast.Name) and n.id in local):
        raise NameError(f"it needs {', '.join(missing)}")
    namespace: dict[str, Any] = {}
    code = f"def evaluated({', '.join(names)}):\n    return {ast.unparse(expression)}"
    exec(compile(code, inspect.getfile(forward), "exec"), forward.__globals__, namespace)
    return namespace["evaluated"]
