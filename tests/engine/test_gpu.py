"""Test real sizes on a CUDA device: vocabularies beyond any block size, 64-bit offsets, allocator memory."""

from __future__ import annotations

from collections.abc import Callable

import eager
import pytest
import torch
from table import relative_error
from torch import Tensor

import liger_chunked as lc
from liger_chunked.kernels import LogitsCotangents, finish, logits_grad_, logits_stats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ordinary_memory,
]

MIB = 1 << 20
QWEN, LLAMA, GEMMA = 151936, 128256, 262144


@pytest.fixture(autouse=True)
def free_memory():
    yield
    torch.cuda.empty_cache()


def sample(tokens: int, hidden: int, vocab: int, dtype=torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Return a head, hidden states, and targets, a few of them ignored."""
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(vocab, hidden, generator=generator, device="cuda", dtype=dtype) * 2 * hidden**-0.5
    input = torch.randn(tokens, hidden, generator=generator, device="cuda", dtype=dtype)
    target = torch.randint(vocab, (tokens,), generator=generator, device="cuda")
    target[:: tokens // 7] = -100
    return weight, input, target


def gradients(loss: Callable[[Tensor, Tensor], Tensor], weight: Tensor, input: Tensor) -> tuple[Tensor, ...]:
    """Return the loss, dW and dX."""
    weight, input = weight.detach().requires_grad_(), input.detach().requires_grad_()
    value = loss(weight, input)
    return value.detach(), *torch.autograd.grad(value, (weight, input))


def test_under_another_default_device():
    """The count of targets is read through host memory, for any default device."""
    weight, input, target = sample(70, 64, 1000)
    loss = lc.LigerFusedLinearCrossEntropyLoss()(weight, input, target)
    with torch.device("cuda"):
        assert torch.equal(lc.LigerFusedLinearCrossEntropyLoss()(weight, input, target), loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("budget", [None, 200 * MIB], ids=["auto", "200MiB"])
@pytest.mark.parametrize("vocab", [QWEN, LLAMA, GEMMA, 151665], ids=str)
def test_error_at_real_vocabularies(vocab, budget, dtype):
    weight, input, target = sample(2048, 512, vocab, dtype)

    def exact(weight, input):
        return eager.cross_entropy(weight, input, target)

    def fused(weight, input):
        return lc.LigerFusedLinearCrossEntropyLoss(logits_budget=budget)(weight, input, target)

    def primitive(weight, input):
        logps = lc.linear_token_stats(weight, input, target, logits_budget=budget).logps
        return -logps.sum() / (target != -100).sum()

    def in_chunks(weight, input):
        # A product of fewer rows may sum its long inner dimension in another order: compare with eager code's error in
        # products of the same rows.
        rows = input.shape[0] if budget is None else budget // (vocab * input.element_size())
        parts = zip(input.split(rows), target.split(rows), strict=True)
        total = sum(eager.cross_entropy(weight, x, t, reduction="sum") for x, t in parts)
        return total / (target != -100).sum()

    expected = gradients(exact, weight.double(), input.double())
    whole = gradients(exact, weight, input)
    for ours, oracle in ((gradients(fused, weight, input), in_chunks), (gradients(primitive, weight, input), whole)):
        oracle = oracle if isinstance(oracle, tuple) else gradients(oracle, weight, input)
        for name, x, y, z in zip(("loss", "weight", "input"), ours, oracle, expected, strict=True):
            # A scalar is a single error: allow one unit in the last place of the logits, averaged over 2048 tokens, or
            # one of the loss's float32.
            floor = max(torch.finfo(dtype).eps / 2048**0.5, torch.finfo(torch.float32).eps) if name == "loss" else 0.0
            assert relative_error(x, z) <= max(1.1 * relative_error(y, z), floor), name


@pytest.mark.parametrize("vocab", [499, QWEN], ids=str)
def test_float32_kernels_round_as_eager_code_does(vocab):
    """Compare statistics and gradient of given logits, without products, with autograd of log_softmax."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 2 * torch.randn(2048, vocab, generator=generator, device="cuda")
    target = torch.randint(vocab, (2048,), generator=generator, device="cuda")

    def by_autograd(logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.detach().requires_grad_()
        logps = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
        return logps.detach(), torch.autograd.grad(logps.sum(), logits)[0]

    partial = logits_stats(logits, target, lc.LogitOptions(), ("logps",))
    logps = finish(partial, target, vocab, ("logps",)).logps
    cotangents = LogitsCotangents(partial.max, partial.sum_exp, logps=torch.ones_like(logps))
    gradient = logits_grad_(logits.clone(), target, cotangents, lc.LogitOptions(), vocab)
    eager, exact = by_autograd(logits), by_autograd(logits.double())
    for ours, naive, expected in zip((logps, gradient), eager, exact, strict=True):
        assert relative_error(ours, expected) <= 1.1 * relative_error(naive, expected)


@pytest.mark.parametrize("budget", [20000 * LLAMA * 2, 512 * MIB], ids=["one-tile-past-2**31", "512MiB"])
def test_offsets_past_31_bits(budget):
    """20000 x 128256 is 2.57e9 logits: the last rows of a tile have offsets beyond 32 bits."""
    weight, input, target = sample(20000, 128, LLAMA)
    part = slice(20000 - 500, 20000)
    _, dw, dx = gradients(
        lambda weight, input: lc.LigerFusedLinearCrossEntropyLoss(reduction="sum", logits_budget=budget)(
            weight, input, target
        ),
        weight,
        input,
    )
    last, _, expected = gradients(
        lambda weight, input: eager.cross_entropy(weight, input, target[part], reduction="sum"), weight, input[part]
    )
    assert relative_error(dx[part], expected.double()) < torch.finfo(torch.bfloat16).eps
    assert dw.isfinite().all()
    with torch.no_grad():
        stats = lc.linear_token_stats(weight, input, target, logits_budget=budget)
    # Sums of 500 log-probabilities from logits that other products rounded to bfloat16.
    assert -stats.logps[part].sum().item() == pytest.approx(last.item(), rel=1e-4)


@pytest.mark.parametrize("budget", [None, 12 * GEMMA * 2], ids=["auto", "slices"])
def test_weights_past_31_bits(budget):
    """262144 x 8200 is 2.15e9 weights: the last rows of the head and of its gradient have offsets beyond 32 bits."""
    hidden = 8200
    assert GEMMA * hidden > 2**31
    weight, input, target = sample(21, hidden, GEMMA)
    target[:7] = torch.arange(GEMMA - 7, GEMMA, device="cuda")
    last = slice(GEMMA - 2048, GEMMA)
    with torch.no_grad():
        log_p = (input @ weight.t()).float().log_softmax(-1)
        valid = target != -100
        naive = -log_p.gather(1, target.clamp(min=0)[:, None])[valid].mean()
        g = log_p.exp().scatter_add_(1, target.clamp(min=0)[:, None], -torch.ones_like(log_p[:, :1]))
        g = g.mul_(valid[:, None]) / valid.sum()
    for loss in (
        lambda w, x: lc.LigerFusedLinearCrossEntropyLoss(logits_budget=budget)(w, x, target),
        lambda w, x: -lc.linear_token_stats(w, x, target, logits_budget=budget).logps.sum() / valid.sum(),
    ):
        value, dw, dx = gradients(loss, weight, input)
        assert value.item() == pytest.approx(naive.item(), rel=1e-3)  # logits rounded to bfloat16
        # Both round logits and gradient to bfloat16.
        assert relative_error(dw[last], g[:, last].double().t() @ input.double()) < torch.finfo(torch.bfloat16).eps
        assert relative_error(dx, (g @ weight.float()).double()) < torch.finfo(torch.bfloat16).eps
        del dw, dx


def test_more_rows_than_a_launch_grid_is_wide():
    weight, input, target = sample(70000, 64, 1009)
    ours = gradients(lambda w, x: lc.LigerFusedLinearCrossEntropyLoss()(w, x, target), weight, input)
    naive = gradients(lambda w, x: eager.cross_entropy(w, x, target), weight, input)
    exact = gradients(lambda w, x: eager.cross_entropy(w, x, target), weight.double(), input.double())
    for x, y, z in zip(ours[1:], naive[1:], exact[1:], strict=True):
        assert relative_error(x, z) <= 1.1 * relative_error(y, z)


@pytest.mark.parametrize("budget", [None, 300 * MIB], ids=["auto", "300MiB"])
def test_bitwise_repeatable_at_size(budget):
    weight, input, target = sample(8192, 1024, QWEN)

    def loss(weight, input):
        return lc.LigerFusedLinearCrossEntropyLoss(logits_budget=budget)(weight, input, target)

    def dpo(weight, input):
        shape = (4, 2048)
        return lc.LigerFusedLinearDPOLoss(use_ref_model=False, logits_budget=budget)(
            weight, input.view(*shape, -1), target.view(shape)
        )[0]

    def statistics(weight, input):
        stats = lc.linear_token_stats(weight, input, target, outputs=("logps", "entropy"), logits_budget=budget)
        return (stats.logps * stats.entropy).mean()

    for function in (loss, dpo, statistics):
        for first, second in zip(gradients(function, weight, input), gradients(function, weight, input), strict=True):
            assert torch.equal(first, second)
