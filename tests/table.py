"""Table of losses for the whole suite: each row has a loss, its eager oracle, a batch, and a bound on its cost.

A new loss adds rows here, not a test file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple
from unittest import mock

import eager
import torch
from eager.dpo import LOSS_TYPES
from eager.reference_free import CPO_LOSS_TYPES
from torch import Tensor

from liger_chunked import (
    KeptIds,
    LigerFusedLinearBCOLoss,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearOnPolicyDistillationLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
    LigerFusedLinearTVDLoss,
    LogitOptions,
    TokenStats,
    linear_token_stats,
)
from liger_chunked.engine import choose
from liger_chunked.losses import cpo as cpo_losses
from liger_chunked.losses import dpo as dpo_losses

Batch = dict[str, Tensor]
PARAMETERS = ("weight", "input", "bias")


class Sizes(NamedTuple):
    """`sequences` is even (chosen and rejected); `length` is padded; `ignored=False` gives every token a target."""

    sequences: int = 6
    length: int = 7
    hidden: int = 5
    vocab: int = 23  # a small prime
    ref_hidden: int = 8  # differs from the policy's
    ignored: bool = True


SMALL = Sizes()


@dataclass(frozen=True)
class Row:
    """A loss in one setting.

    Args:
        id: name in test reports.
        ours: `(batch, **options) -> loss`, a scalar; `options` are those of `LogitOptions`.
        oracle: `(batch, **transform) -> loss` from full logits, in the dtype of the batch.
        sample: returns a float64 batch of the given sizes and seed.
        scope: the unit that the objective cannot split: "token", "sequence", "pair", or "batch".
        fused: the forward computes the gradients, so that several chunks within the budget cost nothing extra.
        kernels: runs kernels of this library, and not only autograd.
        kept: of the ids that a sampler kept. The backward reads where targets are among these, and not the targets.
        products: computes matrix products with the head, and not only with a few of its rows.
        stops_gradients: part of the loss is held constant, so that its gradient is not its derivative.
        batches: factor on the number of batches in tests of rounding errors. A loss that exponentiates a sequence's
            log-probability gives one error per sequence, and needs more batches to average.
    """

    id: str
    ours: Callable[..., Tensor]
    oracle: Callable[..., Tensor]
    sample: Callable[[Sizes, int], Batch]
    scope: str = "token"
    fused: bool = True
    kernels: bool = True
    kept: bool = False
    products: bool = True
    stops_gradients: bool = False
    batches: int = 1

    def __repr__(self) -> str:
        return self.id


# Batches


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _head(sizes: Sizes, generator: torch.Generator, prefix: str = "", bias: bool = True) -> Batch:
    """Return a head with logits of a standard deviation of about 2."""
    hidden = sizes.ref_hidden if prefix else sizes.hidden
    batch = {
        f"{prefix}weight": 2 * hidden**-0.5 * _normal(generator, sizes.vocab, hidden),
        f"{prefix}input": _normal(generator, sizes.sequences, sizes.length, hidden),
    }
    if bias:
        batch[f"{prefix}bias"] = 0.3 * _normal(generator, sizes.vocab)
    return batch


def tokens(sizes: Sizes, seed: int, bias: bool = True) -> Batch:
    """Return plain tokens, half of them ignored at random positions."""
    generator = torch.Generator().manual_seed(seed)
    batch = _head(sizes, generator, bias=bias)
    shape = (sizes.sequences, sizes.length)
    batch["target"] = torch.randint(sizes.vocab, shape, generator=generator)
    if sizes.ignored:
        ignored = torch.randperm(batch["target"].numel(), generator=generator)[: batch["target"].numel() // 2]
        batch["target"].view(-1)[ignored] = -100
    return batch


def pairs(sizes: Sizes, seed: int, bias: bool = True, ref: str | None = "states") -> Batch:
    """Return chosen, then rejected sequences, each with a prompt, padding, and a completion of a different length."""
    generator = torch.Generator().manual_seed(seed)
    batch = _head(sizes, generator, bias=bias)
    shape = (sizes.sequences, sizes.length)
    lengths = torch.randint(1, sizes.length + 1, shape[:1], generator=generator)
    lengths[0], lengths[sizes.sequences // 2] = sizes.length, 1  # one pair with the most unequal lengths
    if not sizes.ignored:
        lengths[:] = sizes.length
    starts = (torch.rand(shape[:1], generator=generator) * (sizes.length - lengths + 1)).long()
    position = torch.arange(sizes.length)
    inside = (position >= starts[:, None]) & (position < (starts + lengths)[:, None])
    batch["target"] = torch.randint(sizes.vocab, shape, generator=generator).where(inside, -100)
    if ref == "states":
        batch |= _head(sizes, generator, prefix="ref_", bias=bias)
    elif ref == "tokens":
        batch["ref_logps"] = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    elif ref == "sequences":
        batch["ref_logps"] = -3 * lengths * torch.rand(shape[:1], generator=generator, dtype=torch.float64)
    return batch


def students(sizes: Sizes, seed: int, bias: bool = True, padding: int = 0, top_k: int = 0) -> Batch:
    """Return plain tokens and a teacher: with `padding` more classes, or with its `top_k`, some of them absent."""
    batch = tokens(sizes, seed, bias)
    generator = torch.Generator().manual_seed(seed + 1000)
    teacher = _head(sizes._replace(vocab=sizes.vocab + padding), generator, prefix="teacher_", bias=bias)
    if not top_k:
        return batch | teacher
    logits = teacher["teacher_input"] @ teacher["teacher_weight"].T
    logps, ids = logits.log_softmax(-1).topk(min(top_k, sizes.vocab), dim=-1)
    batch["teacher_logps"], batch["teacher_ids"] = logps, ids
    # Pad as inference servers do: an absent entry (-inf) repeats another entry's id.
    batch["teacher_logps"][:, 0, 0], batch["teacher_ids"][:, 0, 0] = -torch.inf, ids[:, 0, 1]
    batch["target"][:, -1] = ids[:, -1, 0]  # one target in the top-k; most others are not
    return batch


LABELS = {
    "mixed": lambda n: torch.arange(n) % 3 != 1,
    "desirable": lambda n: torch.ones(n, dtype=torch.bool),
    "undesirable": lambda n: torch.zeros(n, dtype=torch.bool),
}


def examples(
    sizes: Sizes, seed: int, ref: str | None = "states", labels: str = "mixed", mismatched: str | None = None
) -> Batch:
    """Return sequences as in `pairs` with a label each; `mismatched` adds completions that answer other prompts.

    These have the tokens of the previous sequence, as in TRL's collator. The policy is nearly uniform there, so it
    gives them a higher probability than the reference does.
    """
    batch = pairs(sizes, seed, ref=ref)
    batch["preference_labels"] = LABELS[labels](sizes.sequences)
    if mismatched:
        generator = torch.Generator().manual_seed(seed + 1)
        batch["kl_input"] = 0.1 * _normal(generator, *batch["input"].shape)
        batch["kl_target"] = batch["target"].roll(1, 0)
        if mismatched == "states":
            batch["ref_kl_input"] = _normal(generator, *batch["ref_input"].shape)
    return batch


def rollouts(
    sizes: Sizes,
    seed: int,
    *,
    ref: str | None = None,
    old: bool = True,
    advantages: str = "sequences",
    weights: str | None = None,
    transform: dict[str, float] | None = None,
) -> Batch:
    """Return completions as in `pairs`; `advantages` and importance `weights` per "tokens" or "sequences"."""
    batch = pairs(sizes, seed)
    states = {name: batch.pop(name) for name in ("ref_weight", "ref_input", "ref_bias")}
    generator = torch.Generator().manual_seed(seed + 2)
    head = {name: batch[name] for name in ("weight", "input", "target", "bias")}
    logps = eager.token_stats(**head, **transform or {})["logps"]
    shapes = {"tokens": batch["target"].shape, "sequences": batch["target"].shape[:1]}
    sides = {"advantages": _normal(generator, *shapes[advantages])}
    if old:  # a policy a few updates older
        old_logps = logps + 0.3 * _normal(generator, *shapes["tokens"])
        sides["old_logps"] = old_logps.clamp(max=-(2**-10))  # a probability below 1, in every dtype
    if ref == "tokens":
        sides["ref_logps"] = logps + 0.5 * _normal(generator, *shapes["tokens"])
    elif ref == "states":  # close to the policy: one token would dominate the ratio to an independent one
        shared = min(sizes.hidden, sizes.ref_hidden)
        for name in ("weight", "input"):
            states[f"ref_{name}"][..., :shared] = batch[name][..., :shared]
            states[f"ref_{name}"][..., shared:] *= 0.4
        batch["input"][..., shared:] *= 0.4
        batch |= states
    if weights:
        sides["importance_weights"] = 0.5 + torch.rand(shapes[weights], generator=generator, dtype=torch.float64)
    # Use values that every dtype holds exactly, so that tests do not compare their rounding.
    return batch | {name: x.bfloat16().double() for name, x in sides.items()}


def with_attributes(make: Any, **attributes: Any) -> Any:
    """Return `make`, a loss or a partial of one, of a subclass that sets attributes in its own constructor."""
    if isinstance(make, partial):
        return partial(with_attributes(make.func, **attributes), *make.args, **make.keywords)

    def __init__(self: Any, **settings: Any) -> None:
        make.__init__(self, **settings)
        for name, value in attributes.items():
            setattr(self, name, value)

    return type(make.__name__, (make,), {"__init__": __init__})


def moved(batch: Batch, dtype: torch.dtype | None = None, device: str | None = None) -> Batch:
    """Return the batch on `device`, with floating tensors in `dtype`."""
    return {name: x.to(device).to(dtype if x.is_floating_point() else None) for name, x in batch.items()}


def n_valid(batch: Batch, ignore_index: int = -100) -> int:
    return int((batch["target"] != ignore_index).sum())


# Evaluation


def evaluate(
    loss: Callable[[Batch], Tensor], batch: Batch, trainable: Iterable[str] = PARAMETERS, upstream: float = 1.0
) -> dict[str, Tensor]:
    """Return the loss and its gradient by each parameter, by name; works on copies of the batch."""
    leaves = {name: batch[name].detach().clone().requires_grad_() for name in trainable if name in batch}
    value = loss({**batch, **leaves})
    (upstream * value).backward()
    return {"loss": value.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def live_fraction(row: Row, batch: Batch) -> float:
    """Return the fraction of valid tokens whose hidden states have a gradient that is not exactly zero."""
    input = evaluate(row.oracle, batch, ("input",))["input"]
    return int((input != 0).any(-1).sum()) / n_valid(batch)


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Return the norm of the error over the norm of the exact value, or the norm of the error if that is zero."""
    norm = float(exact.norm())
    return float((x.double() - exact).norm()) / (norm or 1.0)


def leaves_of(batch: Batch, names: Iterable[str] = PARAMETERS) -> Batch:
    """Return copies of the tensors with these names, as leaves that require a gradient."""
    return {name: batch[name].detach().clone().requires_grad_() for name in names if name in batch}


def assert_same(ours: Mapping[str, Tensor], exact: Mapping[str, Tensor], tolerance: float = 1e-12) -> None:
    """Compare tensors by name. In float64, the order of sums alone may differ."""
    assert ours.keys() == exact.keys()
    for name, expected in exact.items():
        assert ours[name].shape == expected.shape, name
        error = relative_error(ours[name], expected)
        assert error < tolerance, f"{name}: relative error {error:.3g}, {farthest(ours[name], expected)}"


def farthest(x: Tensor, exact: Tensor) -> str:
    """Return the element with the largest error, and where it is.

    >>> farthest(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.0], [3.5, 4.0]]))
    'at (1, 0) ours 3, exact 3.5'
    >>> farthest(torch.tensor(0.75), torch.tensor(0.25))
    'ours 0.75, exact 0.25'
    """
    at = (x.double() - exact).abs().argmax()
    where = f"at {tuple(int(i) for i in torch.unravel_index(at, x.shape))} " if x.ndim else ""
    return f"{where}ours {float(x.flatten()[at]):.6g}, exact {float(exact.flatten()[at]):.6g}"


# The bound is a factor times the error of eager code in the same dtype. Both round the same numbers once, in another
# order, which changes the norm of many errors by a few percent at most.
FACTOR = 1.1


def rms(errors: list[float], sizes: list[float]) -> float:
    """Return the root mean square of errors, each relative to its batch's result: pooled errors would depend on the
    largest batch only. Results that happen to cancel are divided by the median size instead."""
    scales = torch.tensor(sizes, dtype=torch.float64)
    scales = scales + scales.median()
    return float((torch.tensor(errors, dtype=torch.float64) / scales).square().mean().sqrt())


def assert_rounds_as_eager_code(
    results: Iterable[tuple[Batch, Batch, Batch]], factor: float = FACTOR, dtypes: bool = True
) -> None:
    """Compare root mean squares of errors over batches, each with our results, eager code's, and the exact ones."""
    errors: dict[str, list[tuple[float, float, float]]] = {}
    for ours, by_eager, exact in results:
        assert ours.keys() == by_eager.keys() == exact.keys()
        for name in exact.keys() - {"loss"}:  # one number, whose error is small by chance
            assert not dtypes or ours[name].dtype == by_eager[name].dtype
            off = [float((result[name].double() - exact[name]).norm()) for result in (ours, by_eager)]
            errors.setdefault(name, []).append((off[0], off[1], float(exact[name].norm())))
    for name, found in errors.items():
        of_ours, of_eager, sizes = map(list, zip(*found, strict=True))
        error, bound = rms(of_ours, sizes), factor * rms(of_eager, sizes)
        assert error <= bound, f"{name}: {error:.3e} against {bound:.3e}"


# Rows


def _class_weights(batch: Batch) -> Tensor:
    weight, shard = batch["weight"], batch.get("vocab_shard")
    vocab_size = weight.shape[0] if shard is None else shard.vocab_size
    return torch.linspace(0.2, 2.0, vocab_size, dtype=torch.float64, device=weight.device)


def _token_weights(batch: Batch) -> Tensor:
    """Return weights by id, so that a part of a batch has those of the whole."""
    return batch["target"].double() % 5 / 2


def _per_token(loss: Tensor) -> Tensor:
    """Reduce a `reduction="none"` loss to a scalar that gives the tokens negative, zero and positive gradients."""
    flat = loss.flatten()
    upstream = torch.arange(flat.numel(), dtype=flat.dtype, device=flat.device) % 7 - 2
    return (flat * upstream).sum() / max(1, flat.numel())


def _cross_entropy(
    id: str,
    *,
    ce_weight: bool = False,
    token_weights: bool = False,
    num_items: Any = None,
    bias: bool = True,
    **settings: Any,
) -> Row:
    """`settings` are the module's arguments, transform included."""

    def scalar(loss: Tensor) -> Tensor:
        return _per_token(loss) if settings.get("reduction") == "none" else loss

    def by_token(batch: Batch) -> Tensor | None:
        return _token_weights(batch) if token_weights else None

    def ours(batch: Batch, **options: Any) -> Tensor:
        weights = _class_weights(batch) if ce_weight else None
        loss = LigerFusedLinearCrossEntropyLoss(ce_weight=weights, **settings | options)
        return scalar(loss(**batch, num_items=num_items, token_weights=by_token(batch)))

    def oracle(batch: Batch, **options: Any) -> Tensor:
        weights = _class_weights(batch) if ce_weight else None
        settings_ = {"num_items": num_items, "ce_weight": weights, "token_weights": by_token(batch)}
        return scalar(eager.cross_entropy(**batch, **settings_, **settings | options))

    fused = settings.get("reduction") != "none"
    stops_gradients = settings.get("dft", False)
    return Row(
        id,
        ours,
        oracle,
        lambda sizes, seed: tokens(sizes, seed, bias),
        fused=fused,
        stops_gradients=stops_gradients,
    )


def _pair_weights(batch: Batch) -> Tensor:
    target, cu_seqlens = batch["target"], batch.get("cu_seqlens")
    n = (len(target) if cu_seqlens is None else len(cu_seqlens) - 1) // 2
    return torch.linspace(0.0, 2.0, n, dtype=torch.float64, device=target.device)


def _dpo(
    id: str,
    *,
    ref: str | None = "states",
    bias: bool = True,
    scope: str = "pair",
    weights: bool = False,
    **settings: Any,
) -> Row:
    """`settings` are the module's arguments, transform included."""

    def arguments(batch: Batch) -> dict[str, Any]:
        return {**batch, "example_weights": _pair_weights(batch)} if weights else {**batch}

    def ours(batch: Batch, **options: Any) -> Tensor:
        return LigerFusedLinearDPOLoss(use_ref_model=ref is not None, **settings | options)(**arguments(batch))[0]

    def oracle(batch: Batch, **options: Any) -> Tensor:
        return eager.dpo(**arguments(batch), **settings | options)[0]

    stops_gradients = settings.get("use_weighting", False)
    return Row(
        id, ours, oracle, lambda sizes, seed: pairs(sizes, seed, bias, ref), scope, stops_gradients=stops_gradients
    )


def _reference_free(
    id: str,
    module: type,
    oracle_: Callable[..., Tensor],
    *,
    nll_target: bool = False,
    weights: bool = False,
    **settings: Any,
) -> Row:
    """`settings` are the module's arguments; with `nll_target` the NLL uses the target's even ids."""

    def targets(batch: Batch, options: dict[str, Any]) -> Batch:
        if weights:
            batch = {**batch, "example_weights": _pair_weights(batch)}
        if not nll_target:
            return batch
        odd = batch["target"] % 2 == 1
        return {**batch, "nll_target": batch["target"].masked_fill(odd, options.get("ignore_index", -100))}

    def ours(batch: Batch, **options: Any) -> Tensor:
        return module(**settings | options)(**targets(batch, options))[0]

    def oracle(batch: Batch, **options: Any) -> Tensor:
        return oracle_(**targets(batch, options), **settings | options)

    return Row(id, ours, oracle, lambda sizes, seed: pairs(sizes, seed, ref=None), "pair")


def _unpaired(
    id: str,
    module: type,
    oracle_: Callable[..., Tensor],
    *,
    ref: str | None = "states",
    labels: str = "mixed",
    mismatched: str | None = None,
    weights: bool = False,
    kl: float | Tensor | None = None,
    delta: float | Tensor | None = None,
    **settings: Any,
) -> Row:
    """`settings` are the module's arguments; inputs missing from the batch are derived from it, or passed directly."""

    def arguments(batch: Batch, options: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {**batch}
        n, device = len(batch["preference_labels"]), batch["target"].device
        result |= {name: value for name, value in (("kl", kl), ("delta", delta)) if value is not None}
        if weights:
            result["example_weights"] = torch.linspace(0.5, 2.0, n, dtype=torch.float64, device=device)
        if mismatched:
            target = batch["kl_target"]
            result["kl_target"] = target.where(target != -100, options.get("ignore_index", -100))
        if mismatched == "logps":
            result["ref_kl_logps"] = torch.linspace(-6.0, -5.0, n, dtype=torch.float64, device=device)
        return result

    def ours(batch: Batch, **options: Any) -> Tensor:
        return module(use_ref_model=ref is not None, **settings | options)(**arguments(batch, options))[0]

    def oracle(batch: Batch, **options: Any) -> Tensor:
        return oracle_(**arguments(batch, options), **settings | options)

    return Row(
        id,
        ours,
        oracle,
        lambda sizes, seed: examples(sizes, seed, ref, labels, mismatched),
        "sequence",
        stops_gradients=mismatched is not None,
    )


class _SquaredError(LigerFusedLinearDistillationBase):
    """A user's divergence that depends on offsets of the logits."""

    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        return (student_logits - teacher_logits).square().mean(-1)


def _distillation(
    id: str,
    loss: type[LigerFusedLinearDistillationBase],
    name: str,
    parameter: float = 0.5,
    *,
    module: dict[str, Any] | None = None,
    bias: bool = True,
    padding: int = 0,
    top_k: int = 0,
    **settings: Any,
) -> Row:
    """`module` configures ours to equal `eager.distillation` of `name` and `parameter`; `settings` go to both."""

    def ours(batch: Batch, **options: Any) -> Tensor:
        settings_ = settings | options
        own = {k: settings_.pop(f"teacher_{k}") for k in _TRANSFORM if f"teacher_{k}" in settings_}
        teacher_options = LogitOptions(**own) if own else None
        num_items = settings_.pop("num_items", None)
        made = loss(**module or {}, teacher_options=teacher_options, **settings_)
        return made(**batch, num_items=num_items)[0]

    def oracle(batch: Batch, **options: Any) -> Tensor:
        return eager.distillation(**batch, name=name, parameter=parameter, **settings | options)[0]

    def sample(sizes: Sizes, seed: int) -> Batch:
        return students(sizes, seed, bias, padding, top_k)

    return Row(id, ours, oracle, sample, kernels=loss is not _SquaredError)


def _grpo(
    id: str,
    *,
    scope: str = "sequence",
    stops_gradients: bool = False,
    batches: int = 1,
    attention_mask: bool = False,
    num_items: Any = None,
    accumulation_steps: int | None = None,
    sample: dict[str, Any] | None = None,
    **settings: Any,
) -> Row:
    """`settings` are the module's arguments, transform included; `sample` goes to `rollouts`.

    Token-level rows also use scope "sequence": reductions weight sequences, so the batch must have them.
    """
    transform = {name: value for name, value in settings.items() if name in _TRANSFORM}
    items = {"num_items": num_items, "accumulation_steps": accumulation_steps}

    def masked(batch: Batch, options: dict[str, Any]) -> Batch:
        if not attention_mask:
            return batch
        valid = batch["target"] != options.get("ignore_index", -100)
        return {**batch, "target": batch["target"].where(valid, 1), "attention_mask": valid.long()}

    def ours(batch: Batch, **options: Any) -> Tensor:
        return LigerFusedLinearGRPOLoss(**settings | options)(**masked(batch, options), **items)[0]

    def oracle(batch: Batch, **options: Any) -> Tensor:
        return eager.grpo(**masked(batch, options), **items, **settings | options)[0]

    return Row(
        id,
        ours,
        oracle,
        lambda sizes, seed: rollouts(sizes, seed, transform=transform, **sample or {}),
        scope,
        stops_gradients=stops_gradients,
        batches=batches,
    )


def _on_policy(
    id: str,
    *,
    teacher: str = "states",
    sample: dict[str, Any] | None = None,
    stops_gradients: bool = False,
    kl_coef: float = 1.0,
    reduction: str = "token-mean",
    **settings: Any,
) -> Row:
    """`settings` are the module's other arguments, transform included; the oracle is GRPO with the advantages."""
    transform = {name: settings.pop(name) for name in _TRANSFORM if name in settings}
    prefix_weight = settings.get("prefix_weight", 0.0)

    def ours(batch: Batch, **options: Any) -> Tensor:
        return LigerFusedLinearOnPolicyDistillationLoss(
            kl_coef=kl_coef, reduction=reduction, **settings, **transform | options
        )(**batch)[0]

    def oracle(batch: Batch, **options: Any) -> Tensor:
        batch, own = dict(batch), transform | options

        def logps(prefix: str) -> Tensor:
            tensors = {name: batch.get(prefix + name) for name in ("weight", "input", "bias")}
            return eager.token_stats(**tensors, target=batch["target"], outputs=("logps",), **own)["logps"].detach()

        given = batch.pop("teacher_logps", None)
        of_teacher = logps("teacher_") if given is None else given
        batch = {name: x for name, x in batch.items() if not name.startswith("teacher_")}
        lowest = -1e18  # as which -inf counts
        current = settings.get("student") == "current"
        of_student = logps("") if current else batch.get("old_logps", logps(""))
        distance = of_teacher.clamp(min=lowest) - of_student.clamp(min=lowest)
        distance = distance.masked_fill(batch["target"] == own.get("ignore_index", -100), 0.0)
        for row in distance if prefix_weight else []:  # IW-OPD, one token at a time
            sizes = [abs(float(x)) for x in row]
            for t in range(len(sizes)):
                row[t] *= 1 + prefix_weight * (1 - sum(sizes[:t]) / max(1e-8, sum(sizes)))
        advantages = kl_coef * distance
        others = batch.pop("advantages", None)
        if others is not None:
            advantages = advantages + (others if others.ndim == 2 else others[:, None])
        surrogate = settings.get("surrogate", "clip")
        if surrogate == "clip":
            bounds = {name: settings.get(name, float("inf")) for name in ("epsilon_low", "epsilon_high")}
        elif surrogate == "truncate":  # as CISPO
            bounds = {"surrogate": "cispo", "epsilon_high": settings.get("ratio_max", 2.0)}
        else:
            bounds = {"surrogate": surrogate}
        return eager.grpo(**batch, advantages=advantages, reduction=reduction, **bounds, **own)[0]

    def draw(sizes: Sizes, seed: int) -> Batch:
        batch = rollouts(sizes, seed, ref="tokens", transform=transform, **sample or {})
        if not (sample or {}).get("advantages"):
            del batch["advantages"]
        ref_logps = batch.pop("ref_logps")
        if teacher == "logps":
            return batch | {"teacher_logps": ref_logps}
        return batch | _head(sizes, torch.Generator().manual_seed(seed + 1000), prefix="teacher_")

    return Row(id, ours, oracle, draw, "sequence", stops_gradients=stops_gradients)


N_KEPT = 4  # ids of each token


def _kept_ids(batch: Batch, ignore_index: int = -100) -> Tensor:
    """Return (..., N_KEPT) ids by the target's, which is the last, so that a part of a batch has those of the whole."""
    weight, shard, target = batch["weight"], batch.get("vocab_shard"), batch["target"]
    vocab_size = weight.shape[0] if shard is None else shard.vocab_size
    y = target.long().where(target != ignore_index, 0)
    return (y[..., None] + 3 * torch.arange(N_KEPT - 1, -1, -1, device=y.device)) % vocab_size


_PATCHES = threading.Lock()


@contextmanager
def products_for_kept_ids() -> Iterator[None]:
    """Take products for short lists of kept ids too."""
    with _PATCHES, mock.patch.object(choose, "kept_ids_take_products", lambda *_: True):
        yield


def _statistics(
    id: str, outputs: tuple[str, ...], *, kept: Literal["rows", "products"] | None = None, **settings: Any
) -> Row:
    """An objective that mixes `outputs` with per-token coefficients, so that each token gets different gradients.

    Args:
        kept: statistics are of the ids that a sampler kept, by a few rows of the head for each token, or by products.
    """

    def objective(stats: dict[str, Tensor], target: Tensor) -> Tensor:
        first = next(iter(stats.values()))
        phase = torch.arange(target.numel(), dtype=first.dtype, device=first.device).view(target.shape)
        terms = [torch.cos(phase + i) * stats[name] + 0.1 * stats[name].square() for i, name in enumerate(outputs)]
        # Differentiable in each output, but not a sum of functions of single outputs.
        return (sum(terms) * torch.sigmoid(stats[outputs[0]])).sum() / max(1, target.numel())

    def ours(batch: Batch, **options: Any) -> Tensor:
        given: dict[str, Any] = {**batch}
        if kept is not None:
            ids = _kept_ids(batch, options.get("ignore_index", -100)).reshape(-1)
            given["kept"] = KeptIds(ids, torch.arange(0, ids.numel() + 1, N_KEPT, device=ids.device))
        with products_for_kept_ids() if kept == "products" else nullcontext():
            stats: TokenStats = linear_token_stats(**given, outputs=outputs, **settings | options)
        return objective({name: getattr(stats, name) for name in outputs}, batch["target"])

    def oracle(batch: Batch, **options: Any) -> Tensor:
        given: dict[str, Any] = {**batch}
        if kept is not None:
            ids, v = _kept_ids(batch, options.get("ignore_index", -100)), batch["weight"].shape[0]
            given["kept"] = torch.zeros(*ids.shape[:-1], v, dtype=torch.bool, device=ids.device).scatter(-1, ids, True)
        return objective(eager.token_stats(**given, outputs=outputs, **settings | options), batch["target"])

    return Row(id, ours, oracle, tokens, fused=False, kept=kept is not None, products=kept != "rows")


_TRANSFORM = {"softcap": 3.0, "logit_scale": 1.7, "temperature": 0.6}
_SMOOTHED = {name for name, kind in dpo_losses.LOSS_TYPES.items() if "label_smoothing" in kind.reads}
_SMOOTHED_CPO = {name for name, kind in cpo_losses.LOSS_TYPES.items() if "label_smoothing" in kind.reads}
# For long random pairs, one pair's exp(-margin) would dominate the loss and its error.
_MILD = {"discopop": {"beta": 0.02, "discopop_tau": 0.5}}

CROSS_ENTROPY = [
    _cross_entropy("ce", bias=False),
    _cross_entropy("ce-sum", reduction="sum"),
    _cross_entropy("ce-smoothing", label_smoothing=0.1),
    _cross_entropy("ce-smoothing-z_loss-class_weights", label_smoothing=0.1, lse_square_scale=1e-2, ce_weight=True),
    _cross_entropy("ce-class_weights-sum", ce_weight=True, reduction="sum"),
    _cross_entropy("ce-softcap-scale-temperature", **_TRANSFORM),
    _cross_entropy("ce-num_items", num_items=37),
    _cross_entropy("ce-num_items-tensor-alone", num_items=torch.tensor(37)),
    _cross_entropy("ce-num_items-tensor", num_items=torch.tensor(37), lse_square_scale=1e-2),
    _cross_entropy("ce-none", reduction="none"),
    _cross_entropy(
        "ce-none-everything", reduction="none", label_smoothing=0.1, lse_square_scale=1e-2, ce_weight=True, **_TRANSFORM
    ),
]

SFT_KIN = [
    _cross_entropy("ce-focal", focal_gamma=2.0),
    _cross_entropy("ce-focal-of-a-fraction-none", focal_gamma=0.5, reduction="none", **_TRANSFORM),
    _cross_entropy("ce-dft", dft=True),
    _cross_entropy("ce-dft-class_weights-num_items", dft=True, ce_weight=True, num_items=37),
    _cross_entropy("ce-entropy", entropy_weight=0.1),
    _cross_entropy(
        "ce-entropy-negative-z_loss-smoothing-sum",
        entropy_weight=-0.1,
        lse_square_scale=1e-2,
        label_smoothing=0.1,
        reduction="sum",
    ),
    _cross_entropy("ce-token_weights", token_weights=True),
    _cross_entropy("ce-token_weights-sum-focal", token_weights=True, reduction="sum", focal_gamma=1.0),
    _cross_entropy("ce-token_weights-none", token_weights=True, reduction="none", entropy_weight=0.1),
    _cross_entropy(
        "ce-token_weights-everything",
        token_weights=True,
        ce_weight=True,
        label_smoothing=0.1,
        lse_square_scale=1e-2,
        entropy_weight=0.1,
    ),
    _cross_entropy("ce-token_weights-num_items", token_weights=True, num_items=37, dft=True),
]

DPO = [
    *(
        _dpo(
            f"dpo-{loss_type}",
            loss_type=loss_type,
            label_smoothing=0.1 if loss_type in _SMOOTHED else 0.0,
            **_MILD.get(loss_type, {}),
            scope="batch" if loss_type.startswith("aot") else "pair",
        )
        for loss_type in LOSS_TYPES
    ),
    _dpo("dpo-discopop-default-tau", loss_type="discopop", beta=0.02),
    _dpo("dpo-no-bias", bias=False, beta=0.3),
    _dpo("dpo-rpo", compute_nll_loss=True, alpha=0.7),
    _dpo("dpo-average_log_prob", average_log_prob=True, beta=2.0),
    _dpo("dpo-softcap-scale-temperature", **_TRANSFORM),
    _dpo("dpo-no-reference", ref=None),
    _dpo("dpo-ref_logps-of-tokens", ref="tokens"),
    _dpo("dpo-ref_logps-of-tokens-averaged", ref="tokens", average_log_prob=True),
    _dpo("dpo-ref_logps-of-sequences", ref="sequences"),
    _dpo("dpo-sigmoid+apo_zero+sft", loss_type=["sigmoid", "apo_zero", "sft"], loss_weights=[0.8, 0.3, 0.2]),
]

# Scores that grow exponentially with log-ratios: average over tokens, so that no sequence dominates the loss.
_SCORES = {"average_log_prob": True, "beta": 0.5}

DPO_VARIANTS = [
    _dpo("dpo-forward_kl", f_divergence_type="forward_kl", **_SCORES),
    _dpo("dpo-js_divergence", f_divergence_type="js_divergence", loss_type="hinge"),
    _dpo("dpo-js_divergence-per-token-losses", f_divergence_type="js_divergence", loss_type=["ipo", "sigmoid_norm"]),
    _dpo("dpo-alpha_divergence", f_divergence_type="alpha_divergence", **_SCORES),
    _dpo("dpo-alpha_divergence-1", f_divergence_type="alpha_divergence", f_alpha_divergence_coef=1.0),
    _dpo(
        "dpo-alpha_divergence-robust+discopop",
        f_divergence_type="alpha_divergence",
        f_alpha_divergence_coef=0.8,
        loss_type=["robust", "discopop"],
        label_smoothing=0.1,
        discopop_tau=0.5,
        **_SCORES,
    ),
    _dpo("dpo-ld_alpha", ld_alpha=0.3),
    _dpo("dpo-ld_alpha-0-ipo", ld_alpha=0.0, loss_type="ipo"),
    _dpo("dpo-ld_alpha-ref_logps-of-tokens", ld_alpha=0.3, ref="tokens", compute_nll_loss=True),
    _dpo("dpo-wpo", use_weighting=True),
    _dpo("dpo-example_weights", weights=True, compute_nll_loss=True, alpha=0.5),
    _dpo("dpo-example_weights-hinge+sft-ld_alpha", weights=True, loss_type=["hinge", "sft"], ld_alpha=0.6),
    _dpo("dpo-wpo-apo_zero+hinge-ld_alpha", use_weighting=True, loss_type=["apo_zero", "hinge"], ld_alpha=0.6),
]

REFERENCE_FREE = [
    _reference_free("orpo", LigerFusedLinearORPOLoss, eager.orpo),
    _reference_free("orpo-nll_target", LigerFusedLinearORPOLoss, eager.orpo, beta=0.7, nll_target=True),
    _reference_free("orpo-softcap-scale-temperature", LigerFusedLinearORPOLoss, eager.orpo, **_TRANSFORM),
    *(
        _reference_free(
            f"cpo-{loss_type}",
            LigerFusedLinearCPOLoss,
            eager.cpo,
            loss_type=loss_type,
            label_smoothing=0.1 if loss_type in _SMOOTHED_CPO else 0.0,
        )
        for loss_type in CPO_LOSS_TYPES
    ),
    _reference_free("cpo-no-nll", LigerFusedLinearCPOLoss, eager.cpo, cpo_alpha=0.0, beta=0.3),
    _reference_free("cpo-nll_target", LigerFusedLinearCPOLoss, eager.cpo, cpo_alpha=0.5, nll_target=True),
    _reference_free(
        "cpo-alphapo",
        LigerFusedLinearCPOLoss,
        eager.cpo,
        loss_type="simpo",
        cpo_alpha=0.0,
        alphapo_alpha=0.25,
        beta=1.0,
    ),
    _reference_free(
        "cpo-alphapo-negative-hinge", LigerFusedLinearCPOLoss, eager.cpo, loss_type="hinge", alphapo_alpha=-0.1
    ),
    _reference_free(
        "cpo-example_weights-nll_target",
        LigerFusedLinearCPOLoss,
        eager.cpo,
        weights=True,
        cpo_alpha=0.5,
        nll_target=True,
    ),
    _reference_free("orpo-example_weights", LigerFusedLinearORPOLoss, eager.orpo, weights=True),
    _reference_free("simpo", LigerFusedLinearSimPOLoss, eager.simpo, beta=2.0, gamma=1.0),
    _reference_free("simpo-hinge", LigerFusedLinearSimPOLoss, eager.simpo, loss_type="hinge"),
    _reference_free(
        "cpo-simpo-smoothing", LigerFusedLinearSimPOLoss, eager.simpo, compute_nll_loss=True, label_smoothing=0.1
    ),
]

_KTO, _BCO = LigerFusedLinearKTOLoss, LigerFusedLinearBCOLoss

# Without a reference, log-ratios are log-probabilities: with a beta of 0.1 their length alone would saturate the loss.
UNPAIRED = [
    _unpaired("kto", _KTO, eager.kto, kl=0.0),
    _unpaired("kto-kl", _KTO, eager.kto, kl=3.0),
    _unpaired("kto-kl-tensor", _KTO, eager.kto, kl=torch.tensor([3.0], dtype=torch.float64)),
    _unpaired("kto-kl-negative", _KTO, eager.kto, kl=-3.0),
    _unpaired("kto-kl-of-mismatched", _KTO, eager.kto, mismatched="states", beta=0.05),
    _unpaired(
        "kto-kl-of-mismatched-softcap-scale-temperature",
        _KTO,
        eager.kto,
        mismatched="states",
        beta=0.05,
        **_TRANSFORM,
    ),
    _unpaired(
        "kto-kl-of-mismatched-ref_kl_logps", _KTO, eager.kto, mismatched="logps", average_log_prob=True, beta=0.7
    ),
    _unpaired("kto-weights", _KTO, eager.kto, kl=1.0, desirable_weight=1.3, undesirable_weight=0.7),
    _unpaired("kto-example_weights", _KTO, eager.kto, kl=1.0, weights=True),
    _unpaired("kto-all-desirable", _KTO, eager.kto, kl=1.0, labels="desirable"),
    _unpaired("kto-all-undesirable", _KTO, eager.kto, kl=1.0, labels="undesirable"),
    _unpaired("kto-no-reference", _KTO, eager.kto, kl=1.0, ref=None, beta=0.01),
    _unpaired("kto-ref_logps-of-tokens-averaged", _KTO, eager.kto, kl=0.2, ref="tokens", average_log_prob=True),
    _unpaired("kto-ref_logps-of-sequences", _KTO, eager.kto, kl=1.0, ref="sequences"),
    _unpaired("kto-apo_zero_unpaired", _KTO, eager.kto, loss_type="apo_zero_unpaired", beta=0.3),
    _unpaired("bco", _BCO, eager.bco, delta=0.0),
    _unpaired("bco-delta-weights", _BCO, eager.bco, delta=-0.4, weights=True, ref="sequences"),
    _unpaired("bco-delta-tensor", _BCO, eager.bco, delta=torch.tensor(0.3), average_log_prob=True, beta=0.8),
    _unpaired("bco-all-undesirable", _BCO, eager.bco, delta=0.1, labels="undesirable", ref=None, beta=0.01),
    _unpaired("bco-softcap-scale-temperature", _BCO, eager.bco, delta=0.1, **_TRANSFORM),
]

_KL, _JSD = LigerFusedLinearKLDivLoss, LigerFusedLinearJSDLoss
_TVD, _COSINE = LigerFusedLinearTVDLoss, LigerFusedLinearCosineSimilarityLoss

DISTILLATION = [
    _distillation("kl", _KL, "kl"),
    _distillation("kl-reverse", _KL, "reverse_kl", module={"reverse": True}),
    _distillation("kl-skew", _KL, "skew_kl", 0.1, module={"skew": 0.1}),
    _distillation("kl-skew-reverse", _KL, "skew_reverse_kl", 0.3, module={"skew": 0.3, "reverse": True}),
    _distillation("jsd", _JSD, "jsd", bias=False),
    _distillation("jsd-0", _JSD, "jsd", 0.0, module={"beta": 0.0}, num_items=37),
    _distillation("jsd-0.1", _JSD, "jsd", 0.1, module={"beta": 0.1}, num_items=torch.tensor(37)),
    _distillation("jsd-1", _JSD, "jsd", 1.0, module={"beta": 1.0}),
    _distillation("tvd", _TVD, "tvd"),
    _distillation("cosine", _COSINE, "cosine"),
    _distillation("squared-error", _SquaredError, "squared_error"),
    _distillation("jsd-padded-teacher", _JSD, "jsd", padding=4),
    _distillation("jsd-soft", _JSD, "jsd", weight_hard_loss=0.0, weight_soft_loss=1.0, temperature=2.0),
    _distillation("jsd-hard", _JSD, "jsd", weight_hard_loss=1.0, weight_soft_loss=0.0),
    *(
        _distillation(f"{id}-softcap-scale-temperature", loss, name, **_TRANSFORM)
        for id, loss, name in (("kl", _KL, "kl"), ("jsd", _JSD, "jsd"), ("tvd", _TVD, "tvd"),
                               ("squared-error", _SquaredError, "squared_error"))
    ),
    _distillation("cosine-softcap-scale", _COSINE, "cosine", softcap=3.0, logit_scale=1.7),
    _distillation("jsd-temperature", _JSD, "jsd", temperature=1.7),
    _distillation("jsd-teacher-transform", _JSD, "jsd",
                  teacher_softcap=2.0, teacher_logit_scale=0.7, teacher_temperature=1.3),
    _distillation("kl-top-k", _KL, "kl", top_k=4),
    _distillation("jsd-top-k", _JSD, "jsd", top_k=4, bias=False),
    _distillation("tvd-top-k", _TVD, "tvd", top_k=2),
    _distillation("kl-skew-top-k-softcap-scale-temperature", _KL, "skew_kl", 0.1,
                  module={"skew": 0.1}, top_k=5, **_TRANSFORM),
    _distillation("jsd-top-k-of-all", _JSD, "jsd", top_k=23),
]  # fmt: skip

_GSPO = {"importance_level": "sequence", "epsilon_low": 0.06, "epsilon_high": 0.08}

POLICY = [
    _grpo("grpo"),
    _grpo("grpo-on-policy", sample={"old": False}, stops_gradients=True),
    _grpo("grpo-advantages-of-tokens", sample={"advantages": "tokens"}),
    _grpo("grpo-attention_mask", attention_mask=True),
    _grpo("grpo-softcap-scale-temperature", **_TRANSFORM),
    _grpo("grpo-kl-entropy", beta=0.3, entropy_coef=0.2, sample={"ref": "tokens", "weights": "tokens"}),
    _grpo("grpo-delta", epsilon_low=0.1, epsilon_high=0.1, delta=1.05),
    _grpo("grpo-kl", beta=0.04, sample={"ref": "states"}),
    _grpo("grpo-kl-uncorrected", beta=0.3, use_bias_correction_kl=False, sample={"ref": "tokens"}),
    _grpo("grpo-importance_weights-kl", beta=0.3, sample={"ref": "tokens", "weights": "tokens"}),
    _grpo("bnpo-importance_weights-of-sequences", reduction="bnpo", sample={"weights": "sequences"}),
    _grpo("dapo", reduction="dapo", epsilon_high=0.28),
    _grpo("dapo-num_items-entropy", reduction="dapo", num_items=37, accumulation_steps=3, entropy_coef=0.7),
    _grpo("dr_grpo", reduction="dr_grpo", max_completion_length=11),
    _grpo(
        "cispo",
        surrogate="cispo",
        reduction="dapo",
        epsilon_high=0.9,
        num_items=torch.tensor(37),
        sample={"advantages": "tokens"},
        stops_gradients=True,
    ),
    _grpo(
        "cispo-lower-bound",
        surrogate="cispo",
        cispo_epsilon_low=0.9,
        epsilon_high=1.2,
        reduction="token-mean",
        stops_gradients=True,
    ),
    _grpo("gmpo", surrogate="gmpo", epsilon_low=0.3, epsilon_high=0.4),
    _grpo(
        "gmpo-advantages-of-tokens-kl",
        surrogate="gmpo",
        reduction="seq-mean-token-mean",
        beta=0.3,
        kl_estimator="k2",
        use_bias_correction_kl=False,
        sample={"ref": "tokens", "advantages": "tokens", "weights": "tokens"},
    ),
    _grpo("sapo", surrogate="sapo", sapo_temperature_neg=1.7),
    _grpo("vespo", batches=8, surrogate="vespo", reduction="dapo", sample={"weights": "tokens"}, stops_gradients=True),
    _grpo(
        "vespo-mixed",
        batches=8,
        surrogate="vespo",
        vespo_k_pos=1.5,
        vespo_lambda_neg=2.5,
        beta=0.1,
        sample={"ref": "tokens", "weights": "sequences", "advantages": "tokens"},
        stops_gradients=True,
    ),
    _grpo("gspo", **_GSPO),
    _grpo("gspo-kl", beta=0.04, sample={"ref": "states", "advantages": "tokens", "weights": "tokens"}, **_GSPO),
    _grpo(
        "gspo-token",
        **_GSPO | {"importance_level": "sequence_token"},
        sample={"advantages": "tokens"},
        stops_gradients=True,
    ),
    _grpo("luspo", reduction="luspo", **_GSPO),
    _grpo("luspo-verl", reduction="seq-mean-token-sum", **_GSPO),
    _grpo(
        "dr_grpo-off_policy_mask-k1",
        reduction="seq-mean-token-sum-norm",
        max_completion_length=11,
        off_policy_mask_threshold=0.05,
        beta=0.3,
        kl_estimator="kl",
        sample={"ref": "tokens", "weights": "tokens"},
    ),
    _grpo(
        "sapo-off_policy_mask-of-tokens",
        surrogate="sapo",
        off_policy_mask_threshold=0.02,
        sample={"advantages": "tokens"},
    ),
    _grpo(
        "clip_cov",
        scope="batch",
        surrogate="clip_cov",
        clip_cov_ratio=0.2,
        clip_cov_lb=0.1,
        clip_cov_ub=3.0,
        sample={"weights": "tokens"},
    ),
    _grpo(
        "kl_cov",
        scope="batch",
        surrogate="kl_cov",
        kl_cov_ratio=0.2,
        ppo_kl_coef=0.7,
        reduction="token-mean",
        entropy_coef=0.2,
        sample={"advantages": "tokens"},
    ),
    _grpo("gpg", surrogate="log_prob", reduction="dapo", sample={"old": False}),
    _grpo("dro", surrogate="log_prob", reduction="token-mean", sampler_kl_coef=0.4),
    _grpo("dppo_tv", surrogate="dppo_tv", reduction="token-mean", epsilon_low=0.01, epsilon_high=0.02,
          stops_gradients=True),
    _grpo("dppo_tv-prime-rl", surrogate="dppo_tv", reduction="dapo", num_items=37, epsilon_low=0.03, epsilon_high=0.01,
          ratio_max=None, sampler_kl_coef=0.1, sample={"advantages": "tokens", "weights": "tokens"},
          stops_gradients=True),
    _grpo("dppo_kl", surrogate="dppo_kl", epsilon_low=1e-3, epsilon_high=5e-4, ratio_max=1.2, beta=0.1,
          sample={"ref": "tokens"}, stops_gradients=True),
    _grpo("ipo", surrogate="ipo", ipo_threshold=0.02, reduction="dapo", sampler_kl_coef=1e-3,
          sample={"weights": "tokens"}, stops_gradients=True),
    _grpo("fipo", surrogate="fipo", reduction="dapo", fipo_half_life=2.0, fipo_safety_ratio=1.1, delta=1.5,
          stops_gradients=True),
    _grpo("fipo-two-sided", surrogate="fipo", fipo_half_life=3.0, fipo_clip_low=0.3, fipo_clip_high=0.4,
          fipo_safety_ratio=None, sample={"advantages": "tokens", "weights": "tokens"}, stops_gradients=True),
    _grpo("real", scope="batch", surrogate="real", group_size=2),
    _grpo("real-tokens-kl", scope="batch", surrogate="real", batches=8, group_size=2, real_temperature=0.4, beta=0.05,
          sample={"ref": "tokens", "advantages": "tokens"}),
    _grpo("a2po", surrogate="a2po", a2po_beta=0.3, sample={"ref": "states"}),
    _grpo("a2po-ref_logps", surrogate="a2po", a2po_beta=0.5, sample={"ref": "tokens", "old": False}),
    _grpo("rloo", batches=8, importance_level="trajectory", reduction="grpo"),
    _grpo(
        "reinforce", batches=8, surrogate="reinforce", importance_level="trajectory", sample={"weights": "sequences"}
    ),
    _grpo("grpo-top-entropy", scope="batch", top_entropy_quantile=0.35, entropy_coef=0.2),
    _grpo(
        "gspo-top-entropy-kl",
        scope="batch",
        top_entropy_quantile=0.35,
        beta=0.2,
        sample={"ref": "tokens", "weights": "tokens"},
        **_GSPO,
    ),
]  # fmt: skip

ON_POLICY = [
    _on_policy("on-policy-distillation", sample={"old": False}, stops_gradients=True),
    _on_policy(
        "on-policy-distillation-old-clipped",
        kl_coef=3.0,
        epsilon_low=0.1,
        epsilon_high=0.2,
        reduction="grpo",
        sample={"advantages": "tokens"},
    ),
    _on_policy(
        "on-policy-distillation-logps-advantages",
        teacher="logps",
        kl_coef=0.3,
        sample={"advantages": "sequences", "weights": "tokens"},
    ),
    _on_policy(
        "on-policy-sdpo",
        surrogate="truncate",
        student="current",
        ratio_max=1.1,
        kl_coef=0.7,
        sample={"advantages": "sequences", "weights": "tokens"},
        stops_gradients=True,
    ),
    _on_policy("on-policy-iw_opd", surrogate="log_prob", prefix_weight=0.5, stops_gradients=True),
    _on_policy(
        "on-policy-prefix_weight-clip",
        teacher="logps",
        prefix_weight=2.0,
        epsilon_high=0.1,
        reduction="grpo",
        sample={"old": False, "advantages": "tokens"},
        stops_gradients=True,
    ),
    # Of an exact inverse: the rounding of 1/0.6 moves all log-probabilities alike, in eager code by another rounding.
    _on_policy(
        "on-policy-distillation-softcap-scale-temperature", **{"softcap": 4.0, "logit_scale": 1.75, "temperature": 0.5}
    ),
]

STATISTICS = [
    _statistics("stats-logps", ("logps",)),
    _statistics("stats-entropy", ("entropy",)),
    _statistics("stats-all", ("logps", "lse", "entropy", "mean_logits")),
    _statistics("stats-any-order-transformed", ("mean_logits", "entropy", "logps"), **_TRANSFORM),
    _statistics("stats-kept", ("logps", "lse", "entropy"), kept="rows", **_TRANSFORM),
    _statistics("stats-kept-products", ("logps", "lse", "entropy"), kept="products", **_TRANSFORM),
]

ROWS = [
    *CROSS_ENTROPY,
    *SFT_KIN,
    *DPO,
    *DPO_VARIANTS,
    *REFERENCE_FREE,
    *UNPAIRED,
    *DISTILLATION,
    *POLICY,
    *ON_POLICY,
    *STATISTICS,
]

# One row for each path through the engine, with what is special about it. What the engine promises about autograd,
# hooks, layouts, empty batches and the like depends on the path and not on the formula: tests of it run on these rows,
# and on all others with `--exhaustive` (see `sampling.on_paths`). Adapters, ranks and budgets change each path; their
# tests run on these rows too.
PATHS = {
    "ce": "gradients from the forward; known beforehand, so that the forward runs no autograd",
    "ce-token_weights-everything": "gradients from the forward, of several statistics; weights of tokens and classes",
    "ce-none-everything": "losses of tokens: gradients in the backward, logits projected again, transformed logits",
    "dpo-sigmoid": "pairs, whose chunks hold whole pairs; a reference head, whose chunks have no gradient",
    "dpo-aot": "one group of the whole batch, larger than the budget: its logits are projected twice",
    "orpo-nll_target": "pairs without a reference, and a second target",
    "kto-kl-of-mismatched": "sequences, and a second pass over other completions, without a gradient",
    "jsd-softcap-scale-temperature": "a teacher's logits beside the student's, and a divergence in closed form",
    "cosine": "a divergence of other sums than those of probabilities, without a reduction over a row's maximum",
    "squared-error": "a user's divergence, by autograd",
    "kl-top-k": "a teacher's candidates, gathered from the logits",
    "grpo-kl": "sequences with a reference head, and importance ratios",
    "gspo": "ratios of whole sequences",
    "grpo-top-entropy": "two statistics of the whole batch: the loss selects tokens by rank",
    "stats-all": "the primitive with all statistics, and gradients in the backward",
    "stats-kept": "the ids that a sampler kept: a few rows of the head for each token, and no logits",
    "stats-kept-products": "long lists of these: logits of the ids are gathered, and their gradients scattered",
}


def rows(*ids: str) -> list[Row]:
    """Return the rows with these ids, in the order of the table; raise KeyError for an unknown id."""
    if missing := set(ids) - {row.id for row in ROWS}:
        raise KeyError(*missing)
    return [row for row in ROWS if row.id in ids]


def rows_like(part: str) -> list[Row]:
    """Return the rows whose id contains `part`; raise KeyError if there is none."""
    found = [row for row in ROWS if part in row.id]
    if not found:
        raise KeyError(part)
    return found
