"""The trainers with `loss=`, `kept_ids` and `skip_zero_advantage`: TRL's, with a mixin each.

For the other arguments, see `LossMixin`, `RolloutsMixin` and TRL's trainers.
"""

from __future__ import annotations

from trl.trainer.distillation_trainer import DistillationTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.sft_trainer import SFTTrainer

from liger_chunked.integrations.trl.losses import DistillationMixin, DPOMixin, KTOMixin, SFTMixin
from liger_chunked.integrations.trl.policy import GRPOMixin, RLOOMixin


class LigerSFTTrainer(SFTMixin, SFTTrainer):
    """TRL's `SFTTrainer` with `loss=`.

    `loss` is a `LigerFusedLinearCrossEntropyLoss` with `reduction="mean"`, and excludes `compute_loss_func`.

        LigerSFTTrainer(model, train_dataset=texts, loss=LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-4))
    """


class LigerDPOTrainer(DPOMixin, DPOTrainer):
    """TRL's `DPOTrainer` with `loss=`.

    `loss` is a `LigerFusedLinearPreferenceBase`; if it rejects a reference, none is loaded.

        LigerDPOTrainer(model, args=DPOConfig(...), train_dataset=pairs, loss=LigerFusedLinearSimPOLoss(beta=2.0))
    """


class LigerKTOTrainer(KTOMixin, KTOTrainer):
    """TRL's `KTOTrainer` with `loss=`.

    `loss` is a `LigerFusedLinearUnpairedPreferenceBase` without a reference point, or with "kl", which needs
    `KTOConfig(loss_type="kto")` for mismatched completions.
    """


class LigerGRPOTrainer(GRPOMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` with `loss=`, `kept_ids` and `skip_zero_advantage`.

    `loss` is a `LigerFusedLinearPolicyBase`, at the config's `temperature`. For a KL term, set `beta` in the config
    too, or TRL keeps no reference. For a loss that needs a reference without a KL term, such as A*-PO, set any other
    `beta` than 0 in the config: only the loss's is read. With TRL's default divisor:

        loss = LigerFusedLinearGRPOLoss(reduction="dapo")
        LigerGRPOTrainer(model, reward_funcs=reward, train_dataset=prompts, loss=loss)
    """


class LigerRLOOTrainer(RLOOMixin, RLOOTrainer):
    """TRL's `RLOOTrainer` with `kept_ids` and `skip_zero_advantage`; it takes no `loss`."""


class LigerDistillationTrainer(DistillationMixin, DistillationTrainer):
    """TRL's `DistillationTrainer` with `loss=`, a `LigerFusedLinearDistillationBase`.

    Its temperature is the logged entropy's. TRL's own loss reads hidden states and weights, and not the models' heads:
    without `loss`, a `LigerFusedLinearJSDLoss` takes its place too, within `logits_budget` for both models' logits.
    """
