"""Masks and attention for packed tries (docs/shared_prefix.md).

The attention layers get a dense mask, or a `TrieMask` for FlexAttention. The mask decides which one runs, also when
checkpointing recomputes a layer.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from liger_chunked.kernels.tuning import TUNING
from liger_chunked.private import any_sizes

BLOCK = 128  # tokens
_SMALL_HEADS = 64  # values
TRIES_ONLY = "liger_tries_only"
_SERVED = "_liger_serves_tries"  # attribute of a wrapped function


def dense_mask(end: Tensor, depth: Tensor, window: int | Tensor | None = None) -> Tensor:
    """Return (R, 1, L, L), True where a query may attend to a key.

    With a `window`, a query sees keys whose depth is up to `window - 1` less.
    """
    q, k = torch.arange(end.shape[1], device=end.device)[:, None], torch.arange(end.shape[1], device=end.device)
    mask = (k <= q) & (q < end[:, None, :])
    if window is not None:
        mask &= depth[:, :, None] - depth[:, None, :] < window
    return mask[:, None]


class TrieMask(BlockMask):
    """A `BlockMask` of a trie.

    - `end`, `depth` (R, L): int32
    - `window` (): a tensor, so that layers share a compiled function; None if no layer has one
    - `blocks`: their numbers and indices, in the order of `_KINDS`
    - `small_heads`: FlexAttention's kernel_options for small heads on this device, here because a traced layer cannot
      ask for its device
    """

    end: Tensor
    depth: Tensor
    window: Tensor | None
    blocks: tuple[Tensor, ...]
    small_heads: dict[str, int]
    ndim = 4  # some models read it


_KINDS = ("kv", "full_kv", "q", "full_q")  # blocks that a mask cuts, and whole ones, by query and by key


def trie_mask(end: Tensor, depth: Tensor, window: int | None = None, *, has_windows: bool = False) -> TrieMask:
    """Return a `TrieMask` without an L x L tensor. L is a multiple of `BLOCK`.

    `has_windows`: whether another layer has a window.
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

    by_kind = [_ordered(blocks) for blocks in (partial, full, partial.mT, full.mT)]
    blocks = tuple(x for pair in by_kind for x in pair)
    mask = TrieMask(**_block_mask_arguments(blocks, length, end, depth, limit))
    mask.end, mask.depth, mask.window, mask.blocks = end, depth, limit, blocks
    mask.small_heads = dict(TUNING[end.device].attention_small_heads)
    return mask


def _block_mask_arguments(
    blocks: tuple[Tensor, ...], length: int, end: Tensor, depth: Tensor, window: Tensor | None
) -> dict[str, Any]:
    names = [f"{kind}_{what}" for kind in _KINDS for what in ("num_blocks", "indices")]
    return {
        **dict(zip(names, blocks, strict=True)),
        "seq_lengths": (length, length),
        "BLOCK_SIZE": (BLOCK, BLOCK),
        "mask_mod": _mask_mod(end, depth, window),
    }


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's number of True blocks, and indices, theirs first.

    Both are contiguous, as FlexAttention's backward assumes.
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
    query: Tensor, key: Tensor, value: Tensor, blocks: tuple[Tensor, ...], end: Tensor, depth: Tensor,
    window: Tensor | None, sinks: Tensor | None, scale: float, softcap: float | None,
    kernel_options: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """Return (R, heads, L, head size). `sinks` is (1, heads, 1).

    torch.compile checks the mask's parts faster than an object.
    """

    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    options: dict[str, Any] = {
        "block_mask": BlockMask(**_block_mask_arguments(blocks, query.shape[2], end, depth, window)),
        "score_mod": capped if softcap else None,
        "scale": scale,
        "enable_gqa": query.shape[1] != key.shape[1],
        "kernel_options": kernel_options,
    }
    if sinks is None:
        return flex_attention(query, key, value, **options)
    output, aux = flex_attention(query, key, value, **options, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None  # as requested
    share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype))  # of the weight that the sink leaves to the keys
    return (output * share[..., None]).to(query.dtype)


class _Compiled:
    """`_attend`, compiled once for all lengths, with the first call's other properties."""

    def __init__(self) -> None:
        # torch.compile counts recompilations of a code object, so this one has its own.
        own = types.FunctionType(_attend.__code__.replace(), _attend.__globals__, "attend_to_trie")
        self._run: Callable[..., Tensor] = torch.compile(own, fullgraph=True)
        self._is_first = True

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, blocks: tuple[Tensor, ...], end: Tensor, depth: Tensor,
        *others: Any,
    ) -> Tensor:  # fmt: skip
        if not self._is_first:
            return self._run(query, key, value, blocks, end, depth, *others)
        self._is_first = False
        sizes = [(x, (0, 2)) for x in (query, key, value)]
        sizes += [(x, (0, 1)) for x in (end, depth)]
        with any_sizes(*sizes, *((x, (0, *range(2, x.ndim))) for x in blocks)):
            return self._run(query, key, value, blocks, end, depth, *others)


@functools.cache
def _compiled(*kind: Any) -> _Compiled:
    return _Compiled()


def _run_compiled(
    query: Tensor, key: Tensor, value: Tensor, mask: TrieMask, sinks: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    run = _compiled(
        query.shape[0] == 1, query.shape[1], key.shape[1], query.shape[3], value.shape[3], query.dtype, query.device,
        torch.is_grad_enabled() and (query.requires_grad, key.requires_grad, value.requires_grad),
        mask.window is None, None if sinks is None else (sinks.requires_grad,), scale, softcap,
    )  # fmt: skip
    options = _kernel_options(query, mask)
    return run(query, key, value, mask.blocks, mask.end, mask.depth, mask.window, sinks, scale, softcap, options)


def _kernel_options(query: Tensor, mask: TrieMask) -> dict[str, int]:
    options: dict[str, int] = {"IS_DIVISIBLE": True}  # by BLOCK; torch cannot tell for a variable length
    return options | mask.small_heads if query.shape[3] <= _SMALL_HEADS else options


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


def _has_flex_attention(query: Tensor) -> bool:
    return query.device.type != "cpu"  # where it has no gradient


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
    """Return a layer's attention (R, L, heads, head size), for `AttentionInterface`."""
    if dropout:
        raise ValueError(f"shared prompts need attention without dropout, got {dropout}: set attention_dropout=0")
    if kwargs.get("position_bias") is not None:
        raise ValueError("shared prompts do not support attention with a position bias")
    mask = attention_mask
    if not _has_flex_attention(query):
        output = _attend_densely(query, key, value, mask, scaling, softcap, s_aux)
    else:
        sinks = None if s_aux is None else s_aux[None, :, None]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if torch.compiler.is_compiling():
            parts = mask.blocks, mask.end, mask.depth, mask.window
            output = _attend(query, key, value, *parts, sinks, scale, softcap, _kernel_options(query, mask))
        else:
            output = _run_compiled(query, key, value, mask, sinks, scale, softcap)
    return output.transpose(1, 2).contiguous(), None


def _attend_only(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    if not isinstance(attention_mask, TrieMask):
        raise TypeError(f"its attention layers got a {type(attention_mask).__name__} in place of the given mask")
    return attend(module, query, key, value, attention_mask, *args, **kwargs)


AttentionInterface.register(TRIES_ONLY, _attend_only)


def serve(implementation: str) -> None:
    """Make an attention implementation accept a `TrieMask`; ValueError for "eager"."""
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
