"""The switches of a head that are not tensors: training mode, adapters in use, and which parameters train.

PEFT's `disable_adapter()` and `set_adapter` change them between the call of a model and the use of its logits.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from liger_chunked.private import has_children

# Attributes of any module, and of PEFT's layers and wrappers.
_NAMES = ("training", "_disable_adapters", "_active_adapter")
_MERGED = "merged_adapters"


class Switches:
    """The switches of a head when it was called.

    with Switches(head).restored():
        ...  # the head has these switches, whatever they are before and after
    """

    def __init__(self, head: nn.Module) -> None:
        # The mode of a plain Linear changes nothing.
        modules = list(head.modules()) if has_children(head) else []
        self._modules = [
            (module, {name: copy.copy(x) for name, x in _switches_of(module).items()}) for module in modules
        ]
        self._merged = [(module, list(vars(module)[_MERGED])) for module in modules if _MERGED in vars(module)]
        self._parameters = [(p, p.requires_grad) for p in head.parameters() if p.is_leaf]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put the switches back inside the block; RuntimeError if an adapter was merged or unmerged since."""
        if any(vars(module)[_MERGED] != merged for module, merged in self._merged):
            raise RuntimeError(
                "the adapters of lm_head were merged or unmerged after the model called it, which changes its weight, "
                "and its deferred logits were not computed before: compute the loss first"
            )
        modules = [
            (module, _switches_of(module), then) for module, then in self._modules if _switches_of(module) != then
        ]
        parameters = [(p, p.requires_grad, then) for p, then in self._parameters if p.requires_grad != then]
        for module, _, then in modules:
            vars(module).update(then)
        for p, _, trains in parameters:
            p.requires_grad_(trains)
        try:
            yield
        finally:
            for module, switches, _ in modules:
                vars(module).update(switches)
            for p, trains, _ in parameters:
                p.requires_grad_(trains)


def has_unknown_switches(module: nn.Module) -> bool:
    """Whether a layer of PEFT keeps its switches in attributes that `Switches` does not know."""
    return hasattr(module, "disable_adapters") and not all(hasattr(module, name) for name in _NAMES)


def _switches_of(module: nn.Module) -> dict[str, Any]:
    state = vars(module)
    return {name: copy.copy(state[name]) for name in _NAMES if name in state}  # some are lists
