"""Patched models in training frameworks: PEFT, Trainer, DDP, FSDP, torch.compile."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from fused import assert_fused, assert_real_logits
from model_zoo import BY_ID, VOCAB, Tiny
from test_models import assert_same_step, labelled, step
from torch import Tensor

from liger_chunked.deferred import defer
from liger_chunked.integrations.transformers import apply_liger_kernel, attach_head, revert_liger_kernel

pytestmark = [
    pytest.mark.ordinary_memory,
    # Warnings of PEFT, Trainer and transformers about each other.
    *(pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Future", "User", "Deprecation", "Runtime")),
]


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def adapted(peft: Any, name: str, **lora: Any) -> Any:
    """Return the tiny model with a nonzero LoRA adapter."""
    model = BY_ID[name].build()
    config = peft.LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, **lora)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


@pytest.mark.few(1)
@pytest.mark.sampled
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "phi3", "qwen2_vl"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(peft, name, when):
    """A frozen head, and adapters in attention and MLP. The model is patched before or after the adapter is added."""
    targets = "all-linear" if when == "after" else r".*(self_attn|mlp)\.(q_proj|qkv_proj|down_proj)"
    stock_model = adapted(peft, name, target_modules=targets)
    stock = step(stock_model, labelled(BY_ID[name]))
    if when == "after":
        model = adapted(peft, name, target_modules=targets)
        apply_liger_kernel(model)
    else:
        base = BY_ID[name].build()
        apply_liger_kernel(base)
        torch.manual_seed(1)
        model = peft.get_peft_model(base, stock_model.peft_config["default"])
    model.load_state_dict(stock_model.state_dict())
    ours = step(model, labelled(BY_ID[name]))
    assert_same_step(ours, stock)
    assert_fused(ours[0])
    assert ours[1] and all("lora" in name for name in ours[1])
    with torch.no_grad(), model.disable_adapter(), stock_model.disable_adapter():
        without = model(**labelled(BY_ID[name])).loss
        torch.testing.assert_close(without, stock_model(**labelled(BY_ID[name])).loss, rtol=2e-5, atol=0)
    assert abs(without - stock[0].loss) > 1e-3
    revert_liger_kernel(model)
    again = step(model, labelled(BY_ID[name]))
    assert again[0].loss.equal(stock[0].loss)


@pytest.mark.few(1)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_head_with_an_unsupported_adapter_trains_with_logits(peft, when, caplog, monkeypatch):
    """It is patched before or after the adapter is added. `attach_head`, which has no logits to give, refuses it."""
    monkeypatch.setattr(defer, "_LOGGED", set())
    refusal = r"lm_head has the adapter 'default' of the kind DoraLinearVariant.*Take lm_head out of target_modules"
    model = adapted(peft, "llama", target_modules=["q_proj", "lm_head"], use_dora=True)
    stock = step(model, labelled(BY_ID["llama"]))
    if when == "before":
        base = BY_ID["llama"].build()
        assert "fused_linear_cross_entropy" in apply_liger_kernel(base).replaced
        torch.manual_seed(1)
        twin = peft.get_peft_model(base, model.peft_config["default"])
        twin.load_state_dict(model.state_dict())
        model = twin
    else:
        assert re.search(refusal, apply_liger_kernel(model).left["LlamaForCausalLM"])
    for _ in range(2):
        ours = step(model, labelled(BY_ID["llama"]))
        assert_real_logits(ours[0])
        assert_same_step(ours, stock)
    (line,) = (x.getMessage() for x in caplog.records if x.name.startswith("liger_chunked"))
    assert re.search(refusal, line)
    revert_liger_kernel(model)
    for patch, options in ((apply_liger_kernel, {"fused_linear_cross_entropy": True}), (attach_head, {})):
        with pytest.raises(ValueError, match=refusal):
            patch(model, **options)


class Rows(torch.utils.data.Dataset):
    """Sequences of one length with different numbers of labels."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(10, VOCAB - 10, (n, 10), generator=generator)
        self.labels = self.ids.clone()
        for i in range(n):
            self.labels[i, : i % 9] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def trained(model: Any, path: Any, **arguments: Any) -> tuple[list[float], float]:
    """Return the losses that Trainer logs for each step, and its evaluation loss."""
    settings = transformers.TrainingArguments(
        output_dir=str(path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
        **arguments,
    )
    trainer = transformers.Trainer(model, settings, train_dataset=Rows(18), eval_dataset=Rows(4))
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, trainer.evaluate()["eval_loss"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_trainer_with_gradient_accumulation(name, tmp_path):
    stock, stock_evaluation = trained(BY_ID[name].build(), tmp_path)
    model = BY_ID[name].build()
    apply_liger_kernel(model)
    ours, evaluation = trained(model, tmp_path)
    assert len(ours) == 3 and ours[0] != ours[2]
    assert ours == pytest.approx(stock, rel=2e-5)
    assert evaluation == pytest.approx(stock_evaluation, rel=2e-5)


def test_accelerate_hooks_stay():
    """`device_map` sets a forward on every module. It moves inputs and calls the forward that it replaced."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, arguments = BY_ID["llama"].build(), labelled(BY_ID["llama"])
    stock = step(model, arguments)
    calls = []

    class Seen(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(type(module).__name__)
            return args, kwargs

    for module in model.modules():
        hooks.add_hook_to_module(module, Seen())
    model(**arguments)
    expected = sorted(calls)
    apply_liger_kernel(model)
    calls.clear()
    ours = step(model, arguments)
    assert_same_step(ours, stock)
    assert_fused(ours[0])
    # The activation is fused into the MLP; all other modules are still called.
    assert sorted(calls) == [name for name in expected if name != "SiLUActivation"]
    revert_liger_kernel(model)
    assert step(model, arguments)[0].loss.equal(stock[0].loss)


def test_accelerate_hooks_come_and_go():
    """After any change of the forwards by hooks, a reverted model has bitwise the same results."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, arguments = BY_ID["llama"].build(), labelled(BY_ID["llama"])
    stock = step(model, arguments)

    def assert_stock() -> None:
        output, gradients = step(model, arguments)
        assert output.logits.equal(stock[0].logits)
        assert all(g.equal(stock[1][name]) for name, g in gradients.items())

    apply_liger_kernel(model)
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.ModelHook())
    assert_fused(step(model, arguments)[0])
    revert_liger_kernel(model)
    assert_stock()
    apply_liger_kernel(model)
    for module in model.modules():
        hooks.remove_hook_from_module(module)
    assert_fused(step(model, arguments)[0])
    revert_liger_kernel(model)
    assert_stock()


def test_cpu_offload():
    """The weights are on the meta device, except during the call of their module."""
    accelerate = pytest.importorskip("accelerate")
    model, arguments = BY_ID["qwen2"].build(), labelled(BY_ID["qwen2"])
    loss = step(model, arguments)[0].loss
    accelerate.cpu_offload(model, execution_device="cpu")
    assert model.lm_head.weight.is_meta
    apply_liger_kernel(model)
    with torch.no_grad():
        output = model.train()(**arguments)
    assert_fused(output)
    torch.testing.assert_close(output.loss, loss, rtol=2e-5, atol=0)


def shallow(name: str) -> Tiny:
    """Return a model with one layer, which halves the compile time."""
    tiny = BY_ID[name]
    return dataclasses.replace(tiny, config={**tiny.config, "num_hidden_layers": 1})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gemma2", pytest.param("mixtral", marks=pytest.mark.exhaustive)])
def test_compiled_step(name):
    """With a softcap and with experts, a compiled step has stock's gradients."""
    tiny = shallow(name)
    model, arguments = tiny.build(), labelled(tiny, num_items_in_batch=torch.tensor(17))
    stock = step(model, arguments)
    apply_liger_kernel(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    output, gradients = step(compiled, {**arguments, "return_token_accuracy": True})
    assert_same_step((output, {name.removeprefix("_orig_mod."): g for name, g in gradients.items()}), stock)
    assert_fused(output)
    assert output.token_accuracy.ndim == 0 and not output.token_accuracy.requires_grad
