"""`deterministic="batch"`: a token's values have the same bits in any batch, at any place, with any budget."""

from __future__ import annotations

from functools import partial
from typing import Any

import eager
import pytest
import torch
from sampling import exhaustive
from spies import noted
from table import assert_same, relative_error
from test_token_stats import doubles, evaluate, ours
from torch import Tensor

from liger_chunked import AdaptedWeight, VocabShard, linear_token_stats
from liger_chunked.engine.invariant import InvariantSource
from liger_chunked.kernels import backend

N, H, V = 75, 40, 331
FLOATS = ("logps", "lse", "entropy", "mean_logits")
ALL = (*FLOATS, "argmax", "log_sum_sq_probs")
compiled_only = pytest.mark.skipif(
    backend.INTERPRETED, reason="numpy's functions follow the alignment of their operands"
)
invariant = partial(linear_token_stats, deterministic="batch")


def batch(dtype: torch.dtype, device: str = "cpu", bias: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    found = {"weight": draw(V, H) / 2, "input": draw(N, H)} | ({"bias": draw(V)} if bias else {})
    return found | {"target": torch.randint(V, (N,), generator=generator).to(device)}


PARTS = [torch.tensor([74, 3, 41, 3, 0, 40]), torch.tensor([41]), torch.arange(9, 62)]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transform": {"softcap": 5.0, "logit_scale": 1.3, "temperature": 0.7},
    "budget": {"logits_budget": 7 * V * 4},
    "wide": {"logits_dtype": torch.float32},
}


def compare(given: dict[str, Any], names: tuple[str, ...], every: Any, **options: Any) -> None:
    for part in PARTS:
        part = part.to(given["target"].device)
        some = {name: x[part] if name in ("input", "target", "temperature") else x for name, x in given.items()}
        found = invariant(**some, outputs=names, **options)
        for name in names:
            assert torch.equal(getattr(found, name), getattr(every, name)[part]), (name, part)


@pytest.mark.few(1)
@compiled_only
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_bits(settings: dict[str, Any], dtype: torch.dtype) -> None:
    if "logits_dtype" in settings and dtype == torch.float64:
        pytest.skip("float64 products have no wider logits")
    given = batch(dtype)
    every = invariant(**given, outputs=ALL, **settings)
    compare(given, ALL, every, **{**settings, "logits_budget": None})
    ignored = given | {"target": given["target"].index_fill(0, torch.tensor([0, 5, 73]), -100)}
    found, valid = invariant(**ignored, outputs=ALL, **settings), ignored["target"] != -100
    assert all(torch.equal(getattr(found, name)[valid], getattr(every, name)[valid]) for name in ALL)


@compiled_only
def test_bits_of_an_adapter_and_temperatures() -> None:
    given = batch(torch.float32)
    generator = torch.Generator().manual_seed(4)
    down, up = (torch.randn(*shape, generator=generator) / 3 for shape in ((4, H), (V, 4)))
    # One token at a time: the adapter's own product is the caller's.
    head = AdaptedWeight(given["weight"], up, lambda x: torch.stack([row @ down.t() for row in x.clone()]))
    given |= {"weight": head, "temperature": torch.rand(N, generator=generator) + 0.5}
    compare(given, ALL, invariant(**given, outputs=ALL))


def test_the_default_follows_the_batch() -> None:
    """Otherwise the tests above show nothing."""
    given = batch(torch.float32)
    every = linear_token_stats(**given, outputs=FLOATS)
    differ = False
    for part in PARTS:
        found = linear_token_stats(**given | {"input": given["input"][part], "target": given["target"][part]})
        assert found.logps is not None and every.logps is not None
        differ |= not torch.equal(found.logps, every.logps[part])
    assert differ


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values_and_gradients(dtype: torch.dtype) -> None:
    given = batch(dtype)
    exact = evaluate(eager.token_stats, doubles(given), FLOATS)
    found = evaluate(partial(ours, deterministic="batch"), given, FLOATS)
    assert_same(found, exact, {torch.float64: 1e-12, torch.float32: 1e-5}[dtype])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deterministic": "all"}, "deterministic must be \"batch\" or None, got 'all'"),
        ({"vocab_shard": VocabShard(None, 0, V)}, 'deterministic="batch" does not take vocab_shard'),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_token_stats(**batch(torch.float32), **{"deterministic": "batch"} | options)


@pytest.mark.gpu
def test_bits_on_a_gpu() -> None:
    device = torch.device("cuda")
    given = batch(torch.bfloat16, "cuda", bias=False)
    if not backend.has_wide_tiles(device):
        with pytest.raises(ValueError, match="needs Hopper"):
            invariant(**given)
        return
    every = invariant(**given, outputs=FLOATS, temperature=0.7)
    compare(given, FLOATS, every, temperature=0.7)
    weight = given["weight"]
    adapted = AdaptedWeight(weight, weight[:, :8], lambda x: x[:, :8])
    for refused in ({"weight": adapted}, {"weight": weight.float(), "input": given["input"].float()}):
        with pytest.raises(ValueError, match="needs Hopper"):
            invariant(**given | refused)


# What the fused epilogue does not compute.
OTHERS: dict[str, dict[str, Any]] = {
    "argmax": {},
    "softcap": {"softcap": 5.0, "logit_scale": 1.3, "temperature": 0.7},
    "bias": {"bias": True},
    "temperatures of tokens": {"temperature": True},
}


@pytest.fixture
def passes(by_epilogue: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the tiles of each pass on rows that are treated alike."""
    return noted(monkeypatch, InvariantSource, "_reduce", lambda source, tokens: len(tokens.tiles))


def coarse(dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return a batch whose logits are multiples of 1/8 below 16, which every dtype holds. Many are equal."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randint(-1, 2, (V, H), generator=generator) / 8
    input = torch.randint(-3, 4, (N, H), generator=generator)
    target = (input.double() @ weight.double().t()).topk(3).indices[:, 1]
    target[::9] = -100
    return {"weight": weight.to(device, dtype), "input": input.to(device, dtype), "target": target.to(device)}


INTERPRETED_FIRST = ("bias", "softcap", "temperatures of tokens")  # the interpreter takes seconds for each


@pytest.mark.few(3)
@pytest.mark.triton
@pytest.mark.parametrize(
    "name", [exhaustive([x], x, backend.INTERPRETED and x not in INTERPRETED_FIRST) for x in OTHERS]
)
def test_values_and_gradients_of_logits_in_memory(name: str, device: str, passes: list[int]) -> None:
    """Of logits that no dtype rounds, values are those of float32 sums."""
    budget = None if name == "bias" else 7 * V * 2
    options, given = OTHERS[name], coarse(torch.bfloat16, device)
    if "bias" in options:
        options, given = {}, given | {"bias": (torch.arange(V, device=device) % 5 / 8).bfloat16()}
    if options.get("temperature") is True:
        options = {"temperature": torch.tensor([0.5, 1.0, 2.0], device=device).repeat_interleave(N // 3)}
    found = evaluate(partial(ours, deterministic="batch"), given, ALL, **options, logits_budget=budget)
    exact = evaluate(eager.token_stats, doubles(given), ALL, **options)
    of_eager_code = evaluate(eager.token_stats, given, ALL, **options)
    assert passes == [1 if budget is None else 10]
    valid = given["target"] != -100
    for x in ALL:
        if x == "argmax":
            z = given["input"].double() @ given["weight"].double().t()
            z = (z + given["bias"].double() if "bias" in given else z)[valid]
            assert torch.equal(z.gather(1, found[x][valid].long()[:, None])[:, 0], z.amax(1))
        else:  # the logits are exact in 16 bits: what is left are float32's rounding and the GPU's exp2, of a sum of V
            torch.testing.assert_close(found[x][valid].double(), exact[x][valid].double(), rtol=1e-5, atol=2e-5, msg=x)
    # Triton's interpreter truncates to bfloat16, which doubles the error of the gradient of logits.
    factor = 1.1 * (1 + backend.INTERPRETED)
    for x in exact.keys() - {*ALL}:  # gradients
        assert relative_error(found[x], exact[x]) <= factor * relative_error(of_eager_code[x], exact[x]), x


def same(found: Tensor, expected: Tensor, interpreted: bool) -> bool:
    """Whether bits are equal. The interpreter's sums follow the alignment of their operands: a few roundings there."""
    return torch.equal(found, expected) or (interpreted and torch.allclose(found, expected, rtol=1e-6, atol=1e-6))


@pytest.mark.few(5)
@pytest.mark.triton
@pytest.mark.parametrize("wide", [False, True], ids=["16 bits", "float32"])
@pytest.mark.parametrize(
    "name", [exhaustive([x], x, backend.INTERPRETED and x not in INTERPRETED_FIRST[1:]) for x in OTHERS]
)
def test_bits_of_logits_in_memory(name: str, wide: bool, device: str, passes: list[int]) -> None:
    """A token has the same bits alone, in another batch and place, with another budget, stride and alignment."""
    interpreted = device == "cpu"
    if interpreted and wide:
        # Logits of 16 bits run the same kernels here; other bits are a matter of a GPU's variants alone.
        pytest.skip("takes seconds in the interpreter")
    options = dict(OTHERS[name])
    given = batch(torch.bfloat16, device, bias=options.pop("bias", False))
    given["target"] = (given["input"] @ given["weight"].t()).topk(3).indices[:, 1].contiguous()
    if interpreted:  # where logits are exact: its products follow their shape
        given |= coarse(torch.bfloat16, device)
        given["target"] = given["target"].where(given["target"] >= 0, 0)
    if options.get("temperature") is True:
        given["temperature"] = torch.linspace(0.5, 2.0, N, device=device)
        del options["temperature"]
    if wide:
        options["logits_dtype"] = torch.float32
    names = (*ALL, "candidate_logps")
    generator = torch.Generator().manual_seed(6)
    candidates = torch.rand(N, V, generator=generator).topk(4).indices.to(device)
    by_token = ("input", "target", "temperature")

    def values(rows: Tensor, **more: Any) -> list[Tensor]:
        some = {x: y[rows] if x in by_token else y for x, y in given.items()}
        found = invariant(**some | more, candidates=candidates[rows], outputs=names[:-1], **options)
        return [getattr(found, x) for x in names]

    everything = torch.arange(N, device=device)
    every = values(everything)
    assert every[0].isfinite().any() and passes == [1]
    shifted = torch.empty(N * H + 1, dtype=torch.bfloat16, device=device)[1:].view(N, H).copy_(given["input"])
    apart = torch.empty(N, 3 * H, dtype=torch.bfloat16, device=device)[:, :H].copy_(given["input"])
    checks = [(part.to(device), {}) for part in (*PARTS, torch.tensor([74]))]
    checks += [(everything, {"logits_budget": rows * V * (6 if wide else 2)}) for rows in (1, 7, 32)]
    checks += [(everything, {"input": x}) for x in (shifted, apart)]
    checks += [(everything[17:18], {"input": x[17:18]}) for x in (shifted, apart)]
    if interpreted:
        checks = [checks[0], checks[3], checks[5], checks[-2]]
    for rows, more in checks:
        for x, found, expected in zip(names, values(rows, **more), every, strict=True):
            assert same(found, expected[rows], interpreted), (x, rows, more)
    assert max(passes) == (11 if interpreted else 75)
    if interpreted:
        return
    leaf = given["input"].clone().requires_grad_()
    assert torch.equal(values(everything, input=leaf)[0].detach(), every[0])
