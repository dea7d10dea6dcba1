"""Norms and the rotary embedding; gated MLPs are in `mlp.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from liger_chunked import layers
from liger_chunked.calls import typed_like
from liger_chunked.layers.rms_norm import Casting
from liger_chunked.types import shown

_CASTINGS: dict[str, Casting] = {"llama": "llama", "gemma": "gemma"}
_INITIAL: dict[str, Callable[[int], Tensor]] = {"ones": torch.ones, "zeros": torch.zeros}


def _initial(init_fn: str, hidden_size: int) -> nn.Parameter:
    if init_fn not in _INITIAL:
        raise ValueError(f"init_fn must be one of {list(_INITIAL)}, got {shown(init_fn)}")
    return nn.Parameter(_INITIAL[init_fn](hidden_size))


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama"
) -> Tensor:
    """Return the RMSNorm; with `casting_mode="none"`, in PyTorch and in the input's dtype throughout."""
    if casting_mode in _CASTINGS:
        return layers.liger_rms_norm(x, weight, eps, offset=offset, casting=_CASTINGS[casting_mode])
    if casting_mode != "none":
        raise ValueError(f"casting_mode must be one of {[*_CASTINGS, 'none']}, got {shown(casting_mode)}")
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * (offset + weight)


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:
    if casting_mode in _CASTINGS:
        casting = _CASTINGS[casting_mode]
        return layers.liger_rms_norm(x, weight, eps, offset=offset, casting=casting, residual=residual)
    total = x + residual
    return rms_norm(total, weight, eps, offset, casting_mode), total


class LigerRMSNorm(nn.Module):
    """RMSNorm, with a weight if `elementwise_affine`; see `liger_chunked.liger_rms_norm`.

    Args:
        casting_mode: "llama", "gemma", or "none", which computes in the input's dtype.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        if casting_mode not in (*_CASTINGS, "none"):
            raise ValueError(f"casting_mode must be one of {[*_CASTINGS, 'none']}, got {shown(casting_mode)}")
        self.register_parameter("weight", _initial(init_fn, hidden_size) if elementwise_affine else None)
        self.variance_epsilon = eps
        self.offset = offset
        self.casting_mode = casting_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def extra_repr(self) -> str:
        shape = None if self.weight is None else tuple(self.weight.shape)
        return f"{shape}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerFusedAddRMSNorm(LigerRMSNorm):
    """Return `(norm of the sum, sum)` of hidden states and a residual."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[override]


class LigerRMSNormForGemma(LigerRMSNorm):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn)


LigerRMSNormForGemma2 = LigerRMSNormForQwen3Next = LigerRMSNormForMuseGlimmerTextCentered = LigerRMSNormForGemma
LigerRMSNormForGlm4 = LigerRMSNormForOlmo2 = LigerRMSNorm


class LigerRMSNormForGemma3(LigerRMSNorm):
    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """RMSNorm in float32, with a weight if `with_scale`."""

    def __init__(
        self,
        dim: int | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, elementwise_affine=with_scale)  # type: ignore[arg-type]


LigerRMSNormForMuseGlimmer = LigerRMSNormForGemma4


class LigerLayerNorm(nn.Module):
    """LayerNorm; see `liger_chunked.liger_layer_norm`.

    The bias is always trainable; `bias` initialises it randomly, not with 0.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        impl: str | None = None,
        mode: str | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.weight = _initial(init_fn, hidden_size)
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        return layers.liger_layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply `liger_chunked.liger_rotary_pos_emb` to the first `rotary_dim` columns of a head.

    The default is the columns of `cos`. Otherwise `cos` and `sin` need only `rotary_dim // 2` columns. `position_ids`
    are read with tables `cos` and `sin`, (positions, R), and ignored otherwise, as Liger-Kernel ignores them.
    """
    if rotary_dim is not None:
        if rotary_dim % 2 or not 0 < rotary_dim <= 2 * cos.shape[-1]:
            raise ValueError(f"rotary_dim must be even and at most twice cos {tuple(cos.shape)}, got {rotary_dim}")
    rows = position_ids if cos.ndim == 2 else None
    return layers.liger_rotary_pos_emb(q, k, cos, sin, rows, unsqueeze_dim, rotary_dim=rotary_dim)
