"""Test that memory layout changes no value: gaps, other orders, repeated elements, unaligned addresses.

A kernel that assumes contiguous inputs is correct for contiguous inputs. Only other layouts show the bug, and only if
the kernels run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from sampling import exhaustive
from table import PARAMETERS, PATHS, ROWS, Batch, Row, Sizes, examples, moved, rollouts, tokens
from torch import Tensor

import liger_chunked as lc
from liger_chunked import linear_token_stats
from liger_chunked.types import DIFFERENTIABLE

# Every token is valid: otherwise the selection of valid tokens would make copies without gaps.
SIZES = Sizes(sequences=4, length=3, hidden=5, vocab=11, ref_hidden=4, ignored=False)


# Layouts


def strided(x: Tensor) -> Tensor:
    """Take every second element of a buffer whose other elements differ."""
    others = ~x if x.dtype == torch.bool else x + 1
    return torch.stack([x, others], dim=-1)[..., 0]


def permuted(x: Tensor) -> Tensor:
    """Make the last dimension outermost in memory."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def shifted(x: Tensor) -> Tensor:
    """Move the data one element past an aligned address."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def rows_of_a_wider_buffer(x: Tensor) -> Tensor:
    return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]


def narrowed(x: Tensor) -> Tensor:
    """Return the same integers in 32 bits."""
    return x.int() if x.dtype == torch.int64 else x


LAYOUTS = (strided, permuted, shifted, rows_of_a_wider_buffer, narrowed)


def repeated(x: Tensor) -> Tensor:
    """Expand the largest value to all elements."""
    return x.flatten().amax().expand(x.shape)


def repeated_rows(x: Tensor) -> Tensor:
    """Expand the first row to all rows."""
    return x[:1].expand(x.shape)


def repeated_columns(x: Tensor) -> Tensor:
    """Expand the first column to all columns."""
    return x[..., :1].expand(x.shape)


def expanded(name: str, x: Tensor) -> list[Tensor]:
    """Return expanded versions of an argument, as far as they make sense for it."""
    if name in ("teacher_ids", "teacher_logps"):
        return [repeated_rows(x)]  # ids are unique in a row
    if x.ndim == 1 or not x.is_floating_point():
        return [repeated(x)]
    # If all rows of a head are equal, so are all logits, and rounding errors would choose among tokens.
    return [repeated_columns(x)] if name.endswith("weight") else [repeated_columns(x), repeated_rows(x)]


# Cases


@dataclass(frozen=True)
class Case:
    """A call of the library.

    Args:
        id: name in test reports.
        call: maps tensors by name to one or more tensors.
        tensors: makes the arguments.
        trainable: names of the arguments that get a gradient.
        interpreted: also test layouts in Triton's interpreter, where a case takes a hundred times as long.
        dtype: of its tensors.
        exhaustive: run with `--exhaustive` only.
    """

    id: str
    call: Callable[..., Any]
    tensors: Callable[[], Batch]
    trainable: Iterable[str] = PARAMETERS
    interpreted: bool = True
    dtype: torch.dtype = torch.float32
    exhaustive: bool = False

    def sample(self, device: str = "cpu") -> Batch:
        return moved(self.tensors(), self.dtype, device)

    def evaluate(
        self, tensors: Batch, upstream: Callable[[Tensor], Tensor] = lambda g: g, **settings: Any
    ) -> dict[str, Tensor]:
        """Return the results and the gradients of `tensors`; `upstream` changes the layout of upstream gradients."""
        leaves = {name: x.detach().requires_grad_(name in self.trainable) for name, x in tensors.items()}
        outputs = self.call(**leaves, **settings)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        cotangents = [torch.arange(y.numel(), dtype=y.dtype, device=y.device).view(y.shape) % 5 - 1.5 for y in outputs]
        wanted = {name: x for name, x in leaves.items() if x.requires_grad}
        gradients = torch.autograd.grad(outputs, list(wanted.values()), [upstream(g) for g in cotangents])
        values = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
        return values | {f"gradient of {name}": g for name, g in zip(wanted, gradients, strict=True)}


def of_row(row: Row) -> Case:
    def call(**batch: Tensor) -> Tensor:
        return row.ours(batch)

    interpreted = row.id in INTERPRETED
    exhaustive = not interpreted and row.id not in PATHS
    return Case(row.id, call, lambda: row.sample(SIZES, 0), interpreted=interpreted, exhaustive=exhaustive)


def cross_entropy(ce_weight: Tensor, reduction: str, budget: int | None = None, **batch: Tensor) -> Tensor:
    loss = lc.LigerFusedLinearCrossEntropyLoss(
        ce_weight=ce_weight,
        label_smoothing=0.2,
        lse_square_scale=1e-2,
        entropy_weight=0.1,
        reduction=reduction,
        logits_budget=budget,
    )
    return loss(**batch)


def weighed_tokens() -> Batch:
    batch = tokens(SIZES, 0)
    batch["ce_weight"] = torch.linspace(0.2, 2.0, SIZES.vocab, dtype=torch.float64)
    batch["token_weights"] = torch.linspace(0.5, 1.5, batch["target"].numel(), dtype=torch.float64).view(4, 3)
    return batch


def grpo(**batch: Tensor) -> Tensor:
    return lc.LigerFusedLinearGRPOLoss(beta=0.1, entropy_coef=0.1)(**batch)[0]


def policy() -> Batch:
    batch = rollouts(SIZES, 0, ref="tokens", advantages="tokens", weights="tokens")
    batch["target"] = batch["target"].clamp(min=1)
    return batch | {"attention_mask": torch.ones_like(batch["target"], dtype=torch.bool)}


def kto(**batch: Tensor) -> Tensor:
    return lc.LigerFusedLinearKTOLoss(beta=0.05)(**batch)[0]


def labelled() -> Batch:
    batch = examples(SIZES, 0, ref="tokens", mismatched="logps")
    batch["ref_kl_logps"] = torch.linspace(-6.0, -5.0, SIZES.sequences, dtype=torch.float64)
    batch["example_weights"] = torch.linspace(0.5, 2.0, SIZES.sequences, dtype=torch.float64)
    return batch


def ragged() -> Batch:
    return tokens(SIZES._replace(ignored=True), 0)


def statistics(budget: int | None = None, **batch: Tensor) -> list[Tensor]:
    stats = linear_token_stats(**batch, outputs=DIFFERENTIABLE, logits_budget=budget)
    return [getattr(stats, name) for name in DIFFERENTIABLE]


def one_statistic(name: str, **batch: Tensor) -> Tensor:
    """Return one of all computed statistics, so that the other upstream gradients are None."""
    return getattr(linear_token_stats(**batch, outputs=DIFFERENTIABLE), name)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def base(id: str, call: Callable[..., Any], trainable: str, **tensors: Tensor) -> Case:
    return Case(id, call, lambda: dict(tensors), trainable.split())


N, V = 6, 11
TARGET = torch.arange(N) * 3 % V
ANGLES = normal(2, 5, 8, seed=5)
FEW_ROWS = 4 * SIZES.vocab * 4  # bytes of float32 logits
# One case per kernel and per path through the engine.
INTERPRETED = {
    "ce", "dpo-sigmoid", "grpo-kl", "kl", "kl-reverse", "jsd", "tvd", "cosine", "squared-error", "kl-top-k",
    "jsd-top-k", "stats-kept",
}  # fmt: skip

assert set(INTERPRETED) <= {row.id for row in ROWS}

LOSSES = [
    *(of_row(row) for row in ROWS),
    *(
        Case(f"ce-everything-{budget}", partial(cross_entropy, reduction="mean", budget=budget), weighed_tokens)
        for budget in (None, FEW_ROWS)
    ),
    Case("grpo-everything", grpo, policy),
    Case("kto-everything", kto, labelled),
    base("cross_entropy", partial(lc.liger_cross_entropy, label_smoothing=0.1), "logits", logits=normal(N, V),
         target=TARGET, weight=torch.linspace(0.5, 2.0, V, dtype=torch.float64)),
    base("cross_entropy-of-sequences", lc.liger_cross_entropy, "logits", logits=normal(2, 3, V),
         target=TARGET.view(2, 3)),
]  # fmt: skip
# Functions with several results, each with an upstream gradient.
FUNCTIONS = [
    *(
        Case(f"ce-none-everything-{budget}", partial(cross_entropy, reduction="none", budget=budget), weighed_tokens)
        for budget in (None, FEW_ROWS)
    ),
    Case("stats", statistics, ragged),
    Case("stats-bfloat16", partial(one_statistic, "logps"), lambda: tokens(SIZES, 0), dtype=torch.bfloat16),
    Case("stats-tiles", partial(statistics, budget=FEW_ROWS), lambda: tokens(SIZES, 0)),
    *(
        Case(f"stats-{name}-alone", partial(one_statistic, name), lambda: tokens(SIZES, 0), interpreted=False)
        for name in DIFFERENTIABLE
    ),
    base("cross_entropy-none", partial(lc.liger_cross_entropy, reduction="none", label_smoothing=0.1), "logits",
         logits=normal(2, 3, V), target=TARGET.view(2, 3), weight=torch.linspace(0.5, 2.0, V, dtype=torch.float64)),
    base("rms_norm", partial(lc.liger_rms_norm, eps=1e-6), "x weight residual", x=normal(2, 3, V),
         weight=normal(V, seed=1), residual=normal(2, 3, V, seed=2)),
    base("layer_norm", lc.liger_layer_norm, "x weight bias", x=normal(2, 3, V), weight=normal(V, seed=1),
         bias=normal(V, seed=2)),
    base("swiglu", lc.liger_swiglu, "gate up", gate=normal(2, 3, V), up=normal(2, 3, V, seed=1)),
    base("geglu-packed", lc.liger_geglu, "gate", gate=normal(2, 3, 2 * V)),
    *(
        base(f"rope-{'interleaved' if interleaved else 'halves'}",
             partial(lc.liger_rotary_pos_emb, interleaved=interleaved), "q k", q=normal(2, 4, 5, 12),
             k=normal(2, 2, 5, 12, seed=1), cos=ANGLES.cos(), sin=ANGLES.sin())
        for interleaved in (False, True)
    ),
    base("rope-of-tables", lc.liger_rotary_pos_emb, "q k", q=normal(2, 4, 5, 8), k=normal(2, 2, 5, 8, seed=1),
         cos=ANGLES[0].cos(), sin=ANGLES[0].sin(), position_ids=torch.tensor([[0, 1, 2, 3, 4], [4, 2, 1, 0, 3]])),
]  # fmt: skip
CASES = [*LOSSES, *FUNCTIONS]


def cases(cases: Iterable[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [exhaustive([case], case.id, case.exhaustive) for case in cases])


def assert_same(values: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    for name, same in expected.items():
        # Matrix products in another layout sum in another order, which may change how bfloat16 logits round.
        half = any(x.dtype == torch.bfloat16 for x in expected.values())
        rtol, atol = (2**-6, 2**-6) if half else (1e-5, 2e-6)
        torch.testing.assert_close(values[name], same, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{what}: {n}: {m}")


def dense(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@pytest.mark.few(2)
@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
@cases(CASES)
def test_each_argument(case: Case, layout: Callable[[Tensor], Tensor]) -> None:
    tensors = case.sample()
    expected = case.evaluate(tensors)
    for name, x in tensors.items():
        assert torch.equal(layout(x), x)
        assert_same(case.evaluate(tensors | {name: layout(x)}), expected, name)


@pytest.mark.few(2)
@cases(CASES)
def test_each_argument_expanded(case: Case) -> None:
    tensors = case.sample()
    for name, x in tensors.items():
        for one in expanded(name, x):
            same = case.evaluate(tensors | {name: dense(one)})
            assert_same(case.evaluate(tensors | {name: one}), same, f"{name} {one.stride()}")


@pytest.mark.few(2)
@pytest.mark.sampled(0.34, interpreted=True)
@pytest.mark.triton
@cases(case for case in CASES if case.interpreted)
def test_all_arguments(case: Case, device: str) -> None:
    tensors = case.sample(device)
    expected = case.evaluate(tensors)
    for layout in LAYOUTS:
        assert_same(case.evaluate({k: layout(x) for k, x in tensors.items()}), expected, layout.__name__)
    vectors = {k: repeated(x) for k, x in tensors.items() if (x.ndim == 1 or k == "target") and k != "position_ids"}
    if vectors:
        same = case.evaluate(tensors | {k: dense(x) for k, x in vectors.items()})
        assert_same(case.evaluate(tensors | vectors), same, "repeated")


@pytest.mark.few(4, "cpu-geglu-packed", "cpu-layer_norm", "cpu-swiglu")
@pytest.mark.sampled(0.5, interpreted=True)
@pytest.mark.triton
@cases(FUNCTIONS)
def test_upstream(case: Case, device: str) -> None:
    tensors = case.sample(device)
    expected = case.evaluate(tensors)
    for layout in (strided, permuted, shifted, rows_of_a_wider_buffer):
        assert_same(case.evaluate(tensors, layout), expected, layout.__name__)
    for layout in (repeated, repeated_rows):
        same = case.evaluate(tensors, lambda g, layout=layout: dense(layout(g)))
        assert_same(case.evaluate(tensors, layout), same, layout.__name__)


@pytest.mark.triton
def test_gradient_in_the_place_of_expanded_logits(device: str) -> None:
    """Expanded logits get no in-place gradient: other rows still read the same memory."""
    function = partial(lc.liger_cross_entropy, target=TARGET.to(device))
    for overlapping in (lambda x: x[:V].expand(N, V), lambda x: x.unfold(0, V, 1)):
        x = normal(N + V - 1).float().to(device).requires_grad_()
        logits = overlapping(x * 1.0)
        before = logits.detach().clone()
        gradient = torch.autograd.grad(function(logits, inplace=True), x)[0]
        torch.testing.assert_close(gradient, torch.autograd.grad(function(overlapping(x)), x)[0])
        assert torch.equal(logits, before)


@pytest.mark.triton
def test_gradients_in_the_place_of_one_tensor(device: str) -> None:
    """If gate and up are the same tensor, its memory holds only one gradient."""
    x = normal(2, 3, V).float().to(device).requires_grad_()
    expected = torch.autograd.grad(lc.liger_swiglu(x, x).sum(), x)[0]
    gate = x * 1.0
    torch.testing.assert_close(
        torch.autograd.grad(lc.liger_swiglu(gate, gate.view_as(gate), inplace=True).sum(), x)[0], expected
    )
