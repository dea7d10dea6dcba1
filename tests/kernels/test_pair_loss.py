"""Losses of pairs whose gradient a kernel knows: values and gradients are those of autograd on the same formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from liger_chunked import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearSimPOLoss,
)
from liger_chunked.calls import altered
from liger_chunked.engine import PairLoss, objective, pairs
from liger_chunked.kernels import PairSums, backend, nll, nll_has_kernel, pair_loss
from liger_chunked.losses.dpo import LOSS_TYPES
from liger_chunked.types import DeclaredStats, Pairs

pytestmark = pytest.mark.triton

SMOOTHED = ("sigmoid", "robust")
LOSSES: dict[str, LigerFusedLinearPreferenceBase] = {
    **{name: LigerFusedLinearDPOLoss(loss_type=name, beta=0.3) for name, kind in LOSS_TYPES.items() if kind.terms},
    **{f"{name}-smoothed": LigerFusedLinearDPOLoss(loss_type=name, label_smoothing=0.1, beta=0.3) for name in SMOOTHED},
    "several": LigerFusedLinearDPOLoss(loss_type=["sigmoid", "nca_pair"], loss_weights=[1.0, 0.3]),
    "mean": LigerFusedLinearDPOLoss(average_log_prob=True, beta=2.0),
    "nll": LigerFusedLinearDPOLoss(compute_nll_loss=True, alpha=0.7),
    **{
        f"cpo-{name}": LigerFusedLinearCPOLoss(loss_type=name, **options)
        for name, options in {"sigmoid": {"label_smoothing": 0.1}, "hinge": {}, "ipo": {}, "simpo": {}}.items()
    },
    "simpo": LigerFusedLinearSimPOLoss(beta=2.0, label_smoothing=0.1),
    "orpo": LigerFusedLinearORPOLoss(beta=0.3),
    "simpo-hinge": LigerFusedLinearSimPOLoss(beta=2.0, loss_type="hinge"),
}
# Of one token each: equal ones, margins near a kink or a threshold, and margins whose exponentials over- or underflow.
MARGINS = (0.0, 1e-6, -1e-6, 10 / 3, 1.0, -1.0, 39.0, -41.0, 130.0, -140.0, 3000.0, -3000.0)


def needs_kernels(device: str) -> None:
    if device == "cpu" and not backend.INTERPRETED:
        pytest.skip("no torch path: runs with TRITON_INTERPRET=1")


def by_autograd(
    loss: LigerFusedLinearPreferenceBase, logps: Tensor, counts: Tensor, reference: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the loss, float64, and its gradient by the tokens' log-probabilities, from the loss's own formula."""
    n, x = counts.shape[0] // 2, logps.double().requires_grad_()
    parts, lengths = x.split(counts.tolist()), counts.clamp(min=1).view(2, n).t()

    def of_sequences(parts: tuple[Tensor, ...]) -> Tensor:
        sums = torch.stack([part.sum() for part in parts]).view(2, n).t()
        return sums / lengths if loss.average_log_prob else sums

    ref_logps = torch.zeros(n, 2, dtype=torch.float64, device=logps.device)
    if reference is not None:
        ref_logps = of_sequences(reference.double().split(counts.tolist()))
    given = Pairs(of_sequences(parts), ref_logps, lengths, torch.empty(0), DeclaredStats(), n, counts.view(2, n).sum(1))
    losses = torch.where(counts.view(2, n).sum(0) > 0, loss.preference_loss(given), 0.0)
    total = losses.mean()
    if loss.compute_nll_loss:
        total = total - loss.alpha * torch.cat(parts[:n]).sum() / counts[:n].sum()
    return total.detach(), torch.autograd.grad(total, x)[0]


def by_kernel(
    loss: LigerFusedLinearPreferenceBase, logps: Tensor, counts: Tensor, reference: Tensor | None
) -> tuple[Tensor, Tensor, PairSums]:
    terms = loss._terms_of_step()
    assert terms is not None
    spec = PairLoss(terms, loss.beta, loss.alpha if loss.compute_nll_loss else None, loss.average_log_prob)
    n = counts.shape[0] // 2
    sums = PairSums.of(n, logps.device)
    share, rounded, gradient = pair_loss(
        spec, sums, logps, logps,
        token_counts=counts, pairs=slice(0, n), stacked=True, reference=reference, with_gradient=True,
    )  # fmt: skip
    assert gradient is not None
    torch.testing.assert_close(rounded, share.float(), rtol=0, atol=0, equal_nan=True)
    return share, gradient, sums


def check(loss: LigerFusedLinearPreferenceBase, logps: Tensor, counts: Tensor, reference: Tensor | None) -> None:
    expected, gradient = by_autograd(loss, logps, counts, reference)
    value, found, _ = by_kernel(loss, logps, counts, reference)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    # The kernel computes the gradient in float64 too, and rounds it once. Autograd's slope of a sigmoid near 1 is off
    # by 1e-16, because it subtracts the sigmoid from 1.
    torch.testing.assert_close(found.double(), gradient, rtol=2**-23, atol=1e-16)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_random_pairs(loss: LigerFusedLinearPreferenceBase, device: str) -> None:
    """Also a pair with one empty sequence, a pair without tokens, and a sequence longer than the kernel's block."""
    needs_kernels(device)
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([5, 0, 1100, 3, 0, 7, 2, 9, 4, 0], device=device)
    n_tokens = int(counts.sum())
    logps, reference = (-3 * torch.rand(n_tokens, generator=generator).to(device) for _ in range(2))
    check(loss, logps, counts, reference if loss._expects_reference else None)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_extreme_pairs(loss: LigerFusedLinearPreferenceBase, device: str) -> None:
    needs_kernels(device)
    n = len(MARGINS)
    chosen = torch.tensor([min(m, 0.0) for m in MARGINS])
    rejected = torch.tensor([min(-m, 0.0) for m in MARGINS])
    counts = torch.ones(2 * n, dtype=torch.int64, device=device)
    for i in range(n):  # one by one: the largest loss would hide the others
        one = torch.stack([chosen[i], rejected[i]]).to(device)
        check(loss, one, counts[:2], None)


def test_impossible_and_undefined_tokens(device: str) -> None:
    """Infinities and NaN come out as from torch."""
    needs_kernels(device)
    counts = torch.ones(2, dtype=torch.int64, device=device)
    for name in ("sigmoid", "hinge", "nca_pair", "apo_zero"):
        for values in ((-torch.inf, -1.0), (-1.0, -torch.inf), (torch.nan, -1.0)):
            logps = torch.tensor(values, device=device)
            expected, gradient = by_autograd(LOSSES[name], logps, counts, None)
            value, found, _ = by_kernel(LOSSES[name], logps, counts, None)
            torch.testing.assert_close(value, expected, equal_nan=True)
            torch.testing.assert_close(found.double(), gradient, equal_nan=True)


def test_pairs_of_no_kernel() -> None:
    """A formula of a class's own, and options that the kernel does not know, are differentiated by autograd."""

    class Own(LigerFusedLinearDPOLoss):
        def preference_loss(self, pairs: Pairs) -> Tensor:
            return pairs.logps[:, 1] - pairs.logps[:, 0]

    class OwnReward(LigerFusedLinearSimPOLoss):
        def reward(self, logratios: Tensor) -> Tensor:
            return 2 * logratios

    class Mixin:
        def preference_loss(self, pairs: Pairs) -> Tensor:
            return pairs.logps[:, 1] - pairs.logps[:, 0]

    class Mixed(Mixin, LigerFusedLinearDPOLoss):
        pass

    class Named(LigerFusedLinearDPOLoss):
        pass

    patched: Any = LigerFusedLinearDPOLoss()
    patched.preference_loss = lambda pairs: pairs.logps[:, 1]
    with_reward: Any = LigerFusedLinearSimPOLoss()
    with_reward.reward = lambda logratios: 2 * logratios
    trained: list[Any] = [LigerFusedLinearDPOLoss(), LigerFusedLinearDPOLoss(), LigerFusedLinearSimPOLoss()]
    for i, name in enumerate(("beta", "alpha", "gamma")):
        trained[i] = altered(trained[i], **{name: torch.nn.Parameter(torch.tensor(0.1))})
    for loss in (
        Own(),
        OwnReward(),
        Mixed(),
        patched,
        with_reward,
        *trained,
        LigerFusedLinearDPOLoss(ld_alpha=0.5),
        LigerFusedLinearDPOLoss(use_weighting=True),
        LigerFusedLinearDPOLoss(f_divergence_type="forward_kl"),
        LigerFusedLinearDPOLoss(loss_type="aot"),
        LigerFusedLinearDPOLoss(loss_type=["sigmoid", lambda pairs: pairs.logps[:, 0]]),
        LigerFusedLinearCPOLoss(loss_type="simpo", alphapo_alpha=0.2),
    ):
        assert loss._terms_of_step() is None
    assert Named()._terms_of_step() == LigerFusedLinearDPOLoss()._terms_of_step() is not None


@pytest.mark.parametrize("name", ["preference_loss", "reward"])
def test_a_class_with_another_formula_takes_no_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a test or a trainer replaces a method of the class itself, also after a first step."""
    loss = LigerFusedLinearSimPOLoss()
    assert loss._terms_of_step() is not None
    owner = LigerFusedLinearPreferenceBase if name == "reward" else LigerFusedLinearSimPOLoss
    monkeypatch.setattr(owner, name, lambda self, given: given)
    assert loss._terms_of_step() is None
    monkeypatch.undo()
    assert loss._terms_of_step() is not None


STEPS: dict[str, dict[str, Any]] = {
    "one-chunk": {},
    "chunks": {"logits_budget": 12 * 40 * 4},
    "nll": {"compute_nll_loss": True, "alpha": 0.5, "logits_budget": 12 * 40 * 4},
    "mean": {"average_log_prob": True},
}
REFERENCES = ("model", "tokens", "sequences", "none")


def step(loss: LigerFusedLinearPreferenceBase, kind: str, ignored: bool, device: str) -> list[Tensor]:
    """Return loss, gradients and metrics of a small step."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    sequences, length, hidden, vocab = 6, 6, 16, 40
    weight, input = randn(vocab, hidden).requires_grad_(), randn(sequences, length, hidden).requires_grad_()
    target = torch.randint(vocab, (sequences, length), generator=generator).to(device)
    if ignored:
        target[0, :2] = target[2, 3:] = target[4] = target[1] = -100
    reference = {
        "model": {"ref_input": randn(sequences, length, 8), "ref_weight": randn(vocab, 8)},
        "tokens": {"ref_logps": -randn(sequences, length).abs()},
        "sequences": {"ref_logps": -randn(sequences).abs().double()},
        "none": {},
    }[kind]
    value, metrics = loss(weight, input, target, **reference)
    value.backward()
    assert weight.grad is not None and input.grad is not None
    return [value.detach(), weight.grad, input.grad, *metrics]


@pytest.mark.sampled(interpreted=True)
@pytest.mark.parametrize("ignored", [False, True], ids=["", "ignored"])
@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_steps(options: dict[str, Any], kind: str, ignored: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with the kernel return what they return without it, in one chunk and in several."""
    needs_kernels(device)
    if kind == "none":
        options = {**options, "use_ref_model": False}
    loss, first_pairs = LigerFusedLinearDPOLoss(**options), set()

    def watched(*given: Any, **options: Any) -> Any:
        first_pairs.add(options["pairs"].start)
        return pair_loss(*given, **options)

    monkeypatch.setattr(pairs, "pair_loss", watched)
    found = step(loss, kind, ignored, device)
    assert len(first_pairs) > 1 if "logits_budget" in options else first_pairs == {0}
    first_pairs.clear()
    monkeypatch.setattr(objective, "use_triton", lambda x: False)
    expected = step(loss, kind, ignored, device)
    assert not first_pairs
    for ours, other in zip(found, expected, strict=True):
        assert ours.dtype == other.dtype and ours.shape == other.shape
        torch.testing.assert_close(ours, other, rtol=2e-6, atol=2e-7)


def test_weights_take_no_kernel(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of one give what the kernel gives, by autograd; others the mean of the weighted losses of the pairs."""
    needs_kernels(device)
    weight, input = torch.randn(40, 16, device=device), torch.randn(4, 6, 16, device=device)
    target = torch.randint(40, (4, 6), device=device)
    loss, calls = LigerFusedLinearDPOLoss(use_ref_model=False), []

    def watched(*given: Any, **options: Any) -> Any:
        calls.append(given)
        return pair_loss(*given, **options)

    monkeypatch.setattr(pairs, "pair_loss", watched)
    plain, _ = loss(weight, input, target)
    assert len(calls) == 1
    ones, _ = loss(weight, input, target, example_weights=torch.ones(2, device=device))
    both = [loss(weight, input[i::2], target[i::2], example_weights=torch.ones(1, device=device))[0] for i in (0, 1)]
    weights = torch.tensor([0.25, 3.0], device=device)
    weighted, _ = loss(weight, input, target, example_weights=weights)
    assert len(calls) == 1
    torch.testing.assert_close(ones, plain, rtol=2e-6, atol=2e-7)
    torch.testing.assert_close(weighted, (weights * torch.stack(both)).mean(), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("by_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("n", [1, 9, 9000])
def test_nll(n: int, by_tensor: bool, device: str) -> None:
    """The loss is the float64 quotient, and gradients are its rounded derivative."""
    needs_kernels(device)
    logps = -torch.rand(n, generator=torch.Generator().manual_seed(0)).to(device)
    assert nll_has_kernel(logps) and not nll_has_kernel(logps[:0])
    divisor = torch.tensor(7.3, device=device) if by_tensor else 7.3
    exact = float(divisor)
    loss, rounded, gradient = nll(logps, divisor, True)
    torch.testing.assert_close(loss, -logps.double().sum() / exact, rtol=1e-14, atol=0)
    assert rounded == loss.float()
    assert gradient is not None and (gradient == torch.tensor(-1 / exact)).all()
    assert nll(logps, divisor, False)[2] is None


def test_no_pairs(device: str) -> None:
    needs_kernels(device)
    input = torch.randn(0, 3, 8, device=device, requires_grad=True)
    loss, metrics = LigerFusedLinearSimPOLoss()(
        torch.randn(5, 8, device=device), input, torch.zeros(0, 3, dtype=torch.int64, device=device)
    )
    loss.backward()
    assert loss == 0 and metrics.chosen_logps.shape == (0,) and metrics.nll_loss == 0
