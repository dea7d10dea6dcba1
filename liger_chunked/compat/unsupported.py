"""Refuses Liger-Kernel's unsupported names and arguments."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from liger_chunked.types import shown

_IN_MODELS = "liger_chunked.apply_liger_kernel(model) serves the layers of a model without such a class"

MISSING: dict[str, str] = {
    **dict.fromkeys(
        [
            "LigerBlockSparseTop2MLP", "LigerExperts", "LigerPhi3SwiGLUMLP", "LigerQwen3MoeSwiGLUMLP",
            "LigerRMSNormForMuseGlimmer", "LigerRMSNormForMuseGlimmerTextCentered", "LigerSwiGLUMLPForMuseGlimmer",
        ],
        _IN_MODELS,
    ),
    **dict.fromkeys(
        [
            "LigerDyT", "LigerFalconH1MLP", "LigerFalconH1SwiGLUMLP", "LigerFusedAddRMSNorm", "LigerMHC", "LigerMLP",
            "LigerModulatedRMSNorm", "LigerMultiTokenAttention", "LigerPolyNorm", "LigerReLUSquared", "LigerSoftmax",
            "LigerSparsemax", "liger_llama4_text_rotary_pos_emb", "liger_llama4_vision_rotary_pos_emb",
        ],
        "it is not in liger_chunked; import it from liger_kernel.transformers",
    ),
    "LigerFusedCETVDLoss": "use liger_chunked.LigerFusedLinearTVDLoss, which takes the head's weight instead of logits",
    "LigerFusedLinearKLDivLoss": "use liger_chunked.LigerFusedLinearKLDivLoss, which has another order of arguments",
    "LigerTiledGEGLUMLP": "use LigerGEGLUMLP, or liger_chunked.liger_geglu on tiles of your own",
    "LigerTiledSwiGLUMLP": "use LigerSwiGLUMLP, or liger_chunked.liger_swiglu on tiles of your own",
    "LigerVocabParallelCrossEntropy": "use liger_chunked.functional.cross_entropy_loss with vocab_shard",
}  # fmt: skip


def refuse(name: str, value: object, reason: str) -> None:
    if isinstance(value, Tensor) or value:
        raise NotImplementedError(f"{name}={shown(value)} is not supported: {reason}")


def missing(module: str, name: str) -> NoReturn:
    """Refuse a name of a module.

    Raises:
        ImportError: Liger-Kernel has the name. The message of an AttributeError is lost in `from ... import`.
        AttributeError: Liger-Kernel has no such name.
    """
    if name in MISSING:
        raise ImportError(f"{name} is not supported: {MISSING[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
