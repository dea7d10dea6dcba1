"""Rows without a gradient take no part in the backward: how many products a step takes, and that its results stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import eager
import pytest
import torch
from spies import Memory, flop_counter, memory_beside, noted
from table import Batch, Sizes, assert_same, evaluate, moved, products_for_kept_ids, relative_error, rollouts
from torch import Tensor

import liger_chunked as lc
from liger_chunked.engine import choose, distillation, epilogue, live_rows
from liger_chunked.engine.cutting import Tile
from liger_chunked.engine.live_rows import LiveCount
from liger_chunked.kernels import LogitsCotangents, logits_grad_

SIZES = Sizes(sequences=4, length=40, hidden=16, vocab=97, ignored=False)
TOKENS = SIZES.sequences * SIZES.length
ONE = 2 * TOKENS * SIZES.hidden * SIZES.vocab  # FLOPs of a product of all tokens


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small steps leave rows out on a GPU too."""
    monkeypatch.setattr(choose, "SMALLEST_OF_LIVE_ROWS", 0)


@contextmanager
def all_rows() -> Iterator[None]:
    """Leave no rows out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "_skips_rows", lambda *args, **options: False)
        yield


def products(loss: Callable[[Batch], Tensor], batch: Batch, trainable: tuple[str, ...] = ("weight", "input")) -> float:
    leaves = {name: batch[name].clone().requires_grad_() for name in trainable}
    with flop_counter() as counter:
        loss({**batch, **leaves}).backward()
    return counter.get_total_flops() / ONE


def grpo(batch: Batch, **settings: Any) -> Tensor:
    return lc.LigerFusedLinearGRPOLoss(**settings)(**batch)[0]


def with_advantages(fraction: float, seed: int = 0) -> Batch:
    """Return rollouts of which a fraction of the tokens, here and there, has an advantage, and none is clipped."""
    batch = rollouts(SIZES, seed, old=False)
    live = torch.rand(batch["target"].shape, generator=torch.Generator().manual_seed(seed)).argsort()
    live = live < fraction * SIZES.length
    batch["advantages"] = torch.where(live, 1.0, 0.0).double()
    return batch


# Products


@pytest.mark.few(1, "one-chunk-0.5")
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.2, 0.0])
@pytest.mark.parametrize("budget", [None, 8 * 97 * 37], ids=["one-chunk", "chunks"])
def test_products_of_a_policy_loss(fraction, budget):
    """1 for the forward, and dX and dW of the live rows. Tokens are cut into chunks that fit the budget."""
    batch = with_advantages(fraction)
    assert products(partial(grpo, logits_budget=budget), batch) == pytest.approx(1 + 2 * fraction)
    assert products(partial(grpo, logits_budget=budget), batch, ("input",)) == pytest.approx(1 + fraction)


def test_over_the_budget_live_rows_are_projected_again():
    batch = with_advantages(0.2)
    loss = partial(grpo, off_policy_mask_threshold=0.1, logits_budget=8 * 97 * 4)
    assert products(loss, batch) == pytest.approx(1 + 3 * 0.2)


@pytest.mark.few(2, "logps-0.5")
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.2, 0.0])
@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({}, 0),
        ({"outputs": ("logps", "entropy")}, 0),
        ({"logits_budget": 8 * 97 * 4}, 1),
        ({"deterministic": "batch"}, 1),
    ],
    ids=["logps", "entropies", "over-the-budget", "batch-invariant"],
)
def test_products_of_statistics(fraction, options, again):
    batch = with_advantages(fraction)
    live = batch.pop("advantages")

    def loss(batch: Batch) -> Tensor:
        return (lc.linear_token_stats(**batch, **options).logps * live).sum()

    count = products(loss, batch)
    if again and fraction == 1:  # the last tile is in memory
        assert 3.9 <= count < 4
    else:
        assert count == pytest.approx(1 + (2 + again) * fraction)


def test_small_steps_on_a_gpu_take_all_rows(monkeypatch):
    """There the count takes longer than the products. On a CPU it is known at once."""
    monkeypatch.undo()
    assert products(grpo, with_advantages(0.2)) == pytest.approx(1.4)
    monkeypatch.setattr(choose, "torch_on_host", lambda x: False)
    assert products(grpo, with_advantages(0.2)) == pytest.approx(3)


# Losses other than policies, and each kind of pass


LIVE = with_advantages(0.2)["advantages"]


def cross_entropy(batch: Batch, budget: int | None) -> Tensor:
    loss = lc.LigerFusedLinearCrossEntropyLoss(reduction="sum", label_smoothing=0.1, logits_budget=budget)
    return loss(**batch, token_weights=LIVE)


def dpo(batch: Batch, budget: int | None) -> Tensor:
    """Return the loss of two pairs, of which the first is beyond the hinge's margin."""
    loss = lc.LigerFusedLinearDPOLoss(loss_type="hinge", logits_budget=budget)
    return loss(**batch, ref_logps=torch.tensor([-1e4, 1e4, 0.0, 0.0], dtype=torch.float64))[0]


def statistics(batch: Batch, budget: int | None, **options: Any) -> Tensor:
    stats = lc.linear_token_stats(**batch, logits_budget=budget, **options)
    return sum((value * LIVE).sum() for value in (stats.logps, stats.lse) if value is not None)


def kept_ids(batch: Batch, budget: int | None) -> Tensor:
    """Return statistics of long lists of kept ids, which take products."""
    n, k = batch["target"].numel(), 12
    ids = (batch["target"].view(-1, 1) + torch.arange(k)) % SIZES.vocab
    kept = lc.KeptIds(ids.view(-1), torch.arange(0, (n + 1) * k, k))
    with products_for_kept_ids():
        return statistics(batch, budget, kept=kept)


def divergence(batch: Batch, budget: int | None, top_k: bool = False, **options: Any) -> Tensor:
    """Return a distillation loss of single tokens, some without a target. Only some have a gradient."""
    given = {"teacher_weight": batch["weight"].detach().flip(0), "teacher_input": batch["input"].detach()}
    if top_k:
        ids = (batch["target"][..., None] + torch.arange(7)) % SIZES.vocab
        given = {"teacher_ids": ids, "teacher_logps": -2.0 - torch.arange(7).double().expand(ids.shape)}
    loss = lc.LigerFusedLinearKLDivLoss(reduction="none", logits_budget=budget, **options)
    return (loss(**batch, **given)[0] * LIVE).sum()


# By name, the loss and its products of forward and backward. A divergence of single tokens computes the logits of both
# models again in its backward.
OTHERS: dict[str, tuple[Callable[[Batch, int | None], Tensor], float, float]] = {
    "cross-entropy": (cross_entropy, 1, 2 * 0.2),
    "dpo": (dpo, 1, 2 * 0.5),
    "logps": (statistics, 1, 2 * 0.2),
    "kept-ids": (kept_ids, 1, 2 * 0.2),
    "divergence": (divergence, 2, 4 * 0.2),
    "top-k": (partial(divergence, top_k=True), 1, 3 * 0.2),
}


def of_head(row_of_batch: Batch) -> Batch:
    return {name: row_of_batch[name] for name in ("weight", "input", "target", "bias")}


@pytest.mark.parametrize("name", OTHERS)
def test_products_of_other_losses(name):
    loss, forward, backward = OTHERS[name]
    assert products(lambda batch: loss(batch, None), of_head(with_advantages(0.2))) == pytest.approx(forward + backward)


def of_an_adapter(batch: Batch, budget: int | None) -> Tensor:
    head = lc.AdaptedWeight(batch["weight"], batch["weight"][:, :3].detach().flip(0), lambda x: x[..., 3:6])
    return statistics({**batch, "weight": head}, budget)


RESULTS = {name: loss for name, (loss, *_) in OTHERS.items()} | {"adapter": of_an_adapter}


@pytest.mark.parametrize("budget", [None, 8 * 97 * 37, 8 * 30], ids=["one", "chunks", "slices"])
@pytest.mark.parametrize("name", RESULTS)
def test_results_of_other_losses(name, budget):
    loss = partial(RESULTS[name], budget=budget)
    batch = of_head(with_advantages(0.2))
    ours = evaluate(loss, batch)
    with all_rows(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(distillation, "torch_on_host", lambda x: False)
        exact = evaluate(loss, batch)
    assert_same(ours, exact)
    dead = (exact["input"] == 0).all(-1)
    assert dead.any() and (ours["input"][dead] == 0).all()


# Results


def test_nan_is_a_gradient():
    batch = with_advantages(0.2)
    batch["advantages"][1, 3] = float("nan")
    ours = evaluate(grpo, batch)
    assert ours["input"][1, 3].isnan().any()


# Memory and places


def test_a_gather_takes_little_memory():
    """Nothing as large as the logits that are gathered."""
    sizes = Sizes(sequences=8, length=32, hidden=8, vocab=1009, ignored=False)
    batch = rollouts(sizes, 0, old=False)
    batch["advantages"] = (torch.arange(256).view(8, 32) >= 128).double()  # the last half fills the first
    leaves = {name: batch[name].clone().requires_grad_() for name in ("weight", "input")}
    n = 256
    with memory_beside(*batch.values(), *leaves.values()) as memory:
        grpo({**batch, **leaves}).backward()
    rows, of_dw = 6 * n * sizes.hidden * 8, sizes.vocab * sizes.hidden * 8
    assert memory.peak <= n * 1009 * 8 + of_dw + rows + 60 * n * 8 + 12 * (8 << 12)


PATTERNS = ["101101", "000111", "111000", "000000", "010101"]


@pytest.mark.few(3)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_live_rows_fill_the_holes(pattern, monkeypatch):
    monkeypatch.setattr(live_rows, "MOST_GATHERED", 200)  # two rows at a time
    pattern = list(map(int, pattern))
    g = torch.tensor(pattern, dtype=torch.float32)
    found = LiveCount.start({"logps": g, "lse": torch.zeros(6)})
    assert found is not None
    kept = found.read()
    assert kept is not None
    x = torch.arange(600.0).view(6, 100)
    filled, memory = x.clone(), Memory()
    memory.expect(filled)
    with memory:
        front = kept.compact_(filled)
    assert memory.largest <= 2 * 100 * 4
    assert sorted(kept.rows.tolist()) == [i for i, live in enumerate(pattern) if live]
    assert torch.equal(front, x[kept.rows])
    # Rows that are live already stay.
    n = sum(pattern)
    assert all(kept.rows[i] == i for i in range(n) if pattern[i])
    tiles = (Tile(slice(0, 4), slice(0, 9)), Tile(slice(4, 6), slice(0, 9)))
    assert sum(rows.stop - rows.start for rows, _ in kept.tiles(tiles)) == n


def test_few_dead_rows_stay_on_a_gpu(monkeypatch):
    g = torch.ones(256)
    assert LiveCount.start({"logps": g}) is None  # a CPU has the number at once
    g[7] = 0
    assert LiveCount.start({"logps": g}).read().length == 255
    monkeypatch.setattr(live_rows, "torch_on_host", lambda x: False)
    count = LiveCount.start({"logps": g})
    assert count.read() is None and torch.equal(count.rows, torch.arange(256))
    g[:4] = 0
    assert LiveCount.start({"logps": g}).read().length == 251


@pytest.mark.few(4)
@pytest.mark.triton
@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_of_live_rows_alone(pattern, device):
    """Rows without a gradient are not read: they are NaN here."""
    n, vocab = len(pattern), 2051
    g = torch.tensor(list(map(float, pattern)), device=device)
    logits, target = torch.randn(n, vocab, device=device), torch.arange(n, device=device)
    stats = logits.amax(1), (logits - logits.amax(1, keepdim=True)).exp().sum(1)
    cotangents = LogitsCotangents(*stats, logps=g)
    expected = logits_grad_(logits.clone(), target, cotangents, lc.LogitOptions(), vocab)
    logits[g == 0] = torch.nan
    count = LiveCount.start({"logps": g})
    assert count is not None
    for out in (None, torch.empty_like(logits)):
        found = logits_grad_(logits.clone(), target, cotangents, lc.LogitOptions(), vocab, out=out, live=count.rows)
        live = count.read()
        assert live is not None and torch.equal(found[: live.length], expected[live.rows])


# The fused epilogue


def bfloat16_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    batch = {"weight": 72**-0.5 * normal(603, 72), "input": normal(3, 12, 72)}
    return batch | {"target": torch.randint(603, (3, 12), generator=generator)}


def compare_epilogue(ours: Callable[[Batch], Tensor], oracle: Callable[[Batch], Tensor], device: str) -> None:
    """Rows that are left out change no more than the interpreter's rounding of the others."""
    batch = moved(bfloat16_batch(0), torch.bfloat16, device)
    exact = evaluate(oracle, moved(batch, torch.float64), ("weight", "input"))
    for name, value in evaluate(ours, batch, ("weight", "input")).items():
        assert relative_error(value.cpu(), exact[name].cpu()) < 0.03, name
    dead = exact["input"].abs().amax(-1) == 0
    assert dead.any()
    assert (evaluate(ours, batch, ("weight", "input"))["input"][dead] == 0).all()


@pytest.fixture
def lengths(by_epilogue: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many rows each chunk keeps."""
    monkeypatch.setattr(epilogue, "SMALLEST", 0)
    found: list[int] = []
    read = LiveCount.read

    def watch(self: LiveCount) -> Any:
        kept = read(self)
        found.append(-1 if kept is None else kept.length)
        return kept

    monkeypatch.setattr(LiveCount, "read", watch)
    return found


@pytest.mark.triton
def test_the_fused_epilogue_of_a_loss(device, lengths, monkeypatch):
    passes = noted(monkeypatch, epilogue.EpilogueSource, "backward", lambda *_: None)
    live = (torch.arange(36).view(3, 12) % 3 == 1).double().to(device)
    live[0] = 0  # no row of a chunk
    loss = lc.LigerFusedLinearGRPOLoss(logits_budget=12 * 603 * 2)
    compare_epilogue(
        lambda batch: loss(**batch, advantages=live)[0], lambda batch: eager.grpo(**batch, advantages=live)[0], device
    )
    assert lengths[:3] == [0, 4, 4]
    assert len(passes) == 6


@pytest.mark.few(3)
@pytest.mark.triton
@pytest.mark.parametrize("outputs", [("logps", "lse"), ("logps", "entropy", "mean_logits")], ids="-".join)
@pytest.mark.parametrize("budget", [2 * 36 * 128, 2 * 13 * 512], ids=["slices", "blocks"])
def test_the_fused_epilogue_of_statistics(outputs, budget, device, lengths):
    live = (torch.arange(36).view(3, 12) % 3 == 1).double().to(device)

    def weighted(stats: dict[str, Tensor]) -> Tensor:
        return sum(((i + 1) * stats[name].double() * live).sum() for i, name in enumerate(outputs))

    compare_epilogue(
        lambda batch: weighted(lc.linear_token_stats(**batch, outputs=outputs, logits_budget=budget)._asdict()),
        lambda batch: weighted(eager.token_stats(**batch, outputs=outputs)),
        device,
    )
    assert lengths == [12, 12]
