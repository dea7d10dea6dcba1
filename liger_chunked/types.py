"""Inputs of losses, options, heads, metrics."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict

import torch
from torch import Tensor

from liger_chunked.arguments import own_options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as ProcessGroup
else:
    try:
        from torch.distributed import ProcessGroup
    except ImportError:  # a torch without distributed

        class ProcessGroup:
            pass


class TokenStats(NamedTuple):
    """Statistics of logits, one value a token: what `linear_token_stats` returns and what losses read.

    With transformed logits `z` (softcap, scale and temperature of `LogitOptions`), `p = softmax(z)` and target `y`, in
    nats and, unless a shape is given, in the tokens' shape, (B, T) or (N,):

    - `logps`: `z_y - lse`, the log-probability of the target
    - `lse`: `logsumexp(z)`
    - `entropy`: `-sum(p * log(p))`
    - `mean_logits`: `sum(z) / V`
    - `argmax`: the first index of the largest logit, int64, -1 at ignored tokens
    - `is_top1`: `argmax == y`, bool
    - `log_sum_sq_probs`: `log(sum(p ** 2))`
    - `candidate_logps`: (B, T, K) or (N, K), `z_c - lse` of the `candidates` of `linear_token_stats`

    The first four are differentiable. Fields not requested are None. Floats are float32, or float64 for
    float64 inputs, and 0 at ignored tokens. With 16-bit hidden states, `logps` uses an unrounded `z_y`.
    """

    logps: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    argmax: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    candidate_logps: Tensor | None = None


OUTPUTS = tuple(name for name in TokenStats._fields if name != "candidate_logps")


class DeclaredStats(TokenStats):
    """`TokenStats` that the method of a loss reads. A field that the loss does not declare raises AttributeError.

    By index or in a loop it is None, as in `TokenStats`.
    """


def _read(index: int, name: str) -> property:
    def value(self: DeclaredStats) -> Tensor:
        if (x := self[index]) is None:
            raise AttributeError(f"token_stats.{name} was not computed: declare it, token_outputs = ({name!r},)")
        return x

    return property(value)


for _index, _name in enumerate(TokenStats._fields):
    # Properties, because a __getattribute__ would also run for every method.
    setattr(DeclaredStats, _name, _read(_index, _name))


# Upper bounds on |dL/dz| for upstream gradients of 1, by the name of the upstream gradient.
Slopes: TypeAlias = "Mapping[str, float | Tensor]"

DIFFERENTIABLE = ("logps", "lse", "entropy", "mean_logits")


@dataclass(frozen=True, eq=False)
class AdaptedWeight:
    """A weight (V, H) with a low-rank adapter, such as LoRA: `x @ weight.T + down(x) @ up.T + bias` are the logits.

    Args:
        weight: (V, H), usually frozen.
        up: (V, r). Concatenate several adapters along r.
        down: maps hidden states (..., H) to (..., r), with the adapter's dropout and scaling. A loss calls it once per
            tensor of hidden states.

    Gradients reach `weight`, `up` and the parameters of `down`. With a 16-bit weight, `up` and `down(x)` may be
    float32, as in PEFT; autocast rounds them.

    >>> lora_A, lora_B = torch.randn(2, 4), torch.zeros(11, 2)
    >>> weight = AdaptedWeight(torch.randn(11, 4), up=lora_B, down=lambda x: 0.5 * (x @ lora_A.T))
    >>> weight.shape
    torch.Size([11, 4])
    """

    weight: Tensor
    up: Tensor
    down: Callable[[Tensor], Tensor]

    @property
    def shape(self) -> torch.Size:
        """(V, H)."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        return self.weight.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def requires_grad(self) -> bool:
        return self.weight.requires_grad

    def __getitem__(self, rows: slice) -> AdaptedWeight:
        return AdaptedWeight(self.weight[rows], self.up[rows], self.down)

    def detach(self) -> AdaptedWeight:
        return AdaptedWeight(self.weight.detach(), self.up.detach(), self.down)

    def float(self) -> AdaptedWeight:
        return AdaptedWeight(self.weight.float(), self.up.float(), self.down)


Weight: TypeAlias = Tensor | AdaptedWeight


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of a vocabulary, under tensor parallelism.

    `weight`, `bias` and their gradients are this rank's rows. All else is the same on all ranks: targets (ids of the
    whole vocabulary), other tensors, options, which tensors require a gradient, and the loss.

    Args:
        group: the process group; None: the default one.
        start: id of this rank's first row.
        vocab_size: size of the whole vocabulary. Rows from this id on are padding: outside the softmax, zero gradient.
            Shards may differ in size, or be all padding.
        input_grad: the hidden states' gradient: "all_reduce", the whole; "partial", the rank's share, for the caller to
            sum; "reduce_scatter", this rank's part, if hidden states are (B, T / ranks, H), split in rank order.
    """

    group: ProcessGroup | None
    start: int
    vocab_size: int
    input_grad: Literal["all_reduce", "partial", "reduce_scatter"] = "all_reduce"

    def __post_init__(self) -> None:
        check_number("start", self.start, whole=True)
        check_number("vocab_size", self.vocab_size, whole=True)
        if self.start < 0 or self.vocab_size < 1:
            raise ValueError(f"start must be 0 or more and vocab_size positive, got {self.start} and {self.vocab_size}")
        if self.input_grad not in ("all_reduce", "partial", "reduce_scatter"):
            raise ValueError(
                f"input_grad must be 'all_reduce', 'partial' or 'reduce_scatter', got {shown(self.input_grad)}"
            )

    @property
    def ranks(self) -> int:
        return torch.distributed.get_world_size(self.group)

    def columns(self, rows: int) -> int:
        return max(0, min(rows, self.vocab_size - self.start))


class StandIn:
    """An object that stands for a tensor and computes it when a function needs its values."""

    def asked(self, name: str) -> Tensor:
        """Return the tensor for the function `name`."""
        raise NotImplementedError


class Head(NamedTuple):
    """A model's output projection, `x @ weight.T + bias`, as a `head_fn` gets it."""

    weight: Weight
    bias: Tensor | None = None


class RankFacts(NamedTuple):
    """What all ranks know of each other's parts of a vocabulary, so that all choose alike."""

    most_columns: int  # of the rank that has most
    have_wide_tiles: bool  # the GPUs of all ranks


class LossHead(NamedTuple):
    """The head that a loss was called with. `check_projection` fills in `rank_facts`, if there is a `shard`."""

    weight: Weight
    bias: Tensor | None = None
    shard: VocabShard | None = None
    rank_facts: RankFacts | None = None

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0] if self.shard is None else self.shard.vocab_size

    def token_shape(self, input: Tensor) -> tuple[int, ...]:
        """Return (B, T) or (N,), the shape of a target."""
        *batch, length = input.shape[:-1]
        scattered = self.shard is not None and self.shard.input_grad == "reduce_scatter"
        return *batch, length * self.shard.ranks if scattered and self.shard is not None else length

    @property
    def columns(self) -> int:
        """Logits of a token on this rank."""
        rows = self.weight.shape[0]
        return rows if self.shard is None else self.shard.columns(rows)


class HeadTensors(NamedTuple):
    """A `LossHead` whose adapter has seen the hidden states: `x @ weight.T + u @ up.T + bias`, `u` (N, r), `up` (V, r).

    Unlike `AdaptedWeight.down`, all of it is tensors, which an autograd Function can take.
    """

    weight: Tensor
    bias: Tensor | None = None
    up: Tensor | None = None
    shard: VocabShard | None = None

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0] if self.shard is None else self.shard.vocab_size

    @property
    def vocab_start(self) -> int:
        return 0 if self.shard is None else self.shard.start

    @property
    def is_padded(self) -> bool:
        rows = self.weight.shape[0]
        return self.shard is not None and self.shard.columns(rows) < rows

    def for_products(self, dtype: torch.dtype) -> HeadTensors:
        """Return what matrix products read: tensors in `dtype`, without the rows that pad this rank's vocabulary."""
        weight, bias, up, shard = self
        if weight.dtype == dtype and bias is None and up is None and shard is None:
            return self
        if shard is not None and self.is_padded:
            rows = slice(0, shard.columns(weight.shape[0]))
            weight, bias, up = weight[rows], None if bias is None else bias[rows], None if up is None else up[rows]
        return HeadTensors(
            weight.to(dtype), None if bias is None else bias.to(dtype), None if up is None else up.to(dtype), shard
        )


class LogitOptionsDict(TypedDict, total=False):
    ignore_index: int
    softcap: float | None
    logit_scale: float
    temperature: float
    logits_budget: int | float | str | None
    logits_dtype: torch.dtype | None


def described(x: Any) -> str:
    """Return a tensor's shape, dtype and device, or a type."""
    kind = type(x).__name__
    if not isinstance(x, Tensor):
        return kind
    try:
        shape = str(tuple(x.shape))
    except RuntimeError:  # nested tensors and uninitialized parameters
        shape = "tensor without a shape,"
    text = f"{shape} {str(x.dtype).removeprefix('torch.')} on {x.device}"
    return text if kind in ("Tensor", "Parameter", "Buffer") else f"{text}, a {kind}"


_SCALARS = (numbers.Number, str, bytes, type(None), torch.dtype)
_LONGEST_TEXT = 80


def caller_outside(*packages: str) -> FrameType:
    """Return the innermost frame that runs code of none of these packages, nor of a graph, or the outermost frame."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__")  # a graph's code has none
        if name is not None and name.partition(".")[0] not in packages:
            break
        frame = frame.f_back
    return frame


def shown(value: Any) -> str:
    """Format a setting, a long value by type and size."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return f"a tensor {described(value)}"
    if isinstance(value, _SCALARS):
        text = repr(value)
        return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return f"a {kind} of {len(value)}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return f"a {kind}" if shape is None or dtype is None else f"a {kind} {tuple(shape)} {dtype}"


def check_number(name: str, value: Any, *, whole: bool = False, optional: bool = False) -> None:
    kind = numbers.Integral if whole else numbers.Real
    if not (isinstance(value, kind) or (optional and value is None)):
        expected = ("an int" if whole else "a number") + (" or None" if optional else "")
        of_type = f", a {type(value).__name__}" if isinstance(value, _SCALARS) else ""
        raise TypeError(f"{name} must be {expected}, got {shown(value)}{of_type}")


_UNITS = {"b": 1} | {
    f"{prefix}{unit}": base**power
    for unit, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}


def budget_bytes(budget: int | float | str | None) -> int | None:
    """Convert a `logits_budget`, a positive whole number of bytes, from text with a unit.

    Units, in any case: B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (of 1024).

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
    """The logits' transform, ignored tokens, and memory budget.

    The transform is `softcap * tanh(logit_scale * z / softcap) / temperature`, or without a softcap
    `logit_scale * z / temperature`.

    Args:
        ignore_index: the target, an int, of tokens that are skipped.
        softcap: positive, Gemma's `final_logit_softcapping`. None: no softcap.
        logit_scale: finite factor, Cohere's `logit_scale`, Granite's `1 / logits_scaling`.
        temperature: positive divisor of the transformed logits.
        logits_budget: most bytes of logits in memory: a number, or a string such as "512MiB" (B, KB, MB, GB, TB are
            powers of 1000, KiB, MiB, GiB, TiB of 1024). None: automatic.
        logits_dtype: torch.float32 keeps the float32 sums of 16-bit products. Logits and their rounded gradient then
            take 6 bytes instead of 2. Not in distillation. None: the sums are rounded to the products' dtype.

    Raises:
        TypeError: a field is no number, or no int, where one is expected.
        ValueError: a field is out of range.
    """

    ignore_index: int = -100
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    logits_budget: int | float | str | None = None
    logits_dtype: torch.dtype | None = None

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
        if self.logits_dtype not in (None, torch.float32):
            raise ValueError(f"logits_dtype must be torch.float32 or None, got {shown(self.logits_dtype)}")

    @classmethod
    def of(cls, loss: type, options: LogitOptionsDict) -> LogitOptions:
        return cls(**own_options(loss, options, LogitOptionsDict.__annotations__))


@dataclass(frozen=True)
class Pairs:
    """`n` preference pairs, the input of a paired loss. Axis 1 is (chosen, rejected); `T` is the padded length.

    A loss may get parts of the batch, of any memory layout; `batch_...` fields describe all of it. Log-probabilities
    are in nats.

    - `logps` (n, 2): each sequence's log-probability under the policy: the sum over valid tokens, or the mean with
      `average_log_prob`, weighted with `ld_alpha`; float64
    - `ref_logps` (n, 2): the same under the reference, without gradient; zeros without one
    - `lengths` (n, 2): the number of valid tokens, at least 1
    - `mask` (n, 2, T): bool, True at valid tokens
    - `token_stats` (n, 2, T) each: `logps` and the statistics that the loss declares in `token_outputs`; zero at
      ignored tokens
    - `batch_size`: an int, the number of pairs of the batch
    - `batch_lengths` (2,): the numbers of valid tokens of the batch's chosen and of its rejected sequences, at least 1
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
        """(n, 2, T) `token_stats.logps`."""
        assert self.token_stats.logps is not None
        return self.token_stats.logps

    @property
    def logratios(self) -> Tensor:
        """(n, 2) `logps - ref_logps`."""
        return self.logps - self.ref_logps


@dataclass(frozen=True)
class Examples:
    """`n` labelled sequences, the input of an unpaired loss. `T` is the padded length.

    A loss may get parts of the batch, of any memory layout; `batch_...` fields describe all of it. Log-probabilities
    are in nats.

    - `logps` (n,): each sequence's log-probability under the policy: the sum over valid tokens, or the mean with
      `average_log_prob`; float64
    - `ref_logps` (n,): the same under the reference, without gradient; zeros without one
    - `desirable` (n,): bool, True if the sequence is desirable
    - `lengths` (n,): the number of valid tokens, at least 1
    - `reference_point` (): the call's `kl` in nats, at least 0, its `delta` in units of rewards, or zero; float64,
      without gradient
    - `mask` (n, T): bool, True at valid tokens
    - `token_stats` (n, T) each: `logps` and the statistics that the loss declares in `token_outputs`; zero at
      ignored tokens
    - `batch_size`: an int, the number of sequences of the batch
    - `batch_counts` (2,): the numbers of desirable and of undesirable sequences of the batch, at least 1
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
        """(n, T) `token_stats.logps`."""
        assert self.token_stats.logps is not None
        return self.token_stats.logps

    @property
    def logratios(self) -> Tensor:
        """(n,) `logps - ref_logps`."""
        return self.logps - self.ref_logps

    @property
    def signs(self) -> Tensor:
        """(n,): 1 if desirable, else -1."""
        return 2 * self.desirable.to(self.logps.dtype) - 1


# exp() overflows float32 at 88.7. e^80 leaves room for a factor of 6000, such as an advantage or a weight.
LARGEST_EXPONENT = 80.0
LARGEST = math.exp(LARGEST_EXPONENT)

# Replaces a log-probability of -inf: differences and products with 0 are defined, and float32 holds its square.
LOWEST_LOGP = -1e18


def saturating_exp(x: Tensor) -> Tensor:
    """Return `exp(x)`, but `exp(80)` = 5.5e34 with a gradient of zero where `x` is above 80.

    An overflow would turn a gradient of zero, of a ratio that is clipped, masked or weighed by 0, into NaN:
    `exp` multiplies it by infinity.

    >>> x = torch.tensor([0.0, 89.0, math.inf], requires_grad=True)
    >>> (0 * saturating_exp(x)).sum().backward()
    >>> x.grad
    tensor([0., 0., 0.])
    """
    return x.clamp(max=LARGEST_EXPONENT).exp()


@dataclass(frozen=True)
class Rollouts:
    """`n` sampled completions, the input of a policy loss. `T` is the padded length.

    A loss may get parts of the batch, of any memory layout; `batch_...` fields describe all of it. With
    `scope = "token"`, rows are tokens: `T` is 1, and values per sequence repeat. Ratios and weights are 1 at ignored
    tokens, other values 0. Log-probabilities are in nats, float32, or float64 for float64 inputs.

    - `logps` (n, T): of the sampled tokens under the policy
    - `old_logps` (n, T): under the sampling policy, without gradient, at least -1e18; without one, `logps` without
      gradient
    - `ref_logps` (n, T): under the reference, without gradient, at least -1e18; None without one
    - `log_ratio`: the logarithm of the importance ratio of the loss's `importance_level`, (n, T), or float64 (n, 1) per
      sequence
    - `advantages`: (n, T), or (n, 1) per sequence
    - `importance_weights`: the call's factors of the cost, (n, T) or (n, 1); None without any
    - `entropy` (n, T): of the policy, in nats
    - `mask` (n, T): bool, True at valid tokens
    - `lengths` (n, 1): the number of valid tokens, at least 1
    - `batch_size`: an int, the number of sequences of the batch
    - `batch_tokens`: an int, the number of valid tokens of the batch; in the capture of a CUDA graph a tensor ()
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
    batch_tokens: int | Tensor

    @property
    def ratio(self) -> Tensor:
        """The importance ratio, (n, T) or (n, 1). It is at most e^80, and constant beyond (`saturating_exp`)."""
        return saturating_exp(self.log_ratio)


class Clipped(NamedTuple):
    """Where the ratio exceeds its bound in the advantage's direction: what `clipped` of a policy loss returns.

    - `low`: bool in the shape of `Rollouts.ratio`, True below the bound; None without a lower bound
    - `high`: bool, in the same shape, True above it

    >>> from liger_chunked import LigerFusedLinearPolicyBase
    >>> def clipped(r):
    ...     return Clipped(low=(r.ratio < 0.8) & (r.advantages < 0), high=(r.ratio > 1.2) & (r.advantages > 0))
    >>> class PPO(LigerFusedLinearPolicyBase):
    ...     def policy_loss(self, r):
    ...         return -torch.min(r.ratio * r.advantages, r.ratio.clamp(0.8, 1.2) * r.advantages)
    >>> loss, metrics = PPO(clipped=clipped)(
    ...     torch.randn(11, 4), torch.randn(2, 3, 4), torch.randint(11, (2, 3)), torch.tensor([1.0, -1.0])
    ... )
    >>> metrics.clip_ratio.item()        # on-policy
    0.0
    """

    low: Tensor | None
    high: Tensor


class PreferenceMetrics(NamedTuple):
    """Metrics of a paired loss for a batch of n pairs, detached, float32, or float64 for float64 inputs.

    - `chosen_logps`, `rejected_logps` (n,): log-probabilities of sequences in nats, sums or means over tokens as in
      `Pairs.logps`
    - `chosen_logits_mean`, `rejected_logits_mean` (): mean of the transformed logits over vocabulary and valid tokens
    - `nll_loss` (): mean NLL of the chosen tokens in nats, before its weight; zero without NLL term
    - `chosen_rewards`, `rejected_rewards` (n,): `beta * (logps - ref_logps)`, with the loss's `reward_shape`
    """

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits_mean: Tensor
    rejected_logits_mean: Tensor
    nll_loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor

    @property
    def reward_accuracies(self) -> Tensor:
        """(n,): 1 where the chosen reward is greater, else 0."""
        return (self.chosen_rewards > self.rejected_rewards).to(self.chosen_rewards.dtype)

    @property
    def reward_margins(self) -> Tensor:
        """(n,): chosen minus rejected reward."""
        return self.chosen_rewards - self.rejected_rewards


class UnpairedPreferenceMetrics(NamedTuple):
    """Metrics of an unpaired loss for a batch, detached; "chosen" are the desirable sequences.

    All have the shape (). A mean over nothing is zero. Counts are integers; the others float32, or float64 for float64
    inputs.

    - `chosen_logps`, `rejected_logps`: mean over sequences of `Examples.logps`, in nats
    - `chosen_logits_mean`, `rejected_logits_mean`: mean of the transformed logits over vocabulary and valid tokens
    - `chosen_rewards`, `rejected_rewards`: mean over sequences of `beta * (logps - ref_logps)`
    - `reference_point`: the loss's, `kl` in nats, `delta` in units of rewards, or zero
    - `chosen_count`, `rejected_count`: numbers of sequences
    - `chosen_tokens`, `rejected_tokens`: numbers of valid tokens
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
    """Metrics of a policy loss for a batch, detached, all (), float32 or float64; None if not computed.

    Means are over valid tokens. Shares of values per sequence, such as a ratio at `importance_level="sequence"`, are
    over all sequences, as in TRL: an empty one has ratio 1, which is not clipped.

    - `entropy`: mean of the policy's entropy, in nats
    - `kl`: mean of the loss's estimate of `KL(policy || reference)`, in nats; None without a reference
    - `clip_ratio_low`, `clip_ratio_high`, `clip_ratio`: share of ratios clipped below, above, or either, in [0, 1]
    - `clip_ratio_low_min`, `clip_ratio_high_max`: the smallest of the sequences' shares clipped below, and the largest
      clipped above. With ratios per token, a sequence without tokens has none; NaN if all are empty
    - `ratio_mean`, `ratio_min`, `ratio_max`: of the importance ratios `pi / pi_old`, before any bound: of valid tokens,
      or of the sequences that have one, at levels with one ratio a sequence; 0, infinity and -infinity of none. None
      without `old_logps`
    """

    entropy: Tensor
    kl: Tensor | None = None
    clip_ratio_low: Tensor | None = None
    clip_ratio_high: Tensor | None = None
    clip_ratio: Tensor | None = None
    clip_ratio_low_min: Tensor | None = None
    clip_ratio_high_max: Tensor | None = None
    ratio_mean: Tensor | None = None
    ratio_min: Tensor | None = None
    ratio_max: Tensor | None = None


class CrossEntropyMetrics(NamedTuple):
    """Metrics of the cross entropy, detached; None if not requested by a `return_...` flag.

    - `z_loss`: the term of `lse_square_scale`, reduced like the loss, () or in the target's shape; a zero () without it
    - `token_accuracy` (): share of valid tokens whose argmax is the target, in [0, 1]
    - `predicted_tokens`: int64 in the target's shape, the argmax, -1 at ignored tokens
    """

    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


@dataclass(frozen=True)
class Divergence:
    """A divergence with closed-form gradient, of student logits `z` and teacher logits `t`.

    `p = softmax(z)` and `q = softmax(t)`:

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

    def __post_init__(self) -> None:
        # Kernels have no gradient by these: a trained one would get none, without an error.
        for name in ("beta", "on_student", "on_teacher"):
            check_number(name, getattr(self, name))

    @classmethod
    def jensen_shannon(cls, beta: float) -> Divergence:
        check_number("beta", beta)
        if not 0.0 <= beta <= 1.0:
            raise ValueError(f"beta must be in [0, 1], got {beta}")
        if beta in (0.0, 1.0):
            return cls("reverse_kl" if beta else "forward_kl")
        return cls("mixture", beta=beta, on_student=1.0 - beta, on_teacher=beta)

    @property
    def on_ratio(self) -> float:
        """Coefficient of `q / m` in `dD/dp`, in addition to `on_student * log(p / m)`; 0 for a JSD."""
        return self.on_student * self.beta - self.on_teacher * (1.0 - self.beta)


class DistillationMetrics(NamedTuple):
    """A distillation loss's terms before their weights, detached, float32, or float64 for float64 inputs.

    - `soft_loss` (): the divergence, in nats for divergences of KL's kind
    - `hard_loss` (): the targets' NLL in nats at temperature 1; zero without targets
    """

    soft_loss: Tensor
    hard_loss: Tensor


@dataclass(frozen=True)
class MemoryEstimate:
    """A step's memory above its inputs at the peak, by part, in bytes.

    - `logits`: logits or their exponentials, also the teacher's
    - `weight_grad`: gradients of weight and bias, and accumulators
    - `input_grad`: gradient of the hidden states
    - `hidden`: copies of valid tokens' hidden states
    - `other`: such as autocast's heads, autograd's saved tensors, the fused epilogue's sums

    `peak` is their sum; `print` shows the parts in MiB.
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
        parts = {name: round(n / 2**20) for name, n in asdict(self).items()}
        listed = ", ".join(f"{name} {mib}" for name, mib in parts.items() if mib)
        return f"{self.peak / 2**20:.0f} MiB" + (f": {listed}" if listed else "")


_ACCUMULATION = {torch.float64: torch.float64}
_FLOAT32 = torch.float32


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics: float32, or float64 for float64 inputs."""
    return _ACCUMULATION.get(dtype, _FLOAT32)
