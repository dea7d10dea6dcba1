from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from liger_chunked.calls import FixedSettings


class Loss(FixedSettings):
    """Has the constructor's arguments as attributes, like Liger-Kernel's losses; setting one later raises."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" not in vars(cls):
            return
        init: Callable[..., None] = cls.__init__
        signature = inspect.signature(init)

        @functools.wraps(init)
        def remember(self: Loss, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            if type(self) is cls:
                given = signature.bind(self, *args, **kwargs)
                given.apply_defaults()
                self.__dict__.update(dict(list(given.arguments.items())[1:]), _fixed=tuple(signature.parameters)[1:])

        setattr(cls, "__init__", remember)  # noqa: B010
