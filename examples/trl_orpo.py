"""ORPO with TRL, without logits. TRL's own trainer builds them for every token of prompt and response.

python examples/trl_orpo.py [--model PATH] [--steps N]
"""

from __future__ import annotations

from trl_common import preference_data, setup  # before trl.experimental, to silence its notice

from liger_chunked.integrations.trl import LigerORPOTrainer

if __name__ == "__main__":
    from trl.experimental.orpo import ORPOConfig

    model, tokenizer, settings, _ = setup()
    trainer = LigerORPOTrainer(
        model=model,
        args=ORPOConfig(**settings, beta=0.1, remove_unused_columns=False),
        processing_class=tokenizer,
        train_dataset=preference_data(),
    )
    trainer.train()
