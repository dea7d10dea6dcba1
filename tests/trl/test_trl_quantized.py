"""Trainers of models with a quantized head: the same logs as with the dequantized weight."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import tiny
from test_quantized_head import stand_in_torchao
from test_trl_peft import lora
from torch import nn
from trl_kinds import Log, assert_same, rare, run

pytestmark = [pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")]


@pytest.mark.parametrize(("kind", "config"), [("DPO", {}), rare("SFT", {}), rare("GRPO", {"beta": 0.1})])
def test_quantized_head(tmp_path, kind, config):
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
