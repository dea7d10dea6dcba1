"""Losses of sequences whose gradient a kernel knows: values and gradients are those of autograd on the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_pair_loss import needs_kernels
from torch import Tensor

from liger_chunked import LigerFusedLinearBCOLoss, LigerFusedLinearKTOLoss, LigerFusedLinearUnpairedPreferenceBase
from liger_chunked.calls import altered
from liger_chunked.engine import ExampleKernel, examples, objective
from liger_chunked.kernels import ExampleLoss, ExampleSums, example_loss
from liger_chunked.types import DeclaredStats, Examples

pytestmark = pytest.mark.triton

WEIGHTS = {"desirable_weight": 1.3, "undesirable_weight": 0.7}
LOSSES: dict[str, LigerFusedLinearUnpairedPreferenceBase] = {
    "kto": LigerFusedLinearKTOLoss(beta=0.3, **WEIGHTS),
    "kto-mean": LigerFusedLinearKTOLoss(beta=2.0, average_log_prob=True),
    "apo": LigerFusedLinearKTOLoss(loss_type="apo_zero_unpaired", beta=0.3, **WEIGHTS),
    "bco": LigerFusedLinearBCOLoss(beta=0.3),
}
# Of one token each: undecided ones, and log-ratios whose exponentials over- or underflow.
RATIOS = (0.0, -1e-6, -1.0, -39.0, -140.0, -3000.0)


def by_autograd(
    loss: LigerFusedLinearUnpairedPreferenceBase,
    logps: Tensor,
    counts: Tensor,
    desirable: Tensor,
    point: Tensor,
    reference: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the loss, float64, and its gradient by the tokens' log-probabilities, from the loss's own formula."""
    x, lengths = logps.double().requires_grad_(), counts.clamp(min=1)

    def of_sequences(tokens: Tensor) -> Tensor:
        sums = torch.stack([part.sum() for part in tokens.split(counts.tolist())])
        return sums / lengths if loss.average_log_prob else sums

    ref_logps = torch.zeros(len(counts), dtype=torch.float64, device=logps.device)
    if reference is not None:
        ref_logps = of_sequences(reference.double())
    given = Examples(
        of_sequences(x), ref_logps, desirable, lengths, point, torch.empty(0), DeclaredStats(), len(counts), counts
    )
    total = torch.where(counts > 0, loss.preference_loss(given), 0.0).mean()
    return total.detach(), torch.autograd.grad(total, x)[0]


def check(
    loss: LigerFusedLinearUnpairedPreferenceBase,
    logps: Tensor,
    counts: Tensor,
    desirable: Tensor,
    reference: Tensor | None = None,
    **tolerance: Any,
) -> None:
    terms = loss._terms_of_step()
    assert terms is not None
    point = torch.tensor(0.0 if loss.reference_point is None else 0.4, dtype=torch.float64, device=logps.device)
    expected, gradient = by_autograd(loss, logps, counts, desirable, point, reference)
    sums = ExampleSums.of(len(counts), logps.device)
    value, rounded, found = example_loss(
        ExampleLoss(*terms, loss.beta, loss.average_log_prob), sums, logps, logps,
        token_counts=counts, desirable=desirable, point=point, examples=slice(0, len(counts)), reference=reference,
        with_gradient=True,
    )  # fmt: skip
    assert found is not None
    torch.testing.assert_close(value, expected, **{"rtol": 1e-12, "atol": 1e-12, **tolerance})
    torch.testing.assert_close(rounded, value.float(), rtol=0, atol=0, equal_nan=True)
    # The kernel computes the gradient in float64 too, and rounds it once.
    torch.testing.assert_close(found.double(), gradient, **{"rtol": 2**-23, "atol": 1e-16, **tolerance})


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_random_sequences(loss: LigerFusedLinearUnpairedPreferenceBase, device: str) -> None:
    """Also empty sequences of both labels, and a sequence longer than the kernel's block."""
    needs_kernels(device)
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([5, 0, 1100, 3, 0, 7], device=device)
    desirable = torch.tensor([True, True, False, False, False, True], device=device)
    logps, reference = (-3 * torch.rand(int(counts.sum()), generator=generator).to(device) for _ in range(2))
    check(loss, logps, counts, desirable, reference)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_extreme_sequences(loss: LigerFusedLinearUnpairedPreferenceBase, device: str) -> None:
    needs_kernels(device)
    counts = torch.ones(1, dtype=torch.int64, device=device)
    for ratio in (*RATIOS, -torch.inf, torch.nan):  # one by one: the largest loss would hide the others
        for label in (True, False):
            one = torch.tensor([ratio], device=device)
            check(loss, one, counts, torch.tensor([label], device=device), equal_nan=True)


def test_sequences_of_no_kernel() -> None:
    """A formula of a class's own, and options that the kernel does not know, are differentiated by autograd."""

    class Own(LigerFusedLinearKTOLoss):
        def preference_loss(self, examples: Examples) -> Tensor:
            return examples.logps

    class Declaring(LigerFusedLinearKTOLoss):
        token_outputs = ("entropy",)

    class Named(LigerFusedLinearKTOLoss):
        pass

    patched: Any = LigerFusedLinearBCOLoss()
    patched.preference_loss = lambda examples: examples.logps
    trained: list[Any] = [LigerFusedLinearKTOLoss(), LigerFusedLinearKTOLoss(), LigerFusedLinearBCOLoss()]
    for i, name in enumerate(("beta", "desirable_weight", "beta")):
        trained[i] = altered(trained[i], **{name: torch.nn.Parameter(torch.tensor(0.1))})
    for loss in (Own(), Declaring(), patched, *trained):
        assert loss._terms_of_step() is None
    assert Named()._terms_of_step() == LigerFusedLinearKTOLoss()._terms_of_step() is not None


def test_a_class_with_another_formula_takes_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a test or a trainer replaces a method of the class itself, also after a first step."""
    loss = LigerFusedLinearKTOLoss()
    assert loss._terms_of_step() is not None
    monkeypatch.setattr(LigerFusedLinearKTOLoss, "preference_loss", lambda self, examples: examples.logps)
    assert loss._terms_of_step() is None


CHUNKS = {"one-chunk": {}, "chunks": {"logits_budget": 8 * 40 * 4}}
REFERENCES = ("model", "tokens", "sequences", "none")


def step(loss: LigerFusedLinearUnpairedPreferenceBase, kind: str, device: str, **given: Any) -> list[Tensor]:
    """Return loss, gradients and metrics of a small step with ignored tokens and a sequence without tokens."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    n, length, hidden, vocab = 5, 6, 16, 40
    weight, input = randn(vocab, hidden).requires_grad_(), randn(n, length, hidden).requires_grad_()
    target = torch.randint(vocab, (n, length), generator=generator).to(device)
    target[0, :2] = target[2, 3:] = target[3] = -100
    labels = torch.tensor([True, False, True, False, False], device=device)
    reference = {
        "model": {"ref_input": randn(n, length, 8), "ref_weight": randn(vocab, 8)},
        "tokens": {"ref_logps": -randn(n, length).abs()},
        "sequences": {"ref_logps": -randn(n).abs().double()},
        "none": {},
    }[kind]
    value, metrics = loss(weight, input, target, labels, **reference, **given)
    value.backward()
    assert weight.grad is not None and input.grad is not None
    return [value.detach(), weight.grad, input.grad, *metrics]


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("options", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("name", ["kto", "bco", "mean"])
def test_steps(name: str, options: dict[str, Any], kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with the kernel return what they return without it, in one chunk and in several."""
    needs_kernels(device)
    use = {"use_ref_model": False} if kind == "none" else {}
    loss: Any = LigerFusedLinearBCOLoss(**options, **use)
    given: dict[str, Any] = {"delta": 0.3}
    if name != "bco":
        loss, given = LigerFusedLinearKTOLoss(average_log_prob=name == "mean", **WEIGHTS, **options, **use), {"kl": 0.4}
    first_examples = set()

    def watched(*given: Any, **options: Any) -> Any:
        first_examples.add(options["examples"].start)
        return example_loss(*given, **options)

    monkeypatch.setattr(examples, "example_loss", watched)
    found = step(loss, kind, device, **given)
    assert len(first_examples) > 1 if options else first_examples == {0}
    first_examples.clear()
    monkeypatch.setattr(objective, "use_triton", lambda x: False)
    expected = step(loss, kind, device, **given)
    assert not first_examples
    for ours, other in zip(found, expected, strict=True):
        assert ours.dtype == other.dtype and ours.shape == other.shape
        # A few roundings: both paths round to float32, at different places of the formula.
        torch.testing.assert_close(ours, other, rtol=2e-6, atol=2e-7)


def test_weights_take_no_kernel(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_kernels(device)
    monkeypatch.setattr(ExampleKernel, "evaluate", None)  # a call would raise
    loss = LigerFusedLinearKTOLoss(use_ref_model=False)
    assert step(loss, "none", device, kl=0.4, example_weights=torch.ones(5, device=device))[0].isfinite()
    with pytest.raises(TypeError, match="not callable"):
        step(loss, "none", device, kl=0.4)
