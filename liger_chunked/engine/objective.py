"""What a step minimises: a function of token statistics, and its gradient by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from liger_chunked.engine.checks import other_leaves
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.rows import Rows
from liger_chunked.kernels import nll, nll_has_kernel
from liger_chunked.kernels.backend import use_triton
from liger_chunked.private import without_hooks
from liger_chunked.types import DIFFERENTIABLE, LossHead, TokenStats


def has_group_kernel(head: LossHead, input: Tensor, rows: Rows) -> bool:
    """Whether a kernel may compute a loss of groups, such as pairs or tokens, on the input's device.

    Its tokens are in the target's order, or group by group: not in the order of ranks that split hidden states.
    """
    if rows.split is not None or not use_triton(input):
        return False
    if not rows.n_positions:  # no groups
        return False
    return head.shard is None or head.shard.input_grad != "reduce_scatter"


class Share(NamedTuple):
    """A chunk's part of the loss.

    Attributes:
        loss: (), detached.
        gradients: of `loss`, by name of the statistic, shaped like the statistics that the objective got. Empty if it
            depends on none, or none is wanted.
        aux: what the loss computed of the chunk's groups and its metrics read, a NamedTuple of tensors (groups, ...),
            which the step joins over chunks; or None.
        values: the chunk's dense statistics, which the step joins over chunks; None if no metric reads them.
        rounded: `loss` in float32, if a kernel wrote both: a step of one chunk then launches nothing to round.
        of_parameters: gradients of `loss` by tensors that the loss holds and that require one.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor]
    aux: Any = None
    values: TokenStats | None = None
    rounded: Tensor | None = None
    of_parameters: Mapping[Tensor, Tensor] = MappingProxyType({})


class Objective:
    """A loss of token statistics. The default differentiates `loss` by autograd.

    A step calls `evaluate`, which arranges statistics by groups for `value_and_grad`. An objective that reads tokens as
    the step computes them, in a kernel of its own, overrides `evaluate`.

    A loss may hold tensors that require a gradient, such as a parameter of its module. In grad mode it is
    differentiated by these too, even if nothing wants the gradient by statistics.
    """

    def evaluate(self, stats: TokenStats, rows: Rows, chunk: Chunk, with_gradient: bool) -> Share:
        """Return a chunk's share, with compact gradients.

        Args:
            stats: compact statistics (len,) of the chunk's tokens.
            rows: the step's.
            with_gradient: whether gradients are wanted.
        """
        values = rows.for_objective(stats, chunk)
        share = self.value_and_grad(values, rows.group_index(chunk), with_gradient)
        gradients = {name: rows.from_objective(g, chunk) for name, g in share.gradients.items()}
        return share._replace(gradients=gradients, values=values)

    def loss(self, values: TokenStats, index: slice | Tensor) -> Tensor:
        """Return some groups' differentiable share of the loss, ().

        Args:
            values: dense statistics of these groups (see `Rows`).
            index: selects the groups from tensors of the whole batch.
        """
        raise NotImplementedError

    def value_and_grad(self, values: TokenStats, index: slice | Tensor, with_gradient: bool) -> Share:
        """Return `loss`, detached, with dense gradients."""
        leaves = leaves_of(values) if with_gradient else {}
        with torch.set_grad_enabled(with_gradient or torch.is_grad_enabled()):
            loss = self.loss(values, index)
        gradients, of_parameters = gradients_of(loss, leaves)
        return Share(loss.detach(), gradients, of_parameters=of_parameters)


class GroupKernel(Objective):
    """A loss of groups, such as pairs, whose gradient a kernel knows: no dense statistics, and no autograd.

    Its gradient reaches `logps` alone. `statistics` are those that it reads.
    """

    statistics: ClassVar[tuple[str, ...]] = ("logps", "mean_logits")

    def launch(
        self, stats: TokenStats, rows: Rows, chunk: Chunk, with_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a chunk's share of the loss (), in float64 and in float32, and its gradient by `logps`.

        Args:
            stats: compact statistics (len,) of the chunk's tokens.
        """
        raise NotImplementedError

    def evaluate(self, stats: TokenStats, rows: Rows, chunk: Chunk, with_gradient: bool) -> Share:
        """Return a share without values: metrics are what the kernels write beside it."""
        loss, rounded, gradient = self.launch(stats, rows, chunk, with_gradient)
        return Share(loss, {} if gradient is None else {"logps": gradient}, rounded=rounded)


@dataclass(frozen=True)
class Differentiated(Objective):
    """A function as an objective."""

    function: Callable[[TokenStats, slice | Tensor], Tensor]

    def loss(self, values: TokenStats, index: slice | Tensor) -> Tensor:
        return self.function(values, index)


@dataclass(frozen=True)
class NegativeLogLikelihood(Objective):
    """`-sum(logps) / items`, whose gradient needs no autograd."""

    items: float | Tensor

    def loss(self, values: TokenStats, index: slice | Tensor) -> Tensor:
        assert values.logps is not None
        return (-values.logps).sum(dtype=torch.float64) / self.items  # not -0 without tokens

    def value_and_grad(self, values: TokenStats, index: slice | Tensor, with_gradient: bool) -> Share:
        assert values.logps is not None
        logps = values.logps
        if nll_has_kernel(logps):
            loss, rounded, gradient = nll(logps, self.items, with_gradient)
            return Share(loss, {} if gradient is None else {"logps": gradient}, rounded=rounded)
        gradients = {"logps": torch.empty_like(logps).fill_(-1 / self.items)} if with_gradient else {}
        return Share(self.loss(values, index), gradients)


class SequenceLogps(NamedTuple):
    """Log-probabilities of a chunk's sequences, detached, in the shape of `OfSequences.logps`."""

    logps: Tensor


class OfSequences(Objective):
    """A loss of sequences' log-probabilities, and perhaps of statistics of their tokens.

    It is differentiated by the sequences, and `spread` does the rest by hand, because a sum over tokens needs no graph.
    Its `aux` are `SequenceLogps`.
    """

    def logps(self, values: TokenStats, index: slice | Tensor) -> Tensor:
        """Return the log-probabilities of the groups' sequences, from those of their tokens."""
        raise NotImplementedError

    def loss_of_sequences(self, values: TokenStats, logps: Tensor, index: slice | Tensor) -> Tensor:
        """Return `loss`, differentiable by `logps`: the log-probabilities that the method of this name returned."""
        raise NotImplementedError

    def spread(self, g: Tensor, like: Tensor, index: slice | Tensor) -> Tensor:
        """Return the gradient by the tokens' log-probabilities, `like` these, for one by `logps`."""
        raise NotImplementedError

    def loss(self, values: TokenStats, index: slice | Tensor) -> Tensor:
        return self.loss_of_sequences(values, self.logps(values, index), index)

    def value_and_grad(self, values: TokenStats, index: slice | Tensor, with_gradient: bool) -> Share:
        assert values.logps is not None
        logps = self.logps(values, index)
        leaves = {"sequences": logps.requires_grad_(), **leaves_of(values)} if with_gradient else {}
        with torch.set_grad_enabled(with_gradient or torch.is_grad_enabled()):
            loss = self.loss_of_sequences(values, logps, index)
        gradients, of_parameters = gradients_of(loss, leaves)
        of_sequences = gradients.pop("sequences", None)
        if of_sequences is not None:
            of_tokens = self.spread(of_sequences, values.logps, index)
            gradients["logps"] = of_tokens + gradients["logps"] if "logps" in gradients else of_tokens
        return Share(loss.detach(), gradients, SequenceLogps(logps), of_parameters=of_parameters)


def leaves_of(values: TokenStats) -> dict[str, Tensor]:
    """Return the statistics that have gradients, by name, after they were made to require one."""
    return {name: x.requires_grad_() for name in DIFFERENTIABLE if (x := getattr(values, name)) is not None}


def gradients_of(loss: Tensor, leaves: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[Tensor, Tensor]]:
    """Return the gradients by the leaves that `loss` depends on, by name, and by all other leaves.

    `leaves` require none afterwards.
    """
    parameters = other_leaves(loss, list(leaves.values()))
    computed: tuple[Tensor | None, ...] = ()
    if loss.requires_grad:
        # Single-threaded, because handing this small graph to autograd's worker thread takes longer than running it.
        # Without the hooks of parameters, which run in the backward of the loss, on the whole gradient.
        with torch.autograd.set_multithreading_enabled(False), without_hooks(parameters):
            # A tensor that the caller computed from a parameter has a graph that the next chunk needs again.
            retained = True if parameters else None
            # No upstream gradient is passed, because torch would import sympy for one.
            computed = torch.autograd.grad(loss, [*leaves.values(), *parameters], None, retained, allow_unused=True)
    for leaf in leaves.values():
        leaf.requires_grad_(False)
    gradients = {name: g for name, g in zip(leaves, computed, strict=False) if g is not None}
    pairs = zip(parameters, computed[len(leaves) :], strict=True)
    return gradients, {parameter: g for parameter, g in pairs if g is not None}
