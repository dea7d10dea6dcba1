"""Log-probabilities of more ids than the target, such as a teacher's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fresh_process import FreshProcesses
from ranks import join
from table import relative_error
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from liger_chunked import AdaptedWeight, VocabShard, linear_token_stats

V, H, K = 53, 16, 6
TRANSFORMS: list[dict[str, Any]] = [{}, {"softcap": 3.0, "logit_scale": 1.7, "temperature": 0.6}]
BUDGETS = {"one-tile": None, "tiles-of-rows": 8 * 40, "tiles-of-columns": 8 * 30 * 20}


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return tokens of which a third are ignored; every other target is among its candidates."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64)
    input = torch.randn(5, 8, H, generator=generator, dtype=torch.float64)
    bias = torch.randn(V, generator=generator, dtype=torch.float64)
    ids = torch.rand(5, 8, V, generator=generator).argsort(-1)[..., : K + 1]
    target = ids[..., 0].clone()
    target[:, ::2] = ids[:, ::2, 3]
    target[:, 1::3] = -100
    floats = {"weight": weight.to(dtype), "input": input.to(dtype), "bias": bias.to(dtype)}
    return floats | {"target": target, "candidates": ids[..., 1:]}


def oracle(
    weight: Tensor, input: Tensor, bias: Tensor, target: Tensor, candidates: Tensor, **options: Any
) -> list[Tensor]:
    z = input @ weight.T + bias
    z = (z if z.dtype == torch.float64 else z.float()) * options.get("logit_scale", 1.0)
    if "softcap" in options:
        z = options["softcap"] * (z / options["softcap"]).tanh()
    log_p = (z / options.get("temperature", 1.0)).log_softmax(-1)
    valid = (target != -100)[..., None]
    logps = log_p.gather(-1, target.clamp(min=0)[..., None])
    entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    values = (logps, entropy, log_p.detach().gather(-1, candidates))
    return [torch.where(valid, x, 0) for x in values]


def ours(weight: Any, input: Tensor, bias: Tensor, **options: Any) -> list[Tensor]:
    stats = linear_token_stats(weight, input, bias=bias, outputs=("logps", "entropy"), **options)
    assert stats.logps is not None and stats.entropy is not None and stats.candidate_logps is not None
    return [stats.logps[..., None], stats.entropy[..., None], stats.candidate_logps.detach()]


def evaluate(function: Any, given: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """Return values and gradients, of different upstream gradients for each value."""
    leaves = {name: given[name].clone().requires_grad_() for name in ("weight", "input", "bias")}
    values = function(**given | leaves, **options)
    loss = sum(
        (x * torch.cos(torch.arange(x.numel(), dtype=x.dtype).view(x.shape) + i)).sum()
        for i, x in enumerate(values)
        if x.requires_grad
    )
    loss.backward()  # type: ignore[union-attr]
    return [x.detach() for x in values] + [leaf.grad for leaf in leaves.values() if leaf.grad is not None]


@pytest.mark.triton
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("options", TRANSFORMS, ids=["plain", "transformed"])
def test_equals_eager_code(options: dict[str, Any], budget: int | None) -> None:
    given = batch()
    found, expected = evaluate(ours, given, logits_budget=budget, **options), evaluate(oracle, given, **options)
    for value, exact in zip(found, expected, strict=True):
        assert relative_error(value, exact) < 1e-9  # the order of sums differs


def test_a_gradient_of_candidates_is_refused() -> None:
    given = batch()
    stats = linear_token_stats(given.pop("weight").requires_grad_(), **given)
    assert stats.logps is not None and stats.candidate_logps is not None
    with pytest.raises(RuntimeError, match=r"candidate_logps have no gradient: .* teacher_ids"):
        (stats.logps.sum() + stats.candidate_logps.sum()).backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding(dtype: torch.dtype) -> None:
    """Errors over 20 batches are at most 1.1 times those of eager code."""
    ours_squared, eager_squared = torch.zeros(2, 6)
    for seed in range(20):
        given = batch(seed, dtype)
        exact = evaluate(oracle, {k: x.double() if x.is_floating_point() else x for k, x in given.items()})
        eager, found = evaluate(oracle, given), evaluate(ours, given, logits_budget=2 * 30 * 20)
        for i in range(6):
            ours_squared[i] += relative_error(found[i], exact[i]) ** 2
            eager_squared[i] += relative_error(eager[i].double(), exact[i]) ** 2
    assert (ours_squared.sqrt() <= 1.1 * eager_squared.sqrt()).all(), ours_squared.sqrt() / eager_squared.sqrt()


def test_contracts() -> None:
    """No product more, the same bits in a checkpoint, and candidates of an adapter."""
    given = batch()
    counts = []
    for chosen in (given, {k: x for k, x in given.items() if k != "candidates"}):
        leaves = {k: x.clone().requires_grad_() if x.is_floating_point() else x for k, x in chosen.items()}
        with FlopCounterMode(display=False) as counter:
            stats = linear_token_stats(**leaves)
            assert stats.logps is not None
            stats.logps.sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]

    def checkpointed(weight: Tensor, input: Tensor, bias: Tensor, **rest: Any) -> Any:
        return checkpoint(lambda *leaves: ours(*leaves, **rest), weight, input, bias, use_reentrant=False)

    assert all(torch.equal(a, b) for a, b in zip(evaluate(ours, given), evaluate(checkpointed, given), strict=True))

    down, up = torch.randn(2, H, dtype=torch.float64), torch.randn(V, 2, dtype=torch.float64)
    adapted = AdaptedWeight(given["weight"], up, lambda x: x @ down.T)
    found = linear_token_stats(**given | {"weight": adapted}).candidate_logps
    torch.testing.assert_close(
        found, linear_token_stats(**given | {"weight": given["weight"] + up @ down}).candidate_logps
    )


def test_a_candidate_that_a_bias_excludes() -> None:
    given = batch()
    candidates, target = given["candidates"], given["target"]
    given["bias"][next(i for i in range(V) if i in candidates and i not in target)] = -torch.inf
    found = linear_token_stats(**given).candidate_logps
    log_p = (given["input"] @ given["weight"].T + given["bias"]).log_softmax(-1)
    exact = log_p.gather(-1, candidates).masked_fill((target == -100)[..., None], 0)
    assert exact.min() == -torch.inf
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


def test_refusals() -> None:
    given = batch()
    ids = given.pop("candidates")
    cases: list[tuple[Any, type[Exception], str]] = [
        (ids.double(), TypeError, "candidates must be a tensor of token ids"),
        (ids[:, 1:], ValueError, r"candidates must be \(5, 8, 'K'\)"),
        (ids[..., :0], ValueError, r"candidates must be \(5, 8, 'K'\)"),
        (ids + V, ValueError, r"candidates holds \d+, expected an index into the vocabulary of weight, 0 to 52"),
        (ids - V, ValueError, r"candidates holds -\d+, expected"),
        (ids[..., [0, 1, 0]], ValueError, "candidates holds an id twice"),
    ]
    for candidates, kind, message in cases:
        with pytest.raises(kind, match=message):
            linear_token_stats(**given, candidates=candidates)
    with pytest.raises(ValueError, match="outputs must name distinct fields"):
        linear_token_stats(**given, outputs=("candidate_logps",))


def on_a_split_vocabulary(rank: int, folder: str) -> None:
    join(rank, 2, folder)
    given = batch()
    expected = evaluate(ours, given)
    for split in (20, V):  # the second rank may have no rows
        rows = [slice(0, split), slice(split, V)][rank]
        own = given | {"weight": given["weight"][rows], "bias": given["bias"][rows]}
        for budget in BUDGETS.values():
            found = evaluate(ours, own, vocab_shard=VocabShard(None, rows.start, V), logits_budget=budget)
            for value, exact, cut in zip(found, expected, (False,) * 3 + (True, False, True), strict=True):
                of_rank = exact[rows] if cut else exact
                assert value.shape == of_rank.shape
                assert not of_rank.numel() or relative_error(value, of_rank) < 1e-9
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
def test_on_a_split_vocabulary(tmp_path: Path, fresh_process: FreshProcesses) -> None:
    fresh_process.spawn(on_a_split_vocabulary, 2, str(tmp_path))
