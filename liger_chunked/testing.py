"""Checks for your tests, which find mistakes that training hides."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_chunked.calls import altered
from liger_chunked.engine import Rows
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.step import Fused, Objective
from liger_chunked.losses import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearPolicyBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
)
from liger_chunked.types import (
    AdaptedWeight,
    LogitOptions,
    LossHead,
    TokenStats,
)

__all__ = ["LossReport", "check_loss"]  # and check_model, which imports transformers on first use

Batch = dict[str, Any]

_PARAMETERS = ("weight", "input", "bias")
_METHODS: dict[type[nn.Module], str | None] = {
    LigerFusedLinearPreferenceBase: "preference_loss",
    LigerFusedLinearUnpairedPreferenceBase: "preference_loss",
    LigerFusedLinearPolicyBase: "policy_loss",
    LigerFusedLinearDistillationBase: "divergence",
    LigerFusedLinearCrossEntropyLoss: None,
}


if TYPE_CHECKING:
    from liger_chunked.integrations.transformers.check import check_model as check_model
else:

    def __getattr__(name: str) -> Any:
        if name == "check_model":
            return import_module("liger_chunked.integrations.transformers.check").check_model
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Sizes(NamedTuple):
    sequences: int = 12  # with fewer, sorting could pass by chance
    length: int = 7
    hidden: int = 5
    vocab: int = 23
    teacher_hidden: int = 8


_SMALL = Sizes()


class LossReport(NamedTuple):
    """A result of `check_loss`, which a shell shows as a sentence that begins with "ok".

    - `loss`: of the batch
    - `error`: the largest relative difference of the loss or a gradient from those of full logits
    - `budgets`: the budgets of logits that cut the batch, in bytes
    - `tokens`: the batch's tokens that have a target
    """

    loss: float
    error: float
    budgets: tuple[int, ...]
    tokens: int

    def __repr__(self) -> str:
        budgets = " and ".join(map(str, self.budgets))
        return (
            f"ok: a loss of {self.loss:.6g} over {self.tokens} tokens, and its gradients, are those of autograd over "
            f"full logits to {self.error:.1g} of their norm. They stay the same with more padding, in a second call, "
            f"and in pieces of at most {budgets} bytes of logits. Your formula itself is not checked"
        )


def check_loss(
    loss: nn.Module, batch: Mapping[str, Any] | None = None, *, seed: int = 0, tolerance: float = 1e-5
) -> LossReport:
    """Check a loss of this library, or your own on a base class, in float64.

    Compares loss and gradients with those of full logits through the same method, small budgets, more padding, and a
    second call. The formula itself is not checked. Finds a loss that

    - compares pairs, sequences or tokens without declaring it in `scope`,
    - depends on padding, such as a sum over T instead of `mask`,
    - reads a statistic that `token_outputs` does not declare,
    - writes to its inputs,
    - returns something detached, random, or not finite.

    Args:
        batch: arguments of `loss(...)` by name, at least 3 pairs or sequences. None: random, from `seed`, with 12
            sequences, or 6 pairs: a loss that holds a tensor with a value for each of them needs a batch.
        tolerance: largest relative difference.

    Raises:
        AssertionError: a check fails; the message says what to change.

    >>> from liger_chunked import LigerFusedLinearPreferenceBase
    >>> class Centred(LigerFusedLinearPreferenceBase):
    ...     def preference_loss(self, pairs):
    ...         margins = pairs.logps[:, 0] - pairs.logps[:, 1]
    ...         return (margins - margins.mean()).square()
    >>> check_loss(Centred())
    Traceback (most recent call last):
    ...
    AssertionError: Centred gives another loss where a small logits_budget cuts the batch: ... set scope = "batch" ...
    >>> Centred.scope = "batch"
    >>> check_loss(Centred()).error < 1e-9
    True
    """
    method = _method_of(loss)
    options: Any = loss.options
    name = type(loss).__name__
    if adapted := [x for x, value in (batch or {}).items() if isinstance(value, AdaptedWeight)]:
        raise TypeError(f"check_loss compares full logits: {adapted[0]} must be a tensor, got an AdaptedWeight")
    given = _in_float64(random_batch(loss, seed) if batch is None else batch)
    watched = _with_budget(loss, None)
    if method is not None:
        setattr(watched, method, _Watched(name, method, getattr(loss, method)))
    difference_of = _Comparison(tolerance)

    whole = evaluate(watched, given)
    if not all(x.isfinite().all() for x in whole.values()):
        raise AssertionError(f"{name} is not finite on this batch: its loss is {whole['loss'].item():g}")
    if difference_of(evaluate(watched, given), whole):
        raise AssertionError(
            f"{name} gives two results for the same call: {method or 'it'} must not be random or keep state"
        )
    tokens, budgets = _budgets(loss, given)
    for budget in budgets:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="logits_budget=", category=UserWarning)
            cut = evaluate(_with_budget(watched, budget), given)
        if found := difference_of(cut, whole):
            raise AssertionError(
                f"{name} gives another loss where a small logits_budget cuts the batch: {found} with {budget} bytes, "
                f"against the whole batch at once. {_advice(loss)}"
            )
    if isinstance(loss, LigerFusedLinearPolicyBase) and loss.scope == "token":
        by_sequence: Any = copy.copy(watched)
        by_sequence.scope = "sequence"
        if found := difference_of(whole, evaluate(by_sequence, given)):
            raise AssertionError(
                f"{name} gives another loss where policy_loss gets whole sequences: {found}. {_advice(loss)}"
            )
    padded = evaluate(watched, _padded(given, options.ignore_index))
    padded["input"] = padded["input"][tuple(slice(0, n) for n in given["input"].shape)]
    if found := difference_of(padded, whole):
        raise AssertionError(
            f"{name} depends on padding: {found} with two more ignored positions. Sum over mask, and divide by "
            "lengths, not by a size of the tensors"
        )
    full = evaluate_full(loss, given)
    if found := difference_of(whole, full):
        raise AssertionError(f"{name} differs from autograd over full logits: {found}")
    error = max(_relative(whole[key], full[key]) for key in full)
    return LossReport(loss=whole["loss"].item(), error=error, budgets=budgets, tokens=tokens)


def _method_of(loss: Any) -> str | None:
    for base, method in _METHODS.items():
        if isinstance(loss, base):
            return method
    got = f"the class {loss.__name__}, not an instance" if isinstance(loss, type) else f"a {type(loss).__name__}"
    raise TypeError(f"loss must be an instance of {', '.join(base.__name__ for base in _METHODS)}, got {got}")


def _advice(loss: nn.Module) -> str:
    if isinstance(loss, LigerFusedLinearPreferenceBase) and loss.scope == "pair":
        return 'preference_loss compares pairs with one another: set scope = "batch" on the class'
    if isinstance(loss, LigerFusedLinearPolicyBase) and loss.scope == "token":
        return 'policy_loss compares tokens with one another: set scope = "sequence" on the class'
    if isinstance(loss, LigerFusedLinearPolicyBase) and loss.scope == "sequence":
        return (
            "policy_loss must treat sequences independently: read batch_size and batch_tokens for the whole batch, "
            'subtract a baseline from advantages before the call, or set scope = "batch" on the class'
        )
    if isinstance(loss, LigerFusedLinearUnpairedPreferenceBase):
        return "preference_loss must treat sequences independently: read batch_size and batch_counts for the batch"
    if isinstance(loss, LigerFusedLinearDistillationBase):
        return "divergence must treat tokens independently"
    return "Its result must not depend on the budget"


class _Watched:
    def __init__(self, loss: str, name: str, method: Callable[..., Any]) -> None:
        self.loss, self.name, self.method = loss, name, method

    def __call__(self, *args: Any) -> Any:
        tensors = [x for arg in args for x in _tensors(arg)]
        before = [x.detach().clone() for x in tensors]
        writes = f"{self.loss}.{self.name} writes to its inputs: use operations that return a new tensor"
        try:
            result = self.method(*args)
        except AttributeError as error:
            if "was not computed" not in str(error):
                raise
            raise AssertionError(f"{self.loss}.{self.name} reads an undeclared statistic: {error}") from error
        except RuntimeError as error:
            if "in-place operation" not in str(error):
                raise
            raise AssertionError(writes) from error
        for x, old in zip(tensors, before, strict=True):
            if not torch.equal(x.detach().nan_to_num(), old.nan_to_num()):
                raise AssertionError(writes)
        trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if trains and isinstance(result, Tensor) and not result.requires_grad:
            raise AssertionError(
                f"{self.loss}.{self.name} returns a tensor without a gradient: it is detached from its inputs, or "
                "does not depend on them"
            )
        return result


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, TokenStats):
        return [f for f in tuple(x) if f is not None]
    if dataclasses.is_dataclass(x):
        return [tensor for field in dataclasses.fields(x) for tensor in _tensors(getattr(x, field.name))]
    return []


class _Comparison:
    """Describe how results differ, or return ""."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance

    def __call__(self, found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
        if _relative(found["loss"], expected["loss"]) > self.tolerance:
            return f"a loss of {found['loss'].item():.6g} instead of {expected['loss'].item():.6g}"
        for name in expected:
            error = _relative(found[name], expected[name])
            if not error <= self.tolerance:
                return f"a gradient of {name} with a relative difference of {error:.2g}"
        return ""


def _relative(x: Tensor, expected: Tensor) -> float:
    return float((x - expected).norm() / expected.norm().clamp(min=1e-6))


def _with_budget(loss: nn.Module, budget: int | None) -> nn.Module:
    own: Any = loss
    options = dataclasses.replace(own.options, logits_budget=budget)
    if isinstance(own, LigerFusedLinearDistillationBase) and own.teacher_options is own.options:
        return altered(own, options=options, teacher_options=options)
    return altered(own, options=options)


def _leaves(batch: Batch) -> tuple[Batch, dict[str, Tensor]]:
    leaves = {name: batch[name].detach().clone().requires_grad_() for name in _PARAMETERS if name in batch}
    return {**batch, **leaves}, leaves


def _gradients(value: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(value, list(leaves.values()))
    return {"loss": value.detach(), **dict(zip(leaves, gradients, strict=True))}


def evaluate(loss: nn.Module, batch: Batch) -> dict[str, Tensor]:
    given, leaves = _leaves(batch)
    result = loss(**given)
    value = result[0] if isinstance(result, tuple) else result
    return _gradients(value.sum(), leaves)


def evaluate_full(loss: nn.Module, batch: Batch) -> dict[str, Tensor]:
    given, leaves = _leaves(batch)
    return _gradients(full_loss(loss, given), leaves)


def full_loss(loss: nn.Module, batch: Batch) -> Tensor:
    if isinstance(loss, LigerFusedLinearDistillationBase):
        return _full_distillation(loss, **batch)
    own: Any = _with_budget(loss, None)
    if isinstance(own, LigerFusedLinearCrossEntropyLoss) and own.reduction == "none":
        own = altered(own, reduction="sum")

    def full(
        head: LossHead,
        input: Tensor,
        rows: Rows,
        objective: Objective,
        class_weight: Tensor | None = None,
    ) -> Fused:
        assert isinstance(head.weight, Tensor) and rows.target is not None
        every = Chunk(slice(0, rows.n_valid), slice(0, rows.dense_shape[0]))
        x = rows.take(input.reshape(-1, input.shape[-1]), every.row_slice)
        z = _logits(own.options, head.weight, x, head.bias)
        values = _stats(z, rows.target, class_weight)
        dense = rows.for_objective(TokenStats(**{name: values[name]() for name in dict.fromkeys(own._outputs)}), every)
        detached = TokenStats(*(None if f is None else f.detach() for f in dense))
        index = rows.group_index(every)
        return Fused(objective.loss(dense, index), rows.join([detached]))

    own._fuse = full
    result = own(**batch)
    return result[0] if isinstance(result, tuple) else result


def _logits(options: LogitOptions, weight: Tensor, input: Tensor, bias: Tensor | None) -> Tensor:
    """Return all transformed logits (..., V): the product in the dtype of the tensors, the rest in at least float32."""
    product = F.linear(input, weight, bias)
    z = options.logit_scale * product.to(torch.promote_types(product.dtype, torch.float32))
    z = z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)
    return z / options.temperature


def _stats(z: Tensor, target: Tensor, class_weight: Tensor | None = None) -> dict[str, Callable[[], Tensor]]:
    """Return functions of logits that give the fields of `TokenStats`, by name. No target is ignored."""
    log_p = z.log_softmax(-1)
    return {
        "logps": lambda: log_p.gather(-1, target[..., None]).squeeze(-1),
        "lse": lambda: z.logsumexp(-1),
        "entropy": lambda: -(log_p.exp() * log_p).sum(-1),
        "mean_logits": lambda: (z if class_weight is None else z * class_weight).mean(-1),
        "argmax": lambda: z.argmax(-1),
        "is_top1": lambda: z.argmax(-1) == target,
        "log_sum_sq_probs": lambda: (2 * log_p).logsumexp(-1),
    }


def _full_distillation(
    loss: LigerFusedLinearDistillationBase,
    weight: Tensor,
    input: Tensor,
    teacher_weight: Tensor | None = None,
    teacher_input: Tensor | None = None,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    num_items: float | Tensor | None = None,
    **others: Any,
) -> Tensor:
    if teacher_weight is None or teacher_input is None or others:
        raise ValueError("check_loss needs a batch with teacher_weight and teacher_input: it compares full logits")
    student = _logits(loss.options, weight, input, bias)
    teacher = _logits(loss.teacher_options, teacher_weight, teacher_input, teacher_bias)
    counts = torch.ones(input.shape[:-1], dtype=torch.bool, device=input.device) if mask is None else mask
    if target is not None:
        counts = counts & (target != loss.options.ignore_index)
    n_items = counts.sum().clamp(min=1) if num_items is None else num_items
    value = loss.weight_soft_loss * loss.divergence(student[counts], teacher[counts][:, : weight.shape[0]]).sum()
    if target is not None:
        own = student[counts] * loss.options.temperature
        value = value + loss.weight_hard_loss * F.cross_entropy(own, target[counts].long(), reduction="sum")
    return value / n_items


def _budgets(loss: nn.Module, batch: Batch) -> tuple[int, tuple[int, ...]]:
    """Return the valid tokens, and budgets for one group and for less."""
    options: Any = loss.options
    target, vocab_size = batch.get("target"), batch["weight"].shape[0]
    valid = (
        torch.ones(batch["input"].shape[:-1], dtype=torch.bool) if target is None else target != options.ignore_index
    )
    tokens = int(valid.sum())
    rows = max(1, tokens // 4)
    if isinstance(loss, LigerFusedLinearPreferenceBase):
        rows = int(sum(valid.sum(-1).chunk(2)).max())  # type: ignore[union-attr]
    elif isinstance(loss, (LigerFusedLinearUnpairedPreferenceBase, LigerFusedLinearPolicyBase)):
        rows = int(valid.sum(-1).max())
    row = vocab_size * 8
    return tokens, tuple(dict.fromkeys((max(1, rows) * row, max(1, rows // 3) * row)))


def _in_float64(batch: Mapping[str, Any]) -> Batch:
    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.detach().cpu()
        return x.double() if x.is_floating_point() else x.clone()

    return {name: moved(x) for name, x in batch.items() if x is not None}


def _padded(batch: Batch, ignore_index: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    shape = batch["input"].shape[:-1]
    target = batch.get("target")

    def longer(name: str, x: Any) -> Any:
        axis = len(shape) - 1
        if not isinstance(x, Tensor) or x.shape[: axis + 1] != shape or name.endswith("weight"):
            return x
        size = list(x.shape)
        size[axis] = 2
        if name.endswith("target"):
            more = torch.full(size, ignore_index, dtype=x.dtype)
        elif name.endswith("input"):
            more = torch.randn(size, generator=generator, dtype=x.dtype)
            if target is not None and name == "input":
                noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
                ignored = target == ignore_index
                if "nll_target" in batch:
                    ignored = ignored & (batch["nll_target"] == ignore_index)
                x = torch.where(ignored[..., None], noise, x)
        else:
            more = torch.zeros(size, dtype=x.dtype)
        return torch.cat([x, more], dim=axis)

    padded = {name: longer(name, x) for name, x in batch.items()}
    if target is None and "mask" not in padded:
        counts = torch.ones(padded["input"].shape[:-1], dtype=torch.bool)
        counts[..., -2:] = False
        padded["mask"] = counts
    return padded


def random_batch(loss: nn.Module, seed: int, sizes: Sizes = _SMALL) -> Batch:
    any_loss: Any = loss
    options: LogitOptions = any_loss.options
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    n, length, hidden, vocab_size, teacher_hidden = sizes
    class_weight = getattr(loss, "ce_weight", None)
    vocab_size = vocab_size if class_weight is None else class_weight.shape[0]
    # Logits have the same variance at any size.
    batch: Batch = {"weight": normal(vocab_size, hidden) * (5 / hidden) ** 0.5, "input": normal(n, length, hidden)}
    batch["bias"] = normal(vocab_size)
    lengths = torch.randint(2, length + 1, (n,), generator=generator)
    lengths[0] = length
    target = torch.randint(vocab_size, (n, length), generator=generator)
    batch["target"] = target.where(torch.arange(length) < lengths[:, None], options.ignore_index)
    if isinstance(loss, LigerFusedLinearCrossEntropyLoss):
        return batch
    if isinstance(loss, LigerFusedLinearDistillationBase):
        return batch | {
            "teacher_weight": normal(vocab_size, teacher_hidden) * (8 / teacher_hidden) ** 0.5,
            "teacher_input": normal(n, length, teacher_hidden),
        }
    valid = batch["target"] != options.ignore_index
    z = _logits(options, batch["weight"], batch["input"], batch["bias"])
    logps = torch.where(valid, _stats(z, batch["target"].where(valid, 0))["logps"](), 0.0)
    if isinstance(loss, LigerFusedLinearPolicyBase):
        batch["advantages"] = normal(n)
        batch["old_logps"] = logps + 0.3 * normal(n, length)
        batch["ref_logps"] = logps + 0.3 * normal(n, length)
        return batch
    if any_loss.use_ref_model is not False:
        batch["ref_logps"] = logps + 0.3 * normal(n, length)
    if isinstance(loss, LigerFusedLinearUnpairedPreferenceBase):
        batch["preference_labels"] = torch.arange(n) % 3 != 1
        if loss.reference_point is not None:
            batch[loss.reference_point] = 0.1
    return batch
