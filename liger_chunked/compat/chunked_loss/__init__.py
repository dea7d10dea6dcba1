"""The signatures of `liger_kernel.chunked_loss` over our losses, with its errors."""

from liger_chunked.compat.chunked_loss.distillation import (
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearJSDLoss,
)
from liger_chunked.compat.chunked_loss.grpo import LigerFusedLinearGRPOLoss
from liger_chunked.compat.chunked_loss.preference import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from liger_chunked.compat.chunked_loss.preference import PairMetrics as PairMetrics

__all__ = [
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
]
