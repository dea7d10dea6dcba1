"""The reference of a preference or policy loss: log-probabilities that a caller gives, or those of hidden states."""

from __future__ import annotations

import warnings
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from liger_chunked.engine import Rows, Sequences, check_projection, stats_of_kept, token_stats, whole
from liger_chunked.engine.checks import host_may_sync
from liger_chunked.kept_ids import KeptIds
from liger_chunked.losses.base import SequenceLoss, StatsLoss
from liger_chunked.types import LOWEST_LOGP, Examples, LossHead, Pairs, Weight, accumulation_dtype

Record = TypeVar("Record", Pairs, Examples)


class Reference(NamedTuple):
    input: Tensor | None
    weight: Weight | None
    bias: Tensor | None
    logps: Tensor | None


def reference_logps(
    reference: Reference,
    loss: StatsLoss,
    head: LossHead,
    target: Tensor,
    rows: Rows,
    sequences: Sequences,
    *,
    required: bool | None,
    infix: str = "",
    kept: KeptIds | None = None,
    temperature: Tensor | None = None,
) -> Tensor | None:
    """Return the reference's dense log-probabilities, detached.

    They are per token, zero at ignored tokens, or per sequence like `ref_logps`; -inf is -1e18.

    Args:
        kept, temperature: of `stats_of_kept`, for a reference over the ids that a sampler kept.
    """
    ref_input, ref_weight, ref_bias, ref_logps = reference
    input_name, logps_name, target_name = f"ref_{infix}input", f"ref_{infix}logps", f"{infix}target"
    states = {input_name: ref_input, "ref_weight": ref_weight, "ref_bias": ref_bias}
    given = [name for name, value in states.items() if value is not None]
    if ref_logps is not None and given:
        raise ValueError(f"the reference is given twice: as {logps_name} and as {', '.join(given)}")
    if given and (ref_input is None or ref_weight is None):
        raise ValueError(
            f"a reference needs {input_name} and ref_weight (or {logps_name}), got only {', '.join(given)}"
        )
    if required is False and (given or ref_logps is not None):
        refused = ", ".join(given or [logps_name])
        raise ValueError(f"{type(loss).__name__} with use_ref_model=False takes no reference, got {refused}")
    if required and not given and ref_logps is None:
        raise ValueError(f"{type(loss).__name__} needs a reference: pass {input_name} and ref_weight, or {logps_name}")

    if ref_input is not None and ref_weight is not None:
        ref_head = check_projection(LossHead(ref_weight, ref_bias, head.shard), ref_input, "ref_", f"{infix}input")
        if (ref_input.shape[:-1] if head.shard is None else ref_head.token_shape(ref_input)) != target.shape:
            raise ValueError(
                f"{input_name} must be {(*target.shape, 'H_ref')}, as {target_name} {tuple(target.shape)} is, "
                f"got {tuple(ref_input.shape)}"
            )
        if ref_weight.shape[0] != head.weight.shape[0]:
            raise ValueError(
                f"ref_weight must have the vocabulary of weight, {head.weight.shape[0]} rows, "
                f"got {tuple(ref_weight.shape)}"
            )
        _check_device(input_name, ref_input, target_name, target)
        with torch.no_grad():
            if kept is None:
                return token_stats(ref_head, ref_input, rows, ("logps",), loss.options).logps
            logps = stats_of_kept(ref_head, ref_input, target.long(), kept, ("logps",), loss.options, temperature).logps
            assert logps is not None
            return whole(logps.view(target.shape), sequences).reshape(rows.dense_shape)
    if ref_logps is None:
        return None
    assert rows.mask is not None
    per_sequence = (rows.mask.shape[:-1].numel(),)
    if not isinstance(ref_logps, Tensor) or ref_logps.shape not in (target.shape, per_sequence):
        got = tuple(ref_logps.shape) if isinstance(ref_logps, Tensor) else type(ref_logps).__name__
        raise ValueError(
            f"{logps_name} must be {tuple(target.shape)}, one value a token, or {per_sequence}, "
            f"one a sequence, got {got}"
        )
    _check_device(logps_name, ref_logps, target_name, target)
    per_token = ref_logps.shape == target.shape
    dtype = accumulation_dtype(head.weight.dtype)
    if not per_token:
        dtype = torch.promote_types(dtype, ref_logps.dtype)
    ref_logps = ref_logps.detach().to(dtype)
    ref_logps = rows.arrange(whole(ref_logps, sequences) if per_token else ref_logps)
    # Padding may hold NaN.
    ref_logps = torch.where(rows.mask, ref_logps, 0.0) if per_token else ref_logps
    _warn_of_positive(logps_name, ref_logps, type(loss))
    return ref_logps.clamp(min=LOWEST_LOGP)


_POSITIVE = 0.01  # nats, of a batch; below, log-probabilities near 0 may be rounded
_CHECKED: set[type] = set()  # classes of losses whose `ref_logps` on an accelerator were looked at


def _warn_of_positive(name: str, ref_logps: Tensor, loss: type) -> None:
    """Warn of log-probabilities whose sum is above 0, which are likely losses: they have the other sign.

    The sum, and no error, because a margin may be added to some of them. On an accelerator, where the host waits for
    it, the first call of each class of losses alone is looked at.
    """
    if not ref_logps.numel() or not host_may_sync(ref_logps) or (ref_logps.device.type != "cpu" and loss in _CHECKED):
        return
    _CHECKED.add(loss)
    if float(ref_logps.sum()) > _POSITIVE:
        warnings.warn(
            f"{name} is above 0 on average, up to {float(ref_logps.max()):.3g}, and a log-probability is at most 0: "
            "pass log-probabilities, not losses (the negative ones) or probabilities",
            UserWarning,
            stacklevel=2,
        )


def without_reference(lengths: Tensor) -> Tensor:
    """Return the `ref_logps` of a call without a reference: zeros like `lengths`."""
    return torch.zeros((), dtype=torch.float64, device=lengths.device).expand(lengths.shape)


class _Unreferenced:
    """`Pairs` or `Examples` of a call without a reference, of which `loss` reads `ref_logps` only with a warning."""

    loss: SequenceLoss

    @property
    def ref_logps(self) -> Tensor:
        zeros: Tensor = vars(self)["ref_logps"]
        loss = self.loss
        if not vars(loss).get("_has_warned"):
            loss._has_warned = True
            _warn_reference_free(type(loss).__name__)
        return zeros


class _UnreferencedPairs(_Unreferenced, Pairs):
    pass


class _UnreferencedExamples(_Unreferenced, Examples):
    pass


def warning_reads(record: Record, loss: SequenceLoss) -> Record:
    """Return `Pairs` or `Examples` whose `ref_logps` and `logratios` warn, once for each loss, when they are read.

    For a call without a reference: a formula with one would take its log-ratios from plain log-probabilities. With
    `use_ref_model=False` that is intended.
    """
    if loss.use_ref_model is not None:
        return record
    kind = _UnreferencedPairs if isinstance(record, Pairs) else _UnreferencedExamples
    unreferenced = object.__new__(kind)
    vars(unreferenced).update(vars(record), loss=loss)
    return cast(Record, unreferenced)


def _warn_reference_free(name: str) -> None:
    warnings.warn(
        f"{name} got no reference and runs reference-free: its log-ratios are plain log-probabilities. Pass "
        f"ref_input and ref_weight, or ref_logps; if this is intended, use {name}(use_ref_model=False).",
        UserWarning,
        stacklevel=2,
    )


def _check_device(name: str, x: Tensor, target_name: str, target: Tensor) -> None:
    if x.device != target.device:
        raise ValueError(f"{name} is on {x.device}, {target_name} on {target.device}: expected one device")
