"""Patched layers and models have a subclass as their class: copies, pickles, wrappers, shards and reverts of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from ranks import join

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
import transformers
from fused import assert_fused, assert_real_logits
from model_zoo import BY_ID, HIDDEN
from test_models import assert_same_step, labelled, step
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import parametrize

import liger_chunked
from liger_chunked.deferred.swap import patch_of
from liger_chunked.integrations.transformers import apply_liger_kernel, attach_head, detach_head, revert_liger_kernel

pytestmark = [
    pytest.mark.ordinary_memory,
    *(pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Future", "User", "Deprecation", "Runtime")),
]

NAMES = ("llama", "gemma2", "phi3", "qwen3_moe")


def patched(name: str = "llama") -> Any:
    model = BY_ID[name].build()
    apply_liger_kernel(model)
    return model


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_classes_keep_their_names_and_come_back(name):
    model = BY_ID[name].build()
    classes = {path: type(m) for path, m in model.named_modules()}
    names = list(model.state_dict())
    printed = str(model)
    apply_liger_kernel(model)
    attach_head(model)
    changed = 0
    for path, m in model.named_modules():
        before = classes[path]
        changed += type(m) is not before
        assert isinstance(m, before)
        assert all(getattr(type(m), a) == getattr(before, a) for a in ("__name__", "__qualname__", "__module__"))
    assert changed > 4
    assert list(model.state_dict()) == names and str(model) == printed
    # All layers of a kind share one class, also with another model.
    twin = patched(name)
    attach_head(twin)
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    revert_liger_kernel(model)
    detach_head(model)
    assert {path: type(m) for path, m in model.named_modules()} == classes


def replica(module: nn.Module) -> nn.Module:
    """Make a replica as `DataParallel` does, on a CPU."""
    twin = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        twin._modules[name] = replica(child)
    for name, parameter in module._parameters.items():
        if parameter is None:
            twin._parameters[name] = None
        else:
            setattr(twin, name, 0.5 * parameter)
    return twin


def test_replicas_run_their_own_parameters():
    model, arguments = BY_ID["llama"].build().train(), labelled(BY_ID["llama"])
    expected, original = replica(model)(**arguments).loss, model(**arguments).loss
    apply_liger_kernel(model)
    output = replica(model)(**arguments)
    assert_fused(output)
    assert abs(expected - original) > 1e-3
    torch.testing.assert_close(output.loss, expected, rtol=2e-5, atol=0)


def test_functional_call():
    model, arguments = BY_ID["llama"].build().train(), labelled(BY_ID["llama"])
    halves = {name: 0.5 * p.detach() for name, p in model.named_parameters()}
    expected = torch.func.functional_call(model, halves, kwargs=arguments).loss
    apply_liger_kernel(model)
    output = torch.func.functional_call(model, halves, kwargs=arguments)
    assert_fused(output)
    torch.testing.assert_close(output.loss, expected, rtol=2e-5, atol=0)
    x = torch.randn(3, HIDDEN)
    norm = model.model.norm
    torch.testing.assert_close(
        torch.func.functional_call(norm, {"weight": 2 * norm.weight}, (x,)), 2 * norm(x), rtol=1e-6, atol=1e-6
    )


def test_a_shallow_copy_is_reverted_alone():
    """Only the fused loss belongs to the copy. It shares its layers with the original."""
    model, arguments = patched().train(), labelled(BY_ID["llama"])
    attach_head(model)
    twin = copy.copy(model)
    twin._modules = dict(model._modules)
    revert_liger_kernel(twin)
    assert_real_logits(twin(**arguments))
    assert_fused(model(**arguments))
    detach_head(twin)
    assert not patch_of(twin) and patch_of(model)
    assert model(**arguments, head_fn=lambda head, input: input.hidden_states.shape)[-1] == HIDDEN


@pytest.mark.slow
def test_torch_save_of_a_whole_model(tmp_path, fresh_process):
    """A model loaded by another process is patched there and can be reverted."""
    model, arguments = patched("gemma2").train(), labelled(BY_ID["gemma2"])
    torch.save(model, tmp_path / "model.pt")
    torch.save({"arguments": arguments, "loss": model(**arguments).loss.detach()}, tmp_path / "expected.pt")
    code = """if True:
        import sys, torch
        from liger_chunked import revert_liger_kernel
        model = torch.load(sys.argv[1] + "/model.pt", weights_only=False)
        expected = torch.load(sys.argv[1] + "/expected.pt")
        output = model(**expected["arguments"])
        assert not output.logits.is_computed
        torch.testing.assert_close(output.loss, expected["loss"])
        revert_liger_kernel(model)
        assert isinstance(model(**expected["arguments"]).logits, torch.Tensor)
        import transformers
        assert type(model) is transformers.Gemma2ForCausalLM
    """
    fresh_process.run(code, str(tmp_path))


@pytest.fixture
def alone(tmp_path):
    """Start a process group with only this process."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("no gloo")
    join(0, 1, str(tmp_path))
    yield
    dist.destroy_process_group()


def shard(model: Any) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer.mlp, mesh=mesh)
        fully_shard(layer.input_layernorm, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def full(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: g.full_tensor() for name, g in gradients.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("first", ["patch", "shard"])
def test_fully_shard(first, alone):
    """FSDP 2 also changes the classes of norms, MLPs and the model. Both orders work, and the patch can be reverted."""
    model, arguments = BY_ID["llama"].build(), labelled(BY_ID["llama"])
    stock = step(model, arguments)
    classes = {name: type(m) for name, m in model.named_modules()}
    first, second = (apply_liger_kernel, shard) if first == "patch" else (shard, apply_liger_kernel)
    first(model)
    between = {name: type(m) for name, m in model.named_modules()}
    second(model)
    norm = model.model.layers[0].input_layernorm
    assert isinstance(norm, FSDPModule) and patch_of(norm) and isinstance(model, FSDPModule) and patch_of(model)
    for _ in range(2):
        output, gradients = step(model, arguments)
        assert_fused(output)
        assert_same_step((output, full(gradients)), stock)
    apply_liger_kernel(model)
    assert_same_step((output, full(step(model, arguments)[1])), stock)
    revert_liger_kernel(model)
    assert isinstance(norm, FSDPModule) and isinstance(model, FSDPModule)
    assert not any(patch_of(m) for m in model.modules())
    after = {name: type(m) for name, m in model.named_modules()}
    if second is apply_liger_kernel:
        assert after == between
    else:
        assert all(issubclass(after[name], cls) for name, cls in classes.items())
    output, gradients = step(model, arguments)
    assert_real_logits(output)
    assert_same_step((output, full(gradients)), stock)


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_a_parametrized_norm():
    model, arguments = BY_ID["llama"].build(), labelled(BY_ID["llama"])
    stock = step(model, arguments)
    apply_liger_kernel(model)
    parametrize.register_parametrization(model.model.norm, "weight", Double())
    output, _ = step(model, arguments)
    assert abs(output.loss - stock[0].loss) > 1e-3
    revert_liger_kernel(model)
    torch.testing.assert_close(step(model, arguments)[0].loss, output.loss, rtol=2e-5, atol=0)
    parametrize.remove_parametrizations(model.model.norm, "weight", leave_parametrized=False)
    torch.testing.assert_close(step(model, arguments)[0].loss, stock[0].loss)
    assert type(model.model.norm) is transformers.models.llama.modeling_llama.LlamaRMSNorm


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
def test_hooks_on_the_activation_run(family):
    """A hook that edits what the activation returns."""
    tiny = BY_ID[family]

    def doubled(model):
        for name, module in model.named_modules():
            if name.endswith(("act_fn", "activation_fn")):
                module.register_forward_hook(lambda module, args, output: 2 * output)
        return model

    stock, ours = doubled(tiny.build()), tiny.build()
    apply_liger_kernel(ours)
    assert_same_step(step(doubled(ours), labelled(tiny)), step(stock, labelled(tiny)))


def test_peft_wraps_what_is_patched():
    """Uses a norm in `modules_to_save` and adapters on the projections of the MLP."""
    peft = pytest.importorskip("peft")
    config = {
        "r": 2,
        "init_lora_weights": False,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
        "modules_to_save": ["norm"],
    }
    torch.manual_seed(1)
    stock_model = peft.get_peft_model(BY_ID["llama"].build(), peft.LoraConfig(**config))
    torch.manual_seed(1)
    model = peft.get_peft_model(patched(), peft.LoraConfig(**config))
    for m in (stock_model, model):
        with torch.no_grad():
            m.base_model.model.model.norm.modules_to_save["default"].weight.mul_(0.5)
    stock = step(stock_model, labelled(BY_ID["llama"]))
    ours = step(model, labelled(BY_ID["llama"]))
    assert_same_step(ours, stock)
    assert_fused(ours[0])
    assert patch_of(model.base_model.model.model.norm.modules_to_save["default"])
    revert_liger_kernel(model)
    assert not any(patch_of(m) for m in model.modules())
    assert step(model, labelled(BY_ID["llama"]))[0].loss.equal(stock[0].loss)


class Scaled(transformers.LlamaForCausalLM):
    """A user's class that inherits the forward of its base."""


def test_a_subclass_of_a_model_is_patched_twice():
    model, arguments = Scaled(transformers.LlamaConfig(**BY_ID["llama"].config)), labelled(BY_ID["llama"])
    attach_head(model)
    assert "fused_linear_cross_entropy" in apply_liger_kernel(model).replaced
    assert "fused_linear_cross_entropy" in apply_liger_kernel(model).replaced
    assert_fused(step(model, arguments)[0])
    revert_liger_kernel(model)
    detach_head(model)
    assert type(model) is Scaled and not any(patch_of(m) for m in model.modules())


def test_an_error_keeps_the_patch_of_a_family():
    apply = liger_chunked.apply_liger_kernel_to_llama
    try:
        apply(rms_norm=False)
        with pytest.raises(TypeError, match="unknown switches"):
            apply(norm=True)
        assert "rms_norm" not in BY_ID["llama"].build()._liger_applied.replaced
        apply(geglu=True)
        with pytest.raises(ValueError, match=r"geglu.* matches nothing in llama"):
            BY_ID["llama"].build()
    finally:
        revert_liger_kernel("llama")
    assert not patch_of(BY_ID["llama"].build())
