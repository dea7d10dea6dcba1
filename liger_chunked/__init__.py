"""The last layer of post-training: `lm_head` and loss fused, chunk by chunk, without the logits."""

from liger_chunked.engine import linear_token_stats
from liger_chunked.losses import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearSimPOLoss,
)
from liger_chunked.types import CrossEntropyMetrics, LogitOptions, Pairs, PreferenceMetrics, TokenStats

__version__ = "0.1.0"

__all__ = [
    "CrossEntropyMetrics",
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearPreferenceBase",
    "LigerFusedLinearSimPOLoss",
    "LogitOptions",
    "Pairs",
    "PreferenceMetrics",
    "TokenStats",
    "linear_token_stats",
]
