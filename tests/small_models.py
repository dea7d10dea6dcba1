"""Small models of a config, whose numbers still show what the large one does to its logits, and their inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

VOCAB, HIDDEN, HEADS, HEAD_DIM, WIDE = 131, 64, 4, 16, 48

# The first match counts. A number replaces a positive integer.
RULES: list[tuple[str, int]] = [
    (r"unpadded_vocab_size", VOCAB - 3),
    (r"(.*_)?vocab_size(_.*)?", VOCAB),
    (r"type_vocab_size|n_langs|num_codebooks", 2),
    (r".*(intermediate_size|ffn_dim|ffn_hidden|mlp_dim|feed_forward_size|d_ff|dff|dim_ff|share_expert_dim).*", WIDE),
    (r"(num|n)_(experts_per_tok(en)?|expert_group|group)|moe_(k|topk|top_k)", 2),
    (r"topk_group", 1),
    (r"(moe_)?num_(local_)?experts|n_routed_experts", 4),
    (r".*(shared_experts)", 1),
    (r".*lora_rank|.*_rank", 8),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r".*(mamba_n_heads|mamba_num_heads|mamba_heads)", 8),
    (r"(num|n)_(key_value|kv)_heads|kv_n_heads|.*_num_key_value_heads", 2),
    (r".*(num_attention_heads|n_heads?|num_heads|attention_heads|num_(key|value)_heads|num_query_groups)", HEADS),
    (r".*(head_dim|d_head|d_kv|kv_channels|headdim|dim_head|rotary_dim|attention_head_size)", HEAD_DIM),
    (r".*(state_size|d_state)", 8),
    (r".*chunk_size", 8),
    (r"n_groups|mamba_n_?groups", 2),
    (r".*(hidden_size|hidden_dim|d_model|n_embd|embed_dim|emb_dim|embedding_dim|embedding_size|lru_width)", HIDDEN),
    (r"word_embed_proj_dim|out_hidden_size|projection_dim|output_dim|width|.*projector_(in|out)put_dim", HIDDEN),
    (r".*channels?(_size)?", 32),
    (r"hidden_sizes|adapter_(in|out)_dim|adapter_input_size|image_token_embed_dim", HIDDEN),
    (r"original_max_position_embeddings", 32),
    (r"(.*max_(source_|target_)?position.*|n_positions|n_ctx|max_seq_len|context_length|seq_len)", 64),
    (r"image_size|resolution", 32),
    (r"(sliding_|local_|attention_)?window(_size)?|sliding_window_size|local_attention", 6),
    (r"index_topk", 4),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
]
_RULES = [(re.compile(pattern), size) for pattern, size in RULES]
# Numbers that change the logits or the loss, None included.
_EFFECTS = {
    "final_logit_softcapping": 3.0, "logits_soft_cap": 3.0, "output_logit_soft_cap": 3.0, "logits_scaling": 4.0,
    "logit_scale": 0.25, "lm_head_multiplier": 0.5, "output_multiplier": 0.5, "logits_mup_width_multiplier": 3.0,
    "output_router_logits": True, "router_aux_loss_coef": 0.5,
}  # fmt: skip

_DEPTH = re.compile(r"(num_|n_)?((hidden|encoder|decoder)_)?layers|n_layer|depth|num_blocks")
_TOKEN = re.compile(r".*token_(id|index|ids)|.*_(start|end|newline|patch)_id")
_INDICES = re.compile(r".*(layers|indices|indexes|idxs|_ids)")
_LEFT = ("id2label", "label2id", "transformers_version", "problem_type", "architectures")

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_HALF_MROPE = {**_MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
_SHARED_KV = {
    "num_hidden_layers": 4,
    "layer_types": 2 * ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "head_dim": HEAD_DIM,
    "global_head_dim": 2 * HEAD_DIM,
}

# Values that `config_of` cannot derive, by class of config.
OVERRIDES: dict[str, dict[str, Any]] = {
    "BambaConfig": {"attn_layer_indices": [1]},
    "Blip2Config": {"num_query_tokens": 2, "image_token_id": VOCAB - 1},
    "BltConfig": {"encoder_hash_byte_group_vocab": VOCAB, "encoder_hash_byte_group_size": [3, 4]},
    "BltLocalDecoderConfig": {"hidden_size_global": HIDDEN},
    "ChameleonConfig": {"vocabulary_map": {"<image>": VOCAB - 1, **{f"IMGIMG{x}Z": i for i, x in enumerate("AB")}}},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": _MROPE}},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": WIDE},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Dots3NoteTextConfig": {
        "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": HEADS, "swa_q_lora_rank": 8,
        "swa_kv_lora_rank": 8, "swa_head_dim": 2 * HEAD_DIM, "swa_qk_nope_head_dim": HEAD_DIM,
        "swa_v_head_dim": HEAD_DIM,
    },
    "Emu3Config": {"vocabulary_map": {"<image>": VOCAB - 1, **{f"<|visual token {i:06}|>": i for i in range(4)}}},
    "Emu3VQVAEConfig": {"channel_multiplier": [1, 1]},
    "Ernie4_5_VLMoeTextConfig": {"rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]}},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3nTextConfig": {
        **_SHARED_KV, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0], "intermediate_size": WIDE,
    },
    "Gemma4TextConfig": _SHARED_KV,
    "Gemma4UnifiedTextConfig": _SHARED_KV,
    "Glm4vMoeTextConfig": {"rope_parameters": _HALF_MROPE},
    "Glm4vTextConfig": {"rope_parameters": _MROPE},
    "Glm5NextTextConfig": {"index_topk": 4, "index_kpool": 2, "head_dim": 0, "qk_rope_head_dim": 0},
    "GlmOcrTextConfig": {"rope_parameters": _MROPE},
    "Granite4VisionConfig": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2", "spatial_target_layers": [1]},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "HunYuanVLTextConfig": {"rope_parameters": {**_MROPE, "mrope_section": [2, 2, 2, 2]}},
    "InklingVisionConfig": {"num_hidden_layers": 6, "patch_size": 4},
    "InstructBlipConfig": {"num_query_tokens": 2, "image_token_id": VOCAB - 1},
    "InstructBlipVideoConfig": {"num_query_tokens": 2, "video_token_id": VOCAB - 1},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "JanusVQVAEConfig": {"num_embeddings": 16, "channel_multiplier": [1, 1]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashConfig": {"zero_expert_num": 2},
    "Mamba2Config": {"num_heads": 8},
    "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
    "NemotronConfig": {"num_key_value_heads": 2},
    "PaddleOCRTextConfig": {"rope_parameters": _MROPE},
    "Qwen2VLTextConfig": {"rope_parameters": _MROPE},
    "Qwen2_5OmniTextConfig": {"rope_parameters": _MROPE},
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": VOCAB - 20},
    "Qwen2_5_VLTextConfig": {"rope_parameters": _MROPE},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": VOCAB - 20},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ReformerConfig": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [3, 3]},
    "Step3p7TextConfig": {"sliding_window": 6},
    "UdopConfig": {"decoder_start_token_id": 0},
    "VisionEncoderDecoderConfig": {"pad_token_id": 0, "decoder_start_token_id": 1},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {
        "attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HEAD_DIM, "num_key_value_heads": HEADS,
        "num_hidden_layers": 6, "layers_block_type": 2 * ["linear_attention", "linear_attention", "hybrid"],
    },
    "xLSTMConfig": {"qk_dim_factor": 1.0, "chunk_size": 64},
}  # fmt: skip


def config_of(default: PreTrainedConfig, tokens: dict[int, int] | None = None) -> PreTrainedConfig:
    cls = type(default)
    tokens = {} if tokens is None else tokens
    values = {name: vars(default).get(cls.attribute_map.get(name, name)) for name in cls.__dataclass_fields__}
    depth = next((x for name, x in values.items() if _DEPTH.fullmatch(name) and isinstance(x, int) and x > 0), 0)
    kept = _distinct_layers(values, depth)
    small = {name: _small(name, value, depth, kept, tokens) for name, value in values.items() if name not in _LEFT}
    plain = vars(cls())
    small = {name: x for name, x in small.items() if x is not values[name] or x != plain.get(name, x)}
    heads = values.get("num_attention_heads")
    if values.get("num_key_value_heads") == heads is not None:
        small["num_key_value_heads"] = HEADS
    if values.get("head_dim", 0) is None:
        small["head_dim"] = HEAD_DIM
    return cls(**{**small, **OVERRIDES.get(cls.__name__, {})})


def _distinct_layers(values: dict[str, Any], depth: int) -> list[int]:
    """Return the indices of every kind's first layers, at least two."""
    lists = [x for x in values.values() if isinstance(x, (list, tuple)) and len(x) == depth and not _is_range(x)]
    indices = [x for name, x in values.items() if _is_indices(name, x, depth)]
    first: dict[Any, int] = {}
    for i in range(depth):
        first.setdefault(str(([x[i] for x in lists], [i in x for x in indices])), i)
    kept = sorted(first.values())
    return kept if len(kept) > 1 else list(range(min(depth, 2)))


def _is_range(values: Any) -> bool:
    return list(values) == list(range(len(values)))


def _is_indices(name: str, value: Any, depth: int) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(_INDICES.fullmatch(name))
        and not name.endswith("token_ids")
        and len(value) != depth
        and all(isinstance(x, int) and 0 <= x < depth for x in value)
    )


def _small(name: str, value: Any, depth: int, kept: list[int], tokens: dict[int, int]) -> Any:
    if name in _EFFECTS:
        return _EFFECTS[name]
    if isinstance(value, PreTrainedConfig):
        return config_of(value, tokens)
    if isinstance(value, dict):
        return {key: _small(str(key), x, depth, kept, tokens) for key, x in value.items()}
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, float):
        return 0.0 if re.search("drop(?!less)|jitter", name) else value
    if name == "mrope_section":
        return _scaled(value, HEAD_DIM // 2)
    if name in ("long_factor", "short_factor"):
        return value[: HEAD_DIM // 2]
    if _TOKEN.fullmatch(name):
        ids = value if isinstance(value, (list, tuple)) else [value]
        ids = [x if not isinstance(x, int) or x < 10 else tokens.setdefault(x, VOCAB - 1 - len(tokens)) for x in ids]
        return ids if isinstance(value, (list, tuple)) else ids[0]
    if isinstance(value, (list, tuple)):
        if depth and len(value) == depth:
            return list(range(len(kept))) if _is_range(value) else [_small(name, value[i], 0, [], tokens) for i in kept]
        if depth and _is_indices(name, value, depth):
            return [k for k, i in enumerate(kept) if i in value]
        return [_small(name, x, 0, [], tokens) for x in value]
    if not isinstance(value, int) or value <= 0:
        return value
    if _DEPTH.fullmatch(name):
        return len(kept) if value == depth else min(value, 2)
    size = next((size for pattern, size in _RULES if pattern.fullmatch(name)), value)
    return min(size, value) if value < 10 else size


def _scaled(parts: Iterable[int], total: int) -> list[int]:
    parts = list(parts)
    scaled = [max(1, x * total // sum(parts)) for x in parts]
    scaled[-1] += total - sum(scaled)
    return scaled


LENGTH = 9


def inputs_of(name: str) -> dict[str, Any]:
    """Return text with labels (2, LENGTH), padded on the left, and what else a class cannot do without."""
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
