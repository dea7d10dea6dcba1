"""On-policy distillation with TRL: the student writes completions, and the loss is its divergence from a teacher on
them.

python examples/trl_distillation.py [--model PATH] [--teacher PATH] [--steps N]
"""

from __future__ import annotations

from trl import DistillationConfig
from trl_common import prompt_data, setup

from liger_chunked.integrations.trl import LigerDistillationTrainer

if __name__ == "__main__":
    model, tokenizer, settings, teacher = setup()
    trainer = LigerDistillationTrainer(
        model=model,
        teacher_model=teacher,
        args=DistillationConfig(**settings, beta=0.5, max_completion_length=8),
        processing_class=tokenizer,
        train_dataset=prompt_data(),
    )
    trainer.train()
