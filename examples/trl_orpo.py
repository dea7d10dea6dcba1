"""ORPO with TRL, on chunks of logits. TRL's own trainer builds them for every token of prompt and response.

python examples/trl_orpo.py [--model PATH] [--steps N]
"""

from __future__ import annotations

from trl_common import preference_data, setup  # before trl.experimental, to silence its notice

from liger_chunked import patch_trl

if __name__ == "__main__":
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    model, tokenizer, settings, _ = setup()
    with patch_trl():
        trainer = ORPOTrainer(
            model=model,
            args=ORPOConfig(**settings, beta=0.1, remove_unused_columns=False),
            processing_class=tokenizer,
            train_dataset=preference_data(),
        )
        trainer.train()
