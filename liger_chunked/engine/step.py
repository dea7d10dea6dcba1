"""Compute losses of token statistics with their gradients in the forward.

    for chunk in groups:
        project, reduce to statistics
        loss, g = autograd on the objective          a few numbers per token; only g if its formula is known
        logits -> gradient in place, dX, dW          while the logits are in memory

Backward multiplies by the upstream gradient: in place, or on a copy if the graph is retained.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from liger_chunked.engine import epilogue
from liger_chunked.engine.batch import Chunk, Layout, along
from liger_chunked.engine.checks import check_graph, compute_dtype
from liger_chunked.engine.epilogue import EpiloguePass
from liger_chunked.engine.gradients import Gradients, HeadGradients, Needs
from liger_chunked.engine.head import HeadPass
from liger_chunked.engine.hooks import isolated
from liger_chunked.engine.plan import Tile, budget_elements, chunks, largest, row_blocks, tiles, warn_of_few_rows
from liger_chunked.engine.precision import gemms
from liger_chunked.kernels import LogitsCotangents, scale_
from liger_chunked.kernels.backend import first_derivative, has_wide_tiles
from liger_chunked.types import DIFFERENTIABLE, Head, LogitOptions, TokenStats, accumulation_dtype


class Objective(Protocol):
    """A sum over groups: maps the statistics of some groups to their share of the loss, a scalar.

    `stats` has shape (tokens,) for groups of one token, else (groups, sequences in a group, T), zero at ignored tokens.
    `index` picks these groups from a tensor of all groups.
    """

    def __call__(self, stats: TokenStats, index: slice | Tensor) -> Tensor: ...


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """The objective `-sum(logps) / items`, whose constant gradient needs no graph.

    The engine calls it once, with the whole dense batch.
    """

    items: float | Tensor  # a number, or ()

    def __call__(self, stats: TokenStats, index: slice | Tensor) -> Tensor:
        assert stats.logps is not None
        return (-stats.logps).sum(dtype=torch.float64) / self.items  # 0 rather than -0 without tokens

    def gradients(self, stats: TokenStats) -> dict[str, Tensor]:
        """Return the gradients with respect to the statistics."""
        assert stats.logps is not None
        return {"logps": torch.empty_like(stats.logps).fill_(-1 / self.items)}


@dataclass(frozen=True)
class Plan:
    """How a step is cut, and which pass runs it. It reads no device and no values, as `estimate_memory` requires."""

    layout: Layout
    chunks: list[Chunk]
    tiles: list[list[Tile]]  # of each chunk
    outputs: tuple[str, ...]
    differentiates: tuple[str, ...]
    options: LogitOptions
    class_weight: Tensor | None
    dtype: torch.dtype  # of the matrix products
    by_epilogue: bool  # `EpiloguePass` runs the step, if `open` allows it

    @classmethod
    def of(
        cls,
        head: Head,
        layout: Layout,
        dtype: torch.dtype,
        *,
        outputs: tuple[str, ...],
        differentiates: tuple[str, ...],
        options: LogitOptions,
        whole_batch: bool,
        wide_tiles: bool,
        class_weight: Tensor | None = None,
    ) -> Plan:
        vocab_size, hidden_size = head.weight.shape
        differentiates = tuple(name for name in differentiates if name in outputs)
        warn_of_few_rows(options, vocab_size, dtype.itemsize, layout.n_valid)

        def cut(n_valid: int) -> tuple[list[Chunk], list[list[Tile]]]:
            elements = budget_elements(options, head.weight.shape, dtype, n_valid)
            found = chunks(layout, vocab_size, elements, whole_batch)
            return found, [tiles(chunk.rows.stop - chunk.rows.start, vocab_size, elements) for chunk in found]

        def served(tiles: list[list[Tile]]) -> bool:
            return wide_tiles and epilogue.serves(head, dtype, options, class_weight, outputs, differentiates, tiles)

        chosen = cut(layout.n_valid)
        if len(chosen[0]) == 1 and wide_tiles:
            several = cut(0)
            if epilogue.instead_of_one_chunk(several[1], hidden_size) and served(several[1]):
                chosen = several
        return cls(
            layout=layout if len(chosen[0]) == 1 else layout.by_group(),
            chunks=chosen[0],
            tiles=chosen[1],
            outputs=outputs,
            differentiates=differentiates,
            options=options,
            class_weight=class_weight,
            dtype=dtype,
            by_epilogue=served(chosen[1]),
        )

    @property
    def n_contributions(self) -> int:
        """Number of products added to each element of dW."""
        return sum(row_blocks(t) for t in self.tiles)

    def open(self, head: Head, grads: Gradients | None) -> HeadPass | EpiloguePass:
        """Return the pass that runs the step, with its buffer. `head` has the products' dtype."""
        head_pass: HeadPass | EpiloguePass
        if self.by_epilogue and (grads is None or grads.accumulates):
            head_pass = EpiloguePass(head, self.options, backward_follows=grads is not None)
        else:
            head_pass = HeadPass(head, self.options, self.class_weight)
        head_pass.reserve(max(largest(t) for t in self.tiles))
        return head_pass


@dataclass(frozen=True)
class _Step:
    """A step, without the tensors that get gradients."""

    plan: Plan
    objective: Objective

    def run(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, needs: Needs
    ) -> tuple[Tensor, TokenStats, tuple[Tensor | None, ...]]:
        """Return the loss, the batch's dense statistics, and the needed gradients."""
        plan, layout = self.plan, self.plan.layout
        flat = input.reshape(-1, input.shape[-1])
        head = Head(weight.to(plan.dtype), None if bias is None else bias.to(plan.dtype))
        grads = None
        if any(needs):
            grads = HeadGradients(layout, flat, Head(weight, bias), plan.dtype, needs, plan.n_contributions)
        head_pass = plan.open(head, grads)

        all_dense: list[TokenStats] = []
        loss: Tensor | None = None
        has_gradient = False
        with gemms(input.device, plan.dtype):
            for chunk, chunk_tiles in zip(plan.chunks, plan.tiles, strict=True):
                x = layout.input_rows(flat, chunk.rows).to(plan.dtype)
                target = along(layout.target, chunk.rows)
                partial, stats = head_pass.statistics(x, target, chunk_tiles, plan.outputs)
                dense, share, gradients = self._differentiate(stats, chunk, with_gradient=grads is not None)
                all_dense.append(dense)
                has_gradient |= bool(gradients)
                if grads is not None and chunk_tiles:
                    cotangents = LogitsCotangents(
                        max=partial.max,
                        sum_exp=partial.sum_exp,
                        entropy_value=stats.entropy,
                        # Zero where the loss is constant on this chunk.
                        **(gradients or {"logps": torch.zeros_like(partial.max)}),
                    )
                    head_pass.backward(x, target, chunk_tiles, cotangents, grads, chunk.rows)
                if share is not None:
                    # The host checks while the device computes the products.
                    check_graph("the loss", share, [f for f in dense if f is not None])
                    # Add in float64, before rounding.
                    loss = share.detach().double() if loss is None else loss + share.detach()
        head_pass.release()
        if grads is not None and layout.n_valid and not has_gradient:
            raise ValueError(
                "the loss has no gradient: it does not depend on the statistics it was given, or is detached from them"
            )
        joined = layout.join(all_dense)
        if loss is None:
            loss = self.objective(joined, slice(None))
        loss = loss.to(accumulation_dtype(plan.dtype))
        return loss, joined, (None, None, None) if grads is None else grads.finish()

    def _differentiate(
        self, stats: TokenStats, chunk: Chunk, with_gradient: bool
    ) -> tuple[TokenStats, Tensor | None, dict[str, Tensor]]:
        """Return a chunk's dense statistics, its share of the loss, and the share's gradients.

        `NegativeLogLikelihood` has no shares.
        """
        layout = self.plan.layout
        dense = TokenStats(*(None if f is None else layout.dense(f, chunk) for f in stats))
        if isinstance(self.objective, NegativeLogLikelihood):
            return dense, None, self.objective.gradients(stats) if with_gradient else {}
        leaves = {name: f for name in DIFFERENTIABLE if with_gradient and (f := getattr(dense, name)) is not None}
        for leaf in leaves.values():
            leaf.requires_grad_()
        with torch.set_grad_enabled(with_gradient):
            loss = self.objective(dense, layout.index(chunk))
        gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if loss.requires_grad:
            # Switching to autograd's thread takes longer than these kernels.
            with torch.autograd.set_multithreading_enabled(False):
                gradients = torch.autograd.grad(
                    loss, list(leaves.values()), _one(loss.dtype, loss.device), allow_unused=True
                )
        for leaf in leaves.values():
            leaf.requires_grad_(False)
        reached = {name: g for name, g in zip(leaves, gradients, strict=True) if g is not None}
        undeclared = tuple(name for name in reached if name not in self.plan.differentiates)
        if undeclared:
            raise ValueError(
                f"the gradient of the loss reaches {', '.join(undeclared)}, which the loss does not declare: set "
                f"token_outputs = {undeclared}"
            )
        by_name = {name: layout.compact(g, chunk) for name, g in reached.items()}
        return dense, loss, by_name


@functools.lru_cache(maxsize=64)
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the gradient of a loss, 1. Cached, because autograd would launch a kernel for it."""
    return torch.ones((), dtype=dtype, device=device)


class Step(Protocol):
    """A loss, without the tensors that get gradients."""

    def run(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, needs: Needs
    ) -> tuple[Tensor, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """Return the loss, values per token, and the needed gradients."""
        ...


def _graph_is_retained() -> bool:
    """Return whether another backward may follow; True if torch cannot tell."""
    return _keeps_graph is None or _keeps_graph()


_keeps_graph: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


class GradientInForward(torch.autograd.Function):
    """`apply(input, weight, bias, step, torch.is_grad_enabled())`: the loss, then the statistics that are not None.

    Backward reads only the forward's gradients, so the caller may change tensors in between. Saved tensors are for
    `first_derivative`.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, step: Step, with_gradient: bool
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        needs = Needs(*(need and with_gradient for need in ctx.needs_input_grad[:3]))
        with isolated():
            loss, stats, ctx.gradients = step.run(input, weight, bias, needs)
        if any(needs):
            given = (input, weight, bias)
            ctx.shapes = [None if x is None else x.shape for x in given]
            ctx.dtypes = [None if x is None else x.dtype for x in given]
            ctx.save_for_backward(*given)
        present = tuple(f for f in stats if f is not None)
        ctx.mark_non_differentiable(*present)
        return loss, *present

    @staticmethod
    @first_derivative
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return (None,) * 5
        if ctx.gradients is None:
            _ = ctx.saved_tensors  # raises torch's error if the graph was freed
        gradients = ctx.gradients
        if _graph_is_retained():
            gradients = tuple(None if g is None else g.clone() for g in gradients)
        else:
            ctx.gradients = None
        scale_([g for g in gradients if g is not None], upstream)
        of = zip(gradients, ctx.shapes, ctx.dtypes, strict=True)
        scaled = (None if g is None else g.view(shape).to(dtype) for g, shape, dtype in of)
        return *scaled, None, None


def fused_loss(
    head: Head,
    input: Tensor,
    layout: Layout,
    objective: Objective,
    *,
    outputs: tuple[str, ...],
    options: LogitOptions,
    differentiates: tuple[str, ...] = DIFFERENTIABLE,
    whole_batch: bool = False,
    class_weight: Tensor | None = None,
) -> tuple[Tensor, TokenStats]:
    """Return a loss () of token statistics with its gradients, and the batch's detached dense statistics.

    Tensors are checked. The objective or the caller reads `outputs`, and the gradient may reach those in
    `differentiates`. With `whole_batch`, the objective needs all groups at once. `class_weight` (V,) weighs
    `mean_logits`.
    """
    unknown = [name for name in outputs if name not in TokenStats._fields]
    if unknown:
        raise ValueError(f"token_outputs must name fields of TokenStats {TokenStats._fields}, got {unknown}")
    plan = Plan.of(
        head,
        layout,
        compute_dtype(head, input),
        outputs=outputs,
        differentiates=differentiates,
        options=options,
        whole_batch=whole_batch,
        wide_tiles=has_wide_tiles(input.device),
        class_weight=class_weight,
    )
    step = _Step(plan, objective)
    loss, *values = GradientInForward.apply(input, head.weight, head.bias, step, torch.is_grad_enabled())
    present = [name for name in TokenStats._fields if name in outputs]
    return loss, TokenStats(**dict(zip(present, values, strict=True)))
