"""The base of losses of labelled sequences, good or bad: it owns sums, the reference, reference points and metrics.

A subclass has the loss of a sequence alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from liger_chunked.calls import entry_point, typed_like
from liger_chunked.engine import (
    Group,
    Objective,
    Rows,
    along,
    check_projection,
    check_target,
    check_values,
    count,
    host_may_sync,
    mapped,
    select_rows,
    sequences_of,
    whole,
)
from liger_chunked.losses.base import SequenceLoss
from liger_chunked.losses.formulas import sequence_logps, share_of_mean
from liger_chunked.losses.reference_model import Reference, reference_logps, warning_reads, without_reference
from liger_chunked.losses.reference_point import Mismatched, ReferencePoint, reference_point
from liger_chunked.losses.settings import check_each, check_example_weights, check_finite
from liger_chunked.types import (
    DeclaredStats,
    Examples,
    LogitOptions,
    LogitOptionsDict,
    LossHead,
    ProcessGroup,
    TokenStats,
    UnpairedPreferenceMetrics,
    VocabShard,
    Weight,
)


@dataclass(frozen=True)
class _Batch:
    mask: Tensor
    lengths: Tensor  # at least 1
    tokens: Tensor  # may be 0
    desirable: Tensor
    has_reference: bool  # whether the call has a reference
    ref_logps: Tensor  # zeros without one
    weights: Tensor | None
    reference_point: Tensor
    average_log_prob: bool
    sides: Tensor  # (2, n) `desirable` and its opposite
    counts: Tensor  # (2,) of `sides`

    def logps(self, stats: TokenStats, index: slice | Tensor) -> Tensor:
        assert stats.logps is not None
        return sequence_logps(stats.logps.squeeze(1), along(self.lengths, index), self.average_log_prob)

    def examples(self, logps: Tensor, stats: TokenStats, index: slice | Tensor) -> Examples:
        stats = mapped(lambda x: x.squeeze(1), stats)
        return Examples(
            logps=logps,
            ref_logps=along(self.ref_logps, index),
            desirable=along(self.desirable, index),
            lengths=along(self.lengths, index),
            reference_point=self.reference_point,
            mask=along(self.mask, index),
            token_stats=DeclaredStats(*stats),
            batch_size=self.mask.shape[0],
            batch_counts=self.counts.clamp(min=1),
        )


class LigerFusedLinearUnpairedPreferenceBase(SequenceLoss, ABC):
    """Mean of a subclass's `preference_loss` over sequences; see `docs/writing-a-loss.md`.

    Sequences without valid tokens add 0, but count in the mean.

    Args:
        beta: scale of the rewards `beta * (logps - ref_logps)`, not negative.
        average_log_prob: log-probabilities of sequences are means over their valid tokens instead of sums.
        use_ref_model: True requires a reference in each call, False refuses one. None allows one, and warns once
            if `preference_loss` reads `ref_logps` or `logratios` in a call without one.
        **options: fields of `LogitOptions`: `ignore_index` (-100) marks targets to skip; `softcap`, `logit_scale` and
            `temperature` transform the logits; `logits_budget` is the most bytes of logits in memory, such as "512MiB"
            (None: automatic); `logits_dtype=torch.float32` keeps the float32 sums of 16-bit products (None: rounded).
    """

    reference_point: ReferencePoint | None = None
    _group: ClassVar[Group] = "sequence"

    def __init__(
        self,
        *,
        beta: float = 0.1,
        average_log_prob: bool = False,
        use_ref_model: bool | None = None,
        **options: Unpack[LogitOptionsDict],
    ) -> None:
        super().__init__()
        check_finite("beta", beta, minimum=0)
        self.beta = beta
        self.average_log_prob = average_log_prob
        self.use_ref_model = use_ref_model
        self.options = LogitOptions.of(type(self), options)

    @abstractmethod
    def preference_loss(self, examples: Examples) -> Tensor:
        """Return the losses (n,) of some sequences."""

    @entry_point
    def forward(
        self,
        weight: Weight,
        input: Tensor,
        target: Tensor,
        preference_labels: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Weight | None = None,
        ref_bias: Tensor | None = None,
        *,
        ref_logps: Tensor | None = None,
        kl: float | Tensor | None = None,
        kl_input: Tensor | None = None,
        kl_target: Tensor | None = None,
        ref_kl_input: Tensor | None = None,
        ref_kl_logps: Tensor | None = None,
        delta: float | Tensor | None = None,
        example_weights: Tensor | None = None,
        vocab_shard: VocabShard | None = None,
        cu_seqlens: Tensor | None = None,
        sequence_group: ProcessGroup | None = None,
    ) -> tuple[Tensor, UnpairedPreferenceMetrics]:
        """Return loss and metrics.

        Args:
            weight: (V, H), the head's matrix, such as `lm_head.weight`, or an `AdaptedWeight`.
            input: (n, T, H), hidden states of n sequences in the dtype of `weight`, or in any under autocast.
            target: (n, T), integer ids of the tokens that `input` predicts (shift labels, see `shifted`), or
                `ignore_index` at prompts and padding.
            preference_labels: (n,), bool or integers: 1 if the sequence is desirable, else 0.
            bias: (V,) or None.
            ref_input, ref_weight, ref_bias: (n, T, H_ref), (V, H_ref) and (V,), the reference's. Without gradient.
                None: no bias, or no reference, which a loss that compares with one warns about or refuses
                (`use_ref_model`).
            ref_logps: instead, the reference's log-probabilities in nats, (n, T) or (n,) like `Examples.logps`. None:
                computed from `ref_input`, if that is given.
            kl: estimate of `KL(policy || reference)` in nats, a number or (), clamped at zero; for losses with this
                reference point. None: estimated from `kl_input` and `kl_target`.
            kl_input, kl_target: instead of `kl`, (m, T', H) and (m, T'), padded: this rank's completions of other
                prompts, or with `sequence_group` its positions. Cost one matrix product, without gradient. None: `kl`
                is given, or the loss has another reference point.
            ref_kl_input, ref_kl_logps: their reference's hidden states (m, T', H_ref), or log-probabilities (m, T') or
                (m,) in nats. None: the other one is given.
            delta: a number or (), in units of rewards; required by losses with this reference point, and None for
                others.
            example_weights: (n,), floating-point factors of sequences; the mean divides by n. None: 1.
            vocab_shard: this rank's rows of `weight` and `bias`, if ranks split the vocabulary (`docs/distributed.md`).
                None: this rank has the whole vocabulary.
            cu_seqlens: (n + 1,), int32 or int64, for packed sequences without padding: the first row of each sequence,
                then N. Tensors of tokens are then (N, ...). None: the batch is padded.
            sequence_group: the ranks that split the sequences (`docs/distributed.md`); each passes its positions. Loss
                and metrics are those of whole sequences. None: this rank has whole sequences.

        Returns:
            (loss, metrics): the loss () in nats, float32, or float64 for float64 inputs, and
            `UnpairedPreferenceMetrics`.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: shapes, devices, target ids or options do not fit. The message says what was expected and found.
        """
        head = check_projection(LossHead(weight, bias, vocab_shard), input)
        check_target(target, input, head=head)
        sequences = sequences_of(head, input, cu_seqlens, sequence_group, "(n, T, H), a sequence a row")
        n = count(input, sequences)
        preference_labels = _labels(preference_labels, n, input)
        if example_weights is not None:
            check_example_weights(example_weights, n, input, "sequence")
        target, ignore_index = target.long(), self.options.ignore_index
        whole_target = whole(target, sequences, ignore_index)
        rows = select_rows(whole_target, self._group, ignore_index, head.vocab_size, sequences=sequences)
        reference = Reference(ref_input, ref_weight, ref_bias, ref_logps)
        point = reference_point(
            self.reference_point,
            self,
            head,
            reference,
            kl=kl,
            delta=delta,
            mismatched=Mismatched(kl_input, kl_target, ref_kl_input, ref_kl_logps),
            average_log_prob=self.average_log_prob,
            sequence_group=sequence_group,
        )
        logps = reference_logps(reference, self, head, target, rows, sequences, required=self.use_ref_model)
        batch = self._batch(rows, preference_labels, example_weights, point, logps)
        assert rows.groups is not None
        objective = _MeanOverExamples(self, batch, max(1, n), some_are_empty=not rows.groups.shortest)
        loss, stats = self._fuse(head, input, rows, objective)
        return loss, self._metrics(batch, stats)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def _batch(
        self,
        rows: Rows,
        desirable: Tensor,
        weights: Tensor | None,
        reference_point: Tensor,
        ref_logps: Tensor | None,
    ) -> _Batch:
        groups, mask = rows.groups, rows.mask
        assert groups is not None and mask is not None
        tokens = groups.lengths.squeeze(1)
        sides = torch.stack([desirable, ~desirable])
        lengths = groups.divisors.squeeze(1)
        has_reference = ref_logps is not None
        if ref_logps is None:
            ref_logps = without_reference(lengths)
        else:
            ref_logps = ref_logps.squeeze(1)
            if ref_logps.ndim == 2:
                ref_logps = sequence_logps(ref_logps, lengths, self.average_log_prob)
        return _Batch(
            mask=mask.squeeze(1),
            lengths=lengths,
            tokens=tokens,
            desirable=desirable,
            sides=sides,
            counts=sides.sum(1),
            has_reference=has_reference,
            ref_logps=ref_logps,
            weights=None if weights is None else weights.detach().to(torch.float64),
            reference_point=reference_point,
            average_log_prob=self.average_log_prob,
        )

    @torch.no_grad()
    def _metrics(self, batch: _Batch, stats: TokenStats) -> UnpairedPreferenceMetrics:
        assert stats.mean_logits is not None
        of_sequences = batch.logps(stats, slice(None))

        def by_side(values: Tensor) -> Tensor:
            return torch.where(batch.sides, values, 0).sum(1)

        counts, tokens = batch.counts, by_side(batch.tokens)
        logps = by_side(of_sequences) / counts.clamp(min=1)
        rewards = by_side(self.beta * (of_sequences - batch.ref_logps)) / counts.clamp(min=1)
        logits_mean = by_side(stats.mean_logits.sum((1, 2))) / tokens.clamp(min=1)
        dtype = stats.mean_logits.dtype
        logps, rewards = logps.to(dtype), rewards.to(dtype)
        return UnpairedPreferenceMetrics(
            chosen_logps=logps[0],
            rejected_logps=logps[1],
            chosen_logits_mean=logits_mean[0],
            rejected_logits_mean=logits_mean[1],
            chosen_rewards=rewards[0],
            rejected_rewards=rewards[1],
            reference_point=batch.reference_point.to(dtype, copy=True),  # may be the caller's
            chosen_count=counts[0],
            rejected_count=counts[1],
            chosen_tokens=tokens[0],
            rejected_tokens=tokens[1],
        )


@dataclass(frozen=True, eq=False)
class _MeanOverExamples(Objective):
    """The mean of a loss's `preference_loss`."""

    loss_module: LigerFusedLinearUnpairedPreferenceBase
    batch: _Batch
    n: int
    some_are_empty: bool

    def loss(self, values: TokenStats, index: slice | Tensor) -> Tensor:
        batch = self.batch
        logps = batch.logps(values, index)
        examples = batch.examples(logps, values, index)
        examples = examples if batch.has_reference else warning_reads(examples, self.loss_module)
        losses = self.loss_module.preference_loss(examples)
        check_values("preference_loss", losses, logps.shape, "sequences")
        if batch.weights is not None:
            losses = losses * along(batch.weights, index)
        if self.some_are_empty:
            losses = torch.where(along(batch.tokens, index) > 0, losses, 0.0)
        return share_of_mean(losses, self.n)


def _labels(labels: Tensor, n: int, input: Tensor) -> Tensor:
    of_integers = isinstance(labels, Tensor) and not (labels.is_floating_point() or labels.is_complex())
    if not of_integers:
        got = f"{labels.dtype}".removeprefix("torch.") if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(
            f"preference_labels must be a tensor of bool, or of integers 0 and 1, one for each sequence, got {got}"
        )
    check_each("preference_labels", labels, n, input, "sequence")
    if labels.dtype == torch.bool:
        return labels
    if host_may_sync(labels) and ((labels != 0) & (labels != 1)).any():
        raise ValueError(
            "preference_labels must be bool, or integers 0 and 1 with 1 for a desirable sequence: got "
            f"{labels.dtype} with another number in it. For labels of -1 and 1 pass preference_labels > 0"
        )
    return labels == 1
