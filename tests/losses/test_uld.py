"""Universal logit distillation: values and gradients against sorted probabilities of whole logits."""

from __future__ import annotations

from typing import Any

import eager
import pytest
import torch
import torch.nn.functional as F
from spies import flop_counter, memory_beside
from table import (
    SMALL,
    Batch,
    assert_rounds_as_eager_code,
    assert_same,
    evaluate,
    leaves_of,
    moved,
    relative_error,
    students,
)
from torch import Tensor

from liger_chunked import AdaptedWeight, LigerFusedLinearULDLoss, LogitOptions

V, H, N = SMALL.vocab, SMALL.hidden, SMALL.sequences * SMALL.length
BOUND = 1e-9  # float64: a few thousand additions round to less
TRANSFORM: dict[str, Any] = {"softcap": 3.0, "logit_scale": 1.7, "temperature": 0.6}
OF_TEACHER: dict[str, Any] = {"softcap": 2.0, "logit_scale": 0.7, "temperature": 1.3}
LEAVES = ("weight", "input", "bias", "scale")


def batch(v_teacher: int, seed: int = 0, scales: bool = True) -> Batch:
    """Return rows (N, H) of a student and of a teacher with another vocabulary, and factors of both."""
    given = students(SMALL, seed, padding=v_teacher - V)
    del given["target"]
    given |= {name: given[name].flatten(0, 1) for name in ("input", "teacher_input")}
    generator = torch.Generator().manual_seed(seed + 1)
    for name in ("scale", "teacher_scale") if scales else ():
        given[name] = torch.rand(N, generator=generator).double() + 0.1
    return given


def oracle(
    given: Batch,
    options: dict[str, Any],
    of_teacher: dict[str, Any],
    mask: Tensor | None = None,
    items: float | None = None,
) -> Tensor:
    p = eager.logits(given["weight"], given["input"], given["bias"], **options).softmax(-1)
    with torch.no_grad():
        teacher = (given[f"teacher_{name}"] for name in ("weight", "input", "bias"))
        q = eager.logits(*teacher, **of_teacher).softmax(-1)
    p, q = (x.sort(-1, descending=True).values for x in (p, q))
    more = q.shape[1] - p.shape[1]
    p, q = F.pad(p, (0, max(0, more))), F.pad(q, (0, max(0, -more)))
    if "scale" in given:
        p, q = p * given["scale"][:, None], q * given["teacher_scale"][:, None]
    distances = (p - q).abs().sum(-1)
    mask = torch.ones(N, dtype=torch.bool) if mask is None else mask
    return distances[mask].sum() / (max(1, int(mask.sum())) if items is None else items)


def assert_right(loss: LigerFusedLinearULDLoss, given: Batch, exact: Any, **arguments: Any) -> None:
    found = evaluate(lambda given: loss(**given, **arguments)[0], given, LEAVES, 3.0)
    assert_same(found, evaluate(exact, given, LEAVES, 3.0), BOUND)


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

    nothing = leaves_of(given, LEAVES)
    zero, _ = loss(**given | nothing, mask=torch.zeros(N, dtype=torch.bool))
    zero.backward()
    assert zero == 0 and all(x.grad is None or not x.grad.any() for x in nothing.values())
    assert nothing["weight"].grad is not None


def test_rounding() -> None:
    """Errors over 20 batches are at most 1.1 times those of eager code."""
    loss = LigerFusedLinearULDLoss(logits_budget=4000)

    def results(seed: int) -> tuple[Batch, Batch, Batch]:
        given = moved(batch(37, seed), torch.bfloat16)
        runs = (
            (lambda given: loss(**given)[0], given),
            (lambda given: oracle(given, {}, {}), given),
            (lambda given: oracle(given, {}, {}), moved(given, torch.float64)),
        )
        ours, eager_code, exact = (evaluate(run, x, LEAVES) for run, x in runs)
        for found in (ours, eager_code, exact):
            found["value"] = found.pop("loss")  # compared too
        return ours, eager_code, exact

    assert_rounds_as_eager_code(map(results, range(20)))


@pytest.mark.few(1)
@pytest.mark.ordinary_memory
@pytest.mark.parametrize("v_teacher", [500, 1009, 2017])
def test_memory(v_teacher: int) -> None:
    """Logits, probabilities and their sorted copies stay within the budget; no tensor holds all logits."""
    n, h, v, budget = 256, 32, 1009, 1 << 20
    weight, hidden = torch.randn(v, h).bfloat16().requires_grad_(), torch.randn(n, h).bfloat16().requires_grad_()
    teacher = torch.randn(v_teacher, h).bfloat16(), torch.randn(n, h).bfloat16()
    with memory_beside(weight, hidden, *teacher) as memory:
        LigerFusedLinearULDLoss(logits_budget=budget)(weight, hidden, *teacher)[0].backward()
    accumulators = 4 * (v * h + n * h) + 2 * (v * h + n * h)
    assert memory.peak <= budget + accumulators + (1 << 17)  # and rows of hidden states, and numbers per token
    assert memory.largest < 2 * n * min(v, v_teacher)


def test_matrix_products() -> None:
    """Three products of the student, and one of the teacher, in any number of chunks."""
    given = batch(37)
    leaves = leaves_of(given, LEAVES)
    for budget in (None, 3000):
        with flop_counter() as counter:
            LigerFusedLinearULDLoss(logits_budget=budget)(**given | leaves)[0].backward()
        assert counter.get_total_flops() == 2 * N * (3 * H * V + SMALL.ref_hidden * 37)


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
        ({"teacher_input": given["teacher_input"][1:]}, ValueError, r"teacher_input must be \(42, 'H_teacher'\)"),
        ({"scale": given["scale"][1:]}, ValueError, r"scale must be \(42,\) on cpu, one value for each row of input"),
        ({"scale": torch.ones(N, dtype=torch.long)}, TypeError, "scale must be a floating-point tensor"),
        ({"mask": torch.ones(N)}, TypeError, "mask must be a bool tensor"),
        ({"vocab_shard": 3}, ValueError, "sorts whole rows of logits, got vocab_shard: gather the weights"),
    ]
    for changes, error, message in refused:
        with pytest.raises(error, match=message):
            LigerFusedLinearULDLoss()(**given | changes)
    with pytest.raises(TypeError, match="beta"):
        LigerFusedLinearULDLoss(beta=0.5)  # type: ignore[call-arg]
