"""Test the accumulators of dX and dW alone, in the protocol that passes follow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from liger_chunked.engine import cutting
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.plan import Plan
from liger_chunked.engine.rows import TokenRows
from liger_chunked.engine.sink import Needs, Sink
from liger_chunked.types import HeadTensors, LogitOptions

N, H, V, R = 12, 5, 9, 2
LIVE = torch.tensor([3, 0])  # of each chunk's rows; the others have no gradient


def plan_of(index: Tensor | None, n_chunks: int, limit: int, dtype: torch.dtype) -> Plan:
    n = N if index is None else index.shape[0]
    slices = [slice(i * n // n_chunks, (i + 1) * n // n_chunks) for i in range(n_chunks)]
    tiles = tuple(cutting.tiles(part.stop - part.start, V, limit) for part in slices)
    return Plan(
        rows=TokenRows(n, (N,), torch.zeros(n, dtype=torch.int64), None, index, index),
        chunks=tuple(Chunk(part, part) for part in slices),
        tiles=tiles,
        dtype=dtype,
        n_contributions=sum(map(cutting.row_blocks, tiles)),
        largest_tile=limit,
        options=LogitOptions(),
    )


@pytest.mark.parametrize("n_chunks", [1, 2])
@pytest.mark.parametrize("limit", [N * V, 2 * V, 7])  # one tile, blocks of rows, parts of rows
@pytest.mark.parametrize("has_live", [False, True])
@pytest.mark.parametrize("has_index", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_sums_of_tiles(dtype: torch.dtype, has_index: bool, has_live: bool, limit: int, n_chunks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, u, weight, up, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in [(N, H), (N, R), (V, H), (V, R), (V,)]
    )
    index = torch.tensor([7, 2, 3, 11, 0, 5, 8, 1]) if has_index else None
    plan, head = plan_of(index, n_chunks, limit, dtype), HeadTensors(weight, bias, up)
    n = plan.rows.n_valid
    dz = torch.randn(n, V, generator=generator).to(dtype)
    grads = Sink(plan, x, head, Needs(True, True, True, True, True), u)
    expected = torch.zeros(N, V, dtype=torch.float64)
    for i, chunk in enumerate(plan.chunks):
        tokens, live, tiles = plan.tokens(i, x, u), LIVE if has_live else None, plan.tiles[i]
        of_chunk, adapted, chunk_u = dz[chunk.row_slice], tokens.x, tokens.u
        assert chunk_u is not None
        places = torch.arange(N)[chunk.row_slice] if index is None else index[chunk.row_slice]
        if live is not None:
            of_chunk, adapted, chunk_u, places = of_chunk[live], adapted[live], chunk_u[live], places[live]
            tiles = cutting.tiles(live.shape[0], V, limit)
        expected[places] = of_chunk.double()
        grads.open_chunk(head, adapted, chunk.row_slice, tiles, chunk_u, live)
        for tile in reversed(tiles):
            grads.add(tile, of_chunk[tile.row_slice, tile.vocab_slice].contiguous())
        grads.close_chunk()
    exact = [expected @ weight.double(), expected.t() @ x.double(), expected.sum(0)]
    exact += [expected @ up.double(), expected.t() @ u.double()]
    for found, value, of in zip(grads.finish(), exact, (x, weight, bias, u, up), strict=True):
        assert found is not None and found.shape == of.shape and found.dtype == of.dtype
        rounding = 2**-8 if dtype == torch.bfloat16 else 1e-14
        assert ((found.double() - value).norm() <= rounding * value.norm()).all()


def test_without_a_chunk_all_gradients_are_zero() -> None:
    x, weight = torch.randn(N, H), torch.randn(V, H)
    plan = plan_of(torch.zeros(0, dtype=torch.int64), 1, V, torch.float32)
    dx, dw, *others = Sink(plan, x, HeadTensors(weight), Needs(True, True)).finish()
    assert dx is not None and dw is not None and not dx.any() and not dw.any()
    assert dx.shape == x.shape and dw.shape == weight.shape and others == [None, None, None]
