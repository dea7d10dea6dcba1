"""Table of public functions and losses, each with its tensors by name.

Tests replace one tensor of a call by another layout (`engine/test_layouts.py`) or kind (`engine/test_tensor_kinds.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from table import PARAMETERS, Batch, Sizes, examples, moved, pairs, rollouts, students, tokens
from torch import Tensor

import liger_chunked as lc
from liger_chunked.types import DIFFERENTIABLE

# Every token is valid: otherwise the selection of valid tokens would make copies without gaps.
SIZES = Sizes(sequences=4, length=3, hidden=5, vocab=11, ref_hidden=4, ignored=False)


@dataclass(frozen=True)
class Call:
    """A call of the library.

    Args:
        id: name in test reports.
        function: maps tensors by name to one or more tensors.
        sample: makes the tensors, floating ones in float64.
        differentiable: names of the tensors that get a gradient.
        interpreted: also test layouts in Triton's interpreter, where a case takes a hundred times as long.
        dtype: of the tensors whose layouts change.
        exhaustive: test layouts with `--exhaustive` only.
    """

    id: str
    function: Callable[..., Any]
    sample: Callable[[], Batch]
    differentiable: Iterable[str] = PARAMETERS
    interpreted: bool = False
    dtype: torch.dtype = torch.float32
    exhaustive: bool = False

    def __repr__(self) -> str:
        return self.id

    def tensors(self, device: str = "cpu") -> Batch:
        """Return the tensors that have a layout, in the dtype of its tests."""
        return {name: x for name, x in moved(self.sample(), self.dtype, device).items() if x.ndim}

    def leaves(self, tensors: Batch | None = None) -> Batch:
        """Return the tensors, with those that get a gradient as trainable leaves."""
        tensors = self.sample() if tensors is None else tensors
        return {name: x.detach().requires_grad_(name in self.differentiable) for name, x in tensors.items()}

    def outputs(self, tensors: Batch) -> list[Tensor]:
        found = self.function(**tensors)
        return [found] if isinstance(found, Tensor) else [x for x in found if x is not None]

    def results(
        self, outputs: list[Tensor], leaves: Batch, upstream: Callable[[Tensor], Tensor] = lambda g: g
    ) -> dict[str, Tensor]:
        """Return the outputs, and gradients by the leaves; `upstream` changes upstream gradients."""
        cotangents = [torch.arange(y.numel(), dtype=y.dtype, device=y.device).view(y.shape) % 5 - 1.5 for y in outputs]
        wanted = {name: x for name, x in leaves.items() if x.requires_grad}
        found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
        if not wanted:
            return found
        gradients = torch.autograd.grad(outputs, list(wanted.values()), [upstream(g) for g in cotangents])
        return found | {f"gradient of {name}": g for name, g in zip(wanted, gradients, strict=True)}

    def evaluate(self, tensors: Batch, upstream: Callable[[Tensor], Tensor] = lambda g: g) -> dict[str, Tensor]:
        leaves = self.leaves(tensors)
        return self.results(self.outputs(leaves), leaves, upstream)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Losses


def first(loss: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a function of tensors by name that returns the loss without its metrics."""

    def call(**tensors: Tensor) -> Tensor:
        found = loss(**tensors)
        return found[0] if isinstance(found, tuple) else found

    return call


def weighed_tokens() -> Batch:
    batch = tokens(SIZES, 0)
    target = batch["target"]
    return batch | {"token_weights": torch.linspace(0.5, 1.5, target.numel(), dtype=torch.float64).view(target.shape)}


def counted(batch: Batch) -> Batch:
    return batch | {"num_items": (batch["target"] != -100).sum()}


def statistics(budget: int | None = None, **batch: Tensor) -> list[Tensor]:
    stats = lc.linear_token_stats(**batch, outputs=DIFFERENTIABLE, logits_budget=budget)
    return [getattr(stats, name) for name in DIFFERENTIABLE]


def two_targets() -> Batch:
    batch = pairs(SIZES, 0, ref=None)
    return batch | {"nll_target": batch["target"].clone()}


def labelled(**how: Any) -> Batch:
    batch = examples(SIZES, 0, **how)
    return batch | {"example_weights": torch.linspace(0.5, 2.0, SIZES.sequences, dtype=torch.float64)}


def labelled_logps() -> Batch:
    batch = labelled(ref="tokens", mismatched="logps")
    return batch | {"ref_kl_logps": torch.linspace(-6.0, -5.0, SIZES.sequences, dtype=torch.float64)}


def masked_rollouts(**how: Any) -> Batch:
    batch = rollouts(SIZES, 0, **how)
    batch["target"] = batch["target"].clamp(min=1)
    return batch | {"attention_mask": torch.ones_like(batch["target"], dtype=torch.bool)}


def top_k() -> Batch:
    batch = students(SIZES, 0, top_k=3)
    return batch | {"mask": batch["target"] != 5}


# One loss, or several, for each set of arguments.
LOSSES = [
    Call("stats", statistics, lambda: tokens(SIZES._replace(ignored=True), 0), interpreted=True),
    Call("ce", lc.LigerFusedLinearCrossEntropyLoss(), lambda: counted(weighed_tokens())),
    Call("dpo", first(lc.LigerFusedLinearDPOLoss()), lambda: pairs(SIZES, 0)),
    Call("orpo", first(lc.LigerFusedLinearORPOLoss()), two_targets),
    Call("kto", first(lc.LigerFusedLinearKTOLoss()), lambda: labelled(mismatched="states")),
    Call("kto-logps", first(lc.LigerFusedLinearKTOLoss(beta=0.05)), labelled_logps, interpreted=True),
    Call(
        "kto-kl",
        first(lc.LigerFusedLinearKTOLoss()),
        lambda: examples(SIZES, 0, ref="sequences") | {"kl": normal()},
    ),
    Call(
        "grpo",
        first(lc.LigerFusedLinearGRPOLoss(beta=0.1, reduction="dapo")),
        lambda: counted(rollouts(SIZES, 0, ref="states")),
    ),
    Call(
        "grpo-logps",
        first(lc.LigerFusedLinearGRPOLoss(beta=0.1, entropy_coef=0.1)),
        lambda: masked_rollouts(ref="tokens", advantages="tokens", weights="tokens"),
        interpreted=True,
    ),
    Call("on-policy", first(lc.LigerFusedLinearOnPolicyDistillationLoss()), lambda: students(SIZES, 0)),
    Call("jsd", first(lc.LigerFusedLinearJSDLoss()), lambda: students(SIZES, 0)),
    Call("kl-top_k", first(lc.LigerFusedLinearKLDivLoss()), top_k),
]


# Base kernels


def base(id: str, function: Callable[..., Any], differentiable: str, **tensors: Tensor) -> Call:
    def sample() -> Batch:
        return {name: x.clone() for name, x in tensors.items()}

    return Call(id, function, sample, differentiable.split(), interpreted=True)


N, V = 6, 11
TARGET = torch.arange(N) * 3 % V
OF_CLASSES = torch.linspace(0.5, 2.0, V, dtype=torch.float64)
ANGLES = normal(2, 5, 8, seed=5)

BASE = [
    base("cross_entropy", partial(lc.liger_cross_entropy, label_smoothing=0.1), "logits", logits=normal(N, V),
         target=TARGET, weight=OF_CLASSES),
    base("cross_entropy-of-sequences", lc.liger_cross_entropy, "logits", logits=normal(2, 3, V),
         target=TARGET.view(2, 3)),
    base("cross_entropy-none", partial(lc.liger_cross_entropy, reduction="none", label_smoothing=0.1), "logits",
         logits=normal(2, 3, V), target=TARGET.view(2, 3), weight=OF_CLASSES),
    base("rms_norm", partial(lc.liger_rms_norm, eps=1e-6), "x weight residual", x=normal(2, 3, V),
         weight=normal(V, seed=1), residual=normal(2, 3, V, seed=2)),
    base("rms_norm_gated", lc.liger_rms_norm_gated, "x gate weight", x=normal(2, 3, V), gate=normal(2, 3, V, seed=1),
         weight=normal(V, seed=2)),
    base("layer_norm", lc.liger_layer_norm, "x weight bias", x=normal(2, 3, V), weight=normal(V, seed=1),
         bias=normal(V, seed=2)),
    base("swiglu", lc.liger_swiglu, "gate up", gate=normal(2, 3, V), up=normal(2, 3, V, seed=1)),
    base("geglu", lc.liger_geglu, "gate up", gate=normal(2, 3, V), up=normal(2, 3, V, seed=1)),
    base("geglu-packed", lc.liger_geglu, "gate", gate=normal(2, 3, 2 * V)),
    base("relu_squared", lc.liger_relu_squared, "x", x=normal(2, 3, V)),
    *(
        base(f"rope-{'interleaved' if interleaved else 'halves'}",
             partial(lc.liger_rotary_pos_emb, interleaved=interleaved), "q k", q=normal(2, 4, 5, 12),
             k=normal(2, 2, 5, 12, seed=1), cos=ANGLES.cos(), sin=ANGLES.sin())
        for interleaved in (False, True)
    ),
    base("rope-of-tables", lc.liger_rotary_pos_emb, "q k", q=normal(2, 4, 5, 8), k=normal(2, 2, 5, 8, seed=1),
         cos=ANGLES[0].cos(), sin=ANGLES[0].sin(), position_ids=torch.tensor([[0, 1, 2, 3, 4], [4, 2, 1, 0, 3]])),
]  # fmt: skip
