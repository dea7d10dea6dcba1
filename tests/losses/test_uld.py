"""Universal logit distillation: values and gradients against sorted probabilities of whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spies import Memory, flop_counter
from table import Batch, assert_rounds_as_eager_code, moved, relative_error
from torch import Tensor

from liger_chunked import AdaptedWeight, LigerFusedLinearULDLoss, LogitOptions
from liger_chunked.engine import sink
from liger_chunked.kernels import backend

N, H, H_TEACHER, V = 14, 5, 8, 23
BOUND = 1e-9  # float64: a few thousand additions round to less
TRANSFORM: dict[str, Any] = {"softcap": 3.0, "logit_scale": 1.7, "temperature": 0.6}
OF_TEACHER: dict[str, Any] = {"softcap": 2.0, "logit_scale": 0.7, "temperature": 1.3}
LEAVES = ("weight", "input", "bias", "scale")


def batch(v_teacher: int, seed: int = 0, scales: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    given = {
        "weight": randn(V, H),
        "input": randn(N, H),
        "teacher_weight": randn(v_teacher, H_TEACHER) * 0.7,
        "teacher_input": randn(N, H_TEACHER),
        "bias": randn(V) * 0.3,
        "teacher_bias": randn(v_teacher) * 0.3,
    }
    if scales:
        given |= {name: torch.rand(N, generator=generator).double() + 0.1 for name in ("scale", "teacher_scale")}
    return given


def logits(weight: Tensor, input: Tensor, bias: Tensor, options: dict[str, Any]) -> Tensor:
    z = input @ weight.T + bias
    z = (z if z.dtype == torch.float64 else z.float()) * options.get("logit_scale", 1.0)
    if "softcap" in options:
        z = options["softcap"] * (z / options["softcap"]).tanh()
    return z / options.get("temperature", 1.0)


def oracle(
    given: dict[str, Tensor],
    options: dict[str, Any],
    of_teacher: dict[str, Any],
    mask: Tensor | None = None,
    items: float | None = None,
) -> Tensor:
    p = logits(given["weight"], given["input"], given["bias"], options).softmax(-1)
    with torch.no_grad():
        q = logits(given["teacher_weight"], given["teacher_input"], given["teacher_bias"], of_teacher).softmax(-1)
    p, q = (x.sort(-1, descending=True).values for x in (p, q))
    more = q.shape[1] - p.shape[1]
    p, q = torch.nn.functional.pad(p, (0, max(0, more))), torch.nn.functional.pad(q, (0, max(0, -more)))
    if "scale" in given:
        p, q = p * given["scale"][:, None], q * given["teacher_scale"][:, None]
    distances = (p - q).abs().sum(-1)
    mask = torch.ones(N, dtype=torch.bool) if mask is None else mask
    return distances[mask].sum() / (max(1, int(mask.sum())) if items is None else items)


def with_gradients(loss: Any, given: dict[str, Tensor]) -> list[Tensor]:
    leaves = {name: given[name].clone().requires_grad_() for name in LEAVES if name in given}
    value = loss(given | leaves)
    (3.0 * value).backward()
    return [value.detach(), *(x.grad for x in leaves.values() if x.grad is not None)]


def assert_right(loss: LigerFusedLinearULDLoss, given: dict[str, Tensor], exact: Any, **arguments: Any) -> None:
    found = with_gradients(lambda given: loss(**given, **arguments)[0], given)
    expected = with_gradients(exact, given)
    assert len(found) == len(expected) == 1 + sum(name in given for name in LEAVES)
    for x, e in zip(found, expected, strict=True):
        assert relative_error(x, e) < BOUND


@pytest.mark.few(3)
@pytest.mark.sampled(interpreted=True)
@pytest.mark.triton
@pytest.mark.parametrize("v_teacher", [11, V, 37])
@pytest.mark.parametrize("scales", [True, False], ids=["scales", "no-scales"])
@pytest.mark.parametrize(("options", "of_teacher"), [({}, {}), (TRANSFORM, OF_TEACHER)], ids=["plain", "transformed"])
@pytest.mark.parametrize("budget", [None, 3000], ids=["one-chunk", "one-row"])
def test_equals_sorted_probabilities(
    v_teacher: int, scales: bool, options: dict[str, Any], of_teacher: dict[str, Any], budget: int | None
) -> None:
    given = batch(v_teacher, scales=scales)
    teacher_options = LogitOptions(**of_teacher) if of_teacher else None
    loss = LigerFusedLinearULDLoss(teacher_options=teacher_options, logits_budget=budget, **options)
    assert_right(loss, given, lambda given: oracle(given, options, of_teacher))


def test_rows_that_count() -> None:
    given, mask = batch(37), torch.arange(N) % 3 != 1
    loss = LigerFusedLinearULDLoss(logits_budget=6000)
    assert_right(loss, given, lambda given: oracle(given, {}, {}, mask), mask=mask)
    for items in (7, torch.tensor(7)):
        assert_right(loss, given, lambda given: oracle(given, {}, {}, mask, 7), mask=mask, num_items=items)
    value, metrics = loss(**given, mask=mask)
    assert relative_error(metrics.soft_loss, value.detach()) < BOUND and metrics.hard_loss == 0
    of_rows = {k: x.view(2, N // 2, *x.shape[1:]) if x.shape[0] == N else x for k, x in given.items()}
    assert relative_error(loss(**of_rows, mask=mask.view(2, -1))[0], value) < BOUND

    nothing = {name: x.clone().requires_grad_() for name, x in given.items() if name in LEAVES}
    zero, _ = loss(**given | nothing, mask=torch.zeros(N, dtype=torch.bool))
    zero.backward()
    assert zero == 0 and all(x.grad is None or not x.grad.any() for x in nothing.values())
    assert nothing["weight"].grad is not None


def test_rounding() -> None:
    """Errors over 20 batches are at most 1.1 times those of eager code."""
    loss = LigerFusedLinearULDLoss(logits_budget=4000)
    runs = (lambda given: loss(**given)[0], lambda given: oracle(given, {}, {}))

    def results(seed: int) -> tuple[Batch, Batch, Batch]:
        given = moved(batch(37, seed), torch.bfloat16)
        ours, eager, exact = (
            dict(zip(("value", *LEAVES), with_gradients(run, x), strict=True))
            for run, x in ((runs[0], given), (runs[1], given), (runs[1], moved(given, torch.float64)))
        )
        return ours, eager, exact

    assert_rounds_as_eager_code(map(results, range(20)))


@pytest.mark.few(1)
@pytest.mark.ordinary_memory
@pytest.mark.parametrize("v_teacher", [500, 1009, 2017])
def test_memory(v_teacher: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, probabilities and their sorted copies stay within the budget; no tensor holds all logits."""
    monkeypatch.setitem(backend.TORCH_BLOCK, "cpu", 1 << 12)
    monkeypatch.setattr(sink, "UPCAST_BLOCK", 1 << 12)
    n, h, v, budget = 256, 32, 1009, 1 << 20
    weight, hidden = torch.randn(v, h).bfloat16().requires_grad_(), torch.randn(n, h).bfloat16().requires_grad_()
    teacher = torch.randn(v_teacher, h).bfloat16(), torch.randn(n, h).bfloat16()
    memory = Memory()
    memory.expect(weight, hidden, *teacher)
    with memory:
        LigerFusedLinearULDLoss(logits_budget=budget)(weight, hidden, *teacher)[0].backward()
    accumulators = 4 * (v * h + n * h) + 2 * (v * h + n * h)
    assert memory.peak <= budget + accumulators + (1 << 17)  # and rows of hidden states, and numbers per token
    assert memory.largest < 2 * n * min(v, v_teacher)


def test_matrix_products() -> None:
    """Three products of the student, and one of the teacher, in any number of chunks."""
    given = batch(37)
    leaves = {name: given[name].clone().requires_grad_() for name in LEAVES}
    for budget in (None, 3000):
        with flop_counter() as counter:
            LigerFusedLinearULDLoss(logits_budget=budget)(**given | leaves)[0].backward()
        assert counter.get_total_flops() == 2 * N * (3 * H * V + H_TEACHER * 37)


def test_adapted_heads() -> None:
    given = batch(37, scales=False)
    lora_a, lora_b = torch.randn(2, H).double().requires_grad_(), torch.randn(V, 2).double().requires_grad_()
    loss = LigerFusedLinearULDLoss()
    adapted = AdaptedWeight(given["weight"], lora_b, lambda x: x @ lora_a.T)
    found = torch.autograd.grad(loss(**given | {"weight": adapted})[0], (lora_a, lora_b))
    exact = torch.autograd.grad(oracle(given | {"weight": given["weight"] + lora_b @ lora_a}, {}, {}), (lora_a, lora_b))
    assert all(relative_error(x, e) < BOUND for x, e in zip(found, exact, strict=True))


def test_refusals() -> None:
    given = batch(37)
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"teacher_input": given["teacher_input"][1:]}, ValueError, r"teacher_input must be \(14, 'H_teacher'\)"),
        ({"scale": given["scale"][1:]}, ValueError, r"scale must be \(14,\) on cpu, one value for each row of input"),
        ({"scale": torch.ones(N, dtype=torch.long)}, TypeError, "scale must be a floating-point tensor"),
        ({"mask": torch.ones(N)}, TypeError, "mask must be a bool tensor"),
        ({"vocab_shard": 3}, ValueError, "sorts whole rows of logits, got vocab_shard: gather the weights"),
    ]
    for changes, error, message in refused:
        with pytest.raises(error, match=message):
            LigerFusedLinearULDLoss()(**given | changes)
    with pytest.raises(TypeError, match="beta"):
        LigerFusedLinearULDLoss(beta=0.5)  # type: ignore[call-arg]
