"""Logits, statistics and gradients of kept ids against autograd on whole rows of logits, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.kept_ids import sorted_by_id
from liger_chunked.kernels import add_rows_, kept, kept_tile
from liger_chunked.kernels.logits_grad import LogitsCotangents
from liger_chunked.types import LogitOptions

N, H, V = 9, 24, 37
OPTIONS = {
    "plain": LogitOptions(),
    "softcap": LogitOptions(softcap=3.0, logit_scale=0.7, temperature=1.3),
    "temperature": LogitOptions(temperature=0.5),
}
# float32 sums of H products, and bfloat16 results rounded once.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.0**-8}


def lists() -> list[list[int]]:
    """Return kept ids of tokens: singletons, an empty slice, a whole vocabulary, an id that many tokens keep."""
    generator = torch.Generator().manual_seed(0)
    sizes = [1, 1, 0, 5, V, 1, 3, 8, 0]
    return [sorted(set(torch.randperm(V, generator=generator)[:n].tolist()) | ({3} if n else set())) for n in sizes]


def entries_of(ids: list[list[int]], device: str, start: int = 0) -> kept.Entries:
    generator = torch.Generator().manual_seed(1)
    flat = torch.tensor([i for row in ids for i in row])
    lengths = torch.tensor([len(row) for row in ids])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    places = (torch.rand(len(ids), generator=generator) * lengths).long()
    tokens = torch.repeat_interleave(torch.arange(len(ids)), lengths)
    return kept.Entries(*(x.to(device) for x in (flat - start, offsets, tokens, offsets[:-1] + places)))


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, ids: list[list[int]], entries: kept.Entries,
          options: LogitOptions, temperature: Tensor | None) -> dict[str, Tensor]:  # fmt: skip
    """Return statistics by a mask over whole rows of logits; 0 without entries."""
    z = x @ weight.T if bias is None else x @ weight.T + bias
    z = options.logit_scale * z
    z = z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)
    z = z / (options.temperature if temperature is None else temperature[:, None].double())
    mask = torch.zeros_like(z, dtype=torch.bool)
    for row, of_row in enumerate(ids):
        mask[row, of_row] = True
    some = mask.any(1)
    logp = z.masked_fill(~mask, -torch.inf)[some].log_softmax(-1)
    target = entries.ids[entries.target.clamp(max=len(entries.ids) - 1)][some]
    found = {
        "logps": logp.gather(1, target[:, None])[:, 0],
        "lse": z.masked_fill(~mask, -torch.inf)[some].logsumexp(-1),
        "entropy": -(logp.exp() * logp.masked_fill(~mask[some], 0.0)).sum(-1),
        "argmax": logp.argmax(-1),
    }
    return {
        name: torch.zeros(len(ids), dtype=v.dtype, device=v.device).masked_scatter(some, v) for name, v in found.items()
    }


@pytest.mark.few(3)
@pytest.mark.triton
@pytest.mark.parametrize("by_token", [False, True], ids=["", "temperatures"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_statistics_and_gradients(
    dtype: torch.dtype, options: LogitOptions, has_bias: bool, by_token: bool, device: str
) -> None:
    if by_token and options.temperature != 1.0:
        pytest.skip("one temperature")
    ids = lists()
    entries = entries_of(ids, device)
    generator = torch.Generator().manual_seed(2)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype).to(device) for shape in ((N, H), (V, H), (V,)))
    temperature = (0.5 + torch.rand(N, generator=generator)).to(device) if by_token else None
    given = bias if has_bias else None
    z = kept.kept_logits(x, weight, given, entries)
    stats = kept.kept_stats(z, entries, options, temperature)

    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    expected = exact(leaves[0], leaves[1], leaves[2] if has_bias else None, ids, entries, options, temperature)
    some = torch.tensor([bool(row) for row in ids], device=device)
    for name in ("logps", "lse", "entropy"):
        found = getattr(stats, name)[some].double()
        # bfloat16 inputs are exact here: sums are float32.
        tolerance = TOLERANCE[torch.float64 if dtype == torch.float64 else torch.float32]
        torch.testing.assert_close(found, expected[name][some], rtol=tolerance, atol=10 * tolerance)
    assert (entries.ids[stats.argmax[some]] == expected["argmax"][some]).all()

    g = {name: torch.randn(N, generator=generator).to(z.dtype).to(device) for name in ("logps", "lse", "entropy")}
    loss = sum((g[name].double() * expected[name])[some].sum() for name in g)
    assert isinstance(loss, Tensor)
    wanted = torch.autograd.grad(loss, leaves, allow_unused=True)
    cotangents = LogitsCotangents(stats.max, stats.sum_exp, **g, entropy_value=stats.entropy, temperature=temperature)
    dz = kept.kept_logits_grad(z, entries, cotangents, options)
    dx, dw = torch.full_like(x, torch.nan), torch.zeros_like(weight)
    db = torch.zeros(V, dtype=z.dtype, device=device) if has_bias else None
    kept.kept_input_grad(dz, weight, entries, dx)
    by_id = sorted_by_id(entries, dz)
    add_rows_(dw, x, by_id)
    if db is not None:
        add_rows_(db[:, None], x.new_ones(N, 1), by_id)
    for found, expected_grad in zip((dx, dw, db), wanted, strict=True):
        if found is None or expected_grad is None:
            assert found is None and expected_grad is None
            continue
        tolerance = TOLERANCE[found.dtype]
        # Sums of float32 terms are as exact as their largest term; a rounded result is, of itself.
        absolute = (20 if tolerance < 1e-3 else 1) * tolerance * float(expected_grad.abs().max())
        torch.testing.assert_close(found.double(), expected_grad, rtol=tolerance, atol=absolute)
    assert (dx[~some] == 0).all()


@pytest.mark.triton
def test_places(device: str) -> None:
    ids = [[4, 9, 2], [], [7], [7, 4], [3], [], [5]]
    target = torch.tensor([2, 4, -100, 9, 3, -100, 5], device=device)
    entries = entries_of(ids, device)
    counts = torch.tensor([0, 0, 0, 17], device=device)
    read, place = kept.kept_places(*entries[:3], target, -100, counts)
    assert read.tolist() == [4, 9, 2, -1, 7, 4, 3, 5]  # nothing of an ignored token is read
    assert place.tolist() == [2, -1, -1, -1, 6, -1, 7]
    assert counts.tolist() == [5, 1, 1, 17]  # with a target, without entries, without the target


@pytest.mark.triton
def test_a_token_that_does_not_count_has_no_gradient(device: str) -> None:
    entries = entries_of([[4, 9], [7, 2], []], device)._replace(target=torch.tensor([1, -1, -1], device=device))
    z = torch.tensor([0.5, 1.5, torch.nan, torch.inf], device=device)
    stats = kept.kept_stats(z, entries, LogitOptions())
    for values in (stats.logps, stats.lse, stats.entropy):
        assert values[0] != 0 and not values[1:].any()
    g = torch.ones(3, device=device)
    cotangents = LogitsCotangents(stats.max, stats.sum_exp, logps=g, lse=g, entropy=g, entropy_value=stats.entropy)
    dz = kept.kept_logits_grad(z, entries, cotangents, LogitOptions())
    assert dz[:2].all() and not dz[2:].any()


@pytest.mark.few(2)
@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_an_ignored_token_is_not_read(dtype: torch.dtype, device: str) -> None:
    """Its entries have an id of -1, and no gradient. Row 0, in whose place they stand, is not read for them."""
    ids = lists()
    entries = entries_of(ids, device)
    ignored = torch.arange(N, device=device) % 3 == 1
    of_entries = ignored[entries.tokens]
    read = entries._replace(ids=torch.where(of_entries, -1, entries.ids))
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(shape, generator=generator).to(dtype).to(device) for shape in ((N, H), (V, H)))
    z = kept.kept_logits(x, weight, None, entries)
    dz = torch.randn(z.shape, generator=generator).to(z.dtype).to(device).masked_fill(of_entries, 0.0)
    found, expected = torch.empty_like(x), torch.empty_like(x)
    kept.kept_input_grad(dz, weight, entries, expected)
    dw, expected_dw = torch.zeros_like(weight), torch.zeros_like(weight)
    add_rows_(expected_dw, x, sorted_by_id(entries, dz))
    x = x.masked_fill(ignored[:, None], torch.nan)
    if not (entries.ids[~of_entries] == 0).any():
        weight[0] = torch.nan
    assert torch.equal(kept.kept_logits(x, weight, None, read), z.masked_fill(of_entries, 0.0))
    kept.kept_input_grad(dz, weight, read, found)
    add_rows_(dw, x, sorted_by_id(entries, dz))
    assert torch.equal(found, expected) and torch.equal(dw, expected_dw)


@pytest.mark.few(2)
@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_tiles_of_logits(dtype: torch.dtype, device: str) -> None:
    """Entries are read from tiles, and written to them, in which zeros are in all other places."""
    entries = entries_of(lists(), device)
    entries = entries._replace(ids=torch.where(entries.tokens == 3, -1, entries.ids))
    generator = torch.Generator().manual_seed(6)
    order = torch.randperm(N, generator=generator)[:-1].to(device)  # rows of tokens, one of them without a row
    logits = torch.randn(N - 1, V, generator=generator).to(device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits = logits.to(wide)
    z = torch.full(entries.ids.shape, 7.0, dtype=wide, device=device)
    dz = torch.randn(z.shape, generator=generator).bfloat16().to(wide).to(device)  # exact in each dtype
    whole = torch.full_like(logits, torch.nan, dtype=dtype)
    for rows, columns in ((slice(0, 5), slice(0, 20)), (slice(5, N), slice(0, 20)), (slice(0, N), slice(20, V))):
        kept_tile.read_kept_(z, logits[rows, columns].contiguous(), entries, order[rows], columns.start)
        tile = torch.full_like(whole[rows, columns].contiguous(), torch.nan)
        kept_tile.spread_kept_(tile, dz, entries, order[rows], columns.start)
        whole[rows, columns] = tile
    expected, expected_z = torch.zeros_like(whole), torch.full_like(z, 7.0)
    row_of = {token: row for row, token in enumerate(order.tolist())}
    for entry, (token, i) in enumerate(zip(entries.tokens.tolist(), entries.ids.tolist(), strict=True)):
        if token in row_of and i >= 0:
            expected_z[entry] = logits[row_of[token], i]
            expected[row_of[token], i] = dz[entry]
    assert torch.equal(z, expected_z) and torch.equal(whole, expected) and (z == 7).any()


@pytest.mark.triton
def test_a_bias_that_is_a_column(device: str) -> None:
    entries = entries_of(lists(), device)
    x, weight, matrix = (torch.randn(shape, device=device) for shape in ((N, H), (V, H), (V, 2)))
    strided, contiguous = (kept.kept_logits(x, weight, bias, entries) for bias in (matrix[:, 1], matrix[:, 1].clone()))
    assert torch.equal(strided, contiguous)


@pytest.mark.triton
def test_without_entries(device: str) -> None:
    entries = kept.Entries(*(torch.zeros(n, dtype=torch.int64, device=device) for n in (0, 3, 0, 2)))
    x, weight = torch.randn(2, H, device=device), torch.randn(V, H, device=device)
    z = kept.kept_logits(x, weight, None, entries)
    dx, dw = torch.full_like(x, torch.nan), torch.zeros_like(weight)
    kept.kept_input_grad(z, weight, entries, dx)
    add_rows_(dw, x, sorted_by_id(entries, z))
    assert z.numel() == 0 and (dx == 0).all() and (dw == 0).all()


@pytest.mark.few(2)
@pytest.mark.triton
@pytest.mark.parametrize("n", [128, 129, 700])
def test_an_id_that_many_tokens_keep(n: int, device: str) -> None:
    """Its entries are summed by several programs, beside ids that end or begin within theirs."""
    ids = [[5] if row % 3 else [1 + row % 2, 5, 7 + row % 4] for row in range(n)]
    entries = entries_of(ids, device)
    generator = torch.Generator().manual_seed(4)
    x, dz = (torch.randn(*shape, generator=generator).to(device) for shape in ((n, 8), entries.ids.shape))
    found, expected = torch.zeros(V, 8, device=device), torch.zeros(V, 8, dtype=torch.float64, device=device)
    add_rows_(found, x, sorted_by_id(entries, dz))
    expected.index_add_(0, entries.ids, dz[:, None].double() * x[entries.tokens].double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    again = torch.zeros_like(found)
    add_rows_(again, x, sorted_by_id(entries, dz))
    assert torch.equal(again, found)
