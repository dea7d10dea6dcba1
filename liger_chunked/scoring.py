"""Values of tokens under a model, without a gradient, on chunks of logits: scores, perplexity, a top k.

    score(model, batch)             log-probabilities, entropies, whether the target is the most likely token
    perplexity(model, loader)       perplexity and accuracy of a data set
    teacher_top_k(model, batch, k)  the most likely tokens, for `teacher=` of a distillation loss

A model runs its own forward. Its head defers its logits (`liger_chunked.deferred`), which a scale or a softcap of the
forward may follow, and the statistics are computed chunk by chunk in place of them: one matrix product of the head with
the tokens that have a target.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_chunked.deferred import DeferredLogits, defer_logits, is_deferring
from liger_chunked.deferred.request import requested
from liger_chunked.dtensor import any_dtensor
from liger_chunked.engine import check_projection, check_target, linear_token_stats
from liger_chunked.kernels.transform import transform
from liger_chunked.teachers import TopK
from liger_chunked.types import (
    AdaptedWeight,
    Head,
    LogitOptions,
    LossHead,
    TokenStats,
    accumulation_dtype,
    budget_bytes,
    check_number,
    described,
)

T = TypeVar("T")
IGNORE_INDEX = -100
_BUDGET = 256 << 20  # bytes of the logits in a chunk of `teacher_top_k`
_OF_LOSS = ("labels", "shift_labels", "num_items_in_batch")
# `share_batch` makes positions and a mask of its own.
_SHAREABLE = {"input_ids", "attention_mask", *_OF_LOSS}


class Perplexity(NamedTuple):
    """What `perplexity` returns, of all tokens with a target.

    - `perplexity`: `exp(nll)`
    - `nll`: mean negative log-probability of a token, in nats
    - `accuracy`: share of tokens that are the most likely ones, in [0, 1]
    - `tokens`: how many there are

    Means of several parts, or ranks, weigh `nll` and `accuracy` by `tokens`.
    """

    perplexity: float
    nll: float
    accuracy: float
    tokens: int


def next_tokens(batch: Mapping[str, Any], ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Return the tokens that the positions of a batch predict: the targets of `score` and `perplexity`.

    Args:
        batch: arguments of a causal model's forward. The first of these that it has says which tokens count:
            `shift_labels`, the targets themselves; `labels`, one position earlier; `input_ids`, all tokens that follow
            one of their own sequence: `attention_mask` (B, T) is 0 at padding, and `position_ids` (B, T) of packed
            sequences start again at each.
        ignore_index: the target of a position that predicts nothing, such as the last one.

    Returns:
        (B, T), in the dtype of the batch's ids.

    Raises:
        TypeError: the batch is no mapping.
        ValueError: the batch has none of the three.

    >>> next_tokens({"input_ids": torch.tensor([[5, 6, 7, 8]]), "position_ids": torch.tensor([[0, 1, 0, 1]])})
    tensor([[   6, -100,    8, -100]])
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch must be a mapping, the arguments of a model's forward, got {described(batch)}")
    if batch.get("shift_labels") is not None:
        return batch["shift_labels"]
    labels, ids = batch.get("labels"), batch.get("input_ids")
    given: Any = ids if labels is None else labels
    if given is None:
        raise ValueError(f"the batch needs labels, shift_labels or input_ids, got {sorted(batch)}")
    following: Tensor = F.pad(given[..., 1:], (0, 1), value=ignore_index)
    if labels is not None:
        return following
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None and mask.shape == given.shape:
        attended = F.pad(mask[:, 1:] * mask[:, :-1], (0, 1)) != 0
        following = following.where(attended, ignore_index)
    if positions is not None and positions.shape == given.shape:
        follows = F.pad(positions[:, 1:] - positions[:, :-1], (0, 1)) > 0
        following = following.where(follows, ignore_index)
    return following


def score(
    model: Any,
    batch: Any,
    outputs: tuple[str, ...] = ("logps", "entropy", "is_top1"),
    *,
    share_prefix: bool = False,
    **options: Any,
) -> TokenStats:
    """Return values of the tokens of a batch under a model, without a gradient, on chunks of logits.

    Takes one matrix product of the head with the tokens that have a target. A model runs in evaluation mode, with its
    own forward, wrappers, adapters and autocast, and is left in the mode that it had. Without a patch, its head defers
    during the call.

    Args:
        model: a model of transformers, patched or not; any other after `defer_logits(model.lm_head)`; an output layer,
            such as an `nn.Linear` or a `Head`; or `(weight, hidden)` or `(weight, hidden, bias)`, where hidden states
            are (B, T, H) or (N, H).
        batch: a mapping, the arguments of the model's forward (`next_tokens` says which tokens count); for another
            model, or an output layer, `(input, target)`; for `(weight, hidden)`, the target. A target, (B, T) or (N,),
            has the token that a position predicts, or `ignore_index`.
        outputs: statistics, as in `linear_token_stats`: "logps", "lse", "entropy", "mean_logits", "argmax", "is_top1",
            "log_sum_sq_probs".
        share_prefix: compute what sequences have in common at their start once, as `share_batch` of
            `liger_chunked.shared_prefix`.
        **options: more arguments of `linear_token_stats`, such as `temperature`, `ignore_index`, `logits_budget`,
            `candidates`, `kept` and, for a weight, `vocab_shard`. Not `softcap` and
            `logit_scale` of a model, which are those of its forward.

    Returns:
        `TokenStats`: each of `outputs`, in the shape of the target. With `batch` a mapping that is (B, T), and position
        t has the values of token t + 1. Float32 or, of float64 models, float64, in nats; 0 at ignored positions.

    Raises:
        TypeError: an argument has the wrong type, or is an option of the model.
        ValueError: the model has no head that defers, something read its logits, or shapes do not fit.

    >>> linear = nn.Linear(4, 11)
    >>> hidden, target = torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> stats = score(linear, (hidden, target))
    >>> stats.logps.shape, bool((stats.entropy[target != -100] > 0).all())
    (torch.Size([2, 3]), True)
    """

    return scored(model, batch, outputs, share_prefix=share_prefix, **options)[0]


def perplexity(
    model: Any, loader: Iterable[Any], *, share_prefix: bool = False, ignore_index: int = IGNORE_INDEX, **options: Any
) -> Perplexity:
    """Return perplexity and accuracy of a data set, over its tokens and not its batches.

    The host waits for the device once, after the last batch. Takes one product of the head with each token.

    Args:
        model: a model, an output layer or a `Head`, as in `score`.
        loader: batches for `score`, such as a `DataLoader` of mappings. A list of two tensors is `(input, target)`.
        share_prefix: compute what sequences have in common at their start once.
        ignore_index: the target of tokens that do not count.
        **options: more arguments of `linear_token_stats`, such as `temperature` and `logits_budget`.

    Returns:
        A `Perplexity` of Python numbers.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: as in `score`; also if no batch has a token that counts.

    >>> weight, hidden, target = torch.zeros(11, 4), torch.randn(3, 4), torch.tensor([0, 4, -100])
    >>> perplexity(nn.Linear(4, 11), [(hidden, target)]).tokens
    2
    """
    total: Any = 0
    for batch in loader:
        stats, target, _ = scored(
            model, batch, ("logps", "is_top1"), None, share_prefix, ignore_index=ignore_index, **options
        )
        assert stats.logps is not None and stats.is_top1 is not None
        sums = stats.logps, stats.is_top1, target != ignore_index
        total = total + torch.stack([x.sum(dtype=torch.float64) for x in sums])
    logps, right, n = total.tolist() if isinstance(total, Tensor) else (0.0, 0.0, 0.0)
    if not n:
        raise ValueError("no batch of loader has a token that counts, so there is no mean")
    return Perplexity(math.exp(-logps / n), -logps / n, right / n, int(n))


def teacher_top_k(
    model: Any,
    batch: Any,
    k: int,
    *,
    temperature: float = 1.0,
    tail: Literal["bin", "renormalize"] = "bin",
    vocab_size: int | None = None,
    share_prefix: bool = False,
    ignore_index: int = IGNORE_INDEX,
    logits_budget: int | float | str | None = None,
) -> TopK:
    """Return the k most likely tokens at each position of a batch, as the teacher of a distillation loss.

        teacher = teacher_top_k(teacher_model, batch, 64, temperature=2.0)
        loss, metrics = LigerFusedLinearKLDivLoss(temperature=2.0)(weight, hidden, target=target, teacher=teacher)

    Takes one matrix product of the head with the tokens that have a target. `write_cache` keeps the result on disk.

    Args:
        model, batch: a model and the arguments of its forward, or another pair that `score` takes.
        k: how many tokens, 1 to the vocabulary's size.
        temperature: positive divisor of the logits: that of the loss.
        tail: what the loss makes of all other tokens, see `TopK`.
        vocab_size: the student's. The softmax is over the teacher's first `vocab_size` ids; others are padding. None:
            all rows of the teacher's head.
        share_prefix: compute what sequences have in common at their start once.
        ignore_index: the target of positions to leave out. They have id 0 and a log-probability of -inf.
        logits_budget: most bytes of logits in float32 alive at once: a number, or a string such as "512MiB". None:
            256 MiB.

    Returns:
        `TopK`: ids (B, T, k), int64, most likely first, and their log-probabilities (B, T, k), float32, or float64 of
        float64 models.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: as in `score`; also if `k` or `vocab_size` exceeds the vocabulary.

    >>> linear, hidden, target = nn.Linear(4, 11), torch.randn(3, 4), torch.tensor([0, 4, -100])
    >>> teacher_top_k(linear, (hidden, target), 2)
    TopK((3, 2) int64 on cpu, temperature=1.0, tail='bin')
    """
    options = LogitOptions(temperature=temperature, ignore_index=ignore_index, logits_budget=logits_budget)
    return top_k_and_lse(model, batch, k, options, tail, vocab_size, share_prefix).top_k


class TeacherPass(NamedTuple):
    """What one pass of a teacher finds: a top k, the log-sum-exp (B, T) of all logits, the target (B, T), and V."""

    top_k: TopK
    lse: Tensor
    target: Tensor
    vocab_size: int


def top_k_and_lse(
    model: Any, batch: Any, k: int, options: LogitOptions, tail: Any, vocab_size: int | None, share_prefix: bool
) -> TeacherPass:
    """Return `teacher_top_k`, and what else a cache keeps."""
    check_number("k", k, whole=True)

    def compute(head: Head, hidden: Tensor, target: Tensor, of_model: dict[str, Any]) -> TeacherPass:
        head = Head(*map(_whole, head))
        check_target(target, hidden, head=check_projection(LossHead(*head), hidden))
        size, n_tokens, dtype = head.weight.shape[0], target.numel(), accumulation_dtype(hidden.dtype)
        if not 1 <= k <= size:
            raise ValueError(f"k must be 1 to {size}, the size of the vocabulary, got {k}")
        index = (target.reshape(-1) != options.ignore_index).nonzero()[:, 0]
        ids = index.new_zeros(n_tokens, k)
        logps = hidden.new_full((n_tokens, k), -math.inf, dtype=dtype)
        lse = hidden.new_zeros(n_tokens, dtype=dtype)
        scale, softcap = of_model.get("logit_scale", 1.0), of_model.get("softcap")
        for rows in index.split(max(1, (budget_bytes(options.logits_budget) or _BUDGET) // (size * dtype.itemsize))):
            z = _logits(head, hidden.reshape(n_tokens, -1)[rows]).to(dtype)
            z = transform(z, scale, softcap, options.temperature)
            lse[rows] = z.logsumexp(-1)
            best = z.topk(k)
            logps[rows], ids[rows] = best.values - lse[rows, None], best.indices
        shape = target.shape
        found = TopK(ids.view(*shape, k), logps.view(*shape, k), options.temperature, tail)
        return TeacherPass(found, lse.view(shape), target, size)

    return on_head(model, batch, compute, vocab_size, share_prefix, options.ignore_index)


def _logits(head: Head, x: Tensor) -> Tensor:
    """Return the logits (n, V) of hidden states (n, H)."""
    weight, bias = head
    if isinstance(weight, AdaptedWeight):
        return _logits(Head(weight.weight, bias), x) + F.linear(weight.down(x), weight.up).to(x.dtype)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _whole(x: Any) -> Any:
    """Return a tensor of which each rank has a part."""
    if isinstance(x, AdaptedWeight):
        return AdaptedWeight(_whole(x.weight), _whole(x.up), x.down)
    return x.full_tensor() if any_dtensor([x]) else x


def scored(
    model: Any,
    batch: Any,
    outputs: tuple[str, ...],
    vocab_size: int | None = None,
    share_prefix: bool = False,
    **options: Any,
) -> tuple[TokenStats, Tensor, int]:
    """Return `score` of the first `vocab_size` ids, the target, and how many ids there are."""

    def compute(head: Head, hidden: Tensor, target: Tensor, of_model: dict[str, Any]) -> tuple[TokenStats, Tensor, int]:
        if twice := sorted(of_model.keys() & options.keys()):
            raise TypeError(f"{' and '.join(twice)} come from the model's forward, got them as options: leave them out")
        own = {**of_model, **options}
        stats = linear_token_stats(head.weight, hidden, target, head.bias, outputs=outputs, **own)
        return stats, target, head.weight.shape[0]

    return on_head(model, batch, compute, vocab_size, share_prefix, options.get("ignore_index", IGNORE_INDEX))


@torch.no_grad()
def on_head(
    model: Any,
    batch: Any,
    compute: Callable[[Head, Tensor, Tensor, dict[str, Any]], T],
    vocab_size: int | None = None,
    share_prefix: bool = False,
    ignore_index: int = IGNORE_INDEX,
) -> T:
    """Return `compute(head, hidden, target, of_model)` in place of a model's logits, without a gradient.

    `hidden` is (B, T, H) or (N, H) and `target` (B, T) or (N,). `of_model` has `softcap` and `logit_scale` of the
    model's forward; it is empty for tensors. The other arguments are those of `score` and `teacher_top_k`.
    """

    def run(head: Head, hidden: Tensor, target: Tensor, of_model: dict[str, Any]) -> T:
        if vocab_size is not None and vocab_size != head.weight.shape[0]:
            if not 0 < vocab_size <= head.weight.shape[0]:
                raise ValueError(
                    f"vocab_size must be 1 to {head.weight.shape[0]}, the rows of weight, got {vocab_size}"
                )
            weight, bias = map(_whole, head)
            head = Head(weight[:vocab_size], None if bias is None else bias[:vocab_size])
        return compute(head, hidden, target.to(hidden.device), of_model)

    if isinstance(model, Head):
        hidden, target = _pair(batch)
        return run(model, hidden, target, {})
    if isinstance(model, tuple) and 2 <= len(model) <= 3 and isinstance(batch, Tensor):
        return run(Head(model[0], *model[2:]), model[1], batch, {})
    if not isinstance(model, nn.Module):
        raise TypeError(
            "model must be a module or a Head, or (weight, hidden) with the target as the batch, got "
            f"{described(model)} and {described(batch)}"
        )
    of_hidden: Callable[[Tensor], Tensor] = lambda hidden: hidden  # noqa: E731
    device = next(model.parameters()).device
    inputs: Any
    if isinstance(batch, Mapping):
        batch = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}
        inputs, target = _inputs(model, batch, ignore_index)
        if share_prefix:
            if unknown := sorted(batch.keys() - _SHAREABLE):
                raise ValueError(f"share_prefix takes batches of input_ids and attention_mask, got {unknown}")
            shared_prefix = import_module("liger_chunked.shared_prefix")
            shared = shared_prefix.share_batch(model, batch["input_ids"], batch.get("attention_mask"))
            inputs, of_hidden = shared.inputs, shared.hidden_states
    else:
        x, target = _pair(batch)
        inputs = x.to(device)
    with _evaluating(model), _deferring(model), requested(defer=True, withhold=True):
        outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    logits = getattr(outputs, "logits", outputs[0] if isinstance(outputs, (tuple, list)) else outputs)
    if not isinstance(logits, DeferredLogits) or logits.is_computed:
        why = f"{logits.asked_by} read them" if isinstance(logits, DeferredLogits) else "its head computed them"
        raise ValueError(f"{type(model).__name__} returned real logits: {why}. Score (weight, hidden), target")
    of_model = {name: x for name, x in asdict(logits.logit_options()).items() if name in ("softcap", "logit_scale")}
    result: T = logits.run(lambda head, hidden: run(head, of_hidden(hidden), target, of_model))
    return result


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(isinstance(x, Tensor) for x in batch):
        raise TypeError(
            f"batch must be a mapping, the arguments of the model's forward, or (input, target), got {described(batch)}"
        )
    return batch[0], batch[1]


def _inputs(model: nn.Module, batch: Mapping[str, Any], ignore_index: int) -> tuple[dict[str, Any], Tensor]:
    """Return the arguments of a model of transformers, and the target. No cache of keys and values is filled."""
    inner = next((module for module in model.modules() if hasattr(module, "config")), model)
    inputs = {name: x for name, x in batch.items() if name not in _OF_LOSS}
    if "use_cache" in inspect.signature(type(inner).forward).parameters:
        inputs.setdefault("use_cache", False)
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        # The forward makes the decoder's input of the labels, which are the target as they are.
        if batch.get("labels") is None:
            raise ValueError(f"{type(inner).__name__} is an encoder and a decoder: its batch needs labels")
        return {**inputs, "labels": batch["labels"]}, batch["labels"]
    return inputs, next_tokens(batch, ignore_index)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _deferring(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Let a model's head defer in a block, unless it does already."""
    if any(map(is_deferring, model.modules())):
        return contextlib.nullcontext()
    if isinstance(model, nn.Linear):
        return defer_logits(model)
    for module in model.modules():
        of_module: Any = getattr(module, "get_output_embeddings", None)
        head: Any = of_module() if callable(of_module) else None
        if head is not None:
            return defer_logits(head)
    raise ValueError(
        f"{type(model).__name__} has no head that defers: call liger_chunked.defer_logits(model.lm_head) first, with "
        "the layer from hidden states to the vocabulary"
    )
