"""`reduction="none"` of distillation losses: a value for each token, whose gradient comes in the backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import eager
import pytest
import torch
import torch.distributed as dist
from ranks import join, summed
from spies import Memory, flop_counter
from table import Batch, Sizes, assert_same, evaluate, moved, students
from test_lora_head import TRAINABLE, adapted, dense, with_factors, with_weights
from torch import Tensor

import liger_chunked as lc

SIZES = Sizes(sequences=2, length=4, hidden=8, vocab=23, ref_hidden=6)
B, T, V = SIZES.sequences, SIZES.length, SIZES.vocab
KL = lc.LigerFusedLinearKLDivLoss


class Squares(lc.LigerFusedLinearDistillationBase):
    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        return (student_logits - teacher_logits).square().mean(-1)


# The loss, the oracle's name of its divergence, and a parameter of both.
LOSSES: dict[str, tuple[Any, str, float]] = {
    "reverse": (partial(KL, reverse=True), "reverse_kl", 0.5),
    "forward": (KL, "kl", 0.5),
    "mixture": (partial(lc.LigerFusedLinearJSDLoss, beta=0.3), "jsd", 0.3),
    "tvd": (lc.LigerFusedLinearTVDLoss, "tvd", 0.5),
    "cosine": (lc.LigerFusedLinearCosineSimilarityLoss, "cosine", 0.5),
    "own": (Squares, "squared_error", 0.5),
}


def batch(dtype: torch.dtype = torch.float64, padding: int = 2) -> Batch:
    """Return tokens, half of them ignored, and a teacher with a padded vocabulary; the heads have no bias."""
    return moved(students(SIZES, 3, bias=False, padding=padding), dtype)


def of_teacher(given: Batch) -> Batch:
    return {name: given[name] for name in ("teacher_weight", "teacher_input")}


def upstream() -> Tensor:
    return torch.randn(B, T, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def assert_right(ours: Callable[..., Any], exact: Callable[..., Any], given: Batch) -> None:
    """Compare the values and both terms of each token, and gradients for upstream gradients of different sizes."""
    (found, metrics), (expected, terms) = ours(**with_weights(given, adapted)), exact(**with_weights(given, dense))
    for a, b in ((found, expected), *((getattr(metrics, name), terms[name]) for name in terms)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert not metrics.soft_loss.requires_grad
    runs = (lambda b: ours(**with_weights(b, adapted)), lambda b: exact(**with_weights(b, dense)))
    gradients = [evaluate(lambda b, run=run: (run(b)[0] * upstream()).sum(), given, TRAINABLE) for run in runs]
    assert_same(*gradients, 1e-9)


@pytest.mark.few(3, "cosine-tiles")
@pytest.mark.parametrize("budget", [None, 8 * V * 3], ids=["", "tiles"])
@pytest.mark.parametrize("name", LOSSES)
def test_oracle(name: str, budget: int | None) -> None:
    """In float64, with adapters, a bias and ignored tokens: each token has a gradient of its own size."""
    make, divergence, parameter = LOSSES[name]
    settings: dict[str, Any] = {"weight_hard_loss": 0.3, "weight_soft_loss": 0.7, "softcap": 5.0, "reduction": "none"}
    temperature, of_teachers = (1.0, 1.0) if name == "cosine" else (1.7, 0.8)  # a cosine does not depend on them
    settings["temperature"] = temperature
    own = lc.LogitOptions(temperature=of_teachers, softcap=4.0)
    exact = partial(eager.distillation, name=divergence, parameter=parameter, **settings)
    exact = partial(exact, teacher_softcap=4.0, teacher_temperature=of_teachers)
    loss = make(**settings, logits_budget=budget, teacher_options=own)
    assert_right(loss, exact, with_factors(students(SIZES, 3, padding=2)))


def test_top_k_and_mask() -> None:
    """A teacher's top-k; without targets, `mask` says which tokens count."""
    given = students(SIZES, 3, bias=False, top_k=4)
    given["mask"] = given.pop("target") >= 0
    exact = partial(eager.distillation, name="kl", reduction="none", weight_soft_loss=1.0)
    assert_right(KL(reduction="none", weight_soft_loss=1.0), exact, given)


@pytest.mark.few(1)
@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equal_gradients_are_those_of_the_mean(dtype: torch.dtype, device: str) -> None:
    """On the kernels: values and gradients are those of `reduction="mean"`, and the same in every run."""
    given = moved(batch(dtype), device=device)
    n = int((given["target"] >= 0).sum())
    weight, input = given["weight"].requires_grad_(), given["input"].requires_grad_()

    def step(reduction: str) -> tuple[Tensor, tuple[Tensor, ...]]:
        loss, _ = KL(reverse=True, reduction=reduction)(weight, input, target=given["target"], **of_teacher(given))
        loss = loss.sum() / n if reduction == "none" else loss
        return loss.detach(), torch.autograd.grad(loss, (weight, input))

    (mean, of_mean), (found, ours), (again, same) = map(step, ("mean", "none", "none"))
    torch.testing.assert_close(found, mean, rtol=1e-6, atol=1e-6)
    assert torch.equal(found, again) and all(map(torch.equal, ours, same))
    # The factor 1 / n is rounded in another place, to float32.
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype]
    for a, b in zip(ours, of_mean, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def test_work_and_memory() -> None:
    """Two products forward; the backward takes them again, with those of dX and dW. No tensor of all logits."""
    n, v, h = 256, 512, 16
    weight, input = torch.randn(v, h, requires_grad=True), torch.randn(n, h, requires_grad=True)
    teacher_weight, teacher_input = torch.randn(v, h), torch.randn(n, h)
    loss = KL(reduction="none", logits_budget=2 * 4 * 64 * v)
    with Memory() as memory, flop_counter() as counter:
        found, _ = loss(weight, input, teacher_weight, teacher_input)
        forward = counter.get_total_flops()
        found.sum().backward()
    product = 2 * n * v * h
    assert forward == 2 * product and counter.get_total_flops() == 6 * product
    assert memory.largest <= 4 * 64 * v


def test_errors() -> None:
    given = batch()
    weight = given["weight"].requires_grad_()
    with pytest.raises(ValueError, match=r"reduction must be one of .*'sum'"):
        lc.LigerFusedLinearTVDLoss(reduction="sum")
    loss = lc.LigerFusedLinearTVDLoss(reduction="none")
    with pytest.raises(ValueError, match="num_items"):
        loss(weight, given["input"], num_items=3, **of_teacher(given))
    found, _ = loss(weight, given["input"], **of_teacher(given))
    given["teacher_input"].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def on_a_rank(rank: int, folder: str) -> None:
    join(rank, 2, folder)
    given, g = batch(padding=0), upstream()
    loss = KL(reverse=True, reduction="none", logits_budget=8 * V * 3)
    weight, input = given["weight"].requires_grad_(), given["input"].requires_grad_()
    teacher = of_teacher(given)
    expected, _ = loss(weight, input, target=given["target"], **teacher)
    exact = torch.autograd.grad((expected * g).sum(), (weight, input))
    own = slice(*((0, 9), (9, V))[rank])
    half = slice(rank * T // 2, (rank + 1) * T // 2)
    for input_grad in ("all_reduce", "partial", "reduce_scatter"):
        columns = half if input_grad == "reduce_scatter" else slice(None)
        part, states = weight.detach()[own].requires_grad_(), input.detach()[:, columns].requires_grad_()
        options: dict[str, Any] = {"teacher_weight": teacher["teacher_weight"][own]}
        options["teacher_input"] = teacher["teacher_input"][:, columns]
        shard = lc.VocabShard(None, own.start, V, input_grad)  # type: ignore[arg-type]
        found, _ = loss(part, states, target=given["target"], vocab_shard=shard, **options)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        dw, dx = torch.autograd.grad((found * g).sum(), (part, states))
        torch.testing.assert_close(dw, exact[0][own], rtol=1e-9, atol=1e-9)
        dx = summed(dx) if input_grad == "partial" else dx
        torch.testing.assert_close(dx, exact[1][:, columns], rtol=1e-9, atol=1e-9)
    dist.destroy_process_group()
