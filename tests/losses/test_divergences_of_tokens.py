"""`reduction="none"` of distillation losses: a value for each token, whose gradient comes in the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import join, summed
from spies import Memory, flop_counter
from torch import Tensor

from liger_chunked import (
    AdaptedWeight,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
    LigerFusedLinearTVDLoss,
    LogitOptions,
    VocabShard,
)

B, T, H, H_TEACHER, V, R = 2, 4, 8, 6, 23, 3


class Squares(LigerFusedLinearDistillationBase):
    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        return (student_logits - teacher_logits).square().mean(-1)


LOSSES = {
    "reverse": lambda **options: LigerFusedLinearKLDivLoss(reverse=True, **options),
    "forward": LigerFusedLinearKLDivLoss,
    "mixture": lambda **options: LigerFusedLinearJSDLoss(beta=0.3, **options),
    "tvd": LigerFusedLinearTVDLoss,
    "cosine": LigerFusedLinearCosineSimilarityLoss,
    "own": Squares,
}


def batch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "weight": (V, H), "input": (B, T, H), "bias": (V,), "down": (H, R), "up": (V, R),
        "teacher_weight": (V + 2, H_TEACHER), "teacher_input": (B, T, H_TEACHER),
    }  # fmt: skip
    drawn = {k: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for k, s in shapes.items()}
    target = torch.randint(V, (B, T), generator=generator)
    target[0, 1], target[1, 3] = -100, -100
    return {**drawn, "target": target}


def of_teacher(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: given[name] for name in ("teacher_weight", "teacher_input")}


def upstream(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


@pytest.mark.few(3, "cosine-tiles")
@pytest.mark.parametrize("budget", [None, 8 * V * 3], ids=["", "tiles"])
@pytest.mark.parametrize("name", LOSSES)
def test_oracle(name: str, budget: int | None) -> None:
    """In float64, with an adapter, a bias and ignored tokens: each token has a gradient of its own size."""
    given = batch()
    leaves = {k: given[k].requires_grad_() for k in ("weight", "input", "bias", "down", "up")}
    temperature, of_teachers = (1.0, 1.0) if name == "cosine" else (1.7, 0.8)  # a cosine does not depend on them
    loss = LOSSES[name](
        reduction="none", weight_hard_loss=0.3, weight_soft_loss=0.7, temperature=temperature, softcap=5.0,
        logits_budget=budget, teacher_options=LogitOptions(temperature=of_teachers),
    )  # fmt: skip
    head = AdaptedWeight(leaves["weight"], leaves["up"], lambda x: x @ leaves["down"])
    target, valid = given["target"], given["target"] >= 0
    found, metrics = loss(head, leaves["input"], target=target, bias=leaves["bias"], **of_teacher(given))
    x = leaves["input"]
    z = 5.0 * torch.tanh((x @ leaves["weight"].T + x @ leaves["down"] @ leaves["up"].T + leaves["bias"]) / 5.0)
    t = (given["teacher_input"] @ given["teacher_weight"][:V].T) / of_teachers
    soft = loss.divergence((z / temperature).reshape(-1, V), t.reshape(-1, V)).view(B, T)
    hard = F.cross_entropy(z.reshape(-1, V), target.reshape(-1), reduction="none").view(B, T)
    soft, hard = torch.where(valid, soft, 0.0), torch.where(valid, hard, 0.0)
    expected = 0.7 * soft + 0.3 * hard
    for a, b in ((found, expected), (metrics.soft_loss, soft), (metrics.hard_loss, hard)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert not metrics.soft_loss.requires_grad
    g = upstream(B, T)
    ours, exact = (torch.autograd.grad((x * g).sum(), list(leaves.values())) for x in (found, expected))
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_top_k_and_mask() -> None:
    """A teacher's top-k; without targets, `mask` says which tokens count."""
    given = batch()
    logps, ids = (given["teacher_input"] @ given["teacher_weight"][:V].T).log_softmax(-1).topk(4)
    weight, input = given["weight"].requires_grad_(), given["input"].requires_grad_()
    loss = LigerFusedLinearKLDivLoss(reduction="none", weight_soft_loss=1.0)
    mask = given["target"] >= 0
    found, metrics = loss(weight, input, teacher_logps=logps, teacher_ids=ids, mask=mask)
    log_p = (input @ weight.T).log_softmax(-1)
    bins = [log_p.gather(-1, ids), torch.log1p(-log_p.gather(-1, ids).exp().sum(-1, keepdim=True))]
    teacher = torch.cat([logps, torch.log1p(-logps.exp().sum(-1, keepdim=True))], -1)
    expected = torch.where(mask, (teacher.exp() * (teacher - torch.cat(bins, -1))).sum(-1), 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert (metrics.hard_loss == 0).all()
    g = upstream(B, T)
    ours, exact = (torch.autograd.grad((x * g).sum(), (weight, input)) for x in (found, expected))
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.few(1)
@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equal_gradients_are_those_of_the_mean(dtype: torch.dtype, device: str) -> None:
    """On the kernels: values and gradients are those of `reduction="mean"`, and the same in every run."""
    given = {name: x.to(device) for name, x in batch(dtype).items()}
    n = int((given["target"] >= 0).sum())
    weight, input = given["weight"].requires_grad_(), given["input"].requires_grad_()

    def step(reduction: str) -> tuple[Tensor, tuple[Tensor, ...]]:
        loss, _ = LigerFusedLinearKLDivLoss(reverse=True, reduction=reduction)(
            weight, input, target=given["target"], **of_teacher(given)
        )
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
    loss = LigerFusedLinearKLDivLoss(reduction="none", logits_budget=2 * 4 * 64 * v)
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
        LigerFusedLinearTVDLoss(reduction="sum")
    loss = LigerFusedLinearTVDLoss(reduction="none")
    with pytest.raises(ValueError, match="num_items"):
        loss(weight, given["input"], num_items=3, **of_teacher(given))
    found, _ = loss(weight, given["input"], **of_teacher(given))
    given["teacher_input"].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def on_a_rank(rank: int, folder: str) -> None:
    join(rank, 2, folder)
    given, g = batch(), upstream(B, T)
    loss = LigerFusedLinearKLDivLoss(reverse=True, reduction="none", logits_budget=8 * V * 3)
    weight, input = given["weight"].requires_grad_(), given["input"].requires_grad_()
    teacher = {"teacher_weight": given["teacher_weight"][:V], "teacher_input": given["teacher_input"]}
    expected, _ = loss(weight, input, target=given["target"], **teacher)
    exact = torch.autograd.grad((expected * g).sum(), (weight, input))
    own = slice(*((0, 9), (9, V))[rank])
    half = slice(rank * T // 2, (rank + 1) * T // 2)
    for input_grad in ("all_reduce", "partial", "reduce_scatter"):
        columns = half if input_grad == "reduce_scatter" else slice(None)
        part, states = weight.detach()[own].requires_grad_(), input.detach()[:, columns].requires_grad_()
        options: dict[str, Any] = {"teacher_weight": teacher["teacher_weight"][own]}
        options["teacher_input"] = teacher["teacher_input"][:, columns]
        shard = VocabShard(None, own.start, V, input_grad)  # type: ignore[arg-type]
        found, _ = loss(part, states, target=given["target"], vocab_shard=shard, **options)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        dw, dx = torch.autograd.grad((found * g).sum(), (part, states))
        torch.testing.assert_close(dw, exact[0][own], rtol=1e-9, atol=1e-9)
        dx = summed(dx) if input_grad == "partial" else dx
        torch.testing.assert_close(dx, exact[1][:, columns], rtol=1e-9, atol=1e-9)
    dist.destroy_process_group()
