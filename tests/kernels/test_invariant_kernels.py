"""The kernels of `deterministic="batch"`: logits and bounds of rows whose bits do not depend on other rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from liger_chunked.kernels import backend, project_logits, smallest_of_top_p
from liger_chunked.kernels.projection_logits import tiling_of_logits

V = 331
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PLACES = [[0], [129], [128, 5, 64, 5], list(range(17, 120))]


def logits_memory(x: Tensor, n_cols: int, dtype: torch.dtype) -> Tensor:
    return x.new_zeros(x.shape[0], -(-n_cols // 8) * 8, dtype=dtype)


@pytest.mark.triton
@pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.bfloat16, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("hidden", [40, 1160, 2056])
def test_logits(
    hidden: int, dtype: torch.dtype, out_dtype: torch.dtype, with_bias: bool, device: str, by_epilogue: None
) -> None:
    """They are rounded once, nothing is written beside them, and a row has the same bits alone and elsewhere."""
    generator = torch.Generator().manual_seed(hidden)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(device, dtype) for shape in ((130, hidden), (V, hidden), (V,))
    )
    given = weight, bias if with_bias else None
    memory = logits_memory(x, V, out_dtype)
    found = project_logits(x, *given, memory[:, :V])
    exact = x.double() @ weight.double().t() + (bias.double() if with_bias else 0)
    # An ulp at most, half of one if rounded to the nearest. The interpreter truncates to bfloat16.
    ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}[out_dtype]
    sums = 2.0**-22 * hidden**0.5 * exact.abs().max()
    assert ((found.double() - exact).abs() <= ulp * (1 + backend.INTERPRETED) * exact.abs() + sums).all()
    assert not memory[:, V:].any()
    for place in PLACES if device == "cuda" else ():  # the interpreter's products follow their shape
        part = x[place]
        assert torch.equal(project_logits(part, *given, logits_memory(part, V, out_dtype)[:, :V]), found[place])


def test_tiles_of_logits_do_not_follow_the_batch() -> None:
    assert tiling_of_logits(4096, torch.float32).stages < tiling_of_logits(4096, torch.bfloat16).stages
    assert tiling_of_logits(896, torch.float32) == tiling_of_logits(896, torch.bfloat16)


def by_sorting(
    z: Tensor, top_p: float, scale: float, temperature: Tensor | None = None, bound: Tensor | None = None
) -> Tensor:
    """Return the smallest logits that `top_p` keeps, from sums in float64."""
    z = z.double()
    scaled = z * scale / (1.0 if temperature is None else temperature.double()[:, None])
    if bound is not None:
        scaled = scaled.masked_fill(z < bound.double()[:, None], -math.inf)
    values, order = z.sort(-1)
    mass = scaled.softmax(-1).gather(1, order).cumsum(-1)
    has_enough = mass > 1 - top_p
    # The last of equal logits has the mass of all.
    return values.gather(1, has_enough.int().argmax(1, keepdim=True))[:, 0]


@pytest.mark.triton
@pytest.mark.parametrize(
    ("spread", "shift", "top_p"), [(0.01, 0.0, 0.999), (1.0, -7.0, 0.02), (3.0, 40.0, 0.9), (9.0, 0.0, 0.9)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_smallest_of_top_p(spread: float, shift: float, top_p: float, dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and not backend.INTERPRETED:
        pytest.skip("no torch path: runs with TRITON_INTERPRET=1")
    generator = torch.Generator().manual_seed(7)
    z = (spread * torch.randn(4, V, generator=generator) + shift).to(device, dtype)
    temperature = (torch.rand(4, generator=generator) + 0.5).to(device)
    for options in ({}, {"temperature": temperature}, {"bound": z.topk(20).values[:, -1]}):
        found = smallest_of_top_p(z, top_p, 1.3, **options)
        assert found.dtype == dtype and torch.equal(found.double(), by_sorting(z, top_p, 1.3, **options))


@pytest.mark.triton
def test_a_bound_of_a_row_does_not_follow_the_batch(device: str) -> None:
    if device == "cpu":
        pytest.skip("the interpreter's sums follow the alignment of their operands")
    generator = torch.Generator(device).manual_seed(8)
    z = (3 * torch.randn(300, 12288, device=device, generator=generator)).bfloat16()
    # A wide row of which many thresholds are near: the last bits of a sum decide.
    z[:, ::2] = (0.01 * torch.randn(300, 6144, device=device, generator=generator)).bfloat16()
    every = smallest_of_top_p(z, 0.95, 1.0)
    for place in PLACES:
        assert torch.equal(smallest_of_top_p(z[place], 0.95, 1.0), every[place])


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_finite(dtype: torch.dtype, device: str) -> None:
    """They end, and keep what makes their statistics what eager code's are."""
    if device == "cpu" and not backend.INTERPRETED:
        pytest.skip("no torch path: runs with TRITON_INTERPRET=1")
    inf, nan = math.inf, math.nan
    z = torch.tensor([[inf, 1.0, 2.0], [-inf, -inf, -inf], [-inf, 0.0, -0.0], [nan, 1.0, 2.0], [nan, nan, nan]])
    found = smallest_of_top_p(z.to(device, dtype), 0.6, 1.0).tolist()
    assert found[:3] == [inf, -inf, 0.0]
    assert smallest_of_top_p(z[:0].to(device, dtype), 0.6, 1.0).shape == (0,)
