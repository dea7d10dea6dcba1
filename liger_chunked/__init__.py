"""The last layer of post-training: `lm_head` and loss fused, chunk by chunk, without the logits."""

from liger_chunked.engine import linear_token_stats
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
    LigerFusedLinearORPOLoss,
    LigerFusedLinearPolicyBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearSimPOLoss,
    LigerFusedLinearTVDLoss,
    LigerFusedLinearUnpairedPreferenceBase,
)
from liger_chunked.memory import estimate_memory
from liger_chunked.types import (
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
)

__version__ = "0.1.0"

__all__ = [
    "CrossEntropyMetrics",
    "DistillationMetrics",
    "Examples",
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
    "LigerFusedLinearPolicyBase",
    "LigerFusedLinearPreferenceBase",
    "LigerFusedLinearSimPOLoss",
    "LigerFusedLinearTVDLoss",
    "LigerFusedLinearUnpairedPreferenceBase",
    "LogitOptions",
    "MemoryEstimate",
    "Pairs",
    "PolicyMetrics",
    "PreferenceMetrics",
    "Rollouts",
    "TokenStats",
    "UnpairedPreferenceMetrics",
    "estimate_memory",
    "linear_token_stats",
]
