"""A plain torch loop: gradient accumulation, autocast and clipping, on chunks of logits.

python examples/plain_loop.py [--model PATH] [--steps N] [--outside]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from toy import collate, encode, load_model, load_tokenizer, on_gpu, parser, sums

from liger_chunked import LigerFusedLinearCrossEntropyLoss
from liger_chunked.integrations.transformers import HeadInput, attach_head, logit_options
from liger_chunked.types import Head

ACCUMULATION, BATCH_SIZE = 2, 4
Batch = dict[str, Tensor]


def outside(model: Any, batch: Batch, num_items: Tensor, loss_fn: LigerFusedLinearCrossEntropyLoss) -> Tensor:
    """Compute the loss outside of the model, from its hidden states and the head's weight.

    This works on one device if nothing wraps the model.
    """
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    # A position predicts the next token.
    return loss_fn(head.weight, hidden[:, :-1], batch["labels"][:, 1:], head.bias, num_items=num_items)


def inside(model: Any, batch: Batch, num_items: Tensor, loss_fn: LigerFusedLinearCrossEntropyLoss) -> Tensor:
    """Compute the same loss inside the model, where the head would run. Works under DDP, FSDP, ZeRO and PEFT too.

    Wrappers hook `model.forward`. Outside of it, FSDP's and ZeRO-3's `lm_head.weight` is a shard, and DDP does not wait
    for gradients. So call the wrapped model, never its parts. Any other loss works the same way.
    """

    def head_fn(head: Head, input: HeadInput) -> Tensor:
        return loss_fn(head.weight, input.hidden_states, input.target, head.bias, num_items=num_items)

    return model(**batch, use_cache=False, head_fn=head_fn)


def batches(tokenizer: Any, device: torch.device) -> Iterator[Batch]:
    rows = cycle([encode(tokenizer, row["prompt"], row["chosen"]) for row in sums()])
    while True:
        yield {name: x.to(device) for name, x in collate(islice(rows, BATCH_SIZE)).items()}


if __name__ == "__main__":
    arguments = parser()
    arguments.add_argument("--outside", action="store_true", help="head and loss outside of model.forward")
    options = arguments.parse_args()
    gpu = on_gpu(options)
    device = torch.device("cuda" if gpu else "cpu")
    model = load_model(options.model, torch.float32).to(device).train()
    loss_fn = LigerFusedLinearCrossEntropyLoss(**asdict(logit_options(model)))
    # This adds `head_fn` to the model, before or after DDP(model), fully_shard(model) or get_peft_model(model).
    attach_head(model)
    loss_of = outside if options.outside else inside
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if options.model else 3e-3)
    data = batches(load_tokenizer(options.model), device)
    losses = []
    for step in range(options.steps):
        accumulated = list(islice(data, ACCUMULATION))
        # Every target counts the same, in any of the batches. With several ranks, use the sum over all ranks, and
        # multiply the loss by their number, because DDP and FSDP average gradients.
        num_items = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in accumulated]).sum()
        total = torch.zeros((), device=device)
        for batch in accumulated:
            with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
                loss = loss_of(model, batch, num_items, loss_fn)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
        print(f"step {step + 1}: loss {losses[-1]:.4f}")
