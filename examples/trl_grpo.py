"""GRPO with TRL: its rollouts, rewards and loss, with log-probabilities and entropy from a chunked head.

python examples/trl_grpo.py [--model PATH] [--steps N]
"""

from __future__ import annotations

from typing import Any

from trl import GRPOConfig
from trl_common import prompt_data, setup

from liger_chunked.integrations.trl import LigerGRPOTrainer


def digits(completions: list[str], **_: Any) -> list[float]:
    """Return the share of digits in each answer."""
    return [sum(character.isdigit() for character in text) / max(1, len(text)) for text in completions]


if __name__ == "__main__":
    model, tokenizer, settings, _ = setup()
    trainer = LigerGRPOTrainer(
        model=model,
        args=GRPOConfig(**settings, num_generations=4, max_completion_length=8),
        reward_funcs=digits,
        processing_class=tokenizer,
        train_dataset=prompt_data(),
    )
    trainer.train()
