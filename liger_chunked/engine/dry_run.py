"""Predict a step's memory with a dry run on meta tensors.

It allocates and frees in the step's order, and calls the step's own plan, layout, pass and gradients, which launch
nothing on meta tensors.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_chunked.engine.batch import Layout, along
from liger_chunked.engine.distillation import DistillationPlan
from liger_chunked.engine.divergences import ByAutograd, Route
from liger_chunked.engine.epilogue import EpiloguePass
from liger_chunked.engine.gradients import HeadGradients, Needs
from liger_chunked.engine.head import HeadPass
from liger_chunked.engine.plan import Tile, budget_elements, largest, row_blocks, tiles, warn_of_few_rows
from liger_chunked.engine.step import Plan
from liger_chunked.kernels import LogitsCotangents, PartialStats
from liger_chunked.types import Head, LogitOptions, MemoryEstimate

Part = Literal["logits", "weight_grad", "input_grad", "hidden", "other"]

# float32 numbers per position: dense statistics and their gradients.
_NUMBERS = 8


class Ledger(TorchDispatchMode):
    """Counts bytes of tensors created under it, by part; `most` is the estimate at their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.most = MemoryEstimate()
        self._alive = dataclasses.asdict(self.most)
        self._part: Part = "other"
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Count what the block creates as `name`."""
        saved, self._part = self._part, name
        try:
            yield
        finally:
            self._part = saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Inputs and the memory of views existed before.
        self._known.update(x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage() not in self._known:
                self._book(x.untyped_storage())
        return result

    def _book(self, storage: torch.UntypedStorage) -> None:
        self._known.add(storage)
        self._alive[self._part] += storage.nbytes()
        weakref.finalize(storage, self._free, self._part, storage.nbytes())
        moment = MemoryEstimate(**self._alive)
        if moment.peak > self.most.peak:
            self.most = moment

    def _free(self, part: Part, n_bytes: int) -> None:
        self._alive[part] -= n_bytes


class Projection(NamedTuple):
    """A head, hidden states (N, H), the products' dtype, and the needed gradients."""

    head: Head
    input: Tensor
    dtype: torch.dtype
    needs: Needs

    def computed_head(self) -> Head:
        """Return the head in the dtype of its products."""
        weight, bias = self.head
        return Head(weight.to(self.dtype), None if bias is None else bias.to(self.dtype))

    def open(self, ledger: Ledger, options: LogitOptions, elements: int) -> HeadPass:
        """Return a `HeadPass` with its buffer."""
        head_pass = HeadPass(self.computed_head(), options)
        with ledger.part("logits"):
            head_pass.reserve(elements)
        return head_pass

    def rows(self, ledger: Ledger, layout: Layout, rows: slice) -> Tensor:
        with ledger.part("hidden"):
            return layout.input_rows(self.input, rows).to(self.dtype)


class _Gradients:
    """`HeadGradients` that counts input and head gradients apart."""

    def __init__(self, ledger: Ledger, projection: Projection, layout: Layout, n_contributions: int) -> None:
        self._ledger = ledger
        self._given = (projection.input, *projection.head)
        head, input, dtype, needs = projection
        with ledger.part("input_grad"):
            needs_input = needs._replace(weight=False, bias=False)
            self._input = HeadGradients(layout, input, head, dtype, needs_input, n_contributions)
        with ledger.part("weight_grad"):
            needs_head = needs._replace(input=False)
            self._head = HeadGradients(layout, input, head, dtype, needs_head, n_contributions)

    @property
    def accumulates(self) -> bool:
        return self._head.accumulates

    def normalize(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._head.normalize(gradients)

    def open_input(self, x: Tensor, chunk_rows: slice, one_slice: bool) -> Tensor | None:
        with self._ledger.part("input_grad"):
            return self._input.open_input(x, chunk_rows, one_slice)

    def open_weight(self) -> bool:
        with self._ledger.part("weight_grad"):
            return self._head.open_weight()

    def add(self, vocab: slice, dz: Tensor, x: Tensor, first: bool) -> None:
        with self._ledger.part("weight_grad"):
            self._head.add(vocab, dz, x, first)

    def add_exponentials(
        self, exponentials: Tensor, scaled: Tensor, target: Tensor, target_scale: Tensor, x: Tensor
    ) -> None:
        with self._ledger.part("weight_grad"):
            self._head.add_exponentials(exponentials, scaled, target, target_scale, x)

    def close_chunk(self, dx: Tensor | None, chunk_rows: slice) -> None:
        with self._ledger.part("input_grad"):
            self._input.close_chunk(dx, chunk_rows)

    def finish(self) -> tuple[Tensor | None, ...]:
        with self._ledger.part("input_grad"):
            of_input = self._input.finish()
        with self._ledger.part("weight_grad"):
            of_head = self._head.finish()
        return of_input[0], *of_head[1:]

    def hand_over(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Cast the gradients as backward does: all before any is freed."""
        scaled = []
        parts: tuple[Part, ...] = ("input_grad", "weight_grad", "weight_grad")
        for part, gradient, x in zip(parts, gradients, self._given, strict=True):
            with self._ledger.part(part):
                scaled.append(None if gradient is None or x is None else gradient.to(x.dtype))


def _numbers(layout: Layout) -> Tensor:
    return torch.empty(layout.mask.numel(), _NUMBERS, dtype=torch.float32, device="meta")


def _backward(
    head_pass: HeadPass | EpiloguePass,
    x: Tensor,
    target: Tensor,
    cut: list[Tile],
    partial: PartialStats,
    grads: _Gradients,
    chunk_rows: slice,
) -> None:
    """Run a chunk's backward from gradients of logps; those of other statistics take as much memory."""
    cotangents = LogitsCotangents(max=partial.max, sum_exp=partial.sum_exp, logps=torch.empty_like(partial.max))
    head_pass.backward(x, target, cut, cotangents, grads, chunk_rows)


def rehearse_fused(ledger: Ledger, projection: Projection, plan: Plan) -> None:
    """Dry run of `fused_loss` with its backward."""
    grads, layout = None, plan.layout
    if any(projection.needs):
        grads = _Gradients(ledger, projection, layout, plan.n_contributions)
    head = projection.computed_head()
    with ledger.part("logits"):
        head_pass = plan.open(head, grads)
    all_stats = []
    for chunk, chunk_tiles in zip(plan.chunks, plan.tiles, strict=True):
        x = projection.rows(ledger, layout, chunk.rows)
        target = along(layout.target, chunk.rows)
        partial, stats = head_pass.statistics(x, target, chunk_tiles, plan.outputs)
        all_stats.append(stats)
        if grads is not None and chunk_tiles:
            _backward(head_pass, x, target, chunk_tiles, partial, grads, chunk.rows)
    head_pass.release()
    if grads is not None:
        gradients = grads.finish()
        del x, head, head_pass, partial
        grads.hand_over(gradients)


def rehearse_stats(ledger: Ledger, projection: Projection, layout: Layout, options: LogitOptions) -> None:
    """Dry run of `token_stats` with its backward, if needed."""
    elements = budget_elements(options, projection.head.weight.shape, projection.dtype)
    warn_of_few_rows(options, projection.head.weight.shape[0], projection.dtype.itemsize, layout.n_valid)
    cut = tiles(layout.n_valid, projection.head.weight.shape[0], elements)
    numbers = _numbers(layout)
    head_pass = projection.open(ledger, options, largest(cut))
    every = slice(0, layout.n_valid)
    partial, _ = head_pass.statistics(projection.rows(ledger, layout, every), layout.target, cut, ("logps",))
    if any(projection.needs):
        grads = _Gradients(ledger, projection, layout, row_blocks(cut))
        if cut:
            x = projection.rows(ledger, layout, every)
            _backward(head_pass, x, layout.target, cut, partial, grads, every)
            del x
        head_pass.release()
        del numbers, partial
        grads.hand_over(grads.finish())


def rehearse_distillation(
    ledger: Ledger,
    projection: Projection,
    teacher: Projection | None,
    layout: Layout,
    options: LogitOptions,
    route: Route,
    has_target: bool,
) -> None:
    """Dry run of `distillation_loss` with its backward."""
    vocab_size = projection.head.weight.shape[0]
    per_logit = route.bytes_per_logit(projection.dtype, None if teacher is None else teacher.dtype)
    plan = DistillationPlan.of(
        projection.head.weight.shape, layout, projection.dtype, per_logit, options, projection.needs.weight
    )
    numbers = _numbers(layout)
    student_pass = projection.open(ledger, options, plan.largest_chunk * vocab_size)
    teacher_pass = None if teacher is None else teacher.open(ledger, options, plan.largest_block * vocab_size)
    grads = None
    if any(projection.needs):
        grads = _Gradients(ledger, projection, layout, plan.n_contributions)
    for chunk in plan.chunks:
        x = projection.rows(ledger, layout, chunk.rows)
        logits = student_pass.project(x, Tile(slice(0, x.shape[0]), slice(0, vocab_size)))
        for rows, within in plan.blocks(chunk):
            of_both = [along(logits, within)]
            if teacher is not None and teacher_pass is not None:
                states = teacher.rows(ledger, layout, rows)
                of_both.append(teacher_pass.project(states, Tile(slice(0, states.shape[0]), slice(0, vocab_size))))
                del states
            target = layout.target[rows] if has_target else None
            _measure(route, of_both, target, rows, with_gradient=grads is not None)
            del of_both
        if teacher_pass is not None and chunk is plan.chunks[-1]:
            teacher_pass.release()
        if grads is not None and layout.n_valid:
            student_pass.backward_from(x, logits, grads, chunk.rows)
        del logits
    student_pass.release()
    if grads is not None:
        gradients = grads.finish()
        del x, student_pass, teacher_pass, numbers
        grads.hand_over(gradients)


def _measure(route: Route, logits: list[Tensor], target: Tensor | None, rows: slice, with_gradient: bool) -> None:
    if not isinstance(route, ByAutograd):
        # The kernels allocate nothing of size V. The torch path, which runs here, would: give it one column.
        logits = [z[:, :1] for z in logits]
    teacher = logits[1] if len(logits) > 1 else None
    measured = route.measure(logits[0], teacher, target, rows, with_gradient)
    if with_gradient:
        g_logps = None if measured.logps is None else torch.empty_like(measured.logps)
        measured.backward(torch.empty_like(measured.divergence), g_logps)
