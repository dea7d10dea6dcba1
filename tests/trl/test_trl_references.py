"""Models beside the policy: references that are copies of a trained model, and teachers in mixed precision."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import tiny
from sampling import exhaustive
from torch import Tensor, nn
from trl_kinds import build

from liger_chunked import LigerFusedLinearDPOLoss, LigerFusedLinearKTOLoss

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
]

# TRL's defaults. Plain descent: Adam would turn rounding of a zero gradient into a step.
BF16 = {"bf16": True, "gradient_checkpointing": True, "optim": "sgd", "learning_rate": 0.05, "max_steps": 8}


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Chain:
    """A model that goes through trainers; each reference is a copy of it at that time."""

    def __init__(self, folder: Path, ours: bool) -> None:
        self.folder, self.ours, self.model = folder, ours, tiny.model()

    def sft(self, **config: Any) -> Chain:
        losses(build(self.folder, "SFT", self.ours, {**BF16, **config}, model=self.model))
        return self

    def aligned(self, kind: str, loss: Any = None) -> list[float]:
        loss = {"loss": loss} if self.ours else {}
        reference = copy.deepcopy(self.model)
        return losses(build(self.folder, kind, self.ours, BF16, model=self.model, ref_model=reference, **loss))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        exhaustive(("DPO", None), "DPO", False),
        exhaustive(("KTO", None), "KTO"),
        exhaustive(("DPO", LigerFusedLinearDPOLoss(beta=0.1)), "DPO-loss"),
        exhaustive(("KTO", LigerFusedLinearKTOLoss(beta=0.1)), "KTO-loss", False),
    ],
)
def test_a_copy_of_the_trained_model_is_the_reference(tmp_path, kind, loss):
    """The copy keeps its weights while the policy learns: losses leave their first value as in stock, in two rounds."""
    stock, ours = Chain(tmp_path, False).sft(), Chain(tmp_path, True).sft()
    first = math.log(2) if kind == "DPO" else 0.5
    for _ in range(2):
        expected, got = stock.aligned(kind), ours.aligned(kind, loss)
        # The policy is the reference, but for the last bits of bfloat16.
        assert got[0] == pytest.approx(first, rel=5e-3)
        assert abs(got[-1] - first) > 0.02 < abs(expected[-1] - first)
        assert got == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_a_copy_of_a_model_that_trl_trained(tmp_path, kind):
    """The head of TRL's own trainer stays bound to the original; the copy runs on its own weights all the same."""
    model = Chain(tmp_path, False).sft().model
    model.save_pretrained(tmp_path / "trained")
    loaded = type(model).from_pretrained(tmp_path / "trained")
    arguments = {"model": copy.deepcopy(model), "ref_model": loaded}
    expected = losses(build(tmp_path, kind, True, BF16, **arguments))
    got = losses(build(tmp_path, kind, True, BF16, model=model, ref_model=copy.deepcopy(model)))
    assert got == pytest.approx(expected, rel=1e-6) and abs(got[-1] - got[0]) > 0.02


class Dtypes:
    """Record the dtypes of hidden states inside a layer of a model, in order."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[torch.dtype] = []
        model.model.layers[1].mlp.gate_proj.register_forward_hook(self.note)

    def note(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.seen.append(output.dtype)


BESIDE: dict[str, Callable[[Any], nn.Module]] = {
    "GKD": lambda trainer: trainer.teacher_model,
    "GOLD": lambda trainer: trainer.teacher_model,
    "Distillation": lambda trainer: trainer.teacher_model,
    "OnlineDPO": lambda trainer: trainer.ref_model,
    "DPO": lambda trainer: trainer.ref_model,
}


@pytest.mark.few(1)
@pytest.mark.sampled
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", BESIDE)
def test_precision_of_the_model_beside_the_policy(tmp_path, kind, bf16):
    """TRL prepares some of these models before our head comes, and some after it."""
    seen, values = [], []
    config = {"bf16": bf16, "optim": "sgd", "learning_rate": 0.02, "max_steps": 2}
    for ours in (False, True):
        own = {"share_prefix": False} if ours and kind in ("DPO", "OnlineDPO") else {}
        torch.manual_seed(0)
        trainer = build(tmp_path, kind, ours, config, **own)
        beside, policy = Dtypes(BESIDE[kind](trainer)), Dtypes(trainer.model)
        values.append(losses(trainer))
        seen.append((beside.seen, policy.seen))
    assert set(seen[1][0]) == {torch.bfloat16 if bf16 else torch.float32}
    if kind != "Distillation":  # TRL runs the models of this trainer past accelerate's autocast
        assert seen[1] == seen[0]
    assert values[1] == pytest.approx(values[0], rel=0.02 if bf16 else 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GKD", "GOLD", "Distillation"])
def test_a_copy_of_the_student_is_the_teacher(tmp_path, kind):
    """Both share an autocast object, which the student enters inside of its teacher."""
    model = Chain(tmp_path, True).sft().model
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    trainer = build(tmp_path, kind, True, BF16, model=model, teacher_model=teacher)
    student = Dtypes(model)
    assert losses(trainer)[0] > 0.01
    assert not torch.is_autocast_enabled("cpu")
    assert set(student.seen) == {torch.bfloat16}
    expected = tiny.model()
    expected.load_state_dict(teacher.state_dict())
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(teacher.eval()(ids).logits, expected.eval()(ids).logits.float())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GKD", "GOLD"])
def test_a_teacher_with_another_precision(tmp_path, kind):
    """Its autocast is not the student's, which runs inside of it."""
    seen = []
    for ours in (False, True):
        teacher = tiny.model("wide", seed=1)
        teacher.forward = torch.autocast("cpu", torch.bfloat16)(teacher.forward)
        trainer = build(tmp_path, kind, ours, teacher_model=teacher)
        beside, policy = Dtypes(teacher), Dtypes(trainer.model)
        value = losses(trainer)
        seen.append((set(beside.seen), set(policy.seen), value))
    assert seen[0][:2] == seen[1][:2] == ({torch.bfloat16}, {torch.float32})
    assert seen[1][2] == pytest.approx(seen[0][2], rel=0.02)
