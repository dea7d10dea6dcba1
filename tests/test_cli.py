"""The commands, called as from a terminal."""

from __future__ import annotations

import subprocess
import sys

import pytest

from liger_chunked import (
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    __version__,
    cli,
    estimate_memory,
)
from liger_chunked.kernels.backend import INTERPRETED

SIZES = ["--vocab-size", "32000", "--hidden-size", "512", "--shape", "4", "256"]


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(arguments)
    return capsys.readouterr().err


def test_env(capsys):
    lines = dict(line.split(maxsplit=1) for line in out(capsys, "env").splitlines())
    assert lines["liger_chunked"] == __version__
    if lines["device"] == "cpu":
        assert lines["kernels"] == ("Triton" if INTERPRETED else "torch")
    assert {"torch", "triton", "transformers", "trl"} <= lines.keys()


def test_env_shows_which_gpus_run_the_fused_epilogue(fresh_process):
    code = """
import os, sys
os.environ["LIGER_CHUNKED_WIDE_TILES"] = sys.argv[1]
from liger_chunked.cli import main
assert main(["env"]) == 0
"""
    for setting, shown in (("9,10", "9, 10"), ("", "none")):
        printed = fresh_process.run(code, setting)
        assert dict(line.split(maxsplit=1) for line in printed.splitlines())["wide_tiles"] == shown


def test_memory(capsys):
    sizes = {"vocab_size": 32000, "hidden_size": 512, "shape": (4, 256)}
    loss = LigerFusedLinearJSDLoss(logits_budget=32 << 20)
    estimate = estimate_memory(loss, **sizes, valid=700, teacher_hidden_size=768, trainable_head=False)
    settings = ["--valid", "700", "--teacher-hidden-size", "768", "--frozen-head", "--logits-budget", "32MiB"]
    assert out(capsys, "memory", "jsd", *SIZES, *settings) == f"{estimate}\n"


def test_a_budget_is_bytes_or_has_a_unit(capsys):
    settings = ["memory", "dpo", *SIZES, "--logits-budget"]
    printed = {
        out(capsys, *settings, budget) for budget in ("33554432", "32MiB", "32 mib", "33554432.0", "33554.432kB")
    }
    estimate = estimate_memory(
        LigerFusedLinearDPOLoss(), vocab_size=32000, hidden_size=512, shape=(4, 256), logits_budget=32 << 20
    )
    assert printed == {f"{estimate}\n"}
    assert "a number of bytes, or one with a unit" in refusal(capsys, *settings, "32 apples")


def test_a_budget_that_is_meant_as_mib_is_refused_at_once(capsys):
    message = refusal(capsys, "memory", "cross-entropy", *SIZES, "--logits-budget", "256")
    assert "logits_budget=256 bytes cuts this step into about 256000 pieces" in message and "'256MiB'" in message


def test_memory_of_a_gpu_that_is_not_here(capsys):
    # Large enough for Hopper's separate code path.
    sizes = {"vocab_size": 151936, "hidden_size": 896, "shape": (4, 512), "trainable_head": False}
    given = "--vocab-size 151936 --hidden-size 896 --shape 4 512 --frozen-head".split()
    printed = [out(capsys, "memory", "grpo", *given, "--capability", *c) for c in ("80", "90")]
    expected = [estimate_memory(LigerFusedLinearGRPOLoss(), **sizes, capability=c) for c in ((8, 0), (9, 0))]
    assert printed == [f"{estimate}\n" for estimate in expected] and printed[0] != printed[1]


@pytest.mark.parametrize("loss", cli.LOSSES)
def test_memory_of_every_loss(loss, capsys):
    teacher = ["--teacher-hidden-size", "768"] if loss in ("kl", "jsd", "tvd", "cosine") else []
    assert " MiB: logits " in out(capsys, "memory", loss, *SIZES, *teacher)


def test_memory_refuses_what_makes_no_batch(capsys):
    assert "takes no reference, got ref_hidden_size=8" in refusal(
        capsys, "memory", "cross-entropy", *SIZES, "--ref-hidden-size", "8"
    )


def test_bench_runs_what_the_repository_has(capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(subprocess, "call", lambda command, cwd: ran.append((command, cwd)) or 3)
    assert cli.main(["bench", "cross_entropy", "--only", "ours", "128:32:1024"]) == 3
    command = [sys.executable, "-m", "benchmarks.cross_entropy", "--only", "ours", "128:32:1024"]
    assert ran == [(command, cli.REPOSITORY)]
    for name in ("nothing", "harness"):
        refused = refusal(capsys, "bench", name)
        assert f"no benchmark '{name}'" in refused and "'policy'" in refused and "'harness', " not in refused


def test_bench_without_the_repository(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "REPOSITORY", tmp_path)
    assert "expected a clone of the repository" in refusal(capsys, "bench", "policy")


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "liger_chunked", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"{__version__}\n"
