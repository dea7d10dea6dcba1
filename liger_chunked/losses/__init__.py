"""One loss per file, its base beside it: mathematics on token statistics, and nothing of weights or chunks."""

from liger_chunked.losses.cpo import LigerFusedLinearCPOLoss
from liger_chunked.losses.cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_chunked.losses.dpo import LigerFusedLinearDPOLoss
from liger_chunked.losses.orpo import LigerFusedLinearORPOLoss
from liger_chunked.losses.preference import LigerFusedLinearPreferenceBase
from liger_chunked.losses.simpo import LigerFusedLinearSimPOLoss

__all__ = [
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearPreferenceBase",
    "LigerFusedLinearSimPOLoss",
]
