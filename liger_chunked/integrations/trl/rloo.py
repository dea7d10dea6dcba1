"""`LigerRLOOTrainer`: TRL's RLOO on a chunked head."""

from __future__ import annotations

from trl import RLOOTrainer

from liger_chunked.integrations.trl.mixin import LigerTrainerMixin


class LigerRLOOTrainer(LigerTrainerMixin, RLOOTrainer):
    """TRL's `RLOOTrainer` on a chunked head; it takes no `loss`."""
