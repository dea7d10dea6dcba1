"""Attention over rows that are packed as a trie: masks, and the attention function that takes them.

A model gets its mask ready-made, as `attention_mask=`, so that it needs no other forward. transformers passes a mask of
four dimensions, or one for each type of layer in a dict, to the attention layers as it is. There are two kinds:

- a dense mask, for SDPA and eager attention: on a CPU and for short rows
- a `TrieMask`, for FlexAttention, which skips the blocks of tokens that see nothing of each other

SDPA and flash attention do not know a `TrieMask`. `serve` registers a function in their place that runs FlexAttention
for a `TrieMask` and the original one for every other mask. The config stays as it is, so the choice depends on the mask
alone, also when gradient checkpointing repeats a layer.
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

BLOCK = 128  # tokens; rows of a `TrieMask` are multiples of it
TRIES_ONLY = "liger_tries_only"  # an attention implementation that accepts no mask but a `TrieMask`
_SERVED = "_liger_serves_tries"  # attribute of an attention function


def dense_mask(end: Tensor, depth: Tensor, window: int | Tensor | None = None) -> Tensor:
    """Return (R, 1, L, L), True where a query may attend to a key.

    Args:
        end, depth: (R, L), of a `PackedTrie`.
        window: the most distant key has a depth of `window - 1` less than the query; None for no limit.
    """
    q, k = torch.arange(end.shape[1], device=end.device)[:, None], torch.arange(end.shape[1], device=end.device)
    mask = (k <= q) & (q < end[:, None, :])
    if window is not None:
        mask &= depth[:, :, None] - depth[:, None, :] < window
    return mask[:, None]


class TrieMask(BlockMask):
    """A `BlockMask` of a trie.

    - `end`, `depth` (R, L): int32
    - `window` (): a tensor, so that layers with and without a window run the same compiled function; None if no layer
      has one
    - `blocks`: the `BlockMask` itself, of the class that torch compiles
    """

    end: Tensor
    depth: Tensor
    window: Tensor | None
    blocks: BlockMask
    ndim = 4  # some models ask for it


def trie_mask(end: Tensor, depth: Tensor, window: int | None = None, *, has_windows: bool = False) -> TrieMask:
    """Return the `TrieMask` of rows whose length is a multiple of `BLOCK`, without an L x L tensor.

    Args:
        end, depth, window: as in `dense_mask`.
        has_windows: other layers of the model have a window.
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
    """Return how many blocks are True in each row, and the indices of all, those first."""
    order = (~blocks).to(torch.int8).argsort(dim=-1, stable=True)
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

    `scale` and `softcap` are numbers as strings: a compiled function takes numbers as variables, and FlexAttention
    needs constants.
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
        # Otherwise sizes that are equal in the first call, such as heads and blocks, would have to stay equal.
        with fx_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            return compiled(*args)

    return attend_at_any_length


def _attend_densely(
    query: Tensor, key: Tensor, value: Tensor, mask: TrieMask, scale: float | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute the same as `_attend`. On a CPU FlexAttention has no gradient, and is slow to compile."""
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
    """Return the attention (R, L, heads, head size) of a layer, as functions of `AttentionInterface` do.

    It is compiled once for all lengths with gradients, and once without.
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
    """Make an attention implementation of transformers accept a `TrieMask`. Other masks take the same path as before.

    Raises:
        ValueError: the implementation is "eager", which every model defines for itself.
    """
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
