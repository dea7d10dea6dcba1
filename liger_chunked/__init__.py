"""Losses for post-training: `lm_head` and loss fused, chunk by chunk, without the full logits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from liger_chunked import versions

if TYPE_CHECKING:
    from liger_chunked.cache import TokenCache, read_cache, write_cache
    from liger_chunked.deferred import DeferHandle, DeferredLogits, defer_logits
    from liger_chunked.engine import linear_token_stats, shifted
    from liger_chunked.fused_head import fused_lm_head
    from liger_chunked.integrations.transformers import (
        AutoLigerKernelForCausalLM as AutoLigerKernelForCausalLM,
    )
    from liger_chunked.integrations.transformers import (
        AutoLigerKernelForImageTextToText as AutoLigerKernelForImageTextToText,
    )
    from liger_chunked.integrations.transformers import (
        apply_liger_kernel as apply_liger_kernel,
    )
    from liger_chunked.integrations.transformers import (
        attach_head as attach_head,
    )
    from liger_chunked.integrations.transformers import (
        detach_head as detach_head,
    )
    from liger_chunked.integrations.transformers import (
        logit_options as logit_options,
    )
    from liger_chunked.integrations.transformers import (
        register_layer as register_layer,
    )
    from liger_chunked.integrations.transformers import (
        revert_liger_kernel as revert_liger_kernel,
    )
    from liger_chunked.integrations.transformers import (
        run_head as run_head,
    )
    from liger_chunked.integrations.transformers.family import FamilyFunction
    from liger_chunked.integrations.trl import patch_trl as patch_trl
    from liger_chunked.kept_ids import KeptIds
    from liger_chunked.kernels import (
        liger_cross_entropy,
    )
    from liger_chunked.layers import (
        LigerGEGLUMLP,
        LigerLayerNorm,
        LigerRMSNorm,
        LigerSwiGLUMLP,
        liger_geglu,
        liger_layer_norm,
        liger_relu_squared,
        liger_rms_norm,
        liger_rms_norm_gated,
        liger_rotary_pos_emb,
        liger_swiglu,
    )
    from liger_chunked.losses import (
        LigerFusedLinearBCOLoss,
        LigerFusedLinearCosineSimilarityLoss,
        LigerFusedLinearCPOLoss,
        LigerFusedLinearCrossEntropyLoss,
        LigerFusedLinearDistillationBase,
        LigerFusedLinearDPOLoss,
        LigerFusedLinearGRPOLoss,
        LigerFusedLinearJSDLoss,
        LigerFusedLinearKLDivLoss,
        LigerFusedLinearKTOLoss,
        LigerFusedLinearOnPolicyDistillationLoss,
        LigerFusedLinearORPOLoss,
        LigerFusedLinearPolicyBase,
        LigerFusedLinearPreferenceBase,
        LigerFusedLinearSimPOLoss,
        LigerFusedLinearTVDLoss,
        LigerFusedLinearUnpairedPreferenceBase,
        Surrogate,
        with_sampled_token,
    )
    from liger_chunked.memory import estimate_memory
    from liger_chunked.modules import LigerCrossEntropyLoss
    from liger_chunked.scoring import Perplexity, next_tokens, perplexity, score, teacher_top_k
    from liger_chunked.teachers import TopK
    from liger_chunked.types import (
        AdaptedWeight,
        Clipped,
        CrossEntropyMetrics,
        DistillationMetrics,
        Examples,
        LogitOptions,
        MemoryEstimate,
        Pairs,
        PolicyMetrics,
        PreferenceMetrics,
        Rollouts,
        TokenStats,
        UnpairedPreferenceMetrics,
        VocabShard,
    )
    from liger_chunked.what_ran import Explanation, explain

__version__ = "0.1.0"

__all__ = [
    "AdaptedWeight",
    "Clipped",
    "CrossEntropyMetrics",
    "DeferHandle",
    "DeferredLogits",
    "DistillationMetrics",
    "Examples",
    "Explanation",
    "KeptIds",
    "LigerCrossEntropyLoss",
    "LigerFusedLinearBCOLoss",
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearDistillationBase",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKLDivLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearOnPolicyDistillationLoss",
    "LigerFusedLinearPolicyBase",
    "LigerFusedLinearPreferenceBase",
    "LigerFusedLinearSimPOLoss",
    "LigerFusedLinearTVDLoss",
    "LigerFusedLinearUnpairedPreferenceBase",
    "LigerGEGLUMLP",
    "LigerLayerNorm",
    "LigerRMSNorm",
    "LigerSwiGLUMLP",
    "LogitOptions",
    "MemoryEstimate",
    "Pairs",
    "Perplexity",
    "PolicyMetrics",
    "PreferenceMetrics",
    "Rollouts",
    "Surrogate",
    "TokenCache",
    "TokenStats",
    "TopK",
    "UnpairedPreferenceMetrics",
    "VocabShard",
    "defer_logits",
    "estimate_memory",
    "explain",
    "fused_lm_head",
    "liger_cross_entropy",
    "liger_geglu",
    "liger_layer_norm",
    "liger_relu_squared",
    "liger_rms_norm",
    "liger_rms_norm_gated",
    "liger_rotary_pos_emb",
    "liger_swiglu",
    "linear_token_stats",
    "next_tokens",
    "perplexity",
    "read_cache",
    "score",
    "shifted",
    "teacher_top_k",
    "with_sampled_token",
    "write_cache",
]

# Imported on first use.
_MODULES = (
    "cache",
    "deferred",
    "engine",
    "kept_ids",
    "kernels",
    "layers",
    "losses",
    "memory",
    "modules",
    "scoring",
    "teachers",
    "testing",
    "types",
)
_HOMES = (
    "types", "kept_ids", "teachers", "engine", "losses", "kernels", "layers", "modules", "memory", "deferred",
    "scoring", "cache", "what_ran", "fused_head",
)  # fmt: skip
_OF_TRANSFORMERS = (
    "AutoLigerKernelForCausalLM",
    "AutoLigerKernelForImageTextToText",
    "apply_liger_kernel",
    "attach_head",
    "detach_head",
    "logit_options",
    "register_layer",
    "revert_liger_kernel",
    "run_head",
)
_OF_TRL = ("patch_trl",)
# `from liger_chunked import *` resolves `__all__`, which fails for these without transformers, or with an older one.
if versions.suffices("transformers"):
    __all__ += list(_OF_TRANSFORMERS)
    if versions.suffices("trl"):
        __all__ += list(_OF_TRL)


# For type checkers every other name is an `apply_liger_kernel_to_<family>`: they report a wrong one where it is used.
def __getattr__(name: str) -> "FamilyFunction":
    value: Any
    if name in _MODULES:
        value = import_module(f"{__name__}.{name}")
        return value
    if name in _OF_TRANSFORMERS or name.startswith("apply_liger_kernel_to_"):
        return getattr(import_module(f"{__name__}.integrations.transformers"), name)
    if name in _OF_TRL:
        return getattr(import_module(f"{__name__}.integrations.trl"), name)
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                globals()[name] = value = getattr(module, name)
                return value
    if name.startswith("Liger") and name.endswith("Trainer"):
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}: import it from {__name__}.integrations.trl"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_OF_TRANSFORMERS, *_OF_TRL, *_MODULES})
