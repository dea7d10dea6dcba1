"""A model in training mode samples from real logits, and trains without logits before and after."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from fused import assert_fused
from tiny_models import VOCAB, build
from torch import Tensor, nn
from transformers import LogitsProcessor

from liger_chunked import (
    apply_liger_kernel,
    apply_liger_kernel_to_llama,
    attach_head,
    defer_logits,
    revert_liger_kernel,
)

IDS = torch.arange(1, 9).view(2, 4) % VOCAB


class Kinds(LogitsProcessor):
    """Records which tensors a sampler gets."""

    def __init__(self) -> None:
        self.found: list[type] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.found.append(type(scores))
        return scores


def sample(model: Any) -> tuple[Tensor, list[type]]:
    torch.manual_seed(0)
    kinds = Kinds()
    tokens = model.generate(
        IDS, attention_mask=torch.ones_like(IDS), do_sample=True, max_new_tokens=4, logits_processor=[kinds]
    )
    return tokens, kinds.found


def pickled(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")).train()


@pytest.mark.parametrize("made", [lambda model: model, copy.deepcopy, pickled, adapted])
def test_generate_in_training_mode(made: Callable[[Any], Any]) -> None:
    expected, _ = sample(build("LlamaForCausalLM"))
    model = build("LlamaForCausalLM")
    apply_liger_kernel(model)
    model = made(model)
    assert model.training
    tokens, kinds = sample(model)
    assert tokens.equal(expected)
    assert kinds == [Tensor] * 4
    assert_fused(model(IDS, labels=IDS))


def test_generate_of_a_patched_family() -> None:
    apply_liger_kernel_to_llama()
    try:
        model = build("LlamaForCausalLM")
        assert sample(model)[1] == [Tensor] * 4
        assert_fused(model(IDS, labels=IDS))
    finally:
        revert_liger_kernel("llama")


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_generate_of_a_head_alone(name: str) -> None:
    """The head knows no model: it sees that a call without a gradient has one position."""
    expected, _ = sample(build(name))
    model = build(name)
    with defer_logits(model.lm_head):
        tokens, kinds = sample(model)
        assert tokens.equal(expected)
        assert kinds == [Tensor] * 4
        assert_fused(model(IDS, labels=IDS))
        with torch.no_grad():
            assert_fused(model(IDS, labels=IDS))


def test_attached_head_defers_for_a_caller_in_generate() -> None:
    """A call with `head_fn` asks for deferral itself, also from code that `generate` runs."""
    model = build("LlamaForCausalLM")
    attach_head(model)
    shapes = []

    class Scores(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            shapes.append(model(IDS, head_fn=lambda head, input: input.hidden_states).shape)
            return scores

    model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2, logits_processor=[Scores()])
    assert [shape[:2] for shape in shapes] == [(2, 4)] * 2
