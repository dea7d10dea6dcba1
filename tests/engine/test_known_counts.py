"""`n_valid`: the caller knows how many tokens have a target, and nothing waits for the device.

Values have the bits of a call without it. A wrong number raises: on the CPU at once, on a device by its assertion.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fresh_process import FreshProcesses
from ranks import join
from sampling import on_paths
from table import ROWS, SMALL, Batch, Row, evaluate, moved, rows, students, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearULDLoss,
    VocabShard,
    functional,
    linear_token_stats,
)
from liger_chunked.engine import known

BUDGETS = {"one": None, "several": 4 * SMALL.vocab * 8}  # a few rows of float64


def counts(target: Tensor) -> list[int]:
    return (target != -100).sum(1).tolist()


def counted(row: Row, batch: Batch) -> dict[str, Any]:
    """Return the batch with its counts."""
    of_sequences = counts(batch["target"])
    added: dict[str, Any] = {"n_valid": sum(of_sequences) if row.scope == "token" else of_sequences}
    if "kl_target" in batch:
        added["kl_n_valid"] = counts(batch["kl_target"])
    return {**batch, **added}


class Waits(TorchDispatchMode):
    """Collects the operators that would wait for a device.

    Those read values on the host, or find a shape from values. `lift_fresh` is a copy of the host's numbers.
    """

    NAMES = (
        "_local_scalar_dense",
        "bincount",
        "equal",
        "histc",
        "is_nonzero",
        "item",
        "lift_fresh",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique",
        "_unique2",
        "unique_consecutive",
        "unique_dim",
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.of_torch = in_quantile()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        indices = args[1] if name.startswith("index") and len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
        by_mask = any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in indices)
        if (name in self.NAMES and name not in self.of_torch) or by_mask:
            self.found.append(str(function))
        return function(*args, **kwargs or {})


@functools.cache
def in_quantile() -> frozenset[str]:
    """Return the operators in which torch's own quantile waits: `equal` in torch 2.9, none in torch 2.13."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(function.overloadpacket.__name__)
            return function(*args, **kwargs or {})

    names: set[str] = set()
    with Names():
        torch.quantile(torch.arange(3.0), 0.5)
    return frozenset(names & set(Waits.NAMES))


@pytest.fixture(autouse=True)
def gpu_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep all rows of these small steps, as a GPU does with a count or without. A CPU leaves out dead rows in both."""
    monkeypatch.setattr("liger_chunked.engine.choose.torch_on_host", lambda head: False)


@contextlib.contextmanager
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    """Take the path of a device, and collect what waits for it."""

    def tolist(x: Tensor) -> Any:
        waits.found.append("tolist")
        return list_of(x)

    list_of = Tensor.tolist
    with monkeypatch.context() as patch, Waits() as waits:
        patch.setattr("liger_chunked.engine.known.on_host", lambda x: False)
        patch.setattr("liger_chunked.kernels.scale.on_host", lambda x: False)
        patch.setattr(Tensor, "tolist", tolist)
        yield waits


def same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, x in expected.items():
        assert x is ours[name] is None or torch.equal(ours[name], x), name


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("row", on_paths())
def test_every_loss_has_the_same_bits_and_waits_for_nothing(row, budget, monkeypatch):
    loss = partial(row.ours, logits_budget=BUDGETS[budget])
    batch = row.sample(SMALL, 1)
    expected, with_counts = evaluate(loss, batch), counted(row, batch)
    same(evaluate(loss, with_counts), expected)
    with as_on_a_device(monkeypatch) as waits:
        ours = evaluate(loss, with_counts)
    assert not waits.found
    same(ours, expected)


@pytest.mark.parametrize("row", rows("ce", "dpo-sigmoid", "kto-kl", "grpo", "kl-top-k", "stats-logps"), ids=repr)
def test_without_counts_a_loss_waits(row, monkeypatch):
    """The test above could fail."""
    with as_on_a_device(monkeypatch) as waits:
        evaluate(row.ours, row.sample(SMALL, 1))
    assert waits.found


def wrong(row: Row, given: dict[str, Any]) -> dict[str, Any]:
    """Return counts of which one is wrong; those of sequences have the right sum."""
    if row.scope == "token":
        return given | {"n_valid": given["n_valid"] - 1}
    moved = list(given["n_valid"])
    moved[0], moved[1] = moved[0] - 1, moved[1] + 1
    return given | {"n_valid": moved}


@pytest.mark.parametrize("row", on_paths())
def test_a_wrong_count_raises(row, monkeypatch):
    batch = row.sample(SMALL, 2)
    if row.scope != "token":
        batch["target"][1, -1] = -100  # one token fewer
    given = wrong(row, counted(row, batch))
    right = counts(batch["target"])
    if row.scope == "token":
        text = rf"n_valid must be {sum(right)}, the number of tokens of \w+ that are not ignore_index .*, got "
    else:
        text = rf"n_valid\[0\] must be {right[0]}, .* in sequence 0, got {right[0] - 1}"
    with pytest.raises(ValueError, match=text):
        row.ours(given)
    with as_on_a_device(monkeypatch), pytest.raises(RuntimeError, match="n_valid must count the tokens of"):
        row.ours(given)


@pytest.mark.parametrize("row", rows("ce", "dpo-sigmoid", "bco", "grpo", "jsd", "stats-logps"), ids=repr)
@pytest.mark.parametrize("id", [-7, SMALL.vocab])
def test_a_target_out_of_range_raises(row, id, monkeypatch):
    batch = row.sample(SMALL, 3)
    batch["target"][0, -1] = id
    given = counted(row, batch)
    with pytest.raises(ValueError, match=rf"target holds {id}, expected"):
        row.ours(given)
    with as_on_a_device(monkeypatch), pytest.raises(RuntimeError, match="target must be ignore_index or an index"):
        row.ours(given)


def packed(batch: Batch) -> tuple[Batch, Tensor]:
    """Return a batch of whole rows without padding, of sequences of 4, 0 and other lengths."""
    n, length = batch["target"].shape
    lengths = [4, 0, *[length - 1] * (n - 2)]
    inside = torch.arange(length) < torch.tensor(lengths)[:, None]
    of_tokens = {"input", "target", "ref_input", "old_logps"}
    flat = {name: x[inside] if name in of_tokens else x for name, x in batch.items()}
    return flat, torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("row", rows("dpo-sigmoid", "dpo-aot", "orpo", "kto-kl", "grpo", "gspo"), ids=repr)
def test_packed_sequences(row, monkeypatch):
    """`cu_seqlens` are on the CPU, and become arguments of a kernel."""
    batch, cu_seqlens = packed(row.sample(SMALL, 4))
    ends = cu_seqlens.tolist()
    of_sequences = [int((batch["target"][a:b] != -100).sum()) for a, b in itertools.pairwise(ends)]
    given = {**batch, "cu_seqlens": cu_seqlens}
    expected = evaluate(row.ours, given)
    given["n_valid"] = of_sequences
    same(evaluate(row.ours, given), expected)
    with as_on_a_device(monkeypatch) as waits:
        ours = evaluate(row.ours, given)
    assert waits.found == ["tolist"]  # of `cu_seqlens`
    same(ours, expected)
    with pytest.raises(ValueError, match="cu_seqlens must be on the CPU with n_valid, got it on meta"):
        row.ours(given | {"cu_seqlens": cu_seqlens.to("meta")})


def with_temperature(batch: Batch) -> Batch:
    return batch | {"temperature": torch.linspace(0.5, 2.0, batch["target"].numel()).view(batch["target"].shape)}


def candidates_of(target: Tensor) -> Tensor:
    return (target.clamp(min=0)[..., None] + torch.arange(3)) % SMALL.vocab


def statistics(batch: Batch, **settings: Any) -> Tensor:
    stats = linear_token_stats(**batch, **settings)
    found = [x for x in stats._replace(candidate_logps=None) if x is not None]
    return sum(x.exp().sum() for x in found)


def ragged(batch: dict[str, Any]) -> Tensor:
    mask = batch["target"] != -100
    given = {name: batch[name] for name in ("weight", "input", "teacher_weight", "teacher_input") if name in batch}
    return LigerFusedLinearULDLoss()(**given, mask=mask, n_valid=batch.get("n_valid"))[0]


def by_mask(batch: dict[str, Any], **more: Any) -> Tensor:
    given = dict(batch)
    mask = given.pop("target") != -100
    return functional.kl_div_loss(**_hidden(given), mask=mask, **more)[0]


def _hidden(batch: dict[str, Any]) -> dict[str, Any]:
    return {"hidden" if name == "input" else name: x for name, x in batch.items()}


OTHERS: dict[str, tuple[Callable[..., Tensor], Callable[[int], Batch]]] = {
    "statistics-temperature": (statistics, lambda seed: with_temperature(tokens(SMALL, seed))),
    "statistics-candidates": (
        lambda batch: statistics({**batch, "candidates": candidates_of(batch["target"])}),
        lambda seed: tokens(SMALL, seed),
    ),
    "uld": (ragged, lambda seed: students(SMALL, seed, padding=3)),
    "kl-of-a-mask": (by_mask, lambda seed: students(SMALL, seed)),
    "ce-metrics": (
        lambda batch: functional.cross_entropy_loss(
            **_hidden(batch), return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True
        )[0],
        lambda seed: tokens(SMALL, seed),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_arguments_beside_the_table(name, monkeypatch):
    loss, sample = OTHERS[name]
    batch = sample(5)
    expected, given = evaluate(loss, batch), {**batch, "n_valid": sum(counts(batch["target"]))}
    same(evaluate(loss, given), expected)
    with as_on_a_device(monkeypatch) as waits:
        ours = evaluate(loss, given)
    assert not waits.found
    same(ours, expected)
    for run, error in ((contextlib.nullcontext(), ValueError), (as_on_a_device(monkeypatch), RuntimeError)):
        with run, pytest.raises(error, match="n_valid must"):
            loss(given | {"n_valid": given["n_valid"] + 1})


def test_policy_masks_and_temperatures(monkeypatch):
    """The counts are of tokens that the mask keeps, in student and teacher."""
    (row,) = rows("grpo-advantages-of-tokens")
    batch = row.sample(SMALL, 6)
    batch["attention_mask"] = torch.ones_like(batch["target"], dtype=torch.float64)
    batch["attention_mask"][:, 3] = 0
    kept = batch["target"].masked_fill(batch["attention_mask"] == 0, -100)
    teacher = students(SMALL, 6)
    distilled = {
        **{name: x for name, x in batch.items() if name != "advantages"},
        **{name: x for name, x in teacher.items() if name.startswith("teacher_")},
    }

    def policy(batch: dict[str, Any]) -> Tensor:
        return LigerFusedLinearGRPOLoss()(**batch)[0]

    def distillation(batch: dict[str, Any]) -> Tensor:
        return functional.on_policy_distillation_loss(**_hidden(batch))[0]

    for loss, given in ((policy, with_temperature(batch)), (distillation, distilled)):
        expected, with_counts = evaluate(loss, given), {**given, "n_valid": counts(kept)}
        with as_on_a_device(monkeypatch) as waits:
            ours = evaluate(loss, with_counts)
        assert not waits.found
        same(ours, expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_labels(dtype, monkeypatch):
    (row,) = rows("kto-kl")
    batch = row.sample(SMALL, 7)
    batch["preference_labels"] = batch["preference_labels"].to(dtype)
    given = counted(row, batch)
    with as_on_a_device(monkeypatch) as waits:
        ours = evaluate(row.ours, given)
    assert not waits.found
    same(ours, evaluate(row.ours, batch))


def broken() -> dict[str, tuple[Row, dict[str, Any], str]]:
    """Return calls whose values an assertion of the device refuses."""
    (dpo,), (kto,), (grpo,), (top_k,), (stats,) = map(rows, ("orpo", "kto-kl", "grpo", "kl-top-k", "stats-logps"))
    found = {}
    batch = counted(dpo, dpo.sample(SMALL, 8))
    found["nll_target"] = (
        dpo,
        batch | {"nll_target": (batch["target"] + 1).where(batch["target"] >= 0, -100)},
        "agree",
    )
    batch = counted(kto, kto.sample(SMALL, 8))
    found["labels"] = (kto, batch | {"preference_labels": batch["preference_labels"].long() * 2 - 1}, "0 and 1")
    batch = counted(grpo, grpo.sample(SMALL, 8))
    additive = torch.zeros(batch["target"].shape)
    additive[0, 0] = -1e4
    found["attention_mask"] = (grpo, batch | {"attention_mask": additive}, "attention_mask must be 0 or 1")
    nothing = torch.ones(batch["target"].shape)
    found["temperature"] = (grpo, batch | {"temperature": nothing * 0}, "temperature must be positive")
    batch = counted(top_k, top_k.sample(SMALL, 8))
    ids = batch["teacher_ids"].clone()
    found["id"] = (top_k, batch | {"teacher_ids": ids + SMALL.vocab}, "teacher_ids must be indices|teacher_ids holds")
    ids = batch["teacher_ids"].clone()
    ids[..., -1] = ids[..., -2]
    found["twice"] = (top_k, batch | {"teacher_ids": ids}, "teacher_ids holds a token twice")
    batch = counted(stats, stats.sample(SMALL, 8))
    of_target = candidates_of(batch["target"])
    found["candidate"] = (stats, batch | {"candidates": of_target - 1 - SMALL.vocab}, "candidates ")
    found["candidates"] = (stats, batch | {"candidates": of_target[..., [0, 1, 0]]}, "candidates holds an id twice")
    return found


BROKEN = broken()


@pytest.mark.parametrize("name", BROKEN)
def test_checks_do_not_vanish(name, monkeypatch):
    row, given, text = BROKEN[name]
    with pytest.raises(ValueError, match=text):
        row.ours(given)
    with as_on_a_device(monkeypatch), pytest.raises(RuntimeError, match=text):
        row.ours(given)


def test_counts_of_another_kind_are_refused():
    batch, ce = tokens(SMALL, 0), LigerFusedLinearCrossEntropyLoss()
    total, of_sequences = batch["target"].numel(), counts(batch["target"])
    for given in (of_sequences, 3.0, True, torch.tensor(3)):
        with pytest.raises(TypeError, match="n_valid must be an int, the number of tokens that have a target, got"):
            ce(**batch, n_valid=given)
    for given in (-1, total + 1):
        with pytest.raises(ValueError, match=rf"n_valid must be 0 to {total}, the positions of input, got {given}"):
            ce(**batch, n_valid=given)
    (row,) = rows("dpo-sigmoid")
    batch = row.sample(SMALL, 0)
    for given in (total, torch.tensor(of_sequences), [1.0] * 6, [True] * 6):
        with pytest.raises(TypeError, match="n_valid must be a list or tuple of ints, for each sequence"):
            row.ours(batch | {"n_valid": given})
    for given in ([], [1] * 5, [-1] * 6, [SMALL.length + 1] * 6):
        text = f"n_valid must have 6 counts, one for each sequence, of 0 to 7 tokens, got {given}"
        with pytest.raises(ValueError, match=re.escape(text)):
            row.ours(batch | {"n_valid": given})


def test_combinations_that_wait_are_refused():
    with pytest.raises(ValueError, match="n_valid and sequence_group are given: ranks that split sequences wait"):
        known.token_count(3, 4, sequence_group=object())
    with pytest.raises(ValueError, match="kl_n_valid and sequence_group are given"):
        known.sequence_counts([3], torch.zeros(1, 4), object(), name="kl_n_valid")
    with pytest.raises(ValueError, match="n_valid and input_grad='reduce_scatter' of vocab_shard are given"):
        known.token_count(3, 4, shard=VocabShard(None, 0, 4, input_grad="reduce_scatter"))
    (row,) = rows("kto-kl-of-mismatched")
    given = counted(row, row.sample(SMALL, 0))
    for name, other in (("n_valid", "kl_n_valid"), ("kl_n_valid", "n_valid")):
        with pytest.raises(ValueError, match=rf"{other} is given without {name}: with kl_input, pass both or neither"):
            row.ours({k: x for k, x in given.items() if k != name})
    (row,) = rows("kto-kl")
    with pytest.raises(ValueError, match=r"takes no kl_n_valid|given twice: as kl and as kl_n_valid"):
        row.ours(counted(row, row.sample(SMALL, 0)) | {"kl_n_valid": [1]})
    (row,) = rows("dpo-aot")
    batch = row.sample(SMALL, 0)
    aot = LigerFusedLinearDPOLoss(loss_type="aot", compute_nll_loss=True)
    with pytest.raises(ValueError, match="n_valid and nll_target are given, but a loss of the whole batch must count"):
        aot(**batch, nll_target=batch["target"], n_valid=counts(batch["target"]))
    everything = students(SMALL, 0)
    del everything["target"]
    n = SMALL.sequences * SMALL.length
    with pytest.raises(ValueError, match=f"n_valid must be {n}, all positions of input, without a target or mask"):
        functional.kl_div_loss(**_hidden(everything), n_valid=n - 1)


def test_nothing_has_a_target(monkeypatch):
    for id, n_valid in (("ce", 0), ("dpo-sigmoid", [0] * 6), ("dpo-aot", [0] * 6), ("grpo-top-entropy", [0] * 6)):
        (row,) = rows(id)
        batch = row.sample(SMALL, 0)
        batch["target"].fill_(-100)
        expected, given = evaluate(row.ours, batch), {**batch, "n_valid": n_valid}
        with as_on_a_device(monkeypatch) as waits:
            ours = evaluate(row.ours, given)
        assert not waits.found
        same(ours, expected)
        assert not any(x.any() for x in ours.values())


def test_some_pairs_and_sequences_are_empty(monkeypatch):
    for id in ("dpo-aot", "dpo-sigmoid", "kto-kl", "grpo", "grpo-top-entropy", "gspo-top-entropy-kl"):
        (row,) = rows(id)
        batch = row.sample(SMALL, 0)
        batch["target"][[0, 3, 4]] = -100  # a pair, and a rejected sequence
        expected, given = evaluate(row.ours, batch), counted(row, batch)
        with as_on_a_device(monkeypatch) as waits:
            ours = evaluate(row.ours, given)
        assert not waits.found
        same(ours, expected)


def test_module_call_with_constructor():
    (row,) = rows("kto-ref_logps-of-sequences")
    batch = row.sample(SMALL, 0)
    given = (*(batch[name] for name in ("weight", "input", "target", "preference_labels")),)
    named = {"ref_logps": batch["ref_logps"], "kl": 0.5}
    once = LigerFusedLinearKTOLoss(*given, **named, beta=0.2, n_valid=counts(batch["target"]))
    assert torch.equal(once[0], LigerFusedLinearKTOLoss(beta=0.2)(*given, **named)[0])


@pytest.mark.parametrize("name", [name for name in functional.__all__ if name.endswith("_loss")])
def test_functions_pass_the_counts_on(name):
    batch = students(SMALL, 0)
    given = {"hidden" if k == "input" else k: batch[k] for k in ("weight", "input", "target")}
    of_teacher = {k: batch[k] for k in ("teacher_weight", "teacher_input")}
    if name in ("kl_div_loss", "jsd_loss", "tvd_loss", "cosine_similarity_loss", "on_policy_distillation_loss"):
        given |= of_teacher
    elif name == "uld_loss":
        given |= of_teacher
        del given["target"]
    elif name in ("kto_loss", "bco_loss"):
        given |= {"preference_labels": torch.ones(SMALL.sequences, dtype=torch.bool)}
    elif name == "grpo_loss":
        given |= {"advantages": torch.ones(SMALL.sequences, dtype=torch.float64)}
    with pytest.raises(TypeError, match=r"^n_valid must be an? "):
        getattr(functional, name)(**given, n_valid="counts")


def split_vocabulary(rank: int, world: str, folder: str) -> None:
    import torch.distributed as dist
    from test_vocab_shard import cut

    join(rank, world, folder)
    for row in rows("ce-smoothing", "dpo-sigmoid", "kto-kl", "grpo", "jsd", "stats-logps"):
        batch = row.sample(SMALL, 1)
        for budget in BUDGETS.values():
            loss, own = partial(row.ours, logits_budget=budget), cut(batch, [(12, 0), (11, 1)])
            same(evaluate(loss, counted(row, own)), evaluate(loss, own))
    (row,) = rows("kl-top-k")
    own = cut(row.sample(SMALL, 1), [(12, 0), (11, 1)])
    with pytest.raises(ValueError, match="n_valid is given with vocab_shard and teacher_ids"):
        row.ours(counted(row, own))
    (row,) = rows("dpo-sigmoid")
    batch = row.sample(SMALL, 1)
    with pytest.raises(ValueError, match="n_valid and sequence_group are given"):
        row.ours(counted(row, batch) | {"sequence_group": dist.group.WORLD})
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_split_vocabulary(fresh_process: FreshProcesses, tmp_path):
    fresh_process.spawn(split_vocabulary, 2, "2", str(tmp_path))


on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
# These rows hold a tensor on the CPU, whose copy waits.
OF_THE_HOST = {
    "ce-num_items-tensor-alone",
    "ce-num_items-tensor",
    "kto-kl-tensor",
    "bco-delta-tensor",
    "jsd-0.1",
    "cispo",
}


@contextlib.contextmanager
def synchronizing_raises() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class TestOnAGpu:
    pytestmark = on_a_gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
    @pytest.mark.parametrize("row", [row for row in ROWS if row.id not in OF_THE_HOST], ids=repr)
    def test_no_loss_synchronizes(self, row, dtype):
        for budget in (None, 4 * SMALL.vocab * dtype.itemsize):
            loss, batch = partial(row.ours, logits_budget=budget), moved(row.sample(SMALL, 1), dtype, "cuda")
            expected, with_counts = evaluate(loss, batch), counted(row, batch)
            evaluate(loss, with_counts)  # compiles kernels
            with synchronizing_raises():
                ours = evaluate(loss, with_counts)
            same(ours, expected)

    def test_without_counts_a_loss_synchronizes(self):
        """The test above could fail."""
        (row,) = rows("kl-top-k")
        batch = moved(row.sample(SMALL, 1), torch.bfloat16, "cuda")
        evaluate(row.ours, batch)
        with synchronizing_raises(), pytest.raises(RuntimeError, match="synchroniz"):
            evaluate(row.ours, batch)

    def test_packed_sequences_do_not_synchronize(self):
        for row in rows("dpo-sigmoid", "kto-kl", "gspo"):
            batch, cu_seqlens = packed(row.sample(SMALL, 4))
            ends = cu_seqlens.tolist()
            of_sequences = [int((batch["target"][a:b] != -100).sum()) for a, b in itertools.pairwise(ends)]
            given: dict[str, Any] = {**moved(batch, torch.bfloat16, "cuda"), "cu_seqlens": cu_seqlens}
            expected = evaluate(row.ours, given)
            given["n_valid"] = of_sequences
            evaluate(row.ours, given)
            with synchronizing_raises():
                ours = evaluate(row.ours, given)
            same(ours, expected)

    @pytest.mark.parametrize("id", ["ce", "ce-smoothing", "dpo-sigmoid", "kto-kl", "grpo", "jsd", "stats-logps"])
    @pytest.mark.parametrize("budget", [None, 4 * SMALL.vocab * 2], ids=["one", "several"])
    def test_cuda_graph(self, id, budget):
        """A graph of forward and backward, replayed with other values and places of as many tokens."""
        (row,) = rows(id)
        batch = moved(row.sample(SMALL, 1), torch.bfloat16, "cuda")
        given = counted(row, batch)
        names = [name for name in ("weight", "input", "bias") if name in batch]
        for name in names:
            batch[name].requires_grad_()

        def step() -> list[Tensor]:
            loss = row.ours(given, logits_budget=budget)
            return [loss.detach(), *torch.autograd.grad(loss, [batch[name] for name in names])]

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles kernels, and proves their cached launch
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for seed in (2, 3):
            with torch.no_grad():
                for name in names:
                    batch[name].copy_(torch.randn_like(batch[name]))
                valid = batch["target"] != -100
                places = valid.roll(seed, 1)  # as many tokens in each sequence
                other = torch.randint_like(batch["target"], SMALL.vocab)
                batch["target"].copy_(other.where(places, -100))
            graph.replay()
            replayed = [x.clone() for x in captured]
            for ours, expected in zip(replayed, step(), strict=True):
                assert torch.equal(ours, expected)

    def test_the_device_asserts(self, fresh_process):
        """In another process, whose CUDA context the assertion ends."""
        printed = fresh_process.run(WRONG_ON_A_GPU)
        assert "device-side assert" in printed or "unspecified launch failure" in printed


WRONG_ON_A_GPU = """
import os, torch
from liger_chunked.functional import cross_entropy_loss
weight, hidden = torch.randn(64, 16, device="cuda"), torch.randn(8, 16, device="cuda")
target = torch.arange(8, device="cuda")
cross_entropy_loss(weight, hidden, target, n_valid=8)
torch.cuda.synchronize()
try:
    cross_entropy_loss(weight, hidden, target, n_valid=7)
    torch.cuda.synchronize()
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""
