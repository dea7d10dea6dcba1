"""A patched model equals stock with wrappers, copies, adapters, hooks or replaced code, from before or after the patch.

Each row compares with the stock model in the same surroundings, and says if our step may build logits. What a head that
defers makes of logits, and of hooks on it, is tested without a model in `tests/deferred`.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edge_cases as edge
import peft
import pytest
import torch
import transformers
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


def test_the_recorder_sees_the_logits_of_stock() -> None:
    assert step(own_call, build(), batch()).rows == edge.N_TOKENS


# 1. One step in surroundings


def wrapped(*wrappers: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def surround(model: Any) -> Any:
        for wrapper in wrappers:
            model.forward = wrapper(model.forward)
        return model

    return surround


def autocast(enabled: bool = True) -> Callable[[Any], Any]:
    return lambda forward: torch.autocast("cpu", torch.bfloat16, enabled=enabled)(forward)


def accelerated(model: Any) -> Any:
    AcceleratorState._reset_state(True)  # a trainer's
    return Accelerator(mixed_precision="bf16", cpu=True).prepare(model)


def unwrapped(model: Any) -> Any:
    AcceleratorState._reset_state(True)
    return Accelerator(mixed_precision="bf16", cpu=True).unwrap_model(model, keep_fp32_wrapper=False)


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


def checkpointed(reentrant: bool) -> Callable[[Any], Any]:
    def surround(model: Any) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return model

    return surround


def loss_with_penalty(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """Calls transformers' loss, and reads the logits beside it."""
    loss = loss_utils.ForCausalLMLoss(logits, labels, vocab_size, **kwargs)
    return loss + 0.01 * logits.square().mean()


def rescaled(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    return loss_utils.ForCausalLMLoss(logits / 2, labels, vocab_size, **kwargs) * 3


def with_loss(function: Callable[..., Any]) -> Callable[[Any], Any]:
    def surround(model: Any) -> Any:
        model.loss_function = function
        return model

    return surround


def with_pre_hook(model: Any) -> Any:
    model.lm_head.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    return model


def with_class(cls: type) -> Callable[[Any], Any]:
    """Make a model of another class with the same weights."""

    def surround(model: Any) -> Any:
        model.__class__ = cls
        return model

    return surround


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


class CallsSuper(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super(CallsSuper, self).forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = 2 * output.loss
        return output
"""
SOURCELESS: dict[str, Any] = {"transformers": transformers, "CausalLMOutputWithPast": CausalLMOutputWithPast}
exec(SOURCE, SOURCELESS)


@dataclass(frozen=True)
class Row:
    """Surroundings of a model. `fused=None`: our step may build logits. `tolerance` is relative to stock's norms.

    `moves`: the loss is another than without them.
    """

    name: str
    surround: Callable[[Any], Any]
    tolerance: float = 1e-5
    fused: bool | None = True
    ways: tuple[Way, ...] = tuple(WAYS)
    orders: tuple[str, ...] = ORDERS
    moves: bool = False
    vocab: int = VOCAB

    def __repr__(self) -> str:
        return self.name


# A `head_fn` and TRL's trainers compute no loss of the model, to which a user could add.
OWN_LOSS: dict[str, Any] = {"ways": (APPLY,), "moves": True}
ROWS = [
    Row("autocast", wrapped(autocast()), BF16),
    Row("no_grad", wrapped(torch.no_grad())),
    Row("inference_mode", wrapped(torch.inference_mode())),
    Row("accelerate", accelerated, BF16),
    # The inner wrapper wins: nothing may run in bfloat16.
    Row("autocast-around-none", wrapped(autocast(False), autocast())),
    Row("accelerate-around-autocast", lambda model: accelerated(wrapped(autocast())(model)), BF16),
    Row("unwrapped", lambda model: unwrapped(accelerated(model))),
    Row("set_output_embeddings", seeded(biased_linear), moves=True),
    Row("other-weight", seeded(other_weight), moves=True),
    Row("resized", seeded(resized), vocab=137, moves=True),
    Row("add_adapter", seeded(adapter_added), moves=True),
    Row("lora", seeded(lora("q_proj", "lm_head")), moves=True),
    Row("lora-bias", seeded(lora("q_proj", "lm_head", lora_bias=True)), moves=True),
    Row("bias-lora", seeded(lambda model: lora("lm_head")(bias_assigned(model))), moves=True),
    Row("modules_to_save", seeded(lora("q_proj", modules_to_save=["lm_head"])), moves=True),
    # TRL counts the virtual tokens itself: `test_prompt_tuning` of tests/trl.
    Row("prompt-tuning", seeded(prompt_tuning), ways=(APPLY, ATTACH), moves=True),
    # CPT computes its own loss from the logits, so it may get them. A `head_fn` returns none.
    Row("cpt", seeded(cpt), fused=None, **OWN_LOSS),
    Row("adaption-prompt", seeded(adaption_prompt), moves=True),
    Row("checkpoints", checkpointed(False)),
    Row("reentrant-checkpoints", checkpointed(True)),
    Row("loss_with_penalty", with_loss(loss_with_penalty), fused=None, **OWN_LOSS),
    Row("rescaled-loss", with_loss(rescaled), fused=None, **OWN_LOSS),
    Row("pre-hook", with_pre_hook, ways=(APPLY, ATTACH), moves=True),
    # Not in a trainer: TRL's fused head calls no forward of a class.
    Row("ReadsItsHead", with_class(ReadsItsHead), ways=(APPLY, ATTACH), orders=("before",)),
    Row("ComputesItsLoss", with_class(ComputesItsLoss), ways=(APPLY, ATTACH), orders=("before",)),
    Row("WithoutSource", with_class(SOURCELESS["WithoutSource"]), ways=(APPLY, ATTACH), orders=("before",), moves=True),
    Row("CallsSuper", with_class(SOURCELESS["CallsSuper"]), orders=("before",), **OWN_LOSS),
]


def cells() -> Any:
    """Return one test for each way and order of each row. Without `--exhaustive`, orders alternate."""
    found = []
    for i, row in enumerate(ROWS):
        for j, way in enumerate(row.ways):
            for k, order in enumerate(row.orders):
                marked = (i + j + k) % len(row.orders) != 0
                found.append(exhaustive((row, way, order), f"{row.name}-{way.name}-{order}", marked))
    return pytest.mark.parametrize(("row", "way", "order"), found)


@cells()
def test_surroundings(row: Row, way: Way, order: str) -> None:
    stock_model = row.surround(build()).train()
    stock = step(own_call, stock_model, batch(), vocab=row.vocab)
    assert not row.moves or abs(stock.loss - build()(**batch()).loss) > 1e-3
    model = ours_in(way, order, build(), row.surround, first=batch() if row.moves else None).train()
    ours = step(way.call, model, batch(), vocab=row.vocab)
    assert_same(ours, stock, row.tolerance, row.fused)
    if row.tolerance == BF16:
        assert torch.bfloat16 in ours.dtypes["0.mlp.down_proj"]
        return
    with torch.no_grad():
        expected, evaluated = (m.eval()(**batch()) for m in (stock_model, model))
    assert_close(evaluated.logits, expected.logits, row.tolerance, "logits")
    assert_close(evaluated.loss, expected.loss, row.tolerance, "loss in evaluation")


COMPILED = [
    exhaustive((whole, way, order), f"{'model' if whole else 'forward'}-{way.name}-{order}", (way, order) not in few)
    for whole, few in ((True, ((APPLY, "before"), (TRAINER, "after"))), (False, ((TRAINER, "before"),)))
    for way in WAYS
    for order in ORDERS
    if order == "after" or way is APPLY or not whole
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("whole", "way", "order"), COMPILED)
def test_compiled(whole: bool, way: Way, order: str) -> None:
    """Without hooks on the layers, which would split the graphs. The second step, with its recorder, runs eagerly."""
    counter = CompileCounterWithBackend("eager")

    def surround(model: Any) -> Any:
        if whole:
            return torch.compile(model, backend=counter)
        return wrapped(lambda forward: torch.compile(forward, backend=counter))(model)

    model = ours_in(way, order, build("shallow"), surround)
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


COPIERS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "AveragedModel": averaged,
    "create_reference_model": reference_of_trl,
    "pickle": pickled,
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


def beside_layers(way: Way, model: Any) -> Any:
    LAYERS.patch(model)
    return plain_history(ATTACH if way is APPLY else way, one_step(LAYERS, model))


def accelerate_after(way: Way, model: Any) -> Any:
    return one_step(way, accelerated(plain_history(way, model)))


def accelerate_before(way: Way, model: Any) -> Any:
    model = accelerated(model)
    way.patch(model)
    return one_step(way, model)


# accelerate refuses to pickle a prepared model, and create_reference_model copies it.
NO_PICKLE = ("deepcopy", "AveragedModel", "create_reference_model")
HISTORIES = [
    History("step", plain_history),
    History("beside-layers", beside_layers),
    History("accelerate-after", accelerate_after, accelerated, BF16, NO_PICKLE),
    History("accelerate-before", accelerate_before, accelerated, BF16, NO_PICKLE),
    History("accelerate-before-unwrapped", lambda way, model: unwrapped(accelerate_before(way, model))),
]


def like(model: nn.Module) -> Any:
    """Return a stock model with the weights of `model`."""
    stock = build()
    stock.load_state_dict({name: x.detach() for name, x in model.state_dict().items()})
    return stock


@pytest.mark.few(1)
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


# Not here: copies of a model with an own wrapper, such as `model.forward = torch.autocast(...)(model.forward)`. A
# function is not copied, so stock's copy runs the weights of the original.


# 3. Code that the user replaces


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
REPLACED = [
    exhaustive((name, way, order), f"{name}-{way}-{order}", (i + j + k) % 2 != 0)
    for i, name in enumerate(CLASSES)
    for j, way in enumerate((LAYERS, APPLY))
    for k, order in enumerate(ORDERS)
]


@pytest.mark.few(1)
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


# 4. Arguments of a call


def last_labels(n: int) -> Tensor:
    return batch()["labels"][:, -n:]


# The first row of ids is two sequences, one after another: no mask says so, only the positions.
PACKED = torch.stack([torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]), torch.arange(LENGTH)])
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
    "packed": {"attention_mask": None, "position_ids": PACKED, "use_cache": False},
    "ignored": {"labels": torch.full((2, LENGTH), -100), "num_items_in_batch": 5},
    "no-mask": {"attention_mask": None},
    "hidden_states": {"output_hidden_states": True},
    "one-label": {"labels": torch.full((2, LENGTH), -100).index_fill(1, torch.tensor([LENGTH - 1]), 17)},
}
# TRL's fused head takes `shift_labels` alone, shifts labels of the kept positions like the model, but drops the last.
NOT_OF_TRL = ("use_cache", "hidden_states", "logits_to_keep", "logits_to_keep-positions")


@pytest.mark.few(2)
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
    if call == "packed":
        joined = step(own_call, build(), {**inputs, "position_ids": None})
        assert abs(stock.loss - joined.loss) > 1e-3  # the positions matter
    if way is APPLY:
        for name in ("past_key_values", "hidden_states"):
            assert (getattr(ours.output, name) is None) == (getattr(stock.output, name) is None), name
        for mine, theirs in zip(ours.output.hidden_states or (), stock.output.hidden_states or (), strict=True):
            assert_close(mine.detach(), theirs.detach(), 1e-5, "hidden_states")
        if call == "use_cache":
            assert ours.output.past_key_values.get_seq_length() == LENGTH


@pytest.mark.few(1)
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


# 5. Remote code

REMOTE = {
    "configuration_edge.py": """
from transformers import LlamaConfig


class EdgeConfig(LlamaConfig):
    model_type = "edge_llama"
""",
    "modeling_edge.py": """
from transformers import LlamaForCausalLM

from .configuration_edge import EdgeConfig


class EdgeForCausalLM(LlamaForCausalLM):
    config_class = EdgeConfig

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids=input_ids)[0]).float() * 0.5
        loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return {"loss": loss, "logits": logits}
""",
}
LOADED = """
import os, sys
checkpoint, os.environ["HF_MODULES_CACHE"], saved, tests = sys.argv[1:]
import torch
sys.path.insert(0, tests)
from fused import is_deferred
from transformers import AutoConfig, AutoModelForCausalLM
from liger_chunked import AutoLigerKernelForCausalLM

ids = torch.randint(10, 100, (2, 12), generator=torch.Generator().manual_seed(0))

def step(auto, path):
    model = auto.from_pretrained(path, trust_remote_code=True).train()
    output = model(ids, labels=ids)
    output["loss"].backward()
    return model, output, {name: p.grad for name, p in model.named_parameters()}

def assert_same(found, exact):
    torch.testing.assert_close(found[1]["loss"], exact[1]["loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[2], exact[2], rtol=1e-3, atol=1e-5)
    assert is_deferred(found[1]["logits"]) and not is_deferred(exact[1]["logits"])

stock, ours = (step(auto, checkpoint) for auto in (AutoModelForCausalLM, AutoLigerKernelForCausalLM))
assert type(ours[0]).__name__ == "EdgeForCausalLM" and "edge" in type(ours[0]).__module__
assert_same(ours, stock)
ours[0].save_pretrained(saved)
assert "AutoModelForCausalLM" in AutoConfig.from_pretrained(saved, trust_remote_code=True).auto_map
assert_same(step(AutoLigerKernelForCausalLM, saved), step(AutoModelForCausalLM, saved))  # whose class is stock's
"""


@pytest.mark.slow
def test_remote_code(tmp_path: Path, fresh_process: Any) -> None:
    """In a process that has imported nothing of it, and after saving."""
    checkpoint = tmp_path / "checkpoint"
    build().save_pretrained(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    autos = {"AutoConfig": "configuration_edge.EdgeConfig", "AutoModelForCausalLM": "modeling_edge.EdgeForCausalLM"}
    config |= {"model_type": "edge_llama", "architectures": ["EdgeForCausalLM"], "auto_map": autos}
    (checkpoint / "config.json").write_text(json.dumps(config))
    for name, code in REMOTE.items():
        (checkpoint / name).write_text(code)
    folders = (checkpoint, tmp_path / "modules", tmp_path / "saved", Path(__file__).parents[1])
    fresh_process.run(LOADED, *map(str, folders))
