"""Test that memory layout changes no value: gaps, other orders, repeated elements, unaligned addresses.

A kernel that assumes contiguous inputs is correct for contiguous inputs. Only other layouts show the bug, and only if
the kernels run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from public_calls import BASE, LOSSES, SIZES, TARGET, Call, N, V, normal, statistics, weighed_tokens
from sampling import exhaustive
from table import PATHS, ROWS, Row, tokens
from torch import Tensor

import liger_chunked as lc
from liger_chunked import linear_token_stats
from liger_chunked.types import DIFFERENTIABLE

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


def of_row(row: Row) -> Call:
    def call(**batch: Tensor) -> Tensor:
        return row.ours(batch)

    interpreted = row.id in INTERPRETED
    exhaustive = not interpreted and row.id not in PATHS
    return Call(row.id, call, lambda: row.sample(SIZES, 0), interpreted=interpreted, exhaustive=exhaustive)


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


def of_weighed_tokens(reduction: str, budget: int | None) -> Call:
    return Call(
        f"ce-{reduction}-everything-{budget}",
        partial(cross_entropy, reduction=reduction, budget=budget),
        lambda: weighed_tokens() | {"ce_weight": torch.linspace(0.2, 2.0, SIZES.vocab, dtype=torch.float64)},
        interpreted=True,
    )


def one_statistic(name: str, **batch: Tensor) -> Tensor:
    """Return one of all computed statistics, so that the other upstream gradients are None."""
    return getattr(linear_token_stats(**batch, outputs=DIFFERENTIABLE), name)


FEW_ROWS = 4 * SIZES.vocab * 4  # bytes of float32 logits
# One case per kernel and per path through the engine.
INTERPRETED = {
    "ce", "dpo-sigmoid", "grpo-kl", "kl", "kl-reverse", "jsd", "tvd", "cosine", "squared-error", "kl-top-k",
    "jsd-top-k", "stats-kept",
}  # fmt: skip

assert set(INTERPRETED) <= {row.id for row in ROWS}

MEANS = ("cross_entropy", "cross_entropy-of-sequences")
# Functions with several results, each with an upstream gradient.
FUNCTIONS = [
    *(of_weighed_tokens("none", budget) for budget in (None, FEW_ROWS)),
    Call("stats-bfloat16", partial(one_statistic, "logps"), lambda: tokens(SIZES, 0), dtype=torch.bfloat16,
         interpreted=True),
    Call("stats-tiles", partial(statistics, budget=FEW_ROWS), lambda: tokens(SIZES, 0), interpreted=True),
    *(Call(f"stats-{name}-alone", partial(one_statistic, name), lambda: tokens(SIZES, 0)) for name in DIFFERENTIABLE),
    *(call for call in LOSSES if call.id == "stats"),
    *(call for call in BASE if call.id not in MEANS),
]  # fmt: skip
# The calls of LOSSES that have other arguments than the rows.
EVERYTHING = [call for call in LOSSES if call.id in ("kto-logps", "grpo-logps")]
CASES = [
    *(of_row(row) for row in ROWS),
    *(of_weighed_tokens("mean", budget) for budget in (None, FEW_ROWS)),
    *EVERYTHING,
    *(call for call in BASE if call.id in MEANS),
    *FUNCTIONS,
]


def cases(cases: Iterable[Call]) -> pytest.MarkDecorator:
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
def test_each_argument(case: Call, layout: Callable[[Tensor], Tensor]) -> None:
    tensors = case.tensors()
    expected = case.evaluate(tensors)
    for name, x in tensors.items():
        assert torch.equal(layout(x), x)
        assert_same(case.evaluate(tensors | {name: layout(x)}), expected, name)


@pytest.mark.few(2)
@cases(CASES)
def test_each_argument_expanded(case: Call) -> None:
    tensors = case.tensors()
    for name, x in tensors.items():
        for one in expanded(name, x):
            same = case.evaluate(tensors | {name: dense(one)})
            assert_same(case.evaluate(tensors | {name: one}), same, f"{name} {one.stride()}")


@pytest.mark.few(2)
@pytest.mark.sampled(0.34, interpreted=True)
@pytest.mark.triton
@cases(case for case in CASES if case.interpreted)
def test_all_arguments(case: Call, device: str) -> None:
    tensors = case.tensors(device)
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
def test_upstream(case: Call, device: str) -> None:
    tensors = case.tensors(device)
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
