"""The kernel that finds what a sampler keeps, and the one that drops the rest."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import pytest
import torch
from sampling import exhaustive
from torch import Tensor

from liger_chunked.engine.sampling import SamplingFilter
from liger_chunked.kernels import backend, drop_below_, sampling_bound
from liger_chunked.kernels.tuning.generic import GENERIC, Launch
from liger_chunked.types import LogitOptions

V, SCALE = 331, 1.3
# Each step of a bisection takes the interpreter milliseconds, and float32 twice the steps.
DTYPES = [exhaustive([x], str(x), backend.INTERPRETED and x != torch.bfloat16) for x in (
    torch.bfloat16, torch.float16, torch.float32)
]  # fmt: skip
FEW = backend.INTERPRETED
PLACES = [[0], [129], [128, 5, 64, 5], list(range(17, 120))]
FILTERS: list[dict[str, Any]] = [
    {"top_k": 1}, {"top_k": 20}, {"top_k": 250}, {"top_k": V - 1}, {"min_p": 0.03}, {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.9}, {"top_k": 20, "min_p": 0.03}, {"top_p": 0.9, "min_p": 0.03},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.01}, {"top_p": 1e-9}, {"top_p": 1 - 2**-50},
]  # fmt: skip


@pytest.fixture(autouse=True)
def has_kernels(device: str) -> None:
    if device == "cpu" and not backend.INTERPRETED:
        pytest.skip("no torch path: runs with TRITON_INTERPRET=1")


def by_sorting(
    z: Tensor,
    scale: float | Tensor,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Return (rows, V) bool, what filters keep one after the other, from sums in float64."""
    z = z.double()
    scaled = z * (scale.double()[:, None] if isinstance(scale, Tensor) else scale)
    kept = torch.ones_like(z, dtype=torch.bool)
    if top_k is not None:
        kept = z >= z.sort(descending=True).values[:, min(top_k, z.shape[1]) - 1, None]
    if top_p is not None:
        values, order = z.sort(-1)
        mass = scaled.masked_fill(~kept, -math.inf).softmax(-1).gather(1, order).cumsum(-1)
        has_enough = mass > 1 - top_p
        has_enough[:, -1] = True
        # The last of equal logits has the mass of all.
        kept &= z >= values.gather(1, has_enough.int().argmax(1, keepdim=True))
    if min_p is not None:
        kept &= scaled >= scaled.amax(1, keepdim=True) + math.log(min_p)
    return kept


def check(z: Tensor, scale: float | Tensor = SCALE, **options: Any) -> None:
    """Check that the kernel keeps what sorting keeps, and that the formula of float64 does."""
    bound = sampling_bound(z, scale, **options)
    assert bound.dtype == z.dtype and bound.shape == z.shape[:1]
    expected = by_sorting(z, scale, **options)
    assert torch.equal(z >= bound[:, None], expected)
    temperature = scale.double().reciprocal() if isinstance(scale, Tensor) else None
    of_call = LogitOptions(logit_scale=1.0 if isinstance(scale, Tensor) else scale)
    formula = SamplingFilter(**options).smallest_kept(z.double(), of_call, temperature)
    assert torch.equal(z >= formula[:, None], expected)


def rows(dtype: torch.dtype, device: str, spread: float = 3.0, shift: float = 0.0, n_cols: int = V) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return (spread * torch.randn(2 if FEW else 4, n_cols, generator=generator) + shift).to(device, dtype)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("spread", "shift", "top_p"), [(0.01, 0.0, 0.999), (1.0, -7.0, 0.02), (3.0, 40.0, 0.9), (9.0, 0.0, 0.9)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_top_p(spread: float, shift: float, top_p: float, dtype: torch.dtype, device: str) -> None:
    z = rows(dtype, device, spread, shift)
    scales = (torch.rand(len(z), generator=torch.Generator().manual_seed(1)) + 0.7).to(device)
    for scale in (SCALE, scales):
        check(z, scale, top_p=top_p)
    check(z, top_p=top_p, top_k=20)


@pytest.mark.triton
@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_filters(options: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    """Also of rows that are not aligned, of scales of rows, and of large scales."""
    z = rows(dtype, device)
    check(z, **options)
    memory = torch.full((len(z), V + 5), 99.0, dtype=dtype, device=device)
    apart = memory[:, 3 : 3 + V].copy_(z)
    check(apart, torch.tensor([0.5, 8.0, 1.0, 1.75], device=device)[: len(z)], **options)


@pytest.mark.triton
@pytest.mark.parametrize("n_cols", [1, 200] if FEW else [1, 2, 64, 200, 256])
def test_blocks_of_a_row(n_cols: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are narrower than a row and than `top_k`; a row has whole blocks, a part of one, or both."""
    z = rows(torch.bfloat16, device, n_cols=n_cols)
    small = GENERIC._replace(**dict.fromkeys(("sampling_bound", "drop_below"), Launch(64, 2)))
    for name in ("sampling_bound", "drop_below"):
        monkeypatch.setattr(import_module(f"liger_chunked.kernels.{name}"), "TUNING", {z.device: small})
    for k in (3, 64, 130) if FEW else (1, 3, 63, 64, 65, 130, 199, 1000):
        check(z, top_k=k)
        check(z.float(), top_k=k)
    for options in ({"top_p": 0.9}, {"top_k": 70, "top_p": 0.99, "min_p": 1e-4}):
        check(z, **options)
    # The largest logits share a lane, or are last.
    z = z.sort(1).values
    check(z, top_k=3)
    z[:, ::64] += 50
    check(z, top_k=4)
    bound = z.sort(1).values[:, z.shape[1] // 2].contiguous()
    expected = z.masked_fill(z < bound[:, None], -math.inf)
    assert torch.equal(drop_below_(z.clone(), bound), expected)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_stay_or_go_together(dtype: torch.dtype, device: str) -> None:
    z = torch.tensor([3.0, 1.0, 1.0, 0.0, 1.0, -1.0, 0.0])
    z = torch.stack([z, torch.zeros_like(z), -z, z.flip(0), torch.full_like(z, -2.5)]).to(device, dtype)
    z[1, ::2] = -0.0
    z = z[:2] if FEW else z
    for k in (None, 2, 5) if FEW else (None, *range(1, 9)):
        for top_p in (None, 0.8, 0.97) if FEW else (None, 0.1, 0.8, 0.9, 0.97):
            for min_p in (None, 0.13, 0.14) if top_p is None else (None,):
                if (k, top_p, min_p) != (None, None, None):
                    check(z, 1.0, top_k=k, top_p=top_p, min_p=min_p)


@pytest.mark.triton
def test_a_bound_of_a_row_does_not_follow_the_batch(device: str) -> None:
    if device == "cpu":
        pytest.skip("the interpreter's sums follow the alignment of their operands")
    generator = torch.Generator(device).manual_seed(8)
    z = (3 * torch.randn(300, 12288, device=device, generator=generator)).bfloat16()
    # A wide row of which many thresholds are near: the last bits of a sum decide.
    z[:, ::2] = (0.01 * torch.randn(300, 6144, device=device, generator=generator)).bfloat16()
    for options in ({"top_p": 0.95}, {"top_k": 9000, "top_p": 0.95, "min_p": 1e-4}):
        every = sampling_bound(z, 1.0, **options)
        for place in PLACES:
            assert torch.equal(sampling_bound(z[place], 1.0, **options), every[place])


@pytest.mark.triton
@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.6}, {"top_k": 1}, {"top_k": 2}, {"min_p": 0.5}, {"top_k": 2, "top_p": 0.6, "min_p": 0.5}],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite(options: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    """They end, and keep what makes their statistics what eager code's are: NaN stays."""
    inf, nan = math.inf, math.nan
    z = torch.tensor([[inf, 1.0, 2.0], [-inf, -inf, -inf], [-inf, 0.0, -0.0], [nan, 1.0, 2.0], [nan, nan, nan]])
    z = torch.cat([z, -z[3:]]).to(device, dtype)
    bound = sampling_bound(z, 1.0, **options)
    one = options.get("top_k") == 2 and "top_p" not in options
    assert not bound.isnan().any()
    kept = drop_below_(z.clone(), bound)
    assert kept[:3].tolist() == [[inf, -inf, 2.0 if one else -inf], [-inf] * 3, [-inf, 0.0, 0.0]]
    assert torch.equal(kept.isnan(), z.isnan())
    assert sampling_bound(z[:0], 1.0, **options).shape == (0,) and drop_below_(z[:0], bound[:0]).shape == (0, 3)


@pytest.mark.triton
def test_min_p_of_small_numbers(device: str) -> None:
    """float16 has fewer numbers near 0 than bisection."""
    z = torch.tensor([[0.0, 2**-24, 2**-23, 3 * 2**-24, 65504.0 / 2**30, -65504.0]], dtype=torch.float64)
    z = z.to(device, torch.float16)
    for scale in (1.0, 2.0**14):
        for min_p in (0.5, 0.999, 1.0):
            expected = by_sorting(z, scale, min_p=min_p)
            assert torch.equal(z >= sampling_bound(z, scale, min_p=min_p)[:, None], expected)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_drop_below(dtype: torch.dtype, device: str) -> None:
    """In place, also of rows that are apart and of bounds that are not aligned."""
    memory = torch.full((4, V + 5), 99.0, dtype=dtype, device=device)
    z = memory[:, :V].copy_(torch.cat([rows(dtype, device)] * 2)[:4])
    bounds = torch.tensor([7.0, 0.0, -math.inf, 1.5, math.inf], device=device, dtype=dtype)[1:]
    expected = z.masked_fill(z < bounds[:, None], -math.inf)
    found = drop_below_(z, bounds)
    assert torch.equal(found, expected) and found.data_ptr() == memory.data_ptr()
    assert (memory[:, V:] == 99).all()
