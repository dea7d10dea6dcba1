"""GOLD across tokenizers: the pieces of text that two tokenizations share, and their distance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_chunked.engine import linear_token_stats
from liger_chunked.integrations.transformers import HeadInput
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss, LigerFusedLinearULDLoss
from liger_chunked.types import Head, LogitOptions

# TRL's least probability of another token.
_LEAST = math.log(1e-8)


def is_served(uld: Any) -> bool:
    """Whether TRL's `ULDLoss` compares only sorted probabilities, and aligns tokens as we do."""
    needed = ("_align_by_byte_offsets", "_get_start_and_size_answers", "token_merge_strategy")
    return not uld.use_hybrid_loss and all(hasattr(uld, name) for name in needed)


@dataclass
class Side:
    """One model's tokens (B, T), and the parts of its pieces of text.

    A piece is the distribution at `rows` of the flat hidden states, times the probabilities of its other tokens. These
    are `other_ids` at `other_rows`, in the pieces `of_piece`.
    """

    labels: Tensor
    ids: Tensor
    offsets: Tensor | None

    def __post_init__(self) -> None:
        self.rows: list[int] = []
        self.other_rows: list[int] = []
        self.other_ids: list[int] = []
        self.of_piece: list[int] = []

    def add(self, sequence: int, start: int, group: list[int], bayesian: bool) -> None:
        first = sequence * self.ids.shape[1] + start - bayesian  # the row that predicts the token at `start`
        base, others = (group[-1], group[:-1]) if bayesian else (group[0], group[1:])
        self.other_rows += [first + k for k in others]
        self.other_ids += self.ids[sequence, start:][others].tolist()
        self.of_piece += [len(self.rows)] * len(others)
        self.rows.append(first + base)

    def span(self, sequence: int, start: int, size: int) -> list[list[int]]:
        assert self.offsets is not None
        return self.offsets[sequence, start : start + size].tolist()

    def gathered(
        self, head: Head, input: HeadInput, temperature: float, logits_budget: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the pieces' hidden states, and products of their other tokens' probabilities."""
        flat = input.hidden_states.reshape(-1, input.hidden_states.shape[-1])
        states = flat[torch.tensor(self.rows, dtype=torch.long, device=flat.device)]
        if not self.other_rows:
            return states, None
        logps = linear_token_stats(
            head.weight,
            flat[torch.tensor(self.other_rows, device=flat.device)],
            torch.tensor(self.other_ids, device=flat.device),
            head.bias,
            softcap=input.options.softcap,
            logit_scale=input.options.logit_scale,
            temperature=temperature,
            logits_budget=logits_budget,
        ).logps
        assert logps is not None
        of_piece = torch.tensor(self.of_piece, device=flat.device)
        return states, logps.new_zeros(len(self.rows)).index_add(0, of_piece, logps.clamp(min=_LEAST)).exp()


class Aligned(NamedTuple):
    student: Side
    teacher: Side
    weights: list[float]  # one over (sequences * pieces of the sequence)


def align(uld: Any, student: Side, teacher: Side) -> Aligned:
    bayesian = uld.token_merge_strategy == "bayesian"
    sizes = [uld._get_start_and_size_answers(side.labels) for side in (student, teacher)]
    weights: list[float] = []
    batch = student.ids.shape[0]
    for i in range(batch):
        (s_start, s_size), (t_start, t_size) = ((starts[i], counts[i]) for starts, counts in sizes)
        s_size, t_size = s_size - bool(uld.skip_student_eos), t_size - bool(uld.skip_teacher_eos)
        if s_size <= 0 or t_size <= 0:
            continue
        pairs = _pairs(uld, student, teacher, i, (s_start, s_size), (t_start, t_size))
        if bayesian and (s_start == 0 or t_start == 0):  # nothing predicts the first token
            if not pairs:
                continue
            s_drop, t_drop = (len(group) for group in pairs[0])
            s_start, s_size, t_start, t_size = s_start + s_drop, s_size - s_drop, t_start + t_drop, t_size - t_drop
            if s_size <= 0 or t_size <= 0:
                continue
            pairs = _pairs(uld, student, teacher, i, (s_start, s_size), (t_start, t_size))
        pairs = [(s, t) for s, t in pairs if s and t]
        for s_group, t_group in pairs:
            student.add(i, s_start, s_group, bayesian)
            teacher.add(i, t_start, t_group, bayesian)
        weights += [1 / (batch * len(pairs))] * len(pairs)
    return Aligned(student, teacher, weights)


def _pairs(
    uld: Any, student: Side, teacher: Side, i: int, of_student: tuple[int, int], of_teacher: tuple[int, int]
) -> list[tuple[list[int], list[int]]]:
    if not uld.use_extended_uld:
        return [([k], [k]) for k in range(min(of_student[1], of_teacher[1]))]
    groups = uld._align_by_byte_offsets(student.span(i, *of_student), teacher.span(i, *of_teacher))
    return list(zip(*groups, strict=True))


def distance(
    uld: Any,
    aligned: Aligned,
    student: tuple[Head, HeadInput],
    teacher: tuple[Head, HeadInput],
    logits_budget: int | None,
) -> Tensor:
    (head, input), (teacher_head, teacher_input) = student, teacher
    loss = input.hidden_states.sum() * 0.0
    if uld.distillation_weight:
        temperatures = uld.student_temperature, uld.teacher_temperature
        states, scale = aligned.student.gathered(head, input, temperatures[0], logits_budget)
        with torch.no_grad():
            of_teacher = aligned.teacher.gathered(teacher_head, teacher_input, temperatures[1], logits_budget)
        options, teacher_options = (
            LogitOptions(softcap=x.options.softcap, logit_scale=x.options.logit_scale, temperature=t)
            for x, t in zip((input, teacher_input), temperatures, strict=True)
        )
        sorted_distance = LigerFusedLinearULDLoss(
            softcap=options.softcap,
            logit_scale=options.logit_scale,
            temperature=options.temperature,
            logits_budget=logits_budget,
            teacher_options=teacher_options,
        )
        weights = torch.tensor(aligned.weights, dtype=torch.float64, device=states.device)
        value, _ = sorted_distance(
            head.weight,
            states,
            teacher_head.weight,
            of_teacher[0].to(states.device),
            head.bias,
            teacher_head.bias,
            scale=weights if scale is None else weights * scale,
            teacher_scale=weights if of_teacher[1] is None else weights * of_teacher[1],
            num_items=1,
        )
        loss = loss + uld.distillation_weight * value
    if uld.crossentropy_weight > 0:
        cross_entropy = LigerFusedLinearCrossEntropyLoss(
            softcap=input.options.softcap, logit_scale=input.options.logit_scale, logits_budget=logits_budget
        )
        loss = loss + uld.crossentropy_weight * cross_entropy(head.weight, input.hidden_states, input.target, head.bias)
    return loss
