"""`check_model` accepts correct patches, reports wrong ones, and leaves the model unchanged."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("transformers")

import torch
from fused import assert_fused
from model_zoo import BY_ID
from test_models import labelled, state_of, step
from tiny_models import small_model

from liger_chunked.integrations.transformers import (
    apply_liger_kernel,
    attach_head,
    revert_liger_kernel,
)
from liger_chunked.integrations.transformers.check import check_model

pytestmark = [
    pytest.mark.ordinary_memory,
    *(pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Future", "User", "Deprecation")),
]


@pytest.fixture(autouse=True)
def no_other_patched_models():
    """Collect models that earlier tests left in reference cycles, because that reverts the rotary function."""
    gc.collect()


@pytest.mark.few(2)
@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "phi3", "glm4", "gemma3_text"])
def test_what_is_right_passes(name, dtype):
    if dtype == torch.float64 and name == "qwen3_moe":
        pytest.skip("torch has no grouped product in float64")
    model = BY_ID[name].build().to(dtype)
    report = check_model(model)
    assert report.failures == []
    assert report.gradients.keys() == {n for n, p in model.named_parameters()}
    assert "loss: error" in str(report)


def test_a_stock_model_is_left_as_it_was():
    model = BY_ID["llama"].build().train()
    model.model.norm.eval()
    model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight)
    step_state, rng = state_of(model), torch.get_rng_state()
    check_model(model)
    assert state_of(model) == step_state and rng.equal(torch.get_rng_state())
    assert model.training and not model.model.norm.training
    assert model.model.norm.weight.grad.eq(1).all() and model.lm_head.weight.grad is None


@pytest.mark.few(1)
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("options", [{}, {"swiglu": False}, {"logits_budget": 2048}])
def test_a_patched_model_is_left_as_it_was(options, attached):
    """Checks the patches that the model has, unless the caller chooses others."""
    model, arguments = BY_ID["llama"].build(), labelled(BY_ID["llama"])
    apply_liger_kernel(model, rms_norm=False, logits_budget=4096)
    if attached:
        attach_head(model)
    before = state_of(model)
    report = check_model(model, **options)
    assert ("rms_norm" in report.patched.replaced) == bool(options)
    assert ("swiglu" in report.patched.replaced) == (options != {"swiglu": False})
    assert state_of(model) == before
    assert_fused(step(model, arguments)[0])
    revert_liger_kernel(model)


def test_under_an_adapter():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(BY_ID["llama"].build(), peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    report = check_model(model)
    assert report.gradients and all("lora" in name for name in report.gradients)


def test_ones_own_tokens():
    model, arguments = BY_ID["llama"].build(), labelled(BY_ID["llama"])
    report = check_model(model, input_ids=arguments["input_ids"], labels=arguments["labels"])
    assert report.loss.size == pytest.approx(
        model(input_ids=arguments["input_ids"], labels=arguments["labels"]).loss.item()
    )


def test_what_cannot_be_compared_is_refused():
    model, arguments = BY_ID["llama"].build(), labelled(BY_ID["llama"])
    ids = arguments["input_ids"]
    with pytest.raises(ValueError, match=r"labels of shape \(2, 12\) leave no token to predict"):
        check_model(model, input_ids=ids, labels=torch.full_like(ids, -100))
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match=r"on the meta device \(lm_head\.weight and 0 more\): load the model"):
        check_model(model)


def test_hidden_states_wider_than_the_head():
    """Mamba keeps them in float32, and casts them before its bfloat16 head."""
    report = check_model(small_model("Mamba2ForCausalLM").bfloat16())
    assert "fused_linear_cross_entropy" in report.patched.replaced
