"""Evaluation defers as training does: no gradient, no logits, unless code reads them; `generate` gets real ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
from fused import assert_fused, is_deferred, real
from spies import Memory
from tiny_models import VOCAB, build
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.generation import LogitsProcessor

from liger_chunked import apply_liger_kernel, attach_head, defer_logits, detach_head, revert_liger_kernel

pytestmark = [pytest.mark.ordinary_memory, pytest.mark.filterwarnings("ignore")]

N, T = 4, 12
LOGITS = N * T * VOCAB * 4  # bytes of a batch's logits
IDS = torch.randint(10, 90, (2 * N, T), generator=torch.Generator().manual_seed(0))
ROWS = 3 * VOCAB * 4  # budget of three rows


def patched(name: str = "LlamaForCausalLM", **options: Any) -> Any:
    model = build(name)
    apply_liger_kernel(model, logits_budget=ROWS, **options)
    return model


def largest_logits(model: Any, run: Callable[[], Any]) -> tuple[Any, int]:
    """Return what a call returns, and the bytes of the largest tensor that it made."""
    with Memory() as memory:
        memory.expect(*model.parameters())
        result = run()
    return result, memory.largest


class Batches(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": IDS[i], "labels": IDS[i].masked_fill(torch.arange(T) < 5, -100)}


def trainer_of(model: Any, tmp_path: Any, prediction_loss_only: bool = False, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        tmp_path, per_device_eval_batch_size=N, report_to=[], use_cpu=True, prediction_loss_only=prediction_loss_only
    )
    return Trainer(model, arguments, eval_dataset=Batches(), **options)


def evaluated(model: Any, tmp_path: Any, **options: Any) -> tuple[Any, int]:
    return largest_logits(model, trainer_of(model, tmp_path, **options).evaluate)


def test_evaluate_builds_no_logits(tmp_path):
    (stock, of_stock), (ours, largest) = (
        evaluated(model, tmp_path) for model in (build("LlamaForCausalLM"), patched())
    )
    assert ours["eval_loss"] == pytest.approx(stock["eval_loss"], rel=1e-5)
    assert of_stock >= LOGITS and largest < LOGITS / 2


def accuracy(prediction: Any) -> dict[str, float]:
    ids, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((ids == labels)[labels != -100].mean())}


def test_a_metric_of_the_argmax_builds_no_logits(tmp_path):
    options = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": lambda z, y: z.argmax(-1)}
    models = build("LlamaForCausalLM"), patched()
    (stock, of_stock), (ours, largest) = (evaluated(model, tmp_path, **options) for model in models)
    for name in ("eval_loss", "eval_accuracy"):
        assert ours[name] == pytest.approx(stock[name], rel=1e-5)
    assert of_stock >= LOGITS and largest < LOGITS / 2


def test_predict(tmp_path):
    """It returns logits, unless the trainer's arguments ask for the loss alone."""
    stock, ours = (trainer_of(model, tmp_path).predict(Batches()) for model in (build("LlamaForCausalLM"), patched()))
    torch.testing.assert_close(*(torch.tensor(x.predictions) for x in (ours, stock)), rtol=1e-4, atol=1e-5)
    trainer = trainer_of(patched(), tmp_path, prediction_loss_only=True)
    alone, largest = largest_logits(trainer.model, lambda: trainer.predict(Batches()))
    assert alone.metrics["test_loss"] == pytest.approx(stock.metrics["test_loss"], rel=1e-5)
    assert alone.predictions is None and largest < LOGITS / 2


MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_without_gradients(name, mode, training):
    stock, model, ids = build(name).train(training), patched(name).train(training), IDS[:N]
    with MODES[mode]():
        expected = stock(ids, labels=ids)
        output, largest = largest_logits(model, lambda: model(ids, labels=ids))
        assert_fused(output)
        assert largest < LOGITS / 2
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=0)
        z, exact = model(ids).logits, expected.logits
        logps, largest = largest_logits(model, lambda: z.log_softmax(-1).gather(-1, ids[..., None]))
        best = z.argmax(-1)
        assert is_deferred(z) and largest < LOGITS / 2
        torch.testing.assert_close(logps, exact.log_softmax(-1).gather(-1, ids[..., None]), rtol=1e-4, atol=1e-4)
        assert best.equal(exact.argmax(-1))
        torch.testing.assert_close(z.topk(3, -1).values, exact.topk(3, -1).values, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.cat([z, z]), torch.cat([exact, exact]), rtol=1e-4, atol=1e-4)
    assert not z.requires_grad and z.is_inference() == (mode == "inference_mode")
    torch.testing.assert_close(torch.tensor(z.numpy()), torch.tensor(exact.numpy()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("of", ["model", "head"])
def test_the_switch(of):
    if of == "model":
        model = patched(defer_in_evaluation=False)
    else:
        model = build("LlamaForCausalLM")
        defer_logits(model.lm_head, defer_in_evaluation=False)
    with torch.no_grad():
        assert type(model.eval()(IDS[:N], labels=IDS[:N]).logits) is Tensor
        assert is_deferred(model.train()(IDS[:N]).logits)
    assert_fused(model(IDS[:N], labels=IDS[:N]))
    for call in (
        lambda: apply_liger_kernel(model, defer_in_evaluation=None),
        lambda: defer_logits(model.lm_head, defer_in_evaluation=1),
    ):
        with pytest.raises(TypeError, match="defer_in_evaluation must be True or False, got "):
            call()


def test_one_call_and_a_head_alone():
    model = patched().eval()
    attach_head(model)
    with torch.no_grad():
        assert type(model(IDS[:N], skip_logits=False).logits) is Tensor
        revert_liger_kernel(model)
        assert type(model(IDS[:N]).logits) is Tensor, "attach_head alone defers nothing"
        detach_head(model)
        with defer_logits(model.lm_head):
            z = model(IDS[:N]).logits
            assert is_deferred(z)
            F.cross_entropy(z[:, :-1].flatten(0, 1), IDS[:N, 1:].flatten())
            assert is_deferred(z)


# generate


class Kinds(LogitsProcessor):
    """Records which tensors a sampler gets."""

    def __init__(self) -> None:
        self.found: set[type] = set()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.found.add(type(scores))
        return scores


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "without a cache": {"use_cache": False},
    "beams": {"num_beams": 2},
    "several positions": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("whole", ["model", "head"])
def test_generate(whole, way, training, caplog):
    """All heads of `generate` compute their logits: no line in the log, no stand-in among the scores."""
    if way == "several positions":
        ids = torch.tensor([[11, 12, 13, 14, 11, 12, 13]])
    else:
        ids = IDS[:2, :5]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, **WAYS[way]}
    torch.manual_seed(0)
    expected = build("LlamaForCausalLM").train(training).generate(ids, **options)
    model = patched() if whole == "model" else build("LlamaForCausalLM")
    if whole == "head":
        defer_logits(model.lm_head)
    kinds = Kinds()
    with caplog.at_level(logging.INFO, "liger_chunked"):
        torch.manual_seed(0)
        tokens = model.train(training).generate(ids, logits_processor=[kinds], **options)
    assert tokens.equal(expected) and kinds.found == {Tensor}
    assert not [record for record in caplog.records if record.name == "liger_chunked"]


def test_generate_inside_a_training_step(caplog):
    """As on-policy trainers do: a rollout in training mode, the old policy without gradients, then the step."""
    model = patched()
    with caplog.at_level(logging.INFO, "liger_chunked"):
        tokens = model.generate(
            IDS[:2, :5], attention_mask=torch.ones_like(IDS[:2, :5]), max_new_tokens=4, do_sample=True
        )
        with torch.no_grad():
            old = logps_of(model, tokens)
        new = logps_of(model, tokens)
        (new - old).exp().mean().neg().backward()
    torch.testing.assert_close(old, new.detach(), rtol=1e-5, atol=1e-5)
    assert model.lm_head.weight.grad.norm() > 0
    # The log also says once what ran.
    assert not [record for record in caplog.records if "were computed" in record.getMessage()]


def logps_of(model: Any, tokens: Tensor) -> Tensor:
    z = model(tokens).logits[:, :-1]
    logps = z.log_softmax(-1).gather(-1, tokens[:, 1:, None])
    assert is_deferred(z)
    return logps


def test_compiled_evaluation_keeps_its_graph():
    """A head that defers breaks a graph, so compiled evaluation computes its logits."""
    model, ids = patched(rope=False, rms_norm=False, swiglu=False).eval(), IDS[:N]
    with torch.no_grad():
        expected = build("LlamaForCausalLM").eval()(ids).logits
        found = torch.compile(model, backend="eager", fullgraph=True)(ids).logits
    assert type(found) is Tensor
    torch.testing.assert_close(real(found), expected, rtol=1e-4, atol=1e-5)


# generate of copies, and of code that it runs


def test_attached_head_defers_for_a_caller_in_generate() -> None:
    """A call with `head_fn` asks for deferral itself, also from code that `generate` runs."""
    model, ids = build("LlamaForCausalLM"), IDS[:2, :4]
    attach_head(model)
    shapes = []

    class Scores(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            shapes.append(model(ids, head_fn=lambda head, input: input.hidden_states).shape)
            return scores

    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, logits_processor=[Scores()])
    assert [shape[:2] for shape in shapes] == [(2, 4)] * 2
