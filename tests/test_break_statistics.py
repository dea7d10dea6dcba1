"""Faults found by an adversarial review of `linear_token_stats`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from liger_chunked import AdaptedWeight, linear_token_stats
from liger_chunked.engine import epilogue
from liger_chunked.engine.epilogue import StatisticsPass
from liger_chunked.kernels import backend

FLOATS = ("logps", "lse", "entropy", "mean_logits")


@pytest.mark.skipif(backend.INTERPRETED, reason="numpy's functions follow the alignment of their operands")
@pytest.mark.parametrize("low_rank", [False, True])
def test_batch_bits_do_not_follow_the_strides_of_the_input(low_rank: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, input = (torch.randn(n, 65, generator=generator).half() for n in (1000, 17))
    target = torch.randint(1000, (17,), generator=generator)
    head: Tensor | AdaptedWeight = weight
    by_column = input.t().contiguous().t()

    def values(x: Tensor) -> list[Tensor]:
        given = head if x is input or not low_rank else AdaptedWeight(weight, up, lambda _: u.t().contiguous().t())
        stats = linear_token_stats(given, x, target, outputs=FLOATS, deterministic="batch")
        return [getattr(stats, name) for name in FLOATS]

    if low_rank:
        up, u = (torch.randn(n, 65, generator=generator).half() / 8 for n in (1000, 17))
        head = AdaptedWeight(weight, up, lambda _: u)
    for name, a, b in zip(FLOATS, values(input), values(by_column), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.triton
@pytest.mark.xfail(strict=True, reason="float32 around the target's logit; it would need the maximum as centre")
def test_entropy_near_certainty_of_another_token(device, by_epilogue, monkeypatch):
    """The target is 43 nats below the maximum: the entropy and its gradient cancel."""
    monkeypatch.setattr(epilogue, "SMALLEST", 0)
    monkeypatch.setattr(epilogue, "FEWEST_TILES", 1)
    used = []
    backward = StatisticsPass.backward
    monkeypatch.setattr(StatisticsPass, "backward", lambda self, *given: used.append(1) or backward(self, *given))
    input = torch.zeros(64, 64, dtype=torch.bfloat16, device=device)
    input[:, 0] = 1
    input[:, 1] = torch.linspace(0, 1, 64)
    weight = torch.zeros(300, 64, dtype=torch.bfloat16, device=device)
    weight[:, 0], weight[0, 0], weight[1, 0] = -22, 0, -41
    weight[1, 1] = -2
    weight.requires_grad_()
    target = torch.ones(64, dtype=torch.int64, device=device)
    found = linear_token_stats(weight, input, target, outputs=("entropy",)).entropy
    (gradient,) = torch.autograd.grad(found.sum(), weight)
    exact_weight = weight.detach().double().requires_grad_()
    log_p = (input.double() @ exact_weight.t()).log_softmax(-1)
    exact = -(log_p.exp() * log_p).sum(-1)
    (exact_gradient,) = torch.autograd.grad(exact.sum(), exact_weight)
    assert used
    assert found.min() >= 0
    assert (gradient - exact_gradient).norm() <= 0.02 * exact_gradient.norm()
