"""What a step minimises: a function of token statistics, and its gradient by them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_chunked.engine.checks import other_leaves
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.rows import Rows, hide_ignored
from liger_chunked.private import without_hooks
from liger_chunked.types import DIFFERENTIABLE, TokenStats


class Share(NamedTuple):
    """A chunk's part of the loss.

    Attributes:
        loss: (), detached.
        gradients: of `loss`, compact, by name of the statistic. Empty if it depends on none, or none is wanted. None:
            the source knew them when it computed the values.
        values: of the chunk's tokens, which `Objective.join` joins over chunks.
        of_parameters: gradients of `loss` by tensors that the loss holds and that require one.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor] | None
    values: Any = None
    of_parameters: Mapping[Tensor, Tensor] = MappingProxyType({})


class Objective:
    """A loss of token statistics, which autograd differentiates.

    A loss may hold tensors that require a gradient, such as a parameter of its module. In grad mode it is
    differentiated by these too, even if nothing wants the gradient by statistics.
    """

    def loss(self, values: TokenStats, index: slice | Tensor) -> Tensor:
        """Return some groups' differentiable share of the loss, ().

        Args:
            values: dense statistics of these groups (see `Rows`).
            index: selects the groups from tensors of the whole batch.
        """
        raise NotImplementedError

    def share(self, values: Any, rows: Rows, chunk: Chunk, with_gradient: bool) -> Share:
        """Return a chunk's share, with compact gradients.

        Args:
            values: compact statistics (n,) of the chunk's tokens.
            rows: the step's.
            with_gradient: whether gradients are wanted.
        """
        counted = rows.counted_in(chunk)
        dense = rows.for_objective(hide_ignored(values, counted), chunk)
        leaves = leaves_of(dense) if with_gradient else {}
        with torch.set_grad_enabled(with_gradient or torch.is_grad_enabled()):
            loss = self.loss(dense, rows.group_index(chunk))
        gradients, of_parameters = gradients_of(loss, leaves)
        gradients = {name: rows.from_objective(g, chunk) for name, g in gradients.items()}
        if counted is not None:
            gradients = {name: g.where(counted, 0) for name, g in gradients.items()}
        return Share(loss.detach(), gradients, dense, of_parameters)

    def join(self, rows: Rows, parts: list[Any]) -> Any:
        """Return the batch's values, from those of the shares."""
        return rows.join(parts)


def leaves_of(values: TokenStats) -> dict[str, Tensor]:
    """Return the statistics that have gradients, by name, after they were made to require one."""
    return {name: x.requires_grad_() for name in DIFFERENTIABLE if (x := getattr(values, name)) is not None}


def gradients_of(loss: Tensor, leaves: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[Tensor, Tensor]]:
    """Return the gradients of `loss` by `leaves`, by name, and by all other leaves of its graph.

    Leaves on which `loss` does not depend are missing. `leaves` require no gradient afterwards.
    """
    parameters = other_leaves(loss, list(leaves.values()))
    computed: tuple[Tensor | None, ...] = ()
    if loss.requires_grad:
        # Single-threaded, because handing this small graph to autograd's worker thread takes longer than running it.
        # Hooks of parameters are off here: they run once, in the backward of the loss, on the gradient of all chunks.
        with torch.autograd.set_multithreading_enabled(False), without_hooks(parameters):
            # The next chunk needs the graph again between a parameter and a tensor that the caller computed from it.
            retained = True if parameters else None
            # No upstream gradient is passed, because torch would import sympy for one.
            computed = torch.autograd.grad(loss, [*leaves.values(), *parameters], None, retained, allow_unused=True)
    for leaf in leaves.values():
        leaf.requires_grad_(False)
    gradients = {name: g for name, g in zip(leaves, computed, strict=False) if g is not None}
    pairs = zip(parameters, computed[len(leaves) :], strict=True)
    return gradients, {parameter: g for parameter, g in pairs if g is not None}
