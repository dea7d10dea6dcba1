"""Every patched family, compared with the same unpatched model of transformers."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
import sys
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from fused import assert_fused, assert_real_logits, is_deferred
from model_zoo import BY_ID, HIDDEN, SERVED, VOCAB, ZOO, Tiny
from sampling import exhaustive
from torch import Tensor
from transformers import PreTrainedModel

import liger_chunked
from liger_chunked import LigerFusedLinearCrossEntropyLoss
from liger_chunked.deferred.swap import patch_of
from liger_chunked.integrations.transformers import (
    AutoLigerKernelForCausalLM,
    AutoLigerKernelForImageTextToText,
    apply_liger_kernel,
    attach_head,
    detach_head,
    overrides,
    revert_liger_kernel,
    run_head,
)
from liger_chunked.integrations.transformers.detect import calls_loss_function
from liger_chunked.integrations.transformers.overrides import SWITCHES, family_modeling, rope_of
from liger_chunked.integrations.transformers.patched_class import RopePatch, add_rope
from liger_chunked.integrations.transformers.rotary import rotate_halves, rotate_pairs, rotate_vision
from liger_chunked.kernels.backend import INTERPRETED

# Some layers of transformers have no deterministic backward.
pytestmark = [
    pytest.mark.ordinary_memory,
    # Some versions of transformers cause this warning themselves.
    pytest.mark.filterwarnings("ignore:.hidden_state. is deprecated:FutureWarning"),
]

# One model for each kind of norm, MLP and rope.
KINDS = ("llama", "gemma2", "olmo2", "glm4", "qwen3_moe", "mllama")
# And for each way of a head: images among the tokens, tied embeddings, a scale of the logits.
OF_THE_SUITE = (*KINDS, "gemma3", "qwen2_vl", "granite")

FAMILIES = dict.fromkeys(tiny.family for tiny in ZOO)

by_family = pytest.mark.parametrize("tiny", ZOO, ids=repr)
by_kind = pytest.mark.parametrize("tiny", [exhaustive([t], t.name, t.name not in OF_THE_SUITE) for t in ZOO])


@functools.cache
def built(name: str) -> PreTrainedModel:
    return BY_ID[name].build()


@pytest.fixture
def fresh():
    """Return tiny models by name. Reverts their patches after the test."""
    used = []

    def get(name: str, device: str = "cpu") -> PreTrainedModel:
        model = built(name) if device == "cpu" else copy.deepcopy(built(name)).to(device)
        used.append(model)
        return model

    yield get
    for model in used:
        revert_liger_kernel(model)
        detach_head(model)
        model.eval().zero_grad()


def step(model: PreTrainedModel, arguments: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return the output of a training step, and all gradients."""
    model.train()
    output = model(**arguments)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.eval()
    return output, gradients


def assert_same_step(ours: tuple[Any, dict[str, Tensor]], stock: tuple[Any, dict[str, Tensor]]) -> None:
    (output, gradients), (expected, exact) = ours, stock
    torch.testing.assert_close(output.loss, expected.loss, rtol=2e-5, atol=0)
    assert gradients.keys() == exact.keys()
    largest = max(g.norm() for g in exact.values())
    for name, g in exact.items():
        # The gradient of a key's bias is zero except for rounding.
        assert (gradients[name] - g).norm() <= 2e-4 * g.norm() + 1e-7 * largest, name


def labelled(tiny: Tiny, device: str = "cpu", **more: Any) -> dict[str, Any]:
    sample = tiny.sample()
    return {name: x.to(device) for name, x in {**sample.arguments, "labels": sample.labels}.items()} | more


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Return `triton` for one of each kind; the interpreter runs llama alone without `--exhaustive`."""
    return [pytest.mark.triton] * (name in KINDS) + [pytest.mark.exhaustive] * (INTERPRETED and name != "llama")


@pytest.mark.few(1)
@pytest.mark.parametrize("tiny", [pytest.param(tiny, marks=marks(tiny.name), id=tiny.name) for tiny in ZOO])
def test_training_step(tiny, fresh, device):
    model, arguments = fresh(tiny.name, device), labelled(tiny, device)
    stock = step(model, arguments)
    apply_liger_kernel(model)
    ours = step(model, arguments)
    assert_same_step(ours, stock)
    assert_fused(ours[0])
    assert type(ours[0]) is type(stock[0])
    assert ours[0].keys() == stock[0].keys()
    if "aux_loss" in stock[0]:
        torch.testing.assert_close(ours[0].aux_loss, stock[0].aux_loss)


VISION = ("qwen2_vl", "qwen2_5_vl")
# A stock module's other rotary function: in older versions, such as 5.5, text takes one with sections of the angles.
SECTIONS = "apply_multimodal_rotary_pos_emb"


def ropes_of(family: str) -> dict[str, int]:
    """Return the functions that `rope` replaces."""
    text = {} if hasattr(family_modeling(family), SECTIONS) else {"apply_rotary_pos_emb": 1}
    return {**text, "apply_rotary_pos_emb_vision": 1} if family in VISION else text


def rotations(model: Any) -> set[Any]:
    """Return the functions of ours that a model's layers call."""
    patches = [patch for module in model.modules() if isinstance(patch := patch_of(module), RopePatch)]
    return {
        rope_of(getattr(importlib.import_module(module), name)) for patch in patches for module, name in patch.functions
    }


# The operator that each switch adds: its module and name.
OPERATORS = {
    "rope": ("layers.rope", "_rope"),
    "rms_norm": ("layers.rms_norm", "_forward"),
    "layer_norm": ("layers.layer_norm", "_forward"),
    "swiglu": ("layers.glu", "_forward"),
    "geglu": ("layers.glu", "_forward"),
    "cross_entropy": ("kernels.cross_entropy", "_stats"),
}


@pytest.fixture
def calls(monkeypatch):
    """Count how often the operator of each module of `OPERATORS` ran."""
    counts = Counter()
    for module, name in set(OPERATORS.values()):
        home = importlib.import_module(f"liger_chunked.{module}")
        operator = getattr(home, name)

        def counted(*args, module=module, operator=operator):
            counts[module] += 1
            return operator(*args)

        monkeypatch.setattr(home, name, counted)
    return counts


@pytest.mark.few(1)
@by_family
def test_each_switch_alone(tiny, fresh, calls):
    """The switch reported as on runs its kernel and no other, with the results of the unpatched model."""
    model, arguments = fresh(tiny.name), labelled(tiny)
    apply = getattr(liger_chunked, f"apply_liger_kernel_to_{tiny.family}")
    stock = step(model, arguments)
    everything = apply(model=model).replaced
    revert_liger_kernel(model)
    of_logits = ["cross_entropy"] * calls_loss_function(type(model))
    if not of_logits:  # stock Gemma 3 of 5.5 computes its loss itself
        with pytest.raises(ValueError, match=r"\['cross_entropy'\] matches nothing in"):
            apply(cross_entropy=True, model=model)
    for switch in (*everything, *of_logits):
        on = {name: name == switch for name in SWITCHES if name == switch or name in everything}
        try:
            applied = apply(**on, model=model)
            assert list(applied.replaced) == [switch]
            calls.clear()
            ours = step(model, arguments)
        finally:
            revert_liger_kernel(model)
        assert calls.keys() == ({OPERATORS[switch][0]} if switch in OPERATORS else set())
        (assert_fused if switch == "fused_linear_cross_entropy" else assert_real_logits)(ours[0])
        assert_same_step(ours, stock)


@pytest.mark.stock_layers
@pytest.mark.skipif(INTERPRETED, reason="kernels run on the CPU")
@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_without_kernels_layers_are_stock(name, calls):
    model, arguments = BY_ID[name].build(), labelled(BY_ID[name])
    stock = step(model, arguments)
    applied = apply_liger_kernel(model, fused_linear_cross_entropy=False)
    assert len(applied.replaced) > 2
    calls.clear()
    ours = step(model, arguments)
    assert not calls and ours[0].loss.equal(stock[0].loss)
    assert all(g.equal(stock[1][parameter]) for parameter, g in ours[1].items())


class CallsInside:
    def forward(self, hidden):
        def loss(logits):
            return self.loss_function(logits)

        return loss(hidden)


class CallsByName:
    def forward(self, hidden):
        return getattr(self, "loss_function")(hidden)  # noqa: B009


@pytest.mark.parametrize("mixin", [CallsInside, CallsByName])
def test_a_loss_function_is_found_in_inner_functions_and_mixins(mixin):
    cls = type("Model", (transformers.PreTrainedModel, mixin), {})
    assert calls_loss_function(cls)
    assert not calls_loss_function(type("Model", (transformers.PreTrainedModel,), {}))


def test_a_model_that_calls_no_loss_function():
    """Bart computes its loss itself: `cross_entropy` would change nothing, and is refused."""
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=HIDDEN, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32,
        max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.BartForCausalLM(config)
    apply = functools.partial(liger_chunked.apply_liger_kernel_to_bart, model=model)
    reason = "its code computes the loss itself and does not call loss_function"
    with pytest.raises(
        ValueError, match=rf"(?s)\['cross_entropy'\] matches nothing in bart.*BartForCausalLM: {reason}"
    ):
        apply(cross_entropy=True)
    try:
        assert apply(fused_linear_cross_entropy=False).left.get("BartForCausalLM") == reason
        off = apply(fused_linear_cross_entropy=False, cross_entropy=False).left
        assert off["BartForCausalLM"] == "fused_linear_cross_entropy is off"
        assert "BartForCausalLM" not in apply().left  # fused
    finally:
        revert_liger_kernel(model)


def test_a_loss_function_that_is_not_the_causal_one():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**BY_ID["llama"].config))
    model.loss_function = lambda logits, labels, **kwargs: logits.square().mean()
    with pytest.raises(ValueError, match="LlamaForCausalLM: its loss_function is not the causal one of transformers"):
        apply_liger_kernel(model, cross_entropy=True)
    assert "LlamaForCausalLM" in apply_liger_kernel(model, fused_linear_cross_entropy=False).left
    revert_liger_kernel(model)


def state_of(model: PreTrainedModel) -> Any:
    """Return the identity of everything that patching may change: modules, classes and their attributes.

    A function of ours that a modeling module has beside its rotary one stays there, and nobody else calls it.
    """
    modeling = sys.modules[type(model).__module__]
    instances = [(name, type(m), {key: id(x) for key, x in vars(m).items()}) for name, m in model.named_modules()]
    classes = {
        (name, key): id(value)
        for name, cls in inspect.getmembers(modeling, inspect.isclass)
        if issubclass(cls, torch.nn.Module)
        for key, value in vars(cls).items()
    }
    stock = {name: id(value) for name, value in vars(modeling).items() if not name.startswith("_liger_")}
    return instances, classes, stock


@pytest.mark.few(2)
@by_kind
def test_revert(tiny, fresh, device):
    model, arguments = fresh(tiny.name, device), labelled(tiny, device)
    output, gradients = step(model, arguments)
    before = state_of(model)
    apply_liger_kernel(model)
    assert state_of(model) != before
    apply_liger_kernel(model)
    revert_liger_kernel(model)
    assert state_of(model) == before
    revert_liger_kernel(model)
    again, same = step(model, arguments)
    assert again.loss.equal(output.loss) and again.logits.equal(output.logits)
    if device == "cpu":  # stock backwards on a GPU add in any order
        assert all(same[name].equal(g) for name, g in gradients.items())


def test_token_accuracy(fresh):
    model, arguments = fresh("gemma2"), labelled(BY_ID["gemma2"])
    with torch.no_grad():
        logits = model(**arguments).logits[:, :-1]
        target = arguments["labels"][:, 1:]
        # Labels of which about half are the argmax.
        target[:, ::2] = torch.where(target[:, ::2] == -100, -100, logits.argmax(-1)[:, ::2])
        expected = (logits.argmax(-1) == target)[target != -100].float().mean()
        apply_liger_kernel(model)
        output = model.train()(**arguments, return_token_accuracy=True)
    assert 0 < expected < 1
    assert output.token_accuracy == expected and output["token_accuracy"] == expected


def test_positional_and_tuples(fresh):
    model, tiny = fresh("llama"), BY_ID["llama"]
    arguments = labelled(tiny)
    loss = step(model, arguments)[0].loss
    apply_liger_kernel(model)
    model.train()
    ids, mask, labels = arguments["input_ids"], arguments["attention_mask"], arguments["labels"]
    torch.testing.assert_close(model(ids, mask, None, None, None, labels).loss, loss)
    as_tuple = model(ids, mask, labels=labels, return_dict=False)
    assert isinstance(as_tuple, tuple) and is_deferred(as_tuple[1])
    torch.testing.assert_close(as_tuple[0], loss)


def test_signature_stays(fresh):
    """`generate` and Trainer read the parameter names of `forward`."""
    model = fresh("llama")
    stock = inspect.signature(model.forward)
    apply_liger_kernel(model)
    assert inspect.signature(model.forward) == stock


def test_skip_logits_without_labels(fresh):
    model = fresh("llama")
    apply_liger_kernel(model)
    with pytest.raises(ValueError, match="skip_logits=True needs labels"):
        model(torch.ones(1, 4, dtype=torch.long), skip_logits=True)


def test_patching_one_model_changes_no_other(calls):
    """Not by the rotary function either, of which a modeling module has one."""
    from transformers.models.qwen3 import modeling_qwen3 as modeling

    tiny, stock = BY_ID["qwen3"], modeling.apply_rotary_pos_emb
    patched, other = tiny.build(), tiny.build()
    expected = step(other, labelled(tiny))
    apply_liger_kernel(patched, fused_linear_cross_entropy=False)
    twin = copy.deepcopy(patched)
    calls.clear()
    again = step(other, labelled(tiny))
    assert not calls and again[0].loss.equal(expected[0].loss)
    assert all(g.equal(expected[1][name]) for name, g in again[1].items())
    assert modeling.apply_rotary_pos_emb is stock
    for model in (patched, twin):
        calls.clear()
        assert_same_step(step(model, labelled(tiny)), expected)
        assert calls["layers.rope"]
        revert_liger_kernel(model)
        calls.clear()
        assert step(model, labelled(tiny))[0].loss.equal(expected[0].loss) and not calls


@pytest.mark.stock_layers
def test_a_rotary_function_takes_keywords_in_any_order():
    """The queries decide whether a kernel runs, also after an argument that is no tensor."""
    from transformers.models.llama import modeling_llama as modeling

    tensors = {name: torch.randn(1, 2, 3, 4) for name in ("q", "k")} | {
        name: torch.randn(1, 3, 4) for name in ("cos", "sin")
    }
    ours = getattr(modeling, add_rope(modeling.__name__, "apply_rotary_pos_emb"))
    found = ours(unsqueeze_dim=1, **tensors)
    torch.testing.assert_close(found, modeling.apply_rotary_pos_emb(**tensors))


@pytest.mark.few(1)
@by_kind
def test_a_patched_model_pickles(tiny, tmp_path):
    """The loaded model is patched and can be reverted; so is a model saved by `save_pretrained`."""
    # A fresh model, because router logits make transformers add hooks that cannot be pickled.
    model, arguments = tiny.build(), labelled(tiny)
    apply_liger_kernel(model)
    attach_head(model)
    twin = pickle.loads(pickle.dumps(model))
    model.save_pretrained(tmp_path)
    ours = step(model, arguments)
    revert_liger_kernel(model)
    assert not rotations(model) and rotations(twin) & {rotate_halves, rotate_pairs, rotate_vision}
    again = step(twin, arguments)
    assert_fused(again[0])
    assert again[0].loss.equal(ours[0].loss)
    assert inspect.signature(twin.forward) == inspect.signature(model.forward)
    revert_liger_kernel(twin)
    detach_head(twin)
    detach_head(model)
    loaded = type(model).from_pretrained(tmp_path).eval()
    stock = step(model, arguments)
    for same in (twin, loaded):
        assert not patch_of(same)
        assert step(same, arguments)[0].loss.equal(stock[0].loss)


@pytest.mark.few(1)
@pytest.mark.parametrize("first", ["head", "kernels"])
def test_head_and_kernels_come_and_go_in_any_order(fresh, first):
    model, arguments = fresh("llama"), labelled(BY_ID["llama"])
    before = state_of(model)
    if first == "head":
        attach_head(model)
    apply_liger_kernel(model)
    attach_head(model)
    probe = {"head_fn": lambda head, input: input.hidden_states.shape}
    assert model(**arguments, **probe) == (2, 12, HIDDEN)
    if first == "head":
        detach_head(model)
        assert_fused(step(model, arguments)[0])
        revert_liger_kernel(model)
    else:
        revert_liger_kernel(model)
        assert_real_logits(step(model, arguments)[0])
        assert model(**arguments, **probe) == (2, 12, HIDDEN)
        detach_head(model)
    assert state_of(model) == before


def test_head_fn_sees_what_logits_to_keep_keeps(fresh):
    model, arguments = fresh("llama"), labelled(BY_ID["llama"])
    attach_head(model)
    kept = {**arguments, "logits_to_keep": 5, "labels": arguments["labels"][:, -5:]}
    shapes = model(**kept, head_fn=lambda head, input: (input.hidden_states.shape, input.target.shape))
    assert shapes == ((2, 5, HIDDEN), (2, 5))
    with pytest.raises(ValueError, match="pass labels= or shift_labels="):
        model(arguments["input_ids"], head_fn=lambda head, input: input.target)


def test_a_model_without_a_head():
    model = transformers.LlamaModel(transformers.LlamaConfig(**BY_ID["llama"].config))
    with pytest.raises(ValueError, match="LlamaModel is not a backbone under an lm_head"):
        attach_head(model)
    with pytest.raises(TypeError, match="must be, or wrap, a transformers PreTrainedModel, got Linear"):
        attach_head(torch.nn.Linear(2, 2))
    applied = apply_liger_kernel(model)
    assert list(applied.replaced) == ["rms_norm", "swiglu", "rope"]
    with pytest.raises(ValueError, match=r"'fused_linear_cross_entropy'.*matches nothing in llama"):
        apply_liger_kernel(model, fused_linear_cross_entropy=True)
    revert_liger_kernel(model)


@pytest.mark.few(1)
@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("first", ["forward", "patch"])
def test_a_forward_that_somebody_set_is_called(fresh, first, wraps):
    """It runs once for each step, which is fused, and keywords of ours reach the patched model all the same."""
    model, arguments = fresh("llama"), labelled(BY_ID["llama"])
    stock, calls = step(model, arguments), []

    def set_forward():
        before = model.forward

        def forward(*args, **kwargs):
            calls.append(kwargs)
            return before(*args, **kwargs)

        model.forward = functools.wraps(before)(forward) if wraps else forward
        return model.forward

    if first == "patch":
        apply_liger_kernel(model)
    forward, before = set_forward(), state_of(model)
    for _ in range(2):
        applied = apply_liger_kernel(model)
        assert "fused_linear_cross_entropy" in applied.replaced and applied.left == {}
        ours = step(model, arguments)
        assert len(calls) == 1 and calls.pop().keys() == arguments.keys()
        assert_fused(ours[0])
        assert_same_step(ours, stock)
    attach_head(model)
    assert model(**arguments, head_fn=lambda head, input: 3) == 3
    assert len(calls) == 1 and "head_fn" not in calls.pop()
    detach_head(model)
    revert_liger_kernel(model)
    assert model.forward is forward
    if first == "forward":
        assert state_of(model) == before
        assert step(model, arguments)[0].loss.equal(stock[0].loss)
    del model.forward


def test_refusals(fresh):
    model = fresh("llama")
    before = state_of(model)
    with pytest.raises(TypeError, match=r"unknown switches \['silu'\]; there are \['cross_entropy', 'fused_lin"):
        apply_liger_kernel(model, silu=True)
    with pytest.raises(TypeError, match="rope must be True, False or None, got 'no'"):
        apply_liger_kernel(model, rope="no")
    with pytest.raises(ValueError, match="logits_budget must be a positive number of bytes or None, got 0"):
        apply_liger_kernel(model, logits_budget=0)
    with pytest.raises(ValueError, match=r"\['geglu'\] matches nothing in llama here; it has \['rms_norm', 'swiglu'"):
        apply_liger_kernel(model, geglu=True)
    with pytest.raises(ValueError, match="choose one"):
        apply_liger_kernel(model, cross_entropy=True, fused_linear_cross_entropy=True)
    with pytest.raises(ValueError, match=r"unknown family .lama.: expected a model type .*, such as .*llama"):
        revert_liger_kernel("lama")
    with pytest.raises(ValueError, match="model is a llama, not a qwen2"):
        liger_chunked.apply_liger_kernel_to_qwen2(model=model)
    mlps = [layer.mlp for layer in model.model.layers]
    stock = [mlp.act_fn for mlp in mlps]
    for mlp in mlps:
        mlp.act_fn = torch.nn.Tanh()
    with pytest.raises(ValueError, match=r"(?s)'swiglu'\] matches.*LlamaMLP: its activation is Tanh, not one of GELU"):
        apply_liger_kernel(model, swiglu=True)
    for mlp, act_fn in zip(mlps, stock, strict=True):
        mlp.act_fn = act_fn
    model._use_kernels = True
    with pytest.raises(ValueError, match="use_kernels=False"):
        apply_liger_kernel(model)
    del model._use_kernels
    assert state_of(model) == before


@pytest.mark.few(1)
@pytest.mark.parametrize("family", [exhaustive([f], f, f not in OF_THE_SUITE) for f in FAMILIES])
def test_a_family_before_its_models_are_built(family):
    """Models that are built later are patched, and no other; the constructors are restored exactly."""
    tiny = next(tiny for tiny in ZOO if tiny.family == family)
    arguments = labelled(tiny)
    reference = built(tiny.name)
    stock, before = step(reference, arguments), state_of(reference)
    apply = getattr(liger_chunked, f"apply_liger_kernel_to_{family}")
    assert set(inspect.signature(apply).parameters) == {*SWITCHES, *overrides.OPTIONS, "model"}
    classes = overrides.model_classes(family_modeling(family))
    constructors = [vars(cls).get("__init__") for cls in classes]
    assert apply() is None
    try:
        model = tiny.build()
        applied = model._liger_applied
        assert applied.replaced == {
            **SERVED[tiny.name], "rope": ropes_of(family), "fused_linear_cross_entropy": {tiny.model_class: 1},
        }  # fmt: skip
        ours = step(model, arguments)
        assert_same_step(ours, stock)
        assert_fused(ours[0])
        apply(cross_entropy=True)
        with_logits = step(tiny.build(), arguments)
        assert_same_step(with_logits, stock)
        assert_real_logits(with_logits[0])
        assert not patch_of(reference)
    finally:
        revert_liger_kernel(family)
    assert [vars(cls).get("__init__") for cls in classes] == constructors
    assert not patch_of(tiny.build())
    revert_liger_kernel(model)
    assert_same_step(step(model, arguments), stock)
    assert state_of(reference) == before


def test_a_family_inside_another_model():
    """The language model of LLaVA is patched as it is built, as a backbone without a head."""
    config = transformers.LlavaConfig(
        text_config={**BY_ID["llama"].config, "model_type": "llama"},
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 8, "patch_size": 4, "model_type": "clip_vision_model"},
    )  # fmt: skip
    liger_chunked.apply_liger_kernel_to_llama(fused_linear_cross_entropy=True, rms_norm=True)
    try:
        model = transformers.LlavaForConditionalGeneration(config)
    finally:
        revert_liger_kernel("llama")
    backbone = model.model.language_model
    assert list(backbone._liger_applied.replaced) == ["rms_norm", "swiglu", "rope"]
    assert not patch_of(model) and patch_of(backbone.norm)


def test_a_family_with_a_class_of_ones_own():
    """A subclass is patched when the constructor of its base ends, and so are classes that transformers derives."""

    class Own(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.extra = torch.nn.Linear(2, 2)

    liger_chunked.apply_liger_kernel_to_llama()
    try:
        config = transformers.LlamaConfig(**BY_ID["llama"].config)
        model, classifier = Own(config), transformers.LlamaForSequenceClassification(config)
    finally:
        revert_liger_kernel("llama")
    assert isinstance(model, Own) and "fused_linear_cross_entropy" in model._liger_applied.replaced
    assert list(classifier._liger_applied.replaced) == ["rms_norm", "swiglu", "rope"]


def test_a_constructor_that_somebody_wrapped(monkeypatch):
    """As DeepSpeed wraps those of all modules: after the patch of the family ends, it is a stock model's."""
    cls = transformers.LlamaForCausalLM
    liger_chunked.apply_liger_kernel_to_llama()
    try:
        ours = cls.__init__
        monkeypatch.setattr(cls, "__init__", lambda self, *args: ours(self, *args))
        assert patch_of(BY_ID["llama"].build())
    finally:
        revert_liger_kernel("llama")
    assert not patch_of(BY_ID["llama"].build())
    monkeypatch.undo()
    cls.__init__ = inspect.unwrap(ours)


# transformers has no causal model for the configurations of the other families.
WITHOUT_AUTO = ("qwen2_vl", "qwen2_5_vl", "mllama_text", "mllama")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "tiny", [exhaustive([t], t.name, t.name not in OF_THE_SUITE) for t in ZOO if t.name not in WITHOUT_AUTO]
)
def test_auto_model(tiny, tmp_path):
    config = getattr(transformers, tiny.config_class)(**tiny.config)
    gated = "geglu" if "geglu" in SERVED[tiny.name] else "swiglu"
    model = AutoLigerKernelForCausalLM.from_config(config, **{gated: False})
    assert type(model).__name__ == tiny.model_class
    norm, mlp = model.get_decoder().norm, model.get_decoder().layers[0].mlp

    assert patch_of(norm) and not any(map(patch_of, mlp.modules()))
    model.save_pretrained(tmp_path)
    again = liger_chunked.AutoLigerKernelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, logits_budget=4096)
    assert patch_of(again.get_decoder().norm) and any(map(patch_of, again.get_decoder().layers[0].mlp.modules()))
    assert again.get_output_embeddings().weight.equal(model.get_output_embeddings().weight)
    assert_fused(step(again, labelled(tiny))[0])
    revert_liger_kernel(model)
    revert_liger_kernel(again)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_auto_model_of_images_and_text(name):
    tiny = BY_ID[name]
    config = getattr(transformers, tiny.config_class)(**tiny.config)
    model = AutoLigerKernelForImageTextToText.from_config(config, rms_norm=False)
    assert type(model).__name__ == tiny.model_class and "rms_norm" not in model._liger_applied.replaced
    assert_fused(step(model, labelled(tiny))[0])
    revert_liger_kernel(model)


def test_the_root_loads_no_framework(fresh_process):
    fresh_process.run("import sys, liger_chunked; assert 'transformers' not in sys.modules")
    with pytest.raises(AttributeError, match=r"no attribute .apply_liger_kernel_to_lama.: unknown family.*llama"):
        _ = liger_chunked.apply_liger_kernel_to_lama
    with pytest.raises(AttributeError, match="no attribute 'apply_liger_kernel_to_vit': unknown family 'vit'"):
        _ = liger_chunked.apply_liger_kernel_to_vit  # it has no language model


def test_run_head(fresh):
    """A model that ignores `head_fn` raises; a loss gets the model's softcap, also of another loss object."""
    model = fresh("gemma2")
    ids = torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))
    loss = LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1)

    def smoothed(head, input):
        return input.loss(loss, head, token_weights=torch.ones(2, 6))

    with pytest.raises(RuntimeError, match=r"Gemma2ForCausalLM ignored head_fn: call attach_head\(model\) first"):
        run_head(model, smoothed, input_ids=ids, labels=ids)
    attach_head(model)
    value = run_head(model, smoothed, input_ids=ids, labels=ids)
    logits = model(ids).logits[:, :-1].float()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
    assert model.config.final_logit_softcapping and loss.options.softcap is None
    torch.testing.assert_close(value, expected)
    other = LigerFusedLinearCrossEntropyLoss(softcap=2.0)
    with pytest.raises(ValueError, match=r"the loss has softcap=2.0, but the model is trained with softcap="):
        run_head(model, lambda head, input: input.loss(other, head), input_ids=ids, labels=ids)
