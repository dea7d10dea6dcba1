"""The base of losses of rollouts: it owns ratios, KL and entropy terms, masks, reductions and metrics.

A subclass has the surrogate alone, so that each surrogate works with each reduction and importance level. The library's
subclass takes it as an object: grpo.py, and surrogates.py for the objects.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from liger_chunked.calls import entry_point, typed_like
from liger_chunked.engine import (
    Group,
    Objective,
    Rows,
    at_least_1,
    check_kept,
    check_projection,
    check_target,
    check_temperature,
    check_temperature_values,
    count,
    host_may_sync,
    loss_of_kept,
    refuse_capture,
    select_rows,
    sequences_of,
    whole,
)
from liger_chunked.kept_ids import KeptIds
from liger_chunked.losses.base import StatsLoss
from liger_chunked.losses.reference_model import Reference, reference_logps
from liger_chunked.losses.rollouts import (
    IMPORTANCE_LEVELS,
    RatioRange,
    RolloutBatch,
    RolloutSides,
    check_side,
    ratio_range,
    sum_of_logs,
    token_means,
    whole_side,
)
from liger_chunked.losses.settings import check_finite, check_scope, checked_items, is_set
from liger_chunked.types import (
    LARGEST,
    LARGEST_EXPONENT,
    Clipped,
    LogitOptions,
    LogitOptionsDict,
    LossHead,
    PolicyMetrics,
    ProcessGroup,
    Rollouts,
    TokenStats,
    VocabShard,
    Weight,
    accumulation_dtype,
    check_number,
    shown,
)


class _Reduction(NamedTuple):
    """What a sum over the tokens of a batch is divided by: `divisor`, and `by_length` each sequence's tokens too."""

    # (sequences, valid tokens or 1, num_items, max_completion_length) -> a number, or a tensor ()
    divisor: Callable[[int, int | Tensor, float | Tensor | None, int | None], float | Tensor]
    by_length: bool = False
    counts_items: bool = False
    needs_length: bool = False


def _sequences(n: int, tokens: int | Tensor, items: float | Tensor | None, longest: int | None) -> int:
    return max(1, n)


def _tokens(n: int, tokens: int | Tensor, items: float | Tensor | None, longest: int | None) -> int | Tensor:
    return tokens


def _items(n: int, tokens: int | Tensor, items: float | Tensor | None, longest: int | None) -> float | Tensor:
    return tokens if items is None else items


def _longest(n: int, tokens: int | Tensor, items: float | Tensor | None, longest: int | None) -> int:
    assert longest is not None
    return max(1, n) * longest


_OURS: Mapping[str, _Reduction] = {
    "grpo": _Reduction(_sequences, by_length=True),
    "bnpo": _Reduction(_tokens),
    "dr_grpo": _Reduction(_longest, needs_length=True),
    "dapo": _Reduction(_items, counts_items=True),
    "luspo": _Reduction(_sequences),
}
# verl's `loss_agg_mode`, so that its configs work as they are.
_VERL = {
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
    "token-mean": "dapo",
}
REDUCTIONS: Mapping[str, _Reduction] = {**_OURS, **{verl: _OURS[ours] for verl, ours in _VERL.items()}}


def _k1(d: Tensor) -> Tensor:
    return -d


def _k2(d: Tensor) -> Tensor:
    return d.square() / 2


def _k3(d: Tensor) -> Tensor:
    d = d.clamp(max=LARGEST_EXPONENT)  # of both terms: beyond, that of -d alone would have the wrong sign
    return torch.expm1(d) - d


def _low_var_kl(d: Tensor) -> Tensor:
    """verl's k3: bounded, without a gradient beyond."""
    return _k3(d.clamp(-20, 20)).clamp(max=10)


KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "abs": torch.abs,
    "kl": _k1,
    "mse": _k2,
    "low_var_kl": _low_var_kl,
}


def _high_entropy(rollouts: Rollouts, valid: Tensor, share: float) -> Tensor:
    """Return (n, T), True at this share of `valid` tokens (n, T) with the highest entropy."""
    if not rollouts.batch_tokens:
        return valid
    entropy = rollouts.entropy.detach()
    places = torch.nonzero_static(valid.reshape(-1), size=int(rollouts.batch_tokens)).view(-1)
    return valid & ~(entropy < torch.quantile(entropy.reshape(-1)[places], 1 - share))  # True of NaN


def _near_sampler(rollouts: Rollouts, threshold: float) -> Tensor:
    """Return False at negative advantages in sequences beyond the threshold, (n, T) or (n, 1)."""
    drift = sum_of_logs(rollouts.old_logps - rollouts.logps.detach()) / rollouts.lengths
    return ~((rollouts.advantages < 0) & (drift > threshold))  # True of NaN, which the loss must show


def extreme(shares: Tensor, sign: int) -> Tensor:
    """Return the largest (`sign` 1) or smallest (-1) of shares (n,) that are not NaN, or NaN if there is none."""
    if not shares.numel():
        return shares.new_full((), math.nan)
    of_none = -sign * math.inf
    shares = shares.nan_to_num(nan=of_none)
    found = shares.amax() if sign == 1 else shares.amin()
    return torch.where(found == of_none, math.nan, found)


def masked(target: Tensor, attention_mask: Tensor, ignore_index: int) -> Tensor:
    check_side("attention_mask", attention_mask, target)
    if attention_mask.is_floating_point() and host_may_sync(target):
        # An additive mask would mean the opposite.
        if not ((attention_mask == 0) | (attention_mask == 1)).all():
            low, high = (x.item() for x in attention_mask.aminmax())
            raise ValueError(f"attention_mask must be 0 or 1 at every token, got {low:g} to {high:g}")
    return target.masked_fill(attention_mask == 0, ignore_index)


class LigerFusedLinearPolicyBase(StatsLoss, ABC):
    """The base of policy losses; see `docs/writing-a-loss.md`.

        loss = sum over the valid tokens of (weight * cost + beta * kl) / denominator - entropy_coef * mean(entropy)

    | reduction | verl's name | denominator | loss |
    |---|---|---|---|
    | `grpo` | `seq-mean-token-mean` | `B * length` | mean over sequences of the mean over tokens (2402.03300) |
    | `bnpo` | | valid tokens of the batch | mean over the tokens of the batch |
    | `dapo` | `token-mean` | `num_items`, or else as `bnpo` | mean over tokens of the accumulated batch (2503.14476) |
    | `dr_grpo` | `seq-mean-token-sum-norm` | `B * max_completion_length` | independent of the lengths (2503.20783) |
    | `luspo` | `seq-mean-token-sum` | `B` | mean over the sequences of the sum over their tokens (2602.05261) |

    Sequences without valid tokens add 0, but count in `B`, unlike in verl.

    A subclass chooses what `policy_loss` gets by its attribute `scope`: "sequence", the default, for whole sequences;
    "token" for single tokens, of shape (n, 1), if it treats each independently: `T` is 1 and `n` counts tokens, so a
    sum over dim 1 is no sum over a sequence; "batch" for the whole batch, if it compares sequences.

    `weight` is `importance_weights`, or 1. `kl` is in nats (http://joschu.net/blog/kl-approx.html), with
    `d = log pi_ref - log pi`:

    | kl_estimator | estimate |
    |---|---|
    | `k1`, `kl` | `-d` |
    | `k2`, `mse` | `d^2 / 2` |
    | `k3` | `exp(d) - d - 1` |
    | `low_var_kl` | `min(10, k3)` of `d` in [-20, 20], as in verl; constant where it is bounded |
    | `abs` | `abs(d)` |

    Ratios, `exp(d)` and their products are at most e^80 = 5.5e34, and constant beyond; `old_logps` and `ref_logps` of
    -inf count as -1e18 ("Far ends" in `docs/numerics.md`). So a token that is clipped, filtered by its entropy, or has
    an advantage or a weight of 0 has a gradient of exactly zero, however stale it is.

    Args:
        beta: weight of the KL to the reference, not negative; above 0, a call requires a reference.
        reduction: a name from the first table.
        importance_level: of `Rollouts.ratio`: "token"; "sequence", the tokens' geometric mean `s` (GSPO,
            https://arxiv.org/abs/2507.18071); "sequence_token", `sg(s) pi / sg(pi)` with stopped gradient `sg`, for
            advantages per token (GSPO-token); "trajectory", their product.
        max_completion_length: positive number of tokens, required by the reduction "dr_grpo" and refused by others.
            None: not given.
        kl_estimator: a name from the second table. With `use_bias_correction_kl`, `k1` and `k3` have the KL's gradient;
            without, `k2` has it, and `k1`'s is zero on average.
        use_bias_correction_kl: multiply the estimate by the importance ratio (DeepSeek-V3.2,
            https://arxiv.org/abs/2512.02556).
        off_policy_mask_threshold: in nats, not negative: tokens with a negative advantage cost 0 where the sequence's
            mean of `old_logps - logps` is above it (DeepSeek-V3.2, whose old policy is the sampler). None: no such
            mask.
        sampler_kl_coef: weight, not negative, of `(log pi - log pi_old)^2` of every valid token (Kimi K2.5,
            https://arxiv.org/abs/2602.02276), which no mask and no importance weight changes; prime-rl's `kl_tau`.
        entropy_coef: weight of the entropy bonus, the mean over the call's tokens with any reduction, as in TRL.
        top_entropy_quantile: in [0, 1]; only this share of the call's tokens, at least one, with the highest entropy
            keeps cost and bonus (https://arxiv.org/abs/2506.01939). Below 1, costs one more GEMM if logits exceed the
            budget; large steps leave the other tokens out of the backward.
        clipped: a function from `Rollouts` of the whole batch to `Clipped` or None that says where ratios are clipped,
            for the metrics. None: nowhere.
        **options: fields of `LogitOptions`: `ignore_index` (-100) marks targets to skip; `softcap`, `logit_scale` and
            `temperature` transform the logits; `logits_budget` is the most bytes of logits in memory, such as "512MiB"
            (None: automatic); `logits_dtype=torch.float32` keeps the float32 sums of 16-bit products (None: rounded).
            Use the sampler's `temperature`; it also applies to the reference.
    """

    scope: Literal["token", "sequence", "batch"] = "sequence"
    token_outputs: tuple[str, ...] = ()
    weighs: bool = False
    needs_reference: bool = False
    _statistics: ClassVar[tuple[str, ...]] = ("logps", "entropy")
    _scopes: ClassVar[tuple[str, ...]] = ("token", "sequence", "batch")
    _skips_rows: ClassVar[bool] = True  # clipped, filtered by entropy, or without an advantage

    def __init__(
        self,
        *,
        beta: float = 0.0,
        reduction: str = "grpo",
        importance_level: str = "token",
        max_completion_length: int | None = None,
        kl_estimator: str = "k3",
        use_bias_correction_kl: bool = True,
        off_policy_mask_threshold: float | None = None,
        sampler_kl_coef: float = 0.0,
        entropy_coef: float = 0.0,
        top_entropy_quantile: float = 1.0,
        clipped: Callable[[Rollouts], Clipped | None] | None = None,
        **options: Unpack[LogitOptionsDict],
    ) -> None:
        super().__init__()
        if reduction not in REDUCTIONS:
            raise ValueError(f"unknown reduction {shown(reduction)}, expected one of {sorted(REDUCTIONS)}")
        if importance_level not in IMPORTANCE_LEVELS:
            raise ValueError(
                f"unknown importance_level {shown(importance_level)}, expected one of {list(IMPORTANCE_LEVELS)}"
            )
        if kl_estimator not in KL_ESTIMATORS:
            raise ValueError(f"unknown kl_estimator {shown(kl_estimator)}, expected one of {list(KL_ESTIMATORS)}")
        check_number("max_completion_length", max_completion_length, whole=True, optional=True)
        if REDUCTIONS[reduction].needs_length:
            if max_completion_length is None or max_completion_length < 1:
                raise ValueError(
                    f"reduction {reduction!r} needs a positive max_completion_length, got {max_completion_length}"
                )
        elif max_completion_length is not None:
            readers = sorted(name for name, kind in REDUCTIONS.items() if kind.needs_length)
            raise ValueError(
                f"max_completion_length={max_completion_length} is not read by reduction {reduction!r}, "
                f"only by {readers}"
            )
        check_finite("beta", beta, minimum=0)
        check_finite("off_policy_mask_threshold", off_policy_mask_threshold, minimum=0, optional=True)
        check_finite("sampler_kl_coef", sampler_kl_coef, minimum=0)
        check_finite("entropy_coef", entropy_coef)
        check_finite("top_entropy_quantile", top_entropy_quantile, minimum=0, maximum=1)
        self.beta = beta
        self.reduction = reduction
        self.importance_level = importance_level
        self.max_completion_length = max_completion_length
        self.kl_estimator = kl_estimator
        self.use_bias_correction_kl = use_bias_correction_kl
        self.off_policy_mask_threshold = off_policy_mask_threshold
        self.sampler_kl_coef = sampler_kl_coef
        self.entropy_coef = entropy_coef
        self.top_entropy_quantile = top_entropy_quantile
        self.clipped = clipped
        self.options = LogitOptions.of(type(self), options)

    @abstractmethod
    def policy_loss(self, rollouts: Rollouts) -> Tensor:
        """Return costs: (n, T) per token, or (n, 1) if a sequence's tokens share one."""

    @property
    def _group(self) -> Group:
        check_scope(type(self).__name__, self.scope, self._scopes)
        by_token = self.scope == "token" and not IMPORTANCE_LEVELS[self.importance_level].mixes_tokens
        return "token" if by_token and self.off_policy_mask_threshold is None else "sequence"

    @property
    def _whole_batch(self) -> bool:
        return self.top_entropy_quantile < 1 or self.scope == "batch"

    @property
    def _outputs(self) -> tuple[str, ...]:
        return ("logps", "entropy")

    @property
    def _differentiates(self) -> tuple[str, ...]:
        return ("logps", *(("entropy",) if is_set(self.entropy_coef) else ()), *self.token_outputs)

    def kl(self, rollouts: Rollouts) -> Tensor:
        """Return the estimate (n, T) of KL(policy || reference) in nats."""
        assert rollouts.ref_logps is not None
        estimate = KL_ESTIMATORS[self.kl_estimator](rollouts.ref_logps - rollouts.logps)
        # Each factor may be near e^80.
        return (estimate * rollouts.ratio).clamp(-LARGEST, LARGEST) if self.use_bias_correction_kl else estimate

    @entry_point
    def forward(
        self,
        weight: Weight,
        input: Tensor,
        target: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        old_logps: Tensor | None = None,
        ref_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Weight | None = None,
        ref_bias: Tensor | None = None,
        importance_weights: Tensor | None = None,
        num_items: float | Tensor | None = None,
        accumulation_steps: int | None = None,
        temperature: Tensor | None = None,
        kept: KeptIds | None = None,
        vocab_shard: VocabShard | None = None,
        cu_seqlens: Tensor | None = None,
        sequence_group: ProcessGroup | None = None,
    ) -> tuple[Tensor, PolicyMetrics]:
        """Return loss and metrics.

        Args:
            weight: (V, H), the head's matrix, such as `lm_head.weight`, or an `AdaptedWeight`.
            input: (B, T, H), hidden states of B completions in the dtype of `weight`, or in any under autocast.
            target: (B, T), the sampled tokens, integer ids that `input` predicts (shift labels, see `shifted`), or
                `ignore_index` at prompts and padding.
            advantages: (B,) or (B, 1) per sequence, or (B, T) per token. Without gradient.
            bias: (V,) or None.
            attention_mask: (B, T), 0 at tokens to ignore, else 1. None: `target` alone says which count.
            old_logps: (B, T), log-probabilities of the target under the policy that sampled it, in nats. None:
                on-policy, the ratio is 1.
            ref_logps: (B, T), the same under the reference. None: computed from `ref_input`; required, one or the
                other, if `beta` is not 0.
            ref_input, ref_weight, ref_bias: instead, (B, T, H_ref), (V, H_ref) and (V,), the reference's. Without
                gradient. None: no bias, or no reference.
            importance_weights: (B, T) per token, or (B,) or (B, 1) per sequence: factors of the cost, such as
                `(old_logps - sampling_logps).exp().clamp(max=3.0)` of tokens that another engine sampled. None: 1.
            num_items: divisor of the reduction `dapo`, a number or (): the valid tokens of all steps that accumulate
                gradients. If ranks average gradients, pass all ranks' tokens divided by the number of ranks. Other
                reductions refuse it: divide the loss by the number of steps. None: the valid tokens of this call.
            accumulation_steps: how many steps `num_items` counts, at least 1, which divides the entropy bonus, a mean
                over each step. Required with `num_items` if `entropy_coef` is not 0, else refused. None: not given.
            temperature: (B, T) float32, the sampler's, one a token, instead of that of `options`; also the reference's.
                None: that of `options`.
            kept: the ids that the sampler kept of each position of `target`, see `KeptIds`. Log-probabilities and
                entropies, also those of `ref_input`, are then of the softmax over these ids, and only their rows of the
                head are read. Pass `old_logps` and `ref_logps` of the same softmax; with `sequence_group`, the ids of
                this rank's positions. None: the whole vocabulary.
            vocab_shard: this rank's rows of `weight` and `bias`, if ranks split the vocabulary (`docs/distributed.md`).
                None: this rank has the whole vocabulary.
            cu_seqlens: (B + 1,), int32 or int64, for packed sequences without padding: the first row of each sequence,
                then N. Tensors of tokens are then (N, ...). None: the batch is padded.
            sequence_group: the ranks that split the sequences (`docs/distributed.md`); each passes its positions. Loss
                and metrics are those of whole sequences. None: this rank has whole sequences.

        Returns:
            (loss, metrics): the loss (), float32, or float64 for float64 inputs, and `PolicyMetrics`.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: shapes, devices, target ids or options do not fit. The message says what was expected and found.
        """
        head = check_projection(LossHead(weight, bias, vocab_shard), input)
        check_target(target, input, head=head)
        sequences = sequences_of(head, input, cu_seqlens, sequence_group, "(B, T, H), one sequence a completion")
        n = count(input, sequences)
        check_side("advantages", advantages, target, n)
        if importance_weights is not None:
            check_side("importance_weights", importance_weights, target, n)
        for name, x in (("old_logps", old_logps), ("ref_logps", ref_logps)):
            if x is not None:
                check_side(name, x, target)
        self._check_temperature(temperature, target)
        if kept is not None:
            of_all = None if temperature is not None else self.options.temperature
            check_kept(kept, head, self._outputs, of_all)
        if self.top_entropy_quantile < 1:
            refuse_capture(target, "top_entropy_quantile")  # the quantile is of as many entropies as tokens count
        ignore_index = self.options.ignore_index
        if attention_mask is not None:
            target = masked(target, attention_mask, ignore_index)
        whole_target = whole(target.long(), sequences, ignore_index)
        rows = select_rows(whole_target, self._group, ignore_index, head.vocab_size, sequences=sequences)
        if temperature is not None:
            rows = rows.with_side("temperature", whole(temperature, sequences, 1.0).reshape(-1))
            check_temperature_values(rows.side["temperature"], None if kept is None else kept.temperature)
        shape, dtype = whole_target.shape, accumulation_dtype(weight.dtype)
        divisor = self._divisor(num_items, rows, whole_target, dtype)
        steps = self._steps(num_items, accumulation_steps)
        all_ref_logps = reference_logps(
            Reference(ref_input, ref_weight, ref_bias, ref_logps), self, head, target, rows, sequences,
            required=True if is_set(self.beta) or self.needs_reference else None,
            kept=kept, temperature=temperature,
        )  # fmt: skip
        if importance_weights is not None:
            importance_weights = whole_side("importance_weights", importance_weights, target, sequences)
        sides = RolloutSides(
            advantages=whole_side("advantages", advantages, target, sequences),
            old_logps=None if old_logps is None else whole(old_logps, sequences),
            ref_logps=all_ref_logps,
            importance_weights=importance_weights,
        )
        objective = _OfRollouts(self, _BatchArguments(sides, rows, shape, dtype, divisor), steps)
        if kept is None:
            loss, stats = self._fuse(head, input, rows, objective)
        else:
            loss, stats = loss_of_kept(
                head, input, target.long(), kept, rows, objective, sequences=sequences,
                outputs=self._outputs, options=self.options, temperature=temperature,
                owner=self,
            )  # fmt: skip
        return loss, self._metrics(objective.batch, objective.batch.rollouts(stats, slice(None)), shape)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def _objective(
        self, batch: RolloutBatch, rollouts: Rollouts, index: slice | Tensor, accumulation_steps: int
    ) -> Tensor:
        cost = self.policy_loss(rollouts)
        mask = rollouts.mask
        if not isinstance(cost, Tensor) or cost.shape not in (mask.shape, (mask.shape[0], 1)):
            got = tuple(cost.shape) if isinstance(cost, Tensor) else f"a {type(cost).__name__}"
            raise ValueError(
                f"policy_loss must return {tuple(mask.shape)}, one value a token, or {(mask.shape[0], 1)}, "
                f"one a sequence, got {got}"
            )
        acting = mask if self.top_entropy_quantile == 1 else _high_entropy(rollouts, mask, self.top_entropy_quantile)
        if rollouts.importance_weights is not None and not self.weighs:
            cost = cost * rollouts.importance_weights
        has_cost = acting
        if self.off_policy_mask_threshold is not None:
            has_cost = acting & _near_sampler(rollouts, self.off_policy_mask_threshold)
        cost = torch.where(has_cost, cost, 0.0)
        if is_set(self.beta):
            cost = cost + self.beta * torch.where(mask, self.kl(rollouts), 0.0)
        if is_set(self.sampler_kl_coef):
            cost = cost + self.sampler_kl_coef * torch.where(mask, rollouts.logps - rollouts.old_logps, 0.0).square()
        loss = (cost * batch.weights[index]).sum(dtype=torch.float64)
        if is_set(self.entropy_coef):
            n_acting = at_least_1(batch.batch_tokens if acting is mask else acting.sum(), torch.float64)
            bonus = torch.where(acting, rollouts.entropy, 0.0).sum(dtype=torch.float64) / n_acting
            loss = loss - self.entropy_coef * (bonus / accumulation_steps)
        return loss

    def _check_temperature(self, temperature: Any, target: Tensor) -> None:
        if temperature is None:
            return
        if not isinstance(temperature, Tensor):
            raise TypeError(
                f"{type(self).__name__} takes a number as temperature in its constructor, and a float32 tensor in "
                f"its call, got {shown(temperature)}"
            )
        check_temperature(temperature, target)
        if self.options.temperature != 1.0:
            raise ValueError(
                f"temperature is given twice: to the constructor, {self.options.temperature}, and to the call, "
                f"{shown(temperature)}"
            )

    def _divisor(
        self, num_items: float | Tensor | None, rows: Rows, target: Tensor, dtype: torch.dtype
    ) -> float | Tensor:
        """Return what the sum over tokens is divided by, apart from lengths.

        Args:
            target: (B, T).
            dtype: of a tensor returned.
        """
        reduction = REDUCTIONS[self.reduction]
        if num_items is not None:
            if not reduction.counts_items:
                readers = sorted(name for name, kind in REDUCTIONS.items() if kind.counts_items)
                raise ValueError(f"num_items is not read by reduction {self.reduction!r}, only by {readers}")
            num_items = checked_items(num_items, target, dtype)
        return reduction.divisor(target.shape[0], rows.divisor(dtype), num_items, self.max_completion_length)

    def _steps(self, num_items: float | Tensor | None, accumulation_steps: int | None) -> int:
        """Return the number of steps of which the entropy bonus is a mean."""
        check_number("accumulation_steps", accumulation_steps, whole=True, optional=True)
        if num_items is None or not is_set(self.entropy_coef):
            if accumulation_steps is not None:
                raise ValueError(
                    f"accumulation_steps={accumulation_steps} divides the entropy bonus of a call with num_items, got "
                    f"entropy_coef={shown(self.entropy_coef)} and num_items={shown(num_items)}"
                )
            return 1
        if accumulation_steps is None or accumulation_steps < 1:
            raise ValueError(
                "num_items and entropy_coef need accumulation_steps, how many steps num_items counts (1 or more): the "
                f"entropy bonus is a mean over each step, got {accumulation_steps}"
            )
        return accumulation_steps

    def _batch(self, arguments: _BatchArguments) -> RolloutBatch:
        sides, rows, shape, dtype, divisor = arguments
        return RolloutBatch.of(
            sides,
            rows,
            shape,
            dtype,
            divisor=divisor,
            by_length=REDUCTIONS[self.reduction].by_length,
            importance_level=self.importance_level,
        )

    @torch.no_grad()
    def _metrics(self, batch: RolloutBatch, rollouts: Rollouts, shape: torch.Size) -> PolicyMetrics:
        """Return the metrics of a batch whose target has this `shape`, (B, T)."""
        mask = batch.mask
        per_sequence = IMPORTANCE_LEVELS[self.importance_level].per_sequence
        flags: dict[str, Tensor] = {}
        clipped = None if self.clipped is None else self.clipped(rollouts)
        if clipped is not None:
            low, high = clipped
            flags = {"high": high} if low is None else {"low": low, "high": high, "either": low | high}
        # With advantages per token, flags are per token also where ratios are per sequence.
        of_sequences = {
            name: x for name, x in flags.items() if x.shape != mask.shape or (per_sequence and x.shape[-1] == 1)
        }
        of_tokens = {"entropy": rollouts.entropy, **{k: x for k, x in flags.items() if k not in of_sequences}}
        if rollouts.ref_logps is not None:
            of_tokens["kl"] = self.kl(rollouts)
        ratio = None if batch.old_logps is None else rollouts.ratio
        if ratio is not None and ratio.shape == mask.shape:
            of_tokens["ratio"] = ratio
        means = token_means(of_tokens, mask, shape, rollouts.logps.dtype)
        of_all, by_sequence = dict(means.of_all), dict(means.by_sequence)
        # All sequences count, also empty ones, whose ratio is 1: a bound below 1 clips them, as in TRL.
        for name, x in of_sequences.items():
            by_sequence[name] = x.to(rollouts.logps.dtype).reshape(-1)
            of_all[name] = by_sequence[name].sum() / max(1, x.shape[0])
        ratios = RatioRange()
        if ratio is not None:
            counted = mask.any(-1, keepdim=True) if per_sequence else mask
            ratios = ratio_range(ratio.to(rollouts.logps.dtype), counted, of_all.get("ratio"))
        return PolicyMetrics(
            entropy=of_all["entropy"],
            kl=of_all.get("kl"),
            clip_ratio_low=of_all.get("low"),
            clip_ratio_high=of_all.get("high"),
            clip_ratio=of_all.get("either", of_all.get("high")),
            clip_ratio_low_min=extreme(by_sequence["low"], -1) if "low" in flags else None,
            clip_ratio_high_max=extreme(by_sequence["high"], 1) if "high" in flags else None,
            ratio_mean=ratios.mean,
            ratio_min=ratios.min,
            ratio_max=ratios.max,
        )

    def extra_repr(self) -> str:
        level = f"importance_level={self.importance_level!r}"
        return f"reduction={self.reduction!r}, {level}, beta={self.beta}, {self.options}"


class _BatchArguments(NamedTuple):
    """What `_batch` makes a `RolloutBatch` of."""

    sides: RolloutSides
    rows: Rows
    shape: torch.Size  # (B, T)
    dtype: torch.dtype
    divisor: float | Tensor


@dataclass(frozen=True, eq=False)
class _OfRollouts(Objective):
    """The loss of a `policy_loss`, with the terms and options of the base."""

    loss_module: LigerFusedLinearPolicyBase
    arguments: _BatchArguments
    accumulation_steps: int

    @functools.cached_property
    def batch(self) -> RolloutBatch:
        """Arranged when the first chunk asks, while the device computes its product."""
        return self.loss_module._batch(self.arguments)

    def loss(self, values: TokenStats, index: slice | Tensor) -> Tensor:
        batch = self.batch
        return self.loss_module._objective(batch, batch.rollouts(values, index), index, self.accumulation_steps)
