"""The product of `deterministic="batch"`: logits of rows whose bits do not depend on other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from liger_chunked.kernels import backend, project_logits
from liger_chunked.kernels.projection_logits import tiling_of_logits

V = 331
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PLACES = [[0], [129], [128, 5, 64, 5], list(range(17, 120))]


def logits_memory(x: Tensor, n_cols: int, dtype: torch.dtype) -> Tensor:
    return x.new_zeros(x.shape[0], -(-n_cols // 8) * 8, dtype=dtype)


@pytest.mark.few(5)
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
