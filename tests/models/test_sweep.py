"""Every causal and image-text-to-text class of transformers: a step without logits equals the stock step.

Four classes need logits, for a known reason. `make test` runs a sixteenth of the classes, which changes with the
version and with SWEEP_SEED; `--exhaustive` runs all.
"""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from fused import assert_real_logits, is_deferred
from packaging.version import Version
from sampling import SEED, sampled
from spies import Results
from tiny_models import CAUSAL, IMAGE_TEXT, VOCAB, batch, build
from torch import Tensor
from transformers import PreTrainedModel

from liger_chunked import linear_token_stats
from liger_chunked.integrations.transformers import apply_liger_kernel, attach_head

pytestmark = [pytest.mark.ordinary_memory, pytest.mark.filterwarnings("ignore")]

# What asks for logits, or why the head computes them. All other classes train without.
WITH_LOGITS: dict[str, str] = {
    "ChameleonForConditionalGeneration": "setitem at .*modeling_chameleon",
    "IdeficsForVisionText2Text": "lm_head is computed by .*IdeficsDecoupledLinear",
    "MusicgenForCausalLM": "lm_head is computed by .*ModuleList",
    "MusicgenMelodyForCausalLM": "lm_head is computed by .*ModuleList",
}

# Why transformers itself cannot build a class small, or take a step with it.
NOT_BUILT: dict[str, str] = {
    "DiffusionGemmaForBlockDiffusion": "computes no loss",
    "FastVlmForConditionalGeneration": "requires the timm library",
    "Gemma3nForConditionalGeneration": "requires the timm library",
    "Gemma4AssistantForCausalLM": "hidden_size_per_layer_input must be 0, got 256",
    "Gemma4UnifiedAssistantForCausalLM": "inputs_embeds and shared_kv_states cannot be None",
    "PI0ForConditionalGeneration": "missing 1 required positional argument: 'state'",
    "PerceptionLMForConditionalGeneration": "requires the timm library",
}

# BLT's patcher, a small model without a gradient, predicts each byte to cut patches.
PATCHER = {"BltForCausalLM"}

ROWS = 3  # the budget, in rows of logits

# The tables are those of this release. An earlier one fails to step more classes, which are skipped, and more may be
# refused.
EARLIER = Version(transformers.__version__) < Version("5.23")


def patched(model: PreTrainedModel) -> tuple[bool, str]:
    """Patch all that can be served. Return whether the head is, and why parts are not."""
    try:
        applied = apply_liger_kernel(model, logits_budget=ROWS * VOCAB * 4)
    except ValueError as nothing:
        return False, str(nothing)
    return "fused_linear_cross_entropy" in applied.replaced, str(applied)


class Logits(Results):
    """Keeps the shape of the largest tensor of logits, and no parameter's or gradient's."""

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        super().__init__()
        self.shapes = {tuple(shape) for p in model.parameters() for shape in (p.shape, p.shape[::-1])}
        self.flat = {tokens * VOCAB, (tokens - 2) * VOCAB}
        self.largest: tuple[int, ...] = (0,)

    def see(self, x: Tensor) -> None:
        logits = tuple(x.shape) not in self.shapes and (x.shape[-1:] == (VOCAB,) or x.numel() in self.flat)
        if logits and x.numel() > math.prod(self.largest):
            self.largest = tuple(x.shape)


def step(model: PreTrainedModel, arguments: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Step as Trainer does, which divides the loss by a number of items if the forward takes any keyword."""
    torch.manual_seed(0)
    kinds = {parameter.kind for parameter in inspect.signature(model.forward).parameters.values()}
    items = {"num_items_in_batch": torch.tensor(7)} if inspect.Parameter.VAR_KEYWORD in kinds else {}
    output = model(**arguments, **items)
    output.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return output, found


@pytest.fixture(autouse=True)
def seed() -> None:
    print(f"SWEEP_SEED={SEED}")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", sampled([name for name in CAUSAL + IMAGE_TEXT if name not in NOT_BUILT], parts=16))
def test_class(name):
    try:
        model, arguments = build(name), batch(name)
        stock, exact = step(model, arguments)
        assert all(gradient.isfinite().all() for gradient in exact.values()), "its gradients are not finite"
    except Exception as error:
        if not EARLIER:
            raise
        pytest.skip(f"transformers {transformers.__version__} cannot take a step: {error}")
    head_is_served, report = patched(model)
    with Logits(model, stock.logits.shape[:-1].numel()) as logits:
        ours, found = step(model, arguments)
    torch.testing.assert_close(ours.loss, stock.loss, rtol=1e-4, atol=0)
    is_fused = head_is_served and is_deferred(ours.logits)
    asked_by = getattr(ours.logits, "asked_by", None)
    assert is_fused == (name not in WITH_LOGITS) or EARLIER, f"{report}\n{asked_by}"
    if is_fused:
        assert math.prod(logits.largest) <= ROWS * VOCAB or name in PATCHER, f"logits of the shape {logits.largest}"
    else:
        assert re.search(WITH_LOGITS.get(name, "logits|lm_head"), f"{report}\n{asked_by}"), (report, asked_by)
        assert_real_logits(ours)
    assert found.keys() == exact.keys()
    largest = max(gradient.norm() for gradient in exact.values())
    for parameter, gradient in exact.items():
        error = (found[parameter] - gradient).norm()
        assert error <= 2e-3 * gradient.norm() + 1e-6 * largest, f"{parameter}: {error} of {gradient.norm()}"


# Their losses do not shift labels, or add something to the cross entropy.
OTHER_LOSS = (
    "BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM",
    "CpmAntForCausalLM", "MBartForCausalLM", "MarianForCausalLM", "MvpForCausalLM", "PLBartForCausalLM",
    "PPFormulaNetForConditionalGeneration", "PegasusForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM",
    "XLMWithLMHeadModel", "XLNetLMHeadModel",
)  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sampled(list(OTHER_LOSS), parts=4))
def test_attached_head_of_another_loss(name):
    """`head_fn` gets the head and its input, whatever the class's own loss is."""
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    model, arguments = build(name), batch(name)
    labels = arguments.pop("labels")
    with torch.no_grad():
        logps = model(**arguments).logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        attach_head(model)
        ours = model(**arguments, shift_labels=labels, head_fn=logps_of)
    torch.testing.assert_close(ours, logps.where(labels != -100, 0), rtol=1e-4, atol=1e-5)


def logps_of(head, input):
    options = input.options
    return linear_token_stats(
        head.weight,
        input.hidden_states,
        input.target,
        head.bias,
        softcap=options.softcap,
        logit_scale=options.logit_scale,
    ).logps


@pytest.mark.skipif(EARLIER, reason="the number is that of this release")
def test_nearly_all_classes_are_fused():
    """A class that leaves the sweep, or is served no more, does not go unnoticed."""
    assert len({*CAUSAL, *IMAGE_TEXT} - NOT_BUILT.keys() - WITH_LOGITS.keys()) >= 256


@pytest.mark.exhaustive
@pytest.mark.skipif(EARLIER, reason="the reasons are those of this release")
@pytest.mark.parametrize("name", [name for name in CAUSAL + IMAGE_TEXT if name in NOT_BUILT])
def test_not_built(name):
    with pytest.raises(Exception, match=NOT_BUILT[name]):
        output = build(name)(**batch(name))
        assert output.loss is not None, "computes no loss"
