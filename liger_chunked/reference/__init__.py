"""Eager reference implementations: every loss from full logits, written from its formula in plain torch."""

from liger_chunked.reference.cross_entropy import cross_entropy
from liger_chunked.reference.distillation import distillation
from liger_chunked.reference.dpo import dpo
from liger_chunked.reference.grpo import grpo
from liger_chunked.reference.reference_free import cpo, orpo, simpo
from liger_chunked.reference.token_stats import logits, token_stats
from liger_chunked.reference.unpaired import bco, kto

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
