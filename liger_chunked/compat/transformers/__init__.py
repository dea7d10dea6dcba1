"""The signatures of `liger_kernel.transformers` over our kernels and models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from liger_chunked.compat.transformers.families import (
    APPLY,
    INTEGRATION,
    ORDERS,
    FamilyFunction,
    family_function,
    functions_by_type,
    is_transformers_available,
)
from liger_chunked.compat.transformers.families import _apply_liger_kernel as _apply_liger_kernel
from liger_chunked.compat.transformers.families import (
    _apply_liger_kernel_to_instance as _apply_liger_kernel_to_instance,
)
from liger_chunked.compat.transformers.layers import (
    LigerFusedAddRMSNorm,
    LigerLayerNorm,
    LigerRMSNorm,
    LigerRMSNormForGemma,
    LigerRMSNormForGemma2,
    LigerRMSNormForGemma3,
    LigerRMSNormForGemma4,
    LigerRMSNormForGlm4,
    LigerRMSNormForMuseGlimmer,
    LigerRMSNormForMuseGlimmerTextCentered,
    LigerRMSNormForOlmo2,
    LigerRMSNormForQwen3Next,
    liger_rotary_pos_emb,
)
from liger_chunked.compat.transformers.losses import (
    CrossEntropyOutput,
    LigerCrossEntropyLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearJSD,
    LigerJSD,
    LigerKLDIVLoss,
    LigerTVDLoss,
)
from liger_chunked.compat.transformers.mlp import (
    LigerBlockSparseTop2MLP,
    LigerExperts,
    LigerFalconH1SwiGLUMLP,
    LigerGEGLUMLP,
    LigerGEGLUMLPForGemma4,
    LigerPhi3SwiGLUMLP,
    LigerTiledGEGLUMLP,
    LigerTiledSwiGLUMLP,
)
from liger_chunked.compat.unsupported import missing
from liger_chunked.layers import LigerSwiGLUMLP

if TYPE_CHECKING:
    from liger_chunked.integrations.transformers import (
        AutoLigerKernelForCausalLM as AutoLigerKernelForCausalLM,
    )
    from liger_chunked.integrations.transformers import (
        AutoLigerKernelForImageTextToText as AutoLigerKernelForImageTextToText,
    )

    MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, FamilyFunction]

__all__ = [
    "CrossEntropyOutput",
    "LigerBlockSparseTop2MLP",
    "LigerCrossEntropyLoss",
    "LigerExperts",
    "LigerFalconH1SwiGLUMLP",
    "LigerFusedAddRMSNorm",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearJSD",
    "LigerGEGLUMLP",
    "LigerGEGLUMLPForGemma4",
    "LigerJSD",
    "LigerKLDIVLoss",
    "LigerLayerNorm",
    "LigerPhi3SwiGLUMLP",
    "LigerQwen3MoeSwiGLUMLP",
    "LigerRMSNorm",
    "LigerRMSNormForGemma",
    "LigerRMSNormForGemma2",
    "LigerRMSNormForGemma3",
    "LigerRMSNormForGemma4",
    "LigerRMSNormForGlm4",
    "LigerRMSNormForMuseGlimmer",
    "LigerRMSNormForMuseGlimmerTextCentered",
    "LigerRMSNormForOlmo2",
    "LigerRMSNormForQwen3Next",
    "LigerSwiGLUMLP",
    "LigerSwiGLUMLPForMuseGlimmer",
    "LigerTVDLoss",
    "LigerTiledGEGLUMLP",
    "LigerTiledSwiGLUMLP",
    "is_transformers_available",
    "liger_rotary_pos_emb",
]

LigerQwen3MoeSwiGLUMLP: TypeAlias = LigerSwiGLUMLP
LigerSwiGLUMLPForMuseGlimmer: TypeAlias = LigerSwiGLUMLP


# For type checkers every other name is an `apply_liger_kernel_to_<family>`, whose positions depend on the family.
def __getattr__(name: str) -> FamilyFunction:
    value: Any
    if name == "MODEL_TYPE_TO_APPLY_LIGER_FN":
        value = functions_by_type()
        return value
    if name in ("AutoLigerKernelForCausalLM", "AutoLigerKernelForImageTextToText"):
        return getattr(import_module(INTEGRATION), name)
    if name.startswith(APPLY):
        return family_function(name)
    return missing(__name__, name)


def __dir__() -> list[str]:
    offered = [f"{APPLY}{family}" for family in ORDERS] + ["AutoLigerKernelForCausalLM"]
    return sorted({*globals(), *(offered if is_transformers_available() else ())})
