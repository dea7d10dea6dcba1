"""A temperature per token: statistics and gradients against the formula in float64."""

from __future__ import annotations

from typing import Any

import eager
import pytest
import torch
import torch.distributed as dist
from ranks import join
from sampling import exhaustive
from table import SMALL, assert_rounds_as_eager_code, relative_error, rollouts
from torch import Tensor

from liger_chunked import (
    LigerFusedLinearGRPOLoss,
    VocabShard,
    linear_token_stats,
)
from liger_chunked.engine.epilogue import EpilogueSource, EpilogueStatistics
from liger_chunked.kernels.backend import INTERPRETED
from liger_chunked.types import OUTPUTS

B, T, H, V, K = 4, 10, 16, 53, 5
FLOATS = ("logps", "lse", "entropy", "mean_logits", "log_sum_sq_probs", "candidate_logps")
DIFFERENTIABLE = ("logps", "lse", "entropy", "mean_logits")
TRANSFORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"logit_scale": 1.7},
    "softcap": {"softcap": 3.0, "logit_scale": -1.3},
}
BUDGETS = {"one-tile": None, "rows": 8 * 60, "columns": 8 * 30 * 20}
BOUND = 1e-9  # float64: a few thousand additions round to less
# Products of float32 inputs, of 16 terms, and sums of 53, are a few units in the last place off.
FLOAT32 = 1e-5


def batch(seed: int = 0, dtype: torch.dtype = torch.float64, device: str = "cpu") -> dict[str, Any]:
    """Return tokens of which a third are ignored, with NaN as temperature."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(B, T, V, generator=generator).argsort(-1)[..., : K + 1]
    target = ids[..., 0].clone()
    target[:, ::2] = ids[:, ::2, 3]  # among the candidates
    target[:, 1::3] = -100
    temperature = 0.3 + 2 * torch.rand(B, T, generator=generator)
    floats = {
        "weight": 2 * H**-0.5 * torch.randn(V, H, generator=generator, dtype=torch.float64),
        "input": torch.randn(B, T, H, generator=generator, dtype=torch.float64),
        "bias": torch.randn(V, generator=generator, dtype=torch.float64),
    }
    return {name: x.to(device, dtype) for name, x in floats.items()} | {
        "target": target.to(device),
        "candidates": ids[..., 1:].to(device),
        "temperature": temperature.where(target != -100, torch.nan).to(device),
    }


def ours(*args: Any, outputs: tuple[str, ...] = FLOATS, **options: Any) -> dict[str, Tensor]:
    names = tuple(name for name in outputs if name in OUTPUTS)
    stats = linear_token_stats(*args, outputs=names, **options)
    return {name: x for name, x in stats._asdict().items() if x is not None}


def evaluate(function: Any, given: dict[str, Any], wanted: tuple[str, ...] = FLOATS, **options: Any) -> dict[str, Any]:
    """Return values and gradients, of different upstream gradients for each value."""
    leaves = {name: given[name].clone().requires_grad_() for name in ("weight", "input", "bias") if name in given}
    values = function(**(given | leaves), outputs=wanted, **options)
    loss = torch.zeros((), dtype=torch.float64, device=given["input"].device)
    for i, name in enumerate(DIFFERENTIABLE):
        if name in values:
            x = values[name].masked_fill(values[name] == -torch.inf, 0.0)
            loss = loss + (x * torch.cos(torch.arange(x.numel(), device=x.device).view(x.shape) + i)).sum()
    loss.backward()
    return {name: x.detach() for name, x in values.items()} | {f"d{name}": x.grad for name, x in leaves.items()}


def assert_close(found: dict[str, Any], exact: dict[str, Any], bound: float) -> None:
    assert found.keys() == exact.keys()
    for name, expected in exact.items():
        assert found[name].shape == expected.shape
        assert relative_error(found[name], expected) < bound, (name, relative_error(found[name], expected))


@pytest.mark.few(2)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_equals_the_formula(transform: dict[str, Any], budget: int | None, bias: bool) -> None:
    given = batch()
    if not bias:
        del given["bias"]
    exact = evaluate(eager.token_stats, given, **transform)
    assert_close(evaluate(ours, given, logits_budget=budget, **transform), exact, BOUND)
    ids = ("argmax", "is_top1")
    expected = eager.token_stats(**given, outputs=ids, **transform)
    found = ours(**given, outputs=ids, logits_budget=budget, **transform)
    assert all(torch.equal(found[name], expected[name]) for name in ids)


@pytest.mark.few(2)
@pytest.mark.triton
@pytest.mark.parametrize("budget", [None, 60], ids=["one-tile", "tiles"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_float32(transform: dict[str, Any], budget: int | None, device: str, path: str) -> None:
    given = batch(dtype=torch.float32, device=device)
    doubles = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
    budget = None if budget is None else 4 * budget
    assert_close(
        evaluate(ours, given, logits_budget=budget, **transform),
        evaluate(eager.token_stats, doubles, **transform),
        FLOAT32,
    )


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize(
    "transform", [exhaustive([x], name, INTERPRETED and name != "softcap") for name, x in TRANSFORMS.items()]
)
def test_bfloat16(transform: dict[str, Any], device: str, path: str) -> None:
    """Errors over some batches are at most 1.1 times those of eager code."""
    batches = [batch(seed, torch.bfloat16, device) for seed in range(4 if INTERPRETED else 20)]
    assert_rounds_as_eager_code(
        (
            (
                evaluate(ours, given, **transform, logits_budget=2 * 60),
                evaluate(eager.token_stats, given, **transform),
                evaluate(eager.token_stats, doubles(given), **transform),
            )
            for given in batches
        ),
        # The interpreter truncates: an error of up to one unit, not half of one, and no zero mean.
        1.1 * (8**0.5 if INTERPRETED else 1),
        dtypes=False,
    )


def doubles(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in given.items()}


def test_refused() -> None:
    given = batch()
    good = given.pop("temperature").nan_to_num(1.0)
    zero, endless = good.clone(), good.clone()
    zero[0, 0], endless[0, 0] = 0.0, torch.inf
    refused: list[tuple[Any, type[Exception], str]] = [
        (good.double(), TypeError, r"a number or a float32 tensor, got \(4, 10\) float64 on cpu"),
        (good[:, :1], ValueError, r"or \(4, 10\) on cpu, one value for each target, got \(4, 1\) float32"),
        (good.to("meta"), ValueError, r"on cpu, one value for each target, got \(4, 10\) float32 on meta"),
        (
            good.clone().requires_grad_(),
            ValueError,
            r"treats temperature as a constant, but it requires a gradient: pass temperature\.detach\(\)",
        ),
        (zero, ValueError, "temperature must be positive and finite at each token that counts, got 0 to "),
        (-good, ValueError, "positive and finite at each token that counts, got -"),
        (endless, ValueError, "positive and finite at each token that counts, got .* to inf"),
    ]
    for value, error, message in refused:
        with pytest.raises(error, match=message):
            linear_token_stats(**given, temperature=value)


# Policy losses


def completions(seed: int = 0) -> dict[str, Any]:
    """Return a batch of GRPO without a bias, with states of a reference, and two temperatures' rollouts."""
    sample = rollouts(SMALL._replace(length=8), seed, ref="states")
    del sample["bias"], sample["ref_bias"]
    counts = sample["target"] != -100
    temperature = 0.4 + 1.5 * torch.rand(counts.shape, generator=torch.Generator().manual_seed(seed + 7))
    return sample | {"temperature": temperature.where(counts, torch.nan)}


def exact_grpo(temperature: Tensor, input: Tensor, ref_input: Tensor, **rest: Any) -> Tensor:
    """Without bias and softcap, a temperature divides the hidden states."""
    divisor = temperature.nan_to_num(1.0)[..., None]
    return eager.grpo(input=input / divisor, ref_input=ref_input / divisor, **rest)[0]


def loss_and_gradients(function: Any, given: dict[str, Any], **settings: Any) -> dict[str, Tensor]:
    leaves = {name: given[name].clone().requires_grad_() for name in ("weight", "input")}
    loss = function(**(given | leaves), **settings)
    loss.backward()
    return {"loss": loss.detach()} | {name: x.grad for name, x in leaves.items() if x.grad is not None}


def grpo(logits_budget: int | None = None, **given: Any) -> Tensor:
    settings = {name: given.pop(name) for name in tuple(given) if name in GRPO}
    return LigerFusedLinearGRPOLoss(logits_budget=logits_budget, **settings)(**given)[0]


GRPO = ("beta", "importance_level", "entropy_coef", "reduction", "top_entropy_quantile", "surrogate")
LEVELS: dict[str, dict[str, Any]] = {
    "token": {"beta": 0.1, "entropy_coef": 0.02},
    "sequence": {"beta": 0.1, "importance_level": "sequence"},
    "batch": {"beta": 0.1, "entropy_coef": 0.02, "top_entropy_quantile": 0.4},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", [None, 8 * 23 * 9], ids=["one-chunk", "chunks"])
@pytest.mark.parametrize("settings", LEVELS.values(), ids=LEVELS)
def test_grpo(settings: dict[str, Any], budget: int | None) -> None:
    given = completions()
    exact = loss_and_gradients(exact_grpo, given, **settings)
    assert_close(loss_and_gradients(grpo, given, logits_budget=budget, **settings), exact, BOUND)


@pytest.mark.triton
def test_grpo_leaves_the_fused_epilogue(by_epilogue: None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epilogue has one temperature."""
    monkeypatch.setattr("liger_chunked.engine.epilogue.SMALLEST", 0)
    given = {
        name: x.to(device, torch.bfloat16 if name in ("weight", "input", "ref_weight", "ref_input") else None)
        for name, x in completions().items()
    }
    # Descriptors need rows of 16 bytes.
    for name in ("weight", "input", "ref_weight", "ref_input"):
        given[name] = torch.nn.functional.pad(given[name], (0, -given[name].shape[-1] % 8)).contiguous()
    ran: list[str] = []
    for kind in (EpilogueSource, EpilogueStatistics):
        start = kind.statistics

        def watched(*args: Any, start: Any = start, name: str = kind.__name__) -> Any:
            ran.append(name)
            return start(*args)

        monkeypatch.setattr(kind, "statistics", watched)
    settings = {"beta": 0.1, "logits_budget": 2 * 23 * 16}  # several chunks: the epilogue needs a float32 dW
    found = loss_and_gradients(grpo, given, **settings)
    assert not ran
    doubles = {name: x.double() if x.dtype == torch.bfloat16 else x for name, x in given.items()}
    # bfloat16 logits and gradients: an error of 2**-8 each, truncated in the interpreter.
    assert_close(found, loss_and_gradients(exact_grpo, doubles, beta=0.1), 0.05)
    loss_and_gradients(grpo, {name: x for name, x in given.items() if name != "temperature"}, **settings)
    assert set(ran) == {"EpilogueSource", "EpilogueStatistics"}  # the second for the reference


def of_policy_ranks(rank: int, folder: str) -> None:
    """Ranks split the sequences, or the vocabulary, or the vocabulary and the hidden states."""
    join(rank, 2, folder)
    given = completions()
    heads, states = ("weight", "ref_weight"), ("input", "ref_input")
    rows, positions = ((slice(0, 9), slice(0, 3)), (slice(9, 23), slice(3, 8)))[rank]
    for settings in LEVELS.values():
        exact = loss_and_gradients(exact_grpo, given, **settings)
        for budget in (None, 8 * 23 * 9):
            own = given | {name: given[name][:, positions] for name in (*states, "target", "temperature", "old_logps")}
            group = {"sequence_group": dist.group.WORLD}
            found = loss_and_gradients(grpo, own | group, logits_budget=budget, **settings)
            dist.all_reduce(found["weight"])
            assert_close(found, exact | {"input": exact["input"][:, positions]}, BOUND)
            for input_grad, part in (("all_reduce", slice(None)), ("reduce_scatter", slice(rank * 4, rank * 4 + 4))):
                own = given | {name: given[name][rows] for name in heads}
                own |= {name: given[name][:, part] for name in states}
                shard = {"vocab_shard": VocabShard(None, rows.start, 23, input_grad=input_grad)}  # type: ignore[arg-type]
                found = loss_and_gradients(grpo, own | shard, logits_budget=budget, **settings)
                expected = exact | {"weight": exact["weight"][rows], "input": exact["input"][:, part]}
                assert_close(found, expected, BOUND)
    dist.destroy_process_group()
