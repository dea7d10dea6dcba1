"""Models of known shapes with random weights, and context managers that patch kernels into them."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.harness import DEVICE, DTYPE, check_triton
from liger_chunked import apply_liger_kernel, revert_liger_kernel

# transformers renamed it, but every version that we support accepts the old name.
warnings.filterwarnings("ignore", r".*gradient_checkpointing.* is deprecated and will be removed in v6", FutureWarning)

_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_QWEN_2_5: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
}
_TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": (
        "llama",
        {
            **_LLAMA_3,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "llama-3.2-1b": (
        "llama",
        {
            **_LLAMA_3,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-0.5b": (
        "qwen2",
        {
            **_QWEN_2_5,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
        },
    ),
    "qwen2.5-1.5b": (
        "qwen2",
        {
            **_QWEN_2_5,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
        },
    ),
    "tiny-llama": ("llama", _TINY),
    "tiny-llama-tp": ("llama", {**_TINY, "num_key_value_heads": 2}),  # heads for two ranks
    "tiny-qwen2": ("qwen2", {**_TINY, "tie_word_embeddings": True}),
}


def build(name: str, seed: int = 0, checkpointing: bool = True) -> PreTrainedModel:
    """Build a model of `SHAPES` in training mode, directly on the device; the same seed gives the same weights."""
    family, sizes = SHAPES[name]
    config = AutoConfig.for_model(family, **copy.deepcopy(sizes))
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE, attn_implementation="sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def vocabulary(name: str) -> int:
    return SHAPES[name][1]["vocab_size"]


# Context managers that patch kernels into models and remove them again; `fused` includes the loss.


@contextmanager
def nobody(*models: PreTrainedModel, fused: bool) -> Iterator[None]:
    yield


@contextmanager
def ours(*models: PreTrainedModel, fused: bool) -> Iterator[None]:
    for model in models:
        apply_liger_kernel(model, fused_linear_cross_entropy=fused)
    try:
        yield
    finally:
        for model in models:
            revert_liger_kernel(model)


@contextmanager
def liger_kernel(*models: PreTrainedModel, fused: bool) -> Iterator[None]:
    """Apply Liger-Kernel. It patches the models, which are not reused, and the names in their modeling module."""
    check_triton()
    import liger_kernel.transformers as liger

    modeling = [vars(sys.modules[type(model).__module__]) for model in models]
    before = [dict(names) for names in modeling]
    try:
        for model in models:
            apply = getattr(liger, f"apply_liger_kernel_to_{model.config.model_type}")
            apply(model=model, fused_linear_cross_entropy=fused, cross_entropy=False)
        yield
    finally:
        for names, own in zip(modeling, before, strict=True):
            names.update(own)
