"""Test the bounds on work and memory: which GEMMs run, and how large live tensors may be."""

from __future__ import annotations

import pytest
import torch
from spies import flop_counter, memory_beside
from table import ROWS, Batch, Row, Sizes, live_fraction, moved, n_valid

by_row = pytest.mark.parametrize("row", ROWS, ids=repr)
by_row_of_products = pytest.mark.parametrize("row", [row for row in ROWS if row.products], ids=repr)
SIZES = Sizes(sequences=6, length=9, hidden=16, vocab=2503, ref_hidden=24)  # half of the tokens ignored


def gemms(row: Row, batch: Batch, trainable: tuple[str, ...], budget: int | None = None, grad: bool = True) -> float:
    """Return the FLOPs of a step in units of 2 * N_valid * H * V, one product of all valid tokens with the head."""
    leaves = {name: batch[name].clone().requires_grad_() for name in trainable if name in batch}
    with flop_counter() as counter, torch.set_grad_enabled(grad):
        loss = row.ours({**batch, **leaves}, logits_budget=budget)
        if grad and leaves:
            loss.backward()
    return counter.get_total_flops() / (2 * n_valid(batch) * SIZES.hidden * SIZES.vocab)


def of_reference(batch: Batch) -> float:
    """Return the products of a reference or teacher, one of its size; mismatched completions add one per head."""
    one = SIZES.ref_hidden / SIZES.hidden
    reference = one if {"ref_weight", "teacher_weight"} & batch.keys() else 0.0
    mismatched = ("kl_input" in batch) + one * ("ref_kl_input" in batch)
    return reference + mismatched


@pytest.mark.few(2)
@pytest.mark.sampled
@by_row_of_products
@pytest.mark.parametrize(
    ("trainable", "grad", "of_backward"),
    [
        pytest.param(("weight", "input", "bias"), True, 2, id="trainable-head"),
        pytest.param(("input",), True, 1, id="frozen-head"),
        pytest.param(("weight",), True, 1, id="frozen-input"),
        pytest.param(("bias",), True, 0, id="only-the-bias"),
        pytest.param((), True, 0, id="nothing-trainable"),
        pytest.param(("weight", "input", "bias"), False, 0, id="no_grad"),
    ],
)
def test_gemms_within_the_budget(row, trainable, grad, of_backward):
    """The backward takes products of the rows that have a gradient."""
    batch = row.sample(SIZES, seed=0)
    expected = 1 + of_backward * live_fraction(row, batch) + of_reference(batch)
    assert gemms(row, batch, trainable, grad=grad) == pytest.approx(expected, rel=1e-12)


@pytest.mark.few(2)
@by_row_of_products
def test_gemms_of_many_chunks(row):
    """Chunks add no products while each group fits, except in batch-scoped losses and with gradients in backward."""
    batch = row.sample(SIZES, seed=0)
    count = gemms(row, batch, ("weight", "input", "bias"), budget=8 * 2 * SIZES.length * SIZES.vocab)
    live = live_fraction(row, batch)
    if row.kept or (row.fused and row.scope != "batch"):  # logits of kept ids stay in memory
        assert count == pytest.approx(1 + 2 * live + of_reference(batch), rel=1e-12)
    elif live == 0:
        assert count == pytest.approx(1 + of_reference(batch), rel=1e-12)
    else:
        assert 1 + 2 * live + of_reference(batch) < count <= 1 + 3 * live + of_reference(batch)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.products and (row.scope == "pair" or not row.fused)], ids=repr
)
def test_gemms_over_the_budget(row):
    """One more product, except for the last tile, whose logits are still in memory when backward begins."""
    # One pair of 2 x 9 valid tokens; per-token losses get the same number of tokens.
    sizes = SIZES._replace(sequences=2, ignored=False)
    batch = row.sample(sizes, seed=0)
    # The budget fits 11 of 18 rows: slices of 11 * 2503 // 18 = 1529 columns, rounded down to 1280 (whole tiles). Two
    # even slices have 1252 columns, rounded up to 1280.
    count = gemms(row, batch, ("weight", "input", "bias"), budget=8 * 11 * 2503)
    last_tile = 1.0 if row.kept else (2503 - 1280) / 2503
    of_backward = (3 - last_tile) * live_fraction(row, batch)
    assert count == pytest.approx(1 + of_backward + of_reference(batch), rel=1e-12)


def test_no_gemms_of_few_rows():
    """Rows of the head are read one by one."""
    for row in ROWS:
        if not row.products:
            assert gemms(row, row.sample(SIZES, seed=0), ("weight", "input", "bias")) == 0


# Chosen so that the sizes [V, H] and N * V are easy to recognize.
MEMORY_SIZES = Sizes(sequences=8, length=32, hidden=32, vocab=1009, ref_hidden=32, ignored=False)


@pytest.mark.few(2, "bf16-one-chunk-kl")
@pytest.mark.sampled(0.5)
@pytest.mark.ordinary_memory
@pytest.mark.filterwarnings("ignore:logits_budget=")  # 128 pieces and more
@by_row
@pytest.mark.parametrize(
    ("dtype", "tokens_in_budget"),
    [
        pytest.param(torch.bfloat16, 256, id="bf16-one-chunk"),
        pytest.param(torch.bfloat16, 75, id="bf16-chunks"),
        pytest.param(torch.bfloat16, 20, id="bf16-tiles"),
        pytest.param(torch.float32, 20, id="fp32-tiles"),
    ],
)
def test_memory(row, dtype, tokens_in_budget):
    batch = moved(row.sample(MEMORY_SIZES, seed=0), dtype)
    leaves = {name: batch[name].clone().requires_grad_() for name in ("weight", "input", "bias") if name in batch}
    n, v, h = n_valid(batch), MEMORY_SIZES.vocab, MEMORY_SIZES.hidden
    budget = tokens_in_budget * v * dtype.itemsize

    with memory_beside(*batch.values(), *leaves.values()) as memory:
        row.ours({**batch, **leaves}, logits_budget=budget).backward()

    one_write = tokens_in_budget >= n or (not row.fused and 1024 * n <= tokens_in_budget * v)
    weight_gradient = v * h * (dtype.itemsize if one_write else 4)
    assert memory.largest <= max(budget, weight_gradient, n * h * 4)
    if tokens_in_budget < n:
        assert memory.largest < n * v * dtype.itemsize
    # The peak holds the logits; the weight gradient, and its rounded copy if it was accumulated; the valid rows and
    # their gradient, twice during the scatter; a product's float32 operand; a few numbers per token.
    rounding = 0 if one_write or dtype == torch.float32 else v * h * dtype.itemsize
    rows = 2 * n * h * dtype.itemsize + 2 * n * h * 4
    upcast = 0 if dtype == torch.float32 else max(n, v) * h * 4
    per_token = 40 * n * 8 + 20 * v * 4
    blocks = 8 * (4 << 12) + 4 * (4 << 12)
    assert memory.peak <= budget + weight_gradient + rounding + rows + upcast + per_token + blocks
