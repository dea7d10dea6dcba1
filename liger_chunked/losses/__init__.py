"""Losses on an `lm_head`: formulas on token statistics, without weights or chunks.

The bases are in preference.py (pairs), unpaired.py (labels), policy.py (rollouts) and distillation.py; surrogates of
policy losses in surrogates.py.
"""

from liger_chunked.losses.bco import LigerFusedLinearBCOLoss
from liger_chunked.losses.cosine import LigerFusedLinearCosineSimilarityLoss
from liger_chunked.losses.cpo import LigerFusedLinearCPOLoss
from liger_chunked.losses.cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_chunked.losses.distillation import LigerFusedLinearDistillationBase
from liger_chunked.losses.dpo import LigerFusedLinearDPOLoss
from liger_chunked.losses.grpo import LigerFusedLinearGRPOLoss
from liger_chunked.losses.jsd import LigerFusedLinearJSDLoss
from liger_chunked.losses.kl import LigerFusedLinearKLDivLoss
from liger_chunked.losses.kto import LigerFusedLinearKTOLoss
from liger_chunked.losses.on_policy import LigerFusedLinearOnPolicyDistillationLoss, with_sampled_token
from liger_chunked.losses.orpo import LigerFusedLinearORPOLoss
from liger_chunked.losses.policy import LigerFusedLinearPolicyBase
from liger_chunked.losses.preference import LigerFusedLinearPreferenceBase
from liger_chunked.losses.simpo import LigerFusedLinearSimPOLoss
from liger_chunked.losses.surrogates import Surrogate
from liger_chunked.losses.tvd import LigerFusedLinearTVDLoss
from liger_chunked.losses.unpaired import LigerFusedLinearUnpairedPreferenceBase

__all__ = [
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
    "Surrogate",
    "with_sampled_token",
]
