# /// script
# requires-python = "==3.12.*"
# dependencies = ["torch==2.11.0", "transformers==5.16.1", "megatron-core==0.19.2", "skyrl==0.4.0"]
# ///
"""SkyRL 0.4.0: policy-gradient steps of its fused path on Megatron-Core, with its function and with ours.

Environment: SkyRL with its dependencies, transformers 5.16.1, the newest that it allows, torch 2.11.0 and megatron-core
0.19.2. No package is a stub. Its worker runs under Ray and starts NCCL: the steps here are those of its Megatron
wrapper with `fused_lm_head_logprob`: `call_model_with_fused_lm_head`, then `from_parallel_hidden_to_logprobs` with the
backend "torch" and a temperature, a clipped policy loss, SGD.

Runs a tiny `GPTModel` on two gloo ranks with tensor parallelism. Compares the loss of each step from equal weights (0
to 7 an own head, 8 to 15 tied embeddings), and exits with 1 if one differs by more than 1e-5. All is float32.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import compare, count_calls
from megatron_common import LENGTH, VOCAB, build, initialize, inputs

RANKS, STEPS, BATCH = 2, 8, 4


def train(tied: bool) -> list[float]:
    """Return the loss of each step, from equal random weights."""
    from skyrl.backends.skyrl_train.distributed.megatron.fused_lm_head import (
        call_model_with_fused_lm_head,
        fused_lm_head_output_processor,
    )
    from skyrl.backends.skyrl_train.distributed.megatron.model_utils import from_parallel_hidden_to_logprobs

    model = build(RANKS, tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = VOCAB // RANKS
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCAB // 8, (BATCH, LENGTH), generator=generator)
        old = -math.log(VOCAB) + 0.1 * torch.randn(BATCH, LENGTH - 1, generator=generator)
        advantages = 1.0 + torch.randn(BATCH, 1, generator=generator)
        context: dict[str, torch.Tensor] = {}
        hidden = call_model_with_fused_lm_head(
            model,
            ids,
            *inputs(BATCH),
            output_processor=fused_lm_head_output_processor,
            output_processor_context=context,
        )
        logps = from_parallel_hidden_to_logprobs(
            hidden,
            context["lm_head_weight"],
            ids,
            vocab_start_index=dist.get_rank() * rows,
            vocab_end_index=(dist.get_rank() + 1) * rows,
            tp_group=dist.group.WORLD,
            inference_only=False,
            cp_group=None,
            chunk_size=8,
            temperature=0.7,
            fused_backend="torch",
        )
        ratio = (logps - old).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def worker(rank: int, folder: str) -> None:
    initialize(rank, RANKS, folder)
    from skyrl.backends.skyrl_train.distributed.megatron import model_utils

    from liger_chunked.integrations.frameworks.skyrl import FusedLinearChunkedDistributedLogprob

    stock = train(tied=False) + train(tied=True)
    calls = count_calls(FusedLinearChunkedDistributedLogprob, "apply")
    FusedLinearChunkedDistributedLogprob.apply = staticmethod(FusedLinearChunkedDistributedLogprob.apply)
    model_utils.FusedLinearChunkedDistributedLogprob = FusedLinearChunkedDistributedLogprob
    ours = train(tied=False) + train(tied=True)
    if rank == 0:
        torch.save((stock, ours, dict(calls)), f"{folder}/losses")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder,), RANKS)
        stock, ours, calls = torch.load(f"{folder}/losses")
    compare("skyrl", stock, ours, 1e-5, Counter(calls))


if __name__ == "__main__":
    main()
