"""The vocabulary of the library: what a loss sees, what a head is, what comes back. Knows torch alone."""

from __future__ import annotations

import math
import numbers
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from liger_chunked.arguments import own_options


class TokenStats(NamedTuple):
    """A few numbers per token, all that a loss on an `lm_head` needs to know of a row `z` of logits.

    With `z` the logits after the transform (`LogitOptions`), `p = softmax(z)` and `y` the target token, in nats:

    - `logps`: `z_y - lse`, the log-probability of the target (differentiable)
    - `lse`: `logsumexp(z)` (differentiable)
    - `entropy`: `-sum(p * log(p))` (differentiable)
    - `mean_logits`: `sum(z) / V` (differentiable)
    - `argmax`: the first index of the largest logit, int64
    - `is_top1`: `argmax == y`, bool
    - `log_sum_sq_probs`: `log(sum(p ** 2))`

    Every field has the shape of the tokens asked about; a field that was not asked for is None. Floating fields are
    float32, or float64 for float64 inputs.

    Of hidden states in 16 bits the logits are rounded to these, as the product writes them. `logps` is the exception:
    the target's logit is computed once more in float32 (`kernels/target_logit.py`), so that `logps + lse` is not the
    rounded `z_y` but nearer to the exact one. All other fields are those of the rounded logits.
    """

    logps: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    argmax: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None


class DeclaredStats(TokenStats):
    """`TokenStats` as a loss that declares what it reads sees them: a field that was not computed is an error."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if value is None and name in TokenStats._fields:
            raise AttributeError(f"token_stats.{name} was not computed: declare it, token_outputs = ({name!r},)")
        return value


DIFFERENTIABLE = ("logps", "lse", "entropy", "mean_logits")


class Head(NamedTuple):
    """An output projection, `logits = x @ weight.T + bias`: `weight` (V, H), `bias` (V,) or None."""

    weight: Tensor
    bias: Tensor | None = None


class LogitOptionsDict(TypedDict, total=False):
    """The keywords that every loss takes; see `LogitOptions` for their meaning and defaults."""

    ignore_index: int
    softcap: float | None
    logit_scale: float
    temperature: float
    logits_budget: int | float | str | None


def described(x: Any) -> str:
    """Shape, dtype and device of a tensor, never its values; the type of anything else."""
    kind = type(x).__name__
    if not isinstance(x, Tensor):
        return kind
    try:
        shape = str(tuple(x.shape))
    except RuntimeError:  # nested tensors and uninitialized parameters have no shape
        shape = "tensor without a shape,"
    text = f"{shape} {str(x.dtype).removeprefix('torch.')} on {x.device}"
    return text if kind in ("Tensor", "Parameter", "Buffer") else f"{text}, a {kind}"


_SCALARS = (numbers.Number, str, bytes, type(None))
_LONGEST_TEXT = 80  # characters of a string in a message


def shown(value: Any) -> str:
    """A setting for a message: a number, a short string or None as it is; other values by their type and size."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return f"a tensor {described(value)}"
    if isinstance(value, _SCALARS):
        text = repr(value)
        return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return f"a {kind} of {len(value)}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)  # of NumPy, for one
    return f"a {kind}" if shape is None or dtype is None else f"a {kind} {tuple(shape)} {dtype}"


def check_number(name: str, value: Any, *, whole: bool = False, optional: bool = False) -> None:
    """Refuse, in words, what is no number, or no whole one.

    Raises:
        TypeError: it is something else.
    """
    kind = numbers.Integral if whole else numbers.Real
    if not (isinstance(value, kind) or (optional and value is None)):
        expected = ("an int" if whole else "a number") + (" or None" if optional else "")
        of_type = f", a {type(value).__name__}" if isinstance(value, _SCALARS) else ""
        raise TypeError(f"{name} must be {expected}, got {shown(value)}{of_type}")


# Bytes of a unit. Case does not matter.
_UNITS = {"b": 1} | {
    f"{prefix}{unit}": base**power
    for unit, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}


def budget_bytes(budget: int | float | str | None) -> int | None:
    """A `logits_budget` in bytes; None stays None.

    A number is bytes. A string is a number, with a unit or without: B, KB, MB, GB and TB are powers of 1000; KiB, MiB,
    GiB and TiB are powers of 1024. Upper and lower case are the same, and a space may stand before the unit.

    Raises:
        TypeError: something else.
        ValueError: a string that is no size, a number that is not whole, less than one byte.

    >>> budget_bytes(1e9), budget_bytes("1GB"), budget_bytes("512MiB"), budget_bytes("256 mb")
    (1000000000, 1000000000, 536870912, 256000000)
    """
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, (numbers.Real, str)):
        raise TypeError(
            f"logits_budget must be a number of bytes, a string such as '512MiB', or None, got {shown(budget)}"
        )
    if isinstance(budget, str):
        text = budget.strip().lower()
        number = text.rstrip("bikmgt")
        try:
            size = float(number) * _UNITS[text[len(number) :] or "b"]
        except (ValueError, KeyError):
            size = math.nan
        if not math.isfinite(size):
            raise ValueError(
                "logits_budget must be a number of bytes, or one with a unit: B, KB, MB, GB, TB (powers of 1000), "
                f"KiB, MiB, GiB, TiB (powers of 1024), got {budget!r}"
            )
    elif isinstance(budget, numbers.Integral):
        size = int(budget)
    else:
        size = float(budget)
        if not size.is_integer():
            raise ValueError(f"logits_budget must be a whole number of bytes, got {budget!r}")
    if size < 1:
        raise ValueError(f"logits_budget must be a positive number of bytes or None, got {budget}")
    return int(size)


@dataclass(frozen=True)
class LogitOptions:
    """What happens between the projection and the statistics, and how much memory it may take.

    The transform of a row of logits is `z = softcap * tanh(logit_scale * z / softcap) / temperature`; without a
    softcap, `z = logit_scale * z / temperature`.

    Args:
        ignore_index: tokens with this target take part in nothing, and cost nothing.
        softcap: Gemma's `final_logit_softcapping`; None for none.
        logit_scale: multiplied (Cohere's `logit_scale`, Granite's `1 / logits_scaling`).
        temperature: divides last.
        logits_budget: the most bytes of logits alive at once; None for an automatic choice. Bytes as a number (`1e9`),
            or a string with a unit ("1GB", "512MiB"), see `budget_bytes`. The attribute is an int.

    Raises:
        TypeError: one that is no number.
        ValueError: a softcap or temperature that is not positive, a scale that is not finite, a budget under one byte
            or in an unknown unit.
    """

    ignore_index: int = -100
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    logits_budget: int | float | str | None = None

    def __post_init__(self) -> None:
        check_number("ignore_index", self.ignore_index, whole=True)
        check_number("softcap", self.softcap, optional=True)
        check_number("logit_scale", self.logit_scale)
        check_number("temperature", self.temperature)
        budget = budget_bytes(self.logits_budget)
        if budget is not self.logits_budget:
            object.__setattr__(self, "logits_budget", budget)
        if self.softcap is not None and not (self.softcap > 0 and math.isfinite(self.softcap)):
            raise ValueError(f"softcap must be a positive number or None, got {self.softcap}")
        if not math.isfinite(self.logit_scale):
            raise ValueError(f"logit_scale must be finite, got {self.logit_scale}")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be positive, got {self.temperature}")

    @classmethod
    def of(cls, loss: type, options: LogitOptionsDict) -> LogitOptions:
        """From the keywords that the constructor of a loss does not know itself.

        Raises:
            TypeError: one that the loss does not have; the message names the one that was meant, where there is one.
            ValueError: a bad option.
        """
        return cls(**own_options(loss, options, LogitOptionsDict.__annotations__))


@dataclass(frozen=True)
class Pairs:
    """`n` preference pairs as a loss sees them. Axis 1 is (chosen, rejected); `T` is the padded length.

    A loss may be handed the batch in several parts; `batch_size` and `batch_lengths` always speak of the whole batch.
    How tensors lie in memory depends on the part: `reshape` them, as `view` may fail.

    - `logps` (n, 2): log-probability of each sequence under the policy, in nats: the sum over its valid tokens, or
      their mean with `average_log_prob`, weighted with `ld_alpha`; float64, for small differences of large sums
    - `ref_logps` (n, 2): the same under the reference, without gradient; zeros where the loss has no reference
    - `lengths` (n, 2): valid tokens of each sequence, at least 1 so that one may divide by it
    - `mask` (n, 2, T): True at the valid tokens
    - `token_stats`: `TokenStats` of shape (n, 2, T), zero at ignored tokens
    - `batch_size`: pairs in the whole batch
    - `batch_lengths` (2,): valid tokens of all chosen and of all rejected sequences of the whole batch, at least 1
    """

    logps: Tensor
    ref_logps: Tensor
    lengths: Tensor
    mask: Tensor
    token_stats: TokenStats
    batch_size: int
    batch_lengths: Tensor

    @property
    def token_logps(self) -> Tensor:
        """(n, 2, T) log-probability of each token, in nats, zero at ignored tokens."""
        assert self.token_stats.logps is not None
        return self.token_stats.logps

    @property
    def logratios(self) -> Tensor:
        """(n, 2) `logps - ref_logps`, in nats."""
        return self.logps - self.ref_logps


@dataclass(frozen=True)
class Examples:
    """`n` sequences with a label each, as a loss on unpaired preferences sees them; `T` is the padded length.

    A loss may be handed the batch in several parts; `batch_size` and `batch_counts` always speak of the whole batch.

    - `logps` (n,): log-probability of each sequence under the policy, in nats: the sum over its valid tokens, or their
      mean with `average_log_prob`; float64, as losses look at small differences of large sums
    - `ref_logps` (n,): the same under the reference, without gradient; zeros where the loss has no reference
    - `desirable` (n,): True for a sequence to learn, False for one to unlearn
    - `lengths` (n,): valid tokens of each sequence, at least 1 so that one may divide by it
    - `reference_point` (): what a sequence is judged against, without gradient: `kl` in nats or `delta` in rewards, as
      the loss asks (`LigerFusedLinearUnpairedPreferenceBase.reference_point`); zero where it asks for none
    - `mask` (n, T): True at the valid tokens
    - `token_stats`: `TokenStats` of shape (n, T), zero at ignored tokens
    - `batch_size`: sequences in the whole batch
    - `batch_counts` (2,): desirable and undesirable sequences of the whole batch, at least 1
    """

    logps: Tensor
    ref_logps: Tensor
    desirable: Tensor
    lengths: Tensor
    reference_point: Tensor
    mask: Tensor
    token_stats: TokenStats
    batch_size: int
    batch_counts: Tensor

    @property
    def token_logps(self) -> Tensor:
        """(n, T) log-probability of each token, in nats, zero at ignored tokens."""
        assert self.token_stats.logps is not None
        return self.token_stats.logps

    @property
    def logratios(self) -> Tensor:
        """(n,) `logps - ref_logps`, in nats."""
        return self.logps - self.ref_logps

    @property
    def signs(self) -> Tensor:
        """(n,) 1 for a desirable sequence, -1 for an undesirable one, in the dtype of `logps`."""
        return 2 * self.desirable.to(self.logps.dtype) - 1


@dataclass(frozen=True)
class Rollouts:
    """`n` sampled completions as a policy loss sees them; `T` is the padded length.

    A loss that does not mix tokens (`scope = "token"`) sees any subset of the batch's tokens instead, each as a row of
    its own: then `T` is 1, and what belongs to a sequence is repeated for each of its tokens. A loss may be handed the
    batch in several parts; `batch_size` and `batch_tokens` always speak of the whole batch. At ignored tokens
    log-probabilities, advantages and entropies are 0, and ratios and weights 1.

    - `logps` (n, T): log-probability of each token under the policy, in nats
    - `old_logps` (n, T): the same under the policy that sampled it, without gradient; where it was not given, that is
      `logps` itself, and the ratio is exactly 1
    - `ref_logps` (n, T): the same under the reference, without gradient; None without a reference
    - `log_ratio`: log of the importance ratio at the level of the loss, in nats: (n, T) `logps - old_logps`, or (n, 1)
      one a sequence, in float64
    - `advantages` (n, T), or (n, 1) one a sequence
    - `importance_weights` (n, T), or (n, 1) one a sequence: corrections for a sampler that is not the old policy; None
      where not given
    - `entropy` (n, T): of the policy's distribution at each token, in nats
    - `mask` (n, T): True at the valid tokens
    - `lengths` (n, 1): valid tokens of the sequence, at least 1 so that one may divide by it
    - `batch_size`: sequences in the whole batch
    - `batch_tokens`: valid tokens in the whole batch
    """

    logps: Tensor
    old_logps: Tensor
    ref_logps: Tensor | None
    log_ratio: Tensor
    advantages: Tensor
    importance_weights: Tensor | None
    entropy: Tensor
    mask: Tensor
    lengths: Tensor
    batch_size: int
    batch_tokens: int

    @property
    def ratio(self) -> Tensor:
        """The importance ratio at the level of the loss, (n, T) or (n, 1): `exp(log_ratio)`."""
        return self.log_ratio.exp()


class PreferenceMetrics(NamedTuple):
    """What a paired preference loss reports, detached.

    - `chosen_logps`, `rejected_logps` (n,): `Pairs.logps`, in nats
    - `chosen_logits_mean`, `rejected_logits_mean` (): mean logit over the vocabulary and the valid tokens
    - `nll_loss` (): nats per valid chosen token; zero unless the loss has an NLL term
    - `chosen_rewards`, `rejected_rewards` (n,): `beta * (logps - ref_logps)`, unless the loss shapes its rewards
    - `reward_accuracies` (n,): 1 where the chosen reward is greater than the rejected one, else 0; TRL logs its mean as
      `rewards/accuracies`
    - `reward_margins` (n,): chosen minus rejected reward; TRL logs its mean as `rewards/margins`
    """

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor
    rejected_logits_mean: Tensor
    nll_loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    reward_accuracies: Tensor
    reward_margins: Tensor


class UnpairedPreferenceMetrics(NamedTuple):
    """What a loss on unpaired preferences reports, detached; "chosen" are the desirable sequences.

    To average over ranks, multiply each mean by its count and add. A mean over nothing is zero.

    - `chosen_logps`, `rejected_logps` (): mean of `Examples.logps` over the sequences, in nats
    - `chosen_logits_mean`, `rejected_logits_mean` (): mean logit over the vocabulary and the valid tokens
    - `chosen_rewards`, `rejected_rewards` (): mean of `beta * (logps - ref_logps)` over the sequences
    - `reference_point` (): `Examples.reference_point`
    - `chosen_count`, `rejected_count` (): sequences, int64
    - `chosen_tokens`, `rejected_tokens` (): valid tokens, int64
    """

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor
    rejected_logits_mean: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    reference_point: Tensor
    chosen_count: Tensor
    rejected_count: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor


class PolicyMetrics(NamedTuple):
    """What a policy loss reports, detached; a field that was not computed is None.

    Means are over the valid tokens of the batch, and over its sequences that have any where there is one value a
    sequence; over nothing they are zero.

    - `entropy` (): mean entropy, in nats
    - `kl` (): mean estimate of KL(policy || reference), in nats, as it enters the loss; None without a reference
    - `clip_ratio_low`, `clip_ratio_high` (): share whose ratio is clipped from below, from above, and so has no
      gradient; None where the loss does not clip so
    - `clip_ratio` (): share whose ratio is clipped on either side
    """

    entropy: Tensor
    kl: Tensor | None = None
    clip_ratio_low: Tensor | None = None
    clip_ratio_high: Tensor | None = None
    clip_ratio: Tensor | None = None


class CrossEntropyMetrics(NamedTuple):
    """What the cross entropy reports beside the loss, detached; a field that was not asked for is None.

    - `z_loss`: the part of the loss that `lse_square_scale` adds, reduced like the loss
    - `token_accuracy` (): share of the valid tokens whose target is the argmax
    - `predicted_tokens`: the argmax, in the shape of the target, -1 at ignored tokens
    """

    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


@dataclass(frozen=True)
class Divergence:
    """A divergence of a teacher's logits `t` from a student's `z` whose gradient is known in closed form.

    With `p = softmax(z)`, `q = softmax(t)`, `KL(a || b) = sum(a * log(a / b))`:

    - "forward_kl": `KL(q || p)`
    - "reverse_kl": `KL(p || q)`
    - "mixture": `on_teacher * KL(q || m) + on_student * KL(p || m)` with `m = (1 - beta) * p + beta * q`
    - "tvd": `sum(|p - q|) / 2`
    - "cosine": `1 - z @ t / (|z| |t|)`
    """

    kind: Literal["forward_kl", "reverse_kl", "mixture", "tvd", "cosine"]
    beta: float = 0.0
    on_student: float = 0.0
    on_teacher: float = 0.0

    @classmethod
    def jensen_shannon(cls, beta: float) -> Divergence:
        """`beta * KL(q || m) + (1 - beta) * KL(p || m)`; at its ends, where that is 0, its limit over beta (1 - beta).

        Raises:
            TypeError: a beta that is no number.
            ValueError: a beta outside [0, 1].
        """
        check_number("beta", beta)
        if not 0.0 <= beta <= 1.0:
            raise ValueError(f"beta must be in [0, 1], got {beta}")
        if beta in (0.0, 1.0):
            return cls("reverse_kl" if beta else "forward_kl")
        return cls("mixture", beta=beta, on_student=1.0 - beta, on_teacher=beta)

    @property
    def on_ratio(self) -> float:
        """The coefficient of `q / m` in `dD/dp`, beside `on_student * log(p / m)`; none for a JSD."""
        return self.on_student * self.beta - self.on_teacher * (1.0 - self.beta)


class DistillationMetrics(NamedTuple):
    """The two terms of a distillation loss before their weights, detached, each reduced like the loss.

    - `soft_loss` (): the divergence of teacher and student
    - `hard_loss` (): the negative log-likelihood of the targets, in nats at temperature 1; zero without a target
    """

    soft_loss: Tensor
    hard_loss: Tensor


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a step holds above its inputs at the moment when they are most.

    - `logits`: the buffer of the logits or of their exponentials, and a teacher's logits
    - `weight_grad`: the gradients of weight and bias, and the accumulators that they are rounded from
    - `input_grad`: that of the hidden states, and what it is put together from
    - `hidden`: copies of the hidden states of tokens that have a target
    - `other`: numbers per token, copies of a head under autocast, what a divergence by autograd keeps, and what stands
      beside exponentials (`EpiloguePass`): partial sums, or a product in float32
    """

    logits: int = 0
    weight_grad: int = 0
    input_grad: int = 0
    hidden: int = 0
    other: int = 0

    @property
    def peak(self) -> int:
        return self.logits + self.weight_grad + self.input_grad + self.hidden + self.other

    def __str__(self) -> str:
        """In MiB, without the parts that are not there."""
        parts = {name: round(n / 2**20) for name, n in asdict(self).items()}
        listed = ", ".join(f"{name} {mib}" for name, mib in parts.items() if mib)
        return f"{self.peak / 2**20:.0f} MiB" + (f": {listed}" if listed else "")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of token statistics and accumulators for inputs of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
