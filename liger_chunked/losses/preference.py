"""The base of losses of pairs: it owns sums over sequences, the reference, the NLL term, the mean and metrics.

A subclass has only `preference_loss`, the loss of a pair, which autograd differentiates.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

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
    refuse_capture,
    select_rows,
    sequences_of,
    whole,
)
from liger_chunked.losses.base import SequenceLoss
from liger_chunked.losses.formulas import sequence_logps, share_of_mean
from liger_chunked.losses.reference_model import Reference, reference_logps, warning_reads, without_reference
from liger_chunked.losses.settings import check_example_weights, check_finite, check_scope
from liger_chunked.types import (
    DeclaredStats,
    LogitOptions,
    LogitOptionsDict,
    LossHead,
    Pairs,
    PreferenceMetrics,
    ProcessGroup,
    TokenStats,
    VocabShard,
    Weight,
    accumulation_dtype,
)


@dataclass(eq=False)
class _PairBatch:
    """The tokens of a batch of n pairs, and what its losses compare with.

    Methods take statistics (m, 2, T) of some pairs, and the `index` that selects these m pairs from the batch.

    Attributes:
        mask: (n, 2, T) bool, True at the tokens of `target`.
        lengths: (n, 2) numbers of tokens of each sequence, at least 1.
        batch_lengths: (2,) numbers of tokens of all chosen and of all rejected sequences, at least 1.
        average_log_prob: whether log-probabilities of sequences are means.
        has_reference: whether the call has a reference.
        reference: its log-probabilities, (n, 2, T) one a token or (n, 2) one a sequence; zeros without one.
        token_weights: (n, 2, T). None: all are 1.
        has_tokens: (n,) bool, False at pairs without a token, whose loss is 0. None: all have some.
        host_counts: the n pairs' numbers of tokens, on the host. None: only the device knows them.
        nll_mask: (n, T) bool, True at the chosen tokens of the NLL term. None: those of `mask`.
        nll_only: (n, 2, T) bool, True at tokens that only the NLL term reads. None: there are none.
        example_weights: (n,) float64 factors of pairs. None: all are 1.
    """

    mask: Tensor
    lengths: Tensor
    batch_lengths: Tensor
    average_log_prob: bool
    has_reference: bool
    reference: Tensor
    token_weights: Tensor | None
    has_tokens: Tensor | None
    host_counts: Sequence[int] | None
    nll_mask: Tensor | None
    nll_only: Tensor | None
    example_weights: Tensor | None

    @property
    def all_pairs(self) -> slice:
        """The index of the whole batch."""
        return slice(0, self.mask.shape[0])

    @functools.cached_property
    def ref_logps(self) -> Tensor:
        """(n, 2) float64, the reference's log-probabilities of sequences."""
        reference = self.reference
        return self.logps(reference, self.all_pairs) if reference.ndim == 3 else reference.double()

    def without_nll_only(self, values: Tensor, index: slice | Tensor) -> Tensor:
        """Return values (m, 2, T), zero at tokens that only the NLL reads."""
        return values if self.nll_only is None else values.masked_fill(along(self.nll_only, index), 0.0)

    def logps(self, token_logps: Tensor, index: slice | Tensor) -> Tensor:
        """Return log-probabilities (m, 2) of sequences, from those of their tokens."""
        token_logps = self.without_nll_only(token_logps, index)
        if self.token_weights is not None:
            token_logps = token_logps * along(self.token_weights, index)
        return sequence_logps(token_logps, along(self.lengths, index), self.average_log_prob)

    def pairs(self, logps: Tensor, stats: TokenStats, index: slice | Tensor) -> Pairs:
        """Return what a loss's `preference_loss` sees of the pairs."""
        return Pairs(
            logps=logps,
            ref_logps=along(self.ref_logps, index),
            lengths=along(self.lengths, index),
            mask=along(self.mask, index),
            token_stats=DeclaredStats(*stats),
            batch_size=self.mask.shape[0],
            batch_lengths=self.batch_lengths,
        )

    def nll(self, stats: TokenStats, index: slice | Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the pairs' share of the mean NLL (); `weights` (n,) are factors of the sum, not of the divisor."""
        assert stats.logps is not None
        chosen, count, mask = stats.logps[:, 0], self.batch_lengths[0], self.mask[:, 0]
        if self.nll_mask is not None:
            mask, count = self.nll_mask, self.nll_mask.sum().clamp(min=1)
        if weights is not None:
            chosen = chosen * along(weights, index)[:, None]
        if weights is not None or self.nll_mask is not None:  # else statistics are 0 at ignored tokens
            chosen = torch.where(along(mask, index), chosen, 0.0)
        return -chosen.sum() / count


def _tail_weights(mask: Tensor, lengths: Tensor, tail: float, dtype: torch.dtype) -> Tensor:
    """Return (n, 2, T): `tail` beyond the pair's shorter length, else 1."""
    in_both = mask.cumsum(-1) <= lengths.amin(-1)[:, None, None]
    return in_both.to(dtype) + (~in_both).to(dtype) * tail


_DISAGREE = "nll_target and target must agree on every token that neither of them ignores"


def _places(mask: Tensor, lengths: Sequence[int] | None) -> Tensor:
    """Return where a mask is True; with `lengths`, without waiting for the device."""
    if lengths is None:
        return mask.nonzero().view(-1)
    return torch.nonzero_static(mask, size=sum(length > 0 for length in lengths)).view(-1)


class LigerFusedLinearPreferenceBase(SequenceLoss, ABC):
    """Mean of a subclass's `preference_loss` over pairs; see `docs/writing-a-loss.md`.

    Pairs without valid tokens add 0, but count in the mean. If only one sequence is empty, it has probability 1: its
    log-probability is 0, as a sum and as a mean over tokens, and it gets no gradient. ORPO's log-odds of it are 27.6,
    those of its largest probability.

    Args:
        beta: scale of the rewards, not negative.
        alpha: weight of the NLL term.
        compute_nll_loss: True adds `alpha` times the mean NLL, in nats, of the batch's chosen tokens. None does so if
            `alpha` is not 0. False raises unless `alpha` is 0 or 1.
        average_log_prob: `Pairs.logps` are means over tokens instead of sums.
        ld_alpha: weight, in [0, 1], of tokens beyond the pair's shorter length, under policy and reference. `lengths`
            count them fully. None: 1.
        reward_shape: rewards are `beta * reward_shape(logps - ref_logps)`, elementwise. None: the identity.
        use_ref_model: True requires a reference in each call, False refuses one. None allows one, and warns once
            if `preference_loss` reads `ref_logps` or `logratios` in a call without one.
        **options: fields of `LogitOptions`: `ignore_index` (-100) marks targets to skip; `softcap`, `logit_scale` and
            `temperature` transform the logits; `logits_budget` is the most bytes of logits in memory, such as "512MiB"
            (None: automatic); `logits_dtype=torch.float32` keeps the float32 sums of 16-bit products (None: rounded).
    """

    scope: Literal["pair", "batch"] = "pair"
    _group: ClassVar[Group] = "pair"
    _scopes: ClassVar[tuple[str, ...]] = ("pair", "batch")

    def __init__(
        self,
        *,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool | None = False,
        average_log_prob: bool = False,
        ld_alpha: float | None = None,
        reward_shape: Callable[[Tensor], Tensor] | None = None,
        use_ref_model: bool | None = None,
        **options: Unpack[LogitOptionsDict],
    ) -> None:
        super().__init__()
        check_finite("beta", beta, minimum=0)
        check_finite("alpha", alpha)
        if compute_nll_loss is not None and not compute_nll_loss and alpha not in (0.0, 1.0):
            raise ValueError(f"alpha={alpha} weighs the NLL term, but compute_nll_loss is False")
        check_finite("ld_alpha", ld_alpha, minimum=0, maximum=1, optional=True)
        self.beta = beta
        self.alpha = alpha
        self.compute_nll_loss = compute_nll_loss
        self.average_log_prob = average_log_prob
        self.ld_alpha = ld_alpha
        self.reward_shape = reward_shape
        self.use_ref_model = use_ref_model
        self.options = LogitOptions.of(type(self), options)

    @property
    def compute_nll_loss(self) -> bool:
        return self.alpha != 0 if self._compute_nll_loss is None else self._compute_nll_loss

    @compute_nll_loss.setter
    def compute_nll_loss(self, value: bool | None) -> None:
        self._compute_nll_loss = value

    @property
    def needs_token_ref_logps(self) -> bool:
        return self.ld_alpha is not None

    @property
    def _whole_batch(self) -> bool:
        if self.scope not in self._scopes:
            check_scope(type(self).__name__, self.scope, self._scopes)
        return self.scope == "batch"

    def reward(self, logratios: Tensor) -> Tensor:
        return self.beta * (logratios if self.reward_shape is None else self.reward_shape(logratios))

    @abstractmethod
    def preference_loss(self, pairs: Pairs) -> Tensor:
        """Return the losses (n,) of some pairs."""

    @entry_point
    def forward(
        self,
        weight: Weight,
        input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Weight | None = None,
        ref_bias: Tensor | None = None,
        *,
        ref_logps: Tensor | None = None,
        nll_target: Tensor | None = None,
        example_weights: Tensor | None = None,
        vocab_shard: VocabShard | None = None,
        cu_seqlens: Tensor | None = None,
        sequence_group: ProcessGroup | None = None,
    ) -> tuple[Tensor, PreferenceMetrics]:
        """Return loss and metrics.

        Args:
            weight: (V, H), the head's matrix, such as `lm_head.weight`, or an `AdaptedWeight`.
            input: (2 n, T, H), hidden states of n pairs in the dtype of `weight`, or in any under autocast: all chosen
                sequences first, then the rejected ones in the same order.
            target: (2 n, T), integer ids of the tokens that `input` predicts (shift labels, see `shifted`), or
                `ignore_index` at prompts and padding.
            bias: (V,) or None.
            ref_input, ref_weight, ref_bias: (2 n, T, H_ref), (V, H_ref) and (V,), the reference's. Without gradient.
                None: no bias, or no reference, which a loss that compares with one warns about or refuses
                (`use_ref_model`).
            ref_logps: instead, the reference's log-probabilities in nats: (2 n, T), one a token, or (2 n,), one a
                sequence like `Pairs.logps`, which `ld_alpha` excludes; packed sequences of one token each have one a
                token, so that ignored ones do not count. None: computed from `ref_input`, if that is given.
            nll_target: (2 n, T), the target of the NLL term, for example with the prompt. None: `target`.
            example_weights: (n,), floating-point factors `w` of pairs, without gradient: with a pair's loss `l` and the
                sum `s` of the NLL of its chosen tokens, the loss is `sum_i w_i l_i / n + alpha sum_i w_i s_i / N`. The
                divisors stay the n pairs and the batch's N chosen tokens, so that a pair's gradient is proportional to
                its weight. Metrics are not weighted. Not for losses of the whole batch ("aot"). None: 1.
            vocab_shard: this rank's rows of `weight` and `bias`, if ranks split the vocabulary (`docs/distributed.md`).
                None: this rank has the whole vocabulary.
            cu_seqlens: (2 n + 1,), int32 or int64, for packed sequences without padding: the first row of each
                sequence, then N. Tensors of tokens are then (N, ...). None: the batch is padded.
            sequence_group: the ranks that split the sequences (`docs/distributed.md`); each passes its positions. Loss
                and metrics are those of whole sequences. None: this rank has whole sequences.

        Returns:
            (loss, metrics): the loss () in nats, float32, or float64 for float64 inputs, and `PreferenceMetrics`.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: shapes, devices, target ids or options do not fit. The message says what was expected and found.
        """
        head = check_projection(LossHead(weight, bias, vocab_shard), input)
        check_target(target, input, head=head)
        sequences = sequences_of(head, input, cu_seqlens, sequence_group, "(2 n, T, H), chosen then rejected sequences")
        n = input.shape[0] if sequences is None else count(input, sequences)
        if n % 2:
            raise ValueError(
                f"input must stack as many chosen as rejected sequences on dim 0, got an odd {n} in "
                f"{tuple(input.shape)}"
            )
        if example_weights is not None:
            self._check_example_weights(example_weights, n // 2, input)
        if self._whole_batch:
            refuse_capture(input, f"{type(self).__name__} of the whole batch")  # it leaves out empty pairs
        # Tokens of `target` and of `nll_target` go through the head together: `_PairBatch` tells them apart. Masks and
        # counts are of whole sequences, also where this rank has a part of each.
        target, ignore_index = target.long(), self.options.ignore_index
        union = target if nll_target is None else self._union(target, nll_target, input, head)
        whole_union = union if sequences is None else whole(union, sequences, ignore_index)
        rows = select_rows(whole_union, self._group, ignore_index, head.vocab_size, sequences=sequences)

        reference = Reference(ref_input, ref_weight, ref_bias, ref_logps)
        ref_logps = reference_logps(reference, self, head, target, rows, sequences, required=self.use_ref_model)
        if nll_target is not None:
            target, nll_target = (whole(x, sequences, ignore_index) for x in (target, nll_target))
        dtype = accumulation_dtype(head.weight.dtype)
        make_batch = functools.partial(self._batch, target, nll_target, rows, ref_logps, example_weights, dtype)
        objective = _MeanOverPairs(self, make_batch, max(1, n // 2))
        loss, stats = self._fuse(head, input, rows, objective)
        return loss, self._metrics(objective.batch, stats)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def _check_example_weights(self, example_weights: Tensor, n_pairs: int, input: Tensor) -> None:
        check_example_weights(example_weights, n_pairs, input, "pair")
        if self._whole_batch:
            raise ValueError(
                f"example_weights are factors of pairs, but {type(self).__name__} computes its loss from the whole "
                "batch at once, such as from sorted rewards ('aot'), where no part belongs to one pair: leave them "
                "out, or use a loss of single pairs"
            )

    def _union(self, target: Tensor, nll_target: Tensor, input: Tensor, head: LossHead) -> Tensor:
        """Return the target of all tokens that the loss or its NLL term reads, after checks of `nll_target`."""
        if not self.compute_nll_loss:
            raise ValueError("nll_target is for the NLL term, but compute_nll_loss is False")
        check_target(nll_target, input, "nll_target", head=head)
        ignore_index = self.options.ignore_index
        in_both = (nll_target != ignore_index) & (target != ignore_index)
        if host_may_sync(target) and (in_both & (target != nll_target)).any():
            raise ValueError(_DISAGREE)
        return target.where(target != ignore_index, nll_target.long())

    def _batch(
        self,
        target: Tensor,
        nll_target: Tensor | None,
        rows: Rows,
        ref_logps: Tensor | None,
        example_weights: Tensor | None,
        dtype: torch.dtype,
    ) -> _PairBatch:
        """Arrange the tensors of a call by pairs.

        Args:
            target, nll_target: (2 n, T), of whole sequences. `rows` are those of both.
            ref_logps: of `reference_logps`.
            dtype: of statistics.
        """
        groups, mask = rows.groups, rows.mask
        assert groups is not None and mask is not None
        nll_mask, nll_only, host_counts = None, None, None
        if nll_target is None:
            lengths, at_least_1, batch_lengths = groups.lengths, groups.divisors, groups.batch_lengths
            host_counts = groups.host_counts
            may_be_empty = not groups.shortest
        else:
            # `rows` also hold tokens that only the NLL term reads, so the host does not know those of `target`.
            ignore_index = self.options.ignore_index
            union, mask = mask, rows.arrange(target != ignore_index)
            lengths = mask.sum(-1)
            batch_lengths = lengths.sum(0)
            at_least_1 = lengths.clamp(min=1)
            nll_mask = rows.arrange(nll_target != ignore_index)[:, 0]
            nll_only = union & ~mask
            may_be_empty = True
        return _PairBatch(
            mask=mask,
            lengths=at_least_1,
            batch_lengths=batch_lengths.clamp(min=1) if may_be_empty else batch_lengths,
            average_log_prob=self.average_log_prob,
            has_reference=ref_logps is not None,
            reference=self._reference(target, ref_logps, at_least_1),
            token_weights=None if self.ld_alpha is None else _tail_weights(mask, lengths, self.ld_alpha, dtype),
            has_tokens=lengths.sum(-1) > 0 if may_be_empty else None,
            host_counts=host_counts,
            nll_mask=nll_mask,
            nll_only=nll_only,
            example_weights=None if example_weights is None else example_weights.detach().to(torch.float64),
        )

    def _reference(self, target: Tensor, ref_logps: Tensor | None, lengths: Tensor) -> Tensor:
        """Return the reference's dense log-probabilities, (n, 2, T) or (n, 2); zeros without one.

        Raises:
            ValueError: there is one value a sequence, and the loss weighs tokens.
        """
        if ref_logps is None:
            return without_reference(lengths)
        if ref_logps.ndim == 2 and self.needs_token_ref_logps:
            raise ValueError(
                f"ref_logps must be {tuple(target.shape)}, one value a token, with ld_alpha={self.ld_alpha}, which "
                f"weighs tokens: got one a sequence, {(lengths.numel(),)}"
            )
        return ref_logps

    @torch.no_grad()
    def _metrics(self, batch: _PairBatch, stats: TokenStats) -> PreferenceMetrics:
        """Return the metrics of all pairs, from their tokens' statistics."""
        assert stats.logps is not None and stats.mean_logits is not None
        all_pairs = batch.all_pairs
        logps = batch.logps(stats.logps, all_pairs)
        logits_mean = batch.without_nll_only(stats.mean_logits, all_pairs).sum((0, 2)) / batch.batch_lengths
        nll = batch.nll(stats, all_pairs) if self.compute_nll_loss else logits_mean.new_zeros(())
        rewards = self.reward(logps - batch.ref_logps).detach().to(logits_mean.dtype)
        chosen_logps, rejected_logps = logps.to(logits_mean.dtype).unbind(-1)
        chosen_logits_mean, rejected_logits_mean = logits_mean.unbind(-1)
        chosen_rewards, rejected_rewards = rewards.unbind(-1)
        return PreferenceMetrics(
            chosen_logps=chosen_logps,
            rejected_logps=rejected_logps,
            chosen_logits_mean=chosen_logits_mean,
            rejected_logits_mean=rejected_logits_mean,
            nll_loss=nll,
            chosen_rewards=chosen_rewards,
            rejected_rewards=rejected_rewards,
        )


@dataclass(frozen=True, eq=False)
class _MeanOverPairs(Objective):
    """The mean of a loss's `preference_loss`, and its NLL term.

    Attributes:
        n_pairs: the divisor of the mean, at least 1.
    """

    loss_module: LigerFusedLinearPreferenceBase
    make_batch: Callable[[], _PairBatch]
    n_pairs: int

    @functools.cached_property
    def batch(self) -> _PairBatch:
        # Made when the step first reads it: until its first product is launched, the GPU is idle.
        return self.make_batch()

    def loss(self, values: TokenStats, index: slice | Tensor) -> Tensor:
        loss_module, batch, nll = self.loss_module, self.batch, None
        assert values.logps is not None
        logps = batch.logps(values.logps, index)
        if loss_module.compute_nll_loss:
            nll = loss_module.alpha * batch.nll(values, index, batch.example_weights)
        if loss_module._whole_batch and batch.has_tokens is not None:
            # A loss that sorts must not see empty pairs.
            index = _places(batch.has_tokens, batch.host_counts)
            logps, values = logps[index], mapped(lambda x: x[index], values)
        pairs = batch.pairs(logps, values, index)
        pairs = pairs if batch.has_reference else warning_reads(pairs, loss_module)
        losses = loss_module.preference_loss(pairs)
        check_values("preference_loss", losses, pairs.logps.shape[:1], "pairs")
        if batch.example_weights is not None:
            losses = losses * along(batch.example_weights, index)
        if batch.has_tokens is not None:
            losses = torch.where(along(batch.has_tokens, index), losses, 0.0)
        loss = share_of_mean(losses, self.n_pairs)
        return loss if nll is None else loss + nll
