"""The load-balancing loss of experts reaches `head_fn` and a fused step; `test_sweep.py` has every class's step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from fused import assert_fused
from tiny_models import batch, build
from transformers import PreTrainedModel

from liger_chunked import linear_token_stats
from liger_chunked.integrations.transformers import attach_head
from liger_chunked.integrations.transformers.attach import Fusion, fuse

pytestmark = [pytest.mark.ordinary_memory, pytest.mark.filterwarnings("ignore")]


def call(model: PreTrainedModel, name: str, **more: Any) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(4)  # some routers use random numbers
    output = model(**batch(name), use_cache=False, **more)
    output.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return output, gradients


def loss_of(head: Any, input: Any) -> Any:
    """Return the causal loss plus what the model adds to it, as a user would."""
    options = {"softcap": input.options.softcap, "logit_scale": input.options.logit_scale}
    logps = linear_token_stats(head.weight, input.hidden_states, input.target, head.bias, **options).logps
    loss = -logps.sum() / (input.target != -100).sum()
    if input.added_loss is not None:
        loss = loss + input.added_loss
    return SimpleNamespace(loss=loss, aux_loss=input.aux_loss)


def assert_gradients(gradients: dict[str, Any], expected: dict[str, Any]) -> None:
    assert gradients.keys() == expected.keys()
    largest = max(g.norm() for g in expected.values())
    for name, g in expected.items():
        assert (gradients[name] - g).norm() <= 2e-4 * g.norm() + 1e-5 * largest, name


def assert_as_stock(model: PreTrainedModel, name: str) -> Any:
    """Compare the fused step and `head_fn` with stock, with router logits and without."""
    stock, expected = call(model, name, output_router_logits=True)
    without, _ = call(model, name, output_router_logits=False)
    fuse(model, Fusion())
    fused, gradients = call(model, name, output_router_logits=True)
    assert_fused(fused)
    torch.testing.assert_close(fused.loss, stock.loss, rtol=2e-5, atol=0)
    assert_gradients(gradients, expected)
    fused_without, _ = call(model, name, output_router_logits=False)
    assert_fused(fused_without)
    torch.testing.assert_close(fused_without.loss, without.loss, rtol=2e-5, atol=0)
    fuse(model, None)
    attach_head(model)
    ours, gradients = call(model, name, output_router_logits=True, head_fn=loss_of)
    torch.testing.assert_close(ours.loss, stock.loss, rtol=2e-5, atol=0)
    assert_gradients(gradients, expected)
    off, _ = call(model, name, output_router_logits=False, head_fn=loss_of)
    torch.testing.assert_close(off.loss, without.loss, rtol=2e-5, atol=0)
    assert off.aux_loss is None
    return ours, stock, without


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "GptOssForCausalLM", "Ernie4_5_VL_MoeForConditionalGeneration"])
def test_loss_and_gradients_are_those_of_stock(name):
    ours, stock, without = assert_as_stock(build(name), name)
    torch.testing.assert_close(ours.aux_loss, stock.aux_loss)
    assert abs(stock.loss - without.loss) > 0.01, "the term can be seen"


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["Dots1ForCausalLM", "Llama4ForCausalLM"])
def test_families_whose_loss_adds_none(name):
    """The stock forward adds no load-balancing loss, regardless of its config."""
    ours, stock, without = assert_as_stock(build(name), name)
    assert ours.aux_loss is None
    assert stock.loss.equal(without.loss)


class Doubled(transformers.MixtralForCausalLM):
    """It adds the load-balancing loss once more."""

    def forward(self, *args, output_router_logits=None, labels=None, **kwargs):
        output = super().forward(*args, output_router_logits=output_router_logits, labels=labels, **kwargs)
        if output_router_logits and labels is not None:
            output.loss = output.loss + self.router_aux_loss_coef * output.aux_loss
        return output


class Unusual(transformers.MixtralForCausalLM):
    """Its router loss is its own."""

    def forward(self, input_ids, output_router_logits=None, labels=None, attention_mask=None, **kwargs):
        kwargs.pop("use_cache", None)
        outputs = self.model(input_ids, attention_mask=attention_mask, output_router_logits=output_router_logits)
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, self.vocab_size)
        router = None
        if output_router_logits:
            router = outputs.router_logits[0].square().mean()
            loss = loss + 3 * router
        return transformers.modeling_outputs.MoeCausalLMOutputWithPast(loss=loss, aux_loss=router, logits=logits)


@pytest.mark.few(1)
@pytest.mark.parametrize("cls", [Doubled, Unusual])
def test_a_forward_of_ones_own(cls):
    torch.manual_seed(0)
    config = build("MixtralForCausalLM").config
    if not cls._can_set_experts_implementation():  # stock 5.5 looks for its decorator in this file
        config._experts_implementation = "eager"
    ours, stock, without = assert_as_stock(cls(config).train(), "MixtralForCausalLM")
    torch.testing.assert_close(ours.aux_loss, stock.aux_loss)
    assert abs(stock.loss - without.loss) > 0.01
