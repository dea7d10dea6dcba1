"""Gradient in forward for a student and its teacher: chunks of tokens, and blocks of them with the logits of both.

    for chunk in tokens:
        project the student
        for block in chunk:
            project the teacher                             logits of chunk and block are within the budget
            divergence and log-probability of every token   in one of three ways, see routes.py
            loss, g = autograd over the objective, on these two numbers per token
            student logits -> gradient in place
        dX, dW

Unlike the statistics of one head, these see whole rows of the vocabulary: the smallest chunk is one token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.engine.checks import compute_dtype
from liger_chunked.engine.fused import GradientInForward
from liger_chunked.engine.passes import HeadGradients, HeadPass, Needs, gemms
from liger_chunked.engine.routes import Measured, Route
from liger_chunked.engine.schedule import Chunk, Layout, Pack, Tile, along, budget_chunk, packs, pieces
from liger_chunked.types import Head, LogitOptions, accumulation_dtype

# The loss as a function of a block's divergences and log-probabilities of targets (None without), each (tokens,): the
# block's share of a sum over tokens, a scalar.
Objective = Callable[[Tensor, Tensor | None], Tensor]


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
    """How a step is cut. `estimate_memory` makes one too: nothing here asks for a device, or a value."""

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
    objective: Objective
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
        loss: Tensor | None = None
        divergences, log_probs = [], []
        with gemms(input.device, *(dtype for dtype in (self.dtype, self.teacher_dtype) if dtype is not None)):
            for pack in plan.packs:
                x = layout.input_rows(flat, pack.rows).to(self.dtype)
                logits = student_pass.project(x, _whole(x, student_pass))
                if loss is None:
                    # Not before a GPU has the first product to work on: it waits for the host until then.
                    teacher_pass = self._teacher_pass(plan.largest_block)
                    if any(needs):
                        grads = HeadGradients(layout, flat, Head(weight, bias), self.dtype, needs, plan.n_contributions)
                for share, divergence, logps in self._chunk(logits, pack, teacher_pass, grads):
                    # Shares are added before they are rounded.
                    loss = share.double() if loss is None else loss + share
                    divergences.append(divergence)
                    log_probs.append(logps)
                if grads is not None and x.shape[0]:
                    student_pass.backward_from(x, logits, grads, pack.rows)
                del logits  # a view of the buffer, which is given back before gradients are rounded
        student_pass.release()
        assert loss is not None  # even an empty batch is a pack
        joined = torch.cat([x for x in log_probs if x is not None]) if self.has_target else None
        loss = loss.to(accumulation_dtype(self.dtype))
        return loss, (torch.cat(divergences), joined), (None, None, None) if grads is None else grads.finish()

    def _chunk(
        self, logits: Tensor, pack: Pack, teacher_pass: HeadPass | None, grads: HeadGradients | None
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """What `_measure` returns of each block of a chunk, whose gradients overwrite its `logits`."""
        measured = []
        for block in self.plan.blocks(pack):
            measured.append(self._measure(along(logits, block.within), block.rows, teacher_pass, grads))
        if teacher_pass is not None and pack is self.plan.packs[-1]:
            teacher_pass.release()
        return measured

    def _measure(
        self, logits: Tensor, rows: slice, teacher_pass: HeadPass | None, grads: HeadGradients | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """A block's share of the loss, its divergences and log-probabilities; with `grads` its gradient overwrites its
        logits.
        """
        measured = self.route.measure(
            student=logits,
            teacher=self._teacher_logits(teacher_pass, rows),
            target=self.plan.layout.target[rows] if self.has_target else None,
            rows=rows,
            with_gradient=grads is not None,
        )
        share, gradients = self._differentiate(measured)
        if grads is not None and logits.shape[0]:
            gradients = grads.normalize(gradients)
            measured.backward(gradients["divergence"], gradients.get("logps"))
        return share, measured.divergence, measured.logps

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

    def _differentiate(self, measured: Measured) -> tuple[Tensor, dict[str, Tensor]]:
        """A block's share of the loss, and its gradient by each number that the loss depends on."""
        divergence = measured.divergence.detach().requires_grad_()
        logps = None if measured.logps is None else measured.logps.detach().requires_grad_()
        with torch.enable_grad():
            loss = self.objective(divergence, logps)
        leaves = {"divergence": divergence} | ({} if logps is None else {"logps": logps})
        gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if loss.requires_grad:
            with torch.autograd.set_multithreading_enabled(False):
                gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        given = {name: g.contiguous() for name, g in zip(leaves, gradients, strict=True) if g is not None}
        return loss.detach(), {"divergence": torch.zeros_like(measured.divergence), **given}


def _whole(x: Tensor, head_pass: HeadPass) -> Tile:
    return Tile(slice(0, x.shape[0]), slice(0, head_pass.vocab_size))


def distillation_loss(
    head: Head,
    input: Tensor,
    teacher: Teacher | None,
    layout: Layout,
    objective: Objective,
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
        objective: the loss, see `Objective`.
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
        objective=objective,
        route=route,
        teacher=teacher,
        options=options,
        dtype=dtype,
        teacher_dtype=teacher_dtype,
        has_target=has_target,
    )
    loss, divergence, *logps = GradientInForward.apply(input, head.weight, head.bias, step, torch.is_grad_enabled())
    return loss, divergence, logps[0] if logps else None
