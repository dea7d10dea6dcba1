"""The trainers with `loss=`, `kept_ids` and `skip_zero_advantage`: TRL's, with a mixin each."""

from __future__ import annotations

from trl import DistillationTrainer, DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer, SFTTrainer

from liger_chunked.integrations.trl.losses import DistillationMixin, DPOMixin, KTOMixin, SFTMixin
from liger_chunked.integrations.trl.policy import GRPOMixin, RLOOMixin


class LigerSFTTrainer(SFTMixin, SFTTrainer):
    __doc__ = SFTMixin.__doc__


class LigerDPOTrainer(DPOMixin, DPOTrainer):
    __doc__ = DPOMixin.__doc__


class LigerKTOTrainer(KTOMixin, KTOTrainer):
    __doc__ = KTOMixin.__doc__


class LigerGRPOTrainer(GRPOMixin, GRPOTrainer):
    __doc__ = GRPOMixin.__doc__


class LigerRLOOTrainer(RLOOMixin, RLOOTrainer):
    __doc__ = RLOOMixin.__doc__


class LigerDistillationTrainer(DistillationMixin, DistillationTrainer):
    __doc__ = DistillationMixin.__doc__
