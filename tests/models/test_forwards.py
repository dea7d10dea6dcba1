"""Whatever a model's forward does to its logits, a step with its head deferred is stock's step."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import re
import warnings
import weakref
from typing import Any

import pytest

pytest.importorskip("transformers")

import tiny_models
import torch
import torch.nn.functional as F
import transformers
from fused import assert_fused, assert_real_logits, real
from model_zoo import BY_ID, HIDDEN, VOCAB, ZOO
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_chunked import linear_token_stats
from liger_chunked.deferred import defer
from liger_chunked.integrations.transformers import (
    apply_liger_kernel,
    attach_head,
    detach_head,
    logit_options,
    revert_liger_kernel,
)
from liger_chunked.integrations.transformers.attach import Fusion, fuse

pytestmark = [
    pytest.mark.ordinary_memory,
    pytest.mark.filterwarnings("ignore:.hidden_state. is deprecated:FutureWarning"),
]

LLAMA: dict[str, Any] = BY_ID["llama"].config


def tiny(model_class: str, **config: Any) -> PreTrainedModel:
    """Return a model with random weights, vectors included. Skips the test if transformers has no such class."""
    cls = getattr(transformers, model_class, None)
    if cls is None:
        pytest.skip(f"this transformers has no {model_class}")
    torch.manual_seed(0)
    model = cls(cls.config_class(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 1:
                parameter += 0.2 * torch.randn(parameter.shape)
        model.get_output_embeddings().weight.mul_(3.0)
    return model


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, VOCAB - 10, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


def fused(head, input):
    """Return the mean negative log-likelihood."""
    stats = linear_token_stats(
        head.weight,
        input.hidden_states,
        input.target,
        head.bias,
        softcap=input.options.softcap,
        logit_scale=input.options.logit_scale,
    )
    return -stats.logps.sum() / (input.target != -100).sum()


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    result = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return result


def assert_same_gradients(found: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    assert found.keys() == exact.keys()
    largest = max(g.norm() for g in exact.values())
    for name, g in exact.items():
        assert (found[name] - g).norm() <= 1e-4 * g.norm() + 1e-6 * largest, name


def assert_served(model: PreTrainedModel) -> None:
    """Check that `head_fn` gives the loss and the gradients of the model's own logits."""
    arguments = batch()
    labels = arguments.pop("labels")
    torch.manual_seed(5)  # of dropout
    logits = model(**arguments).logits.float()
    stock = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    exact = gradients(model, stock)
    attach_head(model)
    torch.manual_seed(5)
    ours = model(**arguments, labels=labels, head_fn=fused)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=0)
    assert_same_gradients(gradients(model, ours), exact)


def assert_trains_as_stock(model: PreTrainedModel, fused: bool | None = True, **arguments: Any) -> None:
    """Check that a training step with labels has stock's loss, gradients and logits.

    `fused`: it needs no logits; None: it may.
    """
    model, twin = model.train(), copy.deepcopy(model).train()
    arguments = arguments or batch()
    torch.manual_seed(5)  # of dropout
    stock = model(**arguments)
    exact = gradients(model, stock.loss)
    fuse(twin, Fusion())
    torch.manual_seed(5)
    ours = twin(**arguments)
    if fused is not None:
        (assert_fused if fused else assert_real_logits)(ours)
    torch.testing.assert_close(ours.loss, stock.loss, rtol=1e-5, atol=0)
    assert_same_gradients(gradients(twin, ours.loss), exact)
    # float32: patched layers round in other places, and a logit near zero is a difference of large terms.
    torch.testing.assert_close(real(ours.logits), stock.logits, rtol=1e-4, atol=1e-5)


# Models whose config does not declare the softcap and scale of their logits, with both values. In the last two the head
# is a module with layers, the last of which is the projection.
SERVED: list[tuple[str, float | None, float]] = [
    ("RecurrentGemmaForCausalLM", 3.0, 1.0),
    ("InklingForCausalLM", None, 1.0),  # it divides the hidden states
    ("CohereForCausalLM", None, 0.25),
    ("HyperCLOVAXForCausalLM", None, 4.0),
    ("OPTForCausalLM", None, 1.0),
    ("PhiForCausalLM", None, 1.0),
    ("ModernBertDecoderForCausalLM", None, 1.0),
    ("BertLMHeadModel", None, 1.0),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "softcap", "scale"), SERVED, ids=[row[0] for row in SERVED])
def test_served(name, softcap, scale):
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    model = tiny_models.build(name).eval()
    options = logit_options(model)
    assert (options.softcap, options.logit_scale) == (softcap, scale)
    assert_served(model)
    assert_trains_as_stock(tiny_models.build(name))


@pytest.mark.few(1)
@pytest.mark.parametrize("zoo", ZOO, ids=repr)
def test_every_family_is_served(zoo):
    model = zoo.build()
    expected = zoo.config.get("final_logit_softcapping"), 1 / zoo.config.get("logits_scaling", 1.0)
    assert (logit_options(model).softcap, logit_options(model).logit_scale) == expected
    assert_served(model)


class Counts(transformers.LlamaForCausalLM):
    """A model whose steps leave a trace: random numbers, and a buffer."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, *args, **kwargs):
        self.steps += 1
        return super().forward(*args, **kwargs)


@pytest.mark.few(1)
@pytest.mark.parametrize("check", ["attach", "apply"])
def test_a_check_leaves_no_trace(check):
    model = Counts(transformers.LlamaConfig(**LLAMA, attention_dropout=0.5)).train()
    model.lm_head.register_forward_pre_hook(lambda *args: pytest.fail("the check ran a hook of the model"))
    model.model.register_forward_hook(lambda *args: pytest.fail("the check ran a hook of the model"))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    attributes = [(type(module), set(vars(module))) for module in model.modules()]
    if check == "attach":
        attach_head(model)
        detach_head(model)
    else:
        assert "fused_linear_cross_entropy" in apply_liger_kernel(model).replaced
        revert_liger_kernel(model)
    assert [(type(module), set(vars(module))) for module in model.modules()] == attributes
    assert torch.get_rng_state().equal(state)
    assert all(x.equal(before[name]) for name, x in model.state_dict().items())


def test_logit_options_leave_no_trace():
    """They run the forward, and give back the random numbers that it draws."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, attention_dropout=0.5)).train()
    state = torch.get_rng_state()
    attributes = [(type(module), set(vars(module))) for module in model.modules()]
    logit_options(model)
    assert model.training and all(module.training for module in model.modules())
    assert [(type(module), set(vars(module))) for module in model.modules()] == attributes
    assert torch.get_rng_state().equal(state)


@pytest.mark.few(2)
@pytest.mark.parametrize("patch", [logit_options, attach_head, apply_liger_kernel])
def test_a_model_is_freed_at_once(patch):
    """The model's memory does not wait for Python's garbage collector."""
    model = tiny("LlamaForCausalLM", **LLAMA).train()
    gc.collect()
    gc.disable()
    try:
        patch(model)
        model(**batch()).loss.backward()
        freed = weakref.ref(model)
        del model
        assert freed() is None
    finally:
        gc.enable()


def test_a_head_that_does_not_qualify_any_more(caplog, monkeypatch):
    """A patched model whose head is replaced trains with logits, and says so once."""
    monkeypatch.setattr(defer, "_LOGGED", set())
    model, arguments = tiny("LlamaForCausalLM", **LLAMA).train(), batch()
    apply_liger_kernel(model)
    model.lm_head = nn.Sequential(model.lm_head, nn.Tanh())
    twin = tiny("LlamaForCausalLM", **LLAMA).train()
    twin.lm_head = nn.Sequential(twin.lm_head, nn.Tanh())
    stock = twin(**arguments)
    exact = gradients(twin, stock.loss)
    with caplog.at_level(logging.WARNING, "liger_chunked"):
        for _ in range(2):
            output = model(**arguments)
            assert_real_logits(output)
            # Its layers are patched.
            torch.testing.assert_close(output.loss, stock.loss, rtol=2e-5, atol=0)
            assert gradients(model, output.loss).keys() == exact.keys()
    (record,) = (x for x in caplog.records if x.name.startswith("liger_chunked"))
    refusal = r"lm_head is computed by torch\.nn\.modules\.container\.Sequential: a fused loss needs a single"
    assert re.search(f"Sequential returns logits in training: {refusal}", record.getMessage())
    with pytest.raises(ValueError, match=f"skip_logits=True, but LlamaForCausalLM used its logits: {refusal}"):
        model(**arguments, skip_logits=True)


# Changes that other code makes to a patched model.


def returns(module, args, output):
    return 2 * output


def edits_in_place(module, args, output):
    (output if isinstance(output, Tensor) else output[0]).mul_(2)


def subtracts(module, args, output):
    return output - 1


@pytest.mark.few(1)
@pytest.mark.parametrize("hook", [returns, edits_in_place, subtracts])
def test_forward_hooks_that_edit_logits(hook):
    """A factor stays fused, for `head_fn` too. What else changes logits gets real ones, and `head_fn` is refused."""
    model = tiny("LlamaForCausalLM", **LLAMA)
    attach_head(model)
    with torch.no_grad():
        expected = model(**batch(), head_fn=fused)
    handle = model.lm_head.register_forward_hook(hook)
    if hook is subtracts:
        with pytest.raises(
            ValueError,
            match=r"head_fn takes the place .*: a hook or the forward read the logits, sub at .*test_forwards\.py:\d+$",
        ):
            model(**batch(), head_fn=fused)
    else:
        assert_served(model)
    detach_head(model)
    assert_trains_as_stock(model, fused=hook is not subtracts)
    handle.remove()
    assert_trains_as_stock(model)
    attach_head(model)
    torch.testing.assert_close(model(**batch(), head_fn=fused), expected)


def test_a_hook_that_reads_the_gradient_of_logits():
    """It gets the real one, except in a call with `head_fn`, which says that there is none."""
    model, norms = tiny("LlamaForCausalLM", **LLAMA), []
    handle = model.lm_head.register_full_backward_hook(
        lambda head, of_inputs, of_outputs: norms.append(of_outputs[0].norm())
    )
    assert_trains_as_stock(model)
    stock, ours = norms
    torch.testing.assert_close(ours, stock)
    attach_head(model)
    with pytest.raises(RuntimeError, match=r"a hook reads the gradient of logits, .* called with head_fn"):
        model(**batch(), head_fn=fused).backward()
    handle.remove()
    model(**batch(), head_fn=fused).backward()


def halved(weight: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weight) / 2


def test_a_forward_set_on_the_head(monkeypatch):
    model = tiny("LlamaForCausalLM", **LLAMA)
    stock = model(**batch()).loss
    attach_head(model)
    apply_liger_kernel(model)
    model.lm_head.forward = functools.partial(halved, model.lm_head.weight)
    expected = model.eval()(**batch()).loss
    assert abs(expected - stock) > 1e-3
    output = model.train()(**batch())
    assert_real_logits(output)
    torch.testing.assert_close(output.loss, expected, rtol=2e-5, atol=0)
    with pytest.raises(
        ValueError, match=r"head_fn takes the place of the logits, and .* needs them: its lm_head returns real ones"
    ):
        model(**batch(), head_fn=fused)
    with pytest.raises(ValueError, match=r"skip_logits=True, but .* its lm_head returns real ones"):
        model(**batch(), skip_logits=True)
    del model.lm_head.forward
    assert_fused(model(**batch()))


@pytest.mark.few(1)
@pytest.mark.parametrize("hooked", [False, True])
def test_a_head_fn_that_calls_lm_head_gets_logits(hooked):
    model = tiny("LlamaForCausalLM", **LLAMA)
    attach_head(model)
    if hooked:
        model.lm_head.register_forward_pre_hook(lambda module, args: None)
    logits = model(**batch(), head_fn=lambda head, input: model.lm_head(input.hidden_states))
    torch.testing.assert_close(logits, model(**batch()).logits)


def test_a_loss_function_set_after_patching_gets_its_logits():
    model, arguments = tiny("LlamaForCausalLM", **LLAMA), batch()
    apply_liger_kernel(model)
    assert_fused(model.train()(**arguments))
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().mean()
    output = model(**arguments)
    assert_real_logits(output)
    torch.testing.assert_close(output.loss, output.logits.square().mean())
    with pytest.raises(
        ValueError,
        match=r"skip_logits=True, but .* its logits: a hook or the forward read the logits, square at ",
    ):
        model(**arguments, skip_logits=True)
    del model._loss_function
    assert_fused(model(**arguments))


@pytest.mark.few(1)
@pytest.mark.parametrize("switch", ["fused_linear_cross_entropy", "cross_entropy"])
def test_no_items_as_int_and_as_tensor(switch):
    model, arguments = tiny("LlamaForCausalLM", **LLAMA), batch()
    arguments["labels"] = torch.full_like(arguments["labels"], -100)
    apply_liger_kernel(model, **{switch: True})
    model.train()
    losses = [model(**arguments, num_items_in_batch=items).loss for items in (0, torch.tensor(0))]
    assert losses[0] == losses[1] == 0
    for loss in losses:
        assert not any(g.any() for g in gradients(model, loss).values())


class Quantized(nn.Linear):
    def forward(self, x):
        return super().forward(x).round()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda head: nn.Sequential(head, nn.Tanh()),
            r"container\.Sequential: a fused loss needs a single torch.nn.Lin",
        ),
        (lambda head: Quantized(HIDDEN, VOCAB, bias=False), "Leave lm_head out of quantization"),
    ],
    ids=["sequential", "quantized"],
)
def test_heads_that_are_more_than_a_linear(change, reason):
    model = tiny("LlamaForCausalLM", **LLAMA)
    model.lm_head = change(model.lm_head)
    with pytest.raises(ValueError, match=reason) as refusal:
        attach_head(model)
    assert "low-rank" not in str(refusal.value)
    assert re.search(reason, apply_liger_kernel(model).left["LlamaForCausalLM"])
    revert_liger_kernel(model)
    assert_trains_as_stock(model, fused=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["trainable_tokens", "ia3"])
def test_adapters_on_the_head(kind):
    peft = pytest.importorskip("peft")
    config, reason = {
        "trainable_tokens": (
            lambda: peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices={"lm_head": [3, 4]}),
            "would ignore the rows of trainable_token_indices. Take lm_head out of",
        ),
        "ia3": (
            lambda: peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]),
            "would ignore the adapter. Take lm_head out of the adapter's target_modules",
        ),
    }[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(tiny("LlamaForCausalLM", **LLAMA), config())
    with pytest.raises(ValueError, match=reason):
        attach_head(model)
    if kind == "ia3":
        inner = model.get_base_model()
        assert_trains_as_stock(inner, fused=False)


LLAMA4: dict[str, Any] = {
    "text_config": {
        **LLAMA, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "moe_layers": [1],
        "attention_chunk_size": 8,
    },
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
        "patch_size": 2, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 16, "projector_output_dim": 16,
        "vision_output_dim": 16,
    },
    "image_token_index": VOCAB - 1, "boi_token_index": VOCAB - 2, "eoi_token_index": VOCAB - 3,
}  # fmt: skip


def llama4() -> PreTrainedModel:
    """Return a model whose language model is a causal model of its own; skip the test where the stock one fails."""
    model = tiny("Llama4ForConditionalGeneration", **LLAMA4)
    try:
        model(**batch())
    except AttributeError as error:
        if "image_outputs" not in str(error):  # transformers 5.24.0 reads it of an output that has no such field
            raise
        pytest.skip(f"the stock model fails: {error}")
    return model


def with_images() -> dict[str, Tensor]:
    """Return text after images of four tokens."""
    arguments = batch()
    arguments["input_ids"][:, 1:5] = VOCAB - 1
    arguments["labels"][:, :5] = -100
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    return {**arguments, "pixel_values": pixels}


@pytest.mark.few(2)
@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("way", ["patched", "attached"])
def test_a_head_in_a_causal_model_inside(way, images):
    """Llama 4 for images and text has no backbone: its causal model has the head."""
    model = llama4().train()
    arguments = with_images() if images else batch()
    expected = model(**arguments)
    exact = gradients(model, expected.loss)
    if way == "patched":
        assert "fused_linear_cross_entropy" in apply_liger_kernel(model, rms_norm=False).replaced
        output = model(**arguments)
        assert_fused(output)
        assert type(output) is type(expected)
        assert (output.image_hidden_states is None) == (expected.image_hidden_states is None)
        loss = output.loss
    else:
        attach_head(model)
        loss = model(**arguments, head_fn=fused)
    # As in `assert_served`.
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=0)
    assert images == any(name.startswith("vision_model") for name in exact)
    assert_same_gradients(gradients(model, loss), exact)
    if way == "patched":
        revert_liger_kernel(model)
        assert model(**arguments).logits.equal(expected.logits)


class Passing(transformers.LlamaForCausalLM):
    """A model whose forward passes all of its arguments on."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_positional_arguments():
    model = Passing(transformers.LlamaConfig(**LLAMA)).train()
    arguments = batch()
    ids, mask, labels = (arguments[name] for name in ("input_ids", "attention_mask", "labels"))
    stock = model(ids, mask, labels=labels).loss
    apply_liger_kernel(model)
    # float32: patched layers round in other places, and the fused loss adds in another order.
    torch.testing.assert_close(model(ids, mask, labels=labels, skip_logits=True).loss, stock, rtol=2e-5, atol=0)
    torch.testing.assert_close(model(ids, mask, labels=labels, head_fn=fused), stock, rtol=2e-5, atol=0)
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        model(ids, input_ids=ids, labels=labels, skip_logits=True)
