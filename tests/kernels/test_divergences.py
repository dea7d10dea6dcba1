"""Test the divergence kernels against float64 formulas: equal, disjoint, large and skewed rows."""

from __future__ import annotations

import math

import pytest
import torch
from table import SMALL, evaluate, moved, relative_error, students
from test_distillation import LOSSES, SOFT, by_loss
from torch import Tensor

from liger_chunked import (
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
    LogitOptions,
)
from liger_chunked.kernels import divergence_grad_, divergence_stats, tail_grad_, tail_stats


def by_kernels(loss: LigerFusedLinearDistillationBase, z: Tensor, t: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Return the divergence of each row, and its gradient."""
    made = LogitOptions(**options)
    z = z.clone()
    stats = divergence_stats(z, t, None, loss.closed_form(), made, made)
    return stats.divergence, divergence_grad_(
        z, t, None, stats, torch.ones_like(stats.divergence), None, loss.closed_form(), made, made
    )


def by_autograd(loss: LigerFusedLinearDistillationBase, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value and gradient of the loss's `divergence` method."""
    z = z.clone().requires_grad_()
    divergence = loss.divergence(z, t)
    return divergence.detach(), torch.autograd.grad(divergence.sum(), z)[0]


# HARD_CASES 15: the ends of beta, disjoint distributions, a student that equals its teacher


FORMULAS = {
    **LOSSES,
    # Most shares of the mixture are near 1, where a series takes the place of a logarithm.
    "jsd-0.03": LigerFusedLinearJSDLoss(beta=0.03),
    "cosine": LigerFusedLinearCosineSimilarityLoss(),
}


@pytest.mark.few(len(FORMULAS))  # one size of each
@pytest.mark.sampled(interpreted=True)
@pytest.mark.triton
@pytest.mark.parametrize("cols", [1000, 7, 127, 5000])
@pytest.mark.parametrize("loss", FORMULAS.values(), ids=FORMULAS)
def test_kernels_match_autograd(loss, cols, device):
    generator = torch.Generator().manual_seed(cols)
    z, t = 3 * torch.randn(2, 32, cols, generator=generator).to(device)
    ours = by_kernels(loss, z, t)
    exact = by_autograd(loss, z.double(), t.double())
    eager = by_autograd(loss, z, t)
    for value, expected, naive in zip(ours, exact, eager, strict=True):
        # Weigh rows equally: pooled errors would depend on the row with the largest values only.
        rows = expected.view(32, -1).norm(dim=1)
        error, naive_error = (
            float(((x.double() - expected).view(32, -1).norm(dim=1) / (rows + rows.median())).square().mean().sqrt())
            for x in (value, naive)
        )
        # The kernels round as often as eager code, in another order. Allow one unit in the last place
        # if eager code is exact.
        assert error <= max(2 * naive_error, 2**-23)


@pytest.mark.few(3)
@pytest.mark.triton
@pytest.mark.parametrize("offset", [1e4, -1e4])
@by_loss
def test_offset_logits(loss, offset, device):
    generator = torch.Generator().manual_seed(0)
    # Multiples of 1/64, which stay exact under the offset.
    z, t = ((64 * torch.randn(2, 3, 300, generator=generator)).round() / 64).to(device)
    value, gradient = by_kernels(loss, z, t)
    shifted, shifted_gradient = by_kernels(loss, z + offset, t - offset)
    # The centred values are equal in float32, so only a few roundings of their sums remain.
    assert torch.allclose(shifted, value, rtol=1e-6, atol=0)
    assert torch.allclose(shifted_gradient, gradient, rtol=1e-5, atol=1e-9)


@pytest.mark.few(4)
@pytest.mark.triton
@by_loss
def test_student_equal_to_teacher(loss, device):
    z = 5 * torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)).to(device)
    value, gradient = by_kernels(loss, z, z.clone())
    assert float(value.abs().max()) <= 2**-22
    assert float(gradient.abs().max()) <= 2**-22  # the probabilities sum to 1 up to rounding


@pytest.mark.few(4)
@pytest.mark.triton
@pytest.mark.parametrize("gap", [200.0, 1e4, 1e30])
@by_loss
def test_disjoint_student_and_teacher(loss, gap, device):
    """One is certain of a class that the other excludes: unbounded divergences equal the gap, and stay finite."""
    z = torch.tensor([[gap, 0.0, 0.0], [0.0, gap, 0.0]], device=device)
    t = torch.tensor([[0.0, gap, 0.0], [0.0, gap, 0.0]], device=device)
    value, gradient = by_kernels(loss, z, t)
    exact, exact_gradient = by_autograd(loss, z.double(), t.double())
    assert torch.isfinite(value).all() and torch.isfinite(gradient).all()
    # A few chained hardware functions, each off by 2**-22; rows that are equal give about 0.
    assert torch.allclose(value.double(), exact, rtol=1e-5, atol=1e-7)
    assert torch.allclose(gradient.double(), exact_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.few(3)
@pytest.mark.triton
@pytest.mark.parametrize("loss", [LOSSES[name] for name in LOSSES if name not in ("kl", "kl-reverse")], ids=repr)
def test_excluded_columns(loss, device):
    """Columns of -inf, in one or both rows, have no probability and do not affect a bounded divergence."""
    z, t = torch.randn(2, 2, 40, generator=torch.Generator().manual_seed(0)).to(device)
    z[:, :4], t[:, 2:6] = -math.inf, -math.inf
    value, gradient = by_kernels(loss, z, t)
    exact, exact_gradient = by_autograd(loss, z.double().clamp(min=-1e3), t.double().clamp(min=-1e3))
    # As above; a gradient is also a difference of logarithms that cancel.
    assert torch.allclose(value.double(), exact, rtol=1e-5, atol=1e-7)
    assert torch.allclose(gradient.double(), exact_gradient, rtol=1e-4, atol=1e-7)


def _one_hot(column: int) -> Tensor:
    x = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))
    x[:, column] = 300.0
    return x


_NORMAL = torch.randn(2, 2, 3000, generator=torch.Generator().manual_seed(1))
ROWS_OF_16_BITS = {
    "independent": tuple(_NORMAL),
    "peaked": tuple(12 * _NORMAL),
    "near": (3 * _NORMAL[0], 3.03 * _NORMAL[0]),
    "certain": (_one_hot(3), _one_hot(7)),
    "large": tuple(1e4 + 100 * _NORMAL),
    "holes": tuple(_NORMAL.masked_fill(_NORMAL.abs() < 0.3, -math.inf)),
}


MIXTURES = {
    "jsd-0.05": LigerFusedLinearJSDLoss(beta=0.05),
    "jsd": LigerFusedLinearJSDLoss(),
    "jsd-0.95": LigerFusedLinearJSDLoss(beta=0.95),
    "kl-skew": LigerFusedLinearKLDivLoss(skew=0.3),
    "kl-skew-reverse": LigerFusedLinearKLDivLoss(skew=0.1, reverse=True),
}


@pytest.mark.few(4, "cpu-independent-kl-skew-reverse-bfloat16-1.0")
@pytest.mark.sampled(interpreted=True)
@pytest.mark.triton
@pytest.mark.parametrize(("dtype", "temperature"), [("bfloat16", 1.0), ("bfloat16", 0.6), ("float16", 3.0)])
@pytest.mark.parametrize("loss", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("rows", ROWS_OF_16_BITS.values(), ids=ROWS_OF_16_BITS)
def test_mixtures_of_16_bit_logits(rows, loss, dtype, temperature, device):
    """The second sweep of 16-bit logits computes mixtures in base 2."""
    z, t = (x.to(device, getattr(torch, dtype)) for x in rows)
    value, gradient = by_kernels(loss, z, t, temperature=temperature)
    exact_z, exact_t = (x.double().clamp(min=-1e5) / temperature for x in (z, t))
    exact, exact_gradient = by_autograd(loss, exact_z, exact_t)
    # The hardware's logarithm has a relative error of 2**-22, and the gap between log p and log q cancels.
    gap = (exact_z.log_softmax(1) - exact_t.log_softmax(1)).abs().max() / math.log(2)
    bound = 2**-22 * min(120.0, float(gap)) + 1e-6
    assert torch.allclose(value.double(), exact, rtol=0, atol=bound)
    # Rounded to 8 bits, or truncated by Triton's interpreter.
    assert torch.allclose(gradient.double(), exact_gradient / temperature, rtol=2**-7, atol=bound)


@pytest.mark.few(3)
@pytest.mark.sampled(interpreted=True)
@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@by_loss
def test_nan_makes_the_divergence_of_its_row_nan(loss, dtype, device):
    for side in range(2):
        rows = _NORMAL.to(device, dtype, copy=True)
        rows[side, 0, 5] = math.nan
        value, gradient = by_kernels(loss, *rows)
        assert value.isnan().tolist() == [True, False]
        assert not gradient[1].isnan().any()


@pytest.mark.few(2)
@pytest.mark.triton
@pytest.mark.parametrize("beta", [1e-6, 1e-3, 1 - 1e-3, 1 - 1e-6])
def test_jsd_near_its_ends_keeps_its_precision(beta, device):
    """The loss is of the order of beta (1 - beta), as is log(p / m) or log(q / m) in most entries."""
    batch = moved(students(SMALL, seed=0), torch.float32, device)
    loss = LigerFusedLinearJSDLoss(beta=beta, **SOFT)
    near = evaluate(lambda b: loss(**b)[0], batch)
    exact = evaluate(lambda b: loss(**b)[0], moved(batch, torch.float64))
    for name in exact:
        # The error is at most 6e-7 on a CPU. A beta rounded to float32 would put 1 - beta off by a hundredth.
        assert relative_error(near[name], exact[name]) < 1e-5, name


@pytest.mark.few(3)
@pytest.mark.sampled(interpreted=True)
@pytest.mark.triton
@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_rows_that_rise_after_their_first_block(loss, temperature, device):
    """One or both rows rise far above the maximum of their first block."""
    z, t = 2 * torch.randn(2, 3, 5000, generator=torch.Generator().manual_seed(0)).to(device)
    z[0, 4500:] += 100
    t[1, 4600:] += 100
    z[2, 3000:4000] += 40
    t[2, 3500:4500] += 40
    ours = by_kernels(loss, z, t, temperature=temperature)
    exact = by_autograd(loss, z.double() / temperature, t.double() / temperature)
    for value, expected in zip(ours, (exact[0], exact[1] / temperature), strict=True):
        # A logit of 100 rounds by up to 4e-6; a temperature of 0.3 turns that into 1.3e-5. Measured: 4e-6.
        assert relative_error(value, expected) < 1e-5


@pytest.mark.triton
def test_tail_keeps_its_precision(device):
    """The student is certain of the top-k: the tail needs a separate sum, because 1 - sum(p) would cancel."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)).to(device)
    logits[:, :3] += 40
    holes = logits.clone()
    holes[:, :3] = -math.inf
    for options in (LogitOptions(), LogitOptions(temperature=2.0), LogitOptions(softcap=3.0, logit_scale=-1.0)):
        z = options.logit_scale * logits[:, 3:].double()
        z = z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)
        exact = (z / options.temperature).logsumexp(1)
        stats = tail_stats(holes, options, hard=True)
        # A few units in the last place of float32; 1 - sum(p) would have no correct digits.
        assert torch.allclose(stats.centre / options.temperature + stats.log_sum, exact.float(), rtol=1e-6)
        gradient = tail_grad_(holes.clone(), stats, torch.ones_like(stats.centre), None, options)
        assert (gradient[:, :3] == 0).all()
        total = torch.autograd.functional.vjp(
            lambda x, o=options: ((o.logit_scale * x if o.softcap is None else o.softcap * torch.tanh(
                o.logit_scale * x / o.softcap)) / o.temperature).logsumexp(1).sum(),
            logits[:, 3:].double(),
        )[1]  # fmt: skip
        assert torch.allclose(gradient[:, 3:].double(), total, rtol=1e-5, atol=1e-9)
