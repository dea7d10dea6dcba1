"""`apply_liger_kernel(tiled_mlp=...)`: models whose MLPs run in tiles, against the same models without."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from model_zoo import BY_ID, ZOO
from test_models import assert_same_step, labelled, step
from test_models_training import adapted
from torch import Tensor, nn

import liger_chunked
from liger_chunked.deferred.swap import patch_of
from liger_chunked.integrations.transformers import (
    AutoLigerKernelForCausalLM,
    apply_liger_kernel,
    revert_liger_kernel,
)

pytestmark = [
    pytest.mark.ordinary_memory,
    *(pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Future", "User", "Deprecation", "Runtime")),
]

TOKENS = 5  # of the zoo's 24: a short last tile
MLPS = [tiny.name for tiny in ZOO if tiny.name != "mixtral"]  # which has experts alone


def both(name: str, dtype: torch.dtype = torch.float64, **switches: Any) -> tuple[Any, Any]:
    """Return two patched copies of a tiny model; the second one runs its MLPs in tiles."""
    models = []
    for tiles in ({}, {"tiled_mlp": TOKENS}):
        model = BY_ID[name].build().to(dtype)
        if hasattr(model, "set_experts_implementation") and dtype == torch.float64:
            model.set_experts_implementation("eager")  # grouped products refuse float64
        apply_liger_kernel(model, **switches, **tiles)
        models.append(model)
    return models[0], models[1]


def in_double(name: str) -> dict[str, Tensor]:
    return {n: x.double() if x.is_floating_point() else x for n, x in labelled(BY_ID[name]).items()}


@pytest.mark.few(1)
@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("checkpoints", [None, False, True], ids=["none", "checkpoints", "reentrant"])
@pytest.mark.parametrize("name", MLPS)
def test_training_step(name, checkpoints):
    results = []
    for model in both(name):
        if checkpoints is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
            model.enable_input_require_grads()
        results.append(step(model, in_double(name)))
    (whole, expected), (in_tiles, found) = results
    assert torch.equal(in_tiles.loss, whole.loss)
    assert found.keys() == expected.keys()
    for parameter, g in expected.items():
        assert (found[parameter] - g).norm() <= 1e-9 * g.norm() + 1e-14, parameter


def largest_mlp_input(model: nn.Module, arguments: dict[str, Tensor]) -> int:
    """Return the most rows that a projection of an MLP gets."""
    rows = []
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0].shape[:-1].numel()))
        for name, module in model.named_modules()
        if name.endswith("up_proj")
    ]
    step(model, arguments)
    for hook in hooks:
        hook.remove()
    return max(rows)


def test_each_way_to_ask():
    arguments = labelled(BY_ID["llama"])
    model = BY_ID["llama"].build()
    for tiles, rows in ((5, 5), (None, 24), (False, 24), (True, 24), ("auto", 24), (1000, 24)):
        apply_liger_kernel(model, tiled_mlp=tiles)
        assert largest_mlp_input(model, arguments) == rows, tiles
    liger_chunked.apply_liger_kernel_to_llama(model=model, tiled_mlp=7)
    assert largest_mlp_input(model, arguments) == 7
    revert_liger_kernel(model)
    try:
        liger_chunked.apply_liger_kernel_to_llama(tiled_mlp=6)
        model = BY_ID["llama"].build()
        assert model._liger_applied.replaced["tiled_mlp"] == {"LlamaMLP": 2}
        assert largest_mlp_input(model, arguments) == 6
    finally:
        revert_liger_kernel("llama")
    assert largest_mlp_input(BY_ID["llama"].build(), arguments) == 24
    model = AutoLigerKernelForCausalLM.from_config(model.config, tiled_mlp=4)
    assert largest_mlp_input(model, arguments) == 4


def test_what_is_refused_or_left_alone():
    model = BY_ID["llama"].build()
    with pytest.raises(TypeError, match="tiled_mlp must be True, False, None, "):
        apply_liger_kernel(model, tiled_mlp="all")
    with pytest.raises(ValueError, match="tiled_mlp must be a positive number of tokens, got 0"):
        apply_liger_kernel(model, tiled_mlp=0)
    with pytest.raises(ValueError, match=r"tiled_mlp tiles the MLPs of \['swiglu'\], which is off"):
        apply_liger_kernel(model, tiled_mlp=True, swiglu=False)
    with pytest.raises(TypeError, match="unknown switches"):
        apply_liger_kernel(model, tile_mlp=True)
    with pytest.raises(TypeError, match=r"unknown switches \['tiled_mlps'\]: did you mean 'tiled_mlp'\?; there are "):
        apply_liger_kernel(model, tiled_mlps="auto")
    experts = BY_ID["mixtral"].build()
    with pytest.raises(ValueError, match="tiled_mlp matches nothing in mixtral, which has no gated MLP beside experts"):
        apply_liger_kernel(experts, tiled_mlp=True)
    assert not any(map(patch_of, experts.modules()))
    applied = apply_liger_kernel(experts, tiled_mlp="auto")
    assert "tiled_mlp" not in applied.replaced and applied.left["MixtralExperts"].startswith("not tiled: ")
    mixed = BY_ID["qwen3_moe"].build()
    applied = apply_liger_kernel(mixed, tiled_mlp=TOKENS)
    assert applied.replaced["tiled_mlp"] == {"Qwen3MoeMLP": 1} and "Qwen3MoeExperts" in applied.left


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2"])
def test_lora(name):
    peft = pytest.importorskip("peft")
    results = []
    for tiles in ({}, {"tiled_mlp": TOKENS}):
        model = adapted(peft, name, target_modules="all-linear", lora_dropout=0.0)
        apply_liger_kernel(model, **tiles)
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        results.append(step(model, labelled(BY_ID[name])))
    assert_same_step(results[1], results[0])
    assert results[1][1] and all("lora" in parameter for parameter in results[1][1])


@pytest.mark.slow
def test_short_sequences_do_not_break_graphs():
    model = BY_ID["llama"].build().eval()
    apply_liger_kernel(model, tiled_mlp="auto", fused_linear_cross_entropy=False)
    torch.compile(model.model, backend="eager", fullgraph=True)(input_ids=labelled(BY_ID["llama"])["input_ids"])
    torch._dynamo.reset()


class Leaf:
    """ZeRO-3's hooks on a leaf module: it has its parameters, and those of its submodules, in its forward and backward.

    Outside of them, they are empty.
    """

    def __init__(self, module: nn.Module, recurse: bool) -> None:
        self.gathers = 0
        self._whole = {p: p.data for p in module.parameters(recurse)}
        for i, p in enumerate(self._whole):
            p.ds_id = i
        module.register_forward_pre_hook(lambda *_: self._gather())
        module.register_forward_hook(lambda module, inputs, output: self._after(output))
        self._release()

    def _gather(self) -> None:
        self.gathers += 1
        for p, data in self._whole.items():
            p.data = data

    def _release(self) -> None:
        for p in self._whole:
            p.data = p.data.new_empty(0)

    def _after(self, output: Tensor) -> None:
        self._release()
        if output.requires_grad:
            output.register_hook(lambda g: self._gather())


def test_zero_3_gathers_a_leaf_module_once_for_its_forward_and_once_for_its_backward():
    expected = step(both("llama", torch.float32)[1], labelled(BY_ID["llama"]))
    model = both("llama", torch.float32)[1]
    leaves = [Leaf(layer.mlp, True) for layer in model.model.layers]
    found = step(model, labelled(BY_ID["llama"]))
    assert_same_step(found, expected)
    assert [leaf.gathers for leaf in leaves] == [2, 2]


def test_zero_3_without_leaf_modules_is_refused():
    model = both("llama", torch.float32)[1]
    for module in model.model.layers[0].mlp.children():
        if next(module.parameters(), None) is not None:
            Leaf(module, False)
    with pytest.raises(TypeError, match=r"set_z3_leaf_modules\(model, \[LlamaMLP\]\)"):
        model.train()(**labelled(BY_ID["llama"]))
