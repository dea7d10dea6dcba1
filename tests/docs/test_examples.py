"""The examples without TRL run unchanged and agree with stock code."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer

from liger_chunked.deferred import fused

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import toy

    return toy


@pytest.fixture
def run(toy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a script with arguments, and return its globals."""

    def run(script: str, *arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        return runpy.run_path(str(EXAMPLES / script), run_name="__main__")

    return run


@pytest.fixture
def head_outputs(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Collect the shape of what each head computes: () for a loss in place of logits."""
    shapes: list[torch.Size] = []
    run, run_live, linear = fused.Pass._run, fused.run_live, F.linear

    def in_a_pass(self: fused.Pass, wants_grad: bool) -> Any:
        shapes.append(torch.Size())
        return run(self, wants_grad)

    def in_place(*args: Any) -> Any:
        shapes.append(torch.Size())
        return run_live(*args)

    def multiplied(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.ndim == 3 and weight.shape[0] >= 259:  # of the bytes, and no other layer of a toy model
            shapes.append(torch.Size((*x.shape[:-1], weight.shape[0])))
        return linear(x, weight, bias)

    monkeypatch.setattr(fused.Pass, "_run", in_a_pass)
    monkeypatch.setattr(fused, "run_live", in_place)
    monkeypatch.setattr(F, "linear", multiplied)
    return shapes


def curves(trainer: Trainer) -> dict[str, list[float]]:
    names = ("loss", "grad_norm", "eval_loss")
    return {name: [float(entry[name]) for entry in trainer.state.log_history if name in entry] for name in names}


def z_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    logits, target = outputs.logits[:, :-1], labels[:, 1:]
    nll = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    return (nll + 1e-4 * (logits.logsumexp(-1)[target != -100] ** 2).sum()) / num_items_in_batch


@pytest.mark.few(1)
@pytest.mark.parametrize(("flags", "loss"), [((), None), (("--own-loss",), z_loss)], ids=["patched", "own loss"])
def test_hf_trainer(flags, loss, run, toy, head_outputs):
    example = run("hf_trainer.py", "--steps", "3", *flags)
    assert head_outputs
    assert set(head_outputs) == {torch.Size()}  # in evaluation too
    stock = Trainer(toy.tiny_model(), compute_loss_func=loss, **example["shared"])
    stock.train()
    ours, theirs = curves(example["trainer"]), curves(stock)
    assert [len(curve) for curve in ours.values()] == [3, 3, 3]
    for name, curve in theirs.items():
        assert ours[name] == pytest.approx(curve, rel=1e-5), name


def test_plain_loop(run, toy, head_outputs):
    inside = run("plain_loop.py", "--steps", "3")["losses"]
    assert set(head_outputs) == {torch.Size()}
    outside = run("plain_loop.py", "--steps", "3", "--outside")["losses"]
    assert inside == pytest.approx(outside, rel=1e-6)
    tokenizer = toy.byte_tokenizer()
    batch = toy.collate(toy.encode(tokenizer, row["prompt"], row["chosen"]) for row in toy.sums(8))
    assert inside[0] == pytest.approx(toy.tiny_model()(**batch).loss.item(), rel=1e-6)
    assert inside[-1] < inside[0]


@pytest.mark.ordinary_memory
@pytest.mark.filterwarnings("ignore::Warning")
def test_lightning(run, toy, head_outputs, monkeypatch):
    pytest.importorskip("pytorch_lightning")
    example = run("lightning_module.py", "--steps", "20")
    assert example["trainer"].global_step == 20
    assert example["trainer"].callback_metrics["loss"] < 0.6931  # log 2, the initial value
    assert all(len(shape) < 3 for shape in head_outputs)

    module, batch = example["module"], example["pairs"](toy.sums(4))
    monkeypatch.setattr(module, "log_dict", lambda *args, **kwargs: None)

    def logps(model: Any) -> torch.Tensor:
        logits = model(**{**batch, "labels": None}).logits[:, :-1]
        nll = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none")
        return -nll.view(len(logits), -1).sum(-1)

    chosen, rejected = (logps(module.model) - logps(module.reference)).chunk(2)
    expected = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
    assert module.training_step(batch, 0).item() == pytest.approx(expected.item(), rel=1e-5)
