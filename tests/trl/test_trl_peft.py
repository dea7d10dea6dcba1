"""Adapters under our trainers: logs as in stock, a frozen head gets no gradient, and no adapter is ignored."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import tiny
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from spies import Memory
from trl.trainer.utils import FusedCausalLMOutput
from trl_kinds import KINDS, Log, assert_same, build, rare, run

from liger_chunked import LigerFusedLinearDPOLoss

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated and will be removed in v6:FutureWarning",
    # PEFT, about modules_to_save in a model with tied embeddings.
    "ignore:Model has `tie_word_embeddings=True`:UserWarning",
)


def lora(kind: str, target_modules: tuple[str, ...] = ("q_proj", "v_proj"), **config: Any) -> dict[str, Any]:
    """Return the arguments of a trainer with a nonzero adapter. The reference is the model without it."""
    adapter = LoraConfig(r=4, target_modules=list(target_modules), init_lora_weights=False, **config)
    return {"peft_config": adapter, **({"ref_model": None} if "ref_model" in KINDS[kind].arguments() else {})}


@pytest.fixture
def assert_logs_what_trl_logs(tmp_path: Path) -> Callable[..., None]:
    def check(
        kind: str, own: Callable[[], dict[str, Any]], config: dict[str, Any] | None = None, loss: Any = None
    ) -> None:
        def seeded(ours: bool, **loss: Any) -> Log:
            torch.manual_seed(0)
            return run(tmp_path, kind, ours, config=config, **own(), **loss)

        given = {} if loss is None else {"loss": loss}
        assert_same(seeded(ours=True, **given), seeded(ours=False), common=loss is not None)

    return check


CASES = [
    ("SFT", {}),
    ("DPO", {}),
    rare("DPO", {"loss_type": "ipo"}),
    rare("DPO", {"loss_type": "aot"}),
    rare("DPO", {"loss_type": "robust", "label_smoothing": 0.1}),
    ("KTO", {}),
    ("ORPO", {}),
    rare("CPO", {}),
    rare("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}),
    ("GKD", {}),
    ("Distillation", {"beta": 0.5}),
    ("GRPO", {"beta": 0.1}),
    rare("RLOO", {"beta": 0.1}),
]


@pytest.mark.parametrize(("kind", "config"), CASES, ids=str)
def test_lora(assert_logs_what_trl_logs, kind, config):
    assert_logs_what_trl_logs(kind, functools.partial(lora, kind), config)


@pytest.mark.parametrize(
    ("kind", "family"),
    [("SFT", "llama"), rare("KTO", "llama"), ("DPO", "softcap"), ("ORPO", "softcap"), rare("GKD", "llama")],
)
def test_a_head_and_embeddings_trained_in_full(assert_logs_what_trl_logs, kind, family):
    """This includes models that tie them."""

    def own() -> dict[str, Any]:
        return {**lora(kind, modules_to_save=["lm_head", "embed_tokens"]), "model": tiny.model(family)}

    assert_logs_what_trl_logs(kind, own, {"optim": "sgd", "learning_rate": 0.02})


@pytest.mark.parametrize("loss", [None, LigerFusedLinearDPOLoss(beta=0.1)], ids=["swap", "loss"])
def test_prompt_tuning(assert_logs_what_trl_logs, tmp_path, loss):
    """Virtual tokens precede the others in the policy, but not in the reference."""

    def own() -> dict[str, Any]:
        peft_config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return {"peft_config": peft_config, "ref_model": None}

    assert_logs_what_trl_logs("DPO", own, loss=loss)


def head_on_logits(
    model: Any, temperature: float = 1.0, cast_lm_head_to_fp32: bool = False, outputs: tuple[str, ...] = ()
) -> None:
    """TRL's `add_fused_lm_head` from the model's own logits. TRL's own would ignore an adapter on `lm_head`."""
    own = model.forward

    @functools.wraps(own)
    def forward(*args, fused_lm_head=False, labels=None, num_items_in_batch=None, **kwargs):
        if not fused_lm_head:
            return own(*args, labels=labels, **kwargs)
        logits = own(*args, **kwargs).logits[:, :-1] / temperature
        mask, logps = labels[:, 1:] != -100, logits.log_softmax(-1)
        target = labels[:, 1:].clamp(min=0)
        values = {
            "log_probs": logps.gather(-1, target[..., None])[..., 0],
            "entropy": -(logps.exp() * logps).sum(-1),
            "log_sum_sq_probs": (2 * logps).logsumexp(-1),
            "mean_logits": logits.detach().mean(-1),
            "is_top1": logits.argmax(-1) == target,
        }
        values = {name: x.masked_fill(~mask, 0) for name, x in values.items()}
        n_items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        fields = dict.fromkeys(f.name for f in dataclasses.fields(FusedCausalLMOutput)) | values
        return FusedCausalLMOutput(**fields | {"loss": -values["log_probs"].sum() / n_items, "label_mask": mask})

    model.forward = forward


ON_THE_HEAD = [
    ("SFT", {}),
    ("DPO", {}),
    ("GRPO", {"beta": 0.1}),
    rare("GKD", {}),
    rare("CPO", {}),
    rare("KTO", {}),
    rare("ORPO", {}),
    rare("RLOO", {"beta": 0.1}),
    rare("GOLD", {}),
    rare("OnlineDPO", {}),
]


@pytest.mark.parametrize(("kind", "config"), ON_THE_HEAD, ids=str)
def test_lora_on_the_head(assert_logs_what_trl_logs, monkeypatch, kind, config):
    """The reference is the model without adapters. TRL refuses such an adapter unless its head is replaced."""
    for cls in KINDS[kind].stock().__mro__:
        module = sys.modules[cls.__module__]
        if "add_fused_lm_head" in vars(module):
            monkeypatch.setattr(module, "add_fused_lm_head", head_on_logits)
            monkeypatch.setattr(module, "BaseTunerLayer", type("NoAdapter", (), {}))
    assert_logs_what_trl_logs(kind, functools.partial(lora, kind, ("q_proj", "lm_head"), use_rslora=True), config)


@pytest.mark.exhaustive
def test_distillation_with_lora_on_the_head(tmp_path):
    """The first loss is that of the merged model. TRL's own loss reads the weight without the adapter."""

    def first_loss(merged: bool) -> float:
        torch.manual_seed(0)
        model = get_peft_model(tiny.model(), lora("Distillation", ("q_proj", "lm_head"))["peft_config"])
        if merged:
            model = model.merge_and_unload().requires_grad_()
        torch.manual_seed(1)
        return run(tmp_path, "Distillation", ours=True, config={"beta": 0.5, "max_steps": 1}, model=model)[0]["loss"]

    assert first_loss(merged=False) == pytest.approx(first_loss(merged=True), rel=1e-5)


def test_dora_on_the_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"DoraLinearVariant.*target_modules"):
        build(tmp_path, "DPO", ours=True, **lora("DPO", ("q_proj", "lm_head"), use_dora=True))


VOCABULARY = 1500


FROZEN = [(kind, False) if kind in ("SFT", "DPO", "ORPO", "GKD", "GRPO") else rare(kind, False) for kind in KINDS]


@pytest.mark.parametrize(("kind", "trained"), [*FROZEN, ("SFT", True)])
def test_a_frozen_head_has_no_gradient(tmp_path, kind, trained):
    """No tensor of the size of its gradient is allocated, unlike for a trained head."""
    own = lora(kind, modules_to_save=["lm_head"] if trained else None)
    models = {"model": tiny.model(vocab_size=VOCABULARY)}
    if "teacher_model" in KINDS[kind].arguments():
        models["teacher_model"] = tiny.model(seed=1, vocab_size=VOCABULARY)
    config = {"max_steps": 1, "gradient_accumulation_steps": 1, "optim": "sgd"}
    trainer = build(tmp_path, kind, ours=True, config=config, logits_budget=16 * 1024, **own, **models)
    memory = Memory()
    memory.expect(*trainer.model.parameters(), *(p for model in models.values() for p in model.parameters()))
    with memory:
        trainer.train()
    of_the_head = VOCABULARY * 32 * 4
    assert memory.largest >= of_the_head if trained else memory.largest < of_the_head / 3
