"""KTO with TRL: single answers, each with a label, on a chunked head.

python examples/trl_kto.py [--model PATH] [--steps N]
"""

from __future__ import annotations

from datasets import Dataset
from toy import sums
from trl import KTOConfig
from trl_common import setup

from liger_chunked.integrations.trl import LigerKTOTrainer

if __name__ == "__main__":
    model, tokenizer, settings, _ = setup()
    labelled = [
        {"prompt": row["prompt"], "completion": row["chosen" if right else "rejected"], "label": right}
        for row in sums()
        for right in (True, False)
    ]
    trainer = LigerKTOTrainer(
        model=model,
        args=KTOConfig(**settings, precompute_ref_log_probs=True),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(labelled),
    )
    trainer.train()
