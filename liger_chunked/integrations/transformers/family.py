"""Patch the models of a family when they are built: `apply_liger_kernel_to_<family>`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

from torch import nn
from transformers import PreTrainedModel

from liger_chunked.integrations.transformers import overrides
from liger_chunked.integrations.transformers.detect import head_of, inner_model
from liger_chunked.integrations.transformers.found import found_in
from liger_chunked.integrations.transformers.overrides import family_modeling, family_of
from liger_chunked.integrations.transformers.patch import apply_liger_kernel, check_options, revert_model
from liger_chunked.integrations.transformers.report import Applied

_LOGGER = logging.getLogger(__name__)

# By family: the options of its models, and classes with the constructors that they had, and ours.
_OPTIONS: dict[str, dict[str, Any]] = {}
_REPLACED: dict[str, list[tuple[Any, Any, Any]]] = {}
_ABSENT = object()


def patch_family(name: str, **options: Any) -> None:
    """Let each model of a family that is built from now on be patched by `apply_liger_kernel(model, **options)`."""
    overrides.check_switches({*options})
    check_options(options)
    modeling = family_modeling(name)
    revert_family(name)
    family = overrides.family_name(modeling.__name__)
    _OPTIONS[family], _REPLACED[family] = options, []
    for cls in overrides.model_classes(modeling):
        ours = _patching(cls.__init__, family)
        _REPLACED[family].append((cls, vars(cls).get("__init__", _ABSENT), ours))
        cls.__init__ = ours


def revert_family(name: str) -> None:
    """Let models of a family be built as those of transformers again. Models that exist keep what they have."""
    family = overrides.family_name(family_modeling(name).__name__)
    _OPTIONS.pop(family, None)
    for cls, before, ours in _REPLACED.pop(family, ()):
        if vars(cls).get("__init__") is not ours:
            continue  # somebody wrapped ours, which finds no options any more
        if before is _ABSENT:
            del cls.__init__
        else:
            cls.__init__ = before


def revert_liger_kernel(model: nn.Module | str) -> None:
    """Undo `apply_liger_kernel(model)` or, for a name, `apply_liger_kernel_to_<family>()` for models built later.

    The head that a trainer of `liger_chunked.integrations.trl` gave the model goes too, so revert after its last step;
    `attach_head` stays. Forwards set after patching stay. Without a patch, nothing happens.

    Args:
        model: a patched transformers model, maybe wrapped (DDP, PEFT), or the name of a family, such as "llama".

    Raises:
        TypeError: `model` is neither a name nor contains a transformers model.
        ValueError: transformers has no family of this name.
    """
    if isinstance(model, str):
        revert_family(model)
    else:
        revert_model(model)


_BUILDING = threading.local()


@contextlib.contextmanager
def _building() -> Iterator[bool]:
    """Yield whether the model that is built is no part of another one of a patched family."""
    depth = getattr(_BUILDING, "depth", 0)
    _BUILDING.depth = depth + 1
    try:
        yield depth == 0
    finally:
        _BUILDING.depth = depth


def _patching(init: Callable[..., None], family: str) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with _building() as is_whole:
            init(self, *args, **kwargs)
        if is_whole and (options := _OPTIONS.get(family)) is not None:
            _patch_built(self, options)

    return __init__


def _patch_built(model: PreTrainedModel, options: dict[str, Any]) -> None:
    if head_of(model) is None:  # a backbone in a model of another family, or a classifier
        options = {name: x for name, x in options.items() if name not in overrides.HEAD_SWITCHES}
    if set(found_in(model).switches) - {"cross_entropy"}:
        _LOGGER.info("%s", apply_liger_kernel(model, **options))


class FamilyFunction(Protocol):
    """The type of `apply_liger_kernel_to_<family>`: patches `model`, or if it is None those that are built later."""

    def __call__(
        self,
        *,
        model: PreTrainedModel | None = None,
        logits_budget: int | float | str | None = None,
        rope: bool | None = None,
        rms_norm: bool | None = None,
        layer_norm: bool | None = None,
        swiglu: bool | None = None,
        geglu: bool | None = None,
        relu_squared: bool | None = None,
        parallel_linear: bool | None = None,
        cross_entropy: bool | None = None,
        fused_linear_cross_entropy: bool | None = None,
        tiled_mlp: bool | int | Literal["auto"] | None = None,
        defer_in_evaluation: bool = True,
    ) -> Applied | None: ...


@functools.cache
def family_function(name: str) -> FamilyFunction:
    overrides.check_family(name)

    def apply(*, model: PreTrainedModel | None = None, **options: Any) -> Applied | None:
        if model is None:
            patch_family(name, **options)
            return None
        found, family = family_of(type(inner_model(model))), overrides.family_name(family_modeling(name).__name__)
        if found != family:
            raise ValueError(f"model is a {found}, not a {family}: use apply_liger_kernel")
        return apply_liger_kernel(model, **options)

    _, *keywords = inspect.signature(apply_liger_kernel).parameters.values()
    keywords.append(inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, default=None))
    apply.__name__ = apply.__qualname__ = f"apply_liger_kernel_to_{name}"
    apply.__doc__ = f"""Patch `model`, or if it is None every model of {name} that is built from now on.

    Both are `apply_liger_kernel(model, ...)`; see there for the switches and options. `revert_liger_kernel("{name}")`
    ends the patching of new models, and `revert_liger_kernel(model)` restores a model.

    Args:
        model: a transformers model of this family, maybe wrapped (DDP, PEFT). None: those that are built later.

    Returns:
        An `Applied` for a model, which says what is patched, and what is left alone and why. None without a model.

    Raises:
        TypeError: a switch is unknown, or no bool or None, or `model` contains no transformers model.
        ValueError: the model is of another family, or an option is invalid. A switch that is True and matches nothing
            raises where the model is built.
    """
    vars(apply)["__signature__"] = inspect.Signature(keywords, return_annotation=Applied | None)
    return apply
