"""Sparse gradients of the head, of the rows that kept ids read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fresh_process import FreshProcesses
from ranks import join
from spies import Memory
from table import products_for_kept_ids
from test_kept_ids import B, H, T, V, batch, drawn_lists, masked, transformed
from torch import Tensor, nn

import liger_chunked.kernels.kept as kept_kernels
from liger_chunked import AdaptedWeight, KeptIds, LigerFusedLinearGRPOLoss, VocabShard, linear_token_stats

# torch 2.11 says so of every sparse tensor, once in a process.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")


# Bounds of float64 sums: of the same products in another order, and of eager code with its own softmax.
OF_SUMS, OF_EAGER = 1e-12, 1e-9


def rows_read(target: Tensor, lists: list[list[int]]) -> list[int]:
    pairs = zip(target.reshape(-1).tolist(), lists, strict=True)
    return sorted({i for y, ids in pairs if y >= 0 for i in ids})


def short_lists(target: Tensor) -> list[list[int]]:
    """Return lists that leave some rows out, with an id that only an ignored position has."""
    return [[5, 9] if y < 0 else sorted({y, 3, (y + i) % 5}) for i, y in enumerate(target.reshape(-1).tolist())]


def unlike_any(target: Tensor) -> Tensor:
    """Return a target without the ids 5 and 9."""
    return torch.where((target == 5) | (target == 9), 7, target)


@pytest.mark.parametrize("case", ["plain", "temperatures", "adapter"])
def test_oracle(case: str) -> None:
    """In float64: the rows of eager code's dW, and no others. Gradients of the rest are dense and the same."""
    given = batch()
    target = unlike_any(given["target"])
    lists = short_lists(target)
    leaves = {name: x.requires_grad_() for name, x in given.items() if x.is_floating_point()}
    weight: Any = leaves["weight"]
    z = leaves["input"] @ leaves["weight"].T + leaves["bias"]
    temperature: Any = 0.7
    if case == "temperatures":
        temperature = (0.5 + torch.rand(B, T, generator=torch.Generator().manual_seed(1))).float()
    elif case == "adapter":
        weight = AdaptedWeight(leaves["weight"], leaves["up"], lambda x: x @ leaves["down"])
        z = z + leaves["input"] @ leaves["down"] @ leaves["up"].T
    z = transformed(z, temperature.double() if isinstance(temperature, Tensor) else temperature, softcap=3.0)
    valid = target >= 0
    logp = masked(z, lists).log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)
    expected = logp.gather(-1, target.clamp(min=0)[..., None])[..., 0] + 0.3 * entropy
    stats = linear_token_stats(
        weight, leaves["input"], target, leaves["bias"], outputs=("logps", "entropy"), softcap=3.0,
        temperature=temperature, kept=KeptIds.from_lists(lists), sparse_weight_grad=True,
    )  # fmt: skip
    assert stats.logps is not None and stats.entropy is not None
    used = [x for name, x in leaves.items() if case == "adapter" or name not in ("up", "down")]
    ours = dict(zip(used, torch.autograd.grad((stats.logps + 0.3 * stats.entropy).sum(), used), strict=True))
    exact = dict(zip(used, torch.autograd.grad(torch.where(valid, expected, 0.0).sum(), used), strict=True))
    sparse = ours[leaves["weight"]]
    assert sparse.is_sparse and sparse.is_coalesced() and sparse.sparse_dim() == sparse.dense_dim() == 1
    assert sparse.indices()[0].tolist() == rows_read(target, lists) and 5 not in sparse.indices()
    for x in used:
        found = ours[x].to_dense() if x is leaves["weight"] else ours[x]
        torch.testing.assert_close(found, exact[x], rtol=OF_EAGER, atol=OF_EAGER)
        assert x is leaves["weight"] or not ours[x].is_sparse


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_the_dense_gradient(dtype: torch.dtype, device: str) -> None:
    """In every run. An ignored position in the middle of an id's entries does not cut their sum."""
    given = batch(dtype, device)
    target = given["target"].clone()
    target[0, 2] = -100
    kept = KeptIds.from_lists([sorted({3, max(y, 0)}) for y in target.reshape(-1).tolist()], device)
    weight, input = given["weight"].requires_grad_(), given["input"]

    def gradient(**options: bool) -> Tensor:
        logps = linear_token_stats(weight, input, target, kept=kept, **options).logps
        assert logps is not None
        return torch.autograd.grad(logps.sum(), weight)[0]

    sparse, again = (gradient(sparse_weight_grad=True) for _ in range(2))
    assert sparse.dtype == dtype and torch.equal(sparse.values(), again.values())
    assert torch.equal(sparse.to_dense(), gradient())
    with products_for_kept_ids():  # as long lists do
        assert torch.equal(gradient(sparse_weight_grad=True).values(), sparse.values())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_optimizers(optimizer: Any) -> None:
    """A step is that of the dense gradient. Of Adam this holds for the first step alone, because SparseAdam is lazy."""
    given = batch()
    kept = KeptIds.from_lists(short_lists(given["target"]))
    stepped = []
    for is_sparse in (True, False):
        weight = nn.Parameter(given["weight"].clone())
        lazy = optimizer is torch.optim.SparseAdam
        chosen = torch.optim.Adam if lazy and not is_sparse else optimizer
        steps = chosen([weight], lr=0.1, **({"eps": 1e-30} if lazy else {}))  # they add eps at different places
        for _ in range(1 if lazy else 2):
            loss, _ = LigerFusedLinearGRPOLoss()(
                weight, given["input"], given["target"], torch.tensor([1.0, -0.5], dtype=torch.float64), kept=kept,
                sparse_weight_grad=is_sparse,
            )  # fmt: skip
            loss.backward()
            assert weight.grad is not None and weight.grad.is_sparse == is_sparse
            steps.step()
            steps.zero_grad()
        assert not torch.equal(weight, given["weight"])
        stepped.append(weight.detach())
    torch.testing.assert_close(stepped[0], stepped[1], rtol=OF_SUMS, atol=OF_SUMS)


@pytest.mark.parametrize("embedding", ["own", "dense", "sparse"])
def test_gradients_of_several_calls_add_up(embedding: str) -> None:
    """Over calls, and with a tied embedding: the sum is dense where a part of it is."""
    given = batch()
    ids = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(2))
    gradients = []
    for is_sparse in (True, False):
        weight = nn.Parameter(given["weight"].clone())
        for lists in (short_lists(given["target"]), drawn_lists(given["target"], mixed=False)):
            states = given["input"]
            if embedding != "own":
                states = states + F.embedding(ids, weight, sparse=embedding == "sparse" and is_sparse)
            logps = linear_token_stats(
                weight, states, given["target"], kept=KeptIds.from_lists(lists), sparse_weight_grad=is_sparse
            ).logps
            assert logps is not None
            logps.sum().backward()
        assert weight.grad is not None and weight.grad.is_sparse == (is_sparse and embedding != "dense")
        gradients.append(weight.grad.to_dense() if weight.grad.is_sparse else weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=OF_SUMS, atol=OF_SUMS)


def test_autocast() -> None:
    """Operands keep their dtypes, and so does the gradient of a float32 weight."""
    given = batch(torch.float32)
    kept, weight = KeptIds.from_lists(short_lists(given["target"])), given["weight"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logps = linear_token_stats(
            weight, given["input"].bfloat16(), given["target"], kept=kept, sparse_weight_grad=True
        ).logps
    assert logps is not None
    logps.sum().backward()
    assert weight.grad is not None and weight.grad.is_sparse and weight.grad.dtype == torch.float32


def test_memory_is_of_the_rows_that_are_read() -> None:
    n, v, h = 16, 4096, 64
    weight, input = torch.randn(v, h, requires_grad=True), torch.randn(n, h)
    target = torch.randint(v, (n,))
    kept = KeptIds.from_lists([[y, (y + 1) % v] for y in target.tolist()])
    largest = {}
    for is_sparse in (False, True):
        with Memory() as memory:
            logps = linear_token_stats(weight, input, target, kept=kept, sparse_weight_grad=is_sparse).logps
            assert logps is not None
            torch.autograd.grad(logps.sum(), weight)
        largest[is_sparse] = memory.largest
    assert largest[False] == v * h * 4
    assert largest[True] <= 2 * n * h * 4  # a row for each entry


def test_the_number_of_rows_is_no_part_of_a_launchs_key() -> None:
    """It differs from batch to batch: each would miss the cached launch."""
    for kernel in (kept_kernels._weight_kernel, kept_kernels._joined_kernel):
        assert {kernel._numbers[i] for i in kernel._unspecialized} == {"n_tokens", "n_written"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_launches_are_cached() -> None:
    weight = torch.randn(4096, 64, device="cuda", requires_grad=True)
    counts = []
    for n in (40, 80, 33, 57, 64):
        input, target = torch.randn(n, 64, device="cuda"), torch.arange(n, device="cuda")
        kept = KeptIds.from_lists([[y, y + n] for y in range(n)], "cuda")
        logps = linear_token_stats(weight, input, target, kept=kept, sparse_weight_grad=True).logps
        assert logps is not None
        logps.sum().backward()
        counts.append([len(x.variants) for x in (kept_kernels._weight_kernel, kept_kernels._joined_kernel)])
    assert counts[-1] == counts[-2] == counts[-3]


def test_refusals() -> None:
    given = batch(torch.float32)
    call, lists = (given["weight"], given["input"], given["target"]), short_lists(given["target"])
    advantages = torch.tensor([1.0, -0.5])

    def refused(message: str, error: type[Exception] = ValueError, **options: Any) -> None:
        for run in (
            lambda: linear_token_stats(*call, **options),
            lambda: LigerFusedLinearGRPOLoss()(*call, advantages, **options),
        ):
            with pytest.raises(error, match=message):
                run()

    refused("needs kept", sparse_weight_grad=True)
    refused("must be True or False, got int", TypeError, kept=KeptIds.from_lists(lists), sparse_weight_grad=1)
    mixed = copy.copy(lists)
    mixed[2] = []
    refused("whole vocabulary at position 2 .*ignore", kept=KeptIds.from_lists(mixed), sparse_weight_grad=True)
    with pytest.raises(ValueError, match="n_valid"):
        linear_token_stats(*call, kept=KeptIds.from_lists(lists), sparse_weight_grad=True, n_valid=8)
    with pytest.raises(ValueError, match="n_valid"):
        LigerFusedLinearGRPOLoss()(
            *call, advantages, kept=KeptIds.from_lists(lists), sparse_weight_grad=True, n_valid=[5, 3]
        )
    parameter = nn.Parameter(given["weight"])
    for computed in (
        parameter.view_as(parameter),
        parameter[:],
        parameter.double().float(),
        parameter.t().contiguous().t(),
    ):
        with pytest.raises(ValueError, match=r"weight must be a leaf .* computed from another tensor \(\w+Backward0\)"):
            linear_token_stats(computed, *call[1:], kept=KeptIds.from_lists(lists), sparse_weight_grad=True)
    with torch.no_grad():  # has no gradient to pass on
        linear_token_stats(parameter[:], *call[1:], kept=KeptIds.from_lists(lists), sparse_weight_grad=True)
    ignored = [[] if y < 0 else ids for y, ids in zip(given["target"].reshape(-1).tolist(), lists, strict=True)]
    weight = given["weight"].requires_grad_()
    kept = KeptIds.from_lists(ignored)
    nothing = torch.full_like(given["target"], -100)
    for target, expected in ((given["target"], len(rows_read(given["target"], ignored))), (nothing, 0)):
        logps = linear_token_stats(weight, given["input"], target, kept=kept, sparse_weight_grad=True).logps
        assert logps is not None
        assert torch.autograd.grad(logps.sum(), weight)[0].values().shape == (expected, H)


class Policy(nn.Module):
    """A head whose weight DistributedDataParallel knows as one with sparse gradients, or not."""

    def __init__(self, weight: Tensor, sparse: bool) -> None:
        super().__init__()
        self.head = nn.Embedding(*weight.shape, sparse=sparse, _weight=weight.clone(), dtype=weight.dtype)
        self.out = nn.Linear(H, H, dtype=weight.dtype)
        self.out.load_state_dict({"weight": torch.eye(H), "bias": torch.zeros(H)})

    def forward(self, input: Tensor, target: Tensor, kept: KeptIds) -> Tensor:
        logps = linear_token_stats(self.head.weight, self.out(input), target, kept=kept, sparse_weight_grad=True).logps
        assert logps is not None
        return logps.sum()


def on_a_rank(rank: int, folder: str) -> None:
    join(rank, 2, folder)
    given = batch()
    bounds = ((0, 9), (9, V))[rank]
    lists = short_lists(given["target"])
    kept = KeptIds.from_lists(lists)
    whole = given["weight"].clone().requires_grad_()
    part = given["weight"][slice(*bounds)].clone().requires_grad_()
    shard = VocabShard(None, bounds[0], V)
    for weight, options in ((whole, {}), (part, {"vocab_shard": shard, "sparse_weight_grad": True})):
        logps = linear_token_stats(weight, given["input"], given["target"], kept=kept, **options).logps
        assert logps is not None
        logps.sum().backward()
    assert whole.grad is not None and part.grad is not None and part.grad.is_sparse
    own = [i - bounds[0] for i in rows_read(given["target"], lists) if bounds[0] <= i < bounds[1]]
    assert part.grad.coalesce().indices()[0].tolist() == own and len(own)
    torch.testing.assert_close(part.grad.to_dense(), whole.grad[slice(*bounds)], rtol=OF_SUMS, atol=OF_SUMS)
    half, target = given["input"][:, :2], given["target"][:, :4]
    scattered = {
        "kept": KeptIds.from_lists(short_lists(target)),
        "vocab_shard": VocabShard(None, bounds[0], V, "reduce_scatter"),
    }
    with pytest.raises(ValueError, match="each rank's hidden states whole, got input_grad='reduce_scatter'"):
        linear_token_stats(part, half, target, **scattered)
    with pytest.raises(ValueError, match="each rank's hidden states whole, got input_grad='reduce_scatter'"):
        LigerFusedLinearGRPOLoss()(part, half, target, torch.ones(B, dtype=torch.float64), **scattered)

    # Ranks of a batch: each has a sequence.
    columns = torch.arange(B * T).view(B, T)[rank]
    ours = (given["input"][rank], given["target"][rank], kept.take(columns))
    model = nn.parallel.DistributedDataParallel(Policy(given["weight"], sparse=True))
    model(*ours).backward()
    gradient = model.module.head.weight.grad
    assert gradient.is_sparse
    torch.testing.assert_close(gradient.to_dense(), whole.grad / 2, rtol=OF_SUMS, atol=OF_SUMS)
    dense = nn.parallel.DistributedDataParallel(Policy(given["weight"], sparse=False))
    with pytest.raises(RuntimeError):
        dense(*ours).backward()
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
def test_ranks(tmp_path: Path, fresh_process: FreshProcesses) -> None:
    """A vocabulary split over ranks, and DistributedDataParallel, which must know that gradients are sparse."""
    fresh_process.spawn(on_a_rank, 2, str(tmp_path))
