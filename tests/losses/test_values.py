"""Test every loss and every gradient against full logits."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import pytest
import torch
from sampling import exhaustive, on_paths
from table import (
    CPO_LOSS_TYPES,
    FACTOR,
    LOSS_TYPES,
    PATHS,
    ROWS,
    SMALL,
    Batch,
    Sizes,
    assert_rounds_as_eager_code,
    assert_same,
    evaluate,
    moved,
    n_valid,
    rms,
    rows,
)
from torch import Tensor

from liger_chunked.engine import cutting
from liger_chunked.kernels.backend import INTERPRETED
from liger_chunked.losses import cpo, dpo

by_row = pytest.mark.parametrize("row", ROWS, ids=repr)
by_path = pytest.mark.parametrize("row", on_paths())

# The number of logits in memory at once, for `n` valid tokens with `v` logits each.
BUDGETS = {
    "auto": lambda n, v: None,
    "more-than-all": lambda n, v: (n + 9) * v,
    "all-but-one": lambda n, v: (n - 1) * v,  # a last chunk of 1
    "5-tokens": lambda n, v: 5 * v,  # a prime number of tokens, ragged last chunk
    "1-token": lambda n, v: v,
    "third-of-a-token": lambda n, v: v // 3,  # tiles of the vocabulary
    "1-logit": lambda n, v: 1,
}


def test_every_loss_type_has_an_oracle():
    """The table has a row for each loss type of an oracle."""
    assert dpo.LOSS_TYPES.keys() == {*LOSS_TYPES}
    assert cpo.LOSS_TYPES.keys() == {*CPO_LOSS_TYPES}


@pytest.mark.sampled(2)
@by_row
@pytest.mark.parametrize("budget", [budget for budget in BUDGETS if budget != "1-logit"])
def test_float64_matches_oracle(row, budget, device):
    assert_right_in_float64(row, budget, device)


# Many small tiles take ten times as long as another budget.
@by_path
def test_float64_matches_oracle_with_a_budget_of_one_logit(row, device):
    assert_right_in_float64(row, "1-logit", device)


def assert_right_in_float64(row, budget: str, device: str) -> None:
    batch = moved(row.sample(SMALL, seed=0), device=device)
    elements = BUDGETS[budget](n_valid(batch), SMALL.vocab)
    ours = evaluate(partial(row.ours, logits_budget=elements and 8 * elements), batch)
    exact = evaluate(row.oracle, batch)
    assert ours.keys() == exact.keys()
    assert_same(ours, exact)


@by_path
@pytest.mark.parametrize(
    "rows_in_budget",
    [
        pytest.param(5, id="slices"),  # whole groups of rows, slices of 1536 columns and a ragged last one
        pytest.param(2, id="slices-and-rows"),  # the narrowest slices, 1024, and blocks of rows
    ],
)
def test_float64_matches_oracle_in_slices_of_the_vocabulary(row, rows_in_budget, device):
    sizes = SMALL._replace(vocab=2503)  # a prime above two slices
    batch = moved(row.sample(sizes, seed=1), device=device)
    ours = evaluate(partial(row.ours, logits_budget=8 * rows_in_budget * sizes.vocab), batch)
    exact = evaluate(row.oracle, batch)
    assert_same(ours, exact)


# A wrong term is off by far more, and rounding (6e-8 per number) by far less.
WRONG_IN_FLOAT32 = 1e-5


@pytest.mark.few(
    20,
    "cpu-ce-none-everything",
    "cpu-ce-none",
    "cpu-ce-token_weights-everything",
    "cpu-clip_cov",
    "cpu-cosine",
    "cpu-dpo-js_divergence",
    "cpu-dpo-sft",
    "cpu-dpo-sigmoid",
    "cpu-dro",
    "cpu-jsd-softcap-scale-temperature",
    "cpu-kl",
    "cpu-kto-apo_zero_unpaired",
    "cpu-kto",
    "cpu-squared-error",
    "cpu-stats-kept-products",
    "cpu-stats-kept",
)
@pytest.mark.triton
@pytest.mark.parametrize("row", on_paths(interpreted=True))
def test_float32_matches_oracle(row, device, path):
    assert_right_in_float32(row, 5 * SMALL.vocab, device)


# One row per path through the kernels: gradient in forward, and the primitive with every statistic.
_ONE_EACH = ("ce-none-everything", "dpo-sigmoid", "grpo-top-entropy", "stats-all")


@pytest.mark.few(2)
@pytest.mark.sampled(0.5, interpreted=True)
@pytest.mark.triton
@pytest.mark.parametrize("row", rows(*_ONE_EACH), ids=repr)
def test_float32_matches_oracle_within_a_third_of_a_token(row, device, path):
    assert_right_in_float32(row, SMALL.vocab // 3, device)


def assert_right_in_float32(row, elements: int, device: str) -> None:
    batch = moved(row.sample(SMALL, seed=0), torch.float32, device)
    ours = evaluate(partial(row.ours, logits_budget=4 * elements), batch)
    exact = evaluate(row.oracle, moved(batch, torch.float64))
    assert_same(ours, exact, WRONG_IN_FLOAT32)


def test_slices_of_the_vocabulary_are_what_they_are_called():
    tiles = cutting.tiles(8, 2503, 5 * 2503)
    # The budget fits 1536 columns: two slices, equal up to whole tiles of 256.
    assert [tile.vocab_slice for tile in tiles] == [slice(0, 1280), slice(1280, 2503)]
    assert [tile.row_slice for tile in tiles] == 2 * [slice(0, 8)]
    tiles = cutting.tiles(8, 2503, 2 * 2503)
    assert [tile.vocab_slice.start for tile in tiles[::2]] == [0, 1024, 2048]
    assert [tile.row_slice for tile in tiles[:2]] == [slice(0, 4), slice(4, 8)]


# Every token has a target, so that eager code's GEMM of the weight gradient sums as many products as ours. With half of
# them zero its partial sums would be shorter, and its error smaller.
ERROR_SIZES = Sizes(sequences=8, length=32, hidden=64, vocab=499, ref_hidden=48, ignored=False)
# Nearly all of the bfloat16 error is the same rounding of the logits. The float32 error depends on the order of
# summation, so its average needs more batches.
SEEDS = {torch.bfloat16: 3, torch.float32: 12}


# bfloat16 for each formula: it rounds what it multiplies. Float32 errors come from sums of the engine.
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        exhaustive((row, dtype), f"{name}-{row}", dtype == torch.float32 and row.id not in PATHS)
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
        for row in ROWS
    ],
)
def test_gradient_error_is_that_of_eager_code(row, dtype, device, pytestconfig):
    if INTERPRETED and row.kept and dtype == torch.bfloat16:
        pytest.skip("kernels round the gradients of kept ids, and Triton's interpreter truncates float32 to bfloat16")
    if device == "cuda" and dtype == torch.float32:
        pytest.skip(
            "cuBLAS sums float32 in an order that it picks by shape; test_gpu.py bounds what is ours of the error"
        )
    budgets = {"chunks": 61 * ERROR_SIZES.vocab * dtype.itemsize}
    if row.id in PATHS or pytestconfig.getoption("exhaustive"):  # the formula is the same in one chunk
        budgets["one-chunk"] = None
    results: dict[str, list[tuple[Batch, Batch, Batch]]] = defaultdict(list)
    for seed in range(SEEDS[dtype] * row.batches):
        batch = moved(row.sample(ERROR_SIZES, seed), dtype, device)
        eager, exact = evaluate(row.oracle, batch), evaluate(row.oracle, moved(batch, torch.float64))
        for name, budget in budgets.items():
            results[name].append((evaluate(partial(row.ours, logits_budget=budget), batch), eager, exact))
    for of_budget in results.values():
        assert_rounds_as_eager_code(of_budget)


@pytest.mark.few(3, "cpu-fp32-cosine")
@pytest.mark.sampled
@by_path
@pytest.mark.parametrize("dtype", SEEDS, ids=["bf16", "fp32"])
def test_loss_error_is_that_of_eager_code(row, dtype, device):
    """A scalar loss has a single error: compare the root mean square over many batches."""
    sizes = ERROR_SIZES._replace(sequences=4, length=32, vocab=331)
    ours, eager, exacts = [], [], []
    for seed in range(64 * row.batches):
        batch = moved(row.sample(sizes, seed), dtype, device)
        with torch.no_grad():
            exact, loss = row.oracle(moved(batch, torch.float64)), row.ours(batch)
            ours.append(float(loss.double() - exact))
            eager.append(float(row.oracle(batch).double() - exact))
            exacts.append(float(exact.abs()))
    # Below one unit in the last place of a typical result there is nothing to compare.
    error, bound = rms(ours, exacts), max(FACTOR * rms(eager, exacts), torch.finfo(loss.dtype).eps)
    assert error <= bound, f"{error:.3e} against {bound:.3e}"


@pytest.mark.few(3, "ce-none-everything")
@pytest.mark.parametrize("row", on_paths(row for row in ROWS if not row.stops_gradients))
def test_gradcheck(row):
    batch = row.sample(Sizes(sequences=4, length=3, hidden=2, vocab=5, ref_hidden=3), seed=3)
    names = [name for name in ("weight", "input", "bias") if name in batch]

    def loss(*leaves: Tensor) -> Tensor:
        return row.ours({**batch, **dict(zip(names, leaves, strict=True))}, logits_budget=8 * 2 * 5)

    assert torch.autograd.gradcheck(loss, [batch[name].clone().requires_grad_() for name in names])


@pytest.mark.few(5, "cpu-bf16-ce-none-everything", "cpu-fp32-grpo-top-entropy", "cpu-fp32-kto-kl-of-mismatched")
@pytest.mark.ordinary_memory  # deterministic mode would choose other operations
@by_path
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_bitwise_repeatable(row, dtype, device):
    batch = moved(row.sample(Sizes(8, 33, 32, 257, 16), seed=5), dtype, device)
    loss = partial(row.ours, logits_budget=20 * 257 * dtype.itemsize)
    first, second = evaluate(loss, batch), evaluate(loss, batch)
    for name in first:
        assert torch.equal(first[name], second[name]), name
