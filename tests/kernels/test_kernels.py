"""Test the kernels, on the device's path, against float64 formulas."""

from __future__ import annotations

import math
from functools import reduce
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from liger_chunked import LogitOptions, TokenStats
from liger_chunked.kernels import (
    LogitsCotangents,
    PartialStats,
    find_tokens,
    finish,
    logits_grad_,
    logits_stats,
    merge,
    place_rows,
    row_stats,
    scale_,
    survey,
    survey_top_k,
)
from liger_chunked.kernels.backend import INTERPRETED, use_triton
from liger_chunked.kernels.divergence_sums import merge_sums, sums
from liger_chunked.types import OUTPUTS

pytestmark = pytest.mark.triton

# Error of a conversion to bfloat16 in units in the last place: Triton's interpreter truncates.
ROUNDING = 1.0 if INTERPRETED else 0.5
DIFFERENTIABLE = ("logps", "lse", "entropy", "mean_logits")
TRANSFORMS = {
    "plain": LogitOptions(),
    "softcap": LogitOptions(softcap=2.5),
    "logit_scale": LogitOptions(logit_scale=0.3),
    "temperature": LogitOptions(temperature=1.9),
    "all": LogitOptions(softcap=2.5, logit_scale=-1.3, temperature=0.7),
}
SHAPES = [
    (1, 1),  # a vocabulary of one
    (3, 2),
    (1, 127),  # not a power of two
    (3, 129),
    (3, 1000),
    (1, 4097),  # one more than a block of columns
    (3, 5000),  # a ragged second block
]


def sample(rows: int, cols: int, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, cols, generator=generator)
    return logits.to(device), torch.randint(cols, (rows,), generator=generator).to(device)


def formulas(logits: Tensor, target: Tensor, options: LogitOptions, class_weight: Tensor | None = None) -> TokenStats:
    z = options.logit_scale * logits.double()
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    z = z / options.temperature
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    return TokenStats(
        logps=log_p.gather(-1, target[:, None])[:, 0],
        lse=z.logsumexp(-1),
        entropy=-(p * log_p.masked_fill(p == 0, 0)).sum(-1),
        mean_logits=(z if class_weight is None else z * class_weight.double()).mean(-1),
        argmax=z.argmax(-1),
        is_top1=z.argmax(-1) == target,
        log_sum_sq_probs=(2 * log_p).logsumexp(-1),
    )


def assert_stats_close(ours: TokenStats, exact: TokenStats) -> None:
    # Sums of at most 5000 terms, each with a relative error of 6e-8, in any order.
    for name in TokenStats._fields:
        value, expected = getattr(ours, name), getattr(exact, name)
        if value is not None:
            torch.testing.assert_close(value, expected.to(value.dtype), rtol=1e-5, atol=1e-5, msg=name)


def of_rows(
    logits: Tensor,
    target: Tensor,
    options: LogitOptions = TRANSFORMS["plain"],
    outputs: tuple[str, ...] = OUTPUTS,
    class_weight: Tensor | None = None,
) -> list[TokenStats]:
    """Return the statistics both ways: `row_stats`, and `logits_stats` with `finish`."""
    partial = logits_stats(logits, target, options, outputs, class_weight=class_weight)
    at_once = row_stats(logits, target, options, outputs, class_weight)
    assert torch.equal(at_once[0].max, partial.max)
    assert torch.equal(at_once[0].sum_exp, partial.sum_exp)
    return [finish(partial, target, logits.shape[1], outputs), at_once[1]]


@pytest.mark.few(3)
@pytest.mark.parametrize("options", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_statistics(rows, cols, options, device, path):
    logits, target = sample(rows, cols, device=device)
    before = logits.clone()
    for ours in of_rows(logits, target, options):
        assert_stats_close(ours, formulas(logits, target, options))
    assert torch.equal(logits, before)


def test_statistics_with_class_weights(device, path):
    logits, target = sample(3, 5000, device=device)
    class_weight = torch.linspace(0.1, 2, 5000, device=device)
    for ours in of_rows(logits, target, class_weight=class_weight):
        assert_stats_close(ours, formulas(logits, target, LogitOptions(), class_weight))


def gradient_of(
    logits: Tensor,
    target: Tensor,
    options: LogitOptions,
    upstream: dict[str, Tensor],
    class_weight: Tensor | None = None,
    vocab: slice = slice(None),
) -> Tensor:
    """Run `logits_grad_` on a copy of the columns `vocab`, with the statistics of all columns."""
    outputs = tuple(dict.fromkeys((*upstream, "entropy")))
    partial = logits_stats(logits, target, options, outputs, class_weight=class_weight)
    stats = finish(partial, target, logits.shape[1], outputs)
    cotangents = LogitsCotangents(max=partial.max, sum_exp=partial.sum_exp, entropy_value=stats.entropy, **upstream)
    return logits_grad_(
        logits=logits[:, vocab].clone(memory_format=torch.contiguous_format),
        target=target,
        cotangents=cotangents,
        options=options,
        vocab_size=logits.shape[1],
        vocab_start=vocab.start or 0,
        class_weight=None if class_weight is None else class_weight[vocab],
    )


def exact_gradient(
    logits: Tensor,
    target: Tensor,
    options: LogitOptions,
    upstream: dict[str, Tensor],
    class_weight: Tensor | None = None,
) -> Tensor:
    leaf = logits.double().requires_grad_()
    stats = formulas(leaf, target, options, class_weight)
    return torch.autograd.grad(sum((getattr(stats, name) * g.double()).sum() for name, g in upstream.items()), leaf)[0]


def upstream_of(names: tuple[str, ...], rows: int, device: str) -> dict[str, Tensor]:
    """Return upstream gradients that are positive, negative and zero."""
    return {name: (torch.arange(rows, device=device) - 1.0) * (i + 0.5) + 0.25 * i for i, name in enumerate(names)}


@pytest.mark.few(1)
@pytest.mark.parametrize("names", [("logps",), DIFFERENTIABLE], ids=len)
def test_a_scaled_gradient_of_logps(names, device, path):
    """The factor that the exact logit of the target gives a gradient."""
    logits, target = sample(3, 129, device=device)
    partial = logits_stats(logits, target, LogitOptions(), ("logps",))
    entropy = formulas(logits, target, LogitOptions()).entropy.float()
    upstream, scale = upstream_of(names, 3, device), torch.tensor([0.5, 1.25, 0.9], device=device)

    def gradient(logps: Tensor, scale: Tensor | None) -> Tensor:
        given = {**upstream, "logps": logps, "entropy_value": entropy}
        cotangents = LogitsCotangents(partial.max, partial.sum_exp, scale, **given)
        return logits_grad_(logits.clone(), target, cotangents, LogitOptions(), 129)

    expected = gradient(upstream["logps"] * scale, None)
    assert torch.equal(gradient(upstream["logps"], scale), expected)
    assert not torch.equal(gradient(upstream["logps"], None), expected)


@pytest.mark.few(4)
@pytest.mark.parametrize("options", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_gradient(rows, cols, options, device, path):
    logits, target = sample(rows, cols, device=device)
    upstream = upstream_of(DIFFERENTIABLE, rows, device)
    ours = gradient_of(logits, target, options, upstream)
    torch.testing.assert_close(ours.double(), exact_gradient(logits, target, options, upstream), rtol=1e-5, atol=1e-6)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradient_of_one_statistic(name, device, path):
    logits, target = sample(3, 129, device=device)
    upstream = upstream_of((name,), 3, device)
    ours = gradient_of(logits, target, LogitOptions(), upstream)
    exact = exact_gradient(logits, target, LogitOptions(), upstream)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("vocab", [slice(0, 60), slice(60, 61), slice(61, 200)], ids=str)
def test_gradient_of_a_slice_of_the_vocabulary(vocab, device, path):
    logits, target = sample(3, 200, device=device)
    class_weight = torch.linspace(0.1, 2, 200, device=device)
    upstream = upstream_of(DIFFERENTIABLE, 3, device)
    ours = gradient_of(logits, target, TRANSFORMS["all"], upstream, class_weight, vocab)
    exact = exact_gradient(logits, target, TRANSFORMS["all"], upstream, class_weight)[:, vocab]
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_is_rounded_once(dtype, device, path):
    logits, target = sample(3, 1000, device=device)
    logits = logits.to(dtype)
    for stats in of_rows(logits, target):
        assert stats.logps.dtype == torch.float32
        assert_stats_close(stats, formulas(logits, target, LogitOptions()))
    upstream = upstream_of(("logps",), 3, device)
    ours = gradient_of(logits, target, LogitOptions(), upstream)
    exact = exact_gradient(logits, target, LogitOptions(), upstream)
    # Add the float32 error to the rounding to dtype; float16 has subnormal steps of 6e-8.
    rtol = ROUNDING * torch.finfo(dtype).eps + 1e-5
    torch.testing.assert_close(ours.double(), exact, rtol=rtol, atol=torch.finfo(dtype).tiny)


@pytest.mark.few(1)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "class_weight"])
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_slices_merge_at_any_cut_in_any_order(weighted, device, data):
    cols = 130
    logits, target = sample(2, cols, seed=3, device=device)
    class_weight = torch.linspace(0.1, 2, cols, device=device) if weighted else None
    options = TRANSFORMS["all"]
    inner = data.draw(st.lists(st.integers(1, cols - 1), max_size=6, unique=True).map(sorted))
    cuts = [0, *inner, cols]
    parts: list[PartialStats] = [
        logits_stats(
            logits=logits[:, a:b],
            target=target,
            options=options,
            outputs=OUTPUTS,
            vocab_start=a,
            class_weight=None if class_weight is None else class_weight[a:b],
        )
        for a, b in pairwise(cuts)
    ]
    while len(parts) > 1:  # merge random neighbours
        i = data.draw(st.integers(0, len(parts) - 2))
        parts[i : i + 2] = [merge(parts[i], parts[i + 1])]
    stats = finish(parts[0], target, cols, OUTPUTS)
    assert_stats_close(stats, formulas(logits, target, options, class_weight))


@pytest.mark.few(3, "cpu-3-last")
@pytest.mark.sampled(interpreted=True)
@pytest.mark.parametrize(
    "dead",
    [slice(0, 70), slice(70, 200), slice(0, 199), slice(3, 4)],
    ids=["first", "last", "all-but-one", "one-column"],
)
@pytest.mark.parametrize("cuts", [(0, 200), (0, 70, 200), (0, 35, 70, 199, 200)], ids=len)
def test_columns_of_minus_infinity(dead, cuts, device, path):
    logits, target = sample(3, 200, device=device)
    logits[:, dead] = -math.inf
    alive = [v for v in range(200) if not dead.start <= v < dead.stop]
    target = torch.tensor([alive[0], alive[-1], alive[len(alive) // 2]], device=device)
    outputs = ("logps", "lse", "entropy", "argmax", "log_sum_sq_probs")
    parts = [logits_stats(logits[:, a:b], target, LogitOptions(), outputs, vocab_start=a) for a, b in pairwise(cuts)]
    exact = formulas(logits, target, LogitOptions())
    for stats in [finish(reduce(merge, parts), target, 200, outputs), *of_rows(logits, target, outputs=outputs)]:
        assert_stats_close(stats, exact)
    upstream = upstream_of(("logps", "lse", "entropy"), 3, device)
    gradient = gradient_of(logits, target, LogitOptions(), upstream)
    assert (gradient[:, dead] == 0).all()
    alone = exact_gradient(logits[:, alive], torch.searchsorted(torch.tensor(alive, device=device), target),
                           LogitOptions(), upstream)  # fmt: skip
    torch.testing.assert_close(gradient[:, alive].double(), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "mixture"])
def test_both_models_have_a_slice_of_minus_infinity(kind, device):
    """Its centre, if not -inf, would be far above that of the other slice."""
    options, generator = LogitOptions(), torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 90, generator=generator) - 200
    logits[..., :40] = -math.inf
    student, teacher = logits
    slices = (slice(0, 40), slice(40, 90))

    def of(cut):
        z, t = (x[:, cut].contiguous().to(device) for x in (student, teacher))
        return sums(z, t, None, kind, options, options)

    whole, merged = of(slice(0, 90)), merge_sums([of(cut) for cut in slices], kind, 1.0, 1.0)
    torch.testing.assert_close(merged.centre + merged.log_sum, whole.centre + whole.log_sum)
    of_teacher = (x.teacher_centre + x.teacher_log_sum for x in (merged, whole))
    torch.testing.assert_close(*of_teacher)
    if kind != "mixture":
        # float32: two sums of 50 terms in another order.
        torch.testing.assert_close(merged.divergence, whole.divergence, rtol=1e-5, atol=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("offset", [1e4, -1e4, 1e-4], ids=str)
def test_large_logits_do_not_cancel(offset, device, path):
    logits, target = sample(3, 1000, device=device)
    logits += offset
    outputs = ("logps", "entropy", "log_sum_sq_probs")
    for stats in of_rows(logits, target, outputs=outputs):
        assert_stats_close(stats, formulas(logits, target, LogitOptions()))
    upstream = upstream_of(("logps", "entropy"), 3, device)
    ours = gradient_of(logits, target, LogitOptions(), upstream)
    exact = exact_gradient(logits, target, LogitOptions(), upstream)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.few(3)
@pytest.mark.parametrize("rise", [20.0, 31.0, 200.0], ids=str)  # within REACH of the first block's maximum, and beyond
@pytest.mark.parametrize("start", ["low", "minus-infinity"])
def test_a_row_that_rises_after_its_first_block(start, rise, device, path):
    logits, target = sample(3, 5000, device=device)
    logits -= 300.0  # far below zero: sums relative to zero would underflow
    logits[1:, 4500:] += rise
    logits[2, 3000:4000] += 2 * rise
    if start == "minus-infinity":
        logits[:, :2048] = -math.inf
    target = torch.tensor([2500, 4501, 4502], device=device)
    outputs = tuple(name for name in OUTPUTS if name != "mean_logits")
    for stats in of_rows(logits, target, outputs=outputs):
        assert_stats_close(stats, formulas(logits, target, LogitOptions()))
    upstream = upstream_of(("logps", "lse", "entropy"), 3, device)
    ours = gradient_of(logits, target, LogitOptions(), upstream)
    alive = slice(2048, None) if start == "minus-infinity" else slice(None)
    exact = exact_gradient(logits[:, alive], target - (alive.start or 0), LogitOptions(), upstream)
    torch.testing.assert_close(ours[:, alive].double(), exact, rtol=1e-5, atol=1e-6)


def test_first_of_equal_logits_is_the_argmax(device):
    logits = torch.zeros(2, 5000, device=device)
    logits[1, [4099, 4998]] = 1.0
    target = torch.tensor([0, 4998], device=device)
    for stats in of_rows(logits, target, outputs=("argmax", "is_top1")):
        assert stats.argmax.tolist() == [0, 4099]
        assert stats.is_top1.tolist() == [True, False]
    slices = [
        logits_stats(logits[:, a:b], target, LogitOptions(), ("argmax",), vocab_start=a)
        for a, b in pairwise((0, 4097, 4990, 5000))
    ]
    assert finish(reduce(merge, slices), target, 5000, ("argmax",)).argmax.tolist() == [0, 4099]


def test_rows_of_a_wider_buffer(device, path):
    wide, target = sample(3, 400, device=device)
    target = target % 129
    before = wide.clone()
    logits = wide[:, :129]  # contiguous rows with a stride of 400
    for stats in of_rows(logits, target):
        assert_stats_close(stats, formulas(logits, target, LogitOptions()))
    upstream = upstream_of(("logps",), 3, device)
    exact = exact_gradient(logits, target, LogitOptions(), upstream)
    partial = logits_stats(logits, target, LogitOptions(), ("logps",))
    result = logits_grad_(
        logits, target, LogitsCotangents(partial.max, partial.sum_exp, **upstream), LogitOptions(), 129
    )
    assert result.data_ptr() == wide.data_ptr()
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(wide[:, 129:], before[:, 129:])


@pytest.mark.few(5)
@pytest.mark.parametrize("scalar", [1.0, -3.0, 0.0])
@pytest.mark.parametrize("n_tensors", [0, 1, 2, 4, 6])
def test_scale(n_tensors, scalar, device):
    """Any dtypes and sizes; the first tensor is not the largest, one is empty."""
    generator = torch.Generator().manual_seed(0)
    kinds = [
        ((129,), torch.bfloat16),
        ((4096 * 3 + 5,), torch.float32),
        ((0,), torch.float32),
        ((5,), torch.float64),
        ((7,), torch.float32),
        ((64, 3), torch.float16),
    ]
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape, dtype in kinds[:n_tensors]]
    expected = [(x.double() * scalar).to(x.dtype) for x in tensors]
    scale_(tensors, torch.tensor(scalar, device=device))
    for x, y in zip(tensors, expected, strict=True):
        # Triton's interpreter truncates.
        torch.testing.assert_close(x, y, rtol=torch.finfo(x.dtype).eps if INTERPRETED else 0, atol=0)


def surveyed_target(shape: tuple[int, int], ignore_index: int, device: str) -> torch.Tensor:
    """Return a target with ignored tokens in every row, and in all of the second."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(-5, 200, shape, generator=generator).to(device)
    target[torch.rand(shape, generator=generator).to(device) < 0.4] = ignore_index
    target[1:2] = ignore_index
    return target


@pytest.mark.few(4)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (1, 1), (3, 129), (2, 4097), (1, 9000)], ids=str)
@pytest.mark.parametrize("ignore_index", [-100, 7], ids=str)
def test_survey(shape, ignore_index, device):
    """Rows of several blocks, and a row with ignored tokens only."""
    target = surveyed_target(shape, ignore_index, device)
    found = survey(target, ignore_index)
    mask = found.mask
    assert torch.equal(mask, target != ignore_index)
    assert found.read() == found.summary.tolist()
    sizes, low, high = found.summary
    assert torch.equal(sizes.sum(1), mask.sum(1))
    if target.numel():
        counted = target.masked_fill(~mask, 0)
        assert torch.equal(low.amin(1), counted.amin(1))
        assert torch.equal(high.amax(1), counted.amax(1))


@pytest.mark.few(3)
@pytest.mark.parametrize("shape", [(2, 0), (1, 1), (3, 129), (300, 3), (2, 4097), (1, 9000)], ids=str)
@pytest.mark.parametrize("ignore_index", [-100, 7], ids=str)
def test_find_tokens(shape, ignore_index, device):
    """Rows of several blocks, more blocks than a program adds at a time, and a row with ignored tokens only."""
    target = surveyed_target(shape, ignore_index, device)
    surveyed = survey(target, ignore_index)
    expected = (target != ignore_index).view(-1).nonzero().view(-1)
    found = find_tokens(target, surveyed, ignore_index, expected.numel())
    assert torch.equal(found.places, expected)
    assert torch.equal(found.ids, target.view(-1)[expected])
    assert (found.token_at is not None) == (target.numel() > 0 and use_triton(target))
    if found.token_at is not None:
        places = torch.full((target.numel(),), -1, dtype=torch.int32, device=device)
        places[expected] = torch.arange(expected.numel(), dtype=torch.int32, device=device)
        assert torch.equal(found.token_at, places)


@pytest.mark.few(4)
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n_cols", [1, 24, 2100])
@pytest.mark.parametrize("known", [True, False])
def test_place_rows(to, n_cols, known, device):
    x = torch.randn(5, n_cols, generator=torch.Generator().manual_seed(0)).to(device)
    index = torch.tensor([6, 0, 2, 9, 3], device=device)
    token_at = torch.full((11,), -1, dtype=torch.int32, device=device)
    token_at[index] = torch.arange(5, dtype=torch.int32, device=device)
    out = torch.full((11, n_cols), torch.nan, dtype=to, device=device)
    place_rows(x, index, token_at if known else None, out)
    expected = torch.zeros(11, n_cols, dtype=to, device=device)
    expected[index] = x.to(to)
    assert torch.equal(out, expected)


@pytest.mark.few(4)
@pytest.mark.sampled(interpreted=True)
@pytest.mark.parametrize("k", [1, 3, 64, 150])
@pytest.mark.parametrize(
    ("dtype", "logp_dtype"),
    [(torch.int64, torch.float32), (torch.int32, torch.bfloat16), (torch.int64, torch.float16)],
    ids=str,
)
def test_survey_top_k(k, dtype, logp_dtype, device):
    """Each fault alone, in the last entry or at a block boundary, and absent entries."""
    generator = torch.Generator().manual_seed(k)
    ids = torch.stack([torch.randperm(1000, generator=generator)[:k] for _ in range(5)]).to(device, dtype)
    logps = (-torch.rand(5, k, generator=generator) - 1).to(device, logp_dtype)
    expected = [~0, int(ids.max()), 0, 0, 0]
    assert survey_top_k(logps, ids).tolist() == expected

    def changed(x, place, value):
        x = x.clone()
        x[place] = value
        return x

    for place in ((2, 0), (4, k - 1)):
        assert survey_top_k(logps, changed(ids, place, -7)).tolist()[0] == ~-7
        assert survey_top_k(logps, changed(ids, place, 4000)).tolist()[1] == 4000
        for value in (0.5, torch.nan, torch.inf):
            assert survey_top_k(changed(logps, place, value), ids).tolist()[3] == 1
        assert survey_top_k(changed(logps, place, 0.0), ids).tolist()[3] == 0  # a certain token
    # The ids of absent entries may be anything.
    gone = changed(logps, (slice(None), k - 1), -torch.inf)
    assert survey_top_k(gone, changed(ids, (slice(None), k - 1), -7)).tolist()[::4] == [~0, int(k == 1)]
    if k > 1:
        repeated = changed(ids, (3, k - 1), ids[3, 0])
        assert survey_top_k(logps, repeated).tolist()[2] == 1
        assert survey_top_k(gone, repeated).tolist()[2] == 0


@pytest.mark.parametrize("layout", ["strided", "transposed"])
def test_survey_top_k_of_any_layout(layout, device):
    logps, ids = torch.full((3, 8), -1.0, device=device), torch.arange(24, device=device).view(3, 8)
    apart = (logps[:, ::2], ids[:, ::2]) if layout == "strided" else (logps.t(), ids.t())
    assert survey_top_k(*apart).tolist() == [~0, 22 if layout == "strided" else 23, 0, 0, 0]
