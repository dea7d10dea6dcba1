"""The load-balancing loss of all mixtures of experts in transformers equals that of the model's own forward."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from fused import assert_fused
from sampling import sampled
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedModel

from liger_chunked import linear_token_stats
from liger_chunked.integrations.transformers import attach_head
from liger_chunked.integrations.transformers.attach import Fusion, fuse

pytestmark = [pytest.mark.ordinary_memory, pytest.mark.filterwarnings("ignore")]

VOCAB = 131
# The sizes under all names that configs use for them.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
    "layer_types": None,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "is_moe": True,
    "mamba_n_heads": 4,
    "router_aux_loss_coef": 0.05,
    "aux_loss_coef": 0.05,
}
VISION = {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "depth": 1, "num_heads": 2}
# The stock forwards of these models add no load-balancing loss, regardless of their configs.
WITHOUT = ("Glm4MoeForCausalLM", "Dots1ForCausalLM", "AfmoeForCausalLM", "Llama4ForCausalLM", "HunYuanMoEV1ForCausalLM")


def with_a_balanced_loss() -> list[str]:
    """Return the classes with a head whose module has a `load_balancing_loss_func`."""
    names = []
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        code = file.read_text(encoding="utf-8")
        if "load_balancing_loss_func(" in code:
            names += re.findall(r"^class (\w+(?:ForCausalLM|ForConditionalGeneration))\(", code, re.MULTILINE)
    return [name for name in names if hasattr(transformers, name)]


def known(config_class: Any, values: dict[str, Any]) -> dict[str, Any]:
    names = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    return {name: value for name, value in values.items() if name in names}


def build(name: str) -> PreTrainedModel:
    """Build a tiny model of a class, or skip the test."""
    model_class = getattr(transformers, name, None)
    if model_class is None:
        pytest.skip(f"this transformers has no {name}")
    config_class = model_class.config_class
    parts = config_class.sub_configs
    try:
        arguments = known(config_class, SIZES)
        if "text_config" in parts:
            arguments["text_config"] = known(parts["text_config"], SIZES)
            arguments["vision_config"] = known(parts["vision_config"], VISION)
        config = config_class(**arguments)
        with torch.device("meta"):
            shape = model_class(copy.deepcopy(config))
        if sum(p.numel() for p in shape.parameters()) > 2_000_000:
            pytest.skip("no tiny model by these sizes")
        torch.manual_seed(0)
        model = model_class(config)
    except Exception as failure:  # configs of other architectures need other sizes
        pytest.skip(f"no tiny model by these sizes: {failure}")
    return model.train()


def call(model: PreTrainedModel, **more: Any) -> tuple[Any, dict[str, Any]]:
    ids = torch.randint(10, VOCAB - 10, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    torch.manual_seed(4)  # some routers use random numbers
    output = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False, **more)
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


def assert_as_stock(model: PreTrainedModel) -> Any:
    """Compare the fused step and `head_fn` with stock, with router logits and without."""
    stock, expected = call(model, output_router_logits=True)
    without, _ = call(model, output_router_logits=False)
    fuse(model, Fusion())
    fused, gradients = call(model, output_router_logits=True)
    assert_fused(fused)
    torch.testing.assert_close(fused.loss, stock.loss, rtol=2e-5, atol=0)
    assert_gradients(gradients, expected)
    fused_without, _ = call(model, output_router_logits=False)
    assert_fused(fused_without)
    torch.testing.assert_close(fused_without.loss, without.loss, rtol=2e-5, atol=0)
    fuse(model, None)
    attach_head(model)
    ours, gradients = call(model, output_router_logits=True, head_fn=loss_of)
    torch.testing.assert_close(ours.loss, stock.loss, rtol=2e-5, atol=0)
    assert_gradients(gradients, expected)
    off, _ = call(model, output_router_logits=False, head_fn=loss_of)
    torch.testing.assert_close(off.loss, without.loss, rtol=2e-5, atol=0)
    assert off.aux_loss is None
    return ours, stock, without


COMPARED = with_a_balanced_loss()


@pytest.mark.parametrize("name", sampled(COMPARED, parts=3))
def test_loss_and_gradients_are_those_of_stock(name):
    model = build(name)
    try:
        call(model, output_router_logits=True)
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as failure:
        pytest.skip(f"stock does not run at this size: {failure}")
    ours, stock, without = assert_as_stock(model)
    if stock.aux_loss is None:  # Doge without experts
        assert ours.aux_loss is None
    else:
        torch.testing.assert_close(ours.aux_loss, stock.aux_loss)
        assert abs(stock.loss - without.loss) > 0.01, "the term can be seen"


def test_nearly_all_of_them_are_compared():
    assert len(COMPARED) > 20


@pytest.mark.parametrize("name", WITHOUT)
def test_families_whose_loss_adds_none(name):
    model = build(name)
    ours, stock, without = assert_as_stock(model)
    assert ours.aux_loss is None
    assert stock.loss.equal(without.loss)


def test_by_the_config():
    """The config decides if the call does not, as in stock."""
    model = build("MixtralForCausalLM")
    model.config.output_router_logits = True
    stock, _ = call(model)
    attach_head(model)
    ours, _ = call(model, head_fn=loss_of)
    torch.testing.assert_close(ours.loss, stock.loss, rtol=2e-5, atol=0)
    torch.testing.assert_close(ours.aux_loss, stock.aux_loss)
    assert ours.aux_loss is not None


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
            loss = loss + 0.3 * router
        return transformers.modeling_outputs.MoeCausalLMOutputWithPast(loss=loss, aux_loss=router, logits=logits)


@pytest.mark.parametrize("cls", [Doubled, Unusual])
def test_a_forward_of_ones_own(cls):
    torch.manual_seed(0)
    config = build("MixtralForCausalLM").config
    if not cls._can_set_experts_implementation():  # stock 5.5 looks for its decorator in this file
        config._experts_implementation = "eager"
    ours, stock, without = assert_as_stock(cls(config).train())
    torch.testing.assert_close(ours.aux_loss, stock.aux_loss)
    assert abs(stock.loss - without.loss) > 0.01


def test_a_class_that_comes_later_compiles_no_graph_again():
    model, other = build("MixtralForCausalLM"), build("OlmoeForCausalLM")
    ids = torch.ones(1, 4, dtype=torch.long)

    def shape(head: Any, input: Any) -> Any:
        return input.hidden_states.shape

    counter = CompileCounter()
    for m in (model, other):
        attach_head(m)
        m.model.forward = torch.compiler.disable(m.model.forward)
    torch.compiler.reset()
    compiled = torch.compile(model, backend=counter)
    compiled(ids, output_router_logits=True, head_fn=shape)
    graphs = counter.frame_count
    if not graphs:
        pytest.skip("this version of torch finds nothing to compile here")
    other(ids, output_router_logits=True, head_fn=shape)
    compiled(ids, output_router_logits=True, head_fn=shape)
    assert counter.frame_count == graphs
