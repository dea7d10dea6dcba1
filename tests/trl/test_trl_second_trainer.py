"""A model that had a trainer before: the settings of the newest trainer hold, whoever wrote either."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import tiny
import torch
from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head
from trl_kinds import PATCHED, assert_same, build, log_of, run, set_head, state_of

from liger_chunked.integrations.transformers import apply_liger_kernel, revert_liger_kernel

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
]

# Another temperature, more outputs and another precision than those of other trainers.
GRPO = {"temperature": 0.7, "cast_lm_head_to_fp32": True, "entropy_coef": 0.01}
SHORT = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.02}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def fresh(weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    model = tiny.model()
    model.load_state_dict(weights)
    return model


# Each of these trainers after each other one: log-probabilities of one model or of two, rollouts, and logits.
CHAIN = "SFT DPO SFT GRPO SFT ORPO DPO GRPO DPO ORPO GRPO ORPO SFT".split()
ALL_OURS, OURS_FIRST, STOCK_FIRST = ([whose[i % 2] for i in range(len(CHAIN))] for whose in ((1, 1), (1, 0), (0, 1)))


@pytest.mark.parametrize("whose", [ALL_OURS, OURS_FIRST, STOCK_FIRST], ids=["ours", "ours-first", "stock-first"])
def test_trainers_in_a_chain(tmp_path: Path, whose: list[int]) -> None:
    """Each trains as TRL's does on a model with these weights that had no trainer, and ours leave what they found."""
    model = tiny.model()
    for name, is_ours in zip(CHAIN, whose, strict=True):
        config = {**SHORT, **(GRPO if name == "GRPO" else {})}
        expected = run(tmp_path, name, False, config, model=fresh(weights_of(model)))
        before = state_of(model)
        log = run(tmp_path, name, is_ours and PATCHED, config, model=model)
        assert_same(log, expected, entries=3)
        assert not is_ours or state_of(model) == before, name


WHOSE = (True, False), (False, True), (True, True)


@pytest.mark.parametrize(("first", "second"), WHOSE)
@pytest.mark.parametrize("way", ["merged", "deleted"])
def test_after_an_adapter(tmp_path: Path, way: str, first: bool, second: bool) -> None:
    model = tiny.model()
    trainer = build(tmp_path, "SFT", first, SHORT, model=model, peft_config=LoraConfig(target_modules=["q_proj"]))
    trainer.train()
    if way == "merged":
        base = trainer.model.merge_and_unload()
    else:
        trainer.model.delete_adapter("default")
        base = trainer.model.unload()
    assert base is model
    base.requires_grad_(True)  # PEFT had frozen it
    config = {**SHORT, **GRPO}
    expected = run(tmp_path, "GRPO", False, config, model=fresh(weights_of(base)))
    assert_same(run(tmp_path, "GRPO", second, config, model=base), expected, entries=3)


@pytest.mark.parametrize("first", [PATCHED, False])
@pytest.mark.parametrize("second", [PATCHED, False])
def test_two_trainers_in_turns(tmp_path: Path, first: bool | str, second: bool | str) -> None:
    """Both are made before either trains. Each runs with its own settings, whose ever head was set last."""
    if not first and not second:
        pytest.skip("TRL's own trainers leave each other's heads")
    model, config = tiny.model(), {**SHORT, **GRPO}
    made = [build(tmp_path, "SFT", first, SHORT, model=model), build(tmp_path, "GRPO", second, config, model=model)]
    for trainer in reversed(made):
        trainer.train()
    alone = tiny.model()
    expected = run(tmp_path, "GRPO", second, config, model=alone)
    assert_same(log_of(made[1]), expected, entries=3)
    assert_same(log_of(made[0]), run(tmp_path, "SFT", first, SHORT, model=fresh(weights_of(alone))), entries=3)


@pytest.mark.parametrize("first_is_ours", [True, False])
@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_precision_of_the_second_trainer(tmp_path: Path, first: bool, second: bool, first_is_ours: bool) -> None:
    """accelerate prepares a model once: neither the first trainer's autocast nor its absence outlives the trainer."""
    model = tiny.model()
    run(tmp_path, "SFT", first_is_ours, {**SHORT, "bf16": first}, model=model)
    config = {**SHORT, **GRPO, "bf16": second}
    expected = run(tmp_path, "GRPO", True, config, model=fresh(weights_of(model)))
    assert run(tmp_path, "GRPO", True, config, model=model) == expected
    # As the second trainer found it: TRL's own trainers leave their head, and accelerate's autocast.
    assert ("forward" in vars(model)) != first_is_ours


def outputs(model: nn.Module) -> Any:
    ids = torch.arange(4, 12)[None]
    return model(ids, labels=ids, fused_lm_head=True)


def test_the_newest_head_computes(tmp_path: Path) -> None:
    """Heads in any order, without trainers, and what is left after them."""
    model = tiny.model()
    stock = type(model)
    set_head(model, temperature=0.5)
    add_fused_lm_head(model, temperature=2.0, outputs=("log_probs", "entropy"))
    theirs = outputs(model)
    assert theirs.entropy is not None
    set_head(model, temperature=2.0)
    ours = outputs(model)
    assert ours.entropy is None
    torch.testing.assert_close(ours.log_probs, theirs.log_probs)
    assert torch.equal(outputs(copy.deepcopy(model)).log_probs, ours.log_probs)
    revert_liger_kernel(model)
    assert type(model) is stock and type(model.lm_head) is nn.Linear and "forward" not in vars(model)


def test_revert_under_a_newer_head() -> None:
    model = tiny.model()
    set_head(model, temperature=0.5)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    before = outputs(model)
    revert_liger_kernel(model)
    assert type(model) is type(tiny.model()) and type(model.lm_head) is nn.Linear
    after = outputs(model)
    assert torch.equal(after.log_probs, before.log_probs) and torch.equal(after.entropy, before.entropy)
    ids = torch.arange(4, 12)[None]
    torch.testing.assert_close(model(ids, labels=ids).loss, after.loss)


def test_kernels_on_a_trainers_model(tmp_path: Path) -> None:
    """Kernels may be applied after the trainer was built: its head stays, until both are reverted."""
    model = tiny.model()
    trainer = build(tmp_path, "DPO", True, SHORT, model=model)
    apply_liger_kernel(model)
    apply_liger_kernel(model)
    trainer.train()
    revert_liger_kernel(model)
    assert type(model) is type(tiny.model()) and type(model.lm_head) is nn.Linear
