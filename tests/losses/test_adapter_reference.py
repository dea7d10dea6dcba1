"""A loss whose reference is the policy without its adapter: the value and gradients of the formula on logits.

The oracle's reference is the model as it was before PEFT.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from table import assert_same, relative_error
from test_lora_head import (
    PEFT_WARNINGS,
    dpo,
    dpo_of,
    gradients_of,
    labelled,
    logps_of,
    logps_on_logits,
    peft_model,
    tiny_llama,
)

from liger_chunked import attach_head

pytestmark = [PEFT_WARNINGS]


@dataclasses.dataclass(frozen=True)
class Case:
    """An adapter, and a change of the model before each step."""

    lora: dict[str, Any]
    tied: bool = False
    second: str = ""
    change: Callable[[Any], None] = lambda model: None


CASES = {
    "backbone": Case({"target_modules": ["q_proj"]}),
    "both": Case({}),
    "tied head": Case({}, tied=True),
    "tied embeddings": Case({"target_modules": ["q_proj", "embed_tokens"]}, tied=True),
    "both of tied": Case({"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}, tied=True),
    "saved head": Case({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tokens": Case({"trainable_token_indices": [3, 5, 9]}),
    "second of two": Case({}, second="added", change=lambda m: m.set_adapter("other")),
    "two at once": Case({}, second="used"),
    "merged": Case({}, change=lambda m: m.merge_adapter()),
}


def models(case: Case) -> tuple[Any, Any]:
    """Return a model with random adapters, and the model before PEFT."""
    config = {"tie_word_embeddings": case.tied}
    return peft_model(second=case.second, config=config, **case.lora), tiny_llama(**config).double()


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
    found = model(**batch, head_fn=functools.partial(dpo, budget=None, ref_logps=ref_logps))
    ours = gradients_of(model, found)

    # `disable_adapter` has unmerged the adapters: the oracle's gradient needs that too.
    expected = dpo_of(logps_on_logits(model, batch), expected_reference)
    assert relative_error(expected.detach(), dpo_of(policy, expected_reference).detach()) < 1e-9
    assert relative_error(found.detach(), expected.detach()) < 1e-9
    theirs = gradients_of(model, expected)
    assert theirs and ours.keys() == theirs.keys()
    assert_same(ours, theirs, 1e-9)


def test_another_adapter_as_reference():
    """As TRL's adapter "ref"."""
    model, _ = models(Case({}, second="added"))
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
