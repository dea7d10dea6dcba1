"""Refuse a reference that is not the frozen model it should be: one that runs, or shares, what the policy trains.

Its scores would follow the policy, and the loss would stay near its first value without a word.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from liger_chunked.deferred.code import FORWARD_SLOTS

_ADVICE = (
    "Load the reference by itself: model.save_pretrained(path), then ref_model = type(model).from_pretrained(path)"
)
# For trainers that take a reference, and for those that load it in any case.
PASS_ONE = "pass ref_model, for a first step equal to the model: ref_model = copy.deepcopy(model)"
SAVE_FIRST = "model.save_pretrained(path), and train type(model).from_pretrained(path); or set beta=0.0 in the config"


def check_name(trainer: str, model: Any, advice: str) -> None:
    """Raise ValueError if TRL would load the reference by a name that the model's config lacks.

    TRL loads it from the path or repository that the config remembers. That of a model that was built from a config is
    empty, and the error of the hub would not say what asked for it.
    """
    name = getattr(getattr(model, "config", None), "name_or_path", None)
    if not isinstance(model, nn.Module) or hasattr(model, "peft_config") or name != "":
        return
    raise ValueError(
        f"{trainer} needs a reference, and TRL would load it by the name that model.config remembers, but this "
        f"{type(model).__name__} was not loaded from a path or repository and has none: {advice}"
    )


def check_forwards(policy: Any, reference: Any) -> None:
    """Raise ValueError if the reference's forward runs another model, or the policy's runs the reference.

    A forward that was set on an instance may be bound to the model that it was made for, as a closure, a partial or a
    `functools.wraps` of a bound method is. `copy.deepcopy` copies no function, so a copy of such a model runs the
    original.
    """
    if not isinstance(reference, nn.Module) or reference is policy:
        return
    found = next(_foreign_modules(reference), None)
    if found is not None:
        where, other = found
        raise ValueError(
            f"the forward that is set on {_name('ref_model', where, reference)} runs another model, of the class "
            f"{type(other).__name__}, and not the parameters of ref_model: a copy of a model keeps the forward of its "
            f"original. {_ADVICE}"
        )
    if isinstance(policy, nn.Module):
        parts = {id(module) for module in reference.modules()}
        for where, other in _foreign_modules(policy):
            if id(other) in parts:
                raise ValueError(
                    f"the forward that is set on {_name('model', where, policy)} runs ref_model, so the parameters of "
                    "model would not be trained: a copy of a model keeps the forward of its original. Train the "
                    "original, and load the reference by itself: model.save_pretrained(path), then ref_model = "
                    "type(model).from_pretrained(path)"
                )


def check_parameters(policy: Any, reference: Any) -> None:
    """Raise ValueError if the reference has a parameter that the policy trains. Frozen ones may be shared."""
    if not isinstance(reference, nn.Module) or not isinstance(policy, nn.Module) or reference is policy:
        return
    trained = {key: name for name, x in policy.named_parameters() if x.requires_grad for key in _keys(x)}
    shared = [trained[key] for x in reference.parameters() for key in _keys(x) if key in trained]
    if shared:
        names = list(dict.fromkeys(shared))
        raise ValueError(
            f"ref_model shares {len(names)} parameters with model that are trained, such as {names[0]}, so it would "
            f"change with every step. {_ADVICE}; or freeze what they share, requires_grad_(False)"
        )


def _keys(x: Tensor) -> list[Any]:
    """Return what two parameters have in common that are one: the object, or where its values lie."""
    plain = type(x) in (Tensor, nn.Parameter) and x.numel() > 0 and x.untyped_storage().data_ptr() != 0
    return [id(x), *([(x.device, x.data_ptr())] if plain else [])]


def _name(argument: str, where: str, model: nn.Module) -> str:
    of = f"{argument} ({type(model).__name__})"
    return f"{where} of {of}" if where else of


def _foreign_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with parameters that are no part of a model, but which a forward set on one of its parts runs."""
    parts = {id(module) for module in model.modules()}
    for name, module in model.named_modules():
        for slot in FORWARD_SLOTS:
            for reached in _reached(vars(module).get(slot)):
                if id(reached) not in parts and next(reached.parameters(), None) is not None:
                    yield name, reached


def _reached(function: Any) -> Iterator[nn.Module]:
    """Yield the modules that a function holds: bound, as arguments, in its closure, or in what it wraps."""
    seen: dict[int, Any] = {}
    left = [function]
    while left:
        x = left.pop()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        if isinstance(x, nn.Module):
            yield x
        else:
            left += _held(x)


def _held(x: Any) -> list[Any]:
    if isinstance(x, (tuple, list)):
        return list(x)
    if isinstance(x, dict):
        return list(x.values())
    if isinstance(x, type) or not callable(x):
        return []
    held = [*getattr(x, "__dict__", {}).values()]  # with `__wrapped__`
    if isinstance(x, functools.partial):
        held += [x.func, *x.args, *x.keywords.values()]
    elif isinstance(x, types.MethodType):
        owner = x.__self__
        held += [owner, x.__func__, *([] if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {}).values())]
    elif isinstance(x, types.FunctionType):
        held += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        held += [cell.cell_contents for cell in x.__closure__ or () if not _is_empty(cell)]
    return held


def _is_empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False
