"""A small random model of any causal or image-text-to-text class of transformers, made from its default config.

`config_of` replaces the sizes in a config and its parts by name. `OVERRIDES` has what a class needs besides.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

VOCAB, HIDDEN, HEADS, HEAD_DIM, WIDE = 131, 64, 4, 16, 48
LENGTH = 9


def _names(mapping: dict[str, Any]) -> list[str]:
    values = [names if isinstance(names, (list, tuple)) else (names,) for names in mapping.values()]
    return sorted({name for names in values for name in names})


CAUSAL = _names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
IMAGE_TEXT = [name for name in _names(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) if name not in CAUSAL]

# Sizes by name. The first match counts. A number replaces a positive integer.
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
    (r"qk_rope_head_dim", 8),
    (r"qk_head_dim", HEAD_DIM + 8),
    (r".*(mamba_n_heads|mamba_num_heads|mamba_heads)", 8),
    (r"(num|n)_(key_value|kv)_heads|kv_n_heads|.*_num_key_value_heads", 2),
    (r".*(num_attention_heads|n_heads?|num_heads|attention_heads|num_(key|value)_heads|num_query_groups)", HEADS),
    (r".*(head_dim|d_head|d_kv|kv_channels|headdim|dim_head|rotary_dim|attention_head_size)", HEAD_DIM),
    (r".*(state_size|d_state)", 8),
    (r".*chunk_size", 8),
    (r"n_groups|mamba_n_?groups", 2),
    (r".*(hidden_size|hidden_dim|d_model|n_embd|embed_dim|emb_dim|embedding_dim|embedding_size|lru_width)", HIDDEN),
    (r"word_embed_proj_dim|out_hidden_size|projection_dim|output_dim|width|.*projector_(in|out)put_dim", HIDDEN),
    (r"original_max_position_embeddings", 32),
    (r"(.*max_(source_|target_)?position.*|n_positions|n_ctx|max_seq_len|context_length|seq_len)", 64),
    (r"image_size|resolution", 32),
    (r"(sliding_|local_|attention_)?window(_size)?|sliding_window_size|local_attention", 6),
    (r"index_topk", 4),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
]
_RULES = [(re.compile(pattern), size) for pattern, size in RULES]
_DEPTH = re.compile(r"num_hidden_layers|n_layers?|num_layers|layers|depth|num_blocks|(en|de)coder_layers|num_(en|de)coder_layers")
_TOKEN = re.compile(r".*token_(id|index|ids)|.*_(start|end|newline|patch)_id")
_INDICES = re.compile(r".*(layers|indices|indexes|idxs|_ids)")

# Changes to a class's config, by the name of the class or of its config.
OVERRIDES: dict[str, dict[str, Any]] = {}


def config_of(default: PreTrainedConfig, tokens: dict[int, int] | None = None) -> PreTrainedConfig:
    """Return a small config of the same class and with the same kinds of layers."""
    tokens = {} if tokens is None else tokens
    values = vars(default)
    depth = next((x for name, x in values.items() if _DEPTH.fullmatch(name) and isinstance(x, int) and x > 0), 0)
    kept = _distinct_layers(values, depth)
    small: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith("_") or name in ("id2label", "label2id", "transformers_version"):
            continue
        new = _small(name, value, depth, kept, tokens)
        if new is not value:
            small[name] = new
    overrides = OVERRIDES.get(type(default).__name__, {})
    return type(default)(**{**small, **overrides})


def _distinct_layers(values: dict[str, Any], depth: int) -> list[int]:
    """Return the indices of the first layers of every kind, at least two."""
    lists = [x for x in values.values() if isinstance(x, (list, tuple)) and len(x) == depth]
    indices = [x for name, x in values.items() if _is_indices(name, x, depth)]
    first: dict[Any, int] = {}
    for i in range(depth):
        first.setdefault(str(([x[i] for x in lists], [i in x for x in indices])), i)
    kept = sorted(first.values())
    return kept if len(kept) > 1 else list(range(min(depth, 2)))


def _is_indices(name: str, value: Any, depth: int) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(_INDICES.fullmatch(name))
        and not name.endswith("token_ids")
        and len(value) != depth
        and all(isinstance(x, int) and 0 <= x < depth for x in value)
    )


def _small(name: str, value: Any, depth: int, kept: list[int], tokens: dict[int, int]) -> Any:
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
            return [_small(name, value[i], 0, [], tokens) for i in kept]
        if depth and _is_indices(name, value, depth):
            return [k for k, i in enumerate(kept) if i in value]
        return value
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


def build(name: str) -> PreTrainedModel:
    """Return a model in training mode, whose parameters are all random. Raises what transformers raises."""
    cls = getattr(transformers, name)
    config = config_of(cls.config_class())
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = cls(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model.train()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(10, 90, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
