"""The commands, called as from a terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

import liger_chunked
from liger_chunked import (
    LigerFusedLinearJSDLoss,
    __version__,
    cli,
    estimate_memory,
    kernels,
    layers,
)
from liger_chunked.cli import app, bench, check, memory, step
from liger_chunked.cli.losses import LOSSES
from liger_chunked.kernels.backend import INTERPRETED

SIZES = ["--vocab-size", "32000", "--hidden-size", "512", "--shape", "4x256"]


def out(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert cli.main(arguments) == status
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def table(text: str) -> dict[str, list[str]]:
    """Return the cells of each row, by its first cell."""
    rows = [re.split(r"[│┃]", line)[1:-1] for line in text.splitlines() if line.startswith(("│", "┃"))]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in rows}


def mib(estimate: Any) -> list[str]:
    parts = (estimate.peak, estimate.logits, estimate.weight_grad, estimate.input_grad, estimate.hidden, estimate.other)
    return [f"{n / 2**20:.0f}" for n in parts]


def test_env(capsys):
    lines = dict(line.split(maxsplit=1) for line in out(capsys, "env").splitlines())
    assert lines["liger_chunked"] == __version__
    if lines["device"] == "cpu":
        assert lines["kernels"] == ("Triton" if INTERPRETED else "torch")
    assert {"torch", "triton", "transformers", "trl"} <= lines.keys()


def test_memory(capsys):
    sizes = {"vocab_size": 32000, "hidden_size": 512, "shape": (4, 256)}
    loss = LigerFusedLinearJSDLoss(logits_budget=32 << 20)
    estimate = estimate_memory(loss, **sizes, valid=700, trainable_head=False)
    settings = ["--valid", "700", "--frozen-head", "--logits-budget", "32MiB"]
    printed = table(out(capsys, "memory", "jsd", *SIZES, *settings))
    assert printed[""] == ["peak", "logits", "weight_grad", "input_grad", "hidden", "other"]
    assert printed["fused"] == mib(estimate)


@pytest.mark.few(4, "kto")
@pytest.mark.parametrize("loss", LOSSES)
def test_memory_of_every_loss(loss, capsys):
    assert int(table(out(capsys, "memory", loss, *SIZES))["fused"][0]) > 0


@pytest.mark.parametrize("loss", ["dpo", "grpo"])
def test_largest_batch(loss):
    case = memory.Case(loss, (2, 64), {"vocab_size": 4000, "hidden_size": 64, "dtype": torch.bfloat16})
    free = 40 << 20
    n = memory.largest(case, free)

    def peak(n: int) -> int:
        return memory.Case(loss, (n, 64), case.settings).estimate().peak

    step = 2 if loss == "dpo" else 1
    assert n > 0 and n % step == 0 and peak(n) <= free < peak(n + step)


def test_memory_says_what_it_assumes_and_whether_it_fits(capsys):
    printed = out(capsys, "memory", "dpo", *SIZES, "--free", "2GiB")
    assert "Assumed: weight and hidden states in bfloat16, gradients of head and input, a target at each token, " in (
        " ".join(printed.split())
    )
    assert re.fullmatch(r"fits: [\d.]+ MiB of 2.0 GiB", printed.splitlines()[-1])
    assert re.fullmatch(
        r"does not fit: [\d.]+ MiB of 1.0 MiB",
        out(capsys, "memory", "dpo", *SIZES, "--free", "1MiB").splitlines()[-1],
    )
    settings = ["--valid", "700", "--frozen-head", "--autocast", "float16", "--dtype", "float32"]
    printed = " ".join(out(capsys, "memory", "jsd", *SIZES, "--logits-budget", "32MiB", *settings).split())
    assert "in float32, float16 autocast, gradients of input, 700 targets, logits_budget 32MiB." in printed


def test_what_fits(capsys):
    printed = out(capsys, "memory", "dpo", *SIZES, "--free", "512MiB")
    fits = table(printed[printed.index("What fits") :])
    assert fits[""] == ["sequences of 256"] and int(fits["fused"][0]) > 0
    assert "What fits in 512.0 MiB" in printed and "or more" not in printed
    assert "What fits in 30.0 MiB" in out(capsys, "memory", "dpo", *SIZES, "--free", "30MiB")
    small = ["--vocab-size", "64", "--hidden-size", "8", "--shape", "2x65536"]
    printed = out(capsys, "memory", "dpo", *small, "--free", "9GB")
    assert "8 or more" in printed and "or more: the search ends at a batch of 524288 tokens" in printed
    assert "leave out --valid" in refusal_after_table(capsys, "memory", "dpo", *SIZES, "--valid", "9", "--free", "1GiB")


def refusal_after_table(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 2
    return capsys.readouterr().err


def test_sizes_of_a_model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": {"vocab_size": 99, "hidden_size": 8}, "hidden_size": 3}))
    expected = {"vocab_size": 99, "hidden_size": 8}
    assert memory.model_sizes(str(path), None, None) == memory.model_sizes(str(tmp_path), None, None) == expected
    assert memory.model_sizes(str(path), 101, None) == {"vocab_size": 101, "hidden_size": 8}
    path.write_text(json.dumps({"n_embd": 4}))
    with pytest.raises(ValueError, match="--vocab-size is missing: pass it, or --model"):
        memory.model_sizes(str(path), None, None)
    with pytest.raises(ValueError, match="--hidden-size is missing"):
        memory.model_sizes(None, 7, None)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "8x"], r"--shape must be like 8x2048, 16384 or, for losses of pairs, 4x2x2048, got '8x'"),
        (["--shape", "8x2", "--valid", "a"], r"--valid must be like 700 or 512,300, got 'a'"),
        (["--shape", "8x2", "--free", "20"], r"--free must be at least 1MiB, got 20 bytes"),
        ([], r"Missing option '--shape'"),
    ],
)
def test_memory_refuses(capsys, arguments, message):
    sizes = ["--vocab-size", "32", "--hidden-size", "8"]
    assert message in refusal(capsys, "memory", "cross-entropy", *sizes, *arguments)


LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (path := tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(path)


def test_a_whole_step_ends_in_whether_it_fits(capsys, llama):
    """TRL's default, float32, takes twice what bfloat16 weights take; an adapter leaves out reference and states."""
    step = ("step", "dpo", "--model", llama, "--shape", "2x2x1024", "--gpu")
    arguments = (*step, "80GiB")
    printed = out(capsys, *arguments, status=1)
    assert "8.03 billion parameters" in printed and "its two states in float32, bfloat16 autocast" in printed
    row = dict(zip(table(printed)[""], map(float, table(printed)["step"]), strict=True))
    assert row["weights"] == row["reference"] == row["gradients"] == 29.9 and row["optimizer"] == 59.8
    assert printed.splitlines()[-1] == f"does not fit: {row['total']} of 80.0 GiB" and 149 < row["total"] < 155
    half = out(capsys, *arguments, "--dtype", "bfloat16").splitlines()[-1]
    assert (found := re.fullmatch(r"fits: ([\d.]+) of 80.0 GiB", half)) and 74.5 < float(found[1]) < 78
    half = out(capsys, *step, "79GiB", "--dtype", "bfloat16").splitlines()[-1]
    assert half == f"fits, but tightly: {found[1]} of 79.0 GiB, less than 3 GiB is left for what is not counted"
    given = table(out(capsys, *arguments, "--dtype", "bfloat16", "--ref-logps"))["step"]
    assert given[2] == "0.0" and float(given[0]) == pytest.approx(float(found[1]) - 14.96, abs=0.1)
    lora = out(capsys, *arguments, "--dtype", "bfloat16", "--lora-rank", "16")
    assert table(lora)["step"][2] == "0.0" and "LoRA of rank 16 on all linear layers" in lora


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mixtral", "Qwen3Moe"])
def test_a_step_counts_the_parameters_of_its_model(name):
    """Norms of heads, routers and biases are not counted: less than half a percent."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")()
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    expected = sum(p.numel() for p in model.parameters())
    found = step.Sizes.of(config.to_dict())
    assert found.parameters == pytest.approx(expected, rel=5e-3)
    linear = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    if "Mo" not in name and name != "Mixtral":
        assert found.lora == sum(m.in_features + m.out_features for m in linear)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jsd", "--gpu", "80GiB"], "the formula counts no teacher: expected a loss without one, got jsd"),
        (["dpo", "--gpu", "80"], "--gpu must be at least 1MiB, got 80 bytes: add a unit, as in 20GiB"),
        (["dpo", "--gpu", "80GiB", "--model", "GPT2LMHeadModel"], "--model has no hidden_size, .* gated MLPs"),
    ],
)
def test_step_refuses(capsys, llama, arguments, message):
    pytest.importorskip("transformers")
    assert cli.main(["step", "--model", llama, "--shape", "2x2x64", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_bench(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "_SECONDS", 0)
    monkeypatch.setattr(bench, "default_sizes", lambda: {"shape": (2, 8), "vocab_size": 97, "hidden_size": 16})
    figure = tmp_path / "bench.svg"
    printed = out(capsys, "bench", "--figure", str(figure))
    rows = [line for line in printed.splitlines() if line.startswith("│")]
    assert len(rows) == 3 * 4 and figure.read_text().lstrip().startswith("<?xml")
    printed = out(capsys, "bench", *(name for name in LOSSES if name != "token-stats"), "--shape", "4x4")
    assert len([line for line in printed.splitlines() if line.startswith("│")]) == 3 * (len(LOSSES) - 1)
    assert "--shape must have sequences and a length" in refusal(capsys, "bench", "dpo", "--shape", "64")


@pytest.mark.parametrize(
    ("path", "missing", "message"),
    [
        ("bench.svg", True, "--figure needs matplotlib: pip install matplotlib"),
        ("bench.jpeg", False, "--figure must end in one of .svg, .png, .pdf, got"),
        ("none/bench.svg", False, "--figure: there is no folder"),
    ],
)
def test_bench_refuses_a_figure_before_it_measures(capsys, monkeypatch, tmp_path, path, missing, message):
    monkeypatch.setattr(bench, "measure", lambda case: pytest.fail("measured"))
    monkeypatch.setattr(bench, "find_spec", lambda name: None if missing else object())
    assert message in refusal(capsys, "bench", "dpo", "--figure", str(tmp_path / path))


def test_check(capsys, monkeypatch):
    totals = []
    monkeypatch.setattr(check.tables, "counted", lambda rows, total, *_: totals.append(total) or list(rows))
    printed = out(capsys, "check")
    n = 2 * (len(check._KERNELS) + len(LOSSES) - 1)
    assert printed.endswith(f"{n} of {n} are right\n")
    assert totals == [n]
    rows = [re.split("│", line)[1:-1] for line in printed.splitlines() if line.startswith("│")]
    dtype, part, error, eager, allowed = (cell.strip() for cell in rows[-1][1:6])
    assert dtype == "bfloat16" and (part in check._VALUES or part.startswith("gradient: "))
    assert float(error) <= float(allowed) and float(allowed) > float(eager)
    for word in ("worst part: ", "eager: ", "allowed: 1.1 times"):
        assert word in printed


def test_check_runs_every_kernel():
    functions = {name for name in kernels.__all__ + layers.__all__ if name.startswith("liger_")}
    assert functions == check._KERNELS.keys()


def test_check_finds_a_wrong_kernel(capsys, monkeypatch):
    right = liger_chunked.liger_swiglu
    monkeypatch.setattr(liger_chunked, "liger_swiglu", lambda x: right(x) * 1.05, raising=False)
    assert cli.main(["check"]) == 1
    assert len(re.findall("swiglu.*WRONG", capsys.readouterr().out)) == 2


def test_check_finds_a_wrong_gradient_and_nan():
    exact = {"loss": torch.ones(2), "weight": torch.ones(3)}
    wrong = {"loss": torch.ones(2), "weight": torch.tensor([1.0, 1.0, 1.2])}
    nan = {"loss": torch.full((2,), float("nan")), "weight": torch.ones(3)}
    passed = [check._compared("x", torch.bfloat16, found, exact, exact).passed for found in (exact, wrong, nan)]
    assert passed == [True, False, False]


@pytest.mark.slow
def test_without_the_extra(fresh_process):
    code = """
import sys
sys.modules["typer"] = None
from liger_chunked.cli import main
assert main(["env"]) == 2
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0 and done.stderr == "liger-chunked needs: pip install 'liger_chunked[cli]'\n"


def test_losses_have_every_class():
    classes = {name for name in liger_chunked.__all__ if re.fullmatch(r"LigerFusedLinear\w+Loss", name)}
    named = {type(make()).__name__ for name, make in LOSSES.items() if name != "token-stats"}
    unnamed = {"LigerFusedLinearOnPolicyDistillationLoss"}  # takes a batch of another form
    assert named == classes - unnamed, "add a loss to cli/losses.py"
    assert [loss.value for loss in app.Loss] == list(LOSSES)


def test_pairs_have_three_sizes(capsys):
    settings = ["--vocab-size", "32000", "--hidden-size", "512"]
    pairs, sequences = (table(out(capsys, "memory", "dpo", *settings, "--shape", s)) for s in ("2x2x256", "4x256"))
    assert pairs == sequences
    for loss, shape in (("grpo", "2x2x256"), ("dpo", "2x3x256")):
        message = refusal(capsys, "memory", loss, *settings, "--shape", shape)
        assert f"with three sizes is pairs x 2 x length, for dpo, orpo, cpo, simpo, got '{shape}'" in message


def test_a_file_of_data_that_is_absent() -> None:
    """It is no name of a data set, for which the hub would be asked."""
    pytest.importorskip("datasets")
    from liger_chunked.cli import score

    with pytest.raises(ValueError, match=r"there is no file absent\.jsonl"):
        score.load_data("absent.jsonl", "train")
