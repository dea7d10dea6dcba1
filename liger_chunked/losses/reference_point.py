"""The number that unpaired losses compare rewards with: a KL on mismatched sequences (KTO), or a running mean (BCO)."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from liger_chunked.engine import (
    SequenceSplit,
    check_projection,
    check_target,
    select_rows,
    token_stats,
    whole,
)
from liger_chunked.losses.base import StatsLoss
from liger_chunked.losses.formulas import sequence_logps
from liger_chunked.losses.reference_model import Reference, reference_logps
from liger_chunked.losses.settings import check_finite
from liger_chunked.types import LossHead, ProcessGroup

ReferencePoint = Literal["kl", "delta"]


class Mismatched(NamedTuple):
    kl_input: Tensor | None
    kl_target: Tensor | None
    ref_kl_input: Tensor | None
    ref_kl_logps: Tensor | None


def as_scalar(name: str, value: object, device: torch.device, lowest: float = -math.inf) -> Tensor:
    """Return a number or tensor as float64 (), at least `lowest`."""
    if isinstance(value, Tensor) and value.is_floating_point():
        if value.numel() != 1:
            raise ValueError(f"{name} must be a scalar, got a tensor of shape {tuple(value.shape)}")
        scalar = value.detach().to(device, torch.float64).reshape(())
        return scalar if lowest == -math.inf else scalar.clamp(min=lowest)
    if isinstance(value, Tensor) or isinstance(value, bool) or not isinstance(value, (int, float)):
        got = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a float or a floating-point scalar tensor, got {got}")
    check_finite(name, value)
    return torch.full((), max(value, lowest), dtype=torch.float64, device=device)


@torch.no_grad()
def mismatched_kl(
    loss: StatsLoss,
    head: LossHead,
    reference: Reference,
    mismatched: Mismatched,
    average_log_prob: bool,
    sequence_group: ProcessGroup | None,
) -> Tensor:
    """Return KTO's estimate of `KL(pi || pi_ref)`, at least 0, float64 ()."""
    kl_input, kl_target, ref_kl_input, ref_kl_logps = mismatched
    if kl_input is None or kl_target is None:
        given = [name for name, value in mismatched._asdict().items() if value is not None]
        raise ValueError(
            f"{type(loss).__name__} needs a reference point: pass kl, or kl_input and kl_target, "
            f"got {', '.join(given) or 'neither'}"
        )
    head = check_projection(head, kl_input, input_name="kl_input")
    check_target(kl_target, kl_input, "kl_target", "kl_input", head=head)
    if kl_input.ndim != 3:
        raise ValueError(f"kl_input must be (m, T, H), a completion a row, got {tuple(kl_input.shape)}")
    target = kl_target.long()
    split = SequenceSplit.of(sequence_group, head, kl_input, "kl_input")
    target_of_all, ignore_index = whole(target, split), loss.options.ignore_index
    rows = select_rows(target_of_all, "sequence", ignore_index, head.vocab_size, "kl_target", sequences=split)
    assert rows.groups is not None
    lengths = rows.groups.divisors[:, 0]
    ref_weight, ref_bias = (None, None) if ref_kl_input is None else (reference.weight, reference.bias)
    ref_logps = reference_logps(
        Reference(ref_kl_input, ref_weight, ref_bias, ref_kl_logps),
        loss,
        head,
        target,
        rows,
        split,
        required=True,
        infix="kl_",
    )
    assert ref_logps is not None
    ref_logps = ref_logps.squeeze(1)
    if ref_logps.ndim == 2:
        ref_logps = sequence_logps(ref_logps, lengths, average_log_prob)
    token_logps = token_stats(head, kl_input, rows, ("logps",), loss.options).logps
    assert token_logps is not None
    logratios = sequence_logps(token_logps[:, 0], lengths, average_log_prob) - ref_logps
    return (logratios.sum() / max(1, logratios.shape[0])).clamp(min=0)


def reference_point(
    kind: ReferencePoint | None,
    loss: StatsLoss,
    head: LossHead,
    reference: Reference,
    *,
    kl: float | Tensor | None,
    delta: float | Tensor | None,
    mismatched: Mismatched,
    average_log_prob: bool,
    sequence_group: ProcessGroup | None,
) -> Tensor:
    """Return `max(0, kl)`, `delta`, or zero."""
    estimate = [name for name, value in mismatched._asdict().items() if value is not None]
    given = {"kl": [*(["kl"] if kl is not None else []), *estimate], "delta": ["delta"] if delta is not None else []}
    refused = [name for other, names in given.items() if other != kind for name in names]
    if refused:
        asked = "none" if kind is None else kind
        raise ValueError(
            f"{type(loss).__name__} takes no {', '.join(refused)}: the reference point that it asks for is {asked}"
        )
    device = head.weight.device
    if kind is None:
        return torch.zeros((), dtype=torch.float64, device=device)
    if kind == "delta":
        if delta is None:
            raise ValueError(f"{type(loss).__name__} needs a reference point: pass delta")
        return as_scalar("delta", delta, device)
    if kl is None:
        return mismatched_kl(loss, head, reference, mismatched, average_log_prob, sequence_group)
    if estimate:
        raise ValueError(f"the reference point is given twice: as kl and as {', '.join(estimate)}")
    return as_scalar("kl", kl, device, lowest=0.0)
