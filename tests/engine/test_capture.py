"""Steps in the capture of a CUDA graph: the host waits for nothing, all rows are computed, and ignored ones masked.

On a CPU, the function that decides is told that the device is a GPU, and captures.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from ranks import join
from sampling import on_paths
from table import (
    ROWS,
    SMALL,
    Batch,
    Row,
    assert_same,
    evaluate,
    moved,
    relative_error,
    rollouts,
    rows,
    students,
    tokens,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKLDivLoss,
)
from liger_chunked.engine import checks
from liger_chunked.kernels import backend
from liger_chunked.kernels.launch import Kernel

BUDGETS = {"one": None, "several": 4 * SMALL.vocab * 8}  # a few rows of float64
REFUSED = "cannot be captured in a CUDA graph"


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


@contextlib.contextmanager
def capturing() -> Iterator[Waits]:
    """Take the path of a capture, and collect what waits for the device."""

    def tolist(x: Tensor) -> Any:
        waits.found.append("tolist")
        return list_of(x)

    list_of = Tensor.tolist
    with pytest.MonkeyPatch.context() as patch, Waits() as waits:
        patch.setattr(checks, "is_on_gpu", lambda x: True)
        patch.setattr(checks, "is_capturing", lambda: True)
        patch.setattr("liger_chunked.engine.choose.torch_on_host", lambda head: False)
        patch.setattr("liger_chunked.engine.distillation.torch_on_host", lambda head: False)
        patch.setattr("liger_chunked.kernels.scale.on_host", lambda x: False)
        patch.setattr(Tensor, "tolist", tolist)
        yield waits


def close(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    assert_same(ours, expected)


def waits_for_a_count(row: Row) -> bool:
    """Whether kept ids, a loss of sorted pairs, or a share of the tokens needs a number on the host."""
    return row.kept or any(name in row.id for name in ("aot", "top-entropy", "cov"))


NAN = float("nan")
OF_IGNORED = {"old_logps": NAN, "ref_logps": NAN, "teacher_logps": NAN, "importance_weights": NAN, "teacher_ids": -3}


@pytest.mark.few(9, "kl-top-k-one")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("row", on_paths(row for row in ROWS if not waits_for_a_count(row)))
def test_every_loss_masks_and_waits_for_nothing(row: Row, budget: str) -> None:
    loss = partial(row.ours, logits_budget=BUDGETS[budget])
    batch = row.sample(SMALL, 1)
    ignored = batch["target"] == -100
    filled = {**batch}  # what ignored tokens hold has no effect
    for name in OF_IGNORED.keys() & batch.keys():
        if (x := batch[name]).shape[:2] == ignored.shape:
            filled[name] = torch.where(ignored if x.ndim == 2 else ignored[..., None], OF_IGNORED[name], x)
    with capturing() as waits:
        ours = evaluate(loss, filled)
    assert not waits.found
    close(ours, evaluate(row.oracle, batch))
    if "target" in batch:
        assert not ours["input"][batch["target"] == -100].any()


@pytest.mark.parametrize("row", on_paths(row for row in ROWS if waits_for_a_count(row)))
def test_what_waits_for_a_count_is_refused(row: Row) -> None:
    batch = row.sample(SMALL, 1)
    with capturing(), pytest.raises(ValueError, match=REFUSED):
        row.ours(batch)
    row.ours(batch)


@pytest.mark.parametrize("row", rows("ce", "dpo-sigmoid", "kto-kl", "grpo", "kl-top-k", "stats-logps"), ids=repr)
def test_an_eager_step_waits(row: Row) -> None:
    """The tests above could fail."""
    with capturing() as waits, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "is_capturing", lambda: False)
        evaluate(row.ours, row.sample(SMALL, 1))
    assert waits.found


def of_metrics(result: tuple[Tensor, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in result[1]._asdict().items() if x is not None}


METRICS: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[[int], Batch]]] = {
    "ce": (
        LigerFusedLinearCrossEntropyLoss,
        {
            "return_z_loss": True,
            "return_token_accuracy": True,
            "return_predicted_tokens": True,
            "lse_square_scale": 0.1,
        },
        lambda seed: tokens(SMALL, seed),
    ),
    "grpo": (
        LigerFusedLinearGRPOLoss,
        {"entropy_coef": 0.1, "reduction": "bnpo"},
        lambda seed: rollouts(SMALL, seed),
    ),
    "kl": (LigerFusedLinearKLDivLoss, {"weight_hard_loss": 0.5}, lambda seed: students(SMALL, seed)),
}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", METRICS)
def test_metrics(name: str, budget: str) -> None:
    kind, settings, sample = METRICS[name]
    loss, batch = kind(**settings, logits_budget=BUDGETS[budget]), sample(3)
    with capturing() as waits:
        ours = of_metrics(loss(**batch))
    assert not waits.found
    expected = of_metrics(loss(**batch))
    assert ours.keys() == expected.keys()
    for metric, x in expected.items():
        assert ours[metric].dtype == x.dtype, metric
        torch.testing.assert_close(ours[metric], x, rtol=1e-6, atol=1e-12)


def test_nothing_has_a_target() -> None:
    for row in rows("ce", "ce-smoothing-z_loss-class_weights", "dpo-sigmoid", "kto-kl", "grpo", "jsd", "stats-logps"):
        batch = row.sample(SMALL, 0)
        batch["target"].fill_(-100)
        with capturing() as waits:
            ours = evaluate(row.ours, batch)
        assert not waits.found
        assert not any(x.any() for x in ours.values()), row


def split_vocabulary(rank: int, folder: str) -> None:
    import torch.distributed as dist
    from test_vocab_shard import cut

    join(rank, 2, folder)
    for row in rows("ce-smoothing", "dpo-sigmoid", "kto-kl", "grpo", "jsd", "stats-logps"):
        batch = row.sample(SMALL, 1)
        for budget in BUDGETS.values():
            loss, own = partial(row.ours, logits_budget=budget), cut(batch, [(12, 0), (11, 1)])
            expected = evaluate(loss, own)
            with capturing():
                ours = evaluate(loss, own)
            close(ours, expected)
    (row,) = rows("kl-top-k")
    own = cut(row.sample(SMALL, 1), [(12, 0), (11, 1)])
    with capturing(), pytest.raises(ValueError, match=f"teacher_ids with vocab_shard {REFUSED}"):
        row.ours(own)
    (row,) = rows("dpo-sigmoid")
    with capturing(), pytest.raises(ValueError, match=f"sequence_group {REFUSED}"):
        row.ours(row.sample(SMALL, 1) | {"sequence_group": dist.group.WORLD})
    dist.destroy_process_group()


def variant(kernel: Kernel, tensors: Any, numbers: Any, num_warps: int, num_stages: Any, descriptors: Any) -> Any:
    """Return what Triton compiles a kernel for."""
    parameters = inspect.signature(kernel.kernel.fn).parameters
    key: list[Any] = [kernel.kernel.fn.__name__, num_warps, num_stages]
    key += [None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors]
    for name, x in zip(kernel._numbers, numbers, strict=True):
        if "constexpr" in str(parameters[name].annotation):
            key.append((type(x), x))
        elif name in backend.UNSPECIALIZED:
            key.append(x >= 1 << 31)
        elif isinstance(x, bool) or not isinstance(x, int):
            key.append(type(x))
        else:
            key.append("1" if x == 1 else x % 16 == 0)
    return tuple(key + [x is None for x in descriptors])


@pytest.mark.triton
@pytest.mark.skipif(not backend.INTERPRETED, reason="records launches: runs with TRITON_INTERPRET=1")
@pytest.mark.parametrize("row", rows("ce", "ce-smoothing", "dpo-sigmoid", "kto-kl", "grpo", "jsd"), ids=repr)
@pytest.mark.parametrize("budget", ["one", "several"])
def test_a_capture_launches_what_a_step_without_ignored_tokens_does(
    row: Row, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton cannot load a new kernel while a stream captures."""
    found: set[Any] = set()
    launch = Kernel._launch_by_triton

    def watched(self: Kernel, grid: Any, *rest: Any) -> Any:
        found.add(variant(self, *rest))
        return launch(self, grid, *rest)

    monkeypatch.setattr(Kernel, "_launch_by_triton", watched)
    loss = partial(row.ours, logits_budget=BUDGETS[budget])
    batch = moved(row.sample(SMALL, 1), torch.float32)
    evaluate(loss, batch | {"target": batch["target"].clamp(min=0)})
    warm = set(found)
    assert warm
    found.clear()
    with capturing():
        evaluate(loss, batch)
    assert found and found <= warm, {key[0] for key in found - warm}


@pytest.mark.gpu
@pytest.mark.parametrize("id", ["ce", "ce-smoothing", "dpo-sigmoid", "kto-kl", "grpo", "jsd", "stats-logps"])
@pytest.mark.parametrize("budget", [None, 4 * SMALL.vocab * 2], ids=["one", "several"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_cuda_graph(id: str, budget: int | None, dtype: torch.dtype) -> None:
    """A graph of forward and backward, replayed with other values, and with other numbers of tokens that count."""
    (row,) = rows(id)
    batch = moved(row.sample(SMALL, 1), dtype, "cuda")
    names = [name for name in ("weight", "input", "bias") if name in batch]
    for name in names:
        batch[name].requires_grad_()

    def step() -> list[Tensor]:
        loss = row.ours(batch, logits_budget=budget)
        return [loss.detach(), *torch.autograd.grad(loss, [batch[name] for name in names])]

    side, target = torch.cuda.Stream(), batch["target"].clone()
    batch["target"].clamp_(min=0)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles kernels, and proves their cached launch
            step()
    torch.cuda.current_stream().wait_stream(side)
    batch["target"].copy_(target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (2, 3):
        with torch.no_grad():
            for name in names:
                batch[name].copy_(torch.randn_like(batch[name]))
            other = torch.randint_like(batch["target"], SMALL.vocab)
            batch["target"].copy_(other.where(torch.rand(other.shape, device="cuda") < seed / 4, -100))
        graph.replay()
        replayed = [x.clone() for x in captured]
        exact = evaluate(row.oracle, moved(batch, torch.float64), names)
        eager = dict(zip(("loss", *names), step(), strict=True))
        for name, ours in zip(("loss", *names), replayed, strict=True):
            bound = 1e-12 if dtype == torch.float64 else 2 * relative_error(eager[name].double(), exact[name]) + 1e-3
            assert relative_error(ours.double(), exact[name]) < bound, name
