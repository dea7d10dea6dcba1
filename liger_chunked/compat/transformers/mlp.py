"""The gated MLPs of `liger_kernel.transformers`, except `LigerSwiGLUMLP`, and tiles of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_chunked.calls import typed_like
from liger_chunked.layers.glu import liger_geglu, liger_swiglu, unobserved
from liger_chunked.types import shown


def _check_silu(config: Any) -> None:
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act must be silu or swish, got {shown(config.hidden_act)}")


class LigerGEGLUMLP(nn.Module):
    """`down_proj(gelu(gate_proj(x)) * up_proj(x))`, always with the gelu of tanh and without biases."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._build(config, config.intermediate_size)

    def _build(self, config: Any, intermediate_size: int) -> None:
        self.hidden_size, self.intermediate_size = config.hidden_size, intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(liger_geglu(self.gate_proj(x), self.up_proj(x)))

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def apply_tiled_mlp(
    fn: Callable[[Any, Tensor], Tensor],
    mlp_module: nn.Module,
    x: Tensor,
    num_shards: int | None = None,
    compute_params: Sequence[nn.Parameter] | None = None,
) -> Tensor:
    """Return `fn(mlp_module, x)`, computed and differentiated for a part of the tokens at a time.

    Args:
        fn: a token-wise function of `mlp_module` and a tile of `x`, with as many dimensions, that uses no parameters
            but those of `mlp_module`.
        mlp_module: the module.
        x: (B, T, H) or (N, H).
        num_shards: into how many parts to cut the tokens of all sequences together. None: `ceil(T / H)`.
        compute_params: not used; Liger-Kernel passes them to ZeRO. Here every parameter gets its gradient once.

    Returns:
        The shape of `x`, or of what `fn` returns for it.

    Raises:
        ValueError: `num_shards` is not positive, or `fn` returns another number of tokens.
        TypeError: `fn` returns no tensor, or a parameter is a DTensor.
    """
    tiled = import_module("liger_chunked.layers.tiled").tiled  # it imports torch's compiler, which takes seconds
    if num_shards is None:
        num_shards = max(1, math.ceil(x.shape[-2] / x.shape[-1]))
    if num_shards < 1:
        raise ValueError(f"num_shards must be positive, got {num_shards}")
    tokens = max(1, math.ceil(x.shape[:-1].numel() / num_shards))
    result: Tensor = tiled(lambda tile: fn(mlp_module, tile), mlp_module, x, tokens)
    return result


class LigerTiledGEGLUMLP(LigerGEGLUMLP):
    """`LigerGEGLUMLP` in `num_shards` parts of the tokens, None: `ceil(T / H)`; see `apply_tiled_mlp`."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(config)
        if getattr(config, "hidden_act", "gelu") not in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
            raise ValueError(f"hidden_act must be gelu, gelu_new or gelu_pytorch_tanh, got {shown(config.hidden_act)}")
        self.config, self.num_shards = config, num_shards

    def forward(self, x: Tensor) -> Tensor:
        return apply_tiled_mlp(LigerGEGLUMLP.forward, self, x, self.num_shards)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerTiledSwiGLUMLP(nn.Module):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))` in `num_shards` parts of the tokens; see `apply_tiled_mlp`."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__()
        if hasattr(config, "hidden_act"):
            _check_silu(config)
        self.config, self.num_shards = config, num_shards
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return apply_tiled_mlp(_swiglu_mlp, self, x, self.num_shards)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def _swiglu_mlp(mlp: Any, x: Tensor) -> Tensor:
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    return mlp.down_proj(liger_swiglu(gate, up, inplace=unobserved(mlp.gate_proj, mlp.up_proj)))


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """`LigerGEGLUMLP`, twice as wide in layers that share keys and values if `config.use_double_wide_mlp`."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        nn.Module.__init__(self)
        shared = getattr(config, "num_kv_shared_layers", 0) or 0
        first = getattr(config, "num_hidden_layers", 0) - shared
        wide = getattr(config, "use_double_wide_mlp", False) and layer_idx is not None and 0 < shared
        self._build(config, config.intermediate_size * (2 if wide and layer_idx >= first else 1))  # type: ignore[operator]


class LigerPhi3SwiGLUMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        _check_silu(config)
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(liger_swiglu(self.gate_up_proj(x)))

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerBlockSparseTop2MLP(nn.Module):
    """One expert of an early Mixtral: `w2(silu(w1(x)) * w3(x))`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        _check_silu(config)
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(liger_swiglu(self.w1(x), self.w3(x)))

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerFalconH1SwiGLUMLP(nn.Module):
    """`down_proj(silu(g * gate_proj(x)) * up_proj(x) * d)` with `g, d = config.mlp_multipliers`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        _check_silu(config)
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)
        self.gate_multiplier, self.down_multiplier = (float(x) for x in config.mlp_multipliers)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x) * self.gate_multiplier
        return self.down_proj(liger_swiglu(gate, self.up_proj(x)) * self.down_multiplier)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerExperts(nn.Module):
    """SwiGLU experts with 3-D parameters, one after the other; `apply_liger_kernel` serves a model's own faster."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        _check_silu(config)
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        self.num_experts = next(getattr(config, name) for name in names if hasattr(config, name))
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * width, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, config.hidden_size, width))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts; index and weights are (..., K)."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        index, weights = (t.reshape(-1, t.shape[-1]) for t in (top_k_index, top_k_weights))
        y = torch.zeros_like(x)
        for expert in index.unique().tolist():
            token, k = (index == expert).nonzero(as_tuple=True)
            product = liger_swiglu(F.linear(x[token], self.gate_up_proj[expert]))
            part = F.linear(product, self.down_proj[expert]) * weights[token, k, None]
            y = y.index_add(0, token, part.to(y.dtype))
        return y.view_as(hidden_states)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
