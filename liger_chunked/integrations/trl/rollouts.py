"""Converts the batches of trainers that sample completions to model inputs and labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_OF_THE_MODEL = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


def model_inputs_and_labels(inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Return the model's keyword arguments for prompts (B, P) and completions (B, C), and labels (B, P + C), not
    shifted.

    Labels are -100 except at completion tokens that the model, and not a tool, has written.
    """
    completion_mask = inputs["completion_mask"]
    written = completion_mask * inputs.get("tool_mask", 1)
    input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    not_written = torch.cat([torch.zeros_like(inputs["prompt_mask"]), written], dim=1) == 0
    model_inputs = {
        "input_ids": input_ids,
        "attention_mask": torch.cat([inputs["prompt_mask"], completion_mask], dim=1),
        **{name: inputs[name] for name in _OF_THE_MODEL if name in inputs},
    }
    return model_inputs, input_ids.masked_fill(not_written, -100)
