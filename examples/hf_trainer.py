"""Train with HF `Trainer` on chunks of logits, in one of two ways: with a patched model, or with your own loss.

python examples/hf_trainer.py [--model PATH] [--steps N] [--own-loss]

`Trainer(compute_loss_func=...)` works with a patched model too: its function gets stand-ins for the logits, and a cross
entropy of these is fused.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from toy import collate, encode, load_model, load_tokenizer, on_gpu, parser, sums
from transformers import Trainer, TrainingArguments

from liger_chunked import LigerFusedLinearCrossEntropyLoss, apply_liger_kernel
from liger_chunked.integrations.transformers import HeadFn, HeadInput, attach_head
from liger_chunked.types import Head


class HeadTrainer(Trainer):
    """A Trainer with a `head_fn`, which replaces head and loss inside `model.forward`, also in evaluation."""

    def __init__(self, *args: Any, head_fn: HeadFn, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head_fn = head_fn
        attach_head(self.model)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # Trainer adds num_items_in_batch, reads "loss" from the output, and multiplies it by the number of ranks.
        return super().compute_loss(model, {**inputs, "head_fn": self.head_fn}, *args, **kwargs)


def z_loss(head: Head, input: HeadInput) -> dict[str, Tensor]:
    """Return cross entropy plus z-loss.

    Trainer adds up the losses of accumulated batches, so each is divided by the number of targets in all of them. If
    your loss is a mean over one batch, set `trainer.model_accepts_loss_kwargs = False`.
    """
    loss = LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-4, **asdict(input.options))
    num_items = input.num_items_in_batch
    return {"loss": loss(head.weight, input.hidden_states, input.target, head.bias, num_items=num_items)}


if __name__ == "__main__":
    arguments = parser()
    arguments.add_argument("--own-loss", action="store_true", help="the second way")
    options = arguments.parse_args()
    gpu = on_gpu(options)
    model = load_model(options.model, torch.bfloat16 if gpu else torch.float32)
    tokenizer = load_tokenizer(options.model)
    rows = [encode(tokenizer, row["prompt"], row["chosen"]) for row in sums()]
    shared = {
        "args": TrainingArguments(
            output_dir=tempfile.mkdtemp(prefix="liger-hf-"),
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-5 if options.model else 3e-3,
            logging_steps=max(1, options.steps // 5),
            eval_strategy="steps",
            save_strategy="no",
            use_cpu=not gpu,
            bf16=gpu,
            dataloader_pin_memory=gpu,
            report_to="none",
            disable_tqdm=True,
        ),
        "data_collator": collate,
        "train_dataset": rows[:48],
        "eval_dataset": rows[48:],
    }
    if options.own_loss:
        trainer = HeadTrainer(model, head_fn=z_loss, **shared)
    else:
        print(apply_liger_kernel(model))
        trainer = Trainer(model, **shared)
    trainer.train()
