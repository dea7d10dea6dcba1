"""SFT cross entropy, with label smoothing, z-loss, focal loss, token weights and an entropy bonus.

All are functions of the token statistics, which autograd differentiates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, cast, overload

import torch
from torch import Tensor
from typing_extensions import TypeVar, Unpack

from liger_chunked.calls import check_constants, entry_point, typed_like
from liger_chunked.engine import (
    Group,
    Objective,
    Rows,
    SequenceSplit,
    check_group,
    check_projection,
    check_target,
    plain,
    select_rows,
    token_stats,
    whole,
)
from liger_chunked.losses.base import StatsLoss
from liger_chunked.losses.formulas import complement
from liger_chunked.losses.settings import check_finite, checked_items, is_set
from liger_chunked.types import (
    CrossEntropyMetrics,
    LogitOptions,
    LogitOptionsDict,
    LossHead,
    ProcessGroup,
    TokenStats,
    VocabShard,
    Weight,
    accumulation_dtype,
    described,
    shown,
)

_REDUCTIONS = ("mean", "sum", "none")


def _check_class_weight(ce_weight: Tensor) -> Tensor:
    check_constants("LigerFusedLinearCrossEntropyLoss", [("ce_weight", ce_weight)])  # of the constructor, too
    (ce_weight,) = plain(("ce_weight",), (ce_weight,))
    if not isinstance(ce_weight, Tensor) or ce_weight.ndim != 1 or not ce_weight.is_floating_point():
        raise ValueError(f"ce_weight must be floating (V,), got {described(ce_weight)}")
    return ce_weight


def _class_weight(ce_weight: Tensor, head: LossHead) -> Tensor:
    ce_weight = _check_class_weight(ce_weight)
    if ce_weight.shape[0] != head.vocab_size:
        expected = f"row of weight {tuple(head.weight.shape)}"
        if head.shard is not None:
            expected = f"of the {head.vocab_size} ids of the whole vocabulary"
        raise ValueError(f"ce_weight must have one value for each {expected}, got {tuple(ce_weight.shape)}")
    return ce_weight.to(head.weight.device, accumulation_dtype(head.weight.dtype)).contiguous()


def _weighed(x: Tensor, weights: Tensor | None) -> Tensor:
    return x if weights is None else x * weights


@dataclass(frozen=True, eq=False)
class _WeighedTokens(Objective):
    """The loss of a call: two sums over tokens, with different denominators."""

    loss_module: LigerFusedLinearCrossEntropyLoss[Any]
    target: Tensor  # (N,)
    class_weight: Tensor | None  # (V,)
    weights: Tensor | None  # (N,)
    per_token: float | Tensor  # divides the regularizer
    per_class: float | Tensor  # divides the cross entropy

    def loss(self, values: TokenStats, index: slice | Tensor) -> Tensor:
        weights = None if self.weights is None else self.weights[index]
        of_tokens = self.loss_module._cross_entropy(values, self.target[index], self.class_weight)
        loss = _weighed(of_tokens, weights).sum(dtype=torch.float64) / self.per_class
        regularizer = self.loss_module._regularizer(values)
        if regularizer is None:
            return loss
        return loss + _weighed(regularizer, weights).sum(dtype=torch.float64) / self.per_token


class CrossEntropySettings(LogitOptionsDict, total=False):
    """The settings on which the type of the result does not depend."""

    reduction: str
    label_smoothing: float
    lse_square_scale: float
    ce_weight: Tensor | None
    focal_gamma: float
    dft: bool
    entropy_weight: float


WithMetrics: TypeAlias = tuple[Tensor, CrossEntropyMetrics]
# What a call returns, for type checkers: a tensor, or with a `return_...` flag a tuple.
Result = TypeVar("Result", bound=Tensor | WithMetrics, default=Tensor)


class LigerFusedLinearCrossEntropyLoss(StatsLoss, Generic[Result]):
    """Cross entropy of `lm_head` logits against token ids, fused.

    Equal, in nats, to

        z = transform(input @ weight.T + bias).float()
        loss = F.cross_entropy(z, target, ce_weight, ignore_index=..., label_smoothing=..., reduction=...)
        z = z[target != ignore_index]
        loss += lse_square_scale * (z.logsumexp(-1) ** 2).mean()
        loss -= entropy_weight * Categorical(logits=z).entropy().mean()

    but 0 without targets.

    Args:
        reduction: "mean" over valid tokens, "sum", or "none", one loss a token, whose gradients are computed in the
            backward.
        label_smoothing: share of the target spread over the vocabulary, in [0, 1] (https://arxiv.org/abs/1512.00567).
        lse_square_scale: weight of the z-loss, not negative (PaLM, https://arxiv.org/abs/2204.02311, section 5).
        ce_weight: (V,), floating-point class weights, without gradient. None: 1.
        focal_gamma: exponent of the factor `(1 - p_y) ** focal_gamma`, not negative (https://arxiv.org/abs/1708.02002,
            equation 4).
        dft: multiply by the constant `p_y` (Dynamic Fine-Tuning, https://arxiv.org/abs/2508.05629). Like the focal
            factor, not in the denominator.
        entropy_weight: weight of the entropy bonus (https://arxiv.org/abs/1701.06548).
        return_z_loss: a call returns (loss, metrics), with `metrics.z_loss`, the z-loss as it is part of the loss.
        return_token_accuracy: a call returns (loss, metrics), with `metrics.token_accuracy`, the share of valid tokens
            whose most probable token is the target.
        return_predicted_tokens: a call returns (loss, metrics), with `metrics.predicted_tokens`, the most probable
            token ids, shaped like the target, -1 at ignored tokens.
        **options: fields of `LogitOptions`: `ignore_index` (-100) marks targets to skip; `softcap`, `logit_scale` and
            `temperature` transform the logits; `logits_budget` is the most bytes of logits in memory, such as "512MiB"
            (None: automatic); `logits_dtype=torch.float32` keeps the float32 sums of 16-bit products (None: rounded).

    Smoothing, focal loss and DFT exclude each other.

    >>> weight, input = torch.randn(11, 4, requires_grad=True), torch.randn(2, 3, 4)
    >>> target = torch.tensor([[1, 2, -100], [3, 4, 5]])
    >>> loss = LigerFusedLinearCrossEntropyLoss()(weight, input, target)
    >>> expected = torch.nn.functional.cross_entropy((input @ weight.T).view(-1, 11), target.view(-1))
    >>> bool(torch.isclose(loss, expected))
    True
    """

    ce_weight: Tensor | None
    _group: ClassVar[Group] = "token"

    @overload
    def __init__(
        self: LigerFusedLinearCrossEntropyLoss[Tensor],
        *,
        return_z_loss: Literal[False] = False,
        return_token_accuracy: Literal[False] = False,
        return_predicted_tokens: Literal[False] = False,
        **settings: Unpack[CrossEntropySettings],
    ) -> None: ...

    @overload
    def __init__(
        self: LigerFusedLinearCrossEntropyLoss[WithMetrics],
        *,
        return_z_loss: Literal[True],
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        **settings: Unpack[CrossEntropySettings],
    ) -> None: ...

    @overload
    def __init__(
        self: LigerFusedLinearCrossEntropyLoss[WithMetrics],
        *,
        return_z_loss: bool = False,
        return_token_accuracy: Literal[True],
        return_predicted_tokens: bool = False,
        **settings: Unpack[CrossEntropySettings],
    ) -> None: ...

    @overload
    def __init__(
        self: LigerFusedLinearCrossEntropyLoss[WithMetrics],
        *,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: Literal[True],
        **settings: Unpack[CrossEntropySettings],
    ) -> None: ...

    @overload
    def __init__(
        self: LigerFusedLinearCrossEntropyLoss[Tensor | WithMetrics],
        *,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        **settings: Unpack[CrossEntropySettings],
    ) -> None: ...

    def __init__(
        self,
        *,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        ce_weight: Tensor | None = None,
        focal_gamma: float = 0.0,
        dft: bool = False,
        entropy_weight: float = 0.0,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        **options: Unpack[LogitOptionsDict],
    ) -> None:
        super().__init__()
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction must be one of {_REDUCTIONS}, got {shown(reduction)}")
        check_finite("label_smoothing", label_smoothing, minimum=0, maximum=1)
        check_finite("lse_square_scale", lse_square_scale, minimum=0)
        check_finite("focal_gamma", focal_gamma, minimum=0)
        check_finite("entropy_weight", entropy_weight)
        if ce_weight is not None:
            _check_class_weight(ce_weight)
        shapes = {"label_smoothing": label_smoothing, "focal_gamma": focal_gamma, "dft": dft}
        if sum(bool(setting) for setting in shapes.values()) > 1:
            raise ValueError(f"at most one of label_smoothing, focal_gamma and dft can be set, got {shapes}")
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.lse_square_scale = lse_square_scale
        self.focal_gamma = focal_gamma
        self.dft = dft
        self.entropy_weight = entropy_weight
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens
        self.options = LogitOptions.of(type(self), options)
        self.register_buffer("ce_weight", ce_weight, persistent=False)

    @entry_point
    def forward(
        self,
        weight: Weight,
        input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        num_items: float | Tensor | None = None,
        token_weights: Tensor | None = None,
        ce_weight: Tensor | None = None,
        vocab_shard: VocabShard | None = None,
        sequence_group: ProcessGroup | None = None,
    ) -> Result:
        """Return the loss, with metrics if a `return_...` flag is set.

        Args:
            weight: (V, H), the head's matrix, such as `lm_head.weight`, or an `AdaptedWeight`.
            input: (B, T, H) or (N, H), hidden states in the dtype of `weight`, or in any under autocast.
            target: (B, T) or (N,), integer ids of the tokens that `input` predicts (shift labels, see `shifted`), or
                `ignore_index`.
            bias: (V,) or None.
            num_items: divisor of the reduction "mean", a number or (): the valid tokens of all steps that accumulate
                gradients (transformers' `num_items_in_batch`). 0 counts as 1: a step without tokens has loss 0. None:
                the valid tokens of this call.
            token_weights: floating-point factors of tokens, shaped like `target`. "mean" without `num_items` divides by
                their sum (for the cross entropy, times `ce_weight`), or by 1 if that is 0. None: 1.
            ce_weight: (V,), floating-point class weights. None: the constructor's.
            vocab_shard: this rank's rows of `weight` and `bias`, if ranks split the vocabulary (`docs/distributed.md`).
                None: this rank has the whole vocabulary.
            sequence_group: the ranks that split the sequences (`docs/distributed.md`). Loss and metrics cover whole
                sequences, but `predicted_tokens` and `reduction="none"` this rank's positions. None: this rank has
                whole sequences.

        Returns:
            The loss in nats, float32, or float64 for float64 inputs: (), or with `reduction="none"` shaped like
            `target`. With a `return_...` flag, the tuple (loss, `CrossEntropyMetrics`).

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: shapes, devices, target ids or options do not fit. The message says what was expected and found.
        """
        head = check_projection(LossHead(weight, bias, vocab_shard), input)
        check_target(target, input, head=head)
        if num_items is not None and self.reduction != "mean":
            raise ValueError(f"num_items divides a mean, but reduction is {self.reduction!r}")
        if num_items is not None:
            num_items = checked_items(num_items, input, accumulation_dtype(weight.dtype))
        weights = None if token_weights is None else self._token_weights(token_weights, target, weight)
        ce_weight = self.ce_weight if ce_weight is None else ce_weight
        class_weight = None if ce_weight is None else _class_weight(ce_weight, head)
        if sequence_group is not None:
            check_group(sequence_group)
        target, split = target.long(), None
        if sequence_group is not None and self.reduction != "none":
            split = SequenceSplit.of(sequence_group, head, input)
            target = whole(target, split)
        if weights is not None:
            weights = whole(weights, split).reshape(-1)
        rows = select_rows(target, self._group, self.options.ignore_index, head.vocab_size, sequences=split)
        if weights is not None:
            weights = rows.fill_ignored(weights)
        if self.reduction == "none":
            loss, z_loss, stats = self._per_token(head, input, target, rows, class_weight, weights)
        else:
            loss, z_loss, stats = self._reduced(head, input, target, rows, class_weight, weights, num_items)
        if not (self.return_z_loss or self.return_token_accuracy or self.return_predicted_tokens):
            return cast(Result, loss)
        return cast(Result, (loss, self._metrics(stats, target, rows, z_loss, split)))

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def _token_weights(self, token_weights: Tensor, target: Tensor, weight: Weight) -> Tensor:
        if not isinstance(token_weights, Tensor) or token_weights.shape != target.shape:
            got = tuple(token_weights.shape) if isinstance(token_weights, Tensor) else type(token_weights).__name__
            raise ValueError(f"token_weights must be {tuple(target.shape)}, as target is, got {got}")
        if token_weights.device != target.device:
            raise ValueError(f"token_weights is on {token_weights.device}, target on {target.device}")
        return token_weights.to(accumulation_dtype(weight.dtype))

    @property
    def _outputs(self) -> tuple[str, ...]:
        top1 = ("is_top1",) if self.return_token_accuracy else ()
        argmax = ("argmax",) if self.return_predicted_tokens else ()
        return (*self._differentiates, *argmax, *top1)

    @property
    def _differentiates(self) -> tuple[str, ...]:
        smooths, squares, bonus = map(is_set, (self.label_smoothing, self.lse_square_scale, self.entropy_weight))
        wanted = {"lse": smooths or squares, "mean_logits": smooths, "entropy": bonus}
        return ("logps", *(name for name, is_wanted in wanted.items() if is_wanted))

    def _smoothing_weight(self, class_weight: Tensor | None) -> Tensor | None:
        return class_weight if is_set(self.label_smoothing) else None

    def _cross_entropy(self, stats: TokenStats, target: Tensor, class_weight: Tensor | None) -> Tensor:
        """Return each token's cross entropy, which the sum of class weights divides in a mean."""
        assert stats.logps is not None
        loss = -stats.logps if class_weight is None else -stats.logps * class_weight[target]
        if is_set(self.focal_gamma):
            loss = loss * complement(stats.logps) ** self.focal_gamma
        if self.dft:
            loss = loss * stats.logps.detach().exp()
        if is_set(self.label_smoothing):
            assert stats.lse is not None and stats.mean_logits is not None
            # -1/V sum_v w_v log p_v = mean(w) lse - 1/V sum_v w_v z_v
            lse = stats.lse if class_weight is None else stats.lse * class_weight.mean()
            uniform = lse - stats.mean_logits
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * uniform
        return loss

    def _z_loss(self, stats: TokenStats) -> Tensor:
        assert stats.lse is not None
        return self.lse_square_scale * stats.lse.square()

    def _regularizer(self, stats: TokenStats) -> Tensor | None:
        """Return each token's z-loss and entropy bonus, which the number of tokens divides in a mean."""
        z_loss = self._z_loss(stats) if is_set(self.lse_square_scale) else None
        if not is_set(self.entropy_weight):
            return z_loss
        assert stats.entropy is not None
        bonus = -self.entropy_weight * stats.entropy
        return bonus if z_loss is None else z_loss + bonus

    def _per_token(
        self,
        head: LossHead,
        input: Tensor,
        target: Tensor,
        rows: Rows,
        class_weight: Tensor | None,
        weights: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, TokenStats]:
        stats = token_stats(head, input, rows, self._outputs, self.options, self._smoothing_weight(class_weight))
        valid = rows.mask
        assert valid is not None

        def shaped(x: Tensor) -> Tensor:
            return _weighed(x, weights).where(valid, 0).view(target.shape)

        loss = self._cross_entropy(stats, target.reshape(-1).where(valid, 0), class_weight)
        regularizer = self._regularizer(stats)
        loss = loss if regularizer is None else loss + regularizer
        z_loss = shaped(self._z_loss(stats)) if is_set(self.lse_square_scale) else None
        return shaped(loss), z_loss, stats

    def _reduced(
        self,
        head: LossHead,
        input: Tensor,
        target: Tensor,
        rows: Rows,
        class_weight: Tensor | None,
        weights: Tensor | None,
        num_items: float | Tensor | None,
    ) -> tuple[Tensor, Tensor | None, TokenStats]:
        per_token, per_class = self._denominators(head, rows, class_weight, weights, num_items)
        objective = _WeighedTokens(
            self, rows.fill_ignored(target.reshape(-1)), class_weight, weights, per_token, per_class
        )
        loss, stats = self._fuse(head, input, rows, objective, self._smoothing_weight(class_weight))
        z_loss = None
        if is_set(self.lse_square_scale):
            assert rows.mask is not None
            z_loss = _weighed(self._z_loss(stats), weights).where(rows.mask, 0).sum() / per_token
        return loss, z_loss, stats

    def _denominators(
        self,
        head: LossHead,
        rows: Rows,
        class_weight: Tensor | None,
        weights: Tensor | None,
        num_items: float | Tensor | None,
    ) -> tuple[float | Tensor, float | Tensor]:
        if num_items is not None:
            return num_items, num_items
        if self.reduction == "sum":
            return 1, 1
        n_items = rows.divisor(accumulation_dtype(head.weight.dtype))
        if not rows.n_valid or (weights is None and class_weight is None):
            return n_items, n_items
        assert rows.target is not None
        if weights is None:
            assert class_weight is not None
            per_class = rows.fill_ignored(class_weight[rows.target]).sum()
            if isinstance(rows.n_counted, Tensor):
                per_class = per_class.where(rows.n_counted > 0, 1)  # no token may count
            return n_items, per_class
        valid = weights if rows.dense_index is None else weights[rows.dense_index]
        by_class = valid if class_weight is None else valid * class_weight[rows.target]
        per_token, per_class = valid.sum(), by_class.sum()
        return per_token.where(per_token != 0, 1), per_class.where(per_class != 0, 1)

    def _metrics(
        self, stats: TokenStats, target: Tensor, rows: Rows, z_loss: Tensor | None, split: SequenceSplit | None
    ) -> CrossEntropyMetrics:
        accuracy = predicted = None
        if self.return_token_accuracy:
            assert stats.is_top1 is not None
            accuracy = stats.is_top1.sum() / rows.divisor(torch.get_default_dtype())
        if self.return_predicted_tokens:
            assert stats.argmax is not None
            predicted = stats.argmax.view(target.shape)
            if split is not None:
                predicted = predicted[..., split.local_slice]
        if self.return_z_loss:
            z_loss = torch.zeros((), device=target.device) if z_loss is None else z_loss.detach()
        return CrossEntropyMetrics(z_loss if self.return_z_loss else None, accuracy, predicted)

    def extra_repr(self) -> str:
        return (
            f"reduction={self.reduction!r}, label_smoothing={self.label_smoothing}, focal_gamma={self.focal_gamma}, "
            f"dft={self.dft}, entropy_weight={self.entropy_weight}, {self.options}"
        )
