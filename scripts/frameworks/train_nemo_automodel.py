# /// script
# requires-python = "==3.12.*"
# dependencies = ["torch==2.11.0", "transformers==5.18.0"]
#
# [tool.frameworks]
# no-deps = ["nemo-automodel==0.7.0"]
# ///
"""NeMo-Automodel 0.7.0: training steps with its `calculate_loss`, with its masked cross entropy and with our loss.

Environment: transformers 5.18.0, which NeMo-Automodel pins, torch 2.11.0, and NeMo-Automodel without its other
dependencies. No package is a stub. Its own `FusedLinearCrossEntropy` needs the Triton kernels of `cut_cross_entropy`
and a GPU, so the head beside ours is `MaskedCrossEntropy` on logits. Its recipe was not run: the steps here are those
of the recipe, which calls the model with `logits_to_keep=1` and `output_hidden_states=True` for a loss on hidden
states.

Trains a tiny random Llama (steps 0 to 7) and a Gemma 2 with a softcap (8 to 15) with AdamW, two micro-batches per step,
each divided by the step's number of labelled tokens. Compares the loss of each step, and exits with 1 if one differs by
more than 1e-5. All is float32.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from common import compare, count_calls
from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.loss.utils import calculate_loss

from liger_chunked.integrations.frameworks.nemo_automodel import FusedLinearCrossEntropy

STEPS, VOCAB, BATCH, LENGTH = 8, 512, 4, 24
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def train(config: Any, loss_fn: Any) -> list[float]:
    """Return the loss of each step, from equal random weights."""
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    linear = isinstance(loss_fn, LinearCrossEntropy)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCAB // 8, (2, BATCH, LENGTH + 1), generator=generator)
        labels = ids[..., 1:].masked_fill(torch.rand(2, BATCH, LENGTH, generator=generator) < 0.3, -100)
        tokens = int((labels != -100).sum())
        total = 0.0
        for x, y in zip(ids[..., :-1], labels, strict=True):
            options = {"logits_to_keep": 1, "output_hidden_states": True} if linear else {}
            out = model(input_ids=x, **options)
            hidden = out.hidden_states[-1] if linear else None
            loss = calculate_loss(
                loss_fn, logits=out.logits, labels=y, model=model, hidden_states=hidden, num_label_tokens=tokens
            )
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def main() -> None:
    softcap = 3.0
    llama = transformers.LlamaConfig(**SIZES)
    gemma = transformers.Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=softcap, sliding_window=64)
    stock = train(llama, MaskedCrossEntropy()) + train(gemma, MaskedCrossEntropy())
    calls = count_calls(FusedLinearCrossEntropy, "forward")
    ours = train(llama, FusedLinearCrossEntropy())
    ours += train(gemma, FusedLinearCrossEntropy(logit_softcapping=softcap))
    compare("nemo-automodel", stock, ours, 1e-5, calls)


if __name__ == "__main__":
    main()
