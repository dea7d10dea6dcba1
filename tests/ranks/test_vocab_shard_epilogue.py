"""The fused epilogue on a vocabulary split over ranks: errors are those of one process, bits the same on all ranks.

On a GPU, both ranks share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import eager
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, same_on_all_ranks, some_or_all
from table import Batch, evaluate, moved, relative_error
from test_epilogue import BATCHES, HIDDEN, VOCAB, assert_error_is_that_of_eager_code, lost, sequences, tokens
from test_epilogue_statistics import ALL, weighted
from torch import Tensor

from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    VocabShard,
    linear_token_stats,
)
from liger_chunked.engine import checks, choose, collectives, epilogue
from liger_chunked.engine.epilogue import EpilogueSource, EpilogueStatistics
from liger_chunked.engine.source import ShardedSource

# The ranks' rows, and rows of padding behind them.
LAYOUTS = {
    "even": [(302, 0), (301, 3)],
    "uneven": [(130, 0), (473, 0)],
    "all-padding": [(603, 2), (0, 8)],
    "no-rows": [(0, 0), (603, 0)],
}
TRANSFORM = {"temperature": 1.7, "logit_scale": -0.6}
Ran = list[tuple[str, int]]


class _OwnRows(torch.autograd.Function):
    """Returns this rank's rows of a weight; the gradient is that of all rows, from all ranks."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, start: int, n: int, padding: int, unaligned: bool) -> Tensor:
        ctx.place = weight.shape, start, n
        own = torch.cat([weight[start : start + n], weight.new_full((padding, weight.shape[1]), 50.0)])
        if unaligned:
            own = torch.cat([own.new_zeros(1), own.view(-1)])[1:].view(own.shape)
            assert own.is_contiguous() and own.data_ptr() % 16
        return own

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shape, start, n = ctx.place
        assert not grad[n:].any(), "the padding has a gradient"
        whole = torch.zeros(shape, device=grad.device)
        whole[start : start + n] = grad[:n]
        dist.all_reduce(whole)
        return whole.to(grad.dtype), None, None, None, None


def cut(batch: Batch, parts: list[tuple[int, int]], unaligned: bool = False, **options: Any) -> dict[str, Any]:
    """Return this rank's batch; dW gets the gradients of all ranks."""
    rank = dist.get_rank()
    start = sum(n for n, _ in parts[:rank])
    own = _OwnRows.apply(batch["weight"], start, *parts[rank], unaligned)
    return {**batch, "weight": own, "vocab_shard": VocabShard(None, start, VOCAB, **options)}


@contextmanager
def fused() -> Iterator[Ran]:
    """Let small chunks use the fused epilogue, and record the rows of each chunk, by pass."""
    ran: Ran = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (choose, checks):
            patch.setattr(module, "has_wide_tiles", lambda device: True)
        patch.setattr(epilogue, "SMALLEST", 0)
        for kind in (EpilogueSource, EpilogueStatistics, ShardedSource):
            of_kind = kind.statistics

            def watch(self, tokens, of_kind=of_kind, kind=kind):
                ran.append((kind.__name__, tokens.x.shape[0]))
                return of_kind(self, tokens)

            patch.setattr(kind, "statistics", watch)
        yield ran


def budget(parts: list[tuple[int, int]], n: int) -> int:
    """Return the bytes of `n` tokens' logits on the rank with most rows."""
    return 2 * n * max(rows for rows, _ in parts)


def of_cross_entropy(parts: list[tuple[int, int]]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    settings: dict[str, Any] = {"lse_square_scale": 1e-2, **TRANSFORM}
    loss = LigerFusedLinearCrossEntropyLoss(**settings, logits_budget=budget(parts, 13))
    return lambda batch: loss(**batch), lambda batch: eager.cross_entropy(**batch, **settings)


def of_dpo(parts: list[tuple[int, int]]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    loss = LigerFusedLinearDPOLoss(logits_budget=budget(parts, 20))
    return lambda batch: loss(**batch)[0], lambda batch: eager.dpo(**batch)[0]


def of_grpo(parts: list[tuple[int, int]]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    loss = LigerFusedLinearGRPOLoss(logits_budget=budget(parts, 13))
    return lambda batch: loss(**batch)[0], lambda batch: eager.grpo(**batch)[0]


def of_statistics(parts: list[tuple[int, int]]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def ours(batch: Batch) -> Tensor:
        found = linear_token_stats(**batch, outputs=ALL, logits_budget=budget(parts, 6), **TRANSFORM)
        assert all(same_on_all_ranks(getattr(found, name).detach()) for name in ALL)
        return weighted(found._asdict(), ALL, batch["target"])

    return ours, lambda batch: weighted(eager.token_stats(**batch, outputs=ALL, **TRANSFORM), ALL, batch["target"])


def pairs() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return {
        **sequences(5),
        "ref_logps": -6 - torch.rand(4, 10, dtype=torch.float64, generator=generator),
    }


def rollouts() -> Batch:
    generator = torch.Generator().manual_seed(1)
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    old_logps = -6 - torch.rand(4, 10, dtype=torch.float64, generator=generator)
    return {**sequences(6), "advantages": advantages, "old_logps": old_logps}


LOSSES = {
    **{f"cross entropy, {kind}": (of_cross_entropy, lambda kind=kind: BATCHES[kind](tokens())) for kind in BATCHES},
    "dpo": (of_dpo, pairs),
    "grpo": (of_grpo, rollouts),
    **{f"statistics, {kind}": (of_statistics, lambda kind=kind: BATCHES[kind](tokens(2))) for kind in BATCHES},
}


@pytest.mark.triton
@some_or_all
@pytest.mark.usefixtures("by_epilogue")
@on_ranks(2)
def test_losses(rank: int, device: str, every: bool) -> None:
    """Compare with the oracle, and with one process."""
    with fused() as ran:
        for i, (name, (make, sample)) in enumerate(LOSSES.items()):
            for j, (layout, parts) in enumerate(LAYOUTS.items()):
                if not every and i % len(LAYOUTS) != j:
                    continue
                batch, (ours, oracle) = sample(), make(parts)
                expected = "EpilogueStatistics" if make is of_statistics else "EpilogueSource"

                def of_shard(batch: Batch, ours=ours, parts=parts) -> Tensor:
                    return ours(cut(batch, parts) if batch["weight"].dtype == torch.bfloat16 else batch)

                try:
                    ran.clear()
                    two = assert_error_is_that_of_eager_code(of_shard, oracle, batch, device=device)
                    half = moved(batch, torch.bfloat16, device)
                    one = evaluate(make([(VOCAB, 0)])[0], half)
                    for key, x in evaluate(of_shard, half).items():
                        assert torch.equal(x, two[key]), f"{key} is not repeatable"
                        assert same_on_all_ranks(x), f"{key} differs between ranks"
                        bound = 1e-5 if key == "loss" else 2**-7
                        assert relative_error(two[key], one[key].double()) < bound, (key, two[key], one[key])
                    assert ran and {kind for kind, _ in ran} == {expected}, ran
                except Exception as error:
                    raise AssertionError(f"{name}, {layout}: {error}") from error


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.usefixtures("by_epilogue")
@on_ranks(2)
def test_contracts(rank: int, device: str) -> None:
    parts = LAYOUTS["even"]
    batch = moved(tokens(3), torch.bfloat16, device)
    settings = {"lse_square_scale": 1e-2}
    loss = LigerFusedLinearCrossEntropyLoss(**settings, logits_budget=budget(parts, 13))

    def gradients(trainable: tuple[str, ...] = ("weight", "input"), **options: Any) -> Batch:
        return evaluate(lambda batch: loss(**cut(batch, parts, **options)), batch, trainable)

    with fused() as ran:
        whole = gradients()
        assert ran == [("EpilogueSource", 13), ("EpilogueSource", 13), ("EpilogueSource", 10)]

        # A chunk exchanges three numbers for each token, padded to four tokens, and dX.
        sent: list[tuple[str, int]] = []
        with pytest.MonkeyPatch.context() as patch:
            all_gather, all_reduce = collectives._all_gather, dist.all_reduce

            def gathered(out: Tensor, x: Tensor, **options: Any) -> Any:
                sent.append(("gather", x.numel()))
                return all_gather(out, x, **options)

            def reduced(x: Tensor, **options: Any) -> Any:
                if x.shape[0] != VOCAB:  # not `_OwnRows`
                    sent.append(("sum", x.numel()))
                return all_reduce(x, **options)

            patch.setattr(collectives, "_all_gather", gathered)
            patch.setattr(dist, "all_reduce", reduced)
            gradients()
        lengths = [(16, 13), (16, 13), (12, 10)]
        assert sent == [found for padded, n in lengths for found in (("gather", 3 * padded), ("sum", n * HIDDEN))]

        # One gradient, none, or the rank's share of dX.
        for name in ("weight", "input"):
            for key, x in gradients((name,)).items():
                assert torch.equal(x, whole[key]), (name, key)
        with torch.no_grad():
            assert torch.equal(loss(**cut(batch, parts)), whole["loss"])
        share = gradients(("input",), input_grad="partial")["input"].float()
        dist.all_reduce(share)
        assert relative_error(share, whole["input"].double()) < 2**-7

        # All ranks choose the same pass, though one rank's rows do not fit descriptors.
        ran.clear()
        unaligned = gradients(unaligned=rank == 1)
        assert len(ran) == 3 and {kind for kind, _ in ran} == {"EpilogueSource"}
        assert all(torch.equal(x, whole[key]) for key, x in unaligned.items())

        # An entropy in the loss, and another statistic, need the logits.
        rolls = moved(rollouts(), torch.bfloat16, device)
        ours = LigerFusedLinearGRPOLoss(logits_budget=budget(parts, 13), entropy_coef=0.1)
        ran.clear()
        evaluate(lambda batch: ours(**cut(batch, parts))[0], rolls)
        assert {kind for kind, _ in ran} == {"ShardedSource"}
        _, metrics = LigerFusedLinearGRPOLoss(logits_budget=budget(parts, 13))(**cut(rolls, parts))
        exact = eager.grpo(**moved(rolls, torch.float64))[1]
        assert abs(float(metrics.entropy) - float(exact["entropy"])) < 1e-4

        # Statistics are those of unrounded logits, also of rows far above their targets.
        for i, kind in enumerate((*BATCHES.values(), lambda batch: lost(batch))):
            given = moved(kind(tokens(3)), torch.bfloat16, device)
            valid = given["target"] != -100
            exact = eager.token_stats(**moved(given, torch.float64), outputs=ALL)
            # Two layouts each: the interpreter takes half a second for one.
            for layout in [*LAYOUTS.values()][i % 2 :: 2]:
                with torch.no_grad():
                    found = linear_token_stats(**cut(given, layout), outputs=ALL)
                for name in ALL:
                    value = getattr(found, name)
                    assert same_on_all_ranks(value) and not value[~valid].any()
                    # Sums of 603 terms, and two roundings of 44: see `projection.py`.
                    torch.testing.assert_close(value[valid].double(), exact[name][valid], rtol=3e-5, atol=8e-6)

        # No statistic is finite if a target's row is NaN.
        given = tokens(3)
        given["target"][0], given["weight"][150] = 150, float("nan")  # the sign bit is set after a cast
        given = moved(given, torch.bfloat16, device)
        for layout in LAYOUTS.values():
            with torch.no_grad():
                found = linear_token_stats(**cut(given, layout), outputs=ALL)
            assert all(getattr(found, name)[given["target"] != -100].isnan().all() for name in ALL)

        # More tokens than a tile has memory for their partial sums: in blocks, but one exchange.
        given = moved(tokens(4, n=300), torch.bfloat16, device)
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            blocks: list[int] = []
            project_sums = epilogue.project_sums

            def counted(x: Tensor, *args: Any) -> Tensor:
                blocks.append(x.shape[0])
                return project_sums(x, *args)

            whole_stats = linear_token_stats(**cut(given, parts), outputs=ALL)
            patch.setattr(epilogue, "project_sums", counted)
            in_blocks = linear_token_stats(**cut(given, parts), outputs=ALL, logits_budget=budget(parts, 4))
        assert blocks == [128, 128, 44]
        for name in ALL:
            torch.testing.assert_close(getattr(in_blocks, name), getattr(whole_stats, name), rtol=3e-5, atol=8e-6)

    # A rank without the tiles: all ranks keep the logits.
    with fused() as ran, pytest.MonkeyPatch.context() as patch:
        checks.CHECKED.clear()
        patch.setattr(checks, "has_wide_tiles", lambda device: rank == 0)
        gradients()
        assert {kind for kind, _ in ran} == {"ShardedSource"}


@pytest.mark.triton
@pytest.mark.usefixtures("by_epilogue")
@on_ranks(2)
def test_scattered_hidden_states(rank: int, device: str) -> None:
    """Each rank has its part of the hidden states.

    On a GPU, needs gloo's `reduce_scatter_tensor` on CUDA tensors.
    """
    parts, half = LAYOUTS["even"], slice(rank * 18, rank * 18 + 18)
    batch = moved(tokens(3), torch.bfloat16, device)
    loss = LigerFusedLinearCrossEntropyLoss(logits_budget=budget(parts, 13))
    own = {**batch, "input": batch["input"][half]}
    with fused() as ran:
        whole = evaluate(lambda batch: loss(**cut(batch, parts)), batch)
        ran.clear()
        found = evaluate(lambda batch: loss(**cut(batch, parts, input_grad="reduce_scatter")), own)
        assert len(ran) == 3 and {kind for kind, _ in ran} == {"EpilogueSource"}
    whole["input"] = whole["input"][half]
    for key, x in found.items():
        assert relative_error(x, whole[key].double()) < 2**-7, key
