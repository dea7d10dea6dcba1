"""Gradient in forward for a student and its teacher: chunks of tokens, and blocks of them with the logits of both.

    for chunk in tokens:
        project the student
        for block in chunk:
            project the teacher                             logits of chunk and block are within the budget
            divergence and log-probability of every token   in one of three ways, see routes.py
            student logits -> gradient in place
        dX, dW

Unlike the statistics of one head, these see whole rows of the vocabulary: the smallest chunk is one token. The loss is
a weighted sum of these two numbers per token, so that its gradient by them is known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.engine.checks import compute_dtype
from liger_chunked.engine.fused import GradientInForward
from liger_chunked.engine.passes import HeadGradients, HeadPass, Needs, gemms
from liger_chunked.engine.routes import Route
from liger_chunked.engine.schedule import (
    Chunk,
    Layout,
    Pack,
    Tile,
    along,
    budget_chunk,
    packs,
    pieces,
    warn_of_few_rows,
)
from liger_chunked.types import Head, LogitOptions, accumulation_dtype


class LossWeights(NamedTuple):
    """The loss: `divergence` times the sum of the tokens' divergences, plus `logps` times that of the targets'
    log-probabilities, each a number or a tensor (); None for log-probabilities that take no part.
    """

    divergence: float | Tensor
    logps: float | Tensor | None

    def loss(self, divergences: Tensor, logps: Tensor | None) -> Tensor:
        """Of all tokens, in float64."""
        loss = self.divergence * divergences.sum(dtype=torch.float64)
        if self.logps is None:
            return loss
        assert logps is not None
        return loss + self.logps * logps.sum(dtype=torch.float64)

    def gradients(self, n: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Of the loss by each of these numbers, of `n` tokens."""
        given = {name: weight for name, weight in self._asdict().items() if weight is not None}
        return {name: torch.empty(n, dtype=dtype, device=device).fill_(weight) for name, weight in given.items()}


class Teacher(NamedTuple):
    """A teacher: its head, over the student's vocabulary, its hidden states (B, T, H_teacher) or (N, H_teacher)."""

    head: Head
    input: Tensor
    options: LogitOptions  # its transform


class Block(NamedTuple):
    """Tokens of a pack: `rows` of the batch's valid tokens, which are `within` those of the pack."""

    rows: slice
    within: slice


@dataclass(frozen=True)
class DistillationPlan:
    """How a step is cut. `estimate_memory` makes one too, so nothing here reads a device or the values of a tensor."""

    layout: Layout
    chunk: Chunk
    packs: list[Pack]

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
        chunk = budget_chunk(options, head_shape, dtype, layout.n_valid, bytes_per_logit, wants_weight)
        return cls(layout, chunk, packs(layout, head_shape[0], chunk.tokens * head_shape[0]))

    @property
    def n_contributions(self) -> int:
        """How often each element of dW is added to."""
        return len(self.packs) if self.layout.n_valid else 0

    @property
    def largest_pack(self) -> int:
        """In tokens."""
        return max(pack.rows.stop - pack.rows.start for pack in self.packs)

    @property
    def largest_block(self) -> int:
        """In tokens."""
        return max(block.rows.stop - block.rows.start for pack in self.packs for block in self.blocks(pack))

    def blocks(self, pack: Pack) -> list[Block]:
        """The blocks of a pack: one of no tokens where it has none."""
        start, stop = pack.rows.start, pack.rows.stop
        cut = pieces(start, stop, self.chunk.block) or [pack.rows]
        return [Block(rows, slice(rows.start - start, rows.stop - start)) for rows in cut]


@dataclass(frozen=True)
class _Step:
    """Everything of a step but the tensors that gradients are for."""

    plan: DistillationPlan
    weights: LossWeights
    route: Route
    teacher: Teacher | None
    options: LogitOptions
    dtype: torch.dtype
    teacher_dtype: torch.dtype | None  # as it is at the call: autocast may be over when a second backward comes
    has_target: bool

    def run(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, needs: Needs
    ) -> tuple[Tensor, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """The loss, divergence and log-probability of every valid token, and the gradients that are needed."""
        plan, layout = self.plan, self.plan.layout
        flat = input.reshape(-1, input.shape[-1])
        head = Head(weight.to(self.dtype), None if bias is None else bias.to(self.dtype))
        student_pass = self._reserved(head, plan.largest_pack)
        teacher_pass: HeadPass | None = None
        grads: HeadGradients | None = None
        of_tokens: dict[str, Tensor] = {}
        found: list[tuple[Tensor, Tensor | None]] = []
        with gemms(input.device, *(dtype for dtype in (self.dtype, self.teacher_dtype) if dtype is not None)):
            for pack in plan.packs:
                x = layout.input_rows(flat, pack.rows).to(self.dtype)
                logits = student_pass.project(x, _whole(x, student_pass))
                if not found:
                    # A GPU is idle until its first product is enqueued. All of this can wait until then.
                    largest_block = plan.largest_block
                    teacher_pass = self._teacher_pass(largest_block)
                    if any(needs):
                        grads = HeadGradients(layout, flat, Head(weight, bias), self.dtype, needs, plan.n_contributions)
                        wide = accumulation_dtype(self.dtype)
                        of_tokens = self.weights.gradients(largest_block, wide, input.device)
                for rows, within in plan.blocks(pack):
                    found.append(self._measure(along(logits, within), rows, teacher_pass, grads, of_tokens))
                if teacher_pass is not None and pack is plan.packs[-1]:
                    teacher_pass.release()
                if grads is not None and x.shape[0]:
                    student_pass.backward_from(x, logits, grads, pack.rows)
                del logits  # a view of the buffer, which is given back before gradients are rounded
        student_pass.release()
        divergences, log_probs = map(_joined, zip(*found, strict=True))
        assert divergences is not None  # even an empty batch is a block
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
        """A block's divergences and log-probabilities; with `grads` its gradient overwrites its logits.

        `of_tokens` are the gradients of the loss by these numbers, of as many tokens or more.
        """
        measured = self.route.measure(
            student=logits,
            teacher=self._teacher_logits(teacher_pass, rows),
            target=self.plan.layout.target[rows] if self.has_target else None,
            rows=rows,
            with_gradient=grads is not None,
        )
        if grads is not None and logits.shape[0]:
            every = slice(0, logits.shape[0])
            # In the dtype of each number: a function's own may be another.
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
    """Of all blocks, where each has one."""
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
    """A loss of divergences and log-probabilities, with its gradients computed in the forward pass.

    Args:
        head: the student's weight (V, H) and bias (V,) or None, checked.
        input: (B, T, H) or (N, H), checked.
        teacher: its hidden states and head, cut to V rows; None where the route has its log-probabilities.
        layout: the tokens that count, each its own group, see `lay_out`.
        weights: the loss.
        route: how divergences are measured.
        options: the student's transform, and the budget of the logits of both.
        has_target: whether the layout's targets are tokens to take the log-probability of.

    Returns:
        The loss (), connected to input, weight and bias; detached divergence and log-probability (None without target)
        of every token that counts.
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
