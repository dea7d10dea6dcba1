"""Labels counted when a forward starts: the loss is launched for their number, and no result depends on it.

A stub takes the CPU for a GPU, where the count is worth it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
from spies import flop_counter
from tiny import model as tiny_model
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration

from liger_chunked import LigerFusedLinearCrossEntropyLoss, linear_token_stats
from liger_chunked.deferred import labels as counting
from liger_chunked.engine import LikelyCount, likely_rows, select_rows
from liger_chunked.engine.head import HeadPass
from liger_chunked.integrations.transformers import apply_liger_kernel

survey_kernels: Any = importlib.import_module("liger_chunked.kernels.survey")  # the package has a function of that name

N, H, V = 12, 8, 19


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Take the CPU for a GPU. Records, in order, what is counted, read and projected."""
    events: list[str] = []
    survey, read, project = counting.survey, survey_kernels.Survey.read, HeadPass.project

    def counted(*args: Any) -> Any:
        events.append("count")
        return survey(*args)

    def reads(self: Any) -> Any:
        events.append("read")
        return read(self)

    def projects(self: HeadPass, *args: Any) -> Tensor:
        events.append("project")
        return project(self, *args)

    monkeypatch.setattr(counting, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(counting, "is_capturing", lambda: False)
    monkeypatch.setattr(counting, "survey", counted)
    monkeypatch.setattr(survey_kernels.Survey, "read", reads)
    monkeypatch.setattr(HeadPass, "project", projects)
    counting._PAYS.clear()
    yield events
    counting._PAYS.clear()


def batch(seed: int = 0, vocab: int = V) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(vocab, (2, N // 2), generator=generator)
    target[0, :2] = target[1, 4] = -100
    return {
        "weight": torch.randn(vocab, H, generator=generator, dtype=torch.float64).requires_grad_(),
        "input": torch.randn(2, N // 2, H, generator=generator, dtype=torch.float64).requires_grad_(),
        "target": target,
    }


def evaluated(loss_fn: Any, given: dict[str, Any], **more: Any) -> list[Tensor]:
    result = loss_fn(**given, **more)
    loss, metrics = result if isinstance(result, tuple) else (result, ())
    grads = torch.autograd.grad(loss.sum(), [given["weight"], given["input"]])
    return [loss.detach(), *grads, *(x for x in metrics if x is not None)]


def test_rows_of_a_right_count_are_those_of_the_target() -> None:
    target = batch()["target"]
    rows, was_right = likely_rows(target, -100, V, likely := LikelyCount(9))
    exact = select_rows(target, "token", -100, V)
    assert was_right() and not likely.was_wrong
    names = ("n_valid", "dense_shape", "sequence_length", "side", "groups", "split", "host_may_sync")
    assert [getattr(rows, name) for name in names] == [getattr(exact, name) for name in names]
    for name in ("target", "input_index", "dense_index"):
        assert torch.equal(getattr(rows, name), getattr(exact, name)), name
    assert rows.mask is not None and exact.mask is not None and torch.equal(rows.mask, exact.mask)


@pytest.mark.parametrize("n", [0, 8, 10, 12])
def test_rows_of_a_wrong_count_read_nothing_outside_of_tensors(n: int) -> None:
    target = batch()["target"]
    rows, was_right = likely_rows(target, -100, V, likely := LikelyCount(n))
    assert rows.target is not None and rows.target.shape == (n,)
    assert not n or (rows.target.min() >= 0 and rows.target.max() < V)
    if rows.input_index is not None and n:
        assert rows.input_index.min() >= 0 and rows.input_index.max() < N
    assert not was_right() and likely.was_wrong


@pytest.mark.parametrize("n", [9, 12])
@pytest.mark.parametrize("bad", [-7, V, 2**40])
def test_an_id_outside_the_vocabulary_raises_as_without_a_count(n: int, bad: int) -> None:
    given = batch()
    given["target"][1, 1] = bad
    with pytest.raises(ValueError, match=rf"target holds {bad}, expected ignore_index \(-100\) or an index"):
        LigerFusedLinearCrossEntropyLoss()(**given, n_valid=LikelyCount(n))  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [9, 0, 8, 10, 12, 13, -1])
@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, {}),
        ({"reduction": "sum"}, {}),
        ({}, {"num_items": 7.0}),
        ({"return_token_accuracy": True, "return_predicted_tokens": True}, {}),
        ({"logits_budget": 3 * V * 8}, {}),
        ({"reduction": "none"}, {}),
        ({"label_smoothing": 0.1, "ce_weight": torch.linspace(0.5, 1, V).double()}, {}),
        ({}, {"token_weights": torch.linspace(0, 1, N).double().view(2, -1)}),
    ],
    ids=["mean", "sum", "items", "metrics", "chunks", "none", "smoothing", "weights"],
)
def test_no_bit_of_a_loss_depends_on_the_count(settings: dict[str, Any], more: dict[str, Any], n: int) -> None:
    loss_fn = LigerFusedLinearCrossEntropyLoss(**settings)
    expected = evaluated(loss_fn, batch(), **more)
    found = evaluated(loss_fn, batch(), **more, n_valid=LikelyCount(n))
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("n", "rows"), [(9, 9), (12, 12 + 9), (0, 9)])
def test_only_a_wrong_count_costs_products(n: int, rows: int) -> None:
    with (counter := flop_counter()):
        evaluated(LigerFusedLinearCrossEntropyLoss(), batch(), n_valid=LikelyCount(n))
    assert counter.get_total_flops() == 3 * 2 * rows * H * V


def test_other_losses_refuse_such_a_count() -> None:
    with pytest.raises(TypeError, match="n_valid must be an int"):
        linear_token_stats(**batch(), n_valid=LikelyCount(9))  # type: ignore[arg-type]


Inputs = dict[str, Any]


def causal(seed: int = 0) -> Inputs:
    ids = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :4] = labels[1, 7] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: Any, given: Inputs) -> list[Tensor]:
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def patched(build: Callable[[], Any] = tiny_model) -> Any:
    model = build().double().train()
    apply_liger_kernel(model, rope=False, rms_norm=False, swiglu=False)
    return model


def assert_same_step(model: Any, given: Inputs, log: list[str]) -> None:
    """Assert that a step has the bits of one without a count. Leaves its own events in `log`."""
    with mock.patch.object(counting, "is_on_gpu", lambda x: False):
        expected = step(model, {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()})
    log.clear()
    found = step(model, given)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


UNCOUNTED, COUNTED = ["read", "project"], ["count", "read", "project", "read"]
AGAIN = ["count", "read", "project", "read", "read", "project"]
OPTIONS: dict[str, Callable[[Inputs], Inputs]] = {
    "labels": lambda given: given,
    "all labels": lambda given: {**given, "labels": given["input_ids"]},
    "no labels left": lambda given: {**given, "labels": torch.full_like(given["labels"], -100)},
    "num_items": lambda given: {**given, "num_items_in_batch": torch.tensor(5)},
    "ignore_index": lambda given: {**given, "labels": given["labels"].clamp(min=0), "ignore_index": 0},
    "shift_labels": lambda given: {**given, "shift_labels": given["labels"].roll(1, 1)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_step_is_launched_before_its_count_is_read(options: Callable[[Inputs], Inputs], log: list[str]) -> None:
    model = patched()
    for seed in range(3):
        given = options(causal(seed))
        assert_same_step(model, given, log)
        expected = UNCOUNTED if seed == 0 else COUNTED  # a first step shows that the loss takes a count
        if given["labels"].max() < 0:
            expected = [event for event in expected if event != "project"]
        assert log == expected


@pytest.mark.parametrize("seen", [1, 2])
def test_labels_that_change_during_the_forward(seen: int, log: list[str]) -> None:
    model = patched()
    for seed in range(seen):
        assert_same_step(model, causal(seed), log)
    given = causal(5)

    def ignore_more(*_: Any) -> None:
        given["labels"][1, :3] = -100

    hook = model.model.norm.register_forward_hook(ignore_more)
    with mock.patch.object(counting, "is_on_gpu", lambda x: False):
        expected = step(model, given)
    given = causal(5)
    log.clear()
    assert all(map(torch.equal, step(model, given), expected))
    assert log == AGAIN
    hook.remove()
    assert_same_step(model, causal(6), log)
    assert log == UNCOUNTED  # never again


def test_an_encoder_and_a_decoder_predict_all_labels(log: list[str]) -> None:
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 300, "dropout": 0.0}
    model = patched(lambda: BartForConditionalGeneration(BartConfig(**sizes, **heads)))
    assert_same_step(model, causal(0), log)
    assert_same_step(model, causal(1), log)
    assert log == COUNTED


def test_other_losses_of_a_forward_read_their_own_targets(log: list[str]) -> None:
    """As those of heads for later tokens."""
    model, others = patched(), causal(1)["labels"]

    def two_losses(logits: Any, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        flat = logits.view(-1, vocab_size)
        return sum(F.cross_entropy(flat, F.pad(x, (0, 1), value=-100)[..., 1:].reshape(-1)) for x in (labels, others))

    model.loss_function = two_losses
    assert_same_step(model, causal(0), log)
    assert_same_step(model, causal(0), log)
    assert log == [*COUNTED, *UNCOUNTED]


def test_a_count_that_no_loss_takes_is_read_before_its_memory_is_freed(log: list[str]) -> None:
    model = patched()
    step(model, causal())
    given = {**causal(), "skip_logits": False}  # real logits
    assert_same_step(model, given, log)
    assert log == ["count", "read"]
    assert_same_step(model, given, log)
    assert log == []


def test_an_error_in_the_forward_leaves_nothing_behind(log: list[str]) -> None:
    model = patched()
    step(model, causal())

    def fail(*_: Any) -> None:
        raise RuntimeError("in the forward")

    hook = model.model.norm.register_forward_hook(fail)
    log.clear()
    with pytest.raises(RuntimeError, match="in the forward"):
        model(**causal())
    assert log == ["count", "read"] and getattr(counting._CURRENT, "counted", None) is None
    hook.remove()
    assert_same_step(model, causal(), log)
    assert log == COUNTED


@pytest.mark.parametrize(
    "change",
    [
        lambda patch, given: given.update(labels=None),
        lambda patch, given: given.update(head_fn=lambda head, input: input.hidden_states.sum()),
        lambda patch, given: patch.setattr(counting, "is_on_gpu", lambda x: False),
        lambda patch, given: patch.setattr(counting, "is_capturing", lambda: True),
        lambda patch, given: patch.setattr(torch.compiler, "is_compiling", lambda: True),
    ],
    ids=["no labels", "head_fn", "on the host", "capture", "compile"],
)
def test_where_nothing_is_counted(change: Any, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched()
    for _ in range(2):
        step(model, causal())
    given: Inputs = causal()
    with monkeypatch.context() as patch:
        change(patch, given)
        log.clear()
        model(**given)
    assert "count" not in log


def test_nothing_is_counted_outside_of_training(log: list[str]) -> None:
    model = patched()
    for _ in range(2):
        step(model, causal())
    log.clear()
    model.eval()(**causal())
    assert log == []


def test_a_marked_survey_waits_for_its_event_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def record(self, stream: Any) -> None:
            done.append(f"recorded on {stream.name}")

        def synchronize(self) -> None:
            done.append("event")

    stream = SimpleNamespace(name="current", synchronize=lambda: done.append("stream"))
    monkeypatch.setattr(survey_kernels, "accelerator", SimpleNamespace(Event=Event))
    monkeypatch.setattr(survey_kernels, "current_stream", lambda device: stream)
    summary = torch.tensor([[[2]], [[3]], [[4]]])
    surveyed = survey_kernels.Survey(torch.ones(1, 2, dtype=torch.bool), summary, summary.clone())
    assert surveyed.read() == [[[2]], [[3]], [[4]]] and done == ["stream"]
    done.clear()
    assert surveyed.marked().read() == [[[2]], [[3]], [[4]]] and done == ["recorded on current", "event"]
    on_cpu = surveyed._replace(on_host=None)
    assert on_cpu.marked() is on_cpu


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize("n", [9, 0, 8, 10, 12])
    def test_no_bit_depends_on_the_count(self, n: int) -> None:
        given = {name: x.detach().to("cuda") for name, x in batch(vocab=4096).items()}
        for name in ("weight", "input"):
            given[name] = given[name].bfloat16().requires_grad_()
        expected = evaluated(LigerFusedLinearCrossEntropyLoss(), given)
        found = evaluated(LigerFusedLinearCrossEntropyLoss(), given, n_valid=LikelyCount(n))
        assert all(map(torch.equal, found, expected))

    def test_steps_of_a_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_model().to("cuda", torch.bfloat16).train()
        apply_liger_kernel(model)
        taken: list[Any] = []
        likely_count = counting.likely_count

        def counted(target: Tensor) -> Any:
            taken.append(likely_count(target))
            return taken[-1]

        monkeypatch.setattr("liger_chunked.deferred.logits.likely_count", counted)
        counting._PAYS.clear()

        def step_of(given: Inputs) -> list[Tensor]:
            model.zero_grad()
            loss = model(**given).loss
            loss.backward()
            # Gradients below the last norm pass through kernels of torch whose sums have no fixed order.
            return [loss.detach(), model.model.norm.weight.grad.clone()]

        for seed in range(3):
            given = {name: x.to("cuda") for name, x in causal(seed).items()}
            found = step_of(given)
            with mock.patch.object(counting, "is_on_gpu", lambda x: False):
                expected = step_of(given)
            assert all(map(torch.equal, found, expected))
        n = int((causal()["labels"][:, 1:] != -100).sum())
        assert [x and (x.n, x.was_wrong) for x in taken[::2]] == [None, (n, False), (n, False)]


def test_modules_are_kept_weakly(log: list[str]) -> None:
    class Once(nn.Module):
        pass

    with counting.counted(Once(), causal()["labels"], shifts=True):
        counting.likely_count(causal()["labels"].view(-1))
    assert counting._PAYS[Once] is True
