"""Statistics of tokens beyond those of the table: temperatures of tokens, candidates, and float32 logits of 16 bits.

Candidates are more ids than the target, such as a teacher's. `logits_dtype=torch.float32` keeps the float32 sums of
products of 16-bit hidden states and weights. Values and gradients are those of the formula.
"""

from __future__ import annotations

from typing import Any

import eager
import pytest
import torch
import torch.distributed as dist
from ranks import join
from sampling import exhaustive
from spies import flop_counter, noted
from table import SMALL, assert_rounds_as_eager_code, assert_same, relative_error, rollouts
from torch import Tensor

import liger_chunked as lc
from liger_chunked import AdaptedWeight, VocabShard, linear_token_stats
from liger_chunked.engine.epilogue import EpilogueSource, EpilogueStatistics
from liger_chunked.engine.source import LogitsSource
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
WIDE = {"logits_dtype": torch.float32}
BUDGETS = {"one-tile": None, "rows": 60, "columns": 30 * 20}  # in logits
BOUND = 1e-9  # float64: a few thousand additions round to less
# Products of float32 inputs, of 16 terms, and sums of 53, are a few units in the last place off.
FLOAT32 = 1e-5

by_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
by_budget = pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)


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


def without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: x for name, x in given.items() if name not in names}


def doubles(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in given.items()}


def ours(*args: Any, outputs: tuple[str, ...] = FLOATS, **options: Any) -> dict[str, Tensor]:
    names = tuple(name for name in outputs if name in OUTPUTS)
    stats = linear_token_stats(*args, outputs=names, **options)
    return {name: x for name, x in stats._asdict().items() if x is not None}


def evaluate(function: Any, given: dict[str, Any], wanted: tuple[str, ...] = FLOATS, **options: Any) -> dict[str, Any]:
    """Return values and gradients, of different upstream gradients for each value.

    Gradients are by the head and the hidden states, and by the factors `up` and `down` of an adapter.
    """
    names = ("weight", "input", "bias", "up", "down")
    leaves = {name: given[name].detach().clone().requires_grad_() for name in names if name in given}
    values = function(**(given | leaves), outputs=wanted, **options)
    loss = torch.zeros((), dtype=torch.float64, device=given["input"].device)
    for i, name in enumerate(DIFFERENTIABLE):
        if name in values:
            x = values[name].masked_fill(values[name] == -torch.inf, 0.0)
            loss = loss + (x * torch.cos(torch.arange(x.numel(), device=x.device).view(x.shape) + i)).sum()
    loss.backward()
    # Ids and hits as floats, which have a norm.
    values = {name: x.detach() if x.is_floating_point() else x.double() for name, x in values.items()}
    return values | {f"d{name}": x.grad for name, x in leaves.items()}


def adapted(function: Any) -> Any:
    """Return a function of a head with an adapter of factors `up` (V, r) and `down` (H, r)."""
    return lambda weight, up, down, **rest: function(AdaptedWeight(weight, up, lambda x: x @ down), **rest)


# Values


@pytest.mark.few(2)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@by_budget
@by_transform
def test_equals_the_formula(transform: dict[str, Any], budget: int | None, bias: bool) -> None:
    given = batch() if bias else without(batch(), "bias")
    options = {"logits_budget": budget and 8 * budget, **transform}
    assert_same(evaluate(ours, given, **options), evaluate(eager.token_stats, given, **transform), BOUND)
    ids = ("argmax", "is_top1")
    expected = eager.token_stats(**given, outputs=ids, **transform)
    found = ours(**given, outputs=ids, **options)
    assert all(torch.equal(found[name], expected[name]) for name in ids)


@pytest.mark.few(2)
@pytest.mark.triton
@pytest.mark.parametrize("budget", [None, 60], ids=["one-tile", "tiles"])
@by_transform
def test_float32(transform: dict[str, Any], budget: int | None, device: str, path: str) -> None:
    given = batch(dtype=torch.float32, device=device)
    exact = evaluate(eager.token_stats, doubles(given), **transform)
    assert_same(evaluate(ours, given, logits_budget=budget and 4 * budget, **transform), exact, FLOAT32)


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


# Float32 logits


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
@by_budget
@pytest.mark.parametrize("transform", [TRANSFORMS["plain"], TRANSFORMS["softcap"]], ids=["plain", "softcap"])
def test_float32_logits(
    transform: dict[str, Any], budget: int | None, dtype: torch.dtype, device: str, path: str
) -> None:
    given = batch(dtype=dtype, device=device)
    exact = evaluate(eager.token_stats, doubles(given), **transform)
    options = {"logits_budget": budget and 6 * budget, **transform}
    found = evaluate(ours, given, **options, **WIDE)
    assert_float32(found, exact)
    rounded = evaluate(ours, given, **options)
    # The rounding that the option avoids; that of `logps` is corrected without it too.
    errors = [relative_error(x["lse"].double(), exact["lse"]) for x in (found, rounded)]
    assert errors[1] > 10 * errors[0]


@pytest.mark.triton
def test_float32_logits_of_an_adapter(device: str) -> None:
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
        found = evaluate(adapted(ours, b, a), given, logits_budget=budget and 6 * budget, **WIDE)
        assert_float32(found, exact, roundings=4)


@pytest.mark.few(1)
@pytest.mark.triton
@pytest.mark.parametrize("budget", [None, 6 * V * 7], ids=["one-chunk", "chunks"])
def test_float32_logits_of_losses(budget: int | None, device: str) -> None:
    given = without(batch(dtype=torch.bfloat16, device=device), "candidates", "temperature")
    exact = doubles(given)
    sides = {"advantages": torch.linspace(-1, 1, 4, device=device)}
    reference = {f"ref_{name}": given[name].roll(1, 0) for name in ("weight", "input", "bias")}
    options = {"logits_budget": budget, **WIDE}
    found = (
        lc.LigerFusedLinearCrossEntropyLoss(**options)(**given),
        lc.LigerFusedLinearCrossEntropyLoss(lse_square_scale=0.1, **options)(**given),
        lc.LigerFusedLinearGRPOLoss(beta=0.3, entropy_coef=0.1, **options)(**given, **reference, **sides)[0],
    )
    expected = (
        eager.cross_entropy(**exact),
        eager.cross_entropy(lse_square_scale=0.1, **exact),
        eager.grpo(**exact, **doubles(reference), **doubles(sides), beta=0.3, entropy_coef=0.1)[0],
    )
    for loss, value in zip(found, expected, strict=True):
        assert relative_error(loss.double(), value) < FLOAT32


def test_the_budget_holds_float32_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It covers float32 logits and their rounded gradient."""
    given = batch(dtype=torch.bfloat16)
    head = (given["weight"], given["input"], given["target"])
    reserved = noted(monkeypatch, LogitsSource, "reserve", lambda source, elements: elements)
    for budget in (6 * 60, 6 * V * 7, 6 * 30 * 20):
        reserved.clear()
        evaluate(ours, given, logits_budget=budget, **WIDE)
        lc.LigerFusedLinearCrossEntropyLoss(logits_budget=budget, **WIDE)(*head)
        assert len(reserved) >= 2 and all(budget / 2 < 6 * n <= budget for n in reserved)
    # One chunk of 512 tokens holds 2 bytes of each logit, or 6.
    sizes: dict[str, Any] = {"shape": (1, 512), "vocab_size": 4096, "hidden_size": 64, "dtype": torch.bfloat16}
    plain, wide = (
        lc.estimate_memory(lc.LigerFusedLinearCrossEntropyLoss(logits_budget="1GB", **options), **sizes)
        for options in ({}, WIDE)
    )
    assert (plain.logits, wide.logits) == (2 * 512 * 4096, 6 * 512 * 4096)


def test_float32_logits_are_refused() -> None:
    given = without(batch(), "candidates")
    teacher = {"teacher_weight": given["weight"], "teacher_input": given["input"]}
    student = {name: given[name] for name in ("weight", "input")}
    with pytest.raises(ValueError, match=r"logits_dtype must be None for products in torch.float64"):
        linear_token_stats(**given, **WIDE)
    jsd = lc.LigerFusedLinearJSDLoss
    with pytest.raises(ValueError, match="distillation rounds logits to the products' dtype"):
        jsd(**WIDE)(**student, **teacher)
    with pytest.raises(ValueError, match=r"distillation rounds logits|logits_dtype belongs to the loss"):
        jsd(teacher_options=lc.LogitOptions(**WIDE))(**student, **teacher)
    for value in (torch.bfloat16, torch.float64, "float32", 32):
        with pytest.raises(ValueError, match=r"logits_dtype must be torch.float32 or None, got "):
            lc.LogitOptions(logits_dtype=value)  # type: ignore[arg-type]


# Candidates


def test_a_gradient_of_candidates_is_refused() -> None:
    given = without(batch(), "temperature")
    stats = linear_token_stats(given.pop("weight").requires_grad_(), **given)
    assert stats.logps is not None and stats.candidate_logps is not None
    with pytest.raises(RuntimeError, match=r"candidate_logps have no gradient: .* teacher_ids"):
        (stats.logps.sum() + stats.candidate_logps.sum()).backward()


def test_candidates_take_no_product_and_may_be_of_an_adapter() -> None:
    given = without(batch(), "temperature")
    counts = []
    for chosen in (given, without(given, "candidates")):
        with flop_counter() as counter:
            evaluate(ours, chosen, ("logps", "candidate_logps"))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0

    factors = {"up": torch.randn(V, 2, dtype=torch.float64), "down": torch.randn(H, 2, dtype=torch.float64)}
    found = adapted(linear_token_stats)(**given, **factors).candidate_logps
    dense = given | {"weight": given["weight"] + factors["up"] @ factors["down"].T}
    torch.testing.assert_close(found, linear_token_stats(**dense).candidate_logps)


def test_a_candidate_that_a_bias_excludes() -> None:
    given = without(batch(), "temperature")
    ids, target = given["candidates"], given["target"]
    given["bias"][next(i for i in range(V) if i in ids and i not in target)] = -torch.inf
    found = linear_token_stats(**given).candidate_logps
    log_p = (given["input"] @ given["weight"].T + given["bias"]).log_softmax(-1)
    exact = log_p.gather(-1, ids).masked_fill((target == -100)[..., None], 0)
    assert exact.min() == -torch.inf
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


def at_the_first(value: float) -> Any:
    return lambda x: x.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(value))


OUTSIDE = "temperature must be positive and finite at each token that counts, got"
# An argument, its change, and the error.
REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("temperature", Tensor.double, TypeError, r"a number or a float32 tensor, got \(4, 10\) float64 on cpu"),
    ("temperature", lambda x: x[:, :1], ValueError, r"or \(4, 10\) on cpu, one .* target, got \(4, 1\) float32"),
    ("temperature", lambda x: x.to("meta"), ValueError, r"on cpu, one value .*, got \(4, 10\) float32 on meta"),
    ("temperature", Tensor.requires_grad_, ValueError, r"treats temperature as a constant, .*temperature\.detach\(\)"),
    ("temperature", at_the_first(0.0), ValueError, f"{OUTSIDE} 0 to "),
    ("temperature", torch.neg, ValueError, f"{OUTSIDE} -"),
    ("temperature", at_the_first(torch.inf), ValueError, f"{OUTSIDE} .* to inf"),
    ("candidates", Tensor.double, TypeError, "candidates must be a tensor of token ids"),
    ("candidates", lambda x: x[:, 1:], ValueError, r"candidates must be \(4, 10, 'K'\)"),
    ("candidates", lambda x: x + V, ValueError, r"candidates holds \d+, expected an index into the vocab.* 0 to"),
    ("candidates", lambda x: x[..., [0, 1, 0]], ValueError, "candidates holds an id twice"),
]


@pytest.mark.parametrize(("argument", "change", "error", "message"), REFUSED)
def test_refused(argument: str, change: Any, error: type[Exception], message: str) -> None:
    given = batch()
    given["temperature"] = given["temperature"].nan_to_num(1.0)
    with pytest.raises(error, match=message):
        linear_token_stats(**given | {argument: change(given[argument])})


# Policy losses with temperatures of tokens


def completions(seed: int = 0) -> dict[str, Any]:
    """Return a batch of GRPO with states of a reference, and two temperatures' rollouts."""
    sample = rollouts(SMALL._replace(length=8), seed, ref="states")
    del sample["bias"], sample["ref_bias"]
    counts = sample["target"] != -100
    temperature = 0.4 + 1.5 * torch.rand(counts.shape, generator=torch.Generator().manual_seed(seed + 7))
    return sample | {"temperature": temperature.where(counts, torch.nan)}


def exact_grpo(**given: Any) -> Tensor:
    return eager.grpo(**given)[0]


def loss_and_gradients(function: Any, given: dict[str, Any], **settings: Any) -> dict[str, Tensor]:
    leaves = {name: given[name].clone().requires_grad_() for name in ("weight", "input")}
    loss = function(**(given | leaves), **settings)
    loss.backward()
    return {"loss": loss.detach()} | {name: x.grad for name, x in leaves.items() if x.grad is not None}


def grpo(logits_budget: int | None = None, **given: Any) -> Tensor:
    settings = {name: given.pop(name) for name in tuple(given) if name in GRPO}
    return lc.LigerFusedLinearGRPOLoss(logits_budget=logits_budget, **settings)(**given)[0]


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
    assert_same(loss_and_gradients(grpo, given, logits_budget=budget, **settings), exact, BOUND)


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
    ran = [noted(monkeypatch, x, "statistics", lambda *_: None) for x in (EpilogueSource, EpilogueStatistics)]
    settings = {"beta": 0.1, "logits_budget": 2 * 23 * 16}  # several chunks: the epilogue needs a float32 dW
    found = loss_and_gradients(grpo, given, **settings)
    assert not any(ran)
    doubles = {name: x.double() if x.dtype == torch.bfloat16 else x for name, x in given.items()}
    # bfloat16 logits and gradients: an error of 2**-8 each, truncated in the interpreter.
    assert_same(found, loss_and_gradients(exact_grpo, doubles, beta=0.1), 0.05)
    loss_and_gradients(grpo, without(given, "temperature"), **settings)
    assert all(ran)  # the second for the reference


# Ranks


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
            assert_same(found, exact | {"input": exact["input"][:, positions]}, BOUND)
            for input_grad, part in (("all_reduce", slice(None)), ("reduce_scatter", slice(rank * 4, rank * 4 + 4))):
                own = given | {name: given[name][rows] for name in heads}
                own |= {name: given[name][:, part] for name in states}
                shard = {"vocab_shard": VocabShard(None, rows.start, 23, input_grad=input_grad)}  # type: ignore[arg-type]
                found = loss_and_gradients(grpo, own | shard, logits_budget=budget, **settings)
                expected = exact | {"weight": exact["weight"][rows], "input": exact["input"][:, part]}
                assert_same(found, expected, BOUND)
    dist.destroy_process_group()


def of_a_vocabulary(rank: int, folder: str) -> None:
    """Two ranks split the vocabulary, whose second part may have no rows, in float64 and with float32 logits."""
    join(rank, 2, folder)
    for dtype, options, split in ((torch.float64, {}, 20), (torch.float64, {}, V), (torch.bfloat16, WIDE, 20)):
        given = batch(dtype=dtype)
        rows = (slice(0, split), slice(split, V))[rank]
        exact = evaluate(eager.token_stats, doubles(given))
        exact |= {name: exact[name][rows] for name in ("dweight", "dbias")}
        own = given | {name: given[name][rows] for name in ("weight", "bias")}
        shard = VocabShard(None, rows.start, V)
        for budget in BUDGETS.values():
            n_bytes = budget and (6 if options else 8) * budget
            found = evaluate(ours, own, vocab_shard=shard, logits_budget=n_bytes, **options)
            if options:
                assert_float32(found, exact)
            else:
                assert_same(found, exact, BOUND)
    dist.destroy_process_group()
