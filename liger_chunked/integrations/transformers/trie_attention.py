"""Masks and attention for packed tries.

transformers passes a 4-D mask, or a dict of one per layer type, unchanged to the attention layers:

- a dense mask, for SDPA and eager attention: on a CPU and for short rows
- a `TrieMask`, for FlexAttention, which skips invisible blocks

The mask decides which attention runs, not the config, so that checkpointing recomputes a layer alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

BLOCK = 128  # tokens
TRIES_ONLY = "liger_tries_only"
_SERVED = "_liger_serves_tries"  # attribute of a wrapped function


def dense_mask(end: Tensor, depth: Tensor, window: int | Tensor | None = None) -> Tensor:
    """Return (R, 1, L, L), True where a query may attend to a key.

    Args:
        end, depth: (R, L), of a `PackedTrie`.
        window: a query sees keys whose depth is up to `window - 1` less; None for no limit.
    """
    q, k = torch.arange(end.shape[1], device=end.device)[:, None], torch.arange(end.shape[1], device=end.device)
    mask = (k <= q) & (q < end[:, None, :])
    if window is not None:
        mask &= depth[:, :, None] - depth[:, None, :] < window
    return mask[:, None]


class TrieMask(BlockMask):
    """A `BlockMask` of a trie.

    - `end`, `depth` (R, L): int32
    - `window` (): a tensor, so that all layers share a compiled function; None if no layer has one
    - `blocks`: a plain `BlockMask` for torch.compile
    """

    end: Tensor
    depth: Tensor
    window: Tensor | None
    blocks: BlockMask
    ndim = 4  # some models read it


def trie_mask(end: Tensor, depth: Tensor, window: int | None = None, *, has_windows: bool = False) -> TrieMask:
    """Return a `TrieMask` without building an L x L tensor. L is a multiple of `BLOCK`.

    Args:
        end, depth, window: as in `dense_mask`.
        has_windows: whether another layer has a window.
    """
    n_rows, length = end.shape
    end, depth = end.int(), depth.int()
    limit = None
    if window is not None or has_windows:
        limit = torch.full((), length if window is None else window, dtype=torch.int32, device=end.device)

    def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
        low, high = x.view(n_rows, -1, BLOCK).aminmax(dim=-1)
        return low, high

    starts = torch.arange(0, length, BLOCK, device=end.device)
    q, k = starts[:, None], starts
    first_end, last_end = extremes(end)
    some = (k <= q) & (q < last_end[:, None, :])
    every = (k < q) & (q + BLOCK <= first_end[:, None, :])
    if window is not None:
        least, most = extremes(depth)
        some &= least[:, :, None] - most[:, None, :] < window
        every &= most[:, :, None] - least[:, None, :] < window
    partial, full = (some & ~every)[:, None], (some & every)[:, None]

    kinds = {"kv": partial, "full_kv": full, "q": partial.mT, "full_q": full.mT}
    arguments: dict[str, Any] = {"seq_lengths": (length, length), "BLOCK_SIZE": (BLOCK, BLOCK)}
    for kind, by in kinds.items():
        arguments[f"{kind}_num_blocks"], arguments[f"{kind}_indices"] = _ordered(by)
    arguments["mask_mod"] = _mask_mod(end, depth, limit)
    mask = TrieMask(**arguments)
    mask.end, mask.depth, mask.window, mask.blocks = end, depth, limit, BlockMask(**arguments)
    return mask


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows' numbers of True blocks, and indices, those first.

    Both are contiguous: FlexAttention's backward kernel assumes it, and would read other blocks.
    """
    order = (~blocks).contiguous().to(torch.int8).argsort(dim=-1, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()


def _mask_mod(end: Tensor, depth: Tensor, window: Tensor | None) -> Callable[..., Tensor]:
    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < end[batch, k])

    if window is None:
        return sees
    limit = window

    def sees_near(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(batch, head, q, k) & (depth[batch, q] - depth[batch, k] < limit)

    return sees_near


def _attend(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, scale: str, softcap: str | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return (R, heads, L, head size). `sinks` is (1, heads, 1).

    `scale` and `softcap` are strings: torch.compile makes numbers variables; FlexAttention needs constants.
    """
    cap = float(softcap or "inf")

    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    options: dict[str, Any] = {
        "block_mask": block_mask,
        "score_mod": capped if softcap else None,
        "scale": float(scale),
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if sinks is None:
        return flex_attention(query, key, value, **options)
    output, aux = flex_attention(query, key, value, **options, return_aux=AuxRequest(lse=True))
    share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype))  # of the weight that the sink leaves to the keys
    return (output * share[..., None]).to(query.dtype)


@functools.cache
def _compiled_attend() -> Callable[..., Tensor]:
    compiled = torch.compile(_attend, fullgraph=True, dynamic=True)

    @functools.wraps(_attend)
    def attend_at_any_length(*args: Any) -> Tensor:
        # Else sizes equal in the first call must stay equal.
        with fx_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            return compiled(*args)

    return attend_at_any_length


def _attend_densely(
    query: Tensor, key: Tensor, value: Tensor, mask: TrieMask, scale: float | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Replace `_attend` on a CPU, where FlexAttention has no gradient."""
    n_groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(n_groups, 1), value.repeat_interleave(n_groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~dense_mask(mask.end, mask.depth, mask.window), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: TrieMask,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return a layer's attention (R, L, heads, head size), for `AttentionInterface`.

    Compiles once each with and without gradients, for all lengths.
    """
    if dropout:
        raise ValueError(f"shared prompts need attention without dropout, got {dropout}: set attention_dropout=0")
    if kwargs.get("position_bias") is not None:
        raise ValueError("shared prompts do not support attention with a position bias")
    mask = attention_mask
    if query.device.type == "cpu":
        output = _attend_densely(query, key, value, mask, scaling, softcap, s_aux)
    else:
        sinks = None if s_aux is None else s_aux[None, :, None]
        run = _attend if torch.compiler.is_compiling() else _compiled_attend()
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        cap = None if softcap is None else str(softcap)
        output = run(query, key, value, mask.blocks, str(scale), cap, sinks)
    return output.transpose(1, 2).contiguous(), None


def _attend_only(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    if not isinstance(attention_mask, TrieMask):
        raise TypeError(f"its attention layers got a {type(attention_mask).__name__} in place of the given mask")
    return attend(module, query, key, value, attention_mask, *args, **kwargs)


AttentionInterface.register(TRIES_ONLY, _attend_only)


def serve(implementation: str) -> None:
    """Make an attention implementation accept a `TrieMask`. Raise ValueError for "eager"."""
    if implementation == "eager":
        raise ValueError(
            "eager attention cannot take long shared prompts: call model.set_attn_implementation('flex_attention')"
        )
    stock = ALL_ATTENTION_FUNCTIONS[implementation]
    if hasattr(stock, _SERVED):
        return

    @functools.wraps(stock)
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(attention_mask, TrieMask):
            return stock(module, query, key, value, attention_mask, *args, **kwargs)
        return attend(module, query, key, value, attention_mask, *args, **kwargs)

    vars(attention)[_SERVED] = True
    AttentionInterface.register(implementation, attention)
