# /// script
# requires-python = "==3.12.*"
# dependencies = ["torch==2.11.0", "megatron-core==0.19.2"]
# ///
"""Megatron-Core 0.19.2: optimizer steps of a GPTModel, with its head and loss and with our `OutputProcessor`.

Environment: megatron-core with its dependencies, and torch 2.11.0. No package is a stub, and Transformer Engine is not
installed: layers are Megatron's local ones. `torch.cuda.current_device` and the tracker of CUDA's random states are
replaced, because Megatron puts new weights on the current device.

Runs `GPTModel` on two gloo ranks with tensor parallelism, and AdamW. Sequence parallelism needs Apex or Transformer
Engine, for its norm. Compares the mean of the tokens' losses of each step from equal weights (steps 0 to 7 with an own
head, 8 to 15 with tied embeddings), and exits with 1 if one differs by more than 1e-5. All is float32.
"""

from __future__ import annotations

import tempfile
from collections import Counter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import compare, count_calls

RANKS, STEPS, BATCH, LENGTH, VOCAB = 2, 8, 4, 16, 512


def train(tied: bool, ours: bool) -> list[float]:
    """Return the loss of each step, from the same random weights."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from liger_chunked.integrations.megatron import OutputProcessor

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=RANKS,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=tied,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(VOCAB // 8, (BATCH, LENGTH + 1), generator=generator)
        loss_mask = torch.rand(BATCH, LENGTH, generator=generator) < 0.8
        processor = OutputProcessor() if ours else None
        given = {"labels": ids[:, 1:], "loss_mask": loss_mask, "output_processor": processor}
        tokens = model(ids[:, :-1], positions, mask, **given)
        loss = (tokens * loss_mask).sum() / loss_mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def worker(rank: int, folder: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    from liger_chunked.integrations import megatron as adapter

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"
    random.get_cuda_rng_tracker().fork = torch.random.fork_rng
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=dist.FileStore(f"{folder}/store", RANKS))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    calls = count_calls(adapter.OutputProcessor, "__call__")
    stock, ours = ([loss for tied in (False, True) for loss in train(tied, ours)] for ours in (False, True))
    if rank == 0:
        torch.save((stock, ours, dict(calls)), f"{folder}/losses")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder,), RANKS)
        stock, ours, calls = torch.load(f"{folder}/losses")
    compare("megatron-core", stock, ours, 1e-5, Counter(calls))


if __name__ == "__main__":
    main()
