"""Adapters on the head under our trainers: logs as in stock, and a frozen head gets no gradient."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import tiny
from spies import Memory
from test_quantized_head import stand_in_torchao
from torch import nn
from trl.trainer.utils import FusedCausalLMOutput
from trl_kinds import KINDS, Log, assert_same, build, lora, rare, run

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated and will be removed in v6:FutureWarning",
    # PEFT, about modules_to_save in a model with tied embeddings.
    "ignore:Model has `tie_word_embeddings=True`:UserWarning",
)


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


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "config"), ON_THE_HEAD, ids=str)
def test_lora_on_the_head(tmp_path, monkeypatch, kind, config):
    """The reference is the model without adapters. TRL refuses such an adapter unless its head is replaced."""
    for cls in KINDS[kind].stock().__mro__:
        module = sys.modules[cls.__module__]
        if "add_fused_lm_head" in vars(module):
            monkeypatch.setattr(module, "add_fused_lm_head", head_on_logits)
            monkeypatch.setattr(module, "BaseTunerLayer", type("NoAdapter", (), {}))

    def seeded(ours: bool) -> Log:
        torch.manual_seed(0)
        return run(tmp_path, kind, ours, config=config, **lora(kind, ("q_proj", "lm_head"), use_rslora=True))

    assert_same(seeded(ours=True), seeded(ours=False))


def test_dora_on_the_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"DoraLinearVariant.*target_modules"):
        build(tmp_path, "DPO", ours=True, **lora("DPO", ("q_proj", "lm_head"), use_dora=True))


VOCABULARY = 1500


FROZEN = [(kind, False) if kind in ("SFT", "DPO", "ORPO", "GKD", "GRPO") else rare(kind, False) for kind in KINDS]


@pytest.mark.few(5)
@pytest.mark.parametrize(("kind", "trained"), [*FROZEN, ("SFT", True)])
def test_a_frozen_head_has_no_gradient(tmp_path, kind, trained):
    """No tensor of the size of its gradient is allocated, unlike for a trained head."""
    own = lora(kind, modules_to_save=["lm_head"] if trained else None)
    models = {"model": tiny.model(vocab_size=VOCABULARY)}
    if "teacher_model" in KINDS[kind].needs:
        models["teacher_model"] = tiny.model(seed=1, vocab_size=VOCABULARY)
    config = {"max_steps": 1, "gradient_accumulation_steps": 1, "optim": "sgd"}
    trainer = build(tmp_path, kind, ours=True, config=config, logits_budget=16 * 1024, **own, **models)
    memory = Memory()
    memory.expect(*trainer.model.parameters(), *(p for model in models.values() for p in model.parameters()))
    with memory:
        trainer.train()
    of_the_head = VOCABULARY * 32 * 4
    assert memory.largest >= of_the_head if trained else memory.largest < of_the_head / 3


@pytest.mark.parametrize(("kind", "config"), [("DPO", {}), rare("SFT", {}), rare("GRPO", {"beta": 0.1})])
def test_quantized_head(tmp_path, kind, config):
    """The same logs as with the dequantized weight, under an adapter."""

    def log(quantized: bool) -> Log:
        torch.manual_seed(0)
        model = tiny.model()
        module, weight = stand_in_torchao(model.lm_head.weight.detach())
        if not quantized:
            module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            module.weight = nn.Parameter(weight)
        model.lm_head = module
        return run(tmp_path, kind, ours=True, config=config, model=model, **lora(kind, ("q_proj", "lm_head")))

    assert_same(log(quantized=True), log(quantized=False))
