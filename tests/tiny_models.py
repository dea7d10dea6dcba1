"""Small models of every class, with random parameters, and their batches."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from small_models import LENGTH, VOCAB, config_of
from small_models import inputs_of as batch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

__all__ = ["CAUSAL", "IMAGE_TEXT", "LENGTH", "VOCAB", "batch", "build", "small_model"]


def _names(mapping: dict[str, Any]) -> list[str]:
    values = [names if isinstance(names, (list, tuple)) else (names,) for names in mapping.values()]
    return sorted({name for names in values for name in names})


CAUSAL = _names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
IMAGE_TEXT = [name for name in _names(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) if name not in CAUSAL]


def small_model(name: str) -> PreTrainedModel:
    """Return a model in training mode. Raises what transformers raises."""
    cls = getattr(transformers, name)
    config = config_of(cls.config_class())
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return cls(config).train()


def build(name: str) -> PreTrainedModel:
    """Return a model in training mode, whose parameters are all random. Raises what transformers raises."""
    model = small_model(name)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model
