"""Test the kernels of the fused epilogue: the product with its exponentials, and the target rows of dW."""

from __future__ import annotations

import math

import pytest
import torch
from table import moved
from test_epilogue import OUTPUTS, tokens
from torch import Tensor

from liger_chunked import TokenStats
from liger_chunked.kernels import add_rows_, project_exp, sorted_rows
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.kernels.tuning.hopper import TARGET_RUN


def project(x: Tensor, weight: Tensor, target: Tensor, scale: float, **kwargs):
    vocab = weight.shape[0]
    out = x.new_empty(x.shape[0], -(-vocab // 8) * 8)[:, :vocab]
    weight_sum = weight.sum(0, dtype=torch.float32)
    return project_exp(x, weight, target, weight_sum, out, scale, OUTPUTS, **kwargs)


@pytest.mark.few(2)
@pytest.mark.triton
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
def test_weights_that_are_not_finite(value, device, by_epilogue):
    """The result is not finite exactly where eager code's is not."""
    batch = moved(tokens(10, 4, 40), torch.bfloat16, device)
    x, weight, target = batch["input"], batch["weight"], batch["target"]
    weight[3, 5] = value
    # One target has zero probability; its logit is the row's first centre.
    x[0, 5], target[0] = (-1.0 if value > 0 else 1.0), 3
    _, stats = project(x, weight, target, 1.0)
    z = (x @ weight.t()).float()
    log_p = z.log_softmax(-1)
    # Entries with zero probability do not count in the entropy.
    exact = TokenStats(
        logps=log_p.gather(1, target[:, None])[:, 0],
        lse=z.logsumexp(-1),
        entropy=-(log_p.exp() * torch.where(log_p == -math.inf, 0.0, log_p)).sum(-1),
        mean_logits=z.mean(-1),
    )
    for name in OUTPUTS:
        ours, expected = getattr(stats, name), getattr(exact, name)
        finite = expected.isfinite()
        assert torch.equal(ours.isfinite(), finite), name
        # The eager logits are rounded to bfloat16.
        torch.testing.assert_close(ours[finite], expected[finite], rtol=0.05, atol=0.05, msg=name)


@pytest.mark.triton
@pytest.mark.parametrize("targets", [1, 2, 5, 64])
def test_target_rows(targets, device, by_epilogue):
    """Also where a target's tokens reach over several programs, and where another rank has it."""
    generator = torch.Generator().manual_seed(0)
    n, hidden = 300, 520
    assert n > 2 * TARGET_RUN and hidden > TUNING[torch.device(device)].added_rows[2]  # ragged last blocks in both
    x = torch.randn(n, hidden, generator=generator).bfloat16().to(device)
    scale, grad = (torch.randn(*s, generator=generator).to(device) for s in ((n,), (64, hidden)))
    target = torch.randint(targets, (n,), generator=generator).to(device)
    elsewhere = torch.arange(n, device=device) % 7 == 3
    expected = grad.double().index_add_(0, target, (scale * ~elsewhere).double()[:, None] * x.double())
    # Near 0, dozens of terms of about 1 cancel; allow the rounding of their sum.
    rows, again = sorted_rows(target.masked_fill(elsewhere, -1), scale), grad.clone()
    add_rows_(grad, x, rows, TARGET_RUN)
    add_rows_(again, x, rows, TARGET_RUN)
    assert torch.equal(grad, again)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-5)
