"""Compute a distillation loss, with its gradients in the forward.

    for chunk in tokens:
        project the student
        for block in chunk:
            project the teacher             the budget holds chunk and block
            divergences, log-probabilities
            student logits -> gradient, in place
        dX, dW

A divergence needs whole rows of the vocabulary. The loss is a weighted sum of divergences and log-probabilities, so its
gradients with respect to them are known in advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.engine.batch import Chunk, Layout, along
from liger_chunked.engine.checks import compute_dtype
from liger_chunked.engine.divergences import Route
from liger_chunked.engine.gradients import HeadGradients, Needs
from liger_chunked.engine.head import HeadPass
from liger_chunked.engine.plan import ChunkSize, Tile, budget_chunk_size, chunks, pieces, warn_of_few_rows
from liger_chunked.engine.precision import gemms
from liger_chunked.engine.step import GradientInForward
from liger_chunked.types import Head, LogitOptions, accumulation_dtype


class LossWeights(NamedTuple):
    """The weights in `divergence * sum(divergences) + logps * sum(logps)`; a `logps` of None drops the second term."""

    divergence: float | Tensor
    logps: float | Tensor | None

    def loss(self, divergences: Tensor, logps: Tensor | None) -> Tensor:
        """Return the loss in float64."""
        loss = self.divergence * divergences.sum(dtype=torch.float64)
        if self.logps is None:
            return loss
        assert logps is not None
        return loss + self.logps * logps.sum(dtype=torch.float64)

    def gradients(self, n: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Return the gradients for `n` tokens' numbers."""
        given = {name: weight for name, weight in self._asdict().items() if weight is not None}
        return {name: torch.empty(n, dtype=dtype, device=device).fill_(weight) for name, weight in given.items()}


class Teacher(NamedTuple):
    """A teacher's head with V rows, and its hidden states (..., H_teacher)."""

    head: Head
    input: Tensor
    options: LogitOptions  # its logit transform


class Block(NamedTuple):
    """Tokens of a chunk: `rows` in the batch, `within` in the chunk."""

    rows: slice
    within: slice


@dataclass(frozen=True)
class DistillationPlan:
    """How a step is cut. It reads no device and no values, because `estimate_memory` makes one too."""

    layout: Layout
    size: ChunkSize
    chunks: list[Chunk]

    @classmethod
    def of(
        cls,
        head_shape: torch.Size,
        layout: Layout,
        dtype: torch.dtype,
        bytes_per_logit: int,
        options: LogitOptions,
        wants_weight: bool,
    ) -> DistillationPlan:
        warn_of_few_rows(options, head_shape[0], bytes_per_logit, layout.n_valid)
        size = budget_chunk_size(options, head_shape, dtype, layout.n_valid, bytes_per_logit, wants_weight)
        return cls(layout, size, chunks(layout, head_shape[0], size.tokens * head_shape[0]))

    @property
    def n_contributions(self) -> int:
        """Number of products added to each element of dW."""
        return len(self.chunks) if self.layout.n_valid else 0

    @property
    def largest_chunk(self) -> int:
        """Tokens of the largest chunk."""
        return max(chunk.rows.stop - chunk.rows.start for chunk in self.chunks)

    @property
    def largest_block(self) -> int:
        """Tokens of the largest block."""
        return max(block.rows.stop - block.rows.start for chunk in self.chunks for block in self.blocks(chunk))

    def blocks(self, chunk: Chunk) -> list[Block]:
        """Return a chunk's blocks; an empty chunk has one."""
        start, stop = chunk.rows.start, chunk.rows.stop
        cut = pieces(start, stop, self.size.block) or [chunk.rows]
        return [Block(rows, slice(rows.start - start, rows.stop - start)) for rows in cut]


@dataclass(frozen=True)
class _Step:
    """A step, without the tensors that get gradients."""

    plan: DistillationPlan
    weights: LossWeights
    route: Route
    teacher: Teacher | None
    options: LogitOptions
    dtype: torch.dtype
    teacher_dtype: torch.dtype | None  # the forward's: a second backward may run after autocast
    has_target: bool

    def run(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, needs: Needs
    ) -> tuple[Tensor, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """Return the loss, all tokens' divergences and log-probabilities, and the needed gradients."""
        plan, layout = self.plan, self.plan.layout
        flat = input.reshape(-1, input.shape[-1])
        head = Head(weight.to(self.dtype), None if bias is None else bias.to(self.dtype))
        student_pass = self._reserved(head, plan.largest_chunk)
        teacher_pass: HeadPass | None = None
        grads: HeadGradients | None = None
        of_tokens: dict[str, Tensor] = {}
        found: list[tuple[Tensor, Tensor | None]] = []
        with gemms(input.device, *(dtype for dtype in (self.dtype, self.teacher_dtype) if dtype is not None)):
            for chunk in plan.chunks:
                x = layout.input_rows(flat, chunk.rows).to(self.dtype)
                logits = student_pass.project(x, _whole(x, student_pass))
                if not found:
                    # Only now: the GPU is idle until its first product.
                    largest_block = plan.largest_block
                    teacher_pass = self._teacher_pass(largest_block)
                    if any(needs):
                        grads = HeadGradients(layout, flat, Head(weight, bias), self.dtype, needs, plan.n_contributions)
                        wide = accumulation_dtype(self.dtype)
                        of_tokens = self.weights.gradients(largest_block, wide, input.device)
                for rows, within in plan.blocks(chunk):
                    found.append(self._measure(along(logits, within), rows, teacher_pass, grads, of_tokens))
                if teacher_pass is not None and chunk is plan.chunks[-1]:
                    teacher_pass.release()
                if grads is not None and x.shape[0]:
                    student_pass.backward_from(x, logits, grads, chunk.rows)
                del logits  # a view would keep the buffer while gradients are rounded
        student_pass.release()
        divergences, log_probs = map(_joined, zip(*found, strict=True))
        assert divergences is not None  # an empty batch has one block
        loss = self.weights.loss(divergences, log_probs).to(accumulation_dtype(self.dtype))
        return loss, (divergences, log_probs), (None, None, None) if grads is None else grads.finish()

    def _measure(
        self,
        logits: Tensor,
        rows: slice,
        teacher_pass: HeadPass | None,
        grads: HeadGradients | None,
        of_tokens: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Return a block's numbers. With `grads`, overwrite its logits with their gradient."""
        measured = self.route.measure(
            student=logits,
            teacher=self._teacher_logits(teacher_pass, rows),
            target=self.plan.layout.target[rows] if self.has_target else None,
            rows=rows,
            with_gradient=grads is not None,
        )
        if grads is not None and logits.shape[0]:
            every = slice(0, logits.shape[0])
            # A user's divergence may return another dtype.
            given = {name: along(g, every).to(getattr(measured, name).dtype) for name, g in of_tokens.items()}
            gradients = grads.normalize(given)
            measured.backward(gradients["divergence"], gradients.get("logps"))
        return measured.divergence, measured.logps

    def _reserved(self, head: Head, rows: int) -> HeadPass:
        head_pass = HeadPass(head, self.options)
        head_pass.reserve(rows * head_pass.vocab_size)
        return head_pass

    def _teacher_pass(self, rows: int) -> HeadPass | None:
        if self.teacher is None:
            return None
        weight, bias = self.teacher.head
        dtype = self.teacher_dtype
        return self._reserved(Head(weight.to(dtype), None if bias is None else bias.to(dtype)), rows)

    def _teacher_logits(self, teacher_pass: HeadPass | None, rows: slice) -> Tensor | None:
        if self.teacher is None or teacher_pass is None:
            return None
        flat = self.teacher.input.reshape(-1, self.teacher.input.shape[-1])
        x = self.plan.layout.input_rows(flat, rows).to(teacher_pass.head.weight.dtype)
        return teacher_pass.project(x, _whole(x, teacher_pass))


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate the blocks' values, if any."""
    given = [x for x in parts if x is not None]
    if not given:
        return None
    return given[0] if len(given) == 1 else torch.cat(given)


def _whole(x: Tensor, head_pass: HeadPass) -> Tile:
    return Tile(slice(0, x.shape[0]), slice(0, head_pass.vocab_size))


def distillation_loss(
    head: Head,
    input: Tensor,
    teacher: Teacher | None,
    layout: Layout,
    weights: LossWeights,
    route: Route,
    options: LogitOptions,
    has_target: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the loss () with its gradients, and each token's detached divergence and log-probability, if any.

    Inputs are checked, and the teacher's head has V rows. `teacher` is None if `route` has its log-probabilities. The
    budget covers both models' logits.
    """
    dtype = compute_dtype(head, input)
    teacher_dtype = None if teacher is None else compute_dtype(teacher.head, teacher.input)
    per_logit = route.bytes_per_logit(dtype, teacher_dtype)
    step = _Step(
        plan=DistillationPlan.of(
            head.weight.shape,
            layout,
            dtype,
            per_logit,
            options,
            wants_weight=torch.is_grad_enabled() and head.weight.requires_grad,
        ),
        weights=weights,
        route=route,
        teacher=teacher,
        options=options,
        dtype=dtype,
        teacher_dtype=teacher_dtype,
        has_target=has_target,
    )
    loss, divergence, *logps = GradientInForward.apply(input, head.weight, head.bias, step, torch.is_grad_enabled())
    return loss, divergence, logps[0] if logps else None
