# /// script
# requires-python = "==3.11.*"
# dependencies = ["torch==2.13.0", "triton", "cut-cross-entropy==25.1.1"]
# ///
"""cut_cross_entropy 25.1.1: a decoder trained with Apple's function and with the adapter, on a CPU.

Environment: the packages of the header. The release on PyPI has neither `bias` nor `return_lse`, which the adapter
takes from a later commit. Its fourth positional argument is `ignore_index`, and the adapter's is `bias`: use keywords.

Trains one embedding, one layer and a head for 8 steps in float32, with `shift=True`, ignored tokens, and a softcap in
steps 4 to 7. Apple's kernels need a GPU, so the stock run takes its implementation "torch_compile", uncompiled. Exits
with 1 if a loss differs by more than 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import compare
from cut_cross_entropy import linear_cross_entropy as apples
from torch import nn

from liger_chunked.integrations.frameworks.cut_cross_entropy import linear_cross_entropy

V, H = 512, 64


def losses(loss_fn: Callable[..., Any]) -> list[float]:
    torch.manual_seed(0)
    embedding, layer, head = nn.Embedding(V, H), nn.TransformerEncoderLayer(H, 4, 128, 0.0), nn.Linear(H, V, bias=False)
    optimizer = torch.optim.AdamW([*embedding.parameters(), *layer.parameters(), *head.parameters()], lr=3e-3)
    ids = torch.randint(V, (4, 32))
    targets = ids.clone()
    targets[:, :5] = -100
    mask = nn.Transformer.generate_square_subsequent_mask(32)
    found = []
    for step in range(8):
        hidden = layer(embedding(ids).transpose(0, 1), mask).transpose(0, 1)
        softcap = 5.0 if step >= 4 else None
        loss = loss_fn(e=hidden, c=head.weight, targets=targets, shift=True, softcap=softcap, impl="torch_compile")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    torch.compiler.set_stance("force_eager")
    compare("cut-cross-entropy", losses(apples), losses(linear_cross_entropy), 1e-5)
