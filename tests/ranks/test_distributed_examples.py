"""The distributed examples run unchanged; their losses and gradients are those of one process."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import runpy
import socket
import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from fresh_process import FreshProcesses
from ranks import no_gloo
from test_models_tensor_parallel import Watch

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.ordinary_memory, no_gloo]


def run(rank: int, world: str, port: str, folder: str, script: str, *arguments: str) -> None:
    """Run a script as torchrun would. Save its log, what it prints, and the sizes of all tensors that are gathered."""
    here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {**here, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [script, *arguments]
    with warnings.catch_warnings(), Watch() as watch, contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("error" if "zero3" not in script else "ignore")
        log = runpy.run_path(str(EXAMPLES / script), run_name="__main__")["log"]
    saved = {"log": log, "printed": printed.getvalue(), "gathers": watch.gathers}
    Path(folder, f"{rank}.json").write_text(json.dumps(saved))


def results(processes: FreshProcesses, folder: Path, world: int, script: str, *arguments: str) -> list[dict]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes.spawn(run, world, str(world), port, str(folder), script, *arguments)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def compare(processes: FreshProcesses, folder: Path, script: str, *cases: tuple[int, tuple[str, ...]]) -> list[dict]:
    """Compare ranks with one process: the loss and the gradient's norm of each step. Returns the results of rank 0."""
    (one,) = results(processes, folder, 1, script)
    losses = [loss for loss, _ in one["log"]]
    assert losses[-1] < losses[0] and losses[1] != losses[0]
    assert one["printed"].count("step ") == len(losses)
    first = []
    for world, arguments in cases:
        found = results(processes, folder, world, script, *arguments)
        assert [rank["printed"].count("step ") for rank in found] == [len(losses)] + [0] * (world - 1)
        for rank in found:
            for i, step in enumerate(one["log"]):
                assert rank["log"][i] == pytest.approx(step, rel=1e-4), (world, arguments, i)
        first.append(found[0])
    return first


@pytest.mark.slow
def test_fsdp2_dpo(tmp_path: Path, fresh_process: FreshProcesses) -> None:
    compare(fresh_process, tmp_path, "distributed_fsdp2_dpo.py", (2, ()))


@pytest.mark.slow
def test_cp_dpo(tmp_path: Path, fresh_process: FreshProcesses) -> None:
    compare(fresh_process, tmp_path, "distributed_cp_dpo.py", (2, ()))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "and-tied"])
def test_tp_sft(tmp_path: Path, fresh_process: FreshProcesses, tied: bool) -> None:
    (split,) = compare(fresh_process, tmp_path, "distributed_tp_sft.py", (2, ()))
    assert split["printed"].startswith("lm_head (259, 64), of which this rank has (130, 64)")
    assert 0 < max(split["gathers"]) < 130 * 64  # numbers for each token, and never rows of the head
    if not tied:
        return
    script = "distributed_tp_sft.py"
    (whole,), (one, _) = (results(fresh_process, tmp_path, world, script, "--tied") for world in (1, 2))
    assert one["log"] == [pytest.approx(step, rel=1e-4) for step in whole["log"]]
    assert one["log"][0] != pytest.approx(split["log"][0], rel=1e-4)
    assert 0 < max(one["gathers"]) < 130 * 64


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(4, ())], id="both"),  # two ranks of each kind
        pytest.param([(2, ()), (2, ("--tp", "1"))], id="one-kind", marks=pytest.mark.exhaustive),
    ],
)
def test_tp_dp_grpo(tmp_path: Path, fresh_process: FreshProcesses, cases: list[tuple[int, tuple[str, ...]]]) -> None:
    compare(fresh_process, tmp_path, "distributed_tp_dp_grpo.py", *cases)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="no DeepSpeed")
def test_zero3_orpo(tmp_path: Path, fresh_process: FreshProcesses) -> None:
    compare(fresh_process, tmp_path, "distributed_zero3_orpo.py", (2, ()))


def test_without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="needs DeepSpeed: pip install deepspeed"):
        runpy.run_path(str(EXAMPLES / "distributed_zero3_orpo.py"), run_name="__main__")


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match=r"torchrun --nproc-per-node 2 \S*distributed_fsdp2_dpo\.py"):
        runpy.run_path(str(EXAMPLES / "distributed_fsdp2_dpo.py"), run_name="__main__")


def test_they_are_short() -> None:
    for path in EXAMPLES.glob("distributed_*.py"):
        assert len(path.read_text().splitlines()) <= 120, path
