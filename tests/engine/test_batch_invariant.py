"""`deterministic="batch"`: a token's values have the same bits in any batch, at any place, with any budget."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from table import relative_error
from torch import Tensor

from liger_chunked import AdaptedWeight, VocabShard, eager, linear_token_stats
from liger_chunked.engine import all_rows, choose
from liger_chunked.engine.filtered import FilteredTokenPass
from liger_chunked.engine.sampling import SamplingFilter
from liger_chunked.kernels import backend
from liger_chunked.types import HeadTensors, LogitOptions, LossHead

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


@compiled_only
@pytest.mark.parametrize("low_rank", [False, True])
def test_bits_do_not_follow_the_strides_of_the_input(low_rank: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, input = (torch.randn(n, 65, generator=generator).half() for n in (1000, 17))
    target = torch.randint(1000, (17,), generator=generator)
    head: Tensor | AdaptedWeight = weight
    by_column = input.t().contiguous().t()

    def values(x: Tensor) -> list[Tensor]:
        given = head if x is input or not low_rank else AdaptedWeight(weight, up, lambda _: u.t().contiguous().t())
        stats = linear_token_stats(given, x, target, outputs=FLOATS, deterministic="batch")
        return [getattr(stats, name) for name in FLOATS]

    if low_rank:
        up, u = (torch.randn(n, 65, generator=generator).half() / 8 for n in (1000, 17))
        head = AdaptedWeight(weight, up, lambda _: u)
    for name, a, b in zip(FLOATS, values(input), values(by_column), strict=True):
        assert torch.equal(a, b), name


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values_and_gradients(dtype: torch.dtype) -> None:
    given, tolerance = batch(dtype), {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    leaves = [given[name].requires_grad_() for name in ("weight", "input", "bias")]
    doubles = {name: x.detach().double() if x.is_floating_point() else x for name, x in given.items()}
    exact_leaves = [doubles[name].requires_grad_() for name in ("weight", "input", "bias")]
    stats = invariant(**given, outputs=FLOATS)
    exact = eager.token_stats(**doubles, outputs=FLOATS)
    for name in FLOATS:
        assert relative_error(getattr(stats, name).detach(), exact[name].detach()) < tolerance, name
    total = sum((getattr(stats, name).square().sum() for name in FLOATS), torch.zeros((), dtype=dtype))
    expected = sum((exact[name].square().sum() for name in FLOATS), torch.zeros((), dtype=torch.float64))
    for g, e in zip(torch.autograd.grad(total, leaves), torch.autograd.grad(expected, exact_leaves), strict=True):
        assert relative_error(g, e) < tolerance


def test_nothing_valid() -> None:
    given = batch(torch.float32)
    stats = invariant(**given | {"target": torch.full((N,), -100)})
    assert stats.logps is not None and not stats.logps.any()


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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_bits_on_a_gpu() -> None:
    device = torch.device("cuda")
    given = batch(torch.bfloat16, "cuda", bias=False)
    if not backend.has_wide_tiles(device):
        with pytest.raises(ValueError, match="needs Hopper"):
            invariant(**given)
        return
    every = invariant(**given, outputs=FLOATS, temperature=0.7)
    compare(given, FLOATS, every, temperature=0.7)
    for refused in ({"softcap": 3.0}, {"bias": torch.zeros(V, device=device, dtype=torch.bfloat16)}):
        with pytest.raises(ValueError, match="needs Hopper"):
            invariant(**given | refused)


def test_a_filter_on_single_rows() -> None:
    plan = choose.for_statistics(
        LossHead(torch.ones(11, 4)),
        all_rows((5,)),
        torch.float32,
        outputs=("logps",),
        options=LogitOptions(),
        filter=SamplingFilter(top_k=3),
        batch_invariant=True,
    )
    assert plan.path is choose.Path.BY_TOKEN
    assert isinstance(choose.pass_of_statistics(plan, HeadTensors(torch.ones(11, 4))), FilteredTokenPass)
