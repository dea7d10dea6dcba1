"""DPO with TRL, with any of its loss types, on a chunked head.

python examples/trl_dpo.py [--model PATH] [--steps N]
"""

from __future__ import annotations

from trl import DPOConfig
from trl_common import preference_data, setup

from liger_chunked.integrations.trl import LigerDPOTrainer

if __name__ == "__main__":
    model, tokenizer, settings, _ = setup()
    trainer = LigerDPOTrainer(
        model=model,
        # The reference is scored once, before training, so no second model is kept.
        args=DPOConfig(**settings, beta=0.1, loss_type="sigmoid", precompute_ref_log_probs=True),
        processing_class=tokenizer,
        train_dataset=preference_data(),
    )
    trainer.train()
