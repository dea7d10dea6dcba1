"""What surrounds a model (wrappers, copies, adapters, hooks, replaced code), before and after patching: equal to stock.

Each row compares with the stock model in the same surroundings, and says if our step may build logits.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import edge_cases as edge
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from edge_cases import (
    APPLY,
    ATTACH,
    BF16,
    TRAINER,
    WAYS,
    Way,
    assert_close,
    assert_same,
    batch,
    build,
    own_call,
    step,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

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
    reset()
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


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

    def __repr__(self) -> str:
        return self.name


def cells(rows: list[Row]) -> Any:
    found = [
        pytest.param(
            row, family, way, order, id="-".join((row.name, *([family] * (len(row.families) > 1)), way.name, order))
        )
        for row in rows
        for family in row.families
        for way in row.ways
        for order in row.orders
    ]
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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS, ids=repr)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
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
