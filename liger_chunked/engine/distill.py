"""Gradient in forward for a student and its teacher: chunks of tokens, and blocks of them with the logits of both.

    for chunk in tokens:
        project the student
        for block in chunk:
            project the teacher                             logits of chunk and block are within the budget
            divergence and log-probability of every token   in one of three ways, see below
            loss, g = autograd over the objective, on these two numbers per token
            student logits -> gradient in place
        dX, dW

`ClosedForm` has kernels for it, `ByAutograd` differentiates any function of the logits, `TopK` needs no logits of the
teacher, only its largest log-probabilities. Unlike the statistics of one head, these see whole rows of the vocabulary:
the smallest chunk is one token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_chunked.engine.checks import check_graph, check_values, compute_dtype
from liger_chunked.engine.fused import GradientInForward
from liger_chunked.engine.passes import HeadGradients, HeadPass, Needs, gemms
from liger_chunked.engine.schedule import Chunk, Layout, Pack, Tile, along, budget_chunk, packs, pieces
from liger_chunked.kernels import divergence_grad_, divergence_stats, tail_grad_, tail_stats
from liger_chunked.types import Divergence, Head, LogitOptions, accumulation_dtype

# The loss as a function of a block's divergences and log-probabilities of targets (None without), each (tokens,): the
# block's share of a sum over tokens, a scalar.
Objective = Callable[[Tensor, Tensor | None], Tensor]
# (student logits, teacher logits), (n, V) each, to (n,).
DivergenceFunction = Callable[[Tensor, Tensor], Tensor]


class Teacher(NamedTuple):
    """A teacher: its head, over the student's vocabulary, its hidden states (B, T, H_teacher) or (N, H_teacher)."""

    head: Head
    input: Tensor
    options: LogitOptions  # its transform


class Measured(NamedTuple):
    """A block's divergences and log-probabilities (None without targets), and the way back.

    `backward(g_divergence, g_logps)` overwrites the student's logits with the gradient of the loss with respect to
    them; `g_logps` is None where the log-probabilities take no part.
    """

    divergence: Tensor
    logps: Tensor | None
    backward: Callable[[Tensor, Tensor | None], object]


# The least probability of a tail that the teacher's top-k leaves; TRL has the same.
LEAST_LEFT = 1e-7


class Route(Protocol):
    """How a block of logits (n, V), before the transform, becomes a divergence for each token."""

    def bytes_per_logit(self, student: torch.dtype, teacher: torch.dtype | None) -> int:
        """Bytes that one column of one token takes while its block is alive."""
        ...

    def measure(
        self, student: Tensor, teacher: Tensor | None, target: Tensor | None, rows: slice, with_gradient: bool
    ) -> Measured:
        """Measure the tokens `rows` of the batch's valid tokens."""
        ...


def transformed(logits: Tensor, options: LogitOptions) -> Tensor:
    """The transform of `LogitOptions` but for the temperature, differentiable."""
    z = logits * options.logit_scale if options.logit_scale != 1.0 else logits
    return z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)


def tempered(z: Tensor, options: LogitOptions) -> Tensor:
    """The rest of the transform."""
    return z if options.temperature == 1.0 else z / options.temperature


@dataclass(frozen=True)
class ClosedForm:
    """By kernels, in place: nothing of the size of the logits but the logits."""

    divergence: Divergence
    options: LogitOptions
    teacher_options: LogitOptions

    def bytes_per_logit(self, student: torch.dtype, teacher: torch.dtype | None) -> int:
        assert teacher is not None
        return student.itemsize + teacher.itemsize

    def measure(
        self, student: Tensor, teacher: Tensor | None, target: Tensor | None, rows: slice, with_gradient: bool
    ) -> Measured:
        assert teacher is not None
        how = (self.divergence, self.options, self.teacher_options)
        stats = divergence_stats(student, teacher, target, *how)

        def backward(g_divergence: Tensor, g_logps: Tensor | None) -> Tensor:
            return divergence_grad_(student, teacher, target, stats, g_divergence, g_logps, *how)

        return Measured(stats.divergence, stats.logps, backward)


@dataclass(frozen=True)
class ByAutograd:
    """By autograd over copies of the block's logits in the accumulation dtype."""

    function: DivergenceFunction
    options: LogitOptions
    teacher_options: LogitOptions

    def bytes_per_logit(self, student: torch.dtype, teacher: torch.dtype | None) -> int:
        assert teacher is not None
        # Copies of both, their transforms, a gradient through either loss, and two for what the function keeps.
        return student.itemsize + teacher.itemsize + 8 * accumulation_dtype(student).itemsize

    def measure(
        self, student: Tensor, teacher: Tensor | None, target: Tensor | None, rows: slice, with_gradient: bool
    ) -> Measured:
        assert teacher is not None
        wide = accumulation_dtype(student.dtype)
        leaf = student.to(wide, copy=True)
        t = tempered(transformed(teacher.to(wide), self.teacher_options), self.teacher_options)
        logps = None
        with torch.set_grad_enabled(with_gradient):
            leaf.requires_grad_(with_gradient)
            z = transformed(leaf, self.options)
            divergence = measured_by(self.function, tempered(z, self.options), t)
            if target is not None:
                logps = -F.cross_entropy(z, target, reduction="none")

        def backward(g_divergence: Tensor, g_logps: Tensor | None) -> Tensor:
            outputs = {divergence: g_divergence}
            if logps is not None and g_logps is not None:
                outputs[logps] = g_logps
            return student.copy_(_gradients(outputs, [leaf])[0])

        return Measured(divergence.detach(), None if logps is None else logps.detach(), backward)


@dataclass(frozen=True)
class TopK:
    """From the teacher's largest log-probabilities: a divergence over k + 1 bins, the last of them all that is left.

    The student's bins are its logits at the k tokens and the logsumexp of the others, which a sweep over logits with
    holes in the place of the k finds without cancellation. Everything else is autograd on k + 2 numbers a token.
    """

    function: DivergenceFunction
    options: LogitOptions
    logps: Tensor  # (n_valid, k) in nats, -inf for an entry that is not there
    ids: Tensor  # (n_valid, k) int64, distinct in a row but for entries that are not there

    def bytes_per_logit(self, student: torch.dtype, teacher: torch.dtype | None) -> int:
        return student.itemsize

    def measure(
        self, student: Tensor, teacher: Tensor | None, target: Tensor | None, rows: slice, with_gradient: bool
    ) -> Measured:
        wide = accumulation_dtype(student.dtype)
        columns = _Columns.of(self.ids[rows], self.logps[rows], target)
        raw = student.gather(1, columns.index).to(wide)
        student.scatter_(1, columns.index, -torch.inf)
        stats = tail_stats(student, self.options, hard=target is not None)
        hard = None if stats.hard_sum_exp is None else stats.hard_sum_exp.log()
        leaves = [raw, stats.log_sum] if hard is None else [raw, stats.log_sum, hard]
        leaves = [leaf.detach().requires_grad_(with_gradient) for leaf in leaves]
        with torch.set_grad_enabled(with_gradient):
            z, tail, hard_tail = columns.centred(leaves, stats.centre, self.options)
            student_bins = columns.bins(tempered(z, self.options), tail)
            teacher_bins = columns.teacher_bins(self.logps[rows].to(wide), student_bins)
            divergence = measured_by(self.function, student_bins, teacher_bins)
            logps = None if target is None else columns.log_prob_of_target(z, hard_tail)

        def backward(g_divergence: Tensor, g_logps: Tensor | None) -> Tensor:
            outputs = {divergence: g_divergence}
            if logps is not None and g_logps is not None:
                outputs[logps] = g_logps
            g_raw, g_log_sum, *g_hard = _gradients(outputs, leaves)
            dz = tail_grad_(student, stats, g_log_sum, g_hard[0] if g_hard else None, self.options)
            # Over the holes, formed before any rounding.
            return dz.scatter_(1, columns.index, columns.joined(g_raw).to(dz.dtype))

        return Measured(divergence.detach(), None if logps is None else logps.detach(), backward)


@dataclass(frozen=True)
class _Columns:
    """The columns of each row that stand on their own: the teacher's k tokens, then the target's where there is one.

    An entry that is not there repeats the row's first that is, and the target may repeat one of the k.
    """

    index: Tensor  # (n, k or k + 1)
    present: Tensor  # (n, k)
    first: Tensor  # (n, 1) the first entry that is there
    is_target: Tensor | None  # (n, k) entries that are there and are the target

    @classmethod
    def of(cls, ids: Tensor, logps: Tensor, target: Tensor | None) -> _Columns:
        present = logps > -torch.inf
        first = present.int().argmax(1, keepdim=True)
        index = torch.where(present, ids, ids.gather(1, first))
        if target is None:
            return cls(index, present, first, None)
        return cls(torch.cat([index, target[:, None]], 1), present, first, present & (index == target[:, None]))

    def centred(
        self, leaves: list[Tensor], tail_centre: Tensor, options: LogitOptions
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The columns' logits (n, k or k + 1) and the tail's logsumexps, at the temperature and at 1 (None without
        target), relative to the row's largest; the columns' before the temperature.
        """
        z = transformed(leaves[0], options)
        largest = torch.maximum(z.detach().amax(1), tail_centre)
        shift = torch.where(tail_centre == -torch.inf, 0.0, tail_centre - largest)
        tail = leaves[1] + tempered(shift, options)
        hard_tail = leaves[2] + shift if len(leaves) > 2 else tail
        return z - largest[:, None], tail, hard_tail if self.is_target is not None else None

    def bins(self, z: Tensor, tail: Tensor) -> Tensor:
        """(n, k + 1) logits of the student's bins, -inf at entries that are not there."""
        k = self.present.shape[1]
        if self.is_target is not None:
            # A target outside the k was taken from the tail, and goes back.
            tail = _log_add(tail, z[:, k].masked_fill(self.is_target.any(1), -torch.inf))
        return torch.cat([z[:, :k].masked_fill(~self.present, -torch.inf), tail[:, None]], 1)

    def teacher_bins(self, logps: Tensor, student_bins: Tensor) -> Tensor:
        """(n, k + 1) log-probabilities of the teacher's bins; where the k are the whole vocabulary, nothing is left.

        Elsewhere something is, though the k may add up to 1 in their own precision: a student's tail would be
        infinitely far from nothing.
        """
        left = torch.log1p(-logps.double().exp().sum(1, keepdim=True).clamp(max=1.0 - LEAST_LEFT)).to(logps.dtype)
        nothing = student_bins.detach()[:, -1:] == -torch.inf
        return torch.cat([logps, left.masked_fill(nothing, -torch.inf)], 1)

    def log_prob_of_target(self, z: Tensor, tail: Tensor | None) -> Tensor:
        """(n,) at the temperature that `z` and `tail` have."""
        assert tail is not None
        return z[:, -1] - self.bins(z, tail).logsumexp(1)

    def joined(self, gradient: Tensor) -> Tensor:
        """The gradient by each column, (n, k or k + 1), to one by each token: repetitions all get their sum."""
        k = self.present.shape[1]
        entries = gradient[:, :k]
        position = torch.arange(k, device=gradient.device)
        if self.is_target is None:
            return entries.gather(1, torch.where(self.present, position, self.first))
        of_target = gradient[:, k:]
        entries = entries + torch.where(self.is_target, of_target, 0.0)
        repeated = torch.where(self.is_target, entries, 0.0).sum(1, keepdim=True)
        of_target = torch.where(self.is_target.any(1, keepdim=True), repeated, of_target)
        entries = entries.gather(1, torch.where(self.present, position, self.first))
        return torch.cat([entries, of_target], 1)


def _log_add(a: Tensor, b: Tensor) -> Tensor:
    """`logaddexp` whose gradient is a number where both are -inf."""
    both = torch.stack([a, b])
    nothing = (both == -torch.inf).all(0)
    return torch.where(nothing, -torch.inf, torch.where(nothing, 0.0, both).logsumexp(0))


def _gradients(outputs: dict[Tensor, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Vector-Jacobian products, zero where nothing depends on a leaf."""
    connected = {x: g for x, g in outputs.items() if x.requires_grad}
    if not connected:
        return [torch.zeros_like(leaf) for leaf in leaves]
    with torch.autograd.set_multithreading_enabled(False):
        vjps = torch.autograd.grad(list(connected), leaves, list(connected.values()), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, vjps, strict=True)]


def measured_by(function: DivergenceFunction, student: Tensor, teacher: Tensor) -> Tensor:
    """What `function` makes of (n, V) logits, which must be (n,) and depend on the student's."""
    divergence = function(student, teacher)
    check_values("divergence", divergence, student.shape[:1], "tokens")
    if torch.is_grad_enabled() and student.requires_grad and not divergence.requires_grad:
        raise ValueError(
            "divergence has no gradient: it does not depend on the student's logits, or is detached from them"
        )
    check_graph("divergence", divergence, [student])
    return divergence


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
        teacher_pass = self._teacher_pass(plan.largest_block)
        grads = None
        if any(needs):
            grads = HeadGradients(layout, flat, Head(weight, bias), self.dtype, needs, plan.n_contributions)

        loss = torch.zeros((), dtype=torch.float64, device=input.device)  # shares are added before they are rounded
        divergences, log_probs = [], []
        with gemms(input.device, *(p.head.weight.dtype for p in (student_pass, teacher_pass) if p is not None)):
            for pack in plan.packs:
                x = layout.input_rows(flat, pack.rows).to(self.dtype)
                for share, divergence, logps in self._chunk(x, pack, student_pass, teacher_pass, grads):
                    loss += share
                    divergences.append(divergence)
                    log_probs.append(logps)
        student_pass.release()
        joined = torch.cat([x for x in log_probs if x is not None]) if self.has_target else None
        loss = loss.to(accumulation_dtype(self.dtype))
        return loss, (torch.cat(divergences), joined), (None, None, None) if grads is None else grads.finish()

    def _chunk(
        self, x: Tensor, pack: Pack, student_pass: HeadPass, teacher_pass: HeadPass | None, grads: HeadGradients | None
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """What `_measure` returns of each block of a chunk; its gradients go to `grads`."""
        logits = student_pass.project(x, _whole(x, student_pass))
        measured = []
        for block in self.plan.blocks(pack):
            measured.append(self._measure(along(logits, block.within), block.rows, teacher_pass, grads))
        if teacher_pass is not None and pack is self.plan.packs[-1]:
            teacher_pass.release()
        if grads is not None and x.shape[0]:
            student_pass.backward_from(x, logits, grads, pack.rows)
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
