"""DPO in PyTorch Lightning: the loss runs inside the model's forward, from `training_step`.

python examples/lightning_module.py [--model PATH] [--steps N]

It works the same with `import lightning as L` instead of `pytorch_lightning`.
"""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from toy import collate, encode, load_model, load_tokenizer, on_gpu, parser, sums

from liger_chunked import LigerFusedLinearDPOLoss, PreferenceMetrics, linear_token_stats
from liger_chunked.integrations.transformers import HeadInput, attach_head, logit_options
from liger_chunked.types import Head


def sequence_logps(head: Head, input: HeadInput) -> Tensor:
    """Return the log-probability of each sequence's target: (B,)."""
    options = asdict(input.options)
    return linear_token_stats(head.weight, input.hidden_states, input.target, head.bias, **options).logps.sum(-1)


class DPO(pl.LightningModule):
    """`batch` has chosen sequences, then as many rejected ones, with `labels` of -100 on prompts and padding."""

    def __init__(self, model: Any, *, beta: float, learning_rate: float) -> None:
        super().__init__()
        self.model = model
        self.reference = copy.deepcopy(model).eval().requires_grad_(False)
        self.learning_rate = learning_rate
        self.loss = LigerFusedLinearDPOLoss(beta=beta, use_ref_model=True, **asdict(logit_options(model)))
        attach_head(self.model)
        attach_head(self.reference)

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        with torch.no_grad():
            ref_logps = self.reference(**batch, head_fn=sequence_logps)

        def dpo(head: Head, input: HeadInput) -> tuple[Tensor, PreferenceMetrics]:
            return self.loss(head.weight, input.hidden_states, input.target, head.bias, ref_logps=ref_logps)

        loss, metrics = self.model(**batch, head_fn=dpo)
        margin = (metrics.chosen_rewards - metrics.rejected_rewards).mean()
        self.log_dict({"loss": loss.detach(), "margin": margin}, prog_bar=True, batch_size=len(ref_logps) // 2)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate)


if __name__ == "__main__":
    options = parser().parse_args()
    gpu = on_gpu(options)
    model, tokenizer = load_model(options.model, torch.float32), load_tokenizer(options.model)

    def pairs(rows: list[dict[str, str]]) -> dict[str, Tensor]:
        return collate(encode(tokenizer, row["prompt"], row[kind]) for kind in ("chosen", "rejected") for row in rows)

    trainer = pl.Trainer(
        max_steps=options.steps,
        accelerator="gpu" if gpu else "cpu",
        devices=1,
        precision="bf16-mixed" if gpu else "32-true",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    module = DPO(model, beta=0.1, learning_rate=1e-6 if options.model else 1e-3)
    trainer.fit(module, DataLoader(sums(), batch_size=4, collate_fn=pairs))
    print({name: round(x.item(), 4) for name, x in trainer.callback_metrics.items()})
