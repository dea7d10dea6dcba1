"""A vocabulary split over ranks: every loss equals that of one process, with the same bits on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, same_on_all_ranks, some_or_all
from sampling import rows_of_ranks
from table import SMALL, Batch, Row, evaluate, relative_error, rows
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from liger_chunked import (
    AdaptedWeight,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKLDivLoss,
    VocabShard,
    linear_token_stats,
)
from liger_chunked.engine import choose, collectives, scattered
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.rows import all_rows
from liger_chunked.types import LossHead

# The ranks' rows, and rows of padding behind them.
LAYOUTS = {
    2: {
        "even": [(12, 0), (11, 1)],
        "uneven": [(5, 0), (18, 0)],
        "padded": [(16, 0), (7, 9)],
        "all-padding": [(23, 0), (0, 4)],
        "padding-of-both": [(23, 2), (0, 4)],
    },
    4: {"even": [(6, 0), (6, 0), (6, 0), (5, 1)], "uneven": [(1, 0), (13, 0), (9, 2), (0, 3)]},
}
HEADS = {"weight": "bias", "ref_weight": "ref_bias", "teacher_weight": "teacher_bias"}
BUDGETS: dict[str, Callable[[Row], int | None]] = {
    "whole": lambda row: None,
    "chunks": lambda row: 8 * 9 * 5,  # some rows of this rank's logits
}


def shards(parts: list[tuple[int, int]], vocab_size: int = SMALL.vocab, **options: Any) -> VocabShard:
    """Return this rank's shard."""
    return VocabShard(None, sum(n for n, _ in parts[: dist.get_rank()]), vocab_size, **options)


def cut(batch: Batch, parts: list[tuple[int, int]], **options: Any) -> Batch:
    """Return this rank's batch. Padding holds large numbers."""
    shard, (n, padding) = shards(parts, **options), parts[dist.get_rank()]

    def own(x: Tensor) -> Tensor:
        return torch.cat([x[shard.start : shard.start + n], x.new_full((padding, *x.shape[1:]), 50.0)])

    named = {name for pair in HEADS.items() for name in pair}
    return {name: own(x) if name in named else x for name, x in batch.items()} | {"vocab_shard": shard}


def check(row: Row, batch: Batch, parts: list[tuple[int, int]], budget: int | None, tolerance: float = 1e-9) -> None:
    loss = partial(row.ours, logits_budget=budget)
    if not row.kernels:  # a user's divergence
        with pytest.raises(ValueError, match=r"needs whole rows of logits, got vocab_shard"):
            loss(cut(batch, parts))
        return
    compare(evaluate(partial(row.ours), batch), evaluate(loss, cut(batch, parts)), parts, tolerance)


def compare(whole: Batch, ours: Batch, parts: list[tuple[int, int]], tolerance: float) -> None:
    """Compare a loss and its gradients of whole heads with those of this rank's part."""
    start, (n, _) = shards(parts).start, parts[dist.get_rank()]
    assert ours.keys() == whole.keys()
    for name, expected in whole.items():
        if name in HEADS or name == "bias":
            assert not ours[name][n:].any(), f"{name}: the padding has a gradient"
            expected, found = expected[start : start + n], ours[name][:n]
        else:
            found = ours[name]
            assert same_on_all_ranks(found), f"{name} differs between ranks"
        assert relative_error(found, expected) < tolerance, (name, relative_error(found, expected))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@some_or_all
@on_ranks()
def test_all_losses(rank: int, world: int, every: bool) -> None:
    layouts = list(LAYOUTS[world].items())
    for i, row in enumerate(rows_of_ranks(every)):
        batch = row.sample(SMALL, i)
        for j, (name, parts) in enumerate(layouts):
            for k, (budget, of_row) in enumerate(BUDGETS.items()):
                if every or (i + j) % 2 == k:
                    try:
                        check(row, batch, parts, of_row(row))
                    except Exception as error:
                        raise AssertionError(f"{row.id}, {name}, {budget}") from error


@on_ranks(2)
def test_live_rows(rank: int) -> None:
    """Rows without a gradient are left out alike on all ranks, down to a chunk without any other."""
    choose.SMALLEST_OF_LIVE_ROWS = 0
    advantages = torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    for i, row in enumerate(rows("grpo", "grpo-top-entropy", "gspo")):
        batch, of_parts = (
            {**row.sample(sizes, 0), "advantages": advantages} for sizes in (SMALL, SMALL._replace(length=8))
        )
        for j, parts in enumerate(LAYOUTS[2].values()):
            budget = (None, 8 * 9 * 5, 8)[(i + j) % 3]
            check(row, batch, parts, budget)
            check_scattered(row, of_parts, 2, parts, budget)
    # A rank takes its part of the products of the rows with a gradient.
    generator = torch.Generator().manual_seed(0)
    vocab, hidden, n = 40, 8, 64
    weight, input = torch.randn(vocab // 2, hidden, generator=generator), torch.randn(1, n, hidden, generator=generator)
    target, weights = torch.randint(vocab, (1, n), generator=generator), (torch.arange(n) % 4 == 0).float()[None]
    for input_grad in ("all_reduce", "reduce_scatter"):
        x = input if input_grad == "all_reduce" else input.chunk(2, 1)[rank]
        w, x = weight.clone().requires_grad_(), x.clone().requires_grad_()
        shard = VocabShard(None, rank * vocab // 2, vocab, input_grad)
        with FlopCounterMode(display=False) as counter:
            loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
            loss(w, x, target, token_weights=weights, vocab_shard=shard).backward()
        assert counter.get_total_flops() == 1.5 * 2 * n * hidden * vocab // 2, input_grad


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@some_or_all
@on_ranks()
def test_dtensors(rank: int, world: int, every: bool) -> None:
    """Weights sharded on dim 0, or all but one whole; hidden states plain, replicated, or sharded."""
    # Four ranks: two that hold the same, times two that split the vocabulary.
    shape = (2,) if world == 2 else (2, 2)
    mesh = init_device_mesh("cpu", shape)
    rest = [Replicate()] * (len(shape) - 1)
    ways = {"plain": None, "replicated": Replicate(), "sequence": Shard(1), "batch": Shard(0), "whole": None}
    for i, row in enumerate(row for row in rows_of_ranks(every) if row.kernels):
        batch = row.sample(SMALL, i)
        whole = evaluate(partial(row.ours), batch)
        for j, (way, placement) in enumerate(ways.items()):
            if not every and (i + j) % 2:
                continue
            heads = {"weight"} if way == "whole" else {name for pair in HEADS.items() for name in pair}
            inputs = {"input", "ref_input", "teacher_input", "kl_input", "ref_kl_input"}
            given: Batch = dict(batch)
            for name, x in batch.items():
                if name in heads:
                    given[name] = distribute_tensor(x, mesh, [*rest, Shard(0)])
                elif placement is not None and name in inputs:
                    given[name] = distribute_tensor(x, mesh, [*rest, placement])
            if "teacher_weight" in batch and batch["teacher_weight"].shape[0] > SMALL.vocab:
                with pytest.raises(ValueError, match=r"teacher_weight must have the 23 rows of weight"):
                    row.ours(given)
                continue
            ours = evaluate(row.ours, given)
            for name, expected in whole.items():
                found = ours[name]
                if isinstance(found, DTensor):
                    assert found.placements == given[name].placements, (row.id, way, name)
                    found = found.full_tensor()
                assert same_on_all_ranks(found), (row.id, way, name)
                assert relative_error(found, expected) < 1e-9, (row.id, way, name)


INPUTS = ("input", "ref_input", "teacher_input", "kl_input", "ref_kl_input")


def check_scattered(row: Row, batch: Batch, world: int, parts: list[tuple[int, int]], budget: int | None) -> None:
    """Compare a loss where each rank has the hidden states of its part of the sequences, of 8 positions."""
    rank = dist.get_rank()
    part = slice(rank * 8 // world, (rank + 1) * 8 // world)
    given = cut(batch, parts, input_grad="reduce_scatter")
    given |= {name: given[name][:, part] for name in INPUTS if name in given}
    ours = evaluate(partial(row.ours, logits_budget=budget), given)
    start, (n, _) = shards(parts).start, parts[rank]
    assert same_on_all_ranks(ours["loss"])
    for name, expected in evaluate(partial(row.ours), batch).items():
        found = ours[name]
        if name in ("weight", "bias"):
            expected, found = expected[start : start + n], found[:n]
        elif name == "input":
            expected = expected[:, part]
        assert relative_error(found, expected) < 1e-9, name


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@some_or_all
@on_ranks()
def test_scattered_hidden_states(rank: int, world: int, every: bool) -> None:
    for i, row in enumerate(row for row in rows_of_ranks(every) if row.kernels and not row.kept):
        batch = row.sample(SMALL._replace(length=8), i)
        for j, (way, parts) in enumerate(LAYOUTS[world].items()):
            for k, (budget, of_row) in enumerate(BUDGETS.items()):
                if every or (i + j) % 2 == k:
                    try:
                        check_scattered(row, batch, world, parts, of_row(row))
                    except Exception as error:
                        raise AssertionError(f"{row.id}, {way}, {budget}") from error


class _Largest(TorchDispatchMode):
    """Records the largest result."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@on_ranks(2)
def test_scattered_contracts(rank: int) -> None:
    """No rank holds all hidden states, or all of dX; a bad length is refused."""
    generator = torch.Generator().manual_seed(0)
    vocab, hidden, n = 40, 32, 64
    weight = torch.randn(vocab // 2, hidden, generator=generator)
    input = torch.randn(2, n // 2, hidden, generator=generator)[rank][None]
    target = torch.randint(vocab, (1, n), generator=generator)
    shard = VocabShard(None, rank * vocab // 2, vocab, "reduce_scatter")
    loss = LigerFusedLinearCrossEntropyLoss(logits_budget=8 * vocab // 2 * 4)
    w, x = weight.clone().requires_grad_(), input.clone().requires_grad_()
    with _Largest() as largest:
        loss(w, x, target, vocab_shard=shard).backward()
    assert largest.elements == input.numel() == n // 2 * hidden

    sent: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        reduce_scatter = scattered._reduce_scatter

        def counted(out: Tensor, x: Tensor, **options: Any) -> Any:
            sent.append(x.numel())
            return reduce_scatter(out, x, **options)

        patch.setattr(scattered, "_reduce_scatter", counted)
        loss(w, x, target, vocab_shard=shard)
    assert sent == [8 * hidden] * (n // 8)

    with pytest.raises(ValueError, match=r"target must be \(1, 64\), one token id for each row .* on each rank"):
        loss(w, x, target[:, : n // 2], vocab_shard=shard)

    with pytest.raises(ValueError, match=r"target must be whole and the same on all ranks of vocab_shard"):
        other = VocabShard(dist.new_group([0, 1]), shard.start, vocab, "reduce_scatter")
        loss(w, x, (target + rank) % vocab, vocab_shard=other)

    # Without a target or a mask, all tokens count.
    kl, heads = LigerFusedLinearKLDivLoss(weight_hard_loss=0.0), torch.randn(2, vocab, hidden, generator=generator)
    every = torch.randn(2, 1, n, hidden, generator=generator)
    x, own_x = (y.clone().requires_grad_() for y in (every[0], every[0].chunk(2, 1)[rank]))
    expected, _ = kl(heads[0], x, heads[1], every[1])
    expected.backward()
    own_heads, own_teacher = heads.chunk(2, 1)[rank], every[1].chunk(2, 1)[rank]
    found, _ = kl(own_heads[0], own_x, own_heads[1], own_teacher, vocab_shard=shard)
    found.backward()
    assert x.grad is not None and own_x.grad is not None
    for ours, exact in ((found.detach(), expected.detach()), (own_x.grad, x.grad.chunk(2, 1)[rank])):
        assert relative_error(ours, exact) < 1e-5

    # If all tokens count, the host does not wait (meta tensors have no values), and no hidden states are copied.
    chunks = [Chunk(rows, rows) for rows in (slice(0, 48), slice(48, 64))]
    _, found = scattered.scatter_rows(all_rows((2, 32)), chunks, LossHead(heads[0].to("meta"), shard=shard))
    assert found is not None and found.own is None and list(found.counts.values()) == [[24, 24], [8, 8]]

    # Sequences without padding, whose rows are split evenly.
    wide = torch.randn(n, hidden, generator=generator, dtype=torch.float64)
    whole = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    given = {"target": target[0], "cu_seqlens": torch.tensor([0, 3, 25, 60, n]), "use_ref_model": False}
    x, w = wide.clone().requires_grad_(), whole.clone().requires_grad_()
    expected, _ = LigerFusedLinearDPOLoss(w, x, **given)
    expected.backward()
    own, rows = slice(rank * n // 2, (rank + 1) * n // 2), slice(rank * vocab // 2, (rank + 1) * vocab // 2)
    own_x, own_w = wide[own].clone().requires_grad_(), whole[rows].clone().requires_grad_()
    found, _ = LigerFusedLinearDPOLoss(own_w, own_x, **given, vocab_shard=shard, logits_budget=8 * 20 * 10)
    found.backward()
    for ours, exact in ((found.detach(), expected.detach()), (own_x.grad, x.grad[own]), (own_w.grad, w.grad[rows])):
        assert relative_error(ours, exact) < 1e-9


def toy_batch(vocab: int, hidden: int, n: int, n_ids: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight (vocab, hidden), an input (n, hidden), and a target (n,) of the first `n_ids` ids."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab, hidden, generator=generator)
    input = torch.randn(n, hidden, generator=generator)
    return weight, input, torch.randint(n_ids, (n,), generator=generator)


@on_ranks(2)
def test_contracts(rank: int) -> None:
    vocab, hidden, n = 640, 16, 48
    weight, input, target = toy_batch(vocab, hidden, n, n_ids=vocab)
    own = slice(rank * vocab // 2, (rank + 1) * vocab // 2)
    shard = VocabShard(None, own.start, vocab)
    loss = LigerFusedLinearCrossEntropyLoss()

    def gradients(dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        w = (weight if "vocab_shard" not in options else weight[own]).to(dtype, copy=True).requires_grad_()
        x = input.to(dtype, copy=True).requires_grad_()
        value = loss(w, x, target, **options)
        value.backward()
        assert w.grad is not None and x.grad is not None
        return value.detach(), w.grad, x.grad

    # A half's products are half of the whole's: three for each logit of this rank.
    with FlopCounterMode(display=False) as counter:
        gradients(torch.float32, vocab_shard=shard)
    assert counter.get_total_flops() == 3 * 2 * n * hidden * vocab // 2

    # A chunk exchanges a few numbers for each token, and dX; never a weight or logits.
    sent: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        all_gather, all_reduce = collectives._all_gather, dist.all_reduce

        def gathered(out: Tensor, x: Tensor, **options: Any) -> Any:
            sent.append(("gather", x.numel()))
            return all_gather(out, x, **options)

        def reduced(x: Tensor, **options: Any) -> Any:
            sent.append(("sum", x.numel()))
            return all_reduce(x, **options)

        patch.setattr(collectives, "_all_gather", gathered)
        patch.setattr(dist, "all_reduce", reduced)
        gradients(torch.float32, vocab_shard=shard)
        # Before: whether the parts of the vocabulary are known, the number of ids, and their checksum.
        checks = [("gather", 1), ("gather", 2)]
        assert sent == [*checks, ("gather", 3 * n), ("sum", n * hidden)]
        sent.clear()
        gradients(torch.bfloat16, vocab_shard=shard)
        assert sent == [*checks, ("gather", 3 * n), ("sum", 2 * n), ("sum", n * hidden)]

    # 16 bits: the target's logit is unrounded on the rank that holds it.
    exact = gradients(torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        one, two = gradients(dtype), gradients(dtype, vocab_shard=shard)
        for k, (a, b, e) in enumerate(zip(one, two, exact, strict=True)):
            a, e = (a[own], e[own]) if k == 1 else (a, e)
            assert relative_error(b, e) <= 1.1 * relative_error(a, e) + 1e-7, (dtype, k)
        assert same_on_all_ranks(two[0]) and same_on_all_ranks(two[2])
        assert all(torch.equal(a, b) for a, b in zip(two, gradients(dtype, vocab_shard=shard), strict=True))

    # The rank's share of dX, if the caller adds the shares.
    share = gradients(torch.float32, vocab_shard=dataclasses.replace(shard, input_grad="partial"))[2]
    dist.all_reduce(share)
    torch.testing.assert_close(share, gradients(torch.float32, vocab_shard=shard)[2])

    # The statistics under any upstream gradient, twice.
    w, x = weight[own].clone().requires_grad_(), input.clone().requires_grad_()
    stats = linear_token_stats(w, x, target, outputs=("logps", "entropy", "argmax"), vocab_shard=shard)
    assert torch.equal(stats.argmax, (input @ weight.T).argmax(1))
    upstream = torch.randn(n, generator=torch.Generator().manual_seed(1))
    first = torch.autograd.grad((stats.logps * upstream + stats.entropy).sum(), (w, x), retain_graph=True)
    second = torch.autograd.grad((stats.logps * upstream + stats.entropy).sum(), (w, x))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    z = (x.detach().requires_grad_() @ weight.T).log_softmax(-1)
    torch.testing.assert_close(stats.entropy, -(z.exp() * z).sum(1))

    # A second head that is padded on one rank only.
    kl, teacher = LigerFusedLinearKLDivLoss(), weight.flip(0)
    padded = torch.cat([teacher[own], torch.full((3 * rank, hidden), 50.0)])
    found = kl(weight[own], input, padded, input, vocab_shard=shard)
    torch.testing.assert_close(found, kl(weight, input, teacher, input))

    # An adapter: each rank has its rows of `up`, and the whole of `down`.
    wide = [x.double() for x in (weight, input, torch.randn(3, hidden), torch.randn(vocab, 3))]
    for x in wide[2:]:
        dist.broadcast(x, 0)
    leaves = [x.clone().requires_grad_() for x in wide]
    w, x, down, up = leaves
    loss(w + up @ down, x, target).backward()
    expected = [leaf.grad for leaf in leaves]
    w, x, down, up = parts = [y.clone().requires_grad_() for y in (wide[0][own], wide[1], wide[2], wide[3][own])]
    loss(AdaptedWeight(w, up, lambda h: h @ down.T), x, target, vocab_shard=shard).backward()
    for part, exact, cut_ in zip(parts, expected, (True, False, False, True), strict=True):
        assert part.grad is not None and exact is not None
        assert relative_error(part.grad, exact[own] if cut_ else exact) < 1e-9
    mesh = init_device_mesh("cpu", (2,))
    for place_up, place_x in ((Shard(0), Replicate()), (None, Shard(0))):  # `up` is sharded, or whole
        placed = zip(wide, (Shard(0), place_x, None, place_up), strict=True)
        parts = [(y if to is None else distribute_tensor(y, mesh, [to])).clone().requires_grad_() for y, to in placed]
        w, x, down, up = parts
        loss(AdaptedWeight(w, up, lambda h, down=down: h @ down.T), x, target).backward()
        for part, exact in zip(parts, expected, strict=True):
            assert part.grad is not None and exact is not None
            grad = part.grad.full_tensor() if isinstance(part.grad, DTensor) else part.grad
            assert relative_error(grad, exact) < 1e-9

    refusals: dict[str, tuple[Callable[[], Any], str]] = {
        "gap": (lambda: VocabShard(None, 400 * rank, vocab - 1), "vocab_shard.start of rank 1 is 400, expected 320"),
        "short": (lambda: VocabShard(None, own.start, 700), "the shards cover 640 rows of a vocabulary of 700"),
        "sizes": (lambda: VocabShard(None, own.start, vocab + 1 + rank), "must be the same on all ranks"),
        "negative": (lambda: VocabShard(None, -1, vocab), "start must be 0 or more"),
        "name": (lambda: VocabShard(None, 0, vocab, input_grad="sum"), "input_grad must be"),  # type: ignore[arg-type]
    }
    for made, message in refusals.values():
        with pytest.raises(ValueError, match=message):
            loss(weight[own], input, target, vocab_shard=made())
    # The whole head on each rank would count each column once per rank.
    with pytest.raises(ValueError, match=r"vocab_shard.start of rank 1 is 0, expected 640"):
        loss(weight, input, target, vocab_shard=VocabShard(None, 0, vocab))
    with pytest.raises(
        ValueError, match=r"input must be the same on all ranks .* FSDP"
    ):  # a shard of FSDP, and its batch
        loss(distribute_tensor(weight[:100], mesh, [Shard(0)]), input + rank, target % 100)
    with pytest.raises(ValueError, match=r"target holds 640, expected .* 0 to 639"):
        loss(weight[own], input, target + 640 - target.max(), vocab_shard=shard)
    with pytest.raises(ValueError, match=r"ce_weight must have one value for each of the 640 ids"):
        loss(weight[own], input, target, ce_weight=torch.ones(320), vocab_shard=shard)

    whole, everywhere = distribute_tensor(weight, mesh, [Shard(0)]), distribute_tensor(target, mesh, [Shard(0)])
    assert torch.allclose(loss(whole, input, everywhere), loss(weight, input, target))
    with pytest.raises(TypeError, match="got vocab_shard too"):
        loss(whole, input, target, vocab_shard=shard)
    with pytest.raises(TypeError, match="multiple values for argument 'input'"):
        loss(whole, input, target, input=input)
    with pytest.raises(TypeError, match="too many positional arguments"):
        loss(whole, input, target, *[None] * 20)
    with pytest.raises(TypeError, match="weight must be replicated, or sharded on dim 0"):
        loss(distribute_tensor(weight, mesh, [Shard(1)]), input, target)
    with pytest.raises(TypeError, match="bias must be distributed like weight"):
        bias = distribute_tensor(torch.zeros(vocab), mesh, [Replicate()])
        loss(whole, input, target, bias)
    with pytest.raises(TypeError, match="input must be replicated, or sharded on the batch or the sequence"):
        loss(whole, distribute_tensor(input, mesh, [Shard(1)]), target)


@on_ranks(2)
def test_mistakes_of_one_rank(rank: int) -> None:
    """After a correct call, one rank alone passes something else: all ranks raise, and the next call is correct."""
    vocab, hidden, n = 24, 8, 6
    weight, input, target = toy_batch(vocab, hidden, n, n_ids=vocab // 2)  # all of the first rank's ids
    own, shard = weight.chunk(2)[rank], VocabShard(None, rank * vocab // 2, vocab)
    other = target.clone()
    other[2] = (other[2] + 1) % (vocab // 2)
    of_one: dict[str, tuple[tuple[Any, ...], str, str]] = {
        "whole head": (
            (weight, input, target, None, VocabShard(None, 0, vocab)),
            "vocab_shard.start of rank",
            "vocab_shard.start of rank",
        ),
        "bias": (
            (own, input, target, torch.zeros(3), shard),
            "bias must be",
            "rank 1 of vocab_shard refused its weight",
        ),
        "hidden size": ((own[:, 1:], input, target, None, shard), "agree on the hidden size", "rank 1 of vocab_shard"),
        "an id": ((own, input, other, None, shard), r"target must .* ranks \[0, 1\] have other ids", "have other ids"),
        "order": ((own, input, target.flip(0), None, shard), "have other ids", "have other ids"),
        "length": ((own, input, target[1:], None, shard), r"target must be \(6,\)", "but rank 1 refused its own"),
        "dtype": ((own, input, target.float(), None, shard), "target must", "but rank 1 refused its own"),
    }
    losses = [
        lambda w, x, y, b, s: LigerFusedLinearCrossEntropyLoss()(w, x, y, b, vocab_shard=s),
        lambda w, x, y, b, s: linear_token_stats(w, x, y, b, vocab_shard=s).logps,
    ]
    for loss in losses:
        expected = loss(weight, input, target, None, None)
        for name, (wrong, message, message_of_others) in of_one.items():
            torch.testing.assert_close(loss(own, input, target, None, shard), expected)
            arguments = wrong if rank else (own, input, target, None, shard)
            with pytest.raises((ValueError, TypeError), match=message if rank else message_of_others):
                loss(*arguments)
                raise AssertionError(name)
        torch.testing.assert_close(loss(own, input, target, None, shard), expected)
    with pytest.raises(ValueError, match=r"ranks 0 and 1 differ in values, of shape \(6, 8\)\. A weight"):
        group = dist.new_group([0, 1])
        losses[0](own, input + rank, target, None, dataclasses.replace(shard, group=group))
    with pytest.raises(ValueError, match=r"ranks 0 and 1 differ with shapes \(6, 8\) and \(5, 8\)\. A weight"):
        group = dist.new_group([0, 1])
        losses[0](own, input[rank:], target[rank:], None, dataclasses.replace(shard, group=group))
