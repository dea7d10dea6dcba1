"""A loss whose reference is the policy without its adapter: the value and gradients of the formula on logits.

The oracle's reference is the model as it was before PEFT.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from model_zoo import BY_ID
from table import assert_same, relative_error
from test_lora_head import PEFT_WARNINGS, gradients_of, labelled, next_tokens
from torch import Tensor

from liger_chunked import (
    LigerFusedLinearDPOLoss,
    attach_head,
    linear_token_stats,
)

pytestmark = [PEFT_WARNINGS]

HEAD = ("q_proj", "lm_head")


@dataclasses.dataclass(frozen=True)
class Case:
    """An adapter, and a change of the model before each step."""

    lora: dict[str, Any]
    tied: bool = False
    second: bool = False
    change: Callable[[Any], None] = lambda model: None


CASES = {
    "backbone": Case({"target_modules": ["q_proj"]}),
    "both": Case({"target_modules": HEAD}),
    "tied head": Case({"target_modules": HEAD}, tied=True),
    "tied embeddings": Case({"target_modules": ["q_proj", "embed_tokens"]}, tied=True),
    "both of tied": Case({"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}, tied=True),
    "saved head": Case({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tokens": Case({"target_modules": HEAD, "trainable_token_indices": [3, 5, 9]}),
    "second of two": Case({"target_modules": HEAD}, second=True, change=lambda m: m.set_adapter("other")),
    "two at once": Case(
        {"target_modules": HEAD}, second=True, change=lambda m: m.base_model.set_adapter(["default", "other"])
    ),
    "merged": Case({"target_modules": HEAD}, change=lambda m: m.merge_adapter()),
}


def models(case: Case) -> tuple[Any, Any]:
    """Return a model with random adapters, and the model before PEFT."""
    tiny = BY_ID["llama"]
    tiny = dataclasses.replace(tiny, config={**tiny.config, "tie_word_embeddings": case.tied})
    base = tiny.build().double()
    original = copy.deepcopy(base)
    config = {"r": 3, "lora_alpha": 6, **case.lora}
    model = peft.get_peft_model(base, peft.LoraConfig(**config))
    if case.second:
        model.add_adapter("other", peft.LoraConfig(**config))
    model.double().train()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens_delta")):
                p.add_(0.1 * torch.randn_like(p))
    return model, original


def logps_on_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """(B, T) log-probabilities, zero where ignored."""
    target = next_tokens(batch["labels"])
    logps = model(input_ids=batch["input_ids"]).logits.log_softmax(-1)
    return logps.gather(-1, target.clamp(min=0)[..., None])[..., 0] * (target != -100)


def logps_of(head: Any, input: Any) -> Tensor:
    logps = linear_token_stats(head.weight, input.hidden_states, input.target, head.bias).logps
    assert logps is not None
    return logps


BETA = 0.3


def dpo(logps: Tensor, ref_logps: Tensor) -> Tensor:
    chosen, rejected = (logps - ref_logps).sum(1).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def fused(head: Any, input: Any, ref_logps: Tensor) -> Tensor:
    arguments = (head.weight, input.hidden_states, input.target)
    return LigerFusedLinearDPOLoss(beta=BETA)(*arguments, bias=head.bias, ref_logps=ref_logps)[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_model_before_peft(name):
    case, batch = CASES[name], labelled()
    model, original = models(case)
    case.change(model)
    policy = logps_on_logits(model, batch)
    with torch.no_grad():
        expected_reference = logps_on_logits(original, batch)
        assert (policy - expected_reference).abs().max() > 1e-2, "the adapter changes nothing"

    attach_head(model)
    with torch.no_grad(), model.disable_adapter():
        ref_logps = model(**batch, head_fn=logps_of)
    assert relative_error(ref_logps, expected_reference) < 1e-9
    found = model(**batch, head_fn=functools.partial(fused, ref_logps=ref_logps))
    ours = gradients_of(model, found)

    # `disable_adapter` has unmerged the adapters: the oracle's gradient needs that too.
    expected = dpo(logps_on_logits(model, batch), expected_reference)
    assert relative_error(expected.detach(), dpo(policy, expected_reference).detach()) < 1e-9
    assert relative_error(found.detach(), expected.detach()) < 1e-9
    theirs = gradients_of(model, expected)
    assert theirs and ours.keys() == theirs.keys()
    assert_same(ours, theirs, 1e-9)


def test_another_adapter_as_reference():
    """As TRL's adapter "ref"."""
    model, _ = models(Case({"target_modules": HEAD}, second=True))
    batch = labelled()
    model.set_adapter("other")
    with torch.no_grad():
        expected = logps_on_logits(model, batch)
        attach_head(model)
        assert relative_error(model(**batch, head_fn=logps_of), expected) < 1e-9
    model.set_adapter("default")
    policy = logps_on_logits(model, batch).detach()
    assert (policy - expected).abs().max() > 1e-2
    assert relative_error(model(**batch, head_fn=logps_of).detach(), policy) < 1e-9


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("tied", "tokens"), [(True, [3, 5]), (False, {"lm_head": [3, 5]})], ids=["tied", "of the head"]
)
def test_trained_tokens_of_the_head_are_refused(tied, tokens):
    model, _ = models(Case({"target_modules": ["q_proj"], "trainable_token_indices": tokens}, tied=tied))
    with pytest.raises(ValueError, match=r"TrainableTokensWrapper: .* Take lm_head out of trainable_token_indices"):
        attach_head(model)
