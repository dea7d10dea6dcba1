"""Checks of settings and arguments that several losses take. Errors say what was expected and what was passed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from liger_chunked.types import LogitOptions, check_number, shown


def is_set(setting: float | Tensor) -> bool:
    """Return whether a setting is not 0.

    A tensor is, whatever its value: a trained one has a gradient at 0 too, and reading it would wait for the device.
    """
    return isinstance(setting, Tensor) or bool(setting)


def check_finite(
    name: str, value: Any, *, minimum: float | None = None, maximum: float | None = None, optional: bool = False
) -> None:
    check_number(name, value, optional=optional)
    if value is None:
        return
    low, high = (-math.inf if minimum is None else minimum), (math.inf if maximum is None else maximum)
    if math.isfinite(value) and low <= value <= high:
        return
    if maximum is not None:
        expected = f"in [{low}, {high}]"
    elif minimum is not None:
        expected = "finite and not negative" if minimum == 0 else f"finite and at least {minimum}"
    else:
        expected = "finite"
    raise ValueError(f"{name} must be {expected}{' or None' if optional else ''}, got {value}")


def check_positive(name: str, value: Any, *, optional: bool = False) -> None:
    check_number(name, value, optional=optional)
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be finite and positive{' or None' if optional else ''}, got {value}")


class Reader(Protocol):
    @property
    def reads(self) -> tuple[str, ...]: ...


def refuse_unread(settings: Any, reads: Collection[str], by: str, table: Mapping[str, Reader]) -> None:
    """Raise unless settings outside `reads` are at their defaults."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        readers = sorted(name for name, kind in table.items() if field.name in kind.reads)
        if readers and field.name not in reads and value != field.default:
            raise ValueError(f"{field.name}={shown(value)} is not read by {by}, only by {readers}")


def options_of_teacher(given: LogitOptions | None, own: LogitOptions) -> LogitOptions:
    if given is None:
        return own
    if not isinstance(given, LogitOptions):
        raise TypeError(f"teacher_options must be LogitOptions, such as LogitOptions(softcap=30.0), got {shown(given)}")
    plain = LogitOptions()
    for name in ("ignore_index", "logits_budget", "logits_dtype"):
        if getattr(given, name) != getattr(plain, name):
            raise ValueError(f"{name} belongs to the loss, not to teacher_options, got {given}")
    return given


def check_scope(loss: str, scope: str, known: tuple[str, ...]) -> None:
    if scope not in known:
        raise ValueError(f"{loss}.scope must be one of {known}, got {shown(scope)}")


def check_example_weights(weights: Any, n: int, input: Tensor, example: str) -> None:
    """Raise TypeError or ValueError unless `weights` is floating-point (n,), on the device of `input`."""
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        got = f"{weights.dtype}".removeprefix("torch.") if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"example_weights must be a floating-point tensor, one value for each {example}, got {got}")
    check_each("example_weights", weights, n, input, example)


def check_each(name: str, x: Tensor, n: int, input: Tensor, example: str) -> None:
    if x.shape != (n,):
        raise ValueError(
            f"{name} must be {(n,)}, one value for each {example} of input {tuple(input.shape)}, got {tuple(x.shape)}"
        )
    if x.device != input.device:
        raise ValueError(f"{name} is on {x.device}, input on {input.device}: expected one device")


def checked_items(num_items: float | Tensor, like: Tensor, dtype: torch.dtype) -> float | Tensor:
    """Return the divisor `num_items`, with 1 in the place of 0.

    Without items, all tokens are ignored: the loss is then 0 and connected, as for a batch of ignored tokens. A
    positive share stays: the tokens of all ranks divided by the number of ranks can be below 1.

    Args:
        num_items: a number, or a tensor of one element.
        like: a tensor on the device of the result.
        dtype: of a tensor returned.

    Raises:
        ValueError: a tensor of several elements, or a number that is negative or not finite. A tensor's value is not
            read, because that would wait for the device: what is not positive counts as 1.
    """
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"num_items must be one number, got a tensor {tuple(num_items.shape)}")
        items = num_items.detach().to(like.device, dtype).reshape(())
        return torch.where(items <= 0, 1.0, items)  # NaN stays NaN
    check_finite("num_items", num_items, minimum=0)
    return num_items or 1
