"""Oracles of the tests: every loss on full logits, in plain torch.

The fused losses have the same arguments and document them.
"""

from eager.cross_entropy import cross_entropy
from eager.distillation import distillation
from eager.dpo import dpo
from eager.grpo import grpo
from eager.reference_free import cpo, orpo, simpo
from eager.token_stats import logits, token_stats
from eager.unpaired import bco, kto

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
