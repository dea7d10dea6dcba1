"""Small models of every class, with random parameters, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor
from transformers import PreTrainedModel

from liger_chunked.integrations.transformers.survey import CAUSAL, HIDDEN, IMAGE_TEXT, VOCAB, small_model

__all__ = ["CAUSAL", "IMAGE_TEXT", "VOCAB", "batch", "build"]

LENGTH = 9


def build(name: str) -> PreTrainedModel:
    """Return a model in training mode, whose parameters are all random. Raises what transformers raises."""
    model = small_model(name)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def batch(name: str) -> dict[str, Tensor]:
    """Return text, and what else a class cannot do without."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(10, 90, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0  # a model that ignores the mask attends to these
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {**arguments, **INPUTS.get(name, lambda arguments: {})(arguments)}


def _pixels(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _tokens(arguments: dict[str, Tensor], n: int) -> dict[str, Tensor]:
    """Make the first tokens of a text those of an image."""
    return {"input_ids": torch.cat([torch.full((2, n), VOCAB - 1), arguments["input_ids"][:, n:]], 1)}


def _images(arguments: dict[str, Tensor]) -> dict[str, Any]:
    return {"pixel_values": _pixels(2, 3, 32, 32)}


# Further arguments, made from those of a text.
INPUTS: dict[str, Callable[[dict[str, Tensor]], dict[str, Any]]] = {
    "Blip2ForConditionalGeneration": lambda arguments: {**_images(arguments), **_tokens(arguments, 2)},
    "BlipForConditionalGeneration": _images,
    "BltForCausalLM": lambda arguments: {"use_cache": False},
    "GitForCausalLM": _images,
    "IdeficsForVisionText2Text": lambda arguments: {
        "pixel_values": _pixels(2, 1, 3, 32, 32), "image_attention_mask": torch.ones(2, LENGTH, 1),
    },
    "InstructBlipForConditionalGeneration": lambda arguments: {
        **_images(arguments), **_tokens(arguments, 2), "qformer_input_ids": arguments["input_ids"],
    },
    "InstructBlipVideoForConditionalGeneration": lambda arguments: {
        "pixel_values": _pixels(2, 2, 3, 32, 32), **_tokens(arguments, 4), "qformer_input_ids": arguments["input_ids"],
    },
    "Kosmos2ForConditionalGeneration": lambda arguments: {
        "image_embeds": _pixels(2, 2, HIDDEN),
        "image_embeds_position_mask": (torch.arange(LENGTH) < 2).expand(2, LENGTH),
    },
    "Molmo2ForConditionalGeneration": lambda arguments: {"mm_token_type_ids": torch.zeros(2, LENGTH, dtype=torch.long)},
    "MusicgenForCausalLM": lambda arguments: {
        "input_ids": arguments["input_ids"].repeat_interleave(2, 0),
        "labels": arguments["labels"][..., None].expand(2, LENGTH, 2),
    },
    "PPFormulaNetForConditionalGeneration": _images,
    "Pix2StructForConditionalGeneration": lambda arguments: {
        "input_ids": None, "attention_mask": None, "flattened_patches": _pixels(2, 4, 2 + HIDDEN).abs(),
    },
    "UdopForConditionalGeneration": lambda arguments: {"bbox": torch.zeros(2, LENGTH, 4)},
    "VisionEncoderDecoderModel": lambda arguments: {**_images(arguments), "input_ids": None, "attention_mask": None},
}  # fmt: skip
INPUTS["MusicgenMelodyForCausalLM"] = INPUTS["MusicgenForCausalLM"]
