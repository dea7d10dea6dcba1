"""What a model's forward takes to run on a trie: tokens, depths as positions, and a mask for each kind of layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from liger_chunked.shared_prefix.attention import dense_mask, trie_mask
from liger_chunked.shared_prefix.trie import PackedTrie

TAKE_DENSE = ("sdpa", "eager")  # attention implementations


def model_inputs(model: PreTrainedModel, trie: PackedTrie, implementation: str, dense: bool) -> dict[str, Any]:
    windows = windows_of(model.config)
    has_windows = any(window is not None for window in windows.values())

    def mask(window: int | None) -> Any:
        if not dense:
            return trie_mask(trie.end, trie.position_ids, window, has_windows=has_windows)
        allowed = dense_mask(trie.end, trie.position_ids, window)
        if implementation != "eager":
            return allowed
        dtype = dtype_of(model)
        return torch.zeros((), dtype=dtype, device=allowed.device).where(allowed, torch.finfo(dtype).min)

    masks = {window: mask(window) for window in dict.fromkeys(windows.values())}
    attention_mask = (
        {kind: masks[window] for kind, window in windows.items()} if len(windows) > 1 else next(iter(masks.values()))
    )
    return {
        "input_ids": trie.input_ids,
        "position_ids": trie.position_ids,
        "attention_mask": attention_mask,
        "use_cache": False,
    }


def implementation_of(model: PreTrainedModel) -> str:
    config = model.config.get_text_config()
    return (config._attn_implementation or "eager") if hasattr(config, "_attn_implementation") else "unknown"


def dtype_of(model: PreTrainedModel) -> torch.dtype:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.dtype


class UnknownLayers(Exception):
    """The masks do not cover a layer."""


def windows_of(config: Any) -> dict[str, int | None]:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        return {"every": window}
    known = {"full_attention": None, "sliding_attention": window}
    if others := sorted(set(layer_types) - known.keys()):
        raise UnknownLayers(f"it has layers of the type {others[0]}; those of full_attention and sliding_attention can")
    return {kind: known[kind] for kind in dict.fromkeys(layer_types)}
