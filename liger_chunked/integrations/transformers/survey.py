"""Tell which heads and layers of transformers' classes are served, on small models of default configs."""

from __future__ import annotations

import difflib
import fnmatch
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from liger_chunked.integrations.transformers.found import found_in, owner_of
from liger_chunked.integrations.transformers.overrides import LAYER_SWITCHES
from liger_chunked.integrations.transformers.report import FUSED

VOCAB, HIDDEN, HEADS, HEAD_DIM, WIDE = 131, 64, 4, 16, 48


def _names(mapping: dict[str, Any]) -> list[str]:
    values = [names if isinstance(names, (list, tuple)) else (names,) for names in mapping.values()]
    return sorted({name for names in values for name in names})


CAUSAL = _names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
IMAGE_TEXT = [name for name in _names(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) if name not in CAUSAL]

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
    cls, nested = type(default), tokens is not None
    tokens = {} if tokens is None else tokens
    values = {name: vars(default).get(cls.attribute_map.get(name, name)) for name in cls.__dataclass_fields__}
    depth = next((x for name, x in values.items() if _DEPTH.fullmatch(name) and isinstance(x, int) and x > 0), 0)
    kept = _distinct_layers(values, depth)
    small = {name: _small(name, value, depth, kept, tokens) for name, value in values.items() if name not in _LEFT}
    plain = vars(cls()) if nested else values
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


def small_model(name: str) -> PreTrainedModel:
    cls = getattr(transformers, name)
    config = config_of(cls.config_class())
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return cls(config).train()


class Row(NamedTuple):
    name: str
    head: str  # "fused", "logits" or "not built"
    layers: tuple[str, ...]  # switches of `apply_liger_kernel`
    reason: str

    def __str__(self) -> str:
        return f"{self.name:43s} {self.head:9s} {', '.join(self.layers):36s} {self.reason}".rstrip()

    @property
    def markdown(self) -> str:
        head = ": ".join(filter(None, (self.head, self.reason))).replace("|", "\\|")
        return f"| `{self.name}` | {', '.join(self.layers)} | {head} |"


def class_names(patterns: Sequence[str] = ()) -> list[str]:
    """Return the causal and image-text-to-text classes that match a pattern; by default all."""
    names = CAUSAL + IMAGE_TEXT
    found: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if fnmatch.fnmatchcase(name.lower(), pattern.lower())}
        if not matches:
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or [f"{pattern.rstrip('*')[:3]}*"]
            raise ValueError(
                f"{pattern!r} matches no causal or image-text-to-text class of transformers "
                f"{transformers.__version__}, expected a name or a pattern, such as {', '.join(close)}"
            )
        found |= matches
    return [name for name in names if name in found or not patterns]


def survey(name: str) -> Row:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _survey(name)
    finally:
        transformers.logging.set_verbosity(verbosity)


def _survey(name: str) -> Row:
    try:
        model = small_model(name)
    except Exception as error:
        return Row(name, "not built", (), _sentence(f"{type(error).__name__}: {error}"))
    found = found_in(model)
    layers = tuple(switch for switch in (*LAYER_SWITCHES, "rope") if switch in found.switches)
    if FUSED in found.heads:
        return Row(name, "fused", layers, "")
    return Row(name, "logits", layers, _sentence(found.left.get(owner_of(model).__name__, "it has no lm_head")))


def _sentence(text: str) -> str:
    text = re.sub(r"^a fused loss cannot stand in for \S+: ", "", " ".join(text.split()))
    return re.split(r"\.? *\. ", text)[0].rstrip(".")


def lines(names: Iterable[str]) -> Iterator[str]:
    rows = []
    for name in names:
        rows.append(survey(name))
        yield str(rows[-1])
    yield _summary(rows)


def page(names: Iterable[str]) -> str:
    rows = [survey(name) for name in names]
    return "\n".join([_INTRODUCTION, _summary(rows), "", *_HEADER, *(row.markdown for row in rows)])


def _summary(rows: Sequence[Row]) -> str:
    fused, failed = (sum(row.head == head for row in rows) for head in ("fused", "not built"))
    return f"{len(rows)} classes of transformers {transformers.__version__}: {fused} fused heads, {failed} not built."


_HEADER = ("| class | layers | head |", "|---|---|---|")
_INTRODUCTION = """# Supported models

`liger-chunked models --markdown` wrote this page: what `apply_liger_kernel` serves of the causal and image-text-to-text
classes of transformers. Each row is a small model of the class's default config, whose head and layers are detected as
in [models.md](models.md). `liger-chunked models "Qwen*"` prints the rows of the transformers that you have.

- **layers**: switches of `apply_liger_kernel` that match at least one layer. Its report for a model names the classes,
  and those that it left alone.
- **head**: *fused*, or *logits* with the reason why the model trains with its own head and loss.
- *not built*: transformers cannot build the class from its default config here.
"""
