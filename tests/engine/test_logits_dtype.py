"""logits_dtype=torch.float32: values as of float32 logits, from 16-bit hidden states and weights."""

from __future__ import annotations

from typing import Any

import eager
import pytest
import torch
import torch.distributed as dist
from ranks import join
from table import relative_error
from test_row_temperature import FLOATS, V, batch, doubles, evaluate, ours
from torch import Tensor

from liger_chunked import (
    AdaptedWeight,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearULDLoss,
    LogitOptions,
    VocabShard,
    estimate_memory,
    linear_token_stats,
)
from liger_chunked.engine.source import LogitsSource
from liger_chunked.kernels.backend import INTERPRETED

WIDE = {"logits_dtype": torch.float32}
TRANSFORMS: dict[str, dict[str, Any]] = {"plain": {}, "softcap": {"softcap": 3.0, "logit_scale": -1.3}}
# Bytes: 6 a logit.
BUDGETS = {"one-tile": None, "rows": 6 * 60, "columns": 6 * 30 * 20}
# float32: products of 16 terms and sums of 53 are a few units in the last place off.
FLOAT32 = 1e-5


def values(found: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in found.items() if name in FLOATS}


def assert_float32(found: dict[str, Any], exact: dict[str, Any], roundings: int = 2) -> None:
    """Values are exact to float32; gradients are rounded as without the option."""
    assert found.keys() == exact.keys()
    for name, expected in exact.items():
        # The logits' gradient, and dX or dW, are rounded to 16 bits, half a unit at most. The interpreter truncates.
        bound = FLOAT32 if name in FLOATS else roundings * (4 if INTERPRETED else 1) * 2**-9
        error = relative_error(found[name].double(), expected)
        assert error < bound, (name, error)


@pytest.mark.few(2)
@pytest.mark.triton
@pytest.mark.sampled(interpreted=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_statistics(transform: dict[str, Any], budget: int | None, dtype: torch.dtype, device: str, path: str) -> None:
    given = batch(dtype=dtype, device=device)
    exact = evaluate(eager.token_stats, doubles(given), **transform)
    found = evaluate(ours, given, logits_budget=budget, **WIDE, **transform)
    assert_float32(found, exact)
    rounded = evaluate(ours, given, logits_budget=budget, **transform)
    # The rounding that the option avoids; that of `logps` is corrected without it too.
    errors = [relative_error(x["lse"].double(), exact["lse"]) for x in (found, rounded)]
    assert errors[1] > 10 * errors[0]


@pytest.mark.triton
def test_adapter(device: str) -> None:
    given = batch(dtype=torch.bfloat16, device=device)
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(*shape, generator=generator).to(device).bfloat16() for shape in ((3, 16), (V, 3)))

    def adapted(function: Any, up: Tensor, down: Tensor) -> Any:
        # `down` computes in another dtype, so that both see the same `u`.
        def u(x: Tensor) -> Tensor:
            return (x.double() @ down.double().T).bfloat16().to(x.dtype)

        return lambda weight, **rest: function(AdaptedWeight(weight, up, u), **rest)

    exact = evaluate(adapted(eager.token_stats, b.double(), a), doubles(given))
    # dX adds the adapter's share, which is rounded on its own.
    for budget in BUDGETS.values():
        assert_float32(evaluate(adapted(ours, b, a), given, logits_budget=budget, **WIDE), exact, roundings=4)


@pytest.mark.few(1)
@pytest.mark.triton
@pytest.mark.parametrize("budget", [None, 6 * V * 7], ids=["one-chunk", "chunks"])
def test_losses(budget: int | None, device: str) -> None:
    given = batch(dtype=torch.bfloat16, device=device)
    del given["candidates"], given["temperature"]
    exact = doubles(given)
    sides = {"advantages": torch.linspace(-1, 1, 4, device=device)}
    reference = {f"ref_{name}": given[name].roll(1, 0) for name in ("weight", "input", "bias")}
    options = {"logits_budget": budget, **WIDE}
    found = (
        LigerFusedLinearCrossEntropyLoss(**options)(**given),
        LigerFusedLinearCrossEntropyLoss(lse_square_scale=0.1, **options)(**given),
        LigerFusedLinearGRPOLoss(beta=0.3, entropy_coef=0.1, **options)(**given, **reference, **sides)[0],
    )
    expected = (
        eager.cross_entropy(**exact),
        eager.cross_entropy(lse_square_scale=0.1, **exact),
        eager.grpo(**exact, **doubles(reference), **doubles(sides), beta=0.3, entropy_coef=0.1)[0],
    )
    for loss, value in zip(found, expected, strict=True):
        assert relative_error(loss.double(), value) < FLOAT32


def test_the_budget_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It covers float32 logits and their rounded gradient."""
    given = batch(dtype=torch.bfloat16)
    reserved: list[int] = []
    reserve = LogitsSource.reserve
    monkeypatch.setattr(LogitsSource, "reserve", lambda *a: reserved.append(a[1]) or reserve(*a))
    for budget in (6 * 60, 6 * V * 7, 6 * 30 * 20):
        reserved.clear()
        evaluate(ours, given, logits_budget=budget, **WIDE)
        LigerFusedLinearCrossEntropyLoss(logits_budget=budget, **WIDE)(given["weight"], given["input"], given["target"])
        assert len(reserved) >= 2 and all(budget / 2 < 6 * n <= budget for n in reserved)


def test_estimate() -> None:
    """One chunk of 512 tokens holds 2 bytes of each logit, or 6."""
    sizes: dict[str, Any] = {"shape": (1, 512), "vocab_size": 4096, "hidden_size": 64, "dtype": torch.bfloat16}
    plain, wide = (
        estimate_memory(LigerFusedLinearCrossEntropyLoss(logits_budget="1GB", **options), **sizes)
        for options in ({}, WIDE)
    )
    assert (plain.logits, wide.logits) == (2 * 512 * 4096, 6 * 512 * 4096)


def test_refused() -> None:
    given = batch()
    del given["candidates"]
    teacher = {"teacher_weight": given["weight"], "teacher_input": given["input"]}
    student = {name: given[name] for name in ("weight", "input")}
    with pytest.raises(ValueError, match=r"logits_dtype must be None for products in torch.float64"):
        linear_token_stats(**given, **WIDE)
    for loss in (LigerFusedLinearJSDLoss, LigerFusedLinearULDLoss):
        with pytest.raises(ValueError, match="distillation rounds logits to the products' dtype"):
            loss(**WIDE)(**student, **teacher)
        with pytest.raises(ValueError, match=r"distillation rounds logits|logits_dtype belongs to the loss"):
            loss(teacher_options=LogitOptions(**WIDE))(**student, **teacher)
    for value in (torch.bfloat16, torch.float64, "float32", 32):
        with pytest.raises(ValueError, match=r"logits_dtype must be torch.float32 or None, got "):
            LogitOptions(logits_dtype=value)  # type: ignore[arg-type]


def of_ranks(rank: int, folder: str) -> None:
    join(rank, 2, folder)
    given = batch(dtype=torch.bfloat16)
    start, stop = ((0, 20), (20, V))[rank]
    exact = evaluate(eager.token_stats, doubles(given))
    expected = exact | {name: exact[name][start:stop] for name in ("dweight", "dbias")}
    own = given | {name: given[name][start:stop] for name in ("weight", "bias")}
    for budget in BUDGETS.values():
        assert_float32(
            evaluate(ours, own, logits_budget=budget, vocab_shard=VocabShard(None, start, V), **WIDE), expected
        )
    dist.destroy_process_group()
