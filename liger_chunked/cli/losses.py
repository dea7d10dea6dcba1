from __future__ import annotations

from collections.abc import Callable

import liger_chunked as library
from liger_chunked.memory import Loss

LOSSES: dict[str, Callable[[], Loss]] = {
    "cross-entropy": library.LigerFusedLinearCrossEntropyLoss,
    "dpo": library.LigerFusedLinearDPOLoss,
    "orpo": library.LigerFusedLinearORPOLoss,
    "cpo": library.LigerFusedLinearCPOLoss,
    "simpo": library.LigerFusedLinearSimPOLoss,
    "kto": library.LigerFusedLinearKTOLoss,
    "bco": library.LigerFusedLinearBCOLoss,
    "grpo": library.LigerFusedLinearGRPOLoss,
    "kl": library.LigerFusedLinearKLDivLoss,
    "jsd": library.LigerFusedLinearJSDLoss,
    "tvd": library.LigerFusedLinearTVDLoss,
    "cosine": library.LigerFusedLinearCosineSimilarityLoss,
    "token-stats": lambda: library.linear_token_stats,
}
PAIRS = ("dpo", "orpo", "cpo", "simpo")
REFERENCED = ("dpo", "kto", "bco")  # by default with a reference model
TAUGHT = ("kl", "jsd", "tvd", "cosine")
