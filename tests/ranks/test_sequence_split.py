"""Sequences split over ranks: every loss equals that of one process, with the same bits on all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, same_on_all_ranks, some_or_all, summed
from sampling import rows_of_ranks
from table import ROWS, SMALL, Batch, Row, evaluate, relative_error
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKLDivLoss,
    VocabShard,
)

# The ranks' positions of a sequence. A rank may have none.
LENGTHS = {2: {"even": (4, 4), "uneven": (2, 6), "empty": (8, 0)}, 4: {"even": (2, 2, 2, 2), "uneven": (3, 0, 3, 2)}}
SIZES = SMALL._replace(length=8)
HEADS = ("weight", "bias", "ref_weight", "ref_bias", "teacher_weight", "teacher_bias")
INPUTS = ("input", "ref_input", "teacher_input", "kl_input", "ref_kl_input")


def served(every: bool) -> list[Row]:
    return [row for row in rows_of_ranks(every) if row.fused]  # the others are of tokens alone


def own(lengths: tuple[int, ...], rank: int | None = None) -> slice:
    rank = dist.get_rank() if rank is None else rank
    return slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))


def cut(batch: Batch, lengths: tuple[int, ...], rank: int | None = None) -> Batch:
    """Return a rank's positions of each tensor that has them."""

    def part(name: str, x: Tensor) -> Tensor:
        of_positions = name not in HEADS and x.ndim > 1 and x.shape[1] == sum(lengths)
        return x[:, own(lengths, rank)] if of_positions else x

    return {name: part(name, x) for name, x in batch.items()}


def check(row: Row, batch: Batch, lengths: tuple[int, ...], budget: int | None) -> None:
    whole = evaluate(row.ours, batch)
    given: dict[str, Any] = {**cut(batch, lengths), "sequence_group": dist.group.WORLD}
    ours = evaluate(partial(row.ours, logits_budget=budget), given)
    assert same_on_all_ranks(ours["loss"])
    for name, expected in whole.items():
        found = summed(ours[name]) if name in ("weight", "bias") else ours[name]
        expected = expected[:, own(lengths)] if name == "input" else expected
        assert relative_error(found, expected) < 1e-9, (name, relative_error(found, expected))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@some_or_all
@on_ranks()
def test_all_losses(rank: int, world: int, every: bool) -> None:
    ways = list(LENGTHS[world].items())
    for i, row in enumerate(served(every)):
        batch = row.sample(SIZES, i)
        for j, (name, lengths) in enumerate(ways):
            for k, budget in enumerate((None, 8 * 23 * 5)):
                if every or (i + j) % 2 == k:
                    try:
                        check(row, batch, lengths, budget)
                    except Exception as error:
                        raise AssertionError(f"{row.id}, {name}, {budget}") from error


@some_or_all
@on_ranks(4)
def test_with_split_vocabulary(rank: int, every: bool) -> None:
    """Two ranks split sequences, times two that split the vocabulary, and maybe the hidden states of a part."""
    sequences = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    vocabularies = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    rows = slice(0, 13) if rank % 2 == 0 else slice(13, 23)
    lengths = (6, 2)
    part = own(lengths, rank // 2)
    half = own((lengths[rank // 2] // 2,) * 2, rank % 2)
    for i, row in enumerate(row for row in served(every) if row.kernels):
        batch = row.sample(SIZES, i)
        whole = evaluate(row.ours, batch)
        given: dict[str, Any] = {**cut(batch, lengths, rank // 2), "sequence_group": sequences}
        given |= {name: given[name][rows] for name in HEADS if name in given}
        given["vocab_shard"] = VocabShard(vocabularies, rows.start, 23)
        if i % 2:
            given["vocab_shard"] = VocabShard(vocabularies, rows.start, 23, "reduce_scatter")
            given |= {name: given[name][:, half] for name in INPUTS if name in given}
        ours = evaluate(partial(row.ours, logits_budget=8 * 12 * 9), given)
        assert same_on_all_ranks(ours["loss"]), row.id
        for name, expected in whole.items():
            found = ours[name]
            if name in ("weight", "bias"):
                found, expected = found.clone(), expected[rows]
                dist.all_reduce(found, group=sequences)
            elif name == "input":
                expected = expected[:, part][:, half] if i % 2 else expected[:, part]
            assert relative_error(found, expected) < 1e-9, (row.id, name)


@on_ranks(4)
def test_data_times_sequences(rank: int) -> None:
    """Two halves of a batch, each on two ranks that split its sequences. Gradients are averaged over all four ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half, lengths = slice(3 * (rank // 2), 3 * (rank // 2) + 3), (3, 5)
    rows = {row.id: row for row in ROWS}
    for loss, row in (
        (LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1), "ce-smoothing"),
        (LigerFusedLinearGRPOLoss(reduction="dapo"), "dapo"),
    ):
        batch = rows[row].sample(SIZES, 0)
        batch["target"][4:] = -100  # the halves have different numbers of tokens
        n = int((batch["target"] != -100).sum())

        def value(given: Batch, loss: Any = loss) -> Tensor:
            returned = loss(**given)
            return returned[0] if isinstance(returned, tuple) else returned

        whole = evaluate(value, batch)
        of_half = {name: x if name in HEADS else x[half] for name, x in batch.items()}
        given = {**cut(of_half, lengths, rank % 2), "sequence_group": groups[rank // 2], "num_items": n}
        # As docs/distributed.md says: times the ranks, because the gradients are averaged over them.
        ours = evaluate(value, given, upstream=4.0)
        assert relative_error(summed(ours["loss"]) / 2, whole["loss"]) < 1e-9  # both ranks of a half have its loss
        for name in ("weight", "bias"):
            assert relative_error(summed(ours[name]) / 4, whole[name]) < 1e-9, name
        part = whole["input"][half][:, own(lengths, rank % 2)]
        assert relative_error(ours["input"] / 4, part) < 1e-9


@on_ranks(2)
def test_results(rank: int) -> None:
    """Metrics are of whole sequences; products are of this rank's tokens; errors reach all ranks."""
    world, lengths = dist.group.WORLD, (2, 6)
    part = own(lengths)
    rows = {row.id: row for row in ROWS}

    def compare(loss: Any, row: str, **settings: Any) -> None:
        batch = rows[row].sample(SIZES, 3)
        expected, found = loss(**batch)[1], loss(**cut(batch, lengths), sequence_group=world)[1]
        for name, value in expected._asdict().items():
            other = getattr(found, name)
            if name == "predicted_tokens":
                assert torch.equal(other, value[:, part])
            elif value is None:
                assert other is None
            else:
                assert relative_error(other, value) < 1e-9, (row, name)

    flags = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens")
    compare(LigerFusedLinearCrossEntropyLoss(lse_square_scale=0.1, **dict.fromkeys(flags, True)), "ce-smoothing")
    compare(LigerFusedLinearDPOLoss(ld_alpha=0.3, alpha=0.5, compute_nll_loss=True), "dpo-sigmoid")
    for settings in ({}, {"importance_level": "sequence"}, {"top_entropy_quantile": 0.5, "entropy_coef": 0.1}):
        compare(LigerFusedLinearGRPOLoss(beta=0.1, **settings), "grpo-kl")
    compare(LigerFusedLinearKLDivLoss(), "kl")

    # A split batch without targets.
    batch = rows["ce-smoothing"].sample(SIZES, 0)
    batch["target"].fill_(-100)
    zero = evaluate(rows["ce-smoothing"].ours, {**cut(batch, lengths), "sequence_group": world})
    assert all(not x.any() for x in zero.values())

    # No sequences at all.
    nothing = torch.zeros(0, 3, dtype=torch.long)
    for loss in (LigerFusedLinearCrossEntropyLoss(), LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1)):
        assert not loss(torch.randn(5, 4), torch.randn(0, 3, 4), nothing, sequence_group=world)

    # A replicated DTensor: its gradient is the sum of the ranks' shares.
    mesh = init_device_mesh("cpu", (2,))
    batch = rows["ce-smoothing"].sample(SIZES, 0)
    given = cut(batch, lengths) | {"weight": distribute_tensor(batch["weight"], mesh, [Replicate()])}
    found = evaluate(rows["ce-smoothing"].ours, {**given, "sequence_group": world})["weight"].full_tensor()
    assert relative_error(found, evaluate(rows["ce-smoothing"].ours, batch)["weight"]) < 1e-9

    # Three products for each token of this rank.
    weight, input = torch.randn(40, 16, requires_grad=True), torch.randn(3, 8, 16, requires_grad=True)
    target = torch.randint(40, (3, 8))
    with FlopCounterMode(display=False) as counter:
        loss = LigerFusedLinearCrossEntropyLoss()
        loss(weight, input[:, part], target[:, part], sequence_group=world).backward()
    assert counter.get_total_flops() == 3 * 2 * 3 * lengths[rank] * 16 * 40

    with pytest.raises(TypeError, match=r"sequence_group must be a torch.distributed process group.*got int"):
        loss(weight, input, target, sequence_group=2)
    with pytest.raises(TypeError, match=r"sequence_group must be a torch.distributed process group.*got int"):
        LigerFusedLinearCrossEntropyLoss(reduction="none")(weight, input, target, sequence_group=2)
    with pytest.raises(ValueError, match=r"input must hold the same sequences .* got batches of \[2, 3\]"):
        loss(weight, input[: 2 + rank], target[: 2 + rank], sequence_group=world)
    few = own((1, 7))
    with pytest.raises(ValueError, match=r"advantages \(3, [17]\) may be per token or per sequence"):
        policy = LigerFusedLinearGRPOLoss()
        policy(weight, input[:, few], target[:, few], torch.randn(3, 8)[:, few], sequence_group=world)
