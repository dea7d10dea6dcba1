"""Oracles of the tests: every loss on full logits, in plain torch.

The fused losses have the same arguments and document them.
"""

from liger_chunked.eager.cross_entropy import cross_entropy
from liger_chunked.eager.distillation import distillation
from liger_chunked.eager.dpo import dpo
from liger_chunked.eager.grpo import grpo
from liger_chunked.eager.reference_free import cpo, orpo, simpo
from liger_chunked.eager.token_stats import logits, token_stats
from liger_chunked.eager.unpaired import bco, kto

__all__ = [
    "bco",
    "cpo",
    "cross_entropy",
    "distillation",
    "dpo",
    "grpo",
    "kto",
    "logits",
    "orpo",
    "simpo",
    "token_stats",
]
