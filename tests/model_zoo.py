"""A tiny random model of every family, built from its config."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

VOCAB, HIDDEN, LENGTH = 131, 32, 12

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # Large enough to tell activation functions apart.
    "initializer_range": 0.15,
}
_MOE = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.01, "output_router_logits": True}
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


class Sample(NamedTuple):
    """The arguments of `model.forward`, without labels; `input_ids` is (B, T)."""

    arguments: dict[str, Tensor]

    @property
    def labels(self) -> Tensor:
        """Labels that ignore the prompt and the padding."""
        labels = self.arguments["input_ids"].clone()
        labels[:, :3] = -100
        labels[-1, -2:] = -100
        return labels


def _text(generator: torch.Generator, image_token: int | None = None) -> dict[str, Tensor]:
    # The first and the last few token ids are special in some models.
    input_ids = torch.randint(10, VOCAB - 10, (2, LENGTH), generator=generator)
    mask = torch.ones_like(input_ids)
    mask[-1, -2:] = 0
    return {"input_ids": input_ids, "attention_mask": mask}


def _gemma3_image(generator: torch.Generator) -> dict[str, Tensor]:
    arguments = _text(generator)
    arguments["input_ids"][:, 1:5] = VOCAB - 1
    arguments["pixel_values"] = torch.randn(2, 3, 8, 8, generator=generator)
    arguments["token_type_ids"] = (arguments["input_ids"] == VOCAB - 1).long()
    return arguments


def _qwen_image(generator: torch.Generator) -> dict[str, Tensor]:
    arguments = _text(generator)
    arguments["input_ids"][:, 1:5] = torch.tensor([VOCAB - 3, VOCAB - 1, VOCAB - 1, VOCAB - 2])
    arguments["mm_token_type_ids"] = (arguments["input_ids"] == VOCAB - 1).int()
    # Two images of 2 x 4 patches, merged two by two. A patch has 3 channels of 2 frames of 4 x 4 pixels.
    arguments["image_grid_thw"] = torch.tensor([[1, 2, 4], [1, 2, 4]])
    arguments["pixel_values"] = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
    return arguments


def _mllama_image(generator: torch.Generator) -> dict[str, Tensor]:
    arguments = _text(generator)
    arguments["pixel_values"] = torch.randn(2, 1, 2, 3, 8, 8, generator=generator)
    arguments["aspect_ratio_ids"] = torch.tensor([[1], [2]])
    arguments["aspect_ratio_mask"] = torch.tensor([[[1, 0]], [[1, 1]]])
    mask = torch.ones(2, LENGTH, 1, 2, dtype=torch.long)
    mask[:, :1] = 0
    mask[0, ..., 1] = 0
    arguments["cross_attention_mask"] = mask
    return arguments


@dataclass(frozen=True)
class Tiny:
    """One model: its class, the arguments of its config, and its sample."""

    name: str
    family: str
    model_class: str
    config_class: str
    config: dict[str, Any]
    arguments: Callable[[torch.Generator], dict[str, Tensor]] = _text

    def __repr__(self) -> str:
        return self.name

    def build(self, seed: int = 0) -> PreTrainedModel:
        """Build the model in evaluation mode, with norm weights and biases that differ from their initial values."""
        torch.manual_seed(seed)
        # Has classes that older transformers do not export.
        configuration = importlib.import_module(f"transformers.models.{self.family}.configuration_{self.family}")
        config = getattr(configuration, self.config_class)(**self.config)
        model = getattr(transformers, self.model_class)(config).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim <= 1:
                    parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
            # Large enough for a softcap to matter.
            model.get_output_embeddings().weight.mul_(3.0)
        return model

    def sample(self) -> Sample:
        return Sample(self.arguments(torch.Generator().manual_seed(2)))


def _causal(family: str, prefix: str, **config: Any) -> Tiny:
    return Tiny(family, family, f"{prefix}ForCausalLM", f"{prefix}Config", {**_TEXT, **config})


_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
}
_MLLAMA_TEXT = {
    **_TEXT,
    "num_hidden_layers": 3,
    "cross_attention_layers": [1],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_QWEN_IDS = {
    "image_token_id": VOCAB - 1,
    "vision_start_token_id": VOCAB - 3,
    "vision_end_token_id": VOCAB - 2,
    "video_token_id": VOCAB - 4,
}
_PATCHES = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_heads": 2, "depth": 1}

ZOO = [
    _causal("llama", "Llama", mlp_bias=True),
    _causal("mistral", "Mistral", sliding_window=6),
    _causal("mixtral", "Mixtral", num_local_experts=4, **_MOE),
    _causal("gemma", "Gemma", head_dim=8, hidden_act="gelu_pytorch_tanh"),
    _causal("gemma2", "Gemma2", head_dim=8, final_logit_softcapping=3.0),
    Tiny(
        "gemma3_text",
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_TEXT, "head_dim": 8, "final_logit_softcapping": 3.0},
    ),
    Tiny(
        "gemma3",
        "gemma3",
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": {**_TEXT, "head_dim": 8, "final_logit_softcapping": 3.0},
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_id": VOCAB - 1,
        },
        _gemma3_image,
    ),
    _causal("qwen2", "Qwen2", tie_word_embeddings=True),
    Tiny(
        "qwen2_vl",
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "text_config": {**_TEXT, "rope_parameters": _MROPE},
            "vision_config": {**_PATCHES, "embed_dim": 16, "hidden_size": HIDDEN, "mlp_ratio": 2},
            **_QWEN_IDS,
        },
        _qwen_image,
    ),
    Tiny(
        "qwen2_5_vl",
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {
            "text_config": {**_TEXT, "rope_parameters": _MROPE},
            "vision_config": {
                **_PATCHES,
                "hidden_size": 16,
                "out_hidden_size": HIDDEN,
                "intermediate_size": 24,
                "window_size": 16,
                "fullatt_block_indexes": [0],
            },
            **_QWEN_IDS,
        },
        _qwen_image,
    ),
    _causal("qwen3", "Qwen3", head_dim=8),
    _causal("qwen3_moe", "Qwen3Moe", head_dim=8, num_experts=4, moe_intermediate_size=24, mlp_only_layers=[1], **_MOE),
    _causal("phi3", "Phi3", partial_rotary_factor=0.5),
    _causal("granite", "Granite", logits_scaling=4.0, residual_multiplier=0.5),
    _causal("olmo2", "Olmo2"),
    _causal("glm4", "Glm4", head_dim=8, partial_rotary_factor=0.5),
    Tiny("mllama_text", "mllama", "MllamaForCausalLM", "MllamaTextConfig", _MLLAMA_TEXT),
    Tiny(
        "mllama",
        "mllama",
        "MllamaForConditionalGeneration",
        "MllamaConfig",
        {
            "text_config": _MLLAMA_TEXT,
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_global_layers": 1,
                "attention_heads": 2,
                "image_size": 8,
                "patch_size": 4,
                "max_num_tiles": 2,
                "intermediate_layers_indices": [0],
                "vision_output_dim": 32,
                "supported_aspect_ratios": [[1, 1], [1, 2]],
            },
            "image_token_index": VOCAB - 1,
        },
        _mllama_image,
    ),
]
BY_ID = {tiny.name: tiny for tiny in ZOO}

# The layers that the kernels replace in each model, beside its rotary function and its head.
SERVED: dict[str, dict[str, dict[str, int]]] = {
    "llama": {"rms_norm": {"LlamaRMSNorm": 5}, "swiglu": {"LlamaMLP": 2}},
    "mistral": {"rms_norm": {"MistralRMSNorm": 5}, "swiglu": {"MistralMLP": 2}},
    "mixtral": {"rms_norm": {"MixtralRMSNorm": 5}, "swiglu": {"MixtralExperts": 2}},
    "gemma": {"rms_norm": {"GemmaRMSNorm": 5}, "geglu": {"GemmaMLP": 2}},
    "gemma2": {"rms_norm": {"Gemma2RMSNorm": 9}, "geglu": {"Gemma2MLP": 2}},
    "gemma3_text": {"rms_norm": {"Gemma3RMSNorm": 13}, "geglu": {"Gemma3MLP": 2}},
    "gemma3": {"rms_norm": {"Gemma3RMSNorm": 14}, "layer_norm": {"LayerNorm": 4}, "geglu": {"Gemma3MLP": 2}},
    "qwen2": {"rms_norm": {"Qwen2RMSNorm": 5}, "swiglu": {"Qwen2MLP": 2}},
    "qwen2_vl": {"rms_norm": {"Qwen2VLRMSNorm": 5}, "layer_norm": {"LayerNorm": 3}, "swiglu": {"Qwen2MLP": 2}},
    "qwen2_5_vl": {"rms_norm": {"Qwen2_5_VLRMSNorm": 8}, "swiglu": {"Qwen2_5_VLMLP": 1, "Qwen2MLP": 2}},
    "qwen3": {"rms_norm": {"Qwen3RMSNorm": 9}, "swiglu": {"Qwen3MLP": 2}},
    "qwen3_moe": {"rms_norm": {"Qwen3MoeRMSNorm": 9}, "swiglu": {"Qwen3MoeExperts": 1, "Qwen3MoeMLP": 1}},
    "phi3": {"rms_norm": {"Phi3RMSNorm": 5}, "swiglu": {"Phi3MLP": 2}},
    "granite": {"rms_norm": {"GraniteRMSNorm": 5}, "swiglu": {"GraniteMLP": 2}},
    "olmo2": {"rms_norm": {"Olmo2RMSNorm": 9}, "swiglu": {"Olmo2MLP": 2}},
    "glm4": {"rms_norm": {"Glm4RMSNorm": 9}, "swiglu": {"Glm4MLP": 2}},
    "mllama_text": {"rms_norm": {"MllamaTextRMSNorm": 9}, "swiglu": {"MllamaTextMLP": 3}},
    "mllama": {"rms_norm": {"MllamaTextRMSNorm": 9}, "layer_norm": {"LayerNorm": 6}, "swiglu": {"MllamaTextMLP": 3}},
}
