"""Test float16 gradients of tokens that differ by many orders of magnitude, in one chunk and in several."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import eager
import pytest
import torch
import torch.nn.functional as F
from spies import noted
from table import relative_error
from torch import Tensor

import liger_chunked as lc
from liger_chunked.engine import cutting
from liger_chunked.engine.divergences import ClosedForm
from liger_chunked.engine.step import Step
from liger_chunked.kernels import slopes_of_stats
from liger_chunked.types import DIFFERENTIABLE, Divergence

VOCAB, HIDDEN, SEQUENCES, TOKENS = 97, 16, 4, 6
ONE_SEQUENCE = TOKENS * VOCAB * 2  # bytes of its logits
UPSTREAM = 1024.0

Run = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]


def saturated_pair(w: Tensor, x: Tensor, y: Tensor, budget: int | None) -> Tensor:
    """Return a batch in which the first pair's gradient is 1e-7 of the second's."""
    ref = logps(w, x, y)
    ref[0] -= 160
    return lc.LigerFusedLinearDPOLoss(beta=0.1, logits_budget=budget and 2 * budget)(w, x, y, ref_logps=ref)[0]


def saturated_sequence(w: Tensor, x: Tensor, y: Tensor, budget: int | None) -> Tensor:
    ref = logps(w, x, y)
    ref[0] -= 160
    labels = torch.tensor([True, False, True, False], device=x.device)
    return lc.LigerFusedLinearKTOLoss(logits_budget=budget)(w, x, y, labels, ref_logps=ref, kl=0.0)[0]


def advantages(*values: float) -> Run:
    def run(w: Tensor, x: Tensor, y: Tensor, budget: int | None) -> Tensor:
        given = torch.tensor(values, device=x.device, dtype=torch.float32)
        loss = lc.LigerFusedLinearGRPOLoss(reduction="dapo", logits_budget=budget)
        return loss(w, x, y, advantages=given, num_items=65536)[0]

    return run


def token_weights(w: Tensor, x: Tensor, y: Tensor, budget: int | None) -> Tensor:
    weights = torch.ones(y.shape, device=x.device)
    weights[0] = 1e-7
    loss = lc.LigerFusedLinearCrossEntropyLoss(reduction="sum", logits_budget=budget)
    return loss(w, x, y, token_weights=weights)


def logps(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        log_p = (x.double() @ w.double().t()).log_softmax(-1)
        return log_p.gather(-1, y[..., None])[..., 0].sum(1).float()


RUNS = {
    "dpo": saturated_pair,
    "kto": saturated_sequence,
    "grpo-rising": advantages(1e-6, 1.0, -1.0, 0.5),
    "grpo-none-first": advantages(0.0, 1.0, -1.0, 0.5),
    "grpo-falling": advantages(1.0, 0.5, 1e-6, 0.0),
    "grpo-none": advantages(0.0, 0.0, 0.0, 0.0),
    "cross-entropy": token_weights,
}


def gradients(run: Run, dtype: torch.dtype, budget: int | None, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(VOCAB, HIDDEN, generator=generator).half().to(device, dtype).requires_grad_()
    x = torch.randn(SEQUENCES, TOKENS, HIDDEN, generator=generator).half().to(device, dtype).requires_grad_()
    y = torch.randint(VOCAB, (SEQUENCES, TOKENS), generator=generator).to(device)
    (run(w, x, y, budget) * UPSTREAM).backward()
    return [w.grad.double(), x.grad.double()]


@pytest.mark.few(3, "cpu-grpo-falling-packs")
@pytest.mark.sampled(interpreted=True)
@pytest.mark.triton
@pytest.mark.parametrize("budget", [ONE_SEQUENCE, None], ids=["packs", "one"])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_chunks(run, budget, device):
    exact = gradients(run, torch.float64, None, device)
    ours = gradients(run, torch.float16, budget, device)
    for a, b in zip(ours, exact, strict=True):
        assert a.isfinite().all()
        assert (a - b).norm() <= 3e-3 * b.norm()


# Under a loss scale

# Of so large a vocabulary probabilities are 1e-4: their gradients underflow in float16 if the token's weight is small.
LARGE_VOCAB, MANY_TOKENS = 4099, 64
# Of a mean over tokens. Every other token is small, so that each chunk and each tile has both kinds.
WEIGHTS = torch.tensor([1.0, 1e-4]).repeat(MANY_TOKENS // 2) / MANY_TOKENS


class Given(NamedTuple):
    weight: Tensor
    input: Tensor
    target: Tensor
    teacher_weight: Tensor
    teacher_input: Tensor

    @classmethod
    def draw(cls, dtype: torch.dtype, device: str, vocab: int = LARGE_VOCAB, n: int = MANY_TOKENS) -> Given:
        generator = torch.Generator().manual_seed(0)
        shapes = (vocab, HIDDEN), (n, HIDDEN), (vocab, HIDDEN), (n, HIDDEN)
        weight, input, *teacher = (torch.randn(s, generator=generator).half().to(device, dtype) for s in shapes)
        target = torch.randint(vocab, (n,), generator=generator).to(device)
        return cls(weight.requires_grad_(), input.requires_grad_(), target, *teacher)

    @property
    def logits(self) -> tuple[Tensor, Tensor]:
        """Return logits of eager code, which rounds them to float16 once."""
        z, t = self.input @ self.weight.T, self.teacher_input @ self.teacher_weight.T
        return (z.float(), t.float()) if z.dtype == torch.float16 else (z, t)


class SquaredLogRatios(lc.LigerFusedLinearDistillationBase):
    """Has no closed form."""

    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        difference = student_logits.log_softmax(-1) - teacher_logits.log_softmax(-1)
        return (teacher_logits.softmax(-1) * difference.square()).sum(-1)


def weighed(values: Tensor) -> Tensor:
    return (values * WEIGHTS.to(values)).sum()


def nll(given: Given) -> Tensor:
    return weighed(F.cross_entropy(given.logits[0], given.target, reduction="none"))


def cross_entropy(given: Given, budget: int | None) -> Tensor:
    """Return a loss whose gradient comes in the forward, which knows no loss scale."""
    loss = lc.LigerFusedLinearCrossEntropyLoss(reduction="sum", logits_budget=budget)
    return loss(*given[:3], token_weights=WEIGHTS.to(given.input.device))


def statistics(given: Given, budget: int | None) -> Tensor:
    return weighed(-lc.linear_token_stats(*given[:3], logits_budget=budget).logps)


def entropies(given: Given, budget: int | None) -> Tensor:
    stats = lc.linear_token_stats(*given[:3], outputs=("logps", "entropy"), logits_budget=budget)
    return weighed(stats.logps + stats.entropy)


def eager_entropies(given: Given) -> Tensor:
    log_p = given.logits[0].log_softmax(-1)
    return weighed(log_p.gather(-1, given.target[:, None])[:, 0] - (log_p.exp() * log_p).sum(-1))


LOSSES = {"cross-entropy": (cross_entropy, nll), "logps": (statistics, nll), "entropy": (entropies, eager_entropies)}
DIVERGENCES = {
    "forward-kl": lc.LigerFusedLinearKLDivLoss,
    "reverse-kl": partial(lc.LigerFusedLinearKLDivLoss, reverse=True),
    "jsd": partial(lc.LigerFusedLinearJSDLoss, beta=0.3),
    "tvd": lc.LigerFusedLinearTVDLoss,
    "cosine": lc.LigerFusedLinearCosineSimilarityLoss,
    "own": SquaredLogRatios,
}


def of_tokens(name: str, given: Given, budget: int | None = None) -> Tensor:
    """Return divergences of tokens, whose gradients come in the backward."""
    loss = DIVERGENCES[name](weight_hard_loss=0.0, weight_soft_loss=1.0, reduction="none", logits_budget=budget)
    return loss(given.weight, given.input, given.teacher_weight, given.teacher_input)[0]


def divergence(name: str, given: Given, budget: int | None) -> Tensor:
    return weighed(of_tokens(name, given, budget))


def eager_divergence(name: str, given: Given) -> Tensor:
    return weighed(DIVERGENCES[name]().divergence(*given.logits))


LOSSES |= {name: (partial(divergence, name), partial(eager_divergence, name)) for name in DIVERGENCES}


@pytest.mark.sampled(interpreted=True)
@pytest.mark.triton
@pytest.mark.filterwarnings("ignore:logits_budget=")  # 128 pieces
@pytest.mark.parametrize("tokens_in_budget", [None, 24, 1], ids=["one", "chunks", "slices"])
@pytest.mark.parametrize("scale", [1.0, 2.0**12, 2.0**16])
@pytest.mark.parametrize("name", LOSSES)
def test_small_tokens_beside_large_ones(name, scale, tokens_in_budget, device):
    """The error of each kind of token is that of eager code at the same loss scale."""
    ours, eager = LOSSES[name]
    small, found = (WEIGHTS < 1e-4).to(device), {}
    budget = tokens_in_budget and tokens_in_budget * LARGE_VOCAB * 2
    for path, dtype in (("exact", torch.float64), ("eager", torch.float16), ("ours", torch.float16)):
        given = Given.draw(dtype, device)
        loss = ours(given, budget) if path == "ours" else eager(given)
        (loss * scale).backward()
        dx = given.input.grad
        found[path] = {"weight": given.weight.grad, "small": dx[small], "large": dx[~small]}
    for part, exact in found["exact"].items():
        bound = max(torch.finfo(torch.float16).eps, 1.1 * relative_error(found["eager"][part], exact))
        assert relative_error(found["ours"][part], exact) <= bound, part


@pytest.mark.triton
@pytest.mark.parametrize("name", DIVERGENCES)
def test_upstream_gradients_that_grow_within_a_chunk(name, device, monkeypatch):
    """The teacher's tiles of a chunk share a unit, although only the last tile has the largest gradients."""
    monkeypatch.setattr(cutting, "TEACHER_VOCAB", 1)
    monkeypatch.setattr(cutting, "FEWEST_TEACHER_TOKENS", 1)
    tiles = noted(monkeypatch, Step, "run", lambda step, *_: min(map(len, step.plan.tiles)))
    vocab, n = 499, 96
    upstream = torch.where(torch.arange(n) < 80, 0.25, 1.0).to(device)
    given, exact = (Given.draw(dtype, device, vocab, n) for dtype in (torch.float16, torch.float64))
    (of_tokens(name, given, 32 * vocab * (36 if name == "own" else 4)) * upstream).sum().backward()
    (DIVERGENCES[name]().divergence(*exact.logits) * upstream).sum().backward()
    assert min(tiles) > 1
    for ours, right in ((given.input.grad, exact.input.grad), (given.weight.grad, exact.weight.grad)):
        assert relative_error(ours, right) < 1e-2


# Bounds

OPTIONS = {
    "plain": lc.LogitOptions(),
    "transform": lc.LogitOptions(softcap=3.0, logit_scale=-1.7, temperature=0.4),
    "hot": lc.LogitOptions(temperature=2.5),
}
# With bounds that follow from their formulas.
BOUNDED = {
    "forward_kl": Divergence("forward_kl"),
    "tvd": Divergence("tvd"),
    **{f"jsd-{beta}": Divergence.jensen_shannon(beta) for beta in (0.01, 0.5, 0.99)},
    "mixture": Divergence("mixture", beta=0.3, on_student=1.0),
}


@pytest.mark.parametrize("vocab", [2, 97, 4099])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_slopes_bound_gradients_by_logits(options, vocab):
    """Of flat, peaked and equal logits, so that a float16 gradient at the top of its range does not overflow."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([0.0, 0.1, 1.0, 5.0, 50.0], dtype=torch.float64).repeat_interleave(8)[:, None]
    z, t = (spread * torch.randn(len(spread), vocab, generator=generator, dtype=torch.float64) for _ in range(2))
    z[8, 1:], t[9, 1:] = z[8, 0] - 2.0, t[9, 0] - 2.0  # one id, and others that are equally likely
    y, z = torch.randint(vocab, (len(spread),), generator=generator), z.requires_grad_()
    transform = {"softcap": options.softcap, "logit_scale": options.logit_scale, "temperature": options.temperature}
    stats = eager.token_stats(torch.eye(vocab, dtype=torch.float64), z, y, outputs=DIFFERENTIABLE, **transform)
    for name, slope in slopes_of_stats(options, vocab).items():
        if name in stats:
            (grad,) = torch.autograd.grad(stats[name].sum(), z, retain_graph=True)
            assert grad.abs().max() <= slope * (1 + 1e-12), name
    for name, closed_form in BOUNDED.items():
        route = ClosedForm(closed_form, options, options)
        for g in ((1.0, 0.0), (0.0, 1.0)):
            of_divergence, of_logps = (torch.full((len(spread),), x, dtype=torch.float64) for x in g)
            dz = z.detach().clone()
            route.measure(dz, t, y, slice(0, len(spread)), True).backward(of_divergence, of_logps)
            assert dz.abs().max() <= route.slopes()["divergence" if g[0] else "logps"] * (1 + 1e-12), (name, g)
