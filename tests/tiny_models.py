"""Small models of every class, with random parameters, and their batches."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from transformers import PreTrainedModel

from liger_chunked.integrations.transformers.small import LENGTH, VOCAB
from liger_chunked.integrations.transformers.small import inputs_of as batch
from liger_chunked.integrations.transformers.survey import CAUSAL, IMAGE_TEXT, small_model

__all__ = ["CAUSAL", "IMAGE_TEXT", "LENGTH", "VOCAB", "batch", "build"]


def build(name: str) -> PreTrainedModel:
    """Return a model in training mode, whose parameters are all random. Raises what transformers raises."""
    model = small_model(name)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model
