"""Distillation on the student's own samples: the reverse KL, sampled token by token, as the advantage of a policy loss.

The teacher is part of the advantage, so the loss needs its log-probabilities of sampled tokens alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from liger_chunked.calls import altered, entry_point, typed_like
from liger_chunked.engine import check_projection, check_target, linear_token_stats
from liger_chunked.kept_ids import KeptIds
from liger_chunked.losses.base import FusedLoss
from liger_chunked.losses.policy import LigerFusedLinearPolicyBase, masked
from liger_chunked.losses.settings import check_finite, check_positive, options_of_teacher
from liger_chunked.losses.surrogates import Clip, LogProb, Surrogate, settings_of, surrogate_of
from liger_chunked.types import (
    Clipped,
    LogitOptions,
    LogitOptionsDict,
    LossHead,
    PolicyMetrics,
    ProcessGroup,
    Rollouts,
    VocabShard,
    Weight,
    accumulation_dtype,
    described,
    shown,
)


@dataclass(frozen=True, kw_only=True)
class _Clip(Clip):
    """`Clip` without bounds by default, and without the metrics of a bound that is infinite."""

    epsilon_low: float = math.inf
    epsilon_high: float = math.inf

    def clipped(self, rollouts: Rollouts) -> Clipped | None:
        low, high = self._clipped(rollouts, self.delta)
        if math.isfinite(self.epsilon_low):
            return Clipped(low, high)
        return Clipped(None, high) if math.isfinite(self.epsilon_high) else None


@dataclass(frozen=True, kw_only=True)
class _Truncate(Surrogate):
    """A token costs `-sg(min(r, ratio_max)) A log p(y)`."""

    scope = "token"
    ratio_max: float = 2.0

    def __post_init__(self) -> None:
        check_positive("ratio_max", self.ratio_max)

    def cost(self, rollouts: Rollouts) -> Tensor:
        r = rollouts
        # The logarithm is bounded, so that exp() cannot overflow.
        return -r.log_ratio.detach().clamp(max=math.log(self.ratio_max)).exp() * r.advantages * r.logps

    def clipped(self, rollouts: Rollouts) -> Clipped:
        return Clipped(low=None, high=rollouts.ratio > self.ratio_max)


_SURROGATES: Mapping[str, type[Surrogate]] = {"clip": _Clip, "truncate": _Truncate, "log_prob": LogProb}


def _prefix_weights(distance: Tensor, weight: float) -> Tensor:
    """Return `1 + weight (1 - sum of abs(distance) before / sum)`, of (n, T), 0 at ignored tokens."""
    size = distance.abs()
    before = size.cumsum(-1, dtype=torch.float64) - size
    share = before / size.sum(-1, keepdim=True, dtype=torch.float64).clamp(min=1e-8)  # TRL's bound
    return (1 + weight * (1 - share)).to(distance.dtype)


class _SampledReverseKL(LigerFusedLinearPolicyBase):
    """A policy loss of the advantages below; the teacher is the reference."""

    def __init__(
        self,
        surrogate: Surrogate,
        *,
        kl_coef: float,
        student: str,
        prefix_weight: float,
        reduction: str,
        max_completion_length: int | None,
    ) -> None:
        super().__init__(
            reduction=reduction,
            max_completion_length=max_completion_length,
            kl_estimator="k1",
            use_bias_correction_kl=False,
            clipped=self._clipped,
        )
        check_finite("kl_coef", kl_coef, minimum=0)
        if student not in ("old", "current"):
            raise ValueError(f"student must be 'old' or 'current', got {shown(student)}")
        check_finite("prefix_weight", prefix_weight, minimum=0)
        self.surrogate, self.kl_coef, self.student, self.prefix_weight = surrogate, kl_coef, student, prefix_weight
        self.scope = "sequence" if prefix_weight and surrogate.scope == "token" else surrogate.scope
        self.weighs, self.token_outputs = surrogate.weighs, surrogate.token_outputs

    def _with_teacher(self, r: Rollouts) -> Rollouts:
        """Return the rollouts with the teacher in their advantages."""
        assert r.ref_logps is not None
        distance = r.ref_logps - (r.old_logps if self.student == "old" else r.logps.detach())
        if self.prefix_weight:
            distance = _prefix_weights(distance, self.prefix_weight) * distance
        return replace(r, advantages=r.advantages + self.kl_coef * distance)

    def policy_loss(self, rollouts: Rollouts) -> Tensor:
        return self.surrogate.cost(self._with_teacher(rollouts))

    def _clipped(self, rollouts: Rollouts) -> Clipped | None:
        return self.surrogate.clipped(self._with_teacher(rollouts))


class LigerFusedLinearOnPolicyDistillationLoss(FusedLoss):
    """Reverse KL to a teacher, estimated from the student's sampled tokens, by policy gradient, fused.

    With sampled token `y`, student `p`, sampler `p_old`, and teacher `q`, a token's advantage and cost are

        A = advantages + kl_coef * (log q(y) - log p_old(y))
        cost = -min(r A, clamp(r, 1 - epsilon_low, 1 + epsilon_high) A),    r = p(y) / p_old(y)

    | surrogate | cost |
    |---|---|
    | `clip` | the above |
    | `truncate` | `-sg(min(r, ratio_max)) A log p(y)`, with stopped gradient `sg` |
    | `log_prob` | `-A log p(y)` |

    With `student="current"`, `A` has `sg(log p(y))` in the place of `log p_old(y)`. With a `prefix_weight` `g`,
    `D = log q(y) - log p_old(y)` is multiplied by `1 + g (1 - sum of abs(D) before the token / sum of the sequence)`.

    | name | arguments |
    |---|---|
    | On-policy distillation | the defaults |
    | SDPO's and SDFT's sampled token, 2601.20802, 2601.19897, as in TRL | `surrogate="truncate", student="current"` |
    | IW-OPD, 2606.22600, as in TRL | `surrogate="log_prob", prefix_weight=0.5` |

    The teacher of SDPO and SDFT is the model itself, with a prompt that also holds feedback or a demonstration: pass
    its `teacher_logps`, or its hidden states. `LigerFusedLinearJSDLoss(beta=alpha)` is their loss of whole
    distributions.

    On-policy, the gradient is an unbiased estimate of that of `KL(p || q)` at the sampled prefixes, with a discount of
    0 (https://thinkingmachines.ai/blog/on-policy-distillation). The metric `kl` is the mean of
    `log p(y) - log q(y)`.

    Args:
        kl_coef: weight of the teacher in the advantage, not negative.
        epsilon_low, epsilon_high: of `clip`, not negative; infinity is no bound.
        surrogate: a name from the table, or a `Surrogate`, such as one of `liger_chunked.losses.surrogates`, which gets
            the advantage `A`.
        ratio_max: of `truncate`, positive; TRL's `distillation_is_clip`.
        student: "old", the policy that sampled, or "current".
        prefix_weight: not negative; TRL's `iw_opd_gamma`. Above 0, costs one more GEMM for a sequence over budget.
        reduction: what the sum over tokens is divided by. "grpo": the mean over sequences of the mean over tokens;
            "bnpo": the valid tokens of the batch; "dapo": `num_items`, or else as "bnpo"; "dr_grpo":
            `B * max_completion_length`; "luspo": `B`. verl's "seq-mean-token-mean", "token-mean",
            "seq-mean-token-sum-norm" and "seq-mean-token-sum" are "grpo", "dapo", "dr_grpo" and "luspo".
        max_completion_length: positive number of tokens, required by the reduction "dr_grpo" and refused by others.
            None: not given.
        teacher_options: `LogitOptions` with the teacher's `softcap`, `logit_scale` and `temperature`. None: the
            student's.
        **options: fields of `LogitOptions`: `ignore_index` (-100) marks targets to skip; `softcap`, `logit_scale` and
            `temperature` transform the logits; `logits_budget` is the most bytes of logits in memory, such as "512MiB"
            (None: automatic); `logits_dtype=torch.float32` keeps the float32 sums of 16-bit products (None: rounded).
            Use the sampler's `temperature`.

    >>> import torch
    >>> weight, input, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, -100], [3, 4, 5]])
    >>> teacher_weight, teacher_input = torch.randn(13, 6), torch.randn(2, 3, 6)  # padded beyond 11
    >>> loss, metrics = LigerFusedLinearOnPolicyDistillationLoss()(weight, input, teacher_weight, teacher_input, target)
    >>> bool(torch.isclose(loss, metrics.kl))       # on-policy, r is 1
    True
    """

    def __init__(
        self,
        *,
        kl_coef: float = 1.0,
        epsilon_low: float = math.inf,
        epsilon_high: float = math.inf,
        surrogate: str | Surrogate = "clip",
        ratio_max: float = 2.0,
        student: str = "old",
        prefix_weight: float = 0.0,
        reduction: str = "token-mean",
        max_completion_length: int | None = None,
        teacher_options: LogitOptions | None = None,
        **options: Unpack[LogitOptionsDict],
    ) -> None:
        super().__init__()
        settings = {"epsilon_low": epsilon_low, "epsilon_high": epsilon_high, "ratio_max": ratio_max}
        if isinstance(surrogate, Surrogate):  # which refuses any that is given
            defaults = settings_of(_Clip) | settings_of(_Truncate)
            settings = {name: x for name, x in settings.items() if x != defaults[name]}
        chosen, _ = surrogate_of(surrogate, settings, _SURROGATES)
        self.options = LogitOptions.of(type(self), options)
        self.teacher_options = options_of_teacher(teacher_options, self.options)
        self._transforms_teacher = teacher_options is not None
        self._policy = _SampledReverseKL(
            chosen,
            kl_coef=kl_coef,
            student=student,
            prefix_weight=prefix_weight,
            reduction=reduction,
            max_completion_length=max_completion_length,
        )

    @entry_point
    def forward(
        self,
        weight: Weight,
        input: Tensor,
        teacher_weight: Weight | None = None,
        teacher_input: Tensor | None = None,
        target: Tensor | None = None,
        bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        *,
        teacher_logps: Tensor | None = None,
        advantages: Tensor | None = None,
        attention_mask: Tensor | None = None,
        old_logps: Tensor | None = None,
        importance_weights: Tensor | None = None,
        num_items: float | Tensor | None = None,
        kept: KeptIds | None = None,
        vocab_shard: VocabShard | None = None,
        cu_seqlens: Tensor | None = None,
        sequence_group: ProcessGroup | None = None,
    ) -> tuple[Tensor, PolicyMetrics]:
        """Return loss and metrics.

        Args:
            weight: (V, H), the student's head, such as `lm_head.weight`, or an `AdaptedWeight`.
            input: (B, T, H), the student's hidden states in the dtype of `weight`, or in any under autocast.
            teacher_weight, teacher_input, teacher_bias: (V_teacher, H_teacher) or an `AdaptedWeight`, (B, T, H_teacher)
                and (V_teacher,). The softmax ignores rows beyond V. Without gradient. None: no bias, or `teacher_logps`
                are given.
            target: (B, T), the sampled tokens, integer ids that `input` predicts (shift labels, see `shifted`), or
                `ignore_index`. Required: None raises.
            bias: (V,) or None.
            teacher_logps: instead of the teacher's hidden states, (B, T), its log-probabilities of `target` in nats.
                None: computed from `teacher_input`.
            advantages: (B,), (B, 1) or (B, T), of rewards beside the teacher; None: 0.
            attention_mask: (B, T), 0 at tokens to ignore, else 1. None: `target` alone says which count.
            old_logps: (B, T), log-probabilities of `target` under the policy that sampled it, in nats. None: on-policy.
            importance_weights: (B, T), (B,) or (B, 1), factors of the cost. None: 1.
            num_items: divisor of the reduction "token-mean" (or "dapo"), a number or (): the valid tokens of all steps
                that accumulate gradients. If ranks average gradients, pass all ranks' tokens divided by the number of
                ranks. Other reductions refuse it. None: the valid tokens of this call.
            kept: the ids that the sampler kept of each position of `target`, see `KeptIds`: the student's
                log-probabilities are of the softmax over these ids, and only their rows of its head are read; the
                teacher's are of the whole vocabulary. Pass `old_logps` of the same softmax; with `sequence_group`, the
                ids of this rank's positions. None: the whole vocabulary.
            vocab_shard: this rank's rows of `weight` and `bias`, if ranks split the vocabulary (`docs/distributed.md`).
                None: this rank has the whole vocabulary.
            cu_seqlens: (B + 1,), int32 or int64, for packed sequences without padding: the first row of each sequence,
                then N. Tensors of tokens are then (N, ...). None: the batch is padded.
            sequence_group: the ranks that split the sequences (`docs/distributed.md`); each passes its positions. Loss
                and metrics are those of whole sequences. None: this rank has whole sequences.

        Returns:
            (loss, metrics): the loss (), float32, or float64 for float64 inputs, and `PolicyMetrics`; `kl` is the mean
            of `log p(y) - log q(y)` in nats.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: shapes, devices, target ids or options do not fit. The message says what was expected and found.
        """
        head = LossHead(weight, bias, vocab_shard)
        check_projection(head, input)
        if target is None:
            raise ValueError("target must be the sampled tokens, got None")
        check_target(target, input, head=head)
        if attention_mask is not None:  # for the teacher too
            target = masked(target, attention_mask, self.options.ignore_index)
        states = {"teacher_weight": teacher_weight, "teacher_input": teacher_input, "teacher_bias": teacher_bias}
        given = [name for name, x in states.items() if x is not None]
        if teacher_logps is not None and given:
            raise ValueError(f"the teacher is given twice: as teacher_logps and as {', '.join(given)}")
        if teacher_logps is None:
            if teacher_weight is None or teacher_input is None:
                raise ValueError(
                    f"{type(self).__name__} needs a teacher: pass teacher_weight and teacher_input, or teacher_logps, "
                    f"got {', '.join(given) or 'none'}"
                )
            teacher = LossHead(teacher_weight, teacher_bias, vocab_shard)
            teacher_logps = self._teacher_logps(head, teacher, teacher_input, target)
        elif self._transforms_teacher:
            raise ValueError("teacher_options are for teacher_input, got teacher_logps, which have no transform")
        elif not isinstance(teacher_logps, Tensor) or teacher_logps.shape != target.shape:
            got = tuple(teacher_logps.shape) if isinstance(teacher_logps, Tensor) else shown(teacher_logps)
            raise ValueError(f"teacher_logps must be {tuple(target.shape)}, one value a token, got {got}")
        if advantages is None:
            advantages = torch.zeros(target.shape, dtype=accumulation_dtype(weight.dtype), device=target.device)
        return altered(self._policy, options=self.options)(
            weight,
            input,
            target,
            advantages,
            bias,
            old_logps=old_logps,
            ref_logps=teacher_logps,
            importance_weights=importance_weights,
            num_items=num_items,
            kept=kept,
            vocab_shard=vocab_shard,
            cu_seqlens=cu_seqlens,
            sequence_group=sequence_group,
        )

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @torch.no_grad()
    def _teacher_logps(self, head: LossHead, teacher: LossHead, teacher_input: Tensor, target: Tensor) -> Tensor:
        check_projection(teacher, teacher_input, "teacher_")
        if teacher.token_shape(teacher_input) != target.shape or teacher_input.device != target.device:
            raise ValueError(
                f"teacher_input must be {(*target.shape, 'H_teacher')} on {target.device}, as target "
                f"{tuple(target.shape)} is, got {tuple(teacher_input.shape)} on {teacher_input.device}"
            )
        columns, rows = head.columns, teacher.weight.shape[0]
        if rows < columns:
            raise ValueError(
                f"teacher_weight must have at least the {columns} rows of weight {tuple(head.weight.shape)}, got "
                f"{tuple(teacher.weight.shape)}"
            )
        weight, bias = teacher.weight, teacher.bias
        if rows > columns:
            weight, bias = weight[:columns], None if bias is None else bias[:columns]
        options, transform = self.options, self.teacher_options
        logps = linear_token_stats(
            weight,
            teacher_input,
            target,
            bias,
            softcap=transform.softcap,
            logit_scale=transform.logit_scale,
            temperature=transform.temperature,
            ignore_index=options.ignore_index,
            logits_budget=options.logits_budget,
            logits_dtype=transform.logits_dtype,
            vocab_shard=teacher.shard,
        ).logps
        assert logps is not None
        return logps

    def extra_repr(self) -> str:
        own = f", teacher_options={self.teacher_options}" if self._transforms_teacher else ""
        return f"{self.options}{own}"


@torch.no_grad()
def with_sampled_token(
    teacher_logps: Tensor, teacher_ids: Tensor, target: Tensor, target_logps: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a teacher's top-k with the sampled token added, as `teacher_logps` and `teacher_ids` of a loss.

    A divergence over these k + 2 bins also counts what the student sampled outside of the k tokens.

    Args:
        teacher_logps: (..., k), floating-point log-probabilities of k tokens in nats, -inf if missing.
        teacher_ids: (..., k), their ids, integers.
        target: (...), the sampled tokens' ids; negative ids are ignored.
        target_logps: (...), their log-probabilities under the teacher, floating-point.

    Returns:
        (logps, ids): (..., k + 1) each, in the dtypes of `teacher_logps` and `teacher_ids`. The last log-probability is
        -inf for a sampled token that is among the k.

    Raises:
        TypeError: `teacher_logps` or `target_logps` is no floating-point tensor.
        ValueError: shapes or devices do not fit.

    >>> logps, ids = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[3, 1]])
    >>> logps, ids = with_sampled_token(logps, ids, torch.tensor([4]), torch.tensor([0.1]).log())
    >>> logps.exp(), ids
    (tensor([[0.5000, 0.2000, 0.1000]]), tensor([[3, 1, 4]]))
    """
    for name, x in (("teacher_logps", teacher_logps), ("target_logps", target_logps)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {described(x)}")
    shape = (*target.shape, "k")
    if teacher_logps.shape[:-1] != target.shape or teacher_ids.shape != teacher_logps.shape:
        raise ValueError(
            f"teacher_logps and teacher_ids must be {shape}, k values for each of target, got "
            f"{tuple(teacher_logps.shape)} and {tuple(teacher_ids.shape)}"
        )
    if target_logps.shape != target.shape:
        raise ValueError(f"target_logps must be {tuple(target.shape)}, as target is, got {tuple(target_logps.shape)}")
    if len({x.device for x in (teacher_logps, teacher_ids, target, target_logps)}) > 1:
        raise ValueError("teacher_logps, teacher_ids, target and target_logps must be on one device")
    sampled = target[..., None].to(teacher_ids.dtype)
    among = ((teacher_ids == sampled) & (teacher_logps > -math.inf)).any(-1, keepdim=True)
    added = target_logps[..., None].to(teacher_logps.dtype).masked_fill(among, -math.inf)
    return torch.cat([teacher_logps, added], -1), torch.cat([teacher_ids, sampled.clamp(min=0)], -1)
