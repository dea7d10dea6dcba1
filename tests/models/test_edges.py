"""A patched model equals stock with wrappers, copies, adapters, hooks or replaced code, from before or after the patch.

Each row compares with the stock model in the same surroundings, and says if our step may build logits.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import json
import math
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edge_cases as edge
import peft
import pytest
import tiny
import torch
import torch.nn.functional as F
import transformers
import trl_kinds as trainers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from edge_cases import (
    APPLY,
    ATTACH,
    BF16,
    HIDDEN,
    LAYERS,
    LENGTH,
    TRAINER,
    VOCAB,
    WAYS,
    Way,
    assert_close,
    assert_same,
    batch,
    build,
    own_call,
    step,
)
from sampling import exhaustive
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.loss import loss_utils
from transformers.modeling_outputs import CausalLMOutputWithPast

from liger_chunked import LigerFusedLinearDPOLoss, LigerFusedLinearKTOLoss, detach_head, run_head

pytestmark = [
    pytest.mark.ordinary_memory,
    # Warnings of torch, PEFT, TRL, accelerate and transformers about themselves and each other.
    *(pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Future", "User", "Deprecation", "Runtime")),
]

ORDERS = ("before", "after")


@pytest.fixture(autouse=True)
def own_accelerator_state() -> Iterator[None]:
    """Let each test choose its mixed precision, which accelerate keeps per process."""
    environment = dict(os.environ)

    def reset() -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    reset()
    torch.compiler.reset()  # its limit of recompilations would end in eager code
    yield
    leaked = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    reset()
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    # Models that are copies share an autocast object, which does not bear being entered twice.
    assert not leaked, "autocast is still enabled after the test"


def ours_in(
    way: Way, order: str, model: Any, surround: Callable[[Any], Any], first: dict[str, Any] | None = None
) -> Any:
    """Patch `model`, and put it into its surroundings before or after that.

    With `first`, a fused step runs between the two, as what a library remembers of it must not outlive a change.
    """
    if order == "before":
        model = surround(model)
        way.patch(model)
        return model
    way.patch(model)
    if first is not None:
        edge.gradients(model, edge.loss_of(way.call(model.train(), **first)))
    return surround(model)


@dataclass(frozen=True)
class Row:
    """Surroundings of a model. `fused=None`: our step may build logits. `tolerance` is relative to stock's norms."""

    name: str
    surround: Callable[[Any], Any]
    tolerance: float = 1e-5
    fused: bool | None = True
    ways: tuple[Way, ...] = tuple(WAYS)
    orders: tuple[str, ...] = ORDERS
    families: tuple[str, ...] = ("llama",)
    vocab: int = VOCAB

    def __repr__(self) -> str:
        return self.name


def cells(rows: list[Row]) -> Any:
    """Return one test for each family, way and order of each row.

    Most are exhaustive: without, the row's first family has every way, each other family has one of them, and orders
    alternate from one way, family and row to the next.
    """
    found = []
    of_families = [(row, family) for row in rows for family in row.families]
    for i, (row, family) in enumerate(of_families):
        for j, way in enumerate(row.ways):
            for k, order in enumerate(row.orders):
                name = "-".join((row.name, *([family] * (len(row.families) > 1)), way.name, order))
                chosen = family == row.families[0] or (i + j) % len(row.ways) == 0
                marked = not chosen or (i + j + k) % len(row.orders) != 0
                found.append(exhaustive((row, family, way, order), name, marked))
    return pytest.mark.parametrize(("row", "family", "way", "order"), found)


def test_the_recorder_sees_the_logits_of_stock() -> None:
    assert step(own_call, build(), batch()).rows == edge.N_TOKENS


# 1. A wrapper on `model.forward`


def wrapped(*wrappers: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def surround(model: Any) -> Any:
        for wrapper in wrappers:
            model.forward = wrapper(model.forward)
        return model

    return surround


def autocast(enabled: bool = True) -> Callable[[Any], Any]:
    return lambda forward: torch.autocast("cpu", torch.bfloat16, enabled=enabled)(forward)


def compiled(backend: Any) -> Callable[[Any], Any]:
    return lambda forward: torch.compile(forward, backend=backend)


def accelerated(model: Any) -> Any:
    AcceleratorState._reset_state(True)  # a trainer's
    return Accelerator(mixed_precision="bf16", cpu=True).prepare(model)


def bf16_of_accelerate_twice(model: Any) -> Any:
    return accelerated(accelerated(model))


WRAPPERS = [
    Row("autocast", wrapped(autocast()), BF16),
    Row("no_grad", wrapped(torch.no_grad())),
    Row("inference_mode", wrapped(torch.inference_mode())),
    Row("accelerate", accelerated, BF16),
    Row("autocast-twice", wrapped(autocast(), autocast()), BF16),
    # The inner wrapper wins: nothing may run in bfloat16.
    Row("autocast-around-none", wrapped(autocast(False), autocast())),
    Row("none-around-autocast", wrapped(autocast(), autocast(False)), BF16),
    Row("no_grad-around-autocast", wrapped(autocast(), torch.no_grad()), BF16),
    Row("accelerate-twice", bf16_of_accelerate_twice, BF16),
    Row("accelerate-around-autocast", lambda model: accelerated(wrapped(autocast())(model)), BF16),
]


@cells(WRAPPERS)
def test_wrapped_forward(row: Row, family: str, way: Way, order: str) -> None:
    stock = step(own_call, row.surround(build()), batch())
    ours = step(way.call, ours_in(way, order, build(), row.surround), batch())
    assert_same(ours, stock, row.tolerance, row.fused)
    half = torch.bfloat16 in ours.dtypes["0.mlp.down_proj"]
    assert half == (row.tolerance == BF16), "the table says which rows run in bfloat16"


# "aot_eager" is slower, and compiles the graphs of "eager" further.
BY_AOT = [(APPLY, "before"), (ATTACH, "after")]
COMPILED = [
    exhaustive(("eager", way, order), f"eager-{way.name}-{order}", (way, order) != (TRAINER, "before"))
    for way in WAYS
    for order in ORDERS
]
COMPILED += [exhaustive(("aot_eager", way, order), f"aot_eager-{way.name}-{order}", False) for way, order in BY_AOT]


@pytest.mark.parametrize(("backend", "way", "order"), COMPILED)
def test_compiled_forward(backend: str, way: Way, order: str) -> None:
    """Without hooks on the layers, which would split the graphs. The second step, with its recorder, runs eagerly."""
    counter = CompileCounterWithBackend(backend)
    model = ours_in(way, order, build("shallow"), wrapped(compiled(counter)))
    ours = step(way.call, model, batch(), dtypes=False)
    assert counter.op_count > 25  # the decoder layer
    assert_same(ours, step(own_call, build("shallow"), batch(), dtypes=False))


# 2. Copies


def perturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def averaged(model: Any) -> Any:
    return torch.optim.swa_utils.AveragedModel(model).module


def reference_of_trl(model: Any) -> Any:
    from trl.experimental.utils import create_reference_model

    return create_reference_model(model).requires_grad_()


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def unwrapped(model: Any) -> Any:
    AcceleratorState._reset_state(True)
    return Accelerator(mixed_precision="bf16", cpu=True).unwrap_model(model, keep_fp32_wrapper=False)


COPIERS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "AveragedModel": averaged,
    "create_reference_model": reference_of_trl,
    "pickle": pickled,
    "save": saved,
    "deepcopy-of-deepcopy": lambda model: copy.deepcopy(copy.deepcopy(model)),
}


@dataclass(frozen=True)
class History:
    """What happens to a model before it is copied, and the stock model that its copy equals."""

    name: str
    run: Callable[[Way, Any], Any]
    surround: Callable[[Any], Any] = lambda model: model
    tolerance: float = 1e-5
    copiers: tuple[str, ...] = tuple(COPIERS)

    def __repr__(self) -> str:
        return self.name


def one_step(way: Way, model: Any) -> Any:
    edge.gradients(model, edge.loss_of(way.call(model, **batch())))
    return model


def plain_history(way: Way, model: Any) -> Any:
    way.patch(model)
    return one_step(way, model)


def accelerate_after(way: Way, model: Any) -> Any:
    way.patch(model)
    return one_step(way, accelerated(model))


def accelerate_before(way: Way, model: Any) -> Any:
    model = accelerated(model)
    way.patch(model)
    return one_step(way, model)


def accelerate_after_a_step(way: Way, model: Any) -> Any:
    return one_step(way, accelerated(plain_history(way, model)))


# accelerate refuses to pickle a prepared model, and create_reference_model copies it.
NO_PICKLE = ("deepcopy", "AveragedModel", "create_reference_model", "deepcopy-of-deepcopy")
HISTORIES = [
    History("step", plain_history),
    History("accelerate-after", accelerate_after, accelerated, BF16, NO_PICKLE),
    History("accelerate-before", accelerate_before, accelerated, BF16, NO_PICKLE),
    History("step-accelerate", accelerate_after_a_step, accelerated, BF16, NO_PICKLE),
    History("accelerate-after-unwrapped", lambda way, model: unwrapped(accelerate_after(way, model))),
    History("accelerate-before-unwrapped", lambda way, model: unwrapped(accelerate_before(way, model))),
]


def like(model: nn.Module) -> Any:
    """Return a stock model with the weights of `model`."""
    stock = build()
    stock.load_state_dict({name: x.detach() for name, x in model.state_dict().items()})
    return stock


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("way", WAYS, ids=repr)
@pytest.mark.parametrize(
    ("history", "copier"),
    [pytest.param(history, name, id=f"{history}-{name}") for history in HISTORIES for name in history.copiers],
)
def test_copies_run_their_own_weights(history: History, copier: str, way: Way) -> None:
    model = history.run(way, build())
    before = step(way.call, model, batch())
    twin = COPIERS[copier](model).train()
    assert_same(step(way.call, twin, batch(), rows=False), before)
    perturb(twin)
    ours = step(way.call, twin, batch())
    stock = step(own_call, history.surround(like(twin)), batch())
    assert abs(stock.loss - before.loss) > 0.05  # the perturbation matters
    assert_same(ours, stock, history.tolerance)
    assert_same(step(way.call, model, batch()), before)  # the original is as it was
    expected = history.surround(like(twin)).eval()(**batch())
    evaluated = twin.eval()(**batch())
    assert_close(evaluated.logits, expected.logits, history.tolerance, "logits")
    assert_close(evaluated.loss, expected.loss, history.tolerance, "loss in evaluation")
    # Stock's generate of a copy, in float32: equal logits in bfloat16 could still be ties.
    if history.tolerance < BF16:
        prompt = batch()["input_ids"][:1, :4]
        greedy = {"max_new_tokens": 5, "do_sample": False}
        tokens = twin.generate(prompt, **greedy)
        assert tokens.equal(like(twin).eval().generate(prompt, **greedy))
        assert not tokens.equal(like(model).eval().generate(prompt, **greedy))


@pytest.mark.sampled
@pytest.mark.parametrize("ways", [(APPLY, ATTACH), (ATTACH, APPLY), (APPLY, TRAINER)], ids=str)
@pytest.mark.parametrize("copier", COPIERS)
def test_a_copy_of_a_model_patched_in_two_ways(ways: tuple[Way, ...], copier: str) -> None:
    model = build()
    for way in ways:
        way.patch(model)
        one_step(way, model)
    twin = COPIERS[copier](model).train()
    perturb(twin)
    stock = step(own_call, like(twin), batch())
    for way in ways:
        assert_same(step(way.call, twin, batch()), stock)


# Not here: copies of a model with an own wrapper, such as `model.forward = torch.autocast(...)(model.forward)`. A
# function is not copied, so stock's copy runs the weights of the original.


# 3. accelerate takes its wrapper away


def prepare_patch_unwrap(way: Way, model: Any) -> Any:
    model = accelerated(model)
    way.patch(model)
    return unwrapped(model)


def patch_prepare_unwrap(way: Way, model: Any) -> Any:
    way.patch(model)
    return unwrapped(accelerated(model))


def prepare_unwrap_patch(way: Way, model: Any) -> Any:
    model = unwrapped(accelerated(model))
    way.patch(model)
    return model


def patch_prepare_step_unwrap(way: Way, model: Any) -> Any:
    return unwrapped(accelerate_after(way, model))


def twice(way: Way, model: Any) -> Any:
    way.patch(model)
    return unwrapped(accelerated(unwrapped(accelerated(model))))


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS, ids=repr)
@pytest.mark.parametrize(
    "history",
    [prepare_patch_unwrap, patch_prepare_unwrap, prepare_unwrap_patch, patch_prepare_step_unwrap, twice],
    ids=lambda history: history.__name__,
)
def test_unwrapped_from_mixed_precision(history: Callable[[Way, Any], Any], way: Way) -> None:
    """The model runs in float32 again, and is still patched."""
    stock = step(own_call, unwrapped(accelerated(build())), batch())
    assert_same(step(way.call, history(way, build()), batch()), stock)
    assert torch.bfloat16 not in stock.dtypes["0.mlp.down_proj"]


# 4. The head changes after a fused step

HEADED = ("llama", "cohere", "granite", "gemma2")


def seeded(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make a change draw the same random numbers for every model."""

    def surround(model: Any) -> Any:
        torch.manual_seed(3)
        return change(model)

    return surround


def biased_linear(model: Any) -> Any:
    linear = nn.Linear(HIDDEN, VOCAB, bias=True)
    nn.init.normal_(linear.bias)
    model.set_output_embeddings(linear)
    return model


def bias_assigned(model: Any) -> Any:
    model.lm_head.bias = nn.Parameter(torch.randn(VOCAB))
    return model


def other_module(model: Any) -> Any:
    model.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
    return model


def other_weight(model: Any) -> Any:
    model.lm_head.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN))
    return model


def resized(model: Any) -> Any:
    model.resize_token_embeddings(137, mean_resizing=False)
    return model


def lora_config(*targets: str, **config: Any) -> Any:
    return peft.LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, target_modules=list(targets), **config)


def adapter_added(model: Any) -> Any:
    try:
        model.add_adapter(lora_config("q_proj", "lm_head"))
    except ValueError as error:
        if "The version of PEFT" not in str(error):
            raise
        # transformers 5.24.0 asks for PEFT 0.22.0. No such release was there when it came: the newest was 0.21.2.
        pytest.skip(f"transformers {transformers.__version__}, PEFT {peft.__version__}: {error}")
    return model


def lora(*targets: str, **config: Any) -> Callable[[Any], Any]:
    def surround(model: Any) -> Any:
        adapted = peft.get_peft_model(model, lora_config(*targets, **config))
        with torch.no_grad():  # lora_bias starts at zero
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name and name.endswith("bias"):
                    parameter.normal_()
        return adapted

    return surround


HEADS = [
    Row("set_output_embeddings", seeded(biased_linear), families=HEADED),
    Row("bias-assigned", seeded(bias_assigned), families=HEADED),
    Row("other-module", seeded(other_module), families=HEADED),
    Row("other-weight", seeded(other_weight)),
    Row("resized", seeded(resized), families=HEADED, vocab=137),
    Row("add_adapter", seeded(adapter_added), families=HEADED),
    Row("lora", seeded(lora("q_proj", "lm_head")), families=HEADED),
    Row("lora-bias", seeded(lora("q_proj", "lm_head", lora_bias=True)), families=HEADED),
    Row("bias-lora", seeded(lambda model: lora("lm_head")(bias_assigned(model)))),
    Row("modules_to_save", seeded(lora("q_proj", modules_to_save=["lm_head"])), families=HEADED),
]


@cells(HEADS)
def test_another_head(row: Row, family: str, way: Way, order: str) -> None:
    stock_model = row.surround(build(family))
    stock = step(own_call, stock_model, batch(family), vocab=row.vocab)
    model = ours_in(way, order, build(family), row.surround, first=batch(family))
    ours = step(way.call, model.train(), batch(family), vocab=row.vocab)
    assert_same(ours, stock)
    with torch.no_grad():
        expected, evaluated = (m.eval()(**batch(family)) for m in (stock_model, model))
    assert_close(evaluated.logits, expected.logits, 1e-5, "logits")


# 5. Code that the user replaces


def plus_one(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + 1.0
        return output

    return wrapper


def scaled(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        return (1.5 * output[0], *output[1:]) if isinstance(output, tuple) else 1.5 * output

    return wrapper


LLAMA = transformers.models.llama.modeling_llama
CLASSES = {
    "model": (LLAMA.LlamaForCausalLM, plus_one),
    "decoder-layer": (LLAMA.LlamaDecoderLayer, scaled),
    "norm": (LLAMA.LlamaRMSNorm, scaled),
    "mlp": (LLAMA.LlamaMLP, scaled),
    "attention": (LLAMA.LlamaAttention, scaled),
}


# A `head_fn` and TRL's trainers compute no loss of the model, to which a user could add.
REPLACED = [
    exhaustive((name, way, order), f"{name}-{way}-{order}", (i + j + k) % 2 != 0)
    for i, name in enumerate(CLASSES)
    for j, way in enumerate((LAYERS, *WAYS))
    for k, order in enumerate(ORDERS)
    if name != "model" or way in (LAYERS, APPLY)
]


@pytest.mark.parametrize(("name", "way", "order"), REPLACED)
def test_a_replaced_forward_of_a_class(name: str, way: Way, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels replace norms and MLPs, but not what a user puts in the place of stock's code."""
    cls, change = CLASSES[name]
    before = step(own_call, build(), batch(), dtypes=False)

    def surround(model: Any) -> Any:
        monkeypatch.setattr(cls, "forward", change(cls.forward))
        return model

    model = ours_in(way, order, build(), surround, first=batch())
    stock = step(own_call, build(), batch(), dtypes=False)
    assert abs(stock.loss - before.loss) > 0.01
    assert_same(step(way.call, model, batch(), dtypes=False), stock)
    # Another model, patched after the replacement.
    twin = build()
    way.patch(twin)
    assert_same(step(way.call, twin, batch(), dtypes=False), stock)
    monkeypatch.undo()
    assert_same(step(way.call, model, batch(), dtypes=False), before)


@pytest.mark.sampled
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS, ids=repr)
def test_a_forward_of_a_class_that_counts_is_called(way: Way, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes on what it is given, so a `head_fn` is neither ignored nor called around it."""
    calls: list[None] = []
    own = LLAMA.LlamaForCausalLM.forward

    @functools.wraps(own)
    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return own(self, *args, **kwargs)

    def surround(model: Any) -> Any:
        monkeypatch.setattr(LLAMA.LlamaForCausalLM, "forward", counting)
        return model

    stock = step(own_call, build(), batch())
    model = ours_in(way, order, build(), surround, first=batch())
    calls.clear()
    assert_same(step(way.call, model, batch()), stock)
    assert len(calls) == 2


def doubled_cross_entropy(source: Tensor, target: Tensor, num_items_in_batch: Any = None, *args: Any, **_: Any) -> Any:
    return 2 * F.cross_entropy(source, target)


def focal(source: Tensor, target: Tensor, num_items_in_batch: Any = None, *args: Any, **_: Any) -> Tensor:
    logps = source.log_softmax(-1)
    mask = target != -100
    own = logps.gather(-1, target.clamp(min=0)[:, None])[:, 0]
    return -((1 - own.exp()) * own)[mask].mean()


@pytest.mark.sampled
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("function", [doubled_cross_entropy, focal], ids=lambda f: f.__name__)
def test_a_replaced_cross_entropy(function: Callable[..., Any], order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `head_fn` and a trainer have their own loss."""

    def surround(model: Any) -> Any:
        monkeypatch.setattr(loss_utils, "fixed_cross_entropy", function)
        return model

    plain = build()(**batch()).loss
    model = ours_in(APPLY, order, build(), surround, first=batch())
    stock = step(own_call, build(), batch())
    assert abs(stock.loss - plain) > 0.01
    assert_same(step(own_call, model, batch()), stock, fused=None)
    monkeypatch.undo()
    assert_same(step(own_call, model, batch()), step(own_call, build(), batch()), fused=True)


def loss_of_logits(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    shifted = logits.float()[..., :-1, :].reshape(-1, vocab_size)
    return focal(shifted, labels[..., 1:].reshape(-1)) + 0.1 * shifted.logsumexp(-1).square().mean()


def loss_with_penalty(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """Calls transformers' loss, and reads the logits beside it."""
    loss = loss_utils.ForCausalLMLoss(logits, labels, vocab_size, **kwargs)
    return loss + 0.01 * logits.square().mean()


def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    target = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.view(-1, vocab_size), target.reshape(-1), label_smoothing=0.3)


def rescaled(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    return loss_utils.ForCausalLMLoss(logits / 2, labels, vocab_size, **kwargs) * 3


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "function", [loss_of_logits, loss_with_penalty, smoothed, rescaled], ids=lambda function: function.__name__
)
def test_a_loss_function_of_the_user(function: Callable[..., Any], order: str, family: str) -> None:
    def surround(model: Any) -> Any:
        model.loss_function = function
        return model

    stock = step(own_call, surround(build(family)), batch(family))
    model = ours_in(APPLY, order, build(family), surround, first=batch(family))
    assert_same(step(own_call, model, batch(family)), stock, fused=None)


# 6. Classes with a forward of their own


class ReadsItsHead(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        head = self.lm_head
        assert isinstance(head, nn.Linear)
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        hidden = hidden.to(head.weight.dtype)
        assert hidden.shape[-1] == head.in_features
        logits = head(hidden)
        assert logits.shape == (*input_ids.shape, head.out_features)
        if head.bias is not None:
            raise AssertionError("this head has no bias")
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, head.out_features, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class ReadsHiddenStates(transformers.LlamaForCausalLM):
    """More fields of the backbone's output than a stock forward reads."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        middle = outputs.hidden_states[1]
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            loss = loss + 0.01 * middle.square().mean()
        return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class ComputesItsLoss(transformers.LlamaForCausalLM):
    """The loss as tutorials write it."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask)
        logits = self.lm_head(outputs[0])
        loss = None
        if labels is not None:
            shift_logits = logits[..., :-1, :].contiguous()
            shift_labels = labels[..., 1:].contiguous()
            loss = nn.CrossEntropyLoss()(shift_logits.view(-1, self.config.vocab_size), shift_labels.view(-1))
        return CausalLMOutputWithPast(loss=loss, logits=logits)


SOURCE = """
class WithoutSource(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        logits = self.lm_head(hidden) * 0.5
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class InheritsAll(transformers.LlamaForCausalLM):
    pass


class CallsSuper(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super(CallsSuper, self).forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = 2 * output.loss
        return output
"""
SOURCELESS: dict[str, Any] = {"transformers": transformers, "CausalLMOutputWithPast": CausalLMOutputWithPast}
exec(SOURCE, SOURCELESS)
OWN = {
    **{cls.__name__: cls for cls in (ReadsItsHead, ReadsHiddenStates, ComputesItsLoss)},
    **{name: SOURCELESS[name] for name in ("WithoutSource", "InheritsAll", "CallsSuper")},
}


@pytest.mark.sampled
@pytest.mark.parametrize("way", [APPLY, LAYERS, ATTACH], ids=repr)
@pytest.mark.parametrize("name", OWN)
def test_own_forward(name: str, way: Way) -> None:
    """Not in a trainer: TRL's fused head calls no forward of a class. A `head_fn` knows what is added to its loss, but
    not that `CallsSuper` doubles it.
    """
    cls = OWN[name]
    stock_model = build(model_class=cls)
    stock = step(own_call, stock_model, batch(), dtypes=way is not LAYERS)
    model = build(model_class=cls)
    way.patch(model)
    if way is ATTACH and name == "CallsSuper":
        seen: list[Tensor] = []

        def logits(head: Any, input: Any) -> CausalLMOutputWithPast:
            seen.append(input.hidden_states @ head.weight.T * input.options.logit_scale)
            return CausalLMOutputWithPast(loss=seen[0].sum())

        run_head(model, logits, **batch())
        assert_close(seen[0].detach(), stock.output.logits.detach(), 1e-5, "logits")
        return
    assert_same(step(way.call, model, batch(), dtypes=way is not LAYERS), stock)
    with torch.no_grad():
        expected, evaluated = (m.eval()(**batch()) for m in (stock_model, model))
    assert_close(evaluated.logits, expected.logits, 1e-5, "logits")


# 7. Hooks on the head


def edits(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    column = F.one_hot(torch.tensor(5), output.shape[-1]).to(output.dtype)
    return output + column


def edits_tensors(module: nn.Module, args: Any, output: Any) -> Any:
    if not isinstance(output, torch.Tensor):
        return None
    return edits(module, args, output)


def edits_in_place(module: nn.Module, args: Any, output: Any) -> None:
    output[..., 5] += 1.0


def bans(module: nn.Module, args: Any, output: Any) -> Any:
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[:3] = True  # no label of the batch
    return torch.masked_fill(output, mask, -1e9)


HOOKS = (edits, edits_tensors, edits_in_place, bans)


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", [APPLY, ATTACH], ids=repr)
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_a_hook_that_edits_logits(hook: Callable[..., Any], way: Way, order: str, family: str) -> None:
    """A `head_fn` has no logits to edit: it is refused, or right. TRL's fused head runs no hook of the head."""

    def surround(model: Any) -> Any:
        model.lm_head.register_forward_hook(hook)
        return model

    before = build(family)(**batch(family)).loss
    stock = step(own_call, surround(build(family)), batch(family))
    assert abs(stock.loss - before) > 1e-3
    try:
        model = ours_in(way, order, build(family), surround, first=batch(family))
        ours = step(way.call, model, batch(family))
    except (ValueError, TypeError, RuntimeError):
        assert way is ATTACH
        return
    assert_same(ours, stock, fused=None)


@pytest.mark.sampled
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS, ids=repr)
def test_a_pre_hook_runs_once_a_step(way: Way, order: str) -> None:
    seen: list[torch.Size] = []

    def surround(model: Any) -> Any:
        model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
        return model

    model = ours_in(way, order, build(), surround, first=batch())
    for n in range(1, 4):
        seen.clear()
        loss = edge.loss_of(way.call(model, **batch()))
        loss.backward()
        assert seen == [torch.Size([2, LENGTH, HIDDEN])], f"in step {n}"


@pytest.mark.sampled
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", [APPLY, ATTACH], ids=repr)
def test_a_pre_hook_that_edits_hidden_states(way: Way, order: str) -> None:
    def surround(model: Any) -> Any:
        model.lm_head.register_forward_pre_hook(lambda module, args: (2 * args[0],))
        return model

    before = build()(**batch()).loss
    stock = step(own_call, surround(build()), batch())
    assert abs(stock.loss - before) > 0.05
    assert_same(step(way.call, ours_in(way, order, build(), surround, first=batch()), batch()), stock)


@pytest.mark.sampled
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS, ids=repr)
def test_a_hook_that_counts(way: Way, order: str) -> None:
    """It runs once a step. It may cost the logits, and a `head_fn`, which has none, may be refused."""
    calls: list[None] = []

    def surround(model: Any) -> Any:
        model.lm_head.register_forward_hook(lambda module, args, output: calls.append(None))
        return model

    stock = step(own_call, build(), batch())
    try:
        model = ours_in(way, order, build(), surround, first=batch())
        calls.clear()
        ours = step(way.call, model, batch())
    except ValueError as refusal:
        assert way is not APPLY and "hook" in str(refusal)
        return
    assert_same(ours, stock, fused=None)
    assert len(calls) == 2  # two steps


# 8. Packed sequences


def packed(**changes: Any) -> dict[str, Any]:
    """Return two rows: two sequences one after another, and one sequence. No mask says so, only the positions."""
    positions = torch.stack([torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]), torch.arange(LENGTH)])
    return batch(attention_mask=None, position_ids=positions, **changes)


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS, ids=repr)
@pytest.mark.parametrize("use_cache", [False, None], ids=["no-cache", "default"])
def test_packed_positions(use_cache: bool | None, way: Way) -> None:
    inputs = packed(use_cache=use_cache)
    model, stock_model = build(), build()
    way.patch(model)
    # A trainer of TRL turns the cache off; with one, transformers does not look for sequences in the positions.
    stock_model.config.use_cache = model.config.use_cache
    stock = step(own_call, stock_model, inputs)
    joined = step(own_call, stock_model, {**inputs, "position_ids": None})
    assert abs(stock.loss - joined.loss) > 1e-3  # the positions matter
    assert_same(step(way.call, model, inputs), stock)
    with torch.no_grad():
        expected, evaluated = (m.eval()(**inputs) for m in (stock_model, model))
    assert_close(evaluated.logits, expected.logits, 1e-5, "logits")
    assert_close(evaluated.loss, expected.loss, 1e-5, "loss in evaluation")
    if use_cache is False:
        assert_close(evaluated.loss, stock.loss.detach(), 1e-5, "evaluation beside training")


@pytest.mark.parametrize("way", WAYS, ids=repr)
def test_packed_positions_keep_sequences_apart(way: Way) -> None:
    """The loss of the first sequence does not depend on the second."""
    model = build()
    way.patch(model)
    losses = []
    for seed in (1, 2):
        inputs = packed(use_cache=False)
        ids = inputs["input_ids"]
        ids[0, 5:] = torch.randint(10, VOCAB - 10, (LENGTH - 5,), generator=torch.Generator().manual_seed(seed))
        inputs["labels"] = torch.full_like(ids, -100)
        inputs["labels"][0, 1:5] = ids[0, 1:5]
        losses.append(edge.loss_of(way.call(model, **inputs)).detach())
        # The second sequence, alone: the same loss as inside the row.
        inputs["labels"] = torch.full_like(ids, -100)
        inputs["labels"][0, 6:] = ids[0, 6:]
        inside = edge.loss_of(way.call(model, **inputs)).detach()
        alone = own_call(build(), input_ids=ids[:1, 5:], labels=ids[:1, 5:]).loss.detach()
        assert_close(inside, alone, 1e-5, "the second sequence")
    assert_close(losses[0], losses[1], 1e-6, "the first sequence")


# 9. PEFT


def prompt_tuning(model: Any) -> Any:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, token_dim=HIDDEN)
    return peft.get_peft_model(model, config)


def cpt(model: Any) -> Any:
    config = peft.CPTConfig(
        task_type="CAUSAL_LM",
        cpt_token_ids=[11, 12, 13, 14],
        cpt_mask=[1, 1, 1, 1],
        cpt_tokens_type_mask=[1, 2, 3, 4],
        opt_weighted_loss_type="decay",
        opt_loss_decay_factor=0.7,
    )
    return peft.get_peft_model(model, config)


def adaption_prompt(model: Any) -> Any:
    config = peft.AdaptionPromptConfig(adapter_layers=2, adapter_len=3, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():  # the gates start at zero
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return adapted


def mixed(model: Any) -> Any:
    adapted = peft.get_peft_model(model, lora_config("q_proj"), mixed=True)
    adapted.add_adapter("other", peft.LoHaConfig(r=2, target_modules=["v_proj"], init_weights=False))
    adapted.set_adapter(["default", "other"])
    return adapted


ADAPTERS = [
    Row("lora", seeded(lora("q_proj", "down_proj"))),
    Row("prompt-tuning", seeded(prompt_tuning)),
    # CPT computes its own loss from the logits, so it may get them. A `head_fn` returns none.
    Row("cpt", seeded(cpt), fused=None, ways=(APPLY,)),
    Row("adaption-prompt", seeded(adaption_prompt)),
    Row("mixed", seeded(mixed)),
]


@cells(ADAPTERS)
def test_peft(row: Row, family: str, way: Way, order: str) -> None:
    stock_model = row.surround(build())
    stock = step(own_call, stock_model.train(), batch())
    if order == "before" and way is TRAINER:
        # The trainer's head is given to the base model, as TRL does.
        model = row.surround(build())
        way.patch(model)
    else:
        model = ours_in(way, order, build(), row.surround, first=batch())
    assert_same(step(way.call, model.train(), batch()), stock, fused=row.fused)
    assert stock.grads and len(stock.grads) < 20  # the adapter's alone
    with torch.no_grad():
        expected, evaluated = (m.eval()(**batch()) for m in (stock_model, model))
    assert_close(evaluated.loss, expected.loss, 1e-5, "loss in evaluation")
    assert_close(evaluated.logits, expected.logits, 1e-5, "logits")


# 10. Arguments of a call


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_return_dict(family: str) -> None:
    inputs = batch(family, return_dict=False)
    stock = step(own_call, build(family), inputs)
    model = build(family)
    APPLY.patch(model)
    ours = step(own_call, model, inputs)
    assert isinstance(ours.output, tuple)
    assert_same(ours, stock)


@pytest.mark.sampled
@pytest.mark.parametrize("requested", [True, None], ids=["argument", "config"])
@pytest.mark.parametrize("way", WAYS, ids=repr)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_auxiliary_loss(family: str, way: Way, requested: bool | None) -> None:
    """The loss includes that of the router, with every gradient."""
    inputs = batch(family, output_router_logits=requested)
    stock_model = build(family)
    stock_model.config.output_router_logits = requested is None
    stock = step(own_call, stock_model, inputs)
    without = own_call(stock_model, **{**inputs, "output_router_logits": False}).loss
    assert stock.output.aux_loss is not None and abs(stock.loss - without) > 1e-3
    model = build(family)
    model.config.output_router_logits = requested is None
    way.patch(model)
    ours = step(way.call, model, inputs)
    assert_same(ours, stock)
    if way is not ATTACH:  # its function returns what it wants
        assert_close(ours.output.aux_loss.detach(), stock.output.aux_loss.detach(), 1e-5, "aux_loss")


def last_labels(n: int) -> Tensor:
    return batch()["labels"][:, -n:]


CALLS: dict[str, dict[str, Any]] = {
    "num_items-int": {"num_items_in_batch": 37},
    "num_items-tensor": {"num_items_in_batch": torch.tensor(37)},
    "num_items-float": {"num_items_in_batch": torch.tensor(37.0)},
    "shift_labels": {"shift_labels": batch()["labels"].roll(-2, 1)},
    "shift_labels-num_items": {"shift_labels": batch()["labels"].roll(-2, 1), "num_items_in_batch": 11},
    "logits_to_keep": {"logits_to_keep": 7, "labels": last_labels(7)},
    "logits_to_keep-positions": {"logits_to_keep": torch.tensor([2, 5, 6, 9]), "labels": last_labels(4)},
    "use_cache": {"use_cache": True},
    "no-cache": {"use_cache": False},
    "ignored": {"labels": torch.full((2, LENGTH), -100), "num_items_in_batch": 5},
    "no-mask": {"attention_mask": None},
    "hidden_states": {"output_hidden_states": True},
    "one-label": {"labels": torch.full((2, LENGTH), -100).index_fill(1, torch.tensor([LENGTH - 1]), 17)},
}
# TRL's fused head takes `shift_labels` alone, shifts labels of the kept positions like the model, but drops the last.
NOT_OF_TRL = ("use_cache", "hidden_states", "logits_to_keep", "logits_to_keep-positions")


@pytest.mark.parametrize(
    ("call", "way"),
    [
        pytest.param(call, way, id=f"{call}-{way}")
        for call in CALLS
        for way in WAYS
        if way is not TRAINER or call not in NOT_OF_TRL
    ],
)
def test_arguments(call: str, way: Way) -> None:
    inputs = batch(**CALLS[call])
    stock = step(own_call, build(), inputs)
    model = build()
    way.patch(model)
    ours = step(way.call, model, inputs)
    if call == "ignored":
        assert ours.loss == stock.loss == 0
        assert ours.loss.requires_grad
        assert not any(gradient.any() for gradient in (*stock.grads.values(), *ours.grads.values()))
        return
    assert_same(ours, stock)
    if way is APPLY:
        for name in ("past_key_values", "hidden_states"):
            assert (getattr(ours.output, name) is None) == (getattr(stock.output, name) is None), name
        for mine, theirs in zip(ours.output.hidden_states or (), stock.output.hidden_states or (), strict=True):
            assert_close(mine.detach(), theirs.detach(), 1e-5, "hidden_states")
        if call == "use_cache":
            assert ours.output.past_key_values.get_seq_length() == LENGTH


@pytest.mark.parametrize("way", WAYS, ids=repr)
def test_all_labels_ignored(way: Way) -> None:
    """Stock's mean over no token is NaN, and ruins the weights. Ours is a zero with a gradient."""
    inputs = batch(labels=torch.full((2, LENGTH), -100))
    assert own_call(build(), **inputs).loss.isnan()
    model = build()
    way.patch(model)
    ours = step(way.call, model, inputs)
    assert ours.loss == 0 and ours.grads
    assert not any(gradient.any() for gradient in ours.grads.values())


@pytest.mark.sampled
@pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS, ids=repr)
def test_gradient_checkpointing(way: Way, order: str, reentrant: bool) -> None:
    def surround(model: Any) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return model

    stock = step(own_call, surround(build()), batch())
    plain = step(own_call, build(), batch())
    assert len(stock.dtypes["0.self_attn.q_proj"]) == 2 * len(plain.dtypes["0.self_attn.q_proj"])  # it recomputes
    assert_same(step(way.call, ours_in(way, order, build(), surround, first=batch()), batch()), stock)


@pytest.mark.parametrize(
    ("way", "order"),
    [
        # A compiled model's forward is that of `test_compiled_forward`, which has all ways.
        exhaustive((way, order), f"{way.name}-{order}", (way, order) not in ((APPLY, "before"), (WAYS[-1], "after")))
        for way, order in [(APPLY, "before"), *((way, "after") for way in WAYS)]
    ],
)
def test_compiled_model(way: Way, order: str) -> None:
    counter = CompileCounterWithBackend("eager")

    def surround(model: Any) -> Any:
        return torch.compile(model, backend=counter)

    model = ours_in(way, order, build("shallow"), surround)
    ours = step(way.call, model, batch(), dtypes=False)
    assert counter.op_count > 25
    assert_same(ours, step(own_call, build("shallow"), batch(), dtypes=False))


# 11. A user who reads the logits of a training step

READERS: dict[str, Callable[[Any], Any]] = {
    "float-softmax": lambda logits: logits.float().softmax(-1),
    "argmax": lambda logits: logits.argmax(-1),
    "last": lambda logits: logits[:, -1],
    "times-one": lambda logits: logits * 1,
    "cat": lambda logits: torch.cat([logits]),
    "detach": lambda logits: logits.detach().clone(),
    "shape": lambda logits: torch.tensor(logits.shape),
    "size": lambda logits: torch.tensor([logits.size(-1), logits.ndim, logits.numel()]),
    "numpy": lambda logits: torch.from_numpy(logits.detach().numpy().copy()),
    "list": lambda logits: torch.tensor(logits.tolist()),
    "where": lambda logits: torch.where(logits > 0, logits, 0.0),
    "mutated": lambda logits: logits.clone().index_fill_(-1, torch.tensor(3), 0.0),
    "masked": lambda logits: logits[batch()["labels"] != -100],
    "log_softmax-gather": lambda logits: F.log_softmax(logits, -1).gather(-1, batch()["input_ids"][..., None]),
    "cross_entropy": lambda logits: F.cross_entropy(logits.flatten(0, 1), batch()["input_ids"].flatten()),
    "max": lambda logits: logits.max(-1).values,
    "topk": lambda logits: torch.topk(logits, 3).values,
    "einsum": lambda logits: torch.einsum("btv,btv->bt", logits, logits),
    "stack": lambda logits: torch.stack([logits, 2 * logits]),
    "iterate": lambda logits: torch.stack([row.sum() for row in logits]),
    "item": lambda logits: torch.tensor(logits[0, 0, 0].item()),
    "round-trip": lambda logits: logits.to(torch.float64).to(torch.bfloat16).float(),
    "ufunc": lambda logits: torch.add(logits, logits, alpha=2),
    "linear": lambda logits: F.linear(logits, torch.ones(2, VOCAB)),
    "transpose": lambda logits: logits.transpose(1, 2).contiguous(),
    "half-max": lambda logits: (logits - logits.max(-1, keepdim=True).values).exp().sum(-1).log(),
}


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize("reader", READERS)
def test_reading_logits(reader: str, family: str) -> None:
    """`output.logits` is None, or behaves like the logits, in the same output twice."""
    stock = build(family)(**batch(family)).logits
    model = build(family)
    APPLY.patch(model)
    output = model(**batch(family))
    if output.logits is None:
        assert output["loss"] is not None and "logits" not in output
        return
    expected = READERS[reader](stock)
    for _ in range(2):
        read = torch.stack([READERS[reader](output.logits)])[0]  # a view may still be a stand-in
        assert type(read) is Tensor and read.dtype == expected.dtype
        torch.testing.assert_close(read, expected, rtol=1e-4, atol=1e-4)
    output.loss.backward()  # reading has not consumed the loss
    reference = build(family)
    reference(**batch(family)).loss.backward()
    assert_close(model.lm_head.weight.grad, reference.lm_head.weight.grad, 5e-5, "lm_head")


@pytest.mark.sampled
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("surround", [wrapped(autocast()), accelerated], ids=["autocast", "accelerate"])
def test_reading_logits_of_mixed_precision(surround: Callable[[Any], Any], order: str) -> None:
    """They are read outside the wrapper, and were computed inside it: bfloat16's rounding of float32 would differ."""
    stock = surround(build())(**batch()).logits
    output = ours_in(APPLY, order, build(), surround, first=batch())(**batch())
    if output.logits is not None:
        assert output.logits.dtype == stock.dtype
        assert_close(output.logits.float().detach(), stock.float().detach(), 1e-6, "logits")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_gradient_through_logits_that_were_read(family: str) -> None:
    """A z-loss of the user, beside the model's loss."""

    def grads(model: Any) -> dict[str, Tensor] | None:
        output = model(**batch(family))
        if output.logits is None:
            return None
        return edge.gradients(model, output.loss + 0.1 * output.logits.float().logsumexp(-1).square().mean())

    model = build(family)
    APPLY.patch(model)
    ours, stock = grads(model), grads(build(family))
    assert stock is not None
    if ours is not None:
        assert ours.keys() == stock.keys()
        for name, gradient in stock.items():
            assert_close(ours[name], gradient, 5e-5, name)


@pytest.mark.parametrize("way", WAYS, ids=repr)
def test_a_call_without_labels_returns_logits(way: Way) -> None:
    """In training mode, with a gradient."""
    inputs = batch(labels=None)
    model = build()
    way.patch(model)
    one_step(way, model)
    ours, stock = model(**inputs).logits, build()(**inputs).logits
    torch.testing.assert_close(torch.cat([ours]), stock.float(), rtol=1e-5, atol=1e-5)
    other = build()
    for each in (model, other):
        each(**inputs).logits.float().logsumexp(-1).mean().backward()
    assert_close(model.lm_head.weight.grad, other.lm_head.weight.grad, 1e-5, "lm_head")
    assert_close(model.model.norm.weight.grad, other.model.norm.weight.grad, 1e-5, "norm")


# 12. Other models of the class


def functional_gradient(model: Any) -> dict[str, Tensor]:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (), batch(use_cache=False)).loss

    return torch.func.grad(loss)(parameters)


def gradient_penalty(model: Any) -> dict[str, Tensor]:
    weights = [model.lm_head.weight, model.model.norm.weight, model.model.layers[0].mlp.down_proj.weight]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = model(**batch()).loss
        first = torch.autograd.grad(loss, weights, create_graph=True)
        return edge.gradients(model, loss + sum(x.square().sum() for x in first))


def vjp_gradient(model: Any) -> dict[str, Tensor]:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (), batch(use_cache=False)).loss

    value, tangent = torch.func.vjp(loss, parameters)
    return tangent(torch.ones_like(value))[0]


@pytest.mark.sampled
@pytest.mark.parametrize("way", [LAYERS, *WAYS], ids=repr)
@pytest.mark.parametrize("computed", [functional_gradient, gradient_penalty, vjp_gradient], ids=lambda f: f.__name__)
def test_an_unpatched_model_beside_a_patched_one(computed: Callable[[Any], dict[str, Tensor]], way: Way) -> None:
    gc.collect()  # a rotary function is patched until the last patched model is deleted
    other = build(seed=4)
    other.set_attn_implementation("eager")
    expected = computed(other)
    model = build()
    way.patch(model)
    one_step(way, model)
    ours = computed(other)
    one_step(way, model)
    assert ours.keys() == expected.keys() and len(expected) > 10
    for name, gradient in expected.items():
        assert_close(ours[name], gradient, 1e-6, name)


# 13. Chains of trainers in bfloat16

# Not Adam, which turns the rounding of small gradients into steps.
CHAIN = {
    "bf16": True,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "gradient_accumulation_steps": 1,
    "learning_rate": 0.2,
}
LOSSES = {
    "DPO": lambda: LigerFusedLinearDPOLoss(beta=0.1),
    "KTO": lambda: LigerFusedLinearKTOLoss(beta=0.1),
}
# Of equal policy and reference.
START = {"DPO": math.log(2), "KTO": 0.5}


def train(kind: str, ours: bool, steps: int = 4, config: dict[str, Any] | None = None, **arguments: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainers.build(Path(folder), kind, ours, {**CHAIN, "max_steps": steps, **(config or {})}, **arguments)
        trainer.train()
    return trainer


def logged(trainer: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@functools.cache
def stock_chain(kind: str) -> list[list[float]]:
    policy = tiny.model()
    losses = [logged(train("SFT", False, 2, {"learning_rate": 0.1}, model=policy))]
    for _ in range(2):
        losses.append(logged(train(kind, False, model=policy, ref_model=copy.deepcopy(policy))))
    return losses


def unchanged(trainer: Any, model: Any) -> Any:
    return model


def unwrapped_by_its_trainer(trainer: Any, model: Any) -> Any:
    return trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)


def detached(trainer: Any, model: Any) -> Any:
    detach_head(model)
    return model


@dataclass(frozen=True)
class Chain:
    """What is done to the model before its first trainer, between trainers, and how its reference is made."""

    name: str
    first: Callable[[Any], None] = lambda model: None
    between: Callable[[Any, Any], Any] = unchanged
    refer: Callable[[Any], Any] = copy.deepcopy
    with_loss: bool = False

    def __repr__(self) -> str:
        return self.name


CHAINS = [
    Chain("plain"),
    Chain("loss", with_loss=True),
    Chain("applied", first=edge.patch_all),
    Chain("attached", first=ATTACH.patch),
    Chain("detached", between=detached),
    Chain("unwrapped", between=unwrapped_by_its_trainer),
    Chain("create_reference_model", refer=lambda model: reference_of_trl(model)),
    Chain("AveragedModel", refer=averaged),
    Chain("applied-loss-detached", first=edge.patch_all, between=detached, with_loss=True),
]


def same_losses(ours: list[float], stock: list[float]) -> None:
    """In a second trainer of one model, stock TRL's policy runs in float32, so both differ by bfloat16's rounding."""
    assert ours == pytest.approx(stock, rel=0.025)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("chain", CHAINS, ids=repr)
def test_sft_then_preferences(chain: Chain, kind: str) -> None:
    """The reference is a copy of the trained model, and stays what it was: the loss moves as in stock, twice."""
    stock = stock_chain(kind)
    policy = tiny.model()
    chain.first(policy)
    trainer = train("SFT", True, 2, {"learning_rate": 0.1}, model=policy)
    same_losses(logged(trainer), stock[0])
    for expected in stock[1:]:
        policy = chain.between(trainer, policy)
        ref = chain.refer(policy)
        weights = {name: x.clone() for name, x in ref.state_dict().items()}
        loss = {"loss": LOSSES[kind]()} if chain.with_loss else {}
        trainer = train(kind, True, model=policy, ref_model=ref, **loss)
        losses = logged(trainer)
        assert losses[0] == pytest.approx(START[kind], abs=2e-3)
        assert max(abs(x - START[kind]) for x in losses) > 0.05
        same_losses(losses, expected)
        rewards = [value for name in ("rewards/chosen", "rewards/rejected") for value in logged(trainer, name)]
        assert max(map(abs, rewards)) > 0.1
        for name, weight in weights.items():
            assert ref.state_dict()[name].equal(weight), name
        assert not policy.lm_head.weight.equal(ref.lm_head.weight)


# TRL's name of the second model, as many steps as no sampling tells apart, and the config.
SECOND: dict[str, tuple[str, int, dict[str, Any]]] = {
    "DPO": ("ref_model", 3, {}),
    "KTO": ("ref_model", 3, {}),
    "GKD": ("teacher_model", 3, {}),
    "GOLD": ("teacher_model", 3, {}),
    "Distillation": ("teacher_model", 1, {"beta": 0.5}),
    "OnlineDPO": ("ref_model", 1, {}),
}


def kinds_of(seen: dict[str, list[torch.dtype]]) -> dict[str, set[torch.dtype]]:
    return {name: set(dtypes) for name, dtypes in seen.items()}


@pytest.mark.sampled
@pytest.mark.parametrize("history", ["new", "trained"])
@pytest.mark.parametrize("kind", SECOND)
def test_dtypes_of_a_second_model(kind: str, history: str) -> None:
    """A reference or teacher runs in bfloat16, as in stock, with its own weights; also a copy of the trained student.

    Stock's teacher of a copy of TRL's trained model would run the weights of the student, so stock gets new models.
    """
    name, steps, config = SECOND[kind]

    def models() -> tuple[Any, Any]:
        student = tiny.model()
        if history == "trained":
            train("SFT", True, 2, {"learning_rate": 0.1}, model=student)
            return student, copy.deepcopy(student)
        return student, tiny.model(seed=2)

    def run(ours: bool, student: Any, second: Any) -> tuple[list[float], Any, Any]:
        torch.manual_seed(0)
        with edge.dtypes_of(second) as seen, edge.dtypes_of(student) as of_student:
            trainer = train(kind, ours, steps, config, model=student, **{name: second})
        return logged(trainer), kinds_of(seen), kinds_of(of_student)

    student, second = models()
    new = []
    for model in (student, second):
        new.append(tiny.model())
        new[-1].load_state_dict(model.state_dict())
    stock_losses, stock_second, stock_student = run(False, *new)
    losses, ours_second, ours_student = run(True, student, second)
    # Stock's `DistillationTrainer` calls the backbone around accelerate's wrapper, and so projects in float32. So do
    # stock's DPO and KTO in the second trainer of a model, which accelerate does not prepare again.
    if kind != "Distillation" and (kind not in LOSSES or history == "new"):
        assert torch.bfloat16 in stock_second["0.mlp.down_proj"] and torch.bfloat16 in stock_student["0.mlp.down_proj"]
        assert ours_second == stock_second
        assert ours_student == stock_student
    assert losses == pytest.approx(stock_losses, rel=0.025, abs=2e-3)


@pytest.mark.parametrize("kind", ["GKD", "GOLD"])
def test_a_copy_of_the_student_teaches(kind: str) -> None:
    """The loss against a copy starts at zero, and grows once the student has been moved away."""
    student = tiny.model()
    train("SFT", True, 2, {"learning_rate": 0.1}, model=student)
    teacher = copy.deepcopy(student)
    equal = logged(train(kind, True, 1, {"learning_rate": 0.0}, model=student, teacher_model=teacher))
    assert equal == pytest.approx([0.0], abs=1e-3)
    perturb(student)
    moved = tiny.model()
    moved.load_state_dict(student.state_dict())
    still = tiny.model()
    still.load_state_dict(teacher.state_dict())
    losses = logged(train(kind, True, 2, model=student, teacher_model=teacher))
    assert losses[0] > 0.01
    assert losses == pytest.approx(logged(train(kind, False, 2, model=moved, teacher_model=still)), rel=0.025)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GKD"])
def test_a_copy_of_a_trained_model_generates(kind: str) -> None:
    """Stock TRL's copy generates with the weights of the original, so it is compared with a new model."""
    model = tiny.model()
    name = SECOND[kind][0] if kind in SECOND else None
    train(kind, True, 2, model=model, **({name: tiny.model(seed=2)} if name else {}))
    twin = copy.deepcopy(model)
    perturb(twin)
    expected = tiny.model()
    expected.load_state_dict(twin.state_dict())
    prompt = torch.tensor([[5, 6, 7, 8]])
    greedy = {"max_new_tokens": 6, "do_sample": False}
    for each in (model, twin, expected):
        each.eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert twin.generate(prompt, **greedy).equal(expected.generate(prompt, **greedy))
        assert not twin.generate(prompt, **greedy).equal(model.generate(prompt, **greedy))


# 14. A reference with a forward of its own


def own_autocast(policy: Any) -> Any:
    ref = tiny.model(seed=2)
    ref.forward = torch.autocast("cpu", torch.bfloat16)(ref.forward)
    return ref


def own_partial(policy: Any) -> Any:
    ref = tiny.model(seed=2)
    ref.forward = functools.partial(ref.forward)
    return ref


def wrapped_copy(policy: Any) -> Any:
    ref = copy.deepcopy(policy)
    policy.forward = torch.autocast("cpu", torch.bfloat16)(policy.forward)
    return ref


@pytest.mark.sampled
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(
    "refer", [own_autocast, own_partial, wrapped_copy, copy.deepcopy], ids=["autocast", "partial", "wrapped", "copy"]
)
def test_a_reference_of_its_own(refer: Callable[[Any], Any], kind: str, tmp_path: Path) -> None:
    policy = tiny.model()
    ref = refer(policy)
    trainer = trainers.build(tmp_path, kind, True, model=policy, ref_model=ref)
    assert trainer.ref_model is ref


# 15. Remote code

CONFIGURATION = """
from transformers import LlamaConfig


class EdgeConfig(LlamaConfig):
    model_type = "edge_llama"
"""
MODELS = {
    "own-forward": """
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_edge import EdgeConfig


class EdgeForCausalLM(LlamaForCausalLM):
    config_class = EdgeConfig

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        logits = self.lm_head(hidden).float() * 0.5
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
""",
    "subclass": """
from transformers import LlamaForCausalLM

from .configuration_edge import EdgeConfig


class EdgeForCausalLM(LlamaForCausalLM):
    config_class = EdgeConfig
""",
}
LOADED = """
import os, sys, warnings
checkpoint, modules, saved, vocab, tests = sys.argv[1:]
os.environ["HF_MODULES_CACHE"] = modules
import torch
torch.set_num_threads(1)
sys.path.insert(0, tests)
from spies import Results
from transformers import AutoConfig, AutoModelForCausalLM
from liger_chunked import AutoLigerKernelForCausalLM

remote = {"trust_remote_code": True}
ids = torch.randint(10, 100, (2, 12), generator=torch.Generator().manual_seed(0))


class Logits(Results):
    rows = 0

    def see(self, x):
        if x.numel() % int(vocab) == 0 and x.numel() // int(vocab) != 32:
            self.rows = max(self.rows, x.numel() // int(vocab))


def step(model):
    with Logits() as logits:
        loss = model.train()(ids, labels=ids).loss
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients, logits.rows


def assert_same(ours, stock):
    loss, gradients, rows = step(ours)
    exact, exact_gradients, exact_rows = step(stock)
    torch.testing.assert_close(loss, exact, rtol=1e-5, atol=0)
    assert gradients.keys() == exact_gradients.keys()
    for name, gradient in exact_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-5)
    assert rows <= 8 < 24 <= exact_rows, (rows, exact_rows)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(ids).logits, stock.eval()(ids).logits, rtol=1e-4, atol=1e-4)


budget = {"logits_budget": 4 * 4 * int(vocab)}
stock = AutoModelForCausalLM.from_pretrained(checkpoint, **remote)
ours = AutoLigerKernelForCausalLM.from_pretrained(checkpoint, **remote, **budget)
assert type(ours).__name__ == "EdgeForCausalLM" and "edge" in type(ours).__module__
assert_same(ours, stock)

ours.save_pretrained(saved)
assert_same(AutoLigerKernelForCausalLM.from_pretrained(saved, **remote, **budget), stock)
again = AutoModelForCausalLM.from_pretrained(saved, **remote)
assert type(again).__name__ == "EdgeForCausalLM"
torch.testing.assert_close(again(ids, labels=ids).loss, stock(ids, labels=ids).loss, rtol=1e-6, atol=0)
config = AutoConfig.from_pretrained(saved, **remote)
assert "AutoModelForCausalLM" in config.auto_map, config.auto_map

config = AutoConfig.from_pretrained(checkpoint, **remote)
built = AutoLigerKernelForCausalLM.from_config(config, **remote, **budget)
built.load_state_dict(stock.state_dict())
assert_same(built, stock)
# Stock's class is untouched: another model of it builds logits.
assert step(AutoModelForCausalLM.from_pretrained(checkpoint, **remote))[2] >= 24
print("done")
"""


@pytest.mark.parametrize("name", ["own-forward", pytest.param("subclass", marks=pytest.mark.exhaustive)])
def test_remote_code(name: str, tmp_path: Path, fresh_process: Any) -> None:
    """In a process that has imported nothing of it, by both Auto methods, and after saving."""
    checkpoint = tmp_path / "checkpoint"
    build().save_pretrained(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {
        "model_type": "edge_llama",
        "architectures": ["EdgeForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_edge.EdgeConfig",
            "AutoModelForCausalLM": "modeling_edge.EdgeForCausalLM",
        },
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "configuration_edge.py").write_text(CONFIGURATION)
    (checkpoint / "modeling_edge.py").write_text(MODELS[name])
    folders = (str(checkpoint), str(tmp_path / "modules"), str(tmp_path / "saved"))
    assert "done" in fresh_process.run(LOADED, *folders, str(VOCAB), str(Path(__file__).parents[1]))
