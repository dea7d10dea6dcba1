"""The last layer of post-training: `lm_head` and loss fused, chunk by chunk, without the logits."""

from liger_chunked.engine import linear_token_stats
from liger_chunked.losses import (
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearSimPOLoss,
    LigerFusedLinearTVDLoss,
)
from liger_chunked.types import (
    CrossEntropyMetrics,
    DistillationMetrics,
    LogitOptions,
    Pairs,
    PreferenceMetrics,
    TokenStats,
)

__version__ = "0.1.0"

__all__ = [
    "CrossEntropyMetrics",
    "DistillationMetrics",
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearDistillationBase",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKLDivLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearPreferenceBase",
    "LigerFusedLinearSimPOLoss",
    "LigerFusedLinearTVDLoss",
    "LogitOptions",
    "Pairs",
    "PreferenceMetrics",
    "TokenStats",
    "linear_token_stats",
]
