"""Tensors that autograd keeps for a backward, by name.

save(ctx, plan=plan.tensors(), ...)     in forward: autograd watches their versions, and hooks see them
tensors = saved(ctx)                    in backward: raises if a tensor changed, or the graph was freed
plan.with_tensors(tensors["plan"])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

Named = Mapping[str, Tensor | None]


def savable(tensors: Named) -> dict[str, Tensor | None]:
    """Return the tensors, with copies of inference tensors, which autograd cannot save."""
    return {name: x.clone() if x is not None and x.is_inference() else x for name, x in tensors.items()}


def save(ctx: Any, **owners: Named) -> None:
    """Save the tensors of several owners for the backward of an autograd Function, once."""
    ctx.saved_names = {owner: tuple(tensors) for owner, tensors in owners.items()}
    ctx.save_for_backward(*[x for tensors in owners.values() for x in tensors.values()])


def saved(ctx: Any) -> dict[str, dict[str, Tensor | None]]:
    """Return what `save` got, by owner and name."""
    tensors = iter(ctx.saved_tensors)
    return {owner: {name: next(tensors) for name in names} for owner, names in ctx.saved_names.items()}
