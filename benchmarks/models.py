"""Models of known shapes with random weights, and context managers that patch kernels into them."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from benchmarks.harness import DEVICE, DTYPE, Skipped, check_triton
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
# Tiny mixtures of experts; each family takes the names that it knows.
_TINY_EXPERTS: dict[str, Any] = {**_TINY, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
_TINY_GEMMA_3N: dict[str, Any] = {
    "head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "vocab_size_per_layer_input": 320,
    "sliding_window": 8,
}
_TINY_QWEN3_NEXT: dict[str, Any] = {
    "num_experts": 4,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_QWEN3_VISION: dict[str, Any] = {"depth": 3, "deepstack_visual_indexes": [0, 1, 2], "out_hidden_size": 4096}
_TINY_VISION: dict[str, Any] = {
    "depth": 1,
    "deepstack_visual_indexes": [0],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
}
_HYBRID = ["linear_attention", "full_attention"]
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}

# Layers of newer families in the sizes of the models, but few of them: `-4l` has four layers. The sizes that are not
# here are the defaults of the family's config. Qwen3-Next alternates three layers of linear attention with one of full
# attention; transformers computes the linear attention in a slow loop, unless flash-linear-attention is installed.
CUT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b-4l": (
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "num_hidden_layers": 4,
            "head_dim": 128,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen2.5-0.5b-4l": (
        "qwen2",
        {
            **_QWEN_2_5,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 4,
            "num_attention_heads": 14,
        },
    ),
    "gpt-oss-20b-4l": ("gpt_oss", {"vocab_size": 201088, "num_hidden_layers": 4, "num_local_experts": 32}),
    "qwen3-next-80b-a3b-2l": (
        "qwen3_next",
        {"vocab_size": 151936, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    ),
    "qwen3-next-80b-a3b-2l-hybrid": (
        "qwen3_next",
        {"vocab_size": 151936, "num_hidden_layers": 2, "layer_types": _HYBRID},
    ),
    "gemma-2-2b-8l": (
        "gemma2",
        {
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "attn_logit_softcapping": None,  # SDPA has none
        },
    ),
    "gemma-3n-e4b-6l": (
        "gemma3n_text",
        {
            "vocab_size": 262400,
            "vocab_size_per_layer_input": 262144,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 4,
        },
    ),
    "glm-4.5-air-2l": (
        "glm4_moe",
        {"vocab_size": 151552, "num_hidden_layers": 2, "head_dim": 128, "attention_bias": True},
    ),
    "qwen3-vl-8b-6l": (
        "qwen3_vl",
        {
            "text_config": {
                "vocab_size": 151936,
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_hidden_layers": 6,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "rope_parameters": {**_MROPE, "mrope_section": [24, 20, 20]},
            },
            "vision_config": _QWEN3_VISION,
        },
    ),
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
    "smollm2-135m": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
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
    **CUT,
    "tiny-qwen3-moe": ("qwen3_moe", {**_TINY_EXPERTS, "num_experts": 4}),
    "tiny-gpt-oss": ("gpt_oss", {**_TINY, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "tiny-qwen3-next": ("qwen3_next", {**_TINY_EXPERTS, **_TINY_QWEN3_NEXT, "layer_types": _HYBRID}),
    "tiny-gemma-3n": (
        "gemma3n_text",
        {
            **_TINY,
            **_TINY_GEMMA_3N,
            "num_hidden_layers": 3,
            "num_kv_shared_layers": 1,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "activation_sparsity_pattern": [0.95, 0.0, 0.0],
        },
    ),
    "tiny-glm-4-moe": ("glm4_moe", {**_TINY_EXPERTS, "n_routed_experts": 4}),
    "tiny-qwen3-vl": (
        "qwen3_vl",
        {
            "text_config": {
                **_TINY,
                "head_dim": 16,
                "rope_parameters": {**_MROPE, "mrope_section": [4, 2, 2]},
            },
            "vision_config": _TINY_VISION,
        },
    ),
}


def config_of(name: str) -> Any:
    family, sizes = SHAPES[name]
    return AutoConfig.for_model(family, **copy.deepcopy(sizes))


def build(name: str, seed: int = 0, checkpointing: bool = True) -> PreTrainedModel:
    """Build a model of `SHAPES` in training mode, directly on the device; the same seed gives the same weights."""
    config = config_of(name)
    auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        model = auto.from_config(config, dtype=DTYPE)  # attention is SDPA, and eager for GPT-OSS
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def vocabulary(name: str) -> int:
    """Return how many token ids a text has: Gemma 3n has fewer per-layer embeddings than embeddings."""
    sizes = SHAPES[name][1]
    text = sizes.get("text_config", sizes)
    return text.get("vocab_size_per_layer_input", text["vocab_size"])


# Context managers that patch kernels into models and remove them again; `fused` includes the loss.


@contextmanager
def nobody(*models: PreTrainedModel, fused: bool) -> Iterator[None]:
    yield


@contextmanager
def ours(
    *models: PreTrainedModel, fused: bool, tiled_mlp: bool | int | Literal["auto"] | None = None
) -> Iterator[list[Any]]:
    """Apply our kernels; returns the reports."""
    reports = [apply_liger_kernel(model, fused_linear_cross_entropy=fused, tiled_mlp=tiled_mlp) for model in models]
    try:
        yield reports
    finally:
        for model in models:
            revert_liger_kernel(model)


def liger_function(family: str) -> Callable[..., None]:
    """Return Liger-Kernel's function for a model type."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise Skipped(f"Liger-Kernel does not support {family}")
    return MODEL_TYPE_TO_APPLY_LIGER_FN[family]


@contextmanager
def liger_kernel(*models: PreTrainedModel, fused: bool) -> Iterator[None]:
    """Apply Liger-Kernel. It patches the models, which are not reused, and the names in their modeling module."""
    check_triton()
    functions = [liger_function(model.config.model_type) for model in models]
    modeling = [vars(sys.modules[type(model).__module__]) for model in models]
    before = [dict(names) for names in modeling]
    try:
        for apply, model in zip(functions, models, strict=True):
            apply(model=model, fused_linear_cross_entropy=fused, cross_entropy=False)
        yield
    finally:
        for names, own in zip(modeling, before, strict=True):
            names.update(own)
