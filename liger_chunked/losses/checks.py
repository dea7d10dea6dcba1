"""What the losses refuse, in words, among their settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from liger_chunked.types import check_number, shown


def check_finite(
    name: str, value: Any, *, minimum: float | None = None, maximum: float | None = None, optional: bool = False
) -> None:
    """Refuse what is no finite number, or one outside [minimum, maximum].

    Raises:
        TypeError: it is no number, nor None where that is an option.
        ValueError: it is not finite, or out of range.
    """
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
    """Refuse what is no finite number above 0.

    Raises:
        TypeError: it is no number, nor None where that is an option.
        ValueError: it is not finite, or not positive.
    """
    check_number(name, value, optional=optional)
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be finite and positive{' or None' if optional else ''}, got {value}")


class Reader(Protocol):
    """A row of a table of losses."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields of the settings that it reads."""
        ...


def refuse_unread(settings: Any, reads: Collection[str], by: str, table: Mapping[str, Reader]) -> None:
    """Refuse a setting that is not its default where nothing reads it: whoever gave it expects an effect.

    Args:
        settings: a dataclass whose fields have defaults.
        reads: the fields that are read.
        by: what reads them, for the message.
        table: what could have been chosen instead; fields that none of it reads are not looked at.

    Raises:
        ValueError: an unread one.
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        readers = sorted(name for name, kind in table.items() if field.name in kind.reads)
        if readers and field.name not in reads and value != field.default:
            raise ValueError(f"{field.name}={shown(value)} is not read by {by}, only by {readers}")


def check_scope(loss: str, scope: str, known: tuple[str, ...]) -> None:
    """`scope` is a class attribute that anyone may misspell.

    Raises:
        ValueError: it is none of `known`.
    """
    if scope not in known:
        raise ValueError(f"{loss}.scope must be one of {known}, got {shown(scope)}")


def checked_items(num_items: float | Tensor, like: Tensor, dtype: torch.dtype) -> float | Tensor:
    """The number of tokens to divide by; as a tensor, () on the device of `like`.

    In a tensor, less than 1 counts as 1: to look at it would mean to wait for the device.

    Raises:
        TypeError: something that is neither a number nor a tensor.
        ValueError: a number that is not finite and positive, a tensor of several or one that wants a gradient.
    """
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"num_items must be one number, got a tensor {tuple(num_items.shape)}")
        if num_items.requires_grad:
            raise ValueError("num_items gets no gradient: detach it")
        return num_items.to(like.device, dtype).reshape(()).clamp(min=1)
    check_positive("num_items", num_items)
    return num_items
