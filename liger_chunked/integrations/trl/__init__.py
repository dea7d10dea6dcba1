"""TRL's trainers, on chunks of logits: `patch_trl` for all of them, and classes for what a subclass alone gives.

docs/trainers.md says which trainer computes what, and how.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from liger_chunked import versions

versions.require(__name__, "transformers", "trl")

if TYPE_CHECKING:
    from liger_chunked.integrations.trl.patch import patch_trl
    from liger_chunked.integrations.trl.trainers import (
        LigerDistillationTrainer,
        LigerDPOTrainer,
        LigerGRPOTrainer,
        LigerKTOTrainer,
        LigerRLOOTrainer,
        LigerSFTTrainer,
    )

__all__ = [
    "LigerDPOTrainer",
    "LigerDistillationTrainer",
    "LigerGRPOTrainer",
    "LigerKTOTrainer",
    "LigerRLOOTrainer",
    "LigerSFTTrainer",
    "patch_trl",
]


def __getattr__(name: str) -> Any:
    """Import on first use: TRL's trainers take seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{'patch' if name == 'patch_trl' else 'trainers'}"), name)
    return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return __all__
