"""A first step compiles its kernels together, and later ones compile nothing."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import table
import torch
from sampling import on_paths
from table import ROWS, SMALL, Row
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    linear_token_stats,
)
from liger_chunked.cli.losses import LOSSES
from liger_chunked.engine import compile_ahead
from liger_chunked.kernels import backend, launch
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.tuning.generic import Launch
from liger_chunked.testing import Sizes, evaluate, random_batch


def variant(kernel: Kernel, tensors: Any, numbers: Any, num_warps: int, num_stages: Any, descriptors: Any) -> Any:
    """Return what Triton compiles a kernel for. A dtype stands for an aligned tensor."""
    parameters = inspect.signature(kernel.kernel.fn).parameters
    key: list[Any] = [kernel.kernel.fn.__name__, num_warps, num_stages]
    for x in tensors:
        key.append((x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else x and (x, True))
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


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Any]]:
    found: set[Any] = set()
    launch = Kernel._launch

    def watched(self: Kernel, grid: Any, *rest: Any) -> Any:
        found.add(variant(self, *rest))
        return launch(self, grid, *rest)

    monkeypatch.setattr(Kernel, "_launch", watched)
    yield found


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[set[Any]]:
    """What dry runs launch, for steps on the CPU too: the kernels that compile together."""
    found: list[set[Any]] = []
    together = compile_ahead.compiled_together

    @contextmanager
    def watched(device: torch.device) -> Iterator[None]:
        with together(device):
            yield
            collected = launch._collected.get()
            assert collected and collected[0]
            found.append({variant(kernel, *call[1:]) for kernel, call in collected[0]})

    monkeypatch.setattr(launch, "AsyncCompileMode", None)
    monkeypatch.setattr(compile_ahead, "compiled_together", watched)
    monkeypatch.setattr(compile_ahead, "_applies", lambda x: not x.is_meta)
    monkeypatch.setattr(compile_ahead, "_compiled", set())
    return found


# Before a step's chunks.
OF_THE_TARGET = {"_survey_kernel", "_counts_match_kernel", "_find_tokens_kernel"}


def batch_of(loss: Any, dtype: torch.dtype, whole: bool = False) -> dict[str, Any]:
    """Return a batch; without ignored tokens, chunks of targets are aligned."""
    batch = random_batch(loss, 0, Sizes(4, 16, 32, 64, 32))
    del batch["bias"]
    if whole:
        batch["target"] = batch["target"].clamp(min=0)

    def cast(key: str, x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            return x
        return x.to(dtype if key in ("weight", "input") else torch.float32)

    return {key: cast(key, x) for key, x in batch.items()}


@pytest.mark.sampled
@pytest.mark.triton
@pytest.mark.skipif(not backend.INTERPRETED, reason="records launches: runs with TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", ["cross-entropy", "dpo", "grpo"])
@pytest.mark.parametrize("budget", [None, 32 * 64 * 2], ids=["one-chunk", "several"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_dry_run_launches_what_a_step_does(
    name: str, budget: int | None, dtype: torch.dtype, launched: set[Any], ahead: list[set[Any]]
) -> None:
    loss: Any = type(LOSSES[name]())(logits_budget=budget)
    evaluate(loss, batch_of(loss, dtype, whole=budget is not None))
    assert {key for key in launched if key[0] not in OF_THE_TARGET} == set().union(*ahead)


@pytest.mark.triton
@pytest.mark.skipif(not backend.INTERPRETED, reason="records launches: runs with TRITON_INTERPRET=1")
@pytest.mark.parametrize("block", [4096, 16], ids=["one-block", "blocks"])
@pytest.mark.parametrize("budget", [None, 32 * 64 * 2], ids=["one-chunk", "several"])
def test_a_first_step_compiles_what_later_ones_launch(
    budget: int | None, block: int, monkeypatch: pytest.MonkeyPatch, launched: set[Any], ahead: list[set[Any]]
) -> None:
    """With ignored tokens. Kernels that a step launches before its dry run, it postpones, as on a GPU."""
    survey = importlib.import_module("liger_chunked.kernels.survey")
    tuning = survey.TUNING[torch.device("cpu")]._replace(survey=Launch(block, 4))
    monkeypatch.setattr(survey, "TUNING", {torch.device("cpu"): tuning})
    postponed: dict[Kernel, Any] = {}

    def postpone(self: Kernel, grid: Any, *call: Any) -> bool:
        is_new = self not in postponed
        if is_new:
            postponed[self] = variant(self, *call, None, ())
        return is_new

    monkeypatch.setattr(Kernel, "postpone", postpone)
    loss = LigerFusedLinearCrossEntropyLoss(logits_budget=budget)
    batch = batch_of(loss, torch.float32)
    for step in range(3):
        batch["target"][0, :2] = -100
        evaluate(loss, batch)
        if step == 0:
            compiled = set().union(*ahead, postponed.values())
    assert len(ahead) == 1
    assert launched <= compiled, {key[0] for key in launched - compiled}


@pytest.mark.triton
@pytest.mark.skipif(not backend.INTERPRETED, reason="records launches: runs with TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_a_dry_run_with_the_fused_epilogue(
    name: str, by_epilogue: None, monkeypatch: pytest.MonkeyPatch, launched: set[Any], ahead: list[set[Any]]
) -> None:
    monkeypatch.setattr("liger_chunked.engine.epilogue.SMALLEST", 0)
    loss: Any = type(LOSSES[name]())(logits_budget=32 * 64 * 2)  # several chunks
    evaluate(loss, batch_of(loss, torch.bfloat16, whole=True))
    ours = {key for key in launched if key[0] not in OF_THE_TARGET}
    assert "_project_kernel" in {key[0] for key in ours}
    assert ours == set().union(*ahead)


@pytest.mark.triton
@pytest.mark.skipif(not backend.INTERPRETED, reason="records launches: runs with TRITON_INTERPRET=1")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_a_dry_run_of_statistics(
    fused: bool, trains: bool, by_epilogue: None, monkeypatch: pytest.MonkeyPatch, launched: set[Any], ahead: Any
) -> None:
    if fused:
        monkeypatch.setattr("liger_chunked.engine.epilogue.SMALLEST", 0)
        monkeypatch.setattr("liger_chunked.engine.epilogue.FEWEST_TILES", 1)
        monkeypatch.setattr("liger_chunked.engine.epilogue.FEWEST_TILES_OF_ENTROPY", 1)
    batch = batch_of(LigerFusedLinearCrossEntropyLoss(), torch.bfloat16)
    weight = batch["weight"].requires_grad_(trains)
    found = linear_token_stats(weight, batch["input"], batch["target"], outputs=("logps", "entropy"))
    if trains:
        assert found.logps is not None
        found.logps.sum().backward()
    ours = {key for key in launched if key[0] not in OF_THE_TARGET}
    assert ("_project_kernel" in {key[0] for key in ours}) == fused
    assert ours == set().union(*ahead)


def test_an_error_of_a_dry_run_is_not_one_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "_applies", lambda x: not x.is_meta)
    monkeypatch.setattr(compile_ahead, "_compiled", set())
    asked: list[torch.device] = []

    def refuse(device: torch.device) -> Any:
        asked.append(device)
        raise RuntimeError("no threads")

    monkeypatch.setattr(compile_ahead, "compiled_together", refuse)
    loss = LigerFusedLinearCrossEntropyLoss()
    with pytest.warns(RuntimeWarning, match=r"compile one after another: RuntimeError\('no threads'\)") as warned:
        for _ in range(2):
            evaluate(loss, batch_of(loss, torch.float32))
    assert asked == [torch.device("cpu")] and len(warned) == 1  # once for each kind

    # A step without a dry run leaves it to a later one of the same kind.
    given = batch_of(loss, torch.bfloat16)
    linear_token_stats(**given, top_k=5)
    assert len(asked) == 1
    with pytest.warns(RuntimeWarning, match="no threads"):
        linear_token_stats(**given)
    assert len(asked) == 2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("row", on_paths(row for row in ROWS if not row.kept))
def test_a_dry_run_of_every_loss(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "AsyncCompileMode", None)
    monkeypatch.setattr(compile_ahead, "_applies", lambda x: not x.is_meta)
    monkeypatch.setattr(compile_ahead, "_compiled", set())
    batch = row.sample(SMALL, 0)
    table.evaluate(row.ours, batch)  # an error of the dry run is a warning
    with_teacher = any(name.startswith("teacher") for name in batch)
    assert compile_ahead._compiled or with_teacher


@pytest.mark.parametrize("budget", [None, 32 * 64 * 4], ids=["one-chunk", "several"])
def test_a_dry_run_computes_no_products(budget: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "AsyncCompileMode", None)
    monkeypatch.setattr(compile_ahead, "_applies", lambda x: True)
    monkeypatch.setattr(compile_ahead, "_compiled", set())
    loss = LigerFusedLinearCrossEntropyLoss(logits_budget=budget)
    given = batch_of(loss, torch.float32)
    flops = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            evaluate(loss, given)
        flops.append(counter.get_total_flops())
        assert compile_ahead._compiled
    assert flops[0] == flops[1] > 0


TOGETHER = """
import sys, torch, triton
from liger_chunked.cli.bench import _batch
from liger_chunked.cli.losses import LOSSES
from liger_chunked.testing import Sizes, evaluate

ahead, late = [], []
def record(**call):
    (ahead if call["is_manual_warmup"] else late).append(call["repr"])
triton.knobs.runtime.jit_cache_hook = record
name, length, reference = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
loss = LOSSES[name]()
batch = _batch(loss, Sizes(8, length, 2048, 151936, 2048), "cuda", torch.bfloat16)
if reference:
    del batch["ref_logps"]
    batch |= {f"ref_{key}": batch[key].detach() for key in ("weight", "input")}

def step(ignored):
    target = batch["target"].clone()
    target[-1, length - ignored:] = -100  # later chunks start at the same tokens
    evaluate(loss, batch | {"target": target})

slow = {"sympy", "torch._dynamo"} - set(sys.modules)
step(16)
assert not slow & set(sys.modules)
print(f"{len(ahead)} variants ahead, {len(late)} late: {late}")
assert ahead and not late, late
ahead.clear(), late.clear()
step(32)
step(33)
assert not ahead and not late, (ahead, late)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif(launch.AsyncCompileMode is None, reason="Triton compiles in no threads")
@pytest.mark.parametrize("length", [256, 2048], ids=["one-chunk", "several"])
@pytest.mark.parametrize(
    ("name", "reference"), [("cross-entropy", False), ("dpo", False), ("dpo", True), ("grpo", False), ("grpo", True)]
)
def test_a_first_step_compiles_at_once(name: str, reference: bool, length: int, fresh_process: Any) -> None:
    """A step compiles no kernel by itself, and one of an odd number of tokens nothing."""
    fresh_process.run(TOGETHER, name, str(length), str(reference))


STEP = """
import sys
import torch
from liger_chunked import LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss
from liger_chunked.testing import Sizes, evaluate, random_batch

# Since torch 2.15, the first backward of a process imports torch.nested: milliseconds, and eager code pays them too.
torch.autograd.grad((x := torch.ones((), requires_grad=True)) * 1, x)
assert "sympy" not in sys.modules
sizes = Sizes(4, 8, 16, 64, 16)
for loss in (LigerFusedLinearDPOLoss(), LigerFusedLinearGRPOLoss()):
    batch = random_batch(loss, 0, sizes)
    before = set(sys.modules)
    evaluate(loss, batch)
    imported = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert imported <= {"liger_chunked"}, imported
"""


def test_a_step_imports_nothing(fresh_process: Any) -> None:
    """Autograd imports sympy for a given upstream gradient: seconds, if its bytecode is not cached."""
    fresh_process.run(STEP)
