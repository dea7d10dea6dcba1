"""The softmax over the ids that a sampler kept, against eager code in float64 that masks whole rows of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import eager
import pytest
import torch
import torch.distributed as dist
from ranks import join, same_on_all_ranks, summed
from table import assert_same, products_for_kept_ids
from test_capture import Waits
from test_learned import LearnedTemperature
from test_token_stats import adapted, evaluate, ours, without
from torch import Tensor

from liger_chunked import KeptIds, LigerFusedLinearGRPOLoss, VocabShard, linear_token_stats
from liger_chunked.engine import choose
from liger_chunked.types import LossHead

B, T, H, V, R = 2, 5, 8, 23, 3
OUTPUTS = ("logps", "lse", "entropy", "argmax", "is_top1")
SUMS = {"rtol": 1e-12, "atol": 1e-12}  # float64 both times: only the order of sums differs


def drawn_lists(target: Tensor, seed: int = 0, mixed: bool = True) -> list[list[int]]:
    """Return each position's ids, with its target: singletons, several, all; if `mixed`, also empty lists."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i, y in enumerate(target.reshape(-1).tolist()):
        n = [1, 4, 0 if mixed else 2, V, 7][i % 5]
        ids = torch.randperm(V, generator=generator)[:n].tolist()
        if n and y >= 0 and y not in ids:
            ids[0] = y
        found.append(ids)
    return found


def as_mask(lists: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([[not ids or i in ids for i in range(V)] for ids in lists])


def batch(dtype: torch.dtype = torch.float64, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    drawn = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)
        for name, shape in (("weight", (V, H)), ("input", (B, T, H)), ("bias", (V,)), ("down", (H, R)), ("up", (V, R)))
    }
    target = torch.randint(V, (B, T), generator=generator)
    target[1, 3:] = -100
    return {**drawn, "target": target.to(device)}


WAYS = {"rows": nullcontext, "products": products_for_kept_ids}
both_ways = pytest.mark.parametrize("way", WAYS)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {},
    "softcap": {"softcap": 3.0, "logit_scale": 0.5},
    "temperatures": {"temperature": (0.5 + torch.rand(B, T, generator=torch.Generator().manual_seed(1))).float()},
    "adapter": {},
}


@pytest.mark.few(5, "bias---rows", "plain---rows", "temperatures---rows")
@both_ways
@pytest.mark.parametrize("budget", [None, 8 * 40], ids=["", "tiles"])
@pytest.mark.parametrize("mixed", [False, True], ids=["", "mixed"])
@pytest.mark.parametrize("case", CASES)
def test_statistics(case: str, mixed: bool, budget: int | None, way: str) -> None:
    if budget is not None and way == "rows" and not mixed:
        pytest.skip("reading rows forms no logits that a budget could cut")
    given, options = batch(), {"temperature": 0.7} | CASES[case]
    lists, function = drawn_lists(given["target"], mixed=mixed), adapted if case == "adapter" else lambda f: f
    given = without(given, *(() if case == "adapter" else ("down", "up")), *(() if case == "bias" else ("bias",)))
    exact = evaluate(function(eager.token_stats), given, OUTPUTS, kept=as_mask(lists).view(B, T, V), **options)
    with WAYS[way]():
        kept = KeptIds.from_lists(lists)
        found = evaluate(function(ours), given, OUTPUTS, kept=kept, logits_budget=budget, **options)
    assert_same(found, exact, 1e-9)


def test_long_lists_take_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of ids of all tokens, in 16 bits, where the step is large."""
    n, v, h = 8192, 151936, 4096
    head = LossHead(torch.empty(v, h, device="meta"))
    taken = partial(choose.kept_ids_take_products, head=head, dtype=torch.bfloat16)
    assert not taken(n * v // 180 - 1, n) and taken(n * v // 180 + 1, n)
    assert taken(n * v // 1000 + 1, n, one_of=1000) and not taken(n * v // 1000 - 1, n, one_of=1000)
    assert not taken(n * v // 4, 16, smallest=16 * v * h + 1) and taken(n * v // 4, 16, smallest=16 * v * h)
    assert not taken(n * v // 4, n, dtype=torch.float32)
    # A call counts its own ids, tokens with a target and ids.
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(choose, "kept_ids_take_products", lambda *given: asked.append(given) or len(asked) == 2)
    given = batch()
    call, lists = (given["weight"], given["input"], given["target"]), drawn_lists(given["target"])
    n_ids, n_tokens = sum(map(len, lists)), int((given["target"] >= 0).sum()) - 2
    torch.testing.assert_close(
        *(linear_token_stats(*call, kept=KeptIds.from_lists(lists)).logps for _ in range(2)), **SUMS
    )
    assert [x[:2] for x in asked] == [(n_ids, n_tokens)] * 2
    linear_token_stats(*call, kept=KeptIds.from_lists(lists), deterministic="batch")
    assert len(asked) == 2  # products may depend on the batch


def test_a_token_does_not_depend_on_the_batch() -> None:
    given = batch(torch.float32)
    lists = drawn_lists(given["target"], mixed=False)
    whole = linear_token_stats(given["weight"], given["input"], given["target"], kept=KeptIds.from_lists(lists))
    one = linear_token_stats(
        given["weight"], given["input"][:1], given["target"][:1], kept=KeptIds.from_lists(lists[:T])
    )
    assert torch.equal(whole.logps[:1], one.logps)


def test_no_logits_of_other_ids_are_read() -> None:
    """NaN in every other row of the head reaches neither values nor gradients."""
    given = batch(torch.float32)
    lists = [[y if y >= 0 else 0, 3] if y != 3 else [3] for y in given["target"].reshape(-1).tolist()]
    read = sorted({i for ids in lists for i in ids})
    weight = given["weight"].clone()
    weight[[i for i in range(V) if i not in read]] = math.nan
    weight.requires_grad_()
    input = given["input"].requires_grad_()
    stats = linear_token_stats(weight, input, given["target"], kept=KeptIds.from_lists(lists))
    assert stats.logps is not None
    stats.logps.sum().backward()
    assert weight.grad is not None and input.grad is not None
    assert stats.logps.isfinite().all() and input.grad.isfinite().all() and weight.grad.isfinite().all()
    others = torch.ones(V, dtype=torch.bool)
    others[read] = False
    assert (weight.grad[others] == 0).all()


def test_a_reference_has_the_same_ids_and_temperatures() -> None:
    given = batch()
    kept, target = KeptIds.from_lists(drawn_lists(given["target"])), given["target"]
    generator = torch.Generator().manual_seed(6)
    temperature = 0.5 + torch.rand(B, T, generator=generator)
    ref_weight, ref_input = torch.randn(V, R, generator=generator).double(), torch.randn(B, T, R, generator=generator)
    call = given["weight"], given["input"], target, torch.tensor([1.0, -0.5], dtype=torch.float64)
    shared: dict[str, Any] = {"kept": kept, "temperature": temperature}
    states = ref_input.double()
    ref_logps = linear_token_stats(ref_weight, states, target, **shared).logps
    loss = LigerFusedLinearGRPOLoss(beta=0.3)
    found, metrics = loss(*call, ref_input=states, ref_weight=ref_weight, **shared)
    expected, of_logps = loss(*call, ref_logps=ref_logps, **shared)
    assert torch.equal(found, expected) and metrics.kl is not None and of_logps.kl is not None
    assert torch.equal(metrics.kl, of_logps.kl) and metrics.kl > 0
    of_itself, zero = loss(*call, ref_input=given["input"], ref_weight=given["weight"], **shared)
    assert of_itself.isfinite() and zero.kl is not None and abs(float(zero.kl)) < 1e-12


@both_ways
def test_packed_sequences(way: str) -> None:
    given = batch()
    lists = drawn_lists(given["target"])
    advantages = torch.tensor([1.0, -0.5], dtype=torch.float64)
    padded, _ = LigerFusedLinearGRPOLoss()(
        given["weight"], given["input"], given["target"], advantages, kept=KeptIds.from_lists(lists)
    )
    flat = [x.reshape(B * T, *x.shape[2:])[: T + 3] for x in (given["input"], given["target"])]
    with WAYS[way]():
        found, _ = LigerFusedLinearGRPOLoss()(
            given["weight"], *flat, advantages, kept=KeptIds.from_lists(lists[: T + 3]),
            cu_seqlens=torch.tensor([0, T, T + 3], dtype=torch.int32),
        )  # fmt: skip
    torch.testing.assert_close(found, padded, **SUMS)


LISTS = drawn_lists(batch()["target"])
KEPT, FIRST = KeptIds.from_lists(LISTS), int(batch()["target"][0, 1])


def with_second(ids: list[int]) -> dict[str, Any]:
    return {"kept": KeptIds.from_lists([LISTS[0], ids, *LISTS[2:]])}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (with_second([(FIRST + 1) % V, (FIRST + 2) % V]), ValueError, "no id .* at position 1 of the flattened target"),
        (with_second([FIRST, 2, 2]), ValueError, "distinct within a position"),
        (with_second([FIRST, V]), ValueError, "indices into the vocabulary"),
        ({"kept": KeptIds.from_lists(LISTS[:-1])}, ValueError, "the ids of 10 positions"),
        ({"kept": LISTS}, TypeError, "kept must be a KeptIds"),
        ({"kept": KEPT, "outputs": ("mean_logits",)}, ValueError, "mean_logits"),
        ({"kept": KEPT, "candidates": torch.zeros(B, T, 1).long()}, ValueError, "got candidates as well"),
        # Position 2 has an empty list.
        (
            {"kept": KEPT, "target": batch()["target"].index_fill(1, torch.tensor([2]), V)},
            ValueError,
            "target holds 23",
        ),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    call = {name: x for name, x in batch(torch.float32).items() if name in ("weight", "input", "target")}
    with pytest.raises(error, match=message):
        linear_token_stats(**call | options)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: KeptIds(KEPT.ids.float(), KEPT.offsets), TypeError, "integers"),
        (lambda: KeptIds.from_mask(torch.tensor([[True], [False]])), ValueError, "keeps no id at position 1"),
        (lambda: KeptIds(KEPT.ids, KEPT.offsets, math.nan), ValueError, "KeptIds.temperature must be positive and fin"),
        (lambda: top_p(top_k=0), ValueError, "top_k must be 1 or more, or None, got 0"),
        (lambda: top_p(top_p=0.0), ValueError, r"top_p must be in \(0, 1\], or None, got 0.0"),
    ],
)
def test_refused_ids(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def top_p(**options: Any) -> KeptIds:
    return KeptIds.from_top_p(torch.zeros(3, 5), **options)


def test_nearly_all_of_the_mass() -> None:
    """A float32 sum of many probabilities reaches 1 before the last."""
    logits = torch.randn(2, 32000, generator=torch.Generator().manual_seed(0)) * 4
    kept = KeptIds.from_top_p(logits, 1 - 1e-6)
    # `1 - top_p` of float64 times a sum of float32: within its rounding.
    mass = logits.double().softmax(-1).sort(-1).values.cumsum(-1)
    for count, of_row in zip(kept.offsets.diff().tolist(), mass, strict=True):
        least, most = (int((of_row > 1e-6 * (1 + x)).sum()) for x in (1e-3, -1e-3))
        assert least <= count <= most < 32000


def test_sources_agree() -> None:
    """`from_top_p` is what transformers' samplers keep, `from_mask` and `from_lists` hold the same ids."""
    warpers = pytest.importorskip("transformers.generation.logits_process")
    z = torch.randn(6, V, generator=torch.Generator().manual_seed(0)) * 2
    options = {"top_k": 9, "top_p": 0.8, "min_p": 0.1, "temperature": 0.7}
    scores = warpers.TemperatureLogitsWarper(0.7)(None, z)
    for kind, value in (("TopKLogitsWarper", 9), ("TopPLogitsWarper", 0.8), ("MinPLogitsWarper", 0.1)):
        scores = getattr(warpers, kind)(value)(None, scores)
    kept = KeptIds.from_top_p(z, **options)
    by_mask = KeptIds.from_mask(scores > -math.inf)
    assert torch.equal(kept.ids, by_mask.ids) and torch.equal(kept.offsets, by_mask.offsets)
    assert 0 < kept.ids.numel() < 6 * 9
    lists = [row.nonzero()[:, 0].tolist() for row in scores > -math.inf]
    assert torch.equal(KeptIds.from_lists(lists).ids, kept.ids)
    everything = KeptIds.from_mask(torch.ones(2, V, dtype=torch.bool))
    assert everything.ids.numel() == 0 and everything.positions == 2


@both_ways
@pytest.mark.parametrize("when", ["between calls", "before the backward"])
@pytest.mark.parametrize("whose", ["caller", "own"])
def test_writes_that_torch_does_not_count(whose: str, when: str, way: str) -> None:
    """A caller fills its buffers with the ids of the next batch: a `KeptIds` keeps the ids that it was made from."""
    given = batch()
    weight, target = given["weight"].requires_grad_(), given["target"].fill_(3)
    now = KeptIds.from_lists([[3, 5, 9, i + 10] for i in range(B * T)])
    later = KeptIds.from_lists([[3, 22 - i, 0] + [1, 2] * (i % 2) for i in range(B * T)])  # as many in all
    buffers = torch.from_numpy(now.ids.numpy().copy()), torch.from_numpy(now.offsets.numpy().copy())
    kept = KeptIds(*buffers)

    def logps_of(ids: KeptIds) -> Tensor:
        return linear_token_stats(weight, given["input"], target, kept=ids).logps

    with WAYS[way]():
        expected = logps_of(now)
        found = logps_of(kept)
        written = (kept.ids, kept.offsets) if whose == "own" else buffers
        for x, new in zip(written, (later.ids, later.offsets), strict=True):
            x.data.copy_(new)
        if when == "between calls":
            found = logps_of(kept)
        assert torch.equal(found, expected)
        assert torch.equal(*(torch.autograd.grad(x.sum(), weight)[0] for x in (found, expected)))


def test_the_temperature_of_kept_ids() -> None:
    """A softmax over ids that were drawn at another temperature is not the sampler's."""
    given = batch(torch.float32)
    weight, input, target = given["weight"], given["input"], given["target"]
    lists, valid = drawn_lists(target, mixed=False), target >= 0
    mask = as_mask(lists)
    logits = torch.where(mask, 10.0, -10.0)
    per_token = torch.full((B, T), 0.7).masked_fill(~valid, 3.0)
    kept = KeptIds.from_lists(lists, temperature=0.7)
    completions = [lists[i * T : i * T + int(n)] for i, n in enumerate(valid.sum(1))]
    made = [
        kept,
        KeptIds(kept.ids, kept.offsets, 0.7),
        KeptIds.from_top_p(logits, top_p=0.999, temperature=0.7),
        KeptIds.from_mask(mask, temperature=0.7),
        KeptIds.from_completions(completions, target, temperature=0.7),
        KeptIds.from_completions([KeptIds.from_lists(x, temperature=0.7) for x in completions], target),
        kept.to("cpu").take(torch.arange(B * T)),
        KeptIds.cat([kept.take(torch.arange(3)), kept.take(torch.arange(3, B * T))]),
    ]
    grpo = partial(LigerFusedLinearGRPOLoss(), weight, input, target, torch.ones(B))
    stats = partial(linear_token_stats, weight, input, target)
    for ids in made:
        assert ids.temperature == 0.7
        for call in (stats, grpo):
            call(kept=ids, temperature=per_token)
            for options, got in (({}, "1"), ({"temperature": per_token + 0.1}, "0.8")):
                with pytest.raises(
                    ValueError, match=f"kept was drawn at temperature 0.7, but this call divides .* {got}:"
                ):
                    call(kept=ids, **options)
    unknown = [KeptIds(kept.ids, kept.offsets), KeptIds.cat([kept, KeptIds.from_lists([[1]], temperature=0.8)])]
    assert [x.temperature for x in unknown] == [None, None]
    linear_token_stats(weight, input, target, kept=unknown[0], temperature=0.3)


@both_ways
def test_the_host_waits_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For counts and checks of the ids, and for nothing else, in forward and backward."""
    monkeypatch.setattr(choose, "torch_on_host", lambda x: False)  # which reads how many rows have a gradient
    given, read = batch(torch.float32), []
    lists = drawn_lists(given["target"], mixed=False)
    stock = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: read.append(x.shape) or stock(x))
    weight, input, kept = given["weight"].requires_grad_(), given["input"].requires_grad_(), KeptIds.from_lists(lists)
    with Waits() as waits, WAYS[way]():
        stats = linear_token_stats(weight, input, given["target"], outputs=OUTPUTS, kept=kept)
        assert stats.logps is not None and stats.entropy is not None
        (stats.logps + stats.entropy).sum().backward()
    assert not waits.found
    # Products select rows, for which these are counted too.
    assert len(read) == {"rows": 1, "products": 2}[way]


def test_ids_of_completions() -> None:
    """Lists as vLLM and SGLang return them, ids and offsets as slime has them: the same ids at each position."""
    given = batch()
    target = torch.cat([torch.full((B, 2), -100), given["target"]], 1)  # two tokens of prompts before
    valid = (given["target"] >= 0).sum(1).tolist()
    lists = drawn_lists(given["target"])
    rows = [lists[i * T : i * T + n] for i, n in enumerate(valid)]
    expected = KeptIds.from_lists([ids for i in range(B) for ids in [[], [], *rows[i], *[[]] * (T - valid[i])]])
    pairs = [KeptIds.from_lists(row) for row in rows]
    as_int32 = [KeptIds(x.ids.int(), x.offsets.int()) for x in pairs]
    for completions in (rows, pairs, as_int32):
        found = KeptIds.from_completions(completions, target, first=2)
        assert torch.equal(found.ids, expected.ids) and torch.equal(found.offsets, expected.offsets)
    target[0, 0] = 3  # a prompt that counts has the whole vocabulary
    found = KeptIds.from_completions([None, rows[1]], target, first=2)
    assert (found.offsets.diff()[: T + 2] == 0).all()
    assert torch.equal(found.ids, pairs[1].ids)
    with pytest.raises(ValueError, match="sequence 1 has the ids of 2 tokens"):
        KeptIds.from_completions([rows[0], rows[1][:2]], target, first=2)
    with pytest.raises(ValueError, match="the 1 sequences"):
        KeptIds.from_completions(rows[:1], target)
    assert KeptIds.from_completions([], target[:0]).positions == 0


@both_ways
def test_a_call_in_inference_mode_before_one_with_gradients(way: str) -> None:
    """As the old policy's, on the same ids, some positions of which have the whole vocabulary."""
    given = batch(torch.float32)
    weight, call = given["weight"].requires_grad_(), (given["input"], given["target"])
    gradients = []
    with WAYS[way]():
        for before in (False, True):
            with torch.inference_mode(before):
                kept = KeptIds.from_lists(drawn_lists(given["target"]))
                linear_token_stats(weight, *call, kept=kept)
            gradients += torch.autograd.grad(linear_token_stats(weight, *call, kept=kept).logps.sum(), weight)
    assert torch.equal(*gradients)


def on_a_rank(rank: int, folder: str) -> None:
    join(rank, 2, folder)
    for way, input_grad in (("rows", "all_reduce"), ("products", "partial")):
        on_a_part_of_the_vocabulary(rank, input_grad, way)
    dist.destroy_process_group()


def on_a_part_of_the_vocabulary(rank: int, input_grad: str, way: str) -> None:
    given, start = batch(), (0, 9)[rank]
    own = slice(start, (9, V)[rank])
    options: dict[str, Any] = {"softcap": 3.0, "kept": KeptIds.from_lists(drawn_lists(given["target"]))}
    expected = evaluate(adapted(ours), given, OUTPUTS, **options)
    parts = given | {name: given[name][own] for name in ("weight", "bias", "up")}
    expected |= {f"d{name}": expected[f"d{name}"][own] for name in ("weight", "bias", "up")}
    shard = VocabShard(None, start, V, input_grad)  # type: ignore[arg-type]
    with WAYS[way]():
        found = evaluate(adapted(ours), parts, OUTPUTS, vocab_shard=shard, **options)
    assert all(same_on_all_ranks(found[name]) for name in OUTPUTS)
    if input_grad == "partial":
        found |= {name: summed(found[name]) for name in ("dinput", "ddown")}
    assert_same(found, expected, 1e-12)


def of_positions(rank: int, folder: str) -> None:
    join(rank, 2, folder)
    for lengths in ((2, 3), (5, 0)):
        on_positions(rank, lengths)
    dist.destroy_process_group()


def on_positions(rank: int, lengths: tuple[int, int]) -> None:
    given = batch()
    lists, own = drawn_lists(given["target"]), slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    generator = torch.Generator().manual_seed(5)
    sides = {
        name: -2 + torch.randn(B, T, generator=generator, dtype=torch.float64) for name in ("old_logps", "ref_logps")
    }
    advantages = torch.tensor([1.0, -0.5], dtype=torch.float64)
    loss = LigerFusedLinearGRPOLoss(importance_level="sequence", beta=0.1, entropy_coef=0.05)
    kept = KeptIds.from_lists(lists)
    columns = torch.arange(B * T).view(B, T)[:, own].reshape(-1)
    found = []
    for part, ids, group in ((slice(None), kept, None), (own, kept.take(columns), dist.group.WORLD)):
        weight, input = given["weight"].clone().requires_grad_(), given["input"][:, part].clone().requires_grad_()
        value, metrics = loss(
            weight, input, given["target"][:, part], advantages, kept=ids, sequence_group=group,
            **{name: x[:, part] for name, x in sides.items()},
        )  # fmt: skip
        value.backward()
        assert weight.grad is not None and input.grad is not None
        found.append((value.detach(), metrics.entropy, weight.grad, input.grad))
    whole, split = found
    assert same_on_all_ranks(split[0])
    torch.testing.assert_close(split[:2], whole[:2], **SUMS)
    torch.testing.assert_close(summed(split[2]), whole[2], **SUMS)
    torch.testing.assert_close(split[3], whole[3][:, own], **SUMS)
    own_tokens = given["weight"], given["input"][:, own], given["target"][:, own], advantages
    own_ids, own_sides = kept.take(columns), {name: x[:, own] for name, x in sides.items()}
    with pytest.raises(ValueError, match=r"requires a gradient, tau .*sequence_group"):
        LearnedTemperature()(*own_tokens, kept=own_ids, sequence_group=dist.group.WORLD, **own_sides)
