"""Test that the target's log-probability comes from an unrounded logit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from liger_chunked import LogitOptions, linear_token_stats
from liger_chunked.kernels import (
    ExactTarget,
    backend,
    logits_stats,
    row_stats,
    row_stats_are_exact,
    unround_logps_,
)
from liger_chunked.kernels.transform import transform
from liger_chunked.types import LossHead

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "scaled": {"logit_scale": 0.3, "temperature": 0.7},
    "softcap-temperature": {"softcap": 8.0, "logit_scale": 2.0, "temperature": 1.5},
}


def head_of(vocab: int, hidden: int, dtype: torch.dtype, device: str, bias: bool = False, seed: int = 0) -> LossHead:
    generator = torch.Generator().manual_seed(seed)
    weight = hidden**-0.5 * torch.randn(vocab, hidden, generator=generator)
    b = torch.randn(vocab, generator=generator).to(device, dtype) if bias else None
    return LossHead(weight.to(device, dtype), b)


def states(n: int, hidden: int, dtype: torch.dtype, device: str, seed: int = 1) -> Tensor:
    return torch.randn(n, hidden, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def exact_logps(x: Tensor, head: LossHead, target: Tensor, options: LogitOptions) -> Tensor:
    z = x.double() @ head.weight.double().t()
    z = z if head.bias is None else z + head.bias.double()
    z = transform(z, options.logit_scale, options.softcap, options.temperature)
    return z.log_softmax(-1).gather(1, target[:, None])[:, 0]


def rounded(x: Tensor, head: LossHead, target: Tensor, options: LogitOptions):
    """Return logits in the dtype of `x`, their statistics, and the target's log-probability."""
    z = x @ head.weight.t() if head.bias is None else torch.addmm(head.bias, x, head.weight.t())
    stats = logits_stats(z, target, options, ("logps",))
    return z, stats, (stats.target_logit - stats.max) - stats.sum_exp.log()


@pytest.mark.few(3)
@pytest.mark.sampled(interpreted=True)
@pytest.mark.triton
@HALVES
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("hidden", [24, 1100])
def test_error(hidden, options, bias, dtype, device):
    """The remaining error is that of the sum over the vocabulary, where single logits hardly count."""
    options = LogitOptions(**options)
    head, x = head_of(2000, hidden, dtype, device, bias), states(33, hidden, dtype, device)
    target = torch.arange(33, device=device) * 60
    _, stats, logps = rounded(x, head, target, options)
    exact = exact_logps(x, head, target, options)
    before = (logps - exact).norm()
    unround_logps_(logps, x, head, target, stats.max, stats.sum_exp, options)
    assert (logps - exact).norm() < 0.3 * before, f"{(logps - exact).norm():.2e}, rounded {before:.2e}"


@pytest.mark.few(4)
@pytest.mark.sampled(interpreted=True)
@pytest.mark.triton
@HALVES
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_at_once_with_the_statistics(options, bias, dtype, device):
    """One launch that reduces rows and corrects them gives the bits of two."""
    options, outputs = LogitOptions(**options), ("logps", "entropy", "mean_logits")
    head, x = head_of(300, 72, dtype, device, bias), states(17, 72, dtype, device)
    target = torch.arange(17, device=device) * 17
    z, *_ = rounded(x, head, target, options)
    if not row_stats_are_exact(z, outputs, x, head.weight):
        pytest.skip("no torch path: runs with TRITON_INTERPRET=1")
    partial, expected = row_stats(z, target, options, outputs)
    before = expected.logps.clone()
    scale = unround_logps_(expected.logps, x, head, target, partial.max, partial.sum_exp, options)
    exact = ExactTarget(x, head.weight, head.bias, torch.empty_like(scale))
    _, stats = row_stats(z, target, options, outputs, exact=exact)
    assert not torch.equal(before, stats.logps)
    assert torch.equal(exact.grad_scale, scale)
    for name in outputs:
        assert torch.equal(getattr(stats, name), getattr(expected, name)), name


@pytest.mark.few(1)
@pytest.mark.triton
@HALVES
def test_certain_targets(dtype, device):
    """Probabilities near 1 stay below 1, and match the exact logit with the other logits unchanged."""
    head, n = head_of(300, 64, dtype, device), 40
    target = torch.arange(n, device=device)
    rows = head.weight[target].float()
    scale = torch.linspace(0.5, 12, n, device=device)[:, None]
    x = (scale * rows / rows.norm(dim=1, keepdim=True) * 4).to(dtype)
    options = LogitOptions()
    z, stats, logps = rounded(x, head, target, options)
    left = -torch.expm1(z.double().log_softmax(-1).gather(1, target[:, None])[:, 0])
    z = z.double()
    z[torch.arange(n), target] = (x.double() * head.weight[target].double()).sum(1)
    expected = z.log_softmax(-1).gather(1, target[:, None])[:, 0]
    others = unround_logps_(logps, x, head, target, stats.max, stats.sum_exp, options)
    assert (logps <= 0).all()
    # The rounded probability is float32, so its distance to 1 is known to 1e-7.
    torch.testing.assert_close(logps.double(), expected, rtol=2e-4, atol=4e-7)
    known = left > 1e-3  # an error of 1e-7 is then 1e-4, and a quotient has it twice
    assert known.any()
    torch.testing.assert_close(others[known].double(), (-torch.expm1(expected) / left)[known], rtol=3e-4, atol=0)


@pytest.mark.few(4)
@pytest.mark.triton
@pytest.mark.parametrize("logp", [-30.0, -1.0, -0.0301, -0.0299, -1e-3, -1e-6])
def test_left_to_others(logp, device):
    """The result is accurate near 1 too, if one logit moves by ±1 and the others stay."""
    weight = torch.tensor([[1.0], [-1.0]], dtype=torch.bfloat16, device=device)
    x = torch.ones(2, 1, dtype=torch.bfloat16, device=device)
    target = torch.tensor([0, 1], device=device)
    # The statistics imply a target logit of 0.
    logps = torch.full((2,), logp, device=device)
    maximum, sum_exp = torch.full_like(logps, -logp), torch.ones_like(logps)
    others = unround_logps_(logps, x, LossHead(weight), target, maximum, sum_exp, LogitOptions())
    p = torch.full((2,), logp, device=device).double()
    odds = p - torch.log(-torch.expm1(p)) + torch.tensor([1.0, -1.0], device=device)
    exact = torch.nn.functional.logsigmoid(odds)
    # float32 odds of up to 30 are 2e-6 apart, and the quotient has their error twice.
    torch.testing.assert_close(logps.double(), exact, rtol=2e-6, atol=0)
    torch.testing.assert_close(others.double(), torch.expm1(exact) / torch.expm1(p), rtol=4e-6, atol=0)


@pytest.mark.few(1)
@pytest.mark.triton
@HALVES
def test_coarse_logits_stay(dtype, device):
    """Errors of logits in the thousands are correlated within a row: correcting only the target's would add error."""
    n = 100 if backend.INTERPRETED else 400
    head, x = head_of(2000, 24, dtype, device), states(n, 24, dtype, device)
    target = torch.arange(n, device=device) * (2000 // n)
    head.weight[:, 0], x[:, 0] = 1000.0, -10.0
    _, stats, logps = rounded(x, head, target, LogitOptions())
    exact = exact_logps(x, head, target, LogitOptions())
    before = (logps - exact).norm()
    others = unround_logps_(logps, x, head, target, stats.max, stats.sum_exp, LogitOptions())
    assert (logps - exact).norm() < 1.1 * before, f"{(logps - exact).norm():.2e}, rounded {before:.2e}"
    assert others.isfinite().all()


@pytest.mark.triton
def test_what_is_no_number_stays(device):
    head, x = head_of(50, 16, torch.bfloat16, device), states(4, 16, torch.bfloat16, device)
    target = torch.tensor([3, 7, 3, 7], device=device)
    given = torch.tensor([-math.inf, math.nan, -2.0, 0.0], device=device)
    logps, maximum, sum_exp = given.clone(), torch.zeros(4, device=device), torch.ones(4, device=device)
    others = unround_logps_(logps, x, head, target, maximum, sum_exp, LogitOptions())
    assert logps[0] == -math.inf and logps[1].isnan()
    assert logps[2].isfinite() and logps[3] == 0
    assert others.isfinite().all() and (others[[0, 1, 3]] == 1).all()


@pytest.mark.triton
def test_layouts(device):
    """Rows of a wider tensor, a transposed head, column-major hidden states, a strided bias, no rows."""
    head, x = head_of(90, 32, torch.bfloat16, device, bias=True), states(12, 32, torch.bfloat16, device)
    target = torch.arange(12, device=device) * 7
    options = LogitOptions()
    _, stats, logps = rounded(x, head, target, options)

    def moved(x: Tensor, head: LossHead, rows: slice = slice(None)) -> Tensor:
        result = logps[rows].clone()
        unround_logps_(result, x[rows], head, target[rows], stats.max[rows], stats.sum_exp[rows], options)
        return result

    expected = moved(x, head)
    assert not torch.equal(expected, logps)
    wide = torch.cat([x, x], 1)[:, :32]
    transposed = LossHead(head.weight.t().contiguous().t(), head.bias)
    assert torch.equal(moved(wide, head), expected)
    torch.testing.assert_close(moved(x, transposed), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(moved(x.t().contiguous().t(), head), expected, rtol=0, atol=2e-6)
    gaps = torch.stack([head.bias, head.bias + 1], 1)[:, 0]
    assert torch.equal(moved(x, LossHead(head.weight, gaps)), expected)
    assert moved(x, head, slice(0, 0)).shape == (0,)


@pytest.mark.few(2)
@pytest.mark.parametrize("tiles", [None, 2 * 200 * 500], ids=["rows", "slices"])
@pytest.mark.parametrize("confidence", [0.5, 0.99, 0.999, 1 - 1e-5])
@pytest.mark.parametrize("loss", ["cross entropy", "odds"])
def test_gradient_of_certain_targets(loss, confidence, tiles, device):
    """ORPO divides by 1 - p, and the gradient of log p multiplies by it: both must use the same p."""
    generator = torch.Generator().manual_seed(0)
    n, hidden, vocab = 200, 64, 500
    weight = torch.randn(vocab, hidden, generator=generator)
    target = torch.randint(vocab, (n,), generator=generator)
    rows = weight[target]
    x = 0.3 * torch.randn(n, hidden, generator=generator)
    z = x @ weight.t()
    others = z.scatter(1, target[:, None], -math.inf).logsumexp(1)
    wanted = others + math.log(confidence / (1 - confidence))
    x += ((wanted - z.gather(1, target[:, None])[:, 0]) / rows.square().sum(1))[:, None] * rows

    def objective(logps: Tensor) -> Tensor:
        return -logps.mean() if loss == "cross entropy" else -(logps - torch.log(-torch.expm1(logps))).mean()

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        z = x @ weight.t()
        z = z if z.dtype == torch.float64 else z.float()
        return objective(z.log_softmax(-1).gather(1, target.to(z.device)[:, None])[:, 0])

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return objective(linear_token_stats(weight, x, target.to(x.device), logits_budget=tiles).logps)

    def gradients(function, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [a.to(device, torch.bfloat16).to(dtype).requires_grad_() for a in (x, weight)]
        return tuple(g.double() for g in torch.autograd.grad(function(*leaves), leaves))

    exact, of_eager, of_ours = gradients(eager, torch.float64), *(gradients(f, torch.bfloat16) for f in (eager, ours))
    for g, by_eager, by_ours in zip(exact, of_eager, of_ours, strict=True):
        error, bound = ((a - g).norm() / g.norm() for a in (by_ours, by_eager))
        # The target's logit cancels in the gradient of odds, which leaves a softmax over the others.
        assert error <= (0.85 if loss == "cross entropy" else 1.02) * bound, f"{error:.1e}, eager {bound:.1e}"
