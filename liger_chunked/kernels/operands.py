"""Check and unwrap operands at each launch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from liger_chunked.private import transforms_are_active
from liger_chunked.types import AdaptedWeight, StandIn
from liger_chunked.types import described as described

Values = TypeVar("Values", bound=Any)  # a NamedTuple of tensors, some of which may be None

_PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer})
_COMPLEX = ("complex32", "complex64", "complex128")
_QUANTIZED = ("quint8", "qint8", "qint32", "quint4x2", "quint2x4")
_NOT_REAL = frozenset(getattr(torch, name) for name in _COMPLEX + _QUANTIZED if hasattr(torch, name))
# A public query is slow; without this one, autograd raises.
_forward_mode: Any = forward_ad if hasattr(forward_ad, "_current_level") else SimpleNamespace(_current_level=-1)


def outside_transforms() -> bool:
    """Whether neither a transform of `torch.func` nor forward-mode differentiation is active."""
    return not transforms_are_active() and _forward_mode._current_level < 0


def all_plain(values: Iterable[Any]) -> bool:
    """Whether the tensors are plain and dense, outside transforms."""
    if not outside_transforms():
        return False
    for x in values:
        if type(x) in _PLAIN:
            if x.layout is not torch.strided or x.is_nested or x.dtype in _NOT_REAL:
                return False
        elif isinstance(x, (Tensor, AdaptedWeight, StandIn)):
            return False
    return True


def plain(names: Sequence[str], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with tensors as plain dense `torch.Tensor`, also those of an `AdaptedWeight`.

    Raises NotImplementedError under `torch.func` or forward-mode differentiation.
    """
    if torch.compiler.is_compiling() or all_plain(values):
        return values
    return tuple(_plain(names[i] if i < len(names) else "an argument", x) for i, x in enumerate(values))


def _plain(name: str, x: Any) -> Any:
    if isinstance(x, AdaptedWeight):
        return AdaptedWeight(_plain(f"{name}.weight", x.weight), _plain(f"{name}.up", x.up), x.down)
    if isinstance(x, StandIn):
        x = x.asked(name)
    if not isinstance(x, Tensor):
        return x
    if transforms_are_active():
        raise NotImplementedError(
            f"{name} is under a transform of torch.func (grad, vmap, jvp, ...), which fused kernels do not support: "
            "call the function outside of it and differentiate with backward() or torch.autograd.grad"
        )
    if x.is_nested:
        _refuse(
            name, x, f"a nested tensor: pass torch.nested.to_padded_tensor({name}, ...) with padding that is ignored"
        )
    if x.layout is not torch.strided:
        _refuse(name, x, f"of layout {x.layout}: pass {name}.to_dense()")
    if x.dtype in _NOT_REAL:
        advice = f"{name}.dequantize()" if x.is_quantized else "its real and imaginary parts as two real tensors"
        _refuse(name, x, f"whose values are not real numbers: pass {advice}")
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return _unwrapped(name, x)
    if _forward_mode._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(
            f"{name} has a tangent of torch.autograd.forward_ad, and fused kernels have no forward-mode derivative: "
            "differentiate with backward() or torch.autograd.grad"
        )
    return x if type(x) in _PLAIN else x.as_subclass(Tensor)


def _unwrapped(name: str, x: Any) -> Tensor:
    for module, kind, advice in _WRAPPERS:
        cls = getattr(sys.modules.get(module), kind, None)
        if cls is not None and isinstance(x, cls):
            if advice is None:
                return _Wait.apply(x)
            _refuse(name, x, advice.format(name=name))
    _refuse(
        name,
        x,
        f"a subclass of torch.Tensor with a __torch_dispatch__ of its own: pass the plain torch.Tensor that {name} "
        "stands for (for quantized weights, the dequantized one)",
    )


def _refuse(name: str, x: Tensor, why: str) -> NoReturn:
    raise TypeError(f"{name} must be a plain dense torch.Tensor, got {described(x)}, {why}")


# Module, name, and advice, or None to wait.
_WRAPPERS = (
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor", None),
    (
        "torch.distributed.tensor",
        "DTensor",
        "distributed over ranks: pass {name}.full_tensor(), or {name}.to_local() where this rank holds all of it. Call "
        "either inside the forward of the module that owns it",
    ),
    (
        "torch._subclasses.fake_tensor",
        "FakeTensor",
        "which has no values: pass real tensors, or trace the call with torch.compile; estimate_memory predicts a "
        "step's memory without tensors",
    ),
)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return x.trigger_wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def check_class_ids(x: Any, name: str, what: str = "token ids", hint: Callable[[], str] = str) -> None:
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} must be a tensor of {what} (int64), got {described(x)}{hint()}")


def check_floating(x: Any, name: str, ndim: int = 1) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {described(x)}")
    if x.ndim < ndim:
        raise ValueError(f"{name} must have at least {ndim} dimensions, got {described(x)}")


def check_like(x: Any, name: str, other: Tensor, other_name: str) -> None:
    if not isinstance(x, Tensor) or x.dtype != other.dtype:
        raise TypeError(f"{name} must be a tensor of the dtype of {other_name} {described(other)}, got {described(x)}")
    if x.shape != other.shape or x.device != other.device:
        raise ValueError(
            f"{name} must have the shape and device of {other_name} {described(other)}, got {described(x)}"
        )


def check_row(weight: Any, name: str, x: Tensor) -> None:
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {described(weight)}")
    if weight.ndim != 1 or weight.shape[0] != x.shape[-1] or weight.device != x.device:
        raise ValueError(
            f"{name} must be ({x.shape[-1]},) on {x.device}, one value for each column of x, got {described(weight)}"
        )


def check_labels(labels: Any, rows: Tensor, rows_name: str) -> None:
    shape = rows.shape[:-1]
    if labels is not None and (not isinstance(labels, Tensor) or labels.shape != shape or labels.device != rows.device):
        raise ValueError(
            f"shift_labels must be {tuple(shape)} on {rows.device}, one for each row of {rows_name}, got "
            f"{described(labels)}"
        )


def mapped(function: Callable[[Tensor], Tensor], values: Values) -> Values:
    """Apply a function to a NamedTuple's tensors."""
    return values._make(None if f is None else function(f) for f in values)


def joined(parts: Sequence[Values]) -> Values:
    """Concatenate NamedTuples of tensors, field by field."""
    if len(parts) == 1:
        return parts[0]
    return parts[0]._make(None if f[0] is None else torch.cat(f) for f in zip(*parts, strict=True))


def along(x: Tensor, part: slice | Tensor) -> Tensor:
    """Return `x[part]`, or `x` if `part` covers it: a view takes longer than some kernels."""
    return x if isinstance(part, slice) and part.start == 0 and part.stop == x.shape[0] else x[part]


def other_leaves(value: Tensor, ends: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves beyond `ends` that `value` depends on and that require a gradient, such as parameters."""
    seen = {x.grad_fn for x in ends}
    left = [(value.grad_fn, 0)]
    found: list[Tensor] = []
    while left:
        node, _ = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = node.next_functions
        left += following
        leaf = None if following else getattr(node, "variable", None)
        if leaf is not None and not any(leaf is x for x in ends):
            found.append(leaf)
    return found


def named(leaf: Tensor, owner: Any) -> str:
    """Describe a tensor that a loss holds, with its name if it is a parameter of the module `owner`."""
    names = [n for n, x in owner.named_parameters() if x is leaf] if isinstance(owner, torch.nn.Module) else []
    return " ".join([*names[:1], described(leaf)])
