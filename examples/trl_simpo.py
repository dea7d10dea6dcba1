"""SimPO with TRL, in two ways: CPO's trainer with its `loss_type`, and DPO's trainer with our loss.

python examples/trl_simpo.py [--model PATH] [--steps N]
"""

from __future__ import annotations

import copy

from trl import DPOConfig
from trl_common import preference_data, setup

from liger_chunked import LigerFusedLinearSimPOLoss, patch_trl
from liger_chunked.integrations.trl import LigerDPOTrainer

if __name__ == "__main__":
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    model, tokenizer, settings, _ = setup()
    shared = {"processing_class": tokenizer, "train_dataset": preference_data()}

    # TRL's trainer and its loss, without logits.
    simpo = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0}
    args = CPOConfig(**settings, **simpo, remove_unused_columns=False)
    with patch_trl():
        CPOTrainer(model=copy.deepcopy(model), args=args, **shared).train()

    # Our loss, with its gradient computed in forward. It rejects a reference, so none is loaded.
    loss = LigerFusedLinearSimPOLoss(beta=2.0, gamma=0.5)
    LigerDPOTrainer(model=model, args=DPOConfig(**settings), loss=loss, **shared).train()
