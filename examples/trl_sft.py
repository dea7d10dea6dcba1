"""SFT with TRL: its trainer and metrics, on a chunked head.

python examples/trl_sft.py [--model PATH] [--steps N]
"""

from __future__ import annotations

from datasets import Dataset
from toy import sums
from trl import SFTConfig
from trl_common import setup

from liger_chunked.integrations.trl import LigerSFTTrainer

if __name__ == "__main__":
    model, tokenizer, settings, _ = setup()
    trainer = LigerSFTTrainer(
        model=model,
        args=SFTConfig(**settings),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "completion": row["chosen"]} for row in sums()]),
        logits_budget=64 * 2**20,  # bytes; None chooses automatically
    )
    trainer.train()
