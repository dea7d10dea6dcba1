"""Rows of the table are compared with the code that their kernels replace."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from model_zoo import BY_ID, ZOO, Tiny
from test_models import assert_same_step, labelled, step

from liger_chunked.integrations.transformers import (
    FAMILIES,
    Family,
    apply_liger_kernel,
    register_family,
    revert_liger_kernel,
)
from liger_chunked.integrations.transformers.layers import (
    EXPERTS,
    GLU,
    LAYER_NORM,
    PACKED_GLU,
    RMS_NORM,
    RMS_NORM_FP32,
    RMS_NORM_OFFSET,
    rotate_halves,
    rotate_pairs,
)
from liger_chunked.integrations.transformers.overrides import BY_NAME
from liger_chunked.integrations.transformers.overrides import layer_class as _layer_class
from liger_chunked.integrations.transformers.patch import APPLY_TO
from liger_chunked.integrations.transformers.patch import layers_in as _layers_in
from liger_chunked.integrations.transformers.verify import check_layers, check_row

pytestmark = [pytest.mark.ordinary_memory, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture
def table():
    """Restore the table of families after the test."""
    rows, functions = dict(BY_NAME), dict(APPLY_TO)
    yield
    for now, before in ((BY_NAME, rows), (APPLY_TO, functions)):
        now.clear()
        now.update(before)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_rows_of_the_library(family):
    """Checks a row without a model, in well under a second."""
    assert family.modeling
    state = torch.get_rng_state()
    begin = time.perf_counter()
    check_row(family, needs_all=True)
    assert time.perf_counter() - begin < 5  # on a busy machine; 0.3 s on one that is not
    assert state.equal(torch.get_rng_state())


@pytest.mark.parametrize("tiny", ZOO, ids=repr)
def test_the_layers_of_models(tiny):
    """Checks small copies of a model's layers, although its weights are on the meta device."""
    model = tiny.build().to("meta")
    family = BY_NAME[tiny.family]
    for switch, layers in family.layers.items():
        found = _layers_in(model, family, switch)
        for name, layer in layers.items():
            check_layers(layer, [m for m, known in found if known == name], _layer_class(family, name))


def row(name: str, *, rope=None, **layers) -> Family:
    return Family(name, causal=(), rope=rope, **layers)


WRONG = [
    (row("gpt_oss", rope=rotate_halves), "rope: .*gpt_oss is not rotate_halves: the results differ.*set rope=None"),
    (row("ernie4_5", rope=rotate_halves), "ernie4_5 is not rotate_halves: .* set rope=rotate_pairs, which is in liger"),
    (row("cohere2", rope=rotate_halves), "cohere2 is not rotate_halves: .* set rope=None"),
    (row("cohere2", rope=rotate_pairs), "cohere2 is not rotate_pairs: .* set rope=None"),
    (row("gemma3n", rope=rotate_halves), r"gemma3n cannot be compared \(TypeError.*set rope=None"),
    (row("gpt_oss", rms_norm={"GptOssRMSNorm": RMS_NORM}), "GptOssRMSNorm is not RMS_NORM: .*RMS_NORM_FP32 computes"),
    (
        row("olmo2", rms_norm={"Olmo2RMSNorm": RMS_NORM}),
        "Olmo2RMSNorm is not RMS_NORM: .*RMS_NORM_FP32 computes the same",
    ),
    (row("llama", rms_norm={"LlamaRMSNorm": RMS_NORM_FP32}), "is not RMS_NORM_FP32: .*; RMS_NORM computes the same"),
    (row("llama", rms_norm={"LlamaRMSNorm": RMS_NORM_OFFSET}), "not RMS_NORM_OFFSET: .*RMS_NORM computes the same"),
    (row("gemma2", rms_norm={"Gemma2RMSNorm": RMS_NORM}), "not RMS_NORM: .*RMS_NORM_OFFSET computes the same"),
    (row("cohere2", rms_norm={"Cohere2LayerNorm": RMS_NORM}), "is not RMS_NORM: the results differ .*leave it out"),
    (
        row("cohere2", layer_norm={"Cohere2LayerNorm": LAYER_NORM}),
        "is not LAYER_NORM: .*no attribute 'normalized_shape'",
    ),
    (row("starcoder2", rms_norm={"LayerNorm": RMS_NORM}), "rms_norm: LayerNorm is not RMS_NORM: .*LAYER_NORM computes"),
    (row("llama", swiglu={"LlamaMLP": PACKED_GLU}), "swiglu: LlamaMLP is not PACKED_GLU: it is laid out"),
    (row("gpt_oss", swiglu={"GptOssExperts": EXPERTS}), "swiglu: GptOssExperts is not EXPERTS: it is laid out"),
]


@pytest.mark.parametrize(("family", "message"), WRONG, ids=lambda x: x.name if isinstance(x, Family) else "")
def test_wrong_rows_are_refused(table, family, message):
    with pytest.raises(ValueError, match=message):
        register_family(family, replace=True)
    assert BY_NAME.get(family.name) is not family


def test_right_rows_of_those_families(table):
    for family in (
        row("gpt_oss", rms_norm={"GptOssRMSNorm": RMS_NORM_FP32}),
        row("ernie4_5", rms_norm={"Ernie4_5RMSNorm": RMS_NORM}, swiglu={"Ernie4_5MLP": GLU}, rope=rotate_pairs),
        row("cohere2", swiglu={"Cohere2MLP": GLU}),
        row("qwen2_moe", rope=rotate_halves, swiglu={"Qwen2MoeMLP": GLU, "Qwen2MoeExperts": EXPERTS}),
    ):
        register_family(family)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype(table, dtype):
    torch.set_default_dtype(dtype)
    try:
        register_family(row("ernie4_5", swiglu={"Ernie4_5MLP": GLU}, rope=rotate_pairs), replace=True)
        apply_liger_kernel(transformers.Ernie4_5ForCausalLM(transformers.Ernie4_5Config(**BY_ID["llama"].config)))
    finally:
        torch.set_default_dtype(torch.float32)


FALCON = Family(
    "falcon_h1",
    causal=("FalconH1ForCausalLM",),
    rms_norm={"FalconH1RMSNorm": RMS_NORM},
    swiglu={"FalconH1MLP": GLU},
)


def test_a_model_whose_config_makes_a_difference(table):
    """The MLP's multiplier is one by default, so only patching a model shows the difference."""
    register_family(FALCON)
    config = transformers.FalconH1Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_state=8, mlp_multipliers=[2.0, 3.0],
    )  # fmt: skip
    model = transformers.FalconH1ForCausalLM(config)
    with pytest.raises(ValueError, match=r"swiglu cannot serve FalconH1MLP: .*differ by up to.*swiglu=False skips it"):
        apply_liger_kernel(model, fused_linear_cross_entropy=False)
    apply_liger_kernel(model, swiglu=False, fused_linear_cross_entropy=False)
    revert_liger_kernel(model)


def test_a_class_that_cannot_be_compared_without_a_model(table):
    """A family with such a class is not patched as a whole."""
    gated = row("qwen3_next", rms_norm={"Qwen3NextRMSNormGated": RMS_NORM})
    apply = register_family(gated)
    with pytest.raises(ValueError, match=r"Qwen3NextRMSNormGated cannot be compared without a model.*'gate'"):
        apply()
    apply(rms_norm=False)
    revert_liger_kernel("qwen3_next")


SMOLLM3 = Family("smollm3", causal=("SmolLM3ForCausalLM",), rms_norm={"SmolLM3RMSNorm": RMS_NORM}, aliases=("smol",))


def test_replacing_a_row(table):
    BY_NAME.pop("smollm3", None)
    register_family(SMOLLM3)
    register_family(SMOLLM3)
    more = Family("smollm3", causal=("SmolLM3ForCausalLM",), swiglu={"SmolLM3MLP": GLU}, rope=None)
    with pytest.raises(ValueError, match=r"another family named 'smollm3'; replace=True replaces it"):
        register_family(more)
    tiny = Tiny(
        "smollm3", "smollm3", "SmolLM3ForCausalLM", "SmolLM3Config", {**BY_ID["llama"].config, "mlp_bias": False}
    )
    model = tiny.build()
    stock = step(model, labelled(tiny))
    first = apply_liger_kernel(model)
    assert "rms_norm" in first.replaced
    apply = register_family(more, replace=True)
    assert "smol" not in BY_NAME and "apply_liger_kernel_to_smol" not in APPLY_TO
    assert set(apply(model=model).replaced) == {"swiglu", "fused_linear_cross_entropy"}
    assert_same_step(step(model, labelled(tiny)), stock)
    apply()
    with pytest.raises(ValueError, match=r"classes of smollm3 are patched: revert_liger_kernel\('smollm3'\) first"):
        register_family(SMOLLM3, replace=True)
    revert_liger_kernel("smollm3")
    register_family(SMOLLM3, replace=True)
    assert set(apply_liger_kernel(model).replaced) == {"rms_norm", "rope", "fused_linear_cross_entropy"}
    revert_liger_kernel(model)
    assert step(model, labelled(tiny))[0].loss.equal(stock[0].loss)


def test_lora_and_sharded_projections_are_no_obstacle(table):
    peft = pytest.importorskip("peft")
    BY_NAME.pop("smollm3", None)
    register_family(Family("smollm3", causal=("SmolLM3ForCausalLM",), swiglu={"SmolLM3MLP": GLU}))
    tiny = Tiny("smollm3", "smollm3", "SmolLM3ForCausalLM", "SmolLM3Config", dict(BY_ID["qwen2"].config))
    model = peft.get_peft_model(tiny.build(), peft.LoraConfig(r=2, target_modules=["gate_proj", "down_proj"]))
    assert apply_liger_kernel(model).replaced["swiglu"] == {"SmolLM3MLP": 2}
    revert_liger_kernel(model)
